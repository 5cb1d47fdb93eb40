"""LayerZero inside vLLM; `plugin.register` is what vLLM runs, `lz vllm explain` says what was chosen."""
