"""From one checked kernel entry of capabilities.json to a `KernelSpec`: which field fills which."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from layerzero.errors import ConfigurationError
from layerzero.model.device import canonical_cpu_feature
from layerzero.model.enums import Layout, Platform
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.registry.fields import FLAG_FEATURES
from layerzero.registry.kinds import fail

# Fields that mean the same in the file and in KernelSpec; those of the second group are empty when left out.
_SAME = (
    "kernel_id", "function", "dtypes", "priority", "min_sm", "max_sm", "mixed_dtypes", "stride_last_dim", "contiguous",
    "aligned_strides", "pointer_alignment", "square", "graph_safe", "traceable", "deterministic",
    "batch_invariant", "tp_invariant", "jit", "workspace", "predicate", "doc", "weight_layout", "packer", "compiler",
)  # fmt: skip
_LEFT_OUT = ("instruction_families", "layouts", "granularities", "adapt", "guards", "fuses", "jit_key")
_pick = itemgetter(*_SAME)


def kernel_spec(
    entry: dict[str, Any],
    backend: str,
    op: str,
    platforms: frozenset[Platform] | None,
    where: str,
    version: str = "0",
) -> KernelSpec:
    """The KernelSpec of one checked entry; raises CapabilitiesError where fields contradict each other."""
    kernel_id: str = entry["kernel_id"]
    if kernel_id.split(".")[0] != backend:
        raise fail(
            f"{where}.kernel_id", f"{kernel_id[:60]!r} does not begin with {backend!r}",
            code="KERNEL_ID_INVALID", value=kernel_id, limit=f"{backend}.{op}.<variant>",
        )  # fmt: skip
    chosen = entry["platforms"] or platforms
    if not chosen:
        text = "missing; neither the kernel nor the file names platforms"
        raise fail(f"{where}.platforms", text, code="SCHEMA_FIELD_MISSING", value="platforms")
    if entry["min_sm"] is not None and entry["max_sm"] is not None and entry["min_sm"] > entry["max_sm"]:
        text = f"{entry['min_sm']} exceeds max_sm {entry['max_sm']}"
        raise fail(f"{where}.min_sm", text, value=entry["min_sm"], limit=entry["max_sm"])
    paged = entry["paged"] if isinstance(entry["paged"], dict) else {}
    limits = tuple(_limits(entry, paged, where).items())
    # Only what the entry says; a kernel has a tenth of all fields, and a first call builds hundreds of kernels.
    given: dict[str, Any] = dict(zip(_SAME, _pick(entry), strict=True))
    given |= {name: entry[name] for name in _LEFT_OUT if entry[name]}
    if entry["head_dim"] and entry["head_dim"]["pairs"]:
        given["head_dim_pairs"] = entry["head_dim"]["pairs"]
    if entry["priority_below"]:
        found = entry["priority_below"].items()
        given["priority_below"] = tuple(sorted((name, (item["size"], item["priority"])) for name, item in found))
    if entry["generations"]:
        given["supported_generations"] = entry["generations"]
    if entry["cpu_features"]:
        given["cpu_features"] = frozenset(canonical_cpu_feature(word) for word in entry["cpu_features"])
    if paged.get("layouts"):
        given["kv_cache_layouts"] = frozenset(Layout(word) for word in paged["layouts"])
    if paged.get("index_dtypes"):
        given["index_dtypes"] = paged["index_dtypes"]
    if entry["quant_formats"]:
        given["quant_formats"] = frozenset(item.value for item in entry["quant_formats"])
    if entry["error_bounds"]:
        given["error_bounds"] = tuple(sorted(entry["error_bounds"].items()))
    try:
        return KernelSpec(
            op=op,
            backend=backend,
            version=version,
            platforms=chosen,
            features=_features(entry),
            limits=limits,
            grid_layout=entry["grid"],
            **given,
        )
    except ConfigurationError as error:
        cause = error.reasons[0]
        name = "kernel_id" if error.code == "KERNEL_ID_INVALID" else str(cause.value).replace("grid_layout", "grid")
        key = f"{where}.{name}" if name in entry else where
        text = error.body.replace("grid_layout", "grid")
        raise fail(key, text, code=error.code, value=cause.value, limit=cause.limit) from None


def _features(entry: Mapping[str, Any]) -> frozenset[str]:
    found = [name for name in FLAG_FEATURES if entry[name]]
    found += entry["features"] or ()
    if entry["attn_mask"]:
        found += [f"mask_{kind}" for kind in entry["attn_mask"]]
    if entry["causal"]:
        found += [f"causal_{side}" for side in entry["causal"]]
    if entry["paged"] is not False:
        found.append("paged")
    return frozenset(found)


def _limits(entry: Mapping[str, Any], paged: Mapping[str, Any], where: str) -> dict[str, Limit]:
    found: dict[str, Limit] = {}

    def put(name: str, key: str, **bounds: Any) -> None:
        if name in found:
            raise fail(f"{where}.{key}", f"{name} is limited in two places", value=name, limit="one")
        try:
            found[name] = Limit(**bounds)
        except ConfigurationError as error:
            raise fail(
                f"{where}.{key}", error.body, value=error.reasons[0].value, limit=error.reasons[0].limit
            ) from None

    if entry["head_dim"] is not None:
        put("head_dim", "head_dim", **{k: v for k, v in entry["head_dim"].items() if k != "pairs"})
    for name, bounds in entry["limits"].items():
        put(name, f"limits.{name}", **bounds)
    if entry["max_seq_len"] is not None:
        put("seq_len_q", "max_seq_len", max=entry["max_seq_len"])
        put("seq_len_k", "max_seq_len", max=entry["max_seq_len"])
    if paged.get("page_sizes"):
        put("page_size", "paged.page_sizes", one_of=paged["page_sizes"])
    return found
