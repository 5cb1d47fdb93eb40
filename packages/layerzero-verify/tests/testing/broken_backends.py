"""Backends that are wrong in one way each, and the kit test that has to notice. Used by test_kit_meta.py.

Each is the right plugin of `lz plugin new` with one change in its kernels, its hooks or its descriptor.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero_verify.scaffold import write_plugin

__all__ = ["BROKEN", "Broken", "build"]


@dataclass(frozen=True)
class Broken:
    """One mistake: text to replace in a file (or a change of the descriptor), and who catches it."""

    caught_by: str
    file: str = "kernels.py"
    old: str = ""
    new: str = ""
    descriptor: Callable[[dict[str, Any]], Any] | None = None


def _kernel(document: dict[str, Any], op: str) -> dict[str, Any]:
    found: dict[str, Any] = document["ops"][op][0]
    return found


_SCALE = "factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale"
_DEAD = "    dead = (scores == -math.inf).all(dim=-1, keepdim=True)\n"

BROKEN: dict[str, Broken] = {
    "ignores_scale": Broken("test_scale_is_applied", old=_SCALE, new="factor = 1.0 / math.sqrt(query.shape[-1])"),
    "wrong_default_scale": Broken(
        "test_result_matches_the_reference",
        old=_SCALE,
        new="factor = 1.0 / query.shape[-1] if scale is None else scale",
    ),
    "wrong_causal_alignment": Broken(
        "test_causal_top_left_is_as_declared",
        old="shift = 0 if is_causal is True else seq_k - seq_q",
        new="shift = seq_k - seq_q",
    ),
    "wrong_bottom_right": Broken(
        "test_causal_bottom_right_is_as_declared",
        old="shift = 0 if is_causal is True else seq_k - seq_q",
        new="shift = 0",
    ),
    "ignores_mask": Broken(
        "test_bool_mask_is_honoured", old="if attn_mask is not None:", new="if attn_mask is not None and 0:"
    ),
    "inverts_mask": Broken("test_bool_mask_is_honoured", old="~attn_mask", new="attn_mask"),
    "nan_on_dead_rows": Broken(
        "test_fully_masked_row_gives_zeros",
        old=_DEAD,
        new="    dead = torch.zeros_like(scores[..., :1], dtype=torch.bool)\n",
    ),
    "mutates_input": Broken(
        "test_inputs_are_not_changed", old="    wide = x if", new="    x.mul_(1.5)\n    wide = x if"
    ),
    "wrong_gqa_mapping": Broken(
        "test_gqa_maps_query_heads_to_their_kv_head",
        old=".repeat_interleave(groups, dim=1)",
        new=".repeat(1, groups, 1, 1)",
    ),
    "wrong_lse_base": Broken(
        "test_lse_is_the_natural_logarithm",
        old="torch.logsumexp(scores, dim=-1)",
        new="(torch.logsumexp(scores, dim=-1) / math.log(2))",
    ),
    "lies_about_dtype": Broken(
        "test_result_matches_the_reference",
        old="    wide = x if",
        new="    if x.dtype is torch.bfloat16:\n        raise RuntimeError('no bf16')\n    wide = x if",
    ),
    "widens_the_result": Broken(
        "test_result_has_the_dtype_and_shape_of_the_op", old="return out.to(x.dtype)", new="return out.float()"
    ),
    "not_deterministic": Broken(
        "test_same_inputs_give_the_same_bits",
        old="    return out.to(x.dtype)",
        new="    return (out * (1 + 1e-6 * torch.rand(out.shape))).to(x.dtype)",
    ),
    "sums_by_the_batch": Broken(
        "test_a_row_keeps_its_bits_in_any_batch",
        old="torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)",
        new="torch.rsqrt((wide.double() if len(wide) > 8 else wide).square().mean(-1, True).to(wide.dtype) + eps)",
        descriptor=lambda document: _kernel(document, "rms_norm").update(batch_invariant=True),
    ),
    "leaves_large_batches_to_others": Broken(
        "test_a_row_keeps_its_bits_in_any_batch",
        descriptor=lambda document: _kernel(document, "rms_norm").update(
            batch_invariant=True, limits={"rows": {"max": 8}}
        ),
    ),
    "no_gradient": Broken(
        "test_gradients_match_the_reference", old="    wide = x if", new="    x = x.detach()\n    wide = x if"
    ),
    "wrong_gradient": Broken(
        "test_gradients_match_the_reference", old="torch.rsqrt(wide.square()", new="torch.rsqrt(wide.detach().square()"
    ),
    "eps_outside_the_root": Broken(
        "test_eps_stands_inside_the_root",
        old="torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)",
        new="1 / (wide.square().mean(dim=-1, keepdim=True).sqrt() + eps)",
    ),
    "wrong_head_dim_limit": Broken(
        "test_sizes_hold_up_to_the_declared_limits",
        old="    groups = query",
        new="    if query.shape[-1] > 256:\n        raise RuntimeError('head_dim up to 256')\n    groups = query",
    ),
    "assumes_contiguous": Broken(
        "test_strided_inputs_are_understood",
        old="    wide = x if",
        new="    x = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())\n    wide = x if",
    ),
    "not_thread_safe": Broken(
        "test_kernel_is_thread_safe",
        old="    wide = x if",
        new="    import time\n    global _last\n    _last = x\n    time.sleep(0.01)\n    x = _last\n    wide = x if",
    ),
    "imports_vendor_at_registration": Broken(
        "test_registration_imports_no_vendor",
        "plugin.py",
        old="    registrar.backend(CAPABILITIES)",
        new="    import colorsys\n    registrar.backend(CAPABILITIES)",
        descriptor=lambda document: document.update(vendor={"dist": "pluggy", "import": "colorsys"}),
    ),
    "unknown_hook": Broken(
        "test_hooks_are_known",
        "plugin.py",
        old="@hookimpl\ndef layerzero_health",
        new="@hookimpl\ndef layerzero_healthy",
    ),
    "health_always_fails": Broken("test_health_self_test_passes", "plugin.py", old="error < 1e-5", new="error < -1"),
    "raises_at_registration": Broken(
        "test_registration_succeeds",
        "plugin.py",
        old="    registrar.backend(CAPABILITIES)",
        new="    raise OSError('disk full')",
    ),
    "raises_at_import": Broken(
        "test_entry_point_loads", "plugin.py", old="CAPABILITIES =", new="1 / 0\nCAPABILITIES ="
    ),
    "status_names_a_foreign_backend": Broken(
        "test_capabilities_hook_answers_for_this_device",
        "plugin.py",
        old="    return vendor_status(CAPABILITIES, device)",
        new="    return BackendStatus('somebody_else', True)",
    ),
    "bad_kernel_id": Broken(
        "test_capabilities_are_valid",
        descriptor=lambda document: _kernel(document, "rms_norm").update(kernel_id="fast_rms_norm"),
    ),
    "unknown_field": Broken(
        "test_capabilities_are_valid", descriptor=lambda document: _kernel(document, "rms_norm").update(backwards=True)
    ),
    "missing_adapter": Broken(
        "test_adapter_can_be_imported",
        descriptor=lambda document: _kernel(document, "rms_norm").update(
            function="layerzero_missing_adapter.kernels:x"
        ),
    ),
    "declares_what_it_lacks": Broken(
        "test_window_is_honoured", descriptor=lambda document: _kernel(document, "attention").update(window=True)
    ),
    "stale_packed_weight": Broken(
        "test_a_changed_weight_is_seen",
        old="def rms_norm(",
        new="_packed = {}\n\n\ndef linear(x, weight, bias, activation):\n"
        "    return x @ _packed.setdefault(weight.data_ptr(), weight.t().clone())\n\n\ndef rms_norm(",
        descriptor=lambda document: document["ops"].update(
            linear=[
                {
                    "kernel_id": "stale_packed_weight.linear.packed",
                    "dtypes": ["float32"],
                    "function": "layerzero_stale_packed_weight.kernels:linear",
                }
            ]
        ),
    ),
    "chunks_as_plain_causal": Broken(
        "test_chunks_are_attended_by_themselves",
        old="    if attn_mask is not None:\n",
        new="    if hasattr(attn_mask, 'size') and not isinstance(attn_mask, Tensor):\n"
        "        attn_mask, is_causal = None, 'bottom_right'\n"
        "    if attn_mask is not None:\n",
        descriptor=lambda document: _kernel(document, "attention").update(features=["chunk_mask"]),
    ),
    "one_size_for_all_blocks": Broken(
        "test_block_mask_is_honoured",
        old="    if attn_mask is not None:\n",
        new="    if hasattr(attn_mask, 'blocks'):\n"
        "        attn_mask = torch.nn.functional.interpolate(\n"
        "            attn_mask.blocks.double(), scores.shape[-2:]) > 0\n"  # stretches where the last block is cut off
        "    if attn_mask is not None:\n",
        descriptor=lambda document: _kernel(document, "attention").update(features=["block_mask"]),
    ),
    "scales_after_masking": Broken(
        "test_scale_is_applied",
        old="    # A row that may attend nothing",
        new="    scores = torch.where(scores == -math.inf, scores * factor, scores)\n"
        "    # A row that may attend nothing",
    ),
    "sequences_see_each_other": Broken(
        "test_result_matches_the_reference",
        old="def rms_norm(",
        new="def varlen_attention(query, key, value, *rest):\n"
        "    parts = (t.transpose(0, 1)[None] for t in (query, key, value))\n"
        "    return attention(*parts, None, 0.0, False, rest[5], None, None, None, False)[0].transpose(0, 1)\n\n\n"
        "def rms_norm(",
        descriptor=lambda document: document["ops"].update(
            varlen_attention=[
                {
                    "kernel_id": "sequences_see_each_other.varlen_attention.packed",
                    "dtypes": ["float32"],
                    "function": "layerzero_sequences_see_each_other.kernels:varlen_attention",
                    "features": ["gqa"],
                }
            ]
        ),
    ),
    "quantizes_worse_than_it_says": Broken(
        "test_quantized_values_match_the_reference",
        # int8 is off by half a step at most, 1/254 of the largest value: the first says so, the second promises more.
        descriptor=lambda document: document["ops"].update(
            quantize=[
                {
                    "kernel_id": f"quantizes_worse_than_it_says.quantize.{name}",
                    "dtypes": ["float32"],
                    "function": "layerzero.backends.reference.quantize:quantize",
                    "quant_formats": ["int8"],
                    "granularities": ["tensor", "channel"],
                    "error_bounds": {"int8": bound},
                }
                for name, bound in (("a_true_bound", 0.00394), ("too_good", 0.002))
            ]
        ),
    ),
    "two_layouts": Broken(
        "test_attention_kernel_names_one_layout",
        descriptor=lambda document: _kernel(document, "attention").update(layouts=["BHSD", "BSHD"]),
    ),
}


def build(name: str, folder: Path) -> Path:
    """Write the broken backend under `folder` and return its package folder."""
    broken = BROKEN[name]
    target = write_plugin(name, folder)
    package = target / "src" / f"layerzero_{name}"
    if broken.old:
        file = package / broken.file
        text = file.read_text(encoding="utf-8")
        assert broken.old in text, f"{name}: the template no longer holds {broken.old!r}"
        file.write_text(text.replace(broken.old, broken.new), encoding="utf-8")
    if broken.descriptor is not None:
        file = package / "capabilities.json"
        document = json.loads(file.read_text(encoding="utf-8"))
        broken.descriptor(document)
        file.write_text(json.dumps(document), encoding="utf-8")
    return target
