"""The recurrence behind the delta rules and Mamba-2, token by token and in chunks.

    S = exp(g) * S;   u = beta * (v - k S), or u = v where there is no beta;   S = S + k^T u;   o = q S

over a state S [N, H, K, V], with q, k [N, H, L, K], v [N, H, L, V], g [N, H, L, 1] or [N, H, L, K] and beta
[N, H, L, 1]. A token with g = 0, k = 0 and beta = 0 leaves the state as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sequential(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other: the definition."""
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        u = v[:, :, t]
        if beta is not None:
            u = beta[:, :, t] * (u - torch.einsum("nhk,nhkv->nhv", k[:, :, t], state))
        state = state + k[:, :, t, :, None] * u[:, :, None]
        outs.append(torch.einsum("nhk,nhkv->nhv", q[:, :, t], state))
    return (torch.stack(outs, 2) if outs else v[:, :, :0]), state


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Many tokens at once as products of matrices; only the state goes from chunk to chunk.

    Within a chunk each u depends on those before it: a triangular system, solved for all of them together. Decays
    that differ by channel have to be told apart for every pair of tokens, so their chunks are shorter.
    """
    length = q.shape[2]
    if length <= 1:
        return sequential(q, k, v, g, beta, state)
    size = min(64 if g.shape[-1] == 1 else 16, length)
    q, k, v, g = (_in_chunks(item, size) for item in (q, k, v, g))
    total = g.cumsum(3)  # the decay from the chunk's start up to and with each token, as a logarithm
    from_start, to_end = total.exp(), (total[:, :, :, -1:] - total).exp()
    known, seen = v, None
    if beta is not None:
        b = _in_chunks(beta, size)
        system = _scores(b * k, k, total)  # the solver reads what is below the diagonal alone
        known, seen = _solve(system, b * v), _solve(system, b * k * from_start)
    weights, reading, writing = _scores(q, k, total), q * from_start, (k * to_end).transpose(-1, -2)
    outs = []
    for c in range(q.shape[2]):
        u = known[:, :, c] if seen is None else known[:, :, c] - seen[:, :, c] @ state
        outs.append(reading[:, :, c] @ state + weights[:, :, c] @ u)
        state = state * from_start[:, :, c, -1, :, None] + writing[:, :, c] @ u
    return torch.cat(outs, 2)[:, :, :length], state


def _in_chunks(item: Tensor, size: int) -> Tensor:
    """[N, H, L, …] as [N, H, chunks, size, …], zeros behind the end."""
    rest = -item.shape[2] % size
    return F.pad(item, (0, 0, 0, rest)).reshape(*item.shape[:2], -1, size, item.shape[3])


def _solve(system: Tensor, right: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return found


def _scores(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    """The products of tokens i >= j of each chunk, decayed from j to i; zeros above the diagonal."""
    size = a.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1)
    if total.shape[-1] == 1:
        decay = (total - total.transpose(-1, -2)).masked_fill(later, float("-inf")).exp()
        return (a @ b.transpose(-1, -2)) * decay
    decay = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(later[..., None], float("-inf")).exp()
    return torch.einsum("...ik,...jk,...ijk->...ij", a, b, decay)
