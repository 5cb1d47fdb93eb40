"""What one call looks like to selection: a frozen value without tensors inside.

Everything selection may depend on is a field here, and nothing else is: two calls with equal
contexts get the same decision. Sizes are named dims (`head_dim`, `seq_len_k`, ...); what the call
asks of a kernel is the set `needs` (`mask_bool`, `lse`, `backward`, ...).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from layerzero.errors import LayerZeroWarning, invalid
from layerzero.json_form import Plain
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Causal, Layout, MaskKind, OpKind, Platform
from layerzero.reasons import Reason

if TYPE_CHECKING:
    from torch import Tensor

CPU = DeviceSpec(
    platform=Platform.CPU, device_type="cpu", name="cpu", vendor="unknown", supports_bf16=True, supports_fp16=True
)

_REQUIRED_DIMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("attention", "grouped_attention", "paged_attention", "varlen_attention"), ("head_dim",)),
    "mla_paged_attention": ("head_dim_ckv", "head_dim_kpe"),
    "rms_norm": ("hidden",),
    "layer_norm": ("hidden",),
}


@dataclass(frozen=True, slots=True)
class Strides(Plain):
    """How the main tensors lie in memory, as far as kernels care.

    last      stride of the last axis (the worst over the main tensors)
    aligned   every other stride is a multiple of 16 bytes
    order     "given" contiguous as passed; "swapped" contiguous after exchanging axes 1 and 2; "other"
    """

    last: int = 1
    aligned: bool = True
    order: str = "given"

    @property
    def contiguous(self) -> bool:
        """Contiguous exactly as passed."""
        return self.order == "given"


@dataclass(frozen=True, slots=True)
class TokenizerIdentity(Plain):
    """Which tokenizer, down to its hashes; tokenization is never selected without it."""

    tokenizer_id: str
    vocab_hash: str
    normalizer_id: str = ""
    pretokenizer_id: str = ""
    merges_hash: str = ""
    special_tokens_hash: str = ""
    return_offsets: bool = False

    def __post_init__(self) -> None:
        if not self.tokenizer_id:
            raise invalid("TOKENIZER_ID_MISSING")
        if not self.vocab_hash:
            raise invalid("VOCAB_HASH_MISSING")


class _Size:
    """A named size of a context as its attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, ctx: Context | None, owner: type) -> int | None:
        return None if ctx is None else ctx.dim(self._name)


@dataclass(frozen=True, slots=True)
class Context(Plain):
    """One call, described. Build it with `Context.from_tensors` or through an op's `describe`."""

    op: str
    device: DeviceSpec = CPU
    dtype: str = "float32"
    dims: tuple[tuple[str, int], ...] = ()
    needs: frozenset[str] = frozenset()
    kind: OpKind = OpKind.TENSOR
    dtypes: tuple[str, ...] = ()
    layout: Layout | None = None
    rank: int = 4
    strides: Strides = Strides()
    causal: Causal = Causal.NONE
    mask: MaskKind = MaskKind.NONE
    window: tuple[int, int] | None = None
    dropout: bool = False
    needs_grad: bool = False
    autocast: str | None = None
    deterministic: bool = False
    # The bits of a row may not depend on what else is in the call: the policy's setting, for calls that have rows.
    batch_invariant: bool = False
    capturing: bool = False
    backend: str | None = None
    quant_format: str | None = None
    granularity: str | None = None
    # How a packed weight lies; None for one as it is.
    weight_layout: str | None = None
    kv_cache_dtype: str | None = None
    kv_cache_layout: Layout | None = None
    index_dtype: str | None = None
    tp_size: int = 1
    tp_rank: int = 0
    tokenizer: TokenizerIdentity | None = None
    # Which of seq_len_q and seq_len_k is longer; kept apart because both may be bucketed.
    seq_relation: str = "equal"
    # Process-wide switches that are off, for example "sdp_flash" inside the user's sdpa_kernel context.
    switched_off: frozenset[str] = frozenset()
    # Kernels that torch itself says it cannot use for these tensors (can_use_flash_attention and the like).
    vetoed: frozenset[str] = frozenset()
    # Data pointers are 16-byte aligned.
    aligned_pointers: bool = True
    # Leading axes are folded into one batch before a kernel sees them (`model.folding`); sizes are the folded ones.
    folded: bool = False
    # Values that never decide anything, kept for reports only.
    notes: tuple[Reason, ...] = field(default=(), compare=False)
    scale: float | None = field(default=None, compare=False)
    dropout_p: float = field(default=0.0, compare=False)
    # Computed once, so that checking sixty kernels stays cheap: sizes by name, and whether a rarer check applies.
    _sizes: dict[str, int] = field(init=False, repr=False, compare=False)
    _rare_dtype: bool = field(init=False, repr=False, compare=False)
    _rare_mode: bool = field(init=False, repr=False, compare=False)
    _uneven: bool = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)
    _values: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind is OpKind.TOKENIZATION and self.tokenizer is None:
            raise invalid("VOCAB_HASH_MISSING")
        given = dict(self.dims)
        object.__setattr__(self, "_sizes", given)
        # Mixed or special dtypes, quantization, index or cache dtypes: most kernels need not look closer.
        mixed = len(self.dtypes) > 1 and any(word != self.dtypes[0] for word in self.dtypes)
        special = self.dtype == "bfloat16" or self.dtype.startswith("float8")
        asked = (self.quant_format, self.granularity, self.index_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "_rare_dtype", mixed or special or any(item is not None for item in asked))
        object.__setattr__(self, "_rare_mode", self._has_rare_mode())
        object.__setattr__(self, "_uneven", given.get("head_dim") != given.get("head_dim_v", given.get("head_dim")))
        for name in _REQUIRED_DIMS.get(self.op, ()):
            if name not in given:
                raise invalid("CONTEXT_FIELD_MISSING", name, self.op)

    def __hash__(self) -> int:
        """Computed once: a context is hashed at every look into the selection cache."""
        try:
            return self._hash
        except AttributeError:
            values = tuple(getattr(self, name) for name in _COMPARED)
            object.__setattr__(self, "_values", values)
            object.__setattr__(self, "_hash", hash(values))
            return self._hash

    def __eq__(self, other: Any) -> bool:
        """As of any dataclass, with what was read for the hash: a hit in the selection cache compares."""
        try:
            values: tuple[Any, ...] = other._values
            return self._values == values
        except AttributeError:
            return type(other) is type(self) and hash(self) == hash(other) and self == other

    def __reduce__(self) -> tuple[Any, ...]:
        # What was computed stays behind: a hash of strings means nothing in another process.
        return partial(Context, **{f.name: getattr(self, f.name) for f in fields(self) if f.init}), ()

    def _has_rare_mode(self) -> bool:
        """Capture, determinism, batch invariance, switches, vetoes, odd pointers or tensor parallelism."""
        return bool(
            self.capturing
            or self.deterministic
            or self.batch_invariant
            or self.switched_off
            or self.vetoed
            or not self.aligned_pointers
            or self.tp_size > 1
        )

    # -- sizes -----------------------------------------------------------------------------------
    def dim(self, name: str) -> int | None:
        """A named size, derived ones included; None when the op has no such axis."""
        found = self._sizes.get(name)
        if found is not None:
            return found
        if name == "batch_heads":
            batch, heads = self.dim("batch"), self.dim("num_heads")
            return batch * heads if batch is not None and heads is not None else None
        if name == "gqa_ratio":
            heads, kv = self.dim("num_heads"), self.dim("num_kv_heads")
            return heads // kv if heads is not None and kv else None
        if name == "element_bytes":
            return element_bytes(self.dtype)
        return None

    def get(self, name: str) -> Any:
        """Any field or size by name, for policy rules and formulas; None when there is none."""
        size = self.dim(name)
        if size is not None:
            return size
        if name == "device":
            return self.device.device_type
        if name in _POLICY_DEVICE_FIELDS:
            return getattr(self.device, name)
        if name in _NAMED:
            return getattr(self, name)
        # "needs_window": whether the call asks for that feature, whatever its value; what a jit_key often turns on.
        return name.removeprefix("needs_") in self.needs if name.startswith("needs_") else None

    batch = _Size()
    seq_len_q = _Size()
    seq_len_k = _Size()
    num_heads = _Size()
    num_kv_heads = _Size()
    head_dim = _Size()
    gqa_ratio = _Size()

    @property
    def enable_gqa(self) -> bool:
        return self.num_heads != self.num_kv_heads

    @property
    def stride_last_dim(self) -> int:
        return self.strides.last

    @property
    def is_contiguous(self) -> bool:
        return self.strides.contiguous

    @property
    def attn_mask_type(self) -> MaskKind:
        return self.mask

    @property
    def requires_grad(self) -> bool:
        return self.needs_grad

    # -- building --------------------------------------------------------------------------------
    def with_dims(self, **sizes: int) -> Context:
        """A copy with some sizes replaced."""
        return replace(self, dims=tuple({**dict(self.dims), **sizes}.items()))

    @staticmethod
    def from_tensors(
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        layout: Layout | str | None = None,
        **options: Any,
    ) -> Context:
        """The context of an attention call on these tensors.

        With `layout=None` the layout is inferred from shape and strides, which is refused where it
        would be a guess (see `layerzero.model.describe.infer_layout`). Options are those of
        `lz.attention`, plus tp_size, tp_rank, kv_cache_dtype, kv_cache_layout, quant_format, granularity.
        """
        from layerzero.model.describe import attention_context  # late: describe builds on this module

        ctx = attention_context(query, key, value, layout=layout, **options)
        for note in ctx.notes:
            warnings.warn(f"{note}; {note.hint}", LayerZeroWarning, stacklevel=2)
        return ctx

    def to_json(self) -> dict[str, Any]:
        return Plain.to_json(self) | {"dims": dict(self.dims)}


_COMPARED = tuple(f.name for f in fields(Context) if f.compare)
_NAMED = frozenset(f.name for f in fields(Context) if not f.name.startswith("_"))
_NAMED |= {"stride_last_dim", "is_contiguous", "enable_gqa", "attn_mask_type"}
_POLICY_DEVICE_FIELDS = frozenset({"sm_version", "gpu_generation", "vendor", "platform", "tensor_core_generation"})
# Names `Context.get` answers for every op, and the sizes of the built-in ops: what a jit_key may name.
KEYABLE = frozenset({
    *_NAMED, *_POLICY_DEVICE_FIELDS,
    "batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k", "head_dim", "head_dim_v", "gqa_ratio", "hidden",
    "rows", "tokens", "rotary_dim", "page_size", "head_dim_ckv", "head_dim_kpe", "in_features", "out_features", "vocab",
    "intermediate", "num_experts", "top_k", "block", "rank", "element_bytes",
}) - {"notes", "scale", "dropout_p"}  # fmt: skip

SelectionContext = Context
"""The name the seed documents use."""


def element_bytes(dtype: str) -> int:
    """Bytes per element of a torch dtype name; 1 for the sub-byte formats."""
    for suffix, size in (("128", 16), ("64", 8), ("32", 4), ("16", 2)):
        if dtype.endswith(suffix):
            return size
    return 1
