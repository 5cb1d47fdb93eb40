"""torch's scaled-dot-product-attention kernels, called one by one."""
