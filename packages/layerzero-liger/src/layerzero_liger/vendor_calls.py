"""Which functions of Liger the adapters call; `tools/signatures.py` records their signatures."""

CALLS = (
    "liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction.forward",
    "liger_kernel.ops.cross_entropy.cross_entropy_forward",
    "liger_kernel.ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction.forward",
    "liger_kernel.ops.fused_add_rms_norm.fused_add_rms_norm_forward",
    "liger_kernel.ops.geglu.geglu_backward",
    "liger_kernel.ops.geglu.geglu_forward",
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction.forward",
    "liger_kernel.ops.layer_norm.layer_norm_forward",
    "liger_kernel.ops.mlp.LigerMLPFunction.backward",
    "liger_kernel.ops.mlp.LigerMLPFunction.forward",
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction.forward",
    "liger_kernel.ops.rms_norm.rms_norm_forward",
    "liger_kernel.ops.rope.rope_backward",
    "liger_kernel.ops.rope.rope_forward",
    "liger_kernel.ops.swiglu.LigerFusedGateUpSiLUMulFunction.forward",
    "liger_kernel.ops.swiglu.swiglu_fused_gate_up_forward",
)
