"""LayerZero's own kernels written in Triton, and the registration of a user's own (`layerzero_triton.custom`)."""
