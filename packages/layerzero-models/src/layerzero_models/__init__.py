"""transformers and diffusers models, tensor parallelism and speculative decoding on LayerZero."""
