"""The public ops. Importing this module registers every built-in op with the runtime."""

from layerzero.ops.attention import attention
from layerzero.ops.embedding import embedding
from layerzero.ops.linear import linear
from layerzero.ops.mlp import gelu_and_mul, relu_and_mul, silu_and_mul
from layerzero.ops.norm import add_rms_norm, layer_norm, rms_norm
from layerzero.ops.paged import paged_attention, paged_batch
from layerzero.ops.positional import alibi_slopes, rope
from layerzero.ops.quantize import dequantize, quantize
from layerzero.ops.sampling import sample, sample_topk, sample_topp

__all__ = [
    "add_rms_norm",
    "alibi_slopes",
    "attention",
    "dequantize",
    "embedding",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "paged_attention",
    "paged_batch",
    "quantize",
    "relu_and_mul",
    "rms_norm",
    "rope",
    "sample",
    "sample_topk",
    "sample_topp",
    "silu_and_mul",
]
