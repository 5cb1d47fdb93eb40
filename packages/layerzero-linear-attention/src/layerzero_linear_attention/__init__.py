"""Linear attention for LayerZero: the delta rules, the scan of Mamba-2 and the convolution before them."""
