"""`lz.plan_block`: the kernels of a whole block of ops, chosen together."""

from layerzero_tune.blocks.block import Block, Ref, Step, decoder_layer

__all__ = ["Block", "Ref", "Step", "decoder_layer"]
