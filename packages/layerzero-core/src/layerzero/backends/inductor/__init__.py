"""Norms, rotary embedding and gated activations compiled by TorchInductor, ahead of the requests."""
