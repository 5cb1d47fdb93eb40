"""From tensors to a Context: shapes, strides and options of an attention call, checked and named.

Reads attributes of tensors only; it never touches their data and never imports torch.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from layerzero.errors import invalid
from layerzero.model.context import Context, Strides, element_bytes
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import Causal, Layout, MaskKind
from layerzero.model.folding import Folding, check_mask, folding_of, is_folded
from layerzero.model.masks import MASK_VALUES, BlockMask, ChunkMask
from layerzero.reasons import Reason, reason

if TYPE_CHECKING:
    from torch import Tensor

# The largest bound of a window that is a number at all, and one that lies beyond the last key of any call.
_LARGEST, _BEYOND_KEYS = (1 << 63) - 1, (1 << 31) - 1

_FLOATING = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)


def dtype_name(tensor: Tensor) -> str:
    """The dtype as a plain word: "float16", "bfloat16", ..."""
    return str(tensor.dtype).removeprefix("torch.")


def check_floating(tensor: Tensor, name: str) -> str:
    """The dtype word of a floating tensor; integers and bools are refused."""
    word = dtype_name(tensor)
    if word not in _FLOATING:
        raise invalid("DTYPE_UNSUPPORTED", word, _FLOATING, f"{name} has dtype {word}, expected a floating dtype")
    return word


def check_devices(**tensors: Tensor | None) -> None:
    """Refuse what is no tensor, and tensors on different devices, naming each."""
    for name, given in tensors.items():
        if given is not None:
            _check_tensor(given, name)
    places = {name: str(t.device) for name, t in tensors.items() if t is not None}
    if len(set(places.values())) > 1:
        shown = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise invalid("DEVICE_MIXED", shown)


def parse_layout(layout: Layout | str) -> Layout:
    """A Layout from its word."""
    try:
        return Layout(layout)
    except ValueError:
        raise invalid("LAYOUT_UNKNOWN", str(layout), [item.value for item in Layout]) from None


def parse_causal(is_causal: bool | str) -> Causal:
    """False, True (top-left, as in SDPA) or "bottom_right" (as in FlashAttention)."""
    if is_causal is False or is_causal is None:
        return Causal.NONE
    if is_causal is True:
        return Causal.TOP_LEFT
    if isinstance(is_causal, str) and is_causal == "bottom_right":
        return Causal.BOTTOM_RIGHT
    raise invalid("VALUE_INVALID", str(is_causal), "False, True or 'bottom_right'", f"is_causal is {is_causal!r}")


def check_window_fits(sides: Sequence[int]) -> None:
    """Refuse a bound that no 64-bit integer holds."""
    if any(side > _LARGEST for side in sides):
        raise invalid("VALUE_INVALID", f"window {tuple(sides)}", "at most 2**63 - 1; -1 is unlimited")


def parse_window(window: int | Sequence[int] | None) -> tuple[int, int] | None:
    """A (left, right) pair; an int w means w keys to the left and none to the right; -1 is unlimited.

    So is a bound that lies beyond the last key of any call: kernels that count in 32 bits know -1.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, (int, tuple, list)):
        raise invalid("TYPE_INVALID", type(window).__name__, "window as int or (left, right)")
    if isinstance(window, int):
        if window < 0:
            raise invalid("WINDOW_INVALID", window)
        window = (window, 0)
    pair = tuple(window)
    if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in pair):
        raise invalid("TYPE_INVALID", str(window), "window as int or (left, right)")
    if min(pair) < -1:
        raise invalid("WINDOW_INVALID", str(pair))
    left, right = pair
    if left >= _BEYOND_KEYS or right >= _BEYOND_KEYS:
        check_window_fits(pair)
        left, right = (-1 if side >= _BEYOND_KEYS else side for side in pair)
    return None if left < 0 and right < 0 else (left, right)


def infer_layout(query: Tensor, key: Tensor) -> tuple[Layout, Reason]:
    """Guess BSHD or BHSD for a 4-D tensor, only where the guess is sound.

    Strides decide first: a view whose memory order is that of a transpose tells its origin. Then
    S > H reads as BSHD and H > S as BHSD on the longer of query and key, as the seed says; equal sizes
    without a telling stride, and short decode shapes, are ambiguous and refused.
    """
    _, one, two, _ = query.shape
    _, key_one, key_two, _ = key.shape
    strides = query.stride()
    if one > 1 and two > 1 and strides[1] < strides[2]:
        # Axis 2 is the outer one in memory. Frameworks keep BSHD storage and view it as BHSD.
        return Layout.BHSD, reason("LAYOUT_INFERRED", "BHSD", detail="from the strides")
    if one != key_one and two == key_two:
        return Layout.BSHD, reason("LAYOUT_INFERRED", "BSHD", detail="axis 1 differs between query and key")
    if two != key_two and one == key_one:
        return Layout.BHSD, reason("LAYOUT_INFERRED", "BHSD", detail="axis 2 differs between query and key")
    first, second = max(one, key_one), max(two, key_two)
    if first == second or min(one, two) == 1:
        raise invalid("LAYOUT_AMBIGUOUS", str(tuple(query.shape)))
    layout = Layout.BSHD if first > second else Layout.BHSD
    return layout, reason("LAYOUT_INFERRED", layout, detail="from the sizes")


def stride_class(tensors: Sequence[Tensor]) -> Strides:
    """The worst stride class over some tensors."""
    return stride_class_of([(tuple(t.shape), t.stride(), element_bytes(dtype_name(t))) for t in tensors])


def stride_class_of(described: Iterable[tuple[Sequence[int], Any, int]]) -> Strides:
    """The same, from (shape, strides, bytes per element) each; strides may be True for contiguous."""
    last, aligned, orders = 1, True, set()
    for shape, given, size in described:
        strides = _contiguous_strides(shape) if given is True else given
        if shape and shape[-1] > 1 and strides[-1] != 1:
            last = strides[-1]
        aligned = aligned and all(s * size % 16 == 0 for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1)
        orders.add(_order(tuple(shape), tuple(strides)))
    known = orders - {"both"}
    return Strides(last, aligned, "other" if len(known) > 1 else next(iter(known), "given"))


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    given = _dense(shape, strides)
    if len(shape) != 4:
        return "given" if given else "other"
    swap = (0, 2, 1, 3)
    swapped = _dense(tuple(shape[i] for i in swap), tuple(strides[i] for i in swap))
    if given and swapped:
        return "both"
    return "given" if given else "swapped" if swapped else "other"


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _dense_strides(dims: dict[str, int], words: Sequence[str]) -> Strides:
    """The stride class of contiguous tensors of these sizes, as folding leaves them."""
    kinds = (("num_heads", "seq_len_q", "head_dim"), ("num_kv_heads", "seq_len_k", "head_dim_v"))
    shapes = [(dims["batch"], *(dims[name] for name in kind)) for kind in kinds]
    return stride_class_of((shape, True, element_bytes(words[0])) for shape in shapes)


def _sizes(query: Tensor, key: Tensor, value: Tensor, layout: Layout, folding: Folding | None) -> dict[str, int]:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        rank, limit = tensor.ndim, "2 or more"
        wrong = folding is None and rank < 2
        if layout is not Layout.BHSD:
            limit = "4 (or 3) for all of query, key, value; others with layout BHSD"
            wrong = rank not in (3, 4) or rank != query.ndim
        if wrong:
            raise invalid("RANK_INVALID", rank, limit, f"{name} has rank {rank}")
    if folding is not None:
        batch, counts = math.prod(folding.lead), (folding.heads, folding.kv_heads, folding.kv_heads)
        sizes = zip(counts, (query, key, value), strict=True)
        shapes = [(batch, count, t.shape[-2], t.shape[-1]) for count, t in sizes]
    elif query.ndim == 3:  # as in SDPA: [B, S, D], one head
        shapes = [(t.shape[0], 1, t.shape[1], t.shape[2]) for t in (query, key, value)]
    elif layout is Layout.BHSD:
        shapes = [tuple(t.shape) for t in (query, key, value)]  # type: ignore[misc]
    elif layout is Layout.BSHD:
        shapes = [(t.shape[0], t.shape[2], t.shape[1], t.shape[3]) for t in (query, key, value)]
    else:
        raise invalid("LAYOUT_UNKNOWN", layout.value, "BHSD, BSHD")
    (batch, heads, seq_q, dim), (batch_k, kv_heads, seq_k, dim_k), (batch_v, heads_v, seq_v, dim_v) = shapes
    if not batch == batch_k == batch_v:
        raise invalid("BATCH_MISMATCH", f"query {batch}, key {batch_k}, value {batch_v}")
    if dim != dim_k:
        raise invalid("HEAD_DIM_MISMATCH", f"query {dim}, key {dim_k}", "equal")
    if kv_heads != heads_v or seq_k != seq_v:
        raise invalid("SHAPE_INVALID", f"key {tuple(key.shape)}", f"value {tuple(value.shape)}")
    if heads % kv_heads if kv_heads else heads:
        raise invalid("GQA_RATIO_INVALID", heads, kv_heads)
    return {
        "batch": batch,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "seq_len_q": seq_q,
        "seq_len_k": seq_k,
        "head_dim": dim,
        "head_dim_v": dim_v,
    }


def _mask_kind(
    mask: Tensor | None, dims: dict[str, int], dtypes: Sequence[str], rank: int, folding: Folding | None
) -> MaskKind:
    if mask is None:
        return MaskKind.NONE
    full: tuple[int, ...] = (dims["batch"], dims["num_heads"], dims["seq_len_q"], dims["seq_len_k"])
    if rank == 3:
        full = (full[0], *full[2:])
    # SDPA takes masks of fewer than two axes, but not beside plain 4-D inputs.
    check_mask(mask, full if folding is None else folding.scores, 2 if rank == 4 and folding is None else 0)
    word = dtype_name(mask)
    if word == "bool":
        return MaskKind.BOOL
    if word not in dtypes and word != "float32":
        raise invalid("MASK_DTYPE_INVALID", word, dtypes[0])
    return MaskKind.FLOAT


def _check_tensor(value: object, name: str) -> None:
    """Refuse what is no tensor. Told by its attributes: this module does not import torch."""
    if not hasattr(value, "device") or not hasattr(value, "stride"):
        raise invalid("TYPE_INVALID", f"{name}: {type(value).__name__}", "a torch.Tensor")


def check_dropout(dropout_p: float) -> float:
    """A probability in [0, 1]; NaN and other types are refused."""
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        raise invalid("VALUE_INVALID", str(dropout_p), "a number in [0, 1]", f"dropout_p is {dropout_p}")
    return dropout_p


def check_softcap(softcap: float | None) -> float | None:
    """A positive finite number, or None."""
    if softcap is not None and (not isinstance(softcap, (int, float)) or not 0.0 < softcap < math.inf):
        raise invalid("VALUE_INVALID", str(softcap), "a positive number", f"softcap is {softcap}")
    return softcap


def absent(label_smoothing: Any, z_loss: Any, softcap: Any) -> tuple[float | None, float | None, float | None]:
    """(label_smoothing, softcap, z_loss) with None for what is not asked for: keys know None, but no values."""
    if softcap is None and type(label_smoothing) is type(z_loss) is float and label_smoothing == z_loss == 0.0:
        return None, None, None  # nearly every call
    for name, value, high in (("label_smoothing", label_smoothing, 1.0), ("z_loss", z_loss, math.inf)):
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not 0.0 <= value <= high or value == math.inf:
            limit = "a number in [0, 1]" if high == 1.0 else "a finite number >= 0"
            raise invalid("VALUE_INVALID", f"{name} {value!r}", limit)
    return label_smoothing or None, check_softcap(softcap), z_loss or None


def check_counted(ignore_index: Any, reduction: Any) -> None:
    """Refuse a label or a reduction that there is not."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise invalid("TYPE_INVALID", f"ignore_index: {type(ignore_index).__name__}", "an integer")
    if reduction not in ("mean", "sum", "none"):
        raise invalid("VALUE_INVALID", f"reduction {reduction!r}", "mean, sum or none")


def plain_number(value: Any) -> Any:
    """A numpy scalar, or a tensor of no axes without a gradient, as a Python number; anything else as it is."""
    if isinstance(value, (int, float)) or value is None:
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "ndim", None) == 0 and getattr(value, "requires_grad", True) is False:
        return value.item()  # as in SDPA this waits for a device
    return value


def check_scale(scale: float | None) -> None:
    """Refuse a NaN or infinite softmax scale."""
    if scale is not None and not isinstance(scale, (int, float)):
        raise invalid("TYPE_INVALID", f"scale: {type(scale).__name__}", "a number or None")
    if scale is not None and not math.isfinite(scale):
        raise invalid("SCALE_INVALID", str(scale))


def check_per_head(slopes: Any, sinks: Any, heads: int, batch: int) -> None:
    """Refuse slopes and sinks that are not one number for each head of the queries; slopes may differ by sequence."""
    if slopes is not None and tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise invalid("SHAPE_INVALID", f"alibi_slopes {tuple(slopes.shape)}", f"[{heads}] or [{batch}, {heads}]")
    if sinks is None:
        return
    check_floating(sinks, "sinks")
    if tuple(sinks.shape) != (heads,):
        raise invalid("SHAPE_INVALID", f"sinks {tuple(sinks.shape)}", f"[{heads}]")


def attention_needs(
    grad: bool, gqa: bool, causal: Causal, window: object, softcap: object, slopes: Any, sinks: Any, return_lse: object
) -> dict[str, bool]:
    """What any attention may ask of a kernel, whatever form its keys have: feature -> whether this call does."""
    return {
        "gqa": gqa,
        "window": window is not None,
        "softcap": softcap is not None,
        "alibi": slopes is not None,
        # Slopes are a bias: a kernel without a gradient for its mask has none for them.
        "mask_grad": grad and slopes is not None and slopes.requires_grad,
        "sinks": sinks is not None,
        "sinks_grad": grad and sinks is not None and sinks.requires_grad,
        "lse": bool(return_lse),
        # A gradient through the log-sum-exp itself, which most kernels return without one.
        "lse_backward": bool(return_lse) and grad,
        "causal_top_left": causal is Causal.TOP_LEFT,
        "causal_bottom_right": causal is Causal.BOTTOM_RIGHT,
    }


def attention_context(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    layout: Layout | str | None = None,
    attn_mask: Tensor | BlockMask | ChunkMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool | str = False,
    scale: float | None = None,
    window: int | Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    device: DeviceSpec | None = None,
    requires_grad: bool | None = None,
    op: str = "attention",
    **more: Any,
) -> Context:
    """Check an attention call and describe it. `more` are plain Context fields (tp_size, quant_format, ...)."""
    key = query if key is None else key
    value = key if value is None else value
    tensors = {"query": query, "key": key, "value": value}
    for name, item in tensors.items():
        _check_tensor(item, name)
    if backend is not None and not isinstance(backend, str):
        raise invalid("TYPE_INVALID", f"backend: {type(backend).__name__}", "a backend name or kernel id")
    special = attn_mask if isinstance(attn_mask, MASK_VALUES) else None
    tensor_mask: Any = attn_mask if special is None else next(iter(special.tensors()), None)
    beside = {"attn_mask": tensor_mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    check_devices(**tensors, **beside)
    words = tuple(check_floating(item, name) for name, item in tensors.items())
    notes: tuple[Reason, ...] = ()
    if layout is None and query.ndim == key.ndim == 4:
        parsed, note = infer_layout(query, key)
        notes = (note,)
    else:
        parsed = Layout.BHSD if layout is None else parse_layout(layout)
        if query.ndim == 3 and parsed is Layout.BSHD:
            parsed = Layout.BHSD  # [B, S, D] has no head axis that could lie on either side
    folding = folding_of(query, key, value) if is_folded(query, key, value, parsed.value) else None
    dims = _sizes(query, key, value, parsed, folding)
    causal = parse_causal(is_causal)
    if attn_mask is not None and causal is not Causal.NONE:
        raise invalid("MASK_WITH_CAUSAL", str(is_causal))
    sides = parse_window(window)
    if special is None:
        mask = _mask_kind(tensor_mask, dims, words, query.ndim, folding)
    else:
        special.check(dims, query.ndim if folding is None else 4, sides)
        dims |= special.dims()
        mask = MaskKind.BOOL  # what it is written out as
    check_scale(scale)
    check_dropout(dropout_p)
    check_softcap(softcap)
    check_per_head(alibi_slopes, sinks, dims["num_heads"], dims["batch"])
    grad = any(t.requires_grad for t in (query, key, value)) if requires_grad is None else bool(requires_grad)
    gqa = dims["num_heads"] != dims["num_kv_heads"]
    needs = {
        **attention_needs(grad, gqa, causal, sides, softcap, alibi_slopes, sinks, return_lse),
        "mask_bool": mask is MaskKind.BOOL and special is None,
        "mask_float": mask is MaskKind.FLOAT,
        "dropout": dropout_p > 0,
        "dropout_all": dropout_p == 1,
        "backward": grad,
    }
    if grad and tensor_mask is not None and tensor_mask.requires_grad:
        needs["mask_grad"] = True
    if special is not None:
        needs[special.feature] = True
    seq_q, seq_k = dims["seq_len_q"], dims["seq_len_k"]
    return Context(
        op=op,
        device=device if device is not None else DeviceSpec.detect(query.device),
        dtype=words[0],
        dims=tuple(dims.items()),
        needs=frozenset(name for name, needed in needs.items() if needed),
        dtypes=words,
        layout=parsed,
        rank=query.ndim if folding is None else 4,
        strides=stride_class((query, key, value)) if folding is None else _dense_strides(dims, words),
        folded=folding is not None,
        causal=causal,
        mask=mask,
        window=sides,
        dropout=dropout_p > 0,
        needs_grad=grad,
        backend=backend,
        seq_relation="equal" if seq_q == seq_k else "shorter" if seq_q < seq_k else "longer",
        notes=notes,
        scale=scale,
        dropout_p=dropout_p,
        **more,
    )
