"""Every call the adapters make fits what the real library takes, as recorded where it runs."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("signatures").joinpath("calls.txt").read_text(encoding="utf-8").split()
RECORDED = json.loads((Path(__file__).parent / "signatures" / "liger_kernel.json").read_text(encoding="utf-8"))

# The arguments each adapter gives: positional ones by count, others by name. `ctx` comes from autograd.
MADE = {
    "liger_kernel.ops.cross_entropy.LigerCrossEntropyFunction.forward": (10, ()),
    "liger_kernel.ops.cross_entropy.cross_entropy_forward": (9, ()),
    "liger_kernel.ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction.forward": (8, ()),
    "liger_kernel.ops.fused_add_rms_norm.fused_add_rms_norm_forward": (6, ()),
    "liger_kernel.ops.fused_linear_cross_entropy.fused_linear_cross_entropy_forward": (
        3, ("bias", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "accum_dtype",
            "chunk_mem_const"),
    ),
    "liger_kernel.ops.geglu.geglu_backward": (3, ()),
    "liger_kernel.ops.geglu.geglu_forward": (2, ()),
    "liger_kernel.ops.layer_norm.LigerLayerNormFunction.forward": (5, ()),
    "liger_kernel.ops.layer_norm.layer_norm_forward": (4, ()),
    "liger_kernel.ops.mlp.LigerMLPFunction.backward": (2, ()),
    "liger_kernel.ops.mlp.LigerMLPFunction.forward": (5, ()),
    "liger_kernel.ops.rms_norm.LigerRMSNormFunction.forward": (8, ()),
    "liger_kernel.ops.rms_norm.rms_norm_forward": (6, ()),
    "liger_kernel.ops.rope.rope_backward": (4, ("rotary_dim",)),
    "liger_kernel.ops.rope.rope_forward": (4, ("rotary_dim",)),
    "liger_kernel.ops.swiglu.LigerFusedGateUpSiLUMulFunction.forward": (3, ()),
    "liger_kernel.ops.swiglu.swiglu_fused_gate_up_forward": (1, ()),
}  # fmt: skip


def test_every_named_call_was_recorded():
    assert set(RECORDED["calls"]) == set(CALLS) == set(MADE)
    assert RECORDED["absent"] == {}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_binds(name):
    recorded = inspect.Signature([
        inspect.Parameter(
            item["name"],
            inspect._ParameterKind[item["kind"]],
            default=inspect.Parameter.empty if item["default"] is None else item["default"],
        )
        for item in RECORDED["calls"][name]
    ])  # fmt: skip
    count, names = MADE[name]
    recorded.bind(*range(count), **dict.fromkeys(names, 0))


def test_fewer_rows_than_a_tile_has_try_a_quarter_of_ligers_tiles():
    """Liger times 32 configurations at the first call of each process."""
    from layerzero_liger import mlp

    for name in ("_swiglu_kernel_forward", "_swiglu_kernel_forward_inference"):
        tuner = getattr(mlp._library, name)
        few, many = (tuner.early_config_prune(tuner.configs, {"S": rows}) for rows in (63, 64))
        assert 4 * len(few) == len(many) == len(tuner.configs)
        assert {(item.kwargs["BLOCK_M"], item.kwargs["GROUP_SIZE_M"]) for item in few} == {(64, 1)}
        assert tuner.early_config_prune(tuner.configs, {}, S=1) == few
