"""A kernel as data: what it computes, where it runs, and what it asks of its inputs.

`KernelSpec.check(ctx)` is the whole of the static filter: it compares declared constraints with a
context and returns every reason against the kernel, never just the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from layerzero.errors import ConfigurationError
from layerzero.json_form import Plain
from layerzero.model.config import FrozenMap
from layerzero.model.context import Context
from layerzero.model.device import DEFAULT_GENERATIONS, DeviceSpec, GenerationMap
from layerzero.model.enums import GPUGeneration, InstructionFamily, Layout, Platform
from layerzero.model.formula import Formula
from layerzero.reasons import Reason, ReasonCode, reason

_ID = re.compile(r"^[a-z0-9_\-]+\.[a-z0-9_]+\.[a-z0-9_\-]+$")

# Each feature's own reason code; any other feature reports FEATURE_UNSUPPORTED.
_FEATURE_CODES: Mapping[str, ReasonCode] = {
    **{name: ReasonCode(f"{name.upper()}_UNSUPPORTED") for name in (
        "gqa", "dropout", "window", "softcap", "alibi", "sinks", "kv_scales", "lse", "varlen", "backward", "autocast",
        "inplace", "block_mask", "chunk_mask",
    )},
    "mask_bool": ReasonCode.MASK_UNSUPPORTED,
    "mask_float": ReasonCode.MASK_UNSUPPORTED,
    "sinks_grad": ReasonCode.SINKS_UNSUPPORTED,
    "causal_top_left": ReasonCode.CAUSAL_ALIGNMENT_UNSUPPORTED,
    "causal_bottom_right": ReasonCode.CAUSAL_ALIGNMENT_UNSUPPORTED,
    "nested": ReasonCode.RAGGED_UNSUPPORTED,
}  # fmt: skip
_CAUSAL = frozenset({"causal_top_left", "causal_bottom_right", "causal_square"})
_LIMIT_CODES: Mapping[str, tuple[ReasonCode, ReasonCode, ReasonCode]] = {  # below min, above max, not a multiple
    "head_dim": (ReasonCode.HEAD_DIM_TOO_SMALL, ReasonCode.HEAD_DIM_TOO_LARGE, ReasonCode.HEAD_DIM_NOT_MULTIPLE),
    "head_dim_v": (ReasonCode.HEAD_DIM_TOO_SMALL, ReasonCode.HEAD_DIM_TOO_LARGE, ReasonCode.HEAD_DIM_NOT_MULTIPLE),
    "seq_len_q": (ReasonCode.SEQ_LEN_TOO_SHORT, ReasonCode.SEQ_LEN_TOO_LONG, ReasonCode.DIM_NOT_MULTIPLE),
    "seq_len_k": (ReasonCode.SEQ_LEN_TOO_SHORT, ReasonCode.SEQ_LEN_TOO_LONG, ReasonCode.DIM_NOT_MULTIPLE),
    "batch": (ReasonCode.DIM_OUT_OF_RANGE, ReasonCode.BATCH_TOO_LARGE, ReasonCode.DIM_NOT_MULTIPLE),
    "batch_heads": (ReasonCode.DIM_OUT_OF_RANGE, ReasonCode.CUDA_BLOCK_LIMIT_EXCEEDED, ReasonCode.DIM_NOT_MULTIPLE),
    "page_size": (ReasonCode.PAGE_SIZE_UNSUPPORTED,) * 3,
    "block": (ReasonCode.QUANT_SCALE_LAYOUT,) * 3,
}
_LIMIT_DEFAULT = (ReasonCode.DIM_OUT_OF_RANGE, ReasonCode.DIM_OUT_OF_RANGE, ReasonCode.DIM_NOT_MULTIPLE)


# Their words do not say which size it is.
_NAMELESS = frozenset({ReasonCode.DIM_OUT_OF_RANGE, ReasonCode.DIM_NOT_MULTIPLE, ReasonCode.QUANT_SCALE_LAYOUT})


def _broken(code: ReasonCode, name: str, value: int, side: str, bound: object) -> Reason:
    if code not in _NAMELESS:
        return reason(code, value, bound)
    return reason(code, f"{name}={value}", f"{side}{bound}" if side else bound)


@dataclass(frozen=True, slots=True)
class Limit(Plain):
    """Bounds on one named size."""

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None
    one_of: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigurationError(f"limit min {self.min} exceeds max {self.max}", value=self.min, limit=self.max)
        if self.multiple_of is not None and self.multiple_of < 1:
            raise ConfigurationError("multiple_of must be at least 1", value=self.multiple_of, limit=1)

    def problems(self, name: str, value: int) -> list[Reason]:
        below, above, multiple = _LIMIT_CODES.get(name, _LIMIT_DEFAULT)
        found = []
        if self.min is not None and value < self.min:
            found.append(_broken(below, name, value, ">= ", self.min))
        if self.max is not None and value > self.max:
            found.append(_broken(above, name, value, "<= ", self.max))
        if self.multiple_of is not None and value % self.multiple_of:
            found.append(_broken(multiple, name, value, "", self.multiple_of))
        if self.one_of is not None and value not in self.one_of:
            code = ReasonCode.HEAD_DIM_INVALID if name.startswith("head_dim") else below
            found.append(_broken(code, name, value, "", sorted(self.one_of)))
        return found

    def cuts(self) -> tuple[int, ...]:
        """Last values of the lower side of each threshold, for bucket boundaries."""
        low = () if self.min is None else (self.min - 1,)
        high = () if self.max is None else (self.max,)
        listed = () if self.one_of is None else tuple(x for value in self.one_of for x in (value - 1, value))
        return low + high + listed

    def to_json(self) -> dict[str, Any]:
        return {name: bound for name, bound in Plain.to_json(self).items() if bound is not None}


@dataclass(frozen=True, slots=True)
class KernelSpec(Plain):
    """One kernel. Built from capabilities.json; frozen; equal specs behave equally.

    A feature that is not declared is not supported. `function` names the adapter as "module:name";
    it is imported only when the kernel is bound. `traceable` says what a compiled graph may hold in its place.
    """

    kernel_id: str
    op: str
    backend: str
    function: str
    version: str = "0"
    platforms: frozenset[Platform] = frozenset()
    dtypes: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    priority: float = 0.0
    priority_below: tuple[tuple[str, tuple[int, float]], ...] = ()
    min_sm: int | None = None
    max_sm: int | None = None
    supported_generations: frozenset[GPUGeneration] = frozenset()
    instruction_families: frozenset[InstructionFamily] = frozenset()
    cpu_features: frozenset[str] = frozenset()
    limits: tuple[tuple[str, Limit], ...] = ()
    head_dim_pairs: frozenset[tuple[int, int]] = frozenset()
    layouts: frozenset[Layout] = frozenset()
    kv_cache_layouts: frozenset[Layout] = frozenset()
    index_dtypes: frozenset[str] = frozenset()
    quant_formats: frozenset[str] = frozenset()
    granularities: frozenset[str] = frozenset()
    weight_layout: str | None = None
    packer: str | None = None
    mixed_dtypes: bool = False
    stride_last_dim: int | None = None
    contiguous: bool = False
    aligned_strides: bool = False
    pointer_alignment: int | None = None
    square: bool = False
    graph_safe: bool = False
    traceable: str = ""
    deterministic: bool = False
    batch_invariant: bool = False
    tp_invariant: bool = False
    jit: bool = False
    jit_key: tuple[str, ...] = ()
    compiler: str | None = None
    fuses: tuple[str, ...] = ()
    adapt: frozenset[str] = frozenset()
    guards: frozenset[str] = frozenset()
    workspace: Formula | None = None
    grid_layout: tuple[Formula, ...] | str | None = None
    error_bounds: tuple[tuple[str, float], ...] = ()
    predicate: str | None = None
    doc: str = ""
    _limit_map: dict[str, Limit] = field(init=False, repr=False, compare=False)
    _careful_order: bool = field(init=False, repr=False, compare=False)
    _careful_weight: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not _ID.match(self.kernel_id) or self.kernel_id.split(".")[1] != self.op.split(".")[-1]:
            limit = f"{self.backend}.{self.op}.<variant>"
            raise ConfigurationError(code="KERNEL_ID_INVALID", value=self.kernel_id, limit=limit)
        for name in ("platforms", "dtypes"):
            if not getattr(self, name):
                text = f"{self.kernel_id}: {name} must not be empty"
                raise ConfigurationError(text, code="SCHEMA_FIELD_MISSING", value=name)
        if ":" not in self.function:
            text = f"{self.kernel_id}: function must read 'module:name'"
            raise ConfigurationError(text, code="SCHEMA_INVALID", value=self.function)
        if Platform.CUDA in self.platforms and self.grid_layout is None:
            needed = "grid_layout (three formulas, or 'library' when the vendor computes its own launch)"
            text = f"{self.kernel_id}: a CUDA kernel needs {needed}"
            raise ConfigurationError(text, code="SCHEMA_FIELD_MISSING", value="grid_layout")
        object.__setattr__(self, "_limit_map", dict(self.limits))
        object.__setattr__(self, "_careful_order", self.contiguous or self.aligned_strides)
        quantized_only = bool(self.quant_formats) and "unquantized" not in self.features
        object.__setattr__(self, "_careful_weight", quantized_only or self.weight_layout is not None)

    # -- constraints -----------------------------------------------------------------------------
    def check(self, ctx: Context) -> list[Reason]:
        """Every static reason against this kernel for this context; empty means it fits as is."""
        # What would not run on the device needs no further words.
        return self.check_device(ctx.device) or self.check_call(ctx)

    def check_call(self, ctx: Context) -> list[Reason]:
        """Reasons that depend on the call and not on the device alone. The common case touches few fields."""
        found: list[Reason] = []
        if ctx._rare_dtype or self._careful_weight or ctx.dtype not in self.dtypes:
            found += self._dtypes(ctx)
        if self.square or not ctx.needs <= self.features:
            found += self._features(ctx)
        found += self._sizes(ctx)
        careful = self._careful_order or ctx.strides.last != 1
        if careful or ctx.layout not in self.layouts or ctx.kv_cache_layout is not None:
            found += self._memory_order(ctx)
        if ctx._rare_mode:
            found += self._modes(ctx)
        return found

    def check_device(self, device: DeviceSpec) -> list[Reason]:
        """Reasons that the device alone gives, whatever the call."""
        if device.platform not in self.platforms:
            return [reason("PLATFORM_MISMATCH", device.platform, self.platforms)]
        found: list[Reason] = []
        if device.platform is Platform.CUDA:
            sm = device.sm_version
            if sm is None and (self.min_sm is not None or self.max_sm is not None):
                found.append(reason("SM_UNKNOWN", device.name))
            elif sm is not None:
                if self.min_sm is not None and sm < self.min_sm:
                    found.append(reason("SM_TOO_OLD", sm, self.min_sm))
                if self.max_sm is not None and sm > self.max_sm:
                    found.append(reason("SM_TOO_NEW", sm, self.max_sm))
            if self.supported_generations and device.gpu_generation not in self.supported_generations:
                names = sorted(g.name for g in self.supported_generations)
                found.append(reason("GENERATION_UNSUPPORTED", device.gpu_generation.name, names))
            families = self.instruction_families
            if families and not families & device.instruction_families:
                found.append(reason("INSTRUCTION_FAMILY_MISSING", device.instruction_families or "none", families))
        if device.platform is Platform.CPU:
            missing = self.cpu_features - device.cpu_features
            if missing:
                found.append(reason("CPU_FEATURE_MISSING", missing, self.cpu_features))
        return found

    def _dtypes(self, ctx: Context) -> Iterator[Reason]:
        if ctx.dtype not in self.dtypes:
            yield reason("DTYPE_UNSUPPORTED", ctx.dtype, self.dtypes)
        if len(set(ctx.dtypes)) > 1 and not self.mixed_dtypes:
            yield reason("DTYPE_MIXED", ctx.dtypes)
        if ctx.dtype == "bfloat16" and ctx.device.platform is Platform.CUDA and not ctx.device.supports_bf16:
            yield reason("BF16_UNSUPPORTED", ctx.device.sm_version, 80)
        if ctx.dtype.startswith("float8") and ctx.device.platform is Platform.CUDA and not ctx.device.supports_fp8:
            yield reason("FP8_UNSUPPORTED", ctx.device.sm_version, 89)
        yield from self._quantization(ctx)
        if ctx.granularity is not None and ctx.granularity not in self.granularities:
            yield reason("QUANT_GRANULARITY_UNSUPPORTED", ctx.granularity, self.granularities or "none")
        if ctx.index_dtype is not None and self.index_dtypes and ctx.index_dtype not in self.index_dtypes:
            yield reason("BLOCK_TABLE_DTYPE", ctx.index_dtype, self.index_dtypes)
        if ctx.kv_cache_dtype not in (None, ctx.dtype) and "kv_" + str(ctx.kv_cache_dtype) not in self.features:
            yield reason("KV_CACHE_DTYPE_MISMATCH", ctx.kv_cache_dtype, ctx.dtype)

    def _quantization(self, ctx: Context) -> Iterator[Reason]:
        """Format, the hardware it needs, and how a weight is packed."""
        if ctx.quant_format is None:
            if self.quant_formats and "unquantized" not in self.features:
                yield reason("QUANT_FORMAT_UNSUPPORTED", "none", self.quant_formats)
        elif ctx.quant_format not in self.quant_formats:
            yield reason("QUANT_FORMAT_UNSUPPORTED", ctx.quant_format, self.quant_formats or "none")
        elif "quant_native" in self.features:
            from layerzero.model.quant import native_reason

            why = native_reason(ctx.quant_format, ctx.device)
            if why is not None:
                yield why
        if self.weight_layout is not None and ctx.weight_layout != self.weight_layout:
            yield reason("WEIGHT_NOT_PACKED", ctx.weight_layout or "plain", self.weight_layout)

    def _features(self, ctx: Context) -> Iterator[Reason]:
        for need in sorted(ctx.needs - self.features):
            if need in ("tp_invariant", "dropout_all"):
                continue  # a field of its own, judged with the modes; a call that is the fallback's alone
            if need.startswith("causal_") and ctx.seq_relation == "equal" and self.features & _CAUSAL:
                continue  # both alignments agree when Sq == Sk
            code = _FEATURE_CODES.get(need, ReasonCode.FEATURE_UNSUPPORTED)
            value: object = need
            limit: object = None
            if need == "gqa":
                value = ctx.gqa_ratio
            elif need.startswith("mask_"):
                value = ctx.mask
            elif need.startswith("causal_"):
                value = ctx.causal
                limit = [f.removeprefix("causal_") for f in self.features if f.startswith("causal_")] or "none"
            elif need == "window":
                value = ctx.window
            elif need == "block_mask" and ctx.dim("mask_block_q") is not None:
                value = f"{ctx.dim('mask_block_q')}x{ctx.dim('mask_block_k')}"
            elif need == "chunk_mask":
                value = ctx.dim("mask_chunk")
            elif need == "autocast":
                value = ctx.autocast
            yield reason(code, value, limit)
        if self.square and ctx.seq_relation != "equal":
            yield reason("SEQ_LEN_MISMATCH", f"{ctx.seq_len_q} and {ctx.seq_len_k}", "equal lengths")

    def _sizes(self, ctx: Context) -> list[Reason]:
        found: list[Reason] = []
        paired = (ctx.head_dim, ctx.dim("head_dim_v")) in self.head_dim_pairs if self.head_dim_pairs else False
        for name, limit in self.limits:
            value = ctx.dim(name)
            if value is not None and not (paired and name.startswith("head_dim")):
                found.extend(limit.problems(name, value))
        if ctx._uneven and not paired and "head_dim_v" not in self.features:
            dims = f"{ctx.head_dim} and {ctx.dim('head_dim_v')}"
            found.append(reason("HEAD_DIM_MISMATCH", dims, "equal head dims for key and value"))
        if not found and isinstance(self.grid_layout, tuple) and ctx.device.platform is Platform.CUDA:
            grid = tuple(formula(lambda name: ctx.dim(name) or 0) for formula in self.grid_layout)
            found.extend(self.validate_launch_config(ctx.device, grid))
        return found

    def _memory_order(self, ctx: Context) -> Iterator[Reason]:
        if ctx.layout is not None and self.layouts and ctx.layout not in self.layouts:
            yield reason("LAYOUT_UNSUPPORTED", ctx.layout, self.layouts)
        cache = ctx.kv_cache_layout
        if cache is not None and self.kv_cache_layouts and cache not in self.kv_cache_layouts:
            yield reason("KV_CACHE_LAYOUT_MISMATCH", cache, self.kv_cache_layouts)
        if self.stride_last_dim is not None and ctx.strides.last != self.stride_last_dim:
            yield reason("STRIDE_LAST_DIM", ctx.strides.last, self.stride_last_dim)
        # Contiguous in the kernel's own layout; a transposed view of the other one costs nothing.
        same = ctx.layout is None or not self.layouts or ctx.layout in self.layouts
        if self.contiguous and ctx.strides.order != ("given" if same else "swapped"):
            yield reason("NOT_CONTIGUOUS", ctx.strides.order)
        if self.aligned_strides and not ctx.strides.aligned:
            yield reason("STRIDE_UNALIGNED", "given", 16)

    def _modes(self, ctx: Context) -> Iterator[Reason]:
        if ctx.capturing and not self.graph_safe:
            yield reason("CUDA_GRAPH_UNSAFE")
        yield from (reason("SWITCHED_OFF", switch) for switch in sorted(self.guards & ctx.switched_off))
        yield from (reason("VENDOR_REFUSED", name) for name in sorted(self.guards & ctx.vetoed))
        if self.pointer_alignment is not None and self.pointer_alignment > 1 and not ctx.aligned_pointers:
            yield reason("POINTER_UNALIGNED", None, self.pointer_alignment)
        if ctx.deterministic and not self.deterministic:
            yield reason("NOT_DETERMINISTIC")
        if ctx.batch_invariant and not self.batch_invariant:
            yield reason("NOT_BATCH_INVARIANT")
        if ctx.tp_size > 1 and "tp_invariant" in ctx.needs and not self.tp_invariant:
            yield reason("TP_INVARIANCE_REQUIRED", ctx.tp_size)

    # -- launch and memory -----------------------------------------------------------------------
    def validate_launch_config(
        self, device: DeviceSpec, grid: tuple[int, ...], block: tuple[int, ...] = (1, 1, 1)
    ) -> list[Reason]:
        """Compare a CUDA launch with the device's limits; a block is never deeper than 64."""
        found: list[Reason] = []
        if any(size < 1 for size in (*grid, *block)):
            found.append(reason("LAUNCH_CONFIG_INVALID", f"grid {grid}, block {block}", "at least 1 in every axis"))
        for size, limit in zip(grid, device.max_grid, strict=False):
            if size > limit:
                found.append(reason("CUDA_BLOCK_LIMIT_EXCEEDED", size, limit))
        for size, limit in ((math.prod(block), device.max_threads_per_block), (math.prod(block[2:]), 64)):
            if size > limit:
                found.append(reason("LAUNCH_CONFIG_INVALID", size, limit))
        return found

    def prior(self, ctx: Context) -> float:
        """What its author expects of it for this call, in points, before anything was measured."""
        points = self.priority
        for name, (below, there) in self.priority_below:
            size = ctx.dim(name)
            if size is not None and size < below:
                points = min(points, there)
        return points

    def workspace_bytes(self, ctx: Context) -> int:
        """Bytes of scratch memory the kernel takes for this context."""
        if self.workspace is None:
            return 0
        return max(0, self.workspace(lambda name: ctx.dim(name) or int(name in ctx.needs)))

    def cuts(self, name: str) -> tuple[int, ...]:
        """Thresholds this kernel places on a size, for bucket boundaries."""
        limit = self._limit_map.get(name)
        found = () if limit is None else limit.cuts()
        return found + tuple(below - 1 for size, (below, _) in self.priority_below if size == name)

    def exact(self, name: str) -> bool:
        """Whether a modulus constraint forces exact keying of a size."""
        limit = self._limit_map.get(name)
        if limit is not None and limit.multiple_of not in (None, 1):
            return True
        formulas = self.grid_layout if isinstance(self.grid_layout, tuple) else ()
        # Of a `jit_key` there is one artifact per value: a bucket of them would hide those that are not compiled.
        return name in self.jit_key or any(name in formula.names() for formula in formulas)


@dataclass(frozen=True, slots=True)
class BackendSpec(Plain):
    """A backend: who ships it, which vendor library it adapts, and whether it can be used here."""

    name: str
    dist: str = ""
    version: str = "0"
    vendor: str = ""
    vendor_version: str | None = None
    platforms: frozenset[Platform] = frozenset()
    available: bool = True
    reasons: tuple[Reason, ...] = ()
    capabilities_hash: str = ""
    builtin: bool = False
    # What the backend's descriptor says newer SM versions are.
    generations: GenerationMap = DEFAULT_GENERATIONS
    # Versions of the vendor the adapters work with, and how the backend wants to be isolated when it is.
    vendor_range: str = ""
    isolation: FrozenMap = field(default_factory=FrozenMap)
    # The file with what the conformance kit has shown of its kernels; empty: there is none.
    proofs: str = ""
    # The file with times of its kernels beside torch's own code, taken on other machines; empty: there is none.
    measurements: str = ""
    # The module of the vendor, which some adapters import only when they are called.
    vendor_module: str = ""
    _unshown: ClassVar = ("generations",)

    def sees(self, device: DeviceSpec) -> DeviceSpec:
        """The device in the words of this backend's own generation map."""
        if self.generations is DEFAULT_GENERATIONS or device.sm_version is None:
            return device
        row = self.generations.lookup(device.sm_version)
        return replace(
            device,
            gpu_generation=row.generation,
            tensor_core_generation=row.tensor_core_generation,
            instruction_families=row.families,
        )

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigurationError("a backend needs a name", code="SCHEMA_FIELD_MISSING", value="name")
