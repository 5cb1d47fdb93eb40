# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The scan of Mamba-2, the causal convolution and a few tokens of the delta rules in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero_linear_attention.packed import empty_as

_DIRECT = triton.__version__.startswith(("3.5.", "3.6."))  # whose compiled kernels take the arguments below
_hooks: Any = triton.knobs.runtime.launch_enter_hook  # profilers hang themselves here
_ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # what Triton compiled, by all that it looks at


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
    warps: int = 4,
) -> Any:
    """Through Triton the first time, then straight to what it compiled: looking at every argument takes it 20 to 30 µs.

    The compiler counts on addresses that are multiples of 16 bytes: what lies elsewhere is copied, and has equal bits.
    """
    here: list[int | None] = []
    together = 0
    for item in tensors:
        here.append(None if item is None else item.data_ptr())
        together |= here[-1] or 0
    if together & 15:
        return _launch(kernel, grid, list(map(_aligned, tensors)), numbers, constants, warps)
    device = tensors[0].get_device() if tensors[0] is not None else -1
    kinds = tuple([None if item is None else item.dtype for item in tensors])
    key = (kernel.__name__, device, kinds, numbers, constants, warps)
    found = _ready.get(key)
    if found is not None and not _hooks.calls and torch._C._cuda_getDevice() == device:
        run, function, packed = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        return run(*grid, stream, function, packed, None, None, None, *here, *numbers, *constants)
    compiled = kernel[grid](*tensors, *numbers, *constants, num_warps=warps)
    if _DIRECT and device >= 0:
        if len(_ready) >= 4096:
            _ready.clear()
        _ready[key] = compiled.run, compiled.function, compiled.packed_metadata


def _aligned(item: Tensor | None) -> Tensor | None:
    """An argument with the same strides in memory of its own, where its address is no multiple of 16."""
    if item is None or item.data_ptr() % 16 == 0:
        return item
    span = 1 + sum((size - 1) * step for size, step in zip(item.shape, item.stride(), strict=True))
    return item.as_strided((span,), (1,)).clone().as_strided(item.shape, item.stride())


def _power(size: int) -> int:
    """The next power of two; Triton's own function takes microseconds."""
    return 1 << (size - 1).bit_length()


@triton.jit
def _product(left, right):
    """left @ right; of bfloat16 and float32 in two products of bfloat16, nearer and faster than one of TF32."""
    if left.dtype == right.dtype:
        return tl.dot(left, right, input_precision="tf32x3")
    elif left.dtype == tl.float32:
        high = left.to(tl.bfloat16)
        return tl.dot(high, right) + tl.dot((left - high.to(tl.float32)).to(tl.bfloat16), right)
    else:
        high = right.to(tl.bfloat16)
        return tl.dot(left, high) + tl.dot(left, (right - high.to(tl.float32)).to(tl.bfloat16))


@triton.jit
def _scan(
    x, dt, A, B, C, D, bias, first, out, last, offsets, tokens, heads, groups, width, states, dt_min, dt_max,
    SOFTPLUS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """A block of a head's channels over a whole sequence; its state [BLOCK_P, BLOCK_S] never leaves the program.

    NARROW: x, B and C are bfloat16 and stay that in products; otherwise everything is float32.
    """
    item = tl.program_id(0).to(tl.int64)
    n, h = item // heads, item % heads
    row, begin, end = n, 0, tokens
    if offsets is not None:
        row, begin, end = n * 0, tl.load(offsets + n).to(tl.int32), tl.load(offsets + n + 1).to(tl.int32)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    s, inside = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_T)
    in_p, in_s = p < width, s < states
    place = (item * width + p[:, None]) * states + s[None, :]
    state = tl.zeros((BLOCK_P, BLOCK_S), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + place, mask=in_p[:, None] & in_s[None, :], other=0.0).to(tl.float32)
    decay = tl.load(A + h).to(tl.float32)
    before = tl.full((), 0.0, tl.float32)
    if bias is not None:
        before = tl.load(bias + h).to(tl.float32)
    group = h // (heads // groups)
    for start in range(begin, end, BLOCK_T):
        t = start + inside
        in_t = t < end
        token = row * tokens + t
        step = tl.load(dt + token * heads + h, mask=in_t, other=0.0).to(tl.float32) + before
        if SOFTPLUS:
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
        step = tl.where(in_t, tl.minimum(tl.maximum(step, dt_min), dt_max), 0.0)
        shade = in_t[:, None] & in_s[None, :]
        at = (token * groups + group)[:, None] * states + s[None, :]
        keys = tl.load(B + at, mask=shade, other=0.0)
        queries = tl.load(C + at, mask=shade, other=0.0)
        spot = (token * heads + h)[:, None] * width + p[None, :]
        lit = in_t[:, None] & in_p[None, :]
        given = tl.load(x + spot, mask=lit, other=0.0)
        if not NARROW:
            keys, queries, given = keys.to(tl.float32), queries.to(tl.float32), given.to(tl.float32)
        gone = tl.cumsum(step * decay, 0)  # the decay from the chunk's start, as a logarithm
        total = tl.sum(step * decay, 0)
        between = tl.where(inside[:, None] >= inside[None, :], gone[:, None] - gone[None, :], float("-inf"))
        weights = _product(queries, tl.trans(keys)) * tl.exp(between) * step[None, :]
        made = _product(queries, tl.trans(state)) * tl.exp(gone)[:, None]
        made += _product(weights, given)
        if D is not None:
            made += given.to(tl.float32) * tl.load(D + h).to(tl.float32)
        tl.store(out + spot, made.to(out.dtype.element_ty), mask=lit)
        left = keys.to(tl.float32) * (tl.exp(total - gone) * step)[:, None]
        state = state * tl.exp(total) + _product(tl.trans(given), left)
    tl.store(last + place, state, mask=in_p[:, None] & in_s[None, :])


@triton.jit
def _scan_step(
    x, dt, A, B, C, D, bias, first, out, last, offsets, tokens, heads, groups, dt_min, dt_max,
    WIDTH: tl.constexpr, STATES: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The same token by token. Sizes are constants: addresses made from numbers took half as many registers again."""
    parts: tl.constexpr = (WIDTH + BLOCK_P - 1) // BLOCK_P
    item = (tl.program_id(0) // parts).to(tl.int64)
    n, h = item // heads, item % heads
    row, begin, end = n, 0, tokens
    if offsets is not None:
        row, begin, end = n * 0, tl.load(offsets + n).to(tl.int32), tl.load(offsets + n + 1).to(tl.int32)
    p, s = tl.program_id(0) % parts * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
    in_p, in_s = p < WIDTH, s < STATES
    place = item * (WIDTH * STATES) + (p[:, None] * STATES + s[None, :])
    state = tl.zeros((BLOCK_P, BLOCK_S), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + place, mask=in_p[:, None] & in_s[None, :], other=0.0).to(tl.float32)
    for t in range(begin, end):
        token = row * tokens + t
        step = tl.load(dt + token * heads + h).to(tl.float32)
        if bias is not None:
            step += tl.load(bias + h).to(tl.float32)
        if SOFTPLUS:
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
        step = tl.minimum(tl.maximum(step, dt_min), dt_max)
        at = (token * groups + h // (heads // groups)) * STATES + s
        keys = tl.load(B + at, mask=in_s, other=0.0).to(tl.float32)
        queries = tl.load(C + at, mask=in_s, other=0.0).to(tl.float32)
        spot = (token * heads + h) * WIDTH + p
        given = tl.load(x + spot, mask=in_p, other=0.0).to(tl.float32)
        state = state * tl.exp(step * tl.load(A + h).to(tl.float32)) + (given * step)[:, None] * keys[None, :]
        made = tl.sum(state * queries[None, :], 1)
        if D is not None:
            made += given * tl.load(D + h).to(tl.float32)
        tl.store(out + spot, made.to(out.dtype.element_ty), mask=in_p)
    tl.store(last + place, state, mask=in_p[:, None] & in_s[None, :])


def _scanned(
    few: bool,
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
    batch, tokens, heads, width = x.shape
    groups, states = B.shape[2:]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    last = x.new_empty((count, heads, width, states), dtype=torch.float32)
    given = (x, dt, A, B, C, D, dt_bias, initial_state)
    tensors = (*(None if item is None else item.contiguous() for item in given), out, last, cu_seqlens)
    bounds = (float(dt_min), float("inf") if dt_max is None else float(dt_max))
    block_p, block_s = (max(16, _power(size)) for size in (min(width, 32), states))
    parts = -(-width // block_p)
    if few:
        warps = max(1, block_p * block_s // 1024)
        constants = (width, states, dt_softplus, block_p, block_s)
        _launch(_scan_step, (count * heads * parts, 1, 1), tensors, (tokens, heads, groups, *bounds), constants, warps)
    else:
        narrow = x.dtype == B.dtype == C.dtype == torch.bfloat16
        numbers = (tokens, heads, groups, width, states, *bounds)
        _launch(_scan, (count * heads, parts, 1), tensors, numbers, (dt_softplus, 64, block_p, block_s, narrow))
    return out, last


mamba2_scan = partial(_scanned, False)  # in chunks of 64 tokens
mamba2_scan_step = partial(_scanned, True)  # token by token: for decoding


@triton.jit
def _delta(
    query, key, value, g, beta, first, out, last, offsets, tokens, key_heads, heads, scale,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr, NORM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """A block of a head's values, token by token; its state [BLOCK_K, BLOCK_V] never leaves the program.

    What the new state answers to the query is what the old one does, and the change times query · key: both sums over
    the old state are taken together.
    """
    parts: tl.constexpr = (VALUES + BLOCK_V - 1) // BLOCK_V
    item = (tl.program_id(0) // parts).to(tl.int64)
    n, h = item // heads, item % heads
    row, begin, end = n, 0, tokens
    if offsets is not None:
        row, begin, end = n * 0, tl.load(offsets + n).to(tl.int32), tl.load(offsets + n + 1).to(tl.int32)
    k, v = tl.arange(0, BLOCK_K), tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k < WIDTH, v < VALUES
    place = item * (WIDTH * VALUES) + (k[:, None] * VALUES + v[None, :])
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    if first is not None:
        state = tl.load(first + place, mask=in_k[:, None] & in_v[None, :], other=0.0).to(tl.float32)
    for t in range(begin, end):
        token = row * tokens + t
        at = (token * key_heads + h // (heads // key_heads)) * WIDTH + k
        q_row = tl.load(query + at, mask=in_k, other=0.0).to(tl.float32)
        k_row = tl.load(key + at, mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            q_row *= tl.rsqrt(tl.sum(q_row * q_row) + 1e-6)
            k_row *= tl.rsqrt(tl.sum(k_row * k_row) + 1e-6)
        spot = token * heads + h
        given = tl.load(value + spot * VALUES + v, mask=in_v, other=0.0).to(tl.float32)
        if CHANNELS:
            state *= tl.exp(tl.load(g + spot * WIDTH + k, mask=in_k, other=0.0).to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(g + spot).to(tl.float32))
        held, read = tl.sum(state * k_row[:, None], 0), tl.sum(state * q_row[:, None], 0)
        change = (given - held) * tl.load(beta + spot).to(tl.float32)
        state += k_row[:, None] * change[None, :]
        made = (read + tl.sum(q_row * k_row) * change) * scale
        tl.store(out + spot * VALUES + v, made.to(out.dtype.element_ty), mask=in_v)
    tl.store(last + place, state, mask=in_k[:, None] & in_v[None, :])


def delta_step(
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
    """Both delta rules for a few tokens, which g tells apart by its rank: each state is read and written once."""
    batch, tokens, key_heads, width = query.shape
    heads, value_dim = value.shape[2:]
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    last = value.new_empty((count, heads, width, value_dim), dtype=torch.float32)
    tensors = [item.contiguous() for item in (query, key, value, g, beta)]
    first = None if initial_state is None else initial_state.contiguous()
    block_k, block_v = (_power(size) for size in (width, min(value_dim, 32)))
    numbers = (tokens, key_heads, heads, width**-0.5 if scale is None else float(scale))
    constants = (width, value_dim, g.dim() == 4, qk_l2norm, block_k, block_v)
    grid = (count * heads * -(-value_dim // block_v), 1, 1)
    _launch(
        _delta, grid, (*tensors, first, out, last, cu_seqlens), numbers, constants, max(1, block_k * block_v // 2048)
    )
    return out, last


@triton.jit
def _conv(
    x, weight, bias, first, out, begins, sequences, channels, tokens, kept, row_step, channel_step, token_step,
    out_channel_step, out_token_step,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of channels and tokens; what lies before a sequence is its state, and zeros before that."""
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_t, in_d = t < tokens, d < channels
    begin, sequence = t * 0, t.to(tl.int64) * 0 + row
    if begins is not None:
        begin = tl.load(begins + t, mask=in_t, other=0).to(tl.int32)
        sequence = tl.load(sequences + t, mask=in_t, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_D, BLOCK_T), dtype=tl.float32)
    if bias is not None:
        total += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)[:, None]
    base = x + row * row_step + d[:, None].to(tl.int64) * channel_step
    for w in tl.static_range(WIDTH):
        source = t - (WIDTH - 1 - w)
        fresh = source >= begin
        shade = in_d[:, None] & (in_t & fresh)[None, :]
        column = tl.load(base + source[None, :].to(tl.int64) * token_step, mask=shade, other=0.0).to(tl.float32)
        if first is not None:
            old = source - begin + kept
            shade = in_d[:, None] & (in_t & (source < begin) & (old >= 0))[None, :]
            spot = (sequence[None, :] * channels + d[:, None]) * kept + old[None, :]
            column += tl.load(first + spot, mask=shade, other=0.0).to(tl.float32)
        total += column * tl.load(weight + d * WIDTH + w, mask=in_d, other=0.0).to(tl.float32)[:, None]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    spot = (
        row * channels * tokens + d[:, None].to(tl.int64) * out_channel_step + t[None, :].to(tl.int64) * out_token_step
    )
    tl.store(out + spot, total.to(out.dtype.element_ty), mask=in_d[:, None] & in_t[None, :])


@triton.jit
def _conv_step(
    x, weight, bias, first, out, last, channels, tokens, kept, row_step, channel_step, token_step, out_channel_step,
    out_token_step,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of channels of one sequence, token by token, and its final state."""
    row = tl.program_id(1).to(tl.int64)
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    in_d = d < channels
    fresh, past = x + row * row_step + d * channel_step, (row * channels + d) * kept
    for t in range(tokens):
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        if bias is not None:
            total += tl.load(bias + d, mask=in_d, other=0.0).to(tl.float32)
        for w in tl.static_range(WIDTH):
            source = t - (WIDTH - 1 - w)
            column = tl.load(fresh + source * token_step, mask=in_d & (source >= 0), other=0.0).to(tl.float32)
            if first is not None:
                old = source + kept
                shade = in_d & (source < 0) & (old >= 0)
                column += tl.load(first + past + old, mask=shade, other=0.0).to(tl.float32)
            total += column * tl.load(weight + d * WIDTH + w, mask=in_d, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        spot = row * channels * tokens + d * out_channel_step + t * out_token_step
        tl.store(out + spot, total.to(out.dtype.element_ty), mask=in_d)
    for place in range(kept):
        source = tokens - kept + place
        column = tl.load(fresh + source * token_step, mask=in_d & (source >= 0), other=0.0)
        if first is not None:
            shade = in_d & (source < 0)
            column += tl.load(first + past + source + kept, mask=shade, other=0.0).to(column.dtype)
        tl.store(last + past + place, column, mask=in_d)


def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """Blocks of 256 channels, the state in the same launch: for decoding."""
    if cu_seqlens is not None:
        return _convolved((1, 256), x, weight, bias, initial_state, cu_seqlens, activation)
    batch, channels, tokens = x.shape
    width = weight.shape[1]
    kept = width - 1 if initial_state is None else initial_state.shape[2]
    first = None if initial_state is None else initial_state.contiguous()
    out, last = empty_as(x), x.new_empty(batch, channels, kept)
    numbers = (channels, tokens, kept, *x.stride(), *out.stride()[1:])
    tensors = (x, weight.contiguous(), None if bias is None else bias.contiguous(), first, out, last)
    _launch(_conv_step, (-(-channels // 256), batch, 1), tensors, numbers, (width, activation == "silu", 256))
    return out, last


def _convolved(
    tile: tuple[int, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """One launch, and the final state."""
    batch, channels, tokens = x.shape
    width = weight.shape[1]
    kept = width - 1 if initial_state is None else initial_state.shape[2]
    first = None if initial_state is None else initial_state.contiguous()
    out = empty_as(x)
    begins = sequences = None
    if cu_seqlens is not None:
        token = torch.arange(tokens, device=x.device, dtype=cu_seqlens.dtype)
        sequences = torch.searchsorted(cu_seqlens, token, right=True) - 1
        begins = cu_seqlens[sequences]
    block_t, block_d = tile
    grid = (triton.cdiv(tokens, block_t), triton.cdiv(channels, block_d), batch)
    tensors = (x, weight.contiguous(), None if bias is None else bias.contiguous(), first, out, begins, sequences)
    numbers = (channels, tokens, kept, *x.stride(), *out.stride()[1:])
    _launch(_conv, grid, tensors, numbers, (width, activation == "silu", block_t, block_d))
    return out, _last_columns(x, first, cu_seqlens, kept)


causal_conv1d = partial(_convolved, (64, 64))  # tiles of 64 channels and 64 tokens


def _last_columns(x: Tensor, first: Tensor | None, cu_seqlens: Tensor | None, kept: int) -> Tensor:
    """The last columns of each sequence, of its state where it is shorter."""
    batch, channels, tokens = x.shape
    if cu_seqlens is None:
        if tokens >= kept:
            return x[..., tokens - kept :].contiguous()
        past = x.new_zeros(batch, channels, kept) if first is None else first.to(x.dtype)
        return torch.cat((past, x), -1)[..., tokens:].contiguous()
    place = cu_seqlens[1:, None] - kept + torch.arange(kept, device=x.device)
    old = place - cu_seqlens[:-1, None]
    fresh = x[0][:, place.clamp(min=0)].transpose(0, 1)
    past = torch.zeros_like(fresh)
    if first is not None:
        index = (old + kept).clamp(0, max(kept - 1, 0))[:, None].expand_as(fresh)
        past = torch.where((old + kept >= 0)[:, None], first.to(x.dtype).gather(-1, index), 0)
    return torch.where((old >= 0)[:, None], fresh, past).contiguous()


@triton.jit
def _l2norm(x, out, rows, width, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_W)
    spot = row[:, None].to(tl.int64) * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    given = tl.load(x + spot, mask=inside, other=0.0).to(tl.float32)
    made = given * tl.rsqrt(tl.sum(given * given, 1) + 1e-6)[:, None]
    tl.store(out + spot, made.to(out.dtype.element_ty), mask=inside)


def l2norm(x: Tensor) -> Tensor:
    """Each row divided by its length, for kernels that do not do that themselves."""
    width = x.shape[-1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, wide = out.numel() // max(width, 1), _power(width)
    block = max(1, 2048 // wide)
    _launch(_l2norm, (triton.cdiv(rows, block), 1, 1), (x.contiguous(), out), (rows, width), (block, wide))
    return out
