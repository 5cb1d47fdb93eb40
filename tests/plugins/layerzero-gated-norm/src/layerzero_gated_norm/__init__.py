"""`lz.ops.rms_norm_gated`: the norm of Mamba and Qwen3-Next, whose result is gated."""
