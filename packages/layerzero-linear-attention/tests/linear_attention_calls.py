"""Calls of the ops for the tests of this package, and their answers: numpy, one head and one token at a time."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from layerzero.model.context import Context
from layerzero.tuning.inputs import Draw
from layerzero_linear_attention.ops import OPS


def delta(query, key, value, g, beta, initial_state, cu_seqlens, scale, qk_l2norm):
    """Both delta rules; g tells by its rank which."""
    q, k, v, g, beta = (np.asarray(item.detach(), dtype=np.float64) for item in (query, key, value, g, beta))
    heads, shared = v.shape[2], v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, states = np.zeros_like(v), []
    for n, (row, begin, end) in enumerate(spans(q.shape[0], q.shape[1], cu_seqlens)):
        for h in range(heads):
            state = np.zeros((q.shape[-1], v.shape[-1]))
            if initial_state is not None:
                state = np.asarray(initial_state.detach(), dtype=np.float64)[n, h].copy()
            for t in range(begin, end):
                a, b = q[row, t, h // shared], k[row, t, h // shared]
                if qk_l2norm:
                    a, b = a / np.sqrt(a @ a + 1e-6), b / np.sqrt(b @ b + 1e-6)
                state = np.exp(g[row, t, h]).reshape(-1, 1) * state
                state += np.outer(b, beta[row, t, h] * (v[row, t, h] - b @ state))
                out[row, t, h] = scale * a @ state
            states.append(state)
    return out, np.stack(states).reshape(-1, heads, q.shape[-1], v.shape[-1])


def scan(x, dt, A, B, C, D, dt_bias, initial_state, cu_seqlens, dt_softplus, dt_min, dt_max):
    """The scan of Mamba-2."""
    x, dt, A, B, C = (np.asarray(item.detach(), dtype=np.float64) for item in (x, dt, A, B, C))
    heads, shared = x.shape[2], x.shape[2] // B.shape[2]
    step = dt if dt_bias is None else dt + np.asarray(dt_bias.detach(), dtype=np.float64)
    step = np.logaddexp(0, step) if dt_softplus else step
    step = np.clip(step, dt_min, np.inf if dt_max is None else dt_max)
    out, states = np.zeros_like(x), []
    for n, (row, begin, end) in enumerate(spans(x.shape[0], x.shape[1], cu_seqlens)):
        for h in range(heads):
            state = np.zeros((x.shape[-1], B.shape[-1]))
            if initial_state is not None:
                state = np.asarray(initial_state.detach(), dtype=np.float64)[n, h].copy()
            for t in range(begin, end):
                state = np.exp(step[row, t, h] * A[h]) * state
                state += step[row, t, h] * np.outer(x[row, t, h], B[row, t, h // shared])
                out[row, t, h] = state @ C[row, t, h // shared]
                if D is not None:
                    out[row, t, h] += float(D[h]) * x[row, t, h]
            states.append(state)
    return out, np.stack(states).reshape(-1, heads, x.shape[-1], B.shape[-1])


def conv(x, weight, bias, initial_state, cu_seqlens, activation):
    """The causal convolution."""
    x, w = (np.asarray(item.detach(), dtype=np.float64) for item in (x, weight))
    width = w.shape[1]
    kept = width - 1 if initial_state is None else initial_state.shape[-1]
    out, states = np.zeros_like(x), []
    for n, (row, begin, end) in enumerate(spans(x.shape[0], x.shape[2], cu_seqlens)):
        past = np.zeros((x.shape[1], kept))
        if initial_state is not None:
            past = np.asarray(initial_state.detach(), dtype=np.float64)[n]
        columns = np.concatenate((np.zeros((x.shape[1], width)), past, x[row, :, begin:end]), 1)
        for t in range(begin, end):
            last = columns.shape[1] - (end - 1 - t)
            made = (columns[:, last - width : last] * w).sum(1)
            made = made if bias is None else made + np.asarray(bias.detach(), dtype=np.float64)
            out[row, :, t] = made / (1 + np.exp(-made)) if activation == "silu" else made
        states.append(columns[:, columns.shape[1] - kept :])
    return out, np.stack(states)


def spans(rows, tokens, cu_seqlens):
    """(row, begin, end) of every sequence."""
    if cu_seqlens is None:
        return [(row, 0, tokens) for row in range(rows)]
    offsets = cu_seqlens.tolist()
    return [(0, *pair) for pair in itertools.pairwise(offsets)]


ORACLES = {
    "gated_delta_rule": delta,
    "kimi_delta_attention": delta,
    "mamba2_scan": scan,
    "causal_conv1d": conv,
}
NAMES = tuple(ORACLES)
BY_NAME = {op.op_id: op for op in OPS}
NEEDS = {
    "plain": (),
    "state": ("initial_state",),
    "packed": ("varlen",),
    "everything": ("initial_state", "varlen", "qk_l2norm", "skip", "bias", "silu"),
}


def example(name, *needs, dtype="float64", device="cpu", seed=0, grad=False, **sizes):
    """Canonical arguments of one call."""
    op = BY_NAME[name]
    given = {key: found[-1] for key, found in op.sizes.items()} | sizes
    if name == "causal_conv1d" and "initial_state" not in needs:
        given["state_len"] = given["width"] - 1
    asked = frozenset(needs) & {*op.features, "mixed_weight"}
    rank = 3 if name == "causal_conv1d" else 4
    ctx = Context(name, dtype=dtype, dims=tuple(given.items()), needs=asked, rank=rank, needs_grad=grad)
    return op.example(Draw(ctx, torch.device(device), seed))


def along_tokens(name, args, begin, end):
    """The arguments of a stretch of a call's tokens."""
    axis, places = (2, (0,)) if name == "causal_conv1d" else (1, range(5))
    if name == "mamba2_scan":
        places = (0, 1, 3, 4)
    return [item.narrow(axis, begin, end - begin) if i in places else item for i, item in enumerate(args)]


STATE = {"gated_delta_rule": 5, "kimi_delta_attention": 5, "mamba2_scan": 7, "causal_conv1d": 3}
