"""The four ops, declared once: each function is the formula in plain torch, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerzero.errors import invalid
from layerzero.model.checks import expect_index
from layerzero.model.cost import Roofline
from layerzero.plugin import Call, Context, Op, expect_rank, expect_shape, expect_tensor, simple_context
from layerzero_linear_attention.packed import empty_as, lies_in_rows, padded, unpadded
from layerzero_linear_attention.recurrence import sequential

_TOKENS = "seq_len * (1 + (batch - 1) * (1 - varlen))"


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Qwen3-Next): (out [B, T, Hv, V], final state [N, Hv, K, V] in float32).

    query, key [B, T, Hk, K], value [B, T, Hv, V] with Hv a multiple of Hk, g [B, T, Hv] (the logarithm of the decay)
    and beta [B, T, Hv]. Each token decays the state by exp(g), replaces a share beta of what the state holds for its
    key by its value, and reads the state with its query times `scale` (default K**-0.5). `qk_l2norm` first divides
    queries and keys by their length. Packed sequences: B = 1 and `cu_seqlens` [N + 1]; otherwise N = B.
    """
    return run_delta(sequential, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention: `gated_delta_rule` with a decay for each channel of the keys, g [B, T, Hv, K]."""
    return run_delta(sequential, query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm)


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float = 0.0,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The state space scan of Mamba-2: (out [Bt, T, H, P], final state [N, H, P, S] in float32).

    x [Bt, T, H, P], dt [Bt, T, H], A [H], B and C [Bt, T, G, S] with H a multiple of G. The step is dt + dt_bias [H],
    through softplus where asked, kept between dt_min and dt_max. Each token decays the state by exp(step * A), adds
    step * x B^T, and reads it with C; D [H] adds its share of x. Packed sequences as in `gated_delta_rule`.
    """
    return run_scan(sequential, x, dt, A, B, C, D, dt_bias, initial_state, cu_seqlens, dt_softplus, dt_min, dt_max)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Each channel convolved with its own past: (out [B, D, T], final state [N, D, S]).

    x [B, D, T], weight [D, W], bias [D]. `initial_state` [N, D, S] is what came before x, with zeros before that; the
    final state is the last S columns of it and x together (S = W - 1 without one). `activation` is None or "silu".
    The channels of the result lie dense where those of x do, as a projection leaves them.
    Packed sequences: B = 1 and `cu_seqlens` [N + 1].
    """
    return run_conv(_windows, x, weight, bias, initial_state, cu_seqlens, activation)


# -- what every way to compute them shares -------------------------------------------------------------------------
Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]


def wide(like: Tensor) -> torch.dtype:
    """What sums are taken in."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def run_delta(
    run: Recurrence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """A delta rule by one of the two forms of the recurrence."""
    dtype, tokens, heads = wide(query), query.shape[1], value.shape[2]
    q, k, v, decay, b = (item.to(dtype) for item in (query, key, value, g, beta))
    if qk_l2norm:
        q, k = (item * torch.rsqrt(item.square().sum(-1, keepdim=True) + 1e-6) for item in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (item.repeat_interleave(heads // item.shape[2], 2) for item in (q, k))
    decay, b = decay if decay.dim() == 4 else decay.unsqueeze(-1), b.unsqueeze(-1)
    return _over_heads(run, (q, k, v, decay, b), initial_state, cu_seqlens, tokens, value.dtype, dtype)


def run_scan(
    run: Recurrence,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float | None,
) -> tuple[Tensor, Tensor]:
    """The scan of Mamba-2 by one of the two forms of the recurrence: without beta, over a state that lies [P, S]."""
    dtype, tokens, heads = wide(x), x.shape[1], x.shape[2]
    step = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(dt_min, dt_max)
    k, q = (item.to(dtype).repeat_interleave(heads // item.shape[2], 2) for item in (B, C))
    given = x.to(dtype)
    parts = (q, k, given * step.unsqueeze(-1), (step * A.to(dtype)).unsqueeze(-1), None)
    state = None if initial_state is None else initial_state.transpose(-1, -2)
    out, last = _over_heads(run, parts, state, cu_seqlens, tokens, dtype, dtype)
    if D is not None:
        out = out + given * D.to(dtype).unsqueeze(-1)
    return out.to(x.dtype), last.transpose(-1, -2).contiguous()


def _over_heads(
    run: Recurrence,
    parts: tuple[Tensor | None, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    tokens: int,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The recurrence of tensors [B, T, H, …], packed or not."""
    present = [item for item in parts if item is not None]
    if cu_seqlens is not None:
        present = padded(present, cu_seqlens)
    q, k, v, g = (item.transpose(1, 2) for item in present[:4])
    beta = present[4].transpose(1, 2) if len(present) == 5 else None
    shape = (*v.shape[:2], k.shape[-1], v.shape[-1])
    state = v.new_zeros(shape) if initial_state is None else initial_state.to(dtype)
    out, state = run(q, k, v, g, beta, state)
    out = out.transpose(1, 2)
    if cu_seqlens is not None:
        out = unpadded(out, cu_seqlens, tokens)
    return out.to(out_dtype).contiguous(), state.contiguous()


def run_conv(
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """The convolution by `run`, which is given W - 1 columns more than it gives."""
    given, tokens, before = x, x.shape[-1], weight.shape[-1] - 1
    if cu_seqlens is not None:
        given = padded([x.transpose(1, 2)], cu_seqlens)[0].transpose(1, 2)
    length = given.shape[-1]
    past = given.new_zeros(*given.shape[:2], before) if initial_state is None else initial_state.to(x.dtype)
    kept = past.shape[-1]
    all_columns = torch.cat((past, given), -1)
    columns = F.pad(all_columns, (max(before - kept, 0), 0))[..., max(kept - before, 0) :]
    out = run(columns, weight, bias) if length else given
    out = (F.silu(out) if activation == "silu" else out).to(x.dtype)
    if cu_seqlens is None:
        return _laid(out, x), all_columns[..., length:].contiguous()
    place = cu_seqlens.diff()[:, None] + torch.arange(kept, device=x.device)
    last = all_columns.gather(-1, place[:, None].expand(-1, x.shape[1], -1))
    return _laid(unpadded(out.transpose(1, 2), cu_seqlens, tokens).transpose(1, 2), x), last


def _laid(out: Tensor, x: Tensor) -> Tensor:
    """A result without gaps, its channels dense where those of x are."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if lies_in_rows(x) else out.contiguous()


def _windows(columns: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = wide(columns)
    out = (columns.to(dtype).unfold(-1, weight.shape[-1], 1) * weight.to(dtype).unsqueeze(1)).sum(-1)
    return out if bias is None else out + bias.to(dtype).unsqueeze(-1)


# -- what a call is ------------------------------------------------------------------------------------------------
def _sequences(batch: int, cu_seqlens: Any) -> int:
    """The number of sequences, which has to be told by offsets where one row holds several."""
    if cu_seqlens is None:
        return batch
    expect_index(cu_seqlens, "cu_seqlens")
    expect_rank(cu_seqlens, "cu_seqlens", (1,))
    if batch != 1:
        raise invalid("BATCH_MISMATCH", batch, 1, "packed sequences lie in one row, behind each other")
    if cu_seqlens.shape[0] < 2:
        raise invalid("SHAPE_INVALID", str(tuple(cu_seqlens.shape)), "[N + 1]", "cu_seqlens has no sequence")
    return int(cu_seqlens.shape[0]) - 1


def _multiple(heads: int, of: int, name: str) -> None:
    if of == 0 or heads % of:
        raise invalid("GQA_RATIO_INVALID", heads, of, f"{heads} heads are no multiple of those of {name}")


def _needs(initial_state: Any, cu_seqlens: Any, **others: bool) -> list[str]:
    asked = {"initial_state": initial_state is not None, "varlen": cu_seqlens is not None, **others}
    return [name for name, needed in asked.items() if needed]


def _describe_delta(call: Call, op: str, channels: bool) -> Context:
    query, key, value, g, beta, state, cu_seqlens, _, qk_l2norm = call.args
    expect_rank(expect_tensor(query, "query"), "query", (4,))
    batch, tokens, key_heads, width = query.shape
    expect_shape(expect_tensor(key, "key"), "key", (batch, tokens, key_heads, width))
    expect_rank(expect_tensor(value, "value"), "value", (4,))
    heads, value_dim = value.shape[2:]
    expect_shape(value, "value", (batch, tokens, heads, value_dim))
    _multiple(heads, key_heads, "query and key")
    expect_shape(expect_tensor(g, "g"), "g", (batch, tokens, heads, *((width,) if channels else ())))
    expect_shape(expect_tensor(beta, "beta"), "beta", (batch, tokens, heads))
    count = _sequences(batch, cu_seqlens)
    expect_shape(state, "initial_state", (count, heads, width, value_dim))
    dims = {"batch": count, "seq_len": tokens, "key_heads": key_heads, "heads": heads, "key_dim": width}
    others = {"key": key, "value": value, "g": g, "beta": beta, "initial_state": state, "cu_seqlens": cu_seqlens}
    needs = _needs(state, cu_seqlens, qk_l2norm=qk_l2norm)
    return simple_context(call, op, query, others, dims | {"value_dim": value_dim}, needs, mixed=True)


def _describe_gated(call: Call) -> Context:
    return _describe_delta(call, "gated_delta_rule", False)


def _describe_kimi(call: Call) -> Context:
    return _describe_delta(call, "kimi_delta_attention", True)


def _describe_scan(call: Call) -> Context:
    x, dt, A, B, C, D, dt_bias, state, cu_seqlens = call.args[:9]
    expect_rank(expect_tensor(x, "x"), "x", (4,))
    batch, tokens, heads, head_dim = x.shape
    expect_shape(expect_tensor(dt, "dt"), "dt", (batch, tokens, heads))
    expect_shape(expect_tensor(A, "A"), "A", (heads,))
    expect_rank(expect_tensor(B, "B"), "B", (4,))
    groups, state_size = B.shape[2:]
    expect_shape(B, "B", (batch, tokens, groups, state_size))
    expect_shape(expect_tensor(C, "C"), "C", (batch, tokens, groups, state_size))
    _multiple(heads, groups, "B and C")
    expect_shape(D, "D", (heads,))
    expect_shape(dt_bias, "dt_bias", (heads,))
    count = _sequences(batch, cu_seqlens)
    expect_shape(state, "initial_state", (count, heads, head_dim, state_size))
    dims = {"batch": count, "seq_len": tokens, "groups": groups, "heads": heads, "head_dim": head_dim}
    others = {"dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
    others |= {"initial_state": state, "cu_seqlens": cu_seqlens}
    needs = _needs(state, cu_seqlens, skip=D is not None)
    return simple_context(call, "mamba2_scan", x, others, dims | {"state_size": state_size}, needs, mixed=True)


def _describe_conv(call: Call) -> Context:
    x, weight, bias, state, cu_seqlens, activation = call.args
    expect_rank(expect_tensor(x, "x"), "x", (3,))
    batch, channels, tokens = x.shape
    expect_rank(expect_tensor(weight, "weight"), "weight", (2,))
    width = weight.shape[1]
    expect_shape(weight, "weight", (channels, max(width, 1)))
    expect_shape(bias, "bias", (channels,))
    count = _sequences(batch, cu_seqlens)
    if state is not None:
        expect_rank(expect_tensor(state, "initial_state"), "initial_state", (3,))
        expect_shape(state, "initial_state", (count, channels, state.shape[-1]))
    if activation not in (None, "silu"):
        raise invalid("VALUE_INVALID", f"activation={activation!r}", "None or 'silu'")
    dims = {"batch": count, "seq_len": tokens, "channels": channels, "width": width}
    dims["state_len"] = width - 1 if state is None else int(state.shape[-1])
    others = {"weight": weight, "bias": bias, "initial_state": state, "cu_seqlens": cu_seqlens}
    needs = _needs(state, cu_seqlens, bias=bias is not None, silu=activation == "silu")
    return simple_context(call, "causal_conv1d", x, others, dims, needs, mixed=True)


def _like(tensor: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return tensor.new_empty(shape, dtype=tensor.dtype if dtype is None else dtype)


def _count(like: Tensor, cu_seqlens: Tensor | None) -> Any:
    return like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _fake_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Any, cu_seqlens: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    heads, value_dim = value.shape[2:]
    last = _like(value, _count(query, cu_seqlens), heads, key.shape[3], value_dim, dtype=wide(query))
    return _like(value, *value.shape), last


def _fake_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Any,
    dt_bias: Any,
    state: Any,
    cu_seqlens: Any,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    last = _like(x, _count(x, cu_seqlens), *x.shape[2:], B.shape[3], dtype=wide(x))
    return _like(x, *x.shape), last


def _fake_conv(x: Tensor, weight: Tensor, bias: Any, state: Any, cu_seqlens: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    kept = weight.shape[1] - 1 if state is None else state.shape[2]
    return empty_as(x), _like(x, _count(x, cu_seqlens), x.shape[1], kept)


def _delta_op(function: Callable[..., Any], describe: Callable[[Call], Context], decays: str) -> Op:
    """One of the two delta rules; `decays` is how many numbers a token's decay has in each head."""
    name = function.__name__
    return Op(
        function=function,
        describe=describe,
        output_kind="tensors",
        features=("initial_state", "varlen", "qk_l2norm"),
        sizes={
            "batch": (1, 2),
            "seq_len": (3, 70),
            "key_heads": (2, 2),
            "heads": (2, 4),
            "key_dim": (16, 64),
            "value_dim": (16, 32),
        },
        example=f"layerzero_linear_attention.examples:{name}",
        fake=_fake_delta,
        baseline=f"layerzero_linear_attention.chunks:{name}",
        plain=f"layerzero_linear_attention.chunks:{name}",
        cost=Roofline(
            f"{_TOKENS} * (element_bytes * 2 * (key_heads * key_dim + heads * value_dim) + 4 * heads * (1 + {decays})) "
            "+ 4 * (1 + initial_state) * batch * heads * key_dim * value_dim",
            f"6 * {_TOKENS} * heads * key_dim * value_dim",
        ),
        growing=("seq_len",),
    )


GATED_DELTA_RULE = _delta_op(gated_delta_rule, _describe_gated, "1")
KIMI_DELTA_ATTENTION = _delta_op(kimi_delta_attention, _describe_kimi, "key_dim")
MAMBA2_SCAN = Op(
    function=mamba2_scan,
    describe=_describe_scan,
    output_kind="tensors",
    features=("initial_state", "varlen", "skip"),
    sizes={
        "batch": (1, 2),
        "seq_len": (3, 70),
        "groups": (1, 2),
        "heads": (2, 4),
        "head_dim": (16, 32),
        "state_size": (16, 64),
    },
    example="layerzero_linear_attention.examples:mamba2_scan",
    fake=_fake_scan,
    baseline="layerzero_linear_attention.chunks:mamba2_scan",
    plain="layerzero_linear_attention.chunks:mamba2_scan",
    cost=Roofline(
        f"{_TOKENS} * element_bytes * (2 * heads * head_dim + heads + 2 * groups * state_size) "
        "+ 4 * (1 + initial_state) * batch * heads * head_dim * state_size",
        f"4 * {_TOKENS} * heads * head_dim * state_size",
    ),
    growing=("seq_len",),
)
CAUSAL_CONV1D = Op(
    function=causal_conv1d,
    describe=_describe_conv,
    output_kind="tensors",
    features=("initial_state", "varlen", "bias", "silu"),
    sizes={"batch": (1, 2), "seq_len": (3, 70), "channels": (16, 96), "width": (4, 3), "state_len": (3, 4)},
    example="layerzero_linear_attention.examples:causal_conv1d",
    fake=_fake_conv,
    baseline="layerzero_linear_attention.chunks:causal_conv1d",
    plain="layerzero_linear_attention.chunks:causal_conv1d",
    cost=Roofline(
        f"element_bytes * channels * (2 * {_TOKENS} + width + (1 + initial_state) * batch * state_len)",
        f"2 * {_TOKENS} * channels * width",
    ),
    growing=("seq_len",),
    fusable=True,
)
OPS = (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION, MAMBA2_SCAN, CAUSAL_CONV1D)
