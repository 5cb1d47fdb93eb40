"""LayerZero in other libraries and schemes of running a model: what stands on the public ops."""
