"""What the adapters call, by dotted name: the recorded signatures of the real library are held against these."""

CALLS = (
    "xformers.ops.fmha.memory_efficient_attention",
    "xformers.ops.fmha.memory_efficient_attention_forward",
    "xformers.ops.fmha.memory_efficient_attention_forward_requires_grad",
    "xformers.ops.fmha.attn_bias.LowerTriangularMask",
    "xformers.ops.fmha.attn_bias.LowerTriangularFromBottomRightMask",
    "xformers.ops.fmha.attn_bias.LowerTriangularFromBottomRightLocalAttentionMask",
    "xformers.ops.fmha.attn_bias.LocalAttentionFromBottomRightMask",
    "xformers.ops.fmha.flash.FwOp",
    "xformers.ops.fmha.flash.BwOp",
    "xformers.ops.fmha.cutlass.FwOp",
    "xformers.ops.fmha.cutlass.BwOp",
    "xformers.ops.fmha.triton_splitk.FwOp",
)
