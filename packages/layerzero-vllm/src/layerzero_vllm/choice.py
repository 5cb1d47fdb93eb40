"""Which of vLLM's kernels and ours a layer kind gets: pure functions of what was measured when the engine started.

A layer kind is what attention kernels are told apart by; layers of one KV-cache group that are of one kind are measured
once. On a CPU the two sides pack the KV cache differently, so one of them writes and reads it in every phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

OURS, THEIRS = "layerzero", "vllm"
TRITON = "TRITON_ATTN"  # vLLM's other backend for CUDA, which reads the same pages as its FLASH_ATTN
Times = Mapping[str, Mapping[str, float]]  # phase, side, microseconds
Raced = Mapping[int, Mapping[str, float]]  # the same by number of rows or tokens
# A candidate of ours has to be clearly quicker: times taken at start-up scatter by a few per cent.
MARGIN = 1.02
# Experts are most of a model: their weights are held twice only for at least so much.
WORTH = 1.1


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the attention of a layer asks of a kernel."""

    device: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_cache_dtype: str = "auto"
    attn_type: str = "decoder"
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    non_causal: bool = False
    kv_transfer: bool = False

    def __str__(self) -> str:
        words = [f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}", self.dtype, self.attn_type]
        words += [f"window {self.window}"] if self.window else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += [name for name in ("alibi", "sinks", "non_causal", "kv_transfer") if getattr(self, name)]
        words += [f"KV {self.kv_cache_dtype}"] if self.kv_cache_dtype != "auto" else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Phase:
    """One kind of batch: `batch` sequences with `query` new tokens each after which they have `context` tokens."""

    name: str
    batch: int
    query: int
    context: int

    def __str__(self) -> str:
        return f"{self.name} B{self.batch}" if self.query == 1 else f"{self.name} B{self.batch}x{self.query}"


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a kind of layer in a phase, and why; times in microseconds by candidate."""

    kind: LayerKind
    phase: str
    winner: str
    reason: str
    kernel: str = ""
    times: Mapping[str, float] = field(default_factory=dict)

    def given_up(self, reason: str) -> Choice:
        """vLLM's instead, although ours was quicker here."""
        return replace(self, winner=THEIRS, kernel="vLLM's own", reason=f"{self.reason}; {reason}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the report holds them."""
        return asdict(self) | {"kind": str(self.kind), "times": dict(self.times)}


def phases(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    batches: Sequence[int] = (1, 16),
    long: int = 0,
) -> tuple[Phase, ...]:
    """Batches to measure: decode of one sequence and of many, a prompt, and a chunk of a prompt that began earlier.

    `long` is a context after which decode of the first two of `batches` is measured, too.
    """
    context = min(512, max_model_len)
    prompt = min(256, max_num_batched_tokens, max_model_len)
    found = []
    for place, batch in enumerate(min(batch, max_num_seqs) for batch in batches):
        found.append(Phase("decode", batch, 1, context))
        if place < 2 and min(long, max_model_len) > context:
            found.append(Phase("long decode", batch, 1, min(long, max_model_len)))
    found += [Phase("prefill", 1, prompt, prompt), Phase("chunked prefill", 1, min(128, prompt), context)]
    return tuple(dict.fromkeys(found))


def refusals(kind: LayerKind) -> tuple[str, ...]:
    """Why our ops cannot serve this kind of layer; empty where they can."""
    found = []
    if kind.attn_type != "decoder":
        found.append(f"{kind.attn_type} attention is left to vLLM")
    if kind.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
        found.append(f"a KV cache in {kind.kv_cache_dtype} is left to vLLM")
    if kind.kv_transfer:
        found.append("a KV cache that other engines read is packed as vLLM packs it")
    if kind.non_causal:
        found.append("attention that is not causal for every request is left to vLLM")
    return tuple(found)


def cannot_run(machine: str, dtype: str, capabilities: Mapping[str, Any]) -> str | None:
    """Why vLLM's attention would end this process (its code for ARM multiplies bfloat16); None where it runs."""
    if machine in ("aarch64", "arm64") and dtype == "bfloat16" and not capabilities.get("bf16", False):
        return "vLLM's kernel uses bfloat16 instructions, which this processor does not have"
    return None


def choose_one(
    kind: LayerKind,
    times: Times,
    kernels: Mapping[str, str],
    pinned: str | None = None,
    refused: Mapping[str, str] | None = None,
) -> list[Choice]:
    """One side for all of these phases, of those timed in each; `refused` says why others were not.

    Another side than vLLM's first has to be clearly quicker in the geometric mean, and clearly slower in no phase.
    """
    common = set.intersection(*(set(timed) for timed in times.values()))
    gains = {side: [timed[THEIRS] / timed[side] for timed in times.values()] for side in common}
    means = {side: math.exp(sum(map(math.log, ratios)) / len(ratios)) for side, ratios in gains.items()}
    able = [side for side in means if means[side] >= MARGIN and min(gains[side]) >= 1 / MARGIN]
    winner = pinned if pinned in means else max(able, key=means.__getitem__, default=THEIRS)
    named, found = {THEIRS: "vLLM's own", TRITON: f"vLLM's {TRITON}"}, []
    for phase, timed in times.items():
        said = []
        for side in sorted(set(timed) - {THEIRS}, reverse=True):
            ratio = timed[THEIRS] / timed[side]
            given_up = pinned is None and winner == THEIRS and ratio >= MARGIN
            said.append(f"{side} {ratio:.2f}x as quick" + (", but slower in another phase" if given_up else ""))
        reason = "; ".join([*said, *([f"{pinned} is pinned"] if pinned else []), *(refused or {}).values()])
        found.append(Choice(kind, phase, winner, reason, named.get(winner) or kernels[phase], dict(timed)))
    return found


def together(choices: Sequence[Choice]) -> list[Choice]:
    """Layers of one KV-cache group share a step's metadata: where their kinds differ in a phase, vLLM's serve all."""
    winners: dict[str, set[str]] = {}
    for choice in choices:
        winners.setdefault(choice.phase, set()).add(choice.winner)
    said = "layers of another kind in the same KV-cache group chose otherwise"
    return [one.given_up(said) if len(winners[one.phase]) > 1 and one.winner != THEIRS else one for one in choices]


def by_count(timed: Mapping[int, str], graphs: Sequence[int], most: int) -> list[str]:
    """The side for each number of sequences: of the graph that it is padded to, which goes as the next timed one."""
    padded = [
        min((size for size in graphs if size >= count), default=count) for count in range(max(most, *graphs, 0) + 1)
    ]
    return [timed[min((one for one in timed if one >= count), default=max(timed))] for count in padded]


def quicker(times: Times) -> str:
    """The side that all phases get: ours if it is clearly quicker in the geometric mean and clearly slower in none."""
    ratios = [timed[THEIRS] / timed[OURS] for timed in times.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return OURS if mean >= MARGIN and not any(map(lost, times.values())) else THEIRS


def lost(timed: Mapping[str, float]) -> bool:
    """Whether ours is so slow in a phase that no other phase can make up for it."""
    return timed[THEIRS] / timed[OURS] < 1 / MARGIN


def rows_won(times: Raced, all_rows: Sequence[int]) -> frozenset[int]:
    """The numbers of rows at which ours is the quicker linear; those not measured go as the last that was."""
    won = {rows for rows, timed in times.items() if timed[THEIRS] / timed[OURS] >= MARGIN}
    return frozenset(won | {rows for rows in all_rows if rows > max(times) and max(times) in won})


def experts_won(times: Raced, all_tokens: Sequence[int], *, room: bool, side: str | None = None) -> frozenset[int]:
    """The numbers of tokens at which ours runs the experts: all or none, unless two packings fit and are worth it."""
    if side == OURS:
        return frozenset(all_tokens)
    won = rows_won(times, all_tokens)
    if len(won) == len(all_tokens) or (room and any(timed[THEIRS] >= WORTH * timed[OURS] for timed in times.values())):
        return won
    return frozenset(all_tokens if quicker({str(tokens): timed for tokens, timed in times.items()}) == OURS else ())


def told(
    kind: str, counts: Sequence[int], unit: str, raced: tuple[Raced, Mapping[int, str]], won: Any, pinned: str | None
) -> list[dict[str, Any]]:
    """Rows of the report for what was raced by its number of rows or tokens: times, our kernels, and what ours won."""
    times, kernels = raced
    if not times:
        return [unraced(kind, "vllm is pinned" if pinned == THEIRS else "the two disagree on a drawn input")]
    rows: list[dict[str, Any]] = []
    for count, timed in times.items():
        ratio, ours = timed[THEIRS] / timed[OURS], count in won
        alone = "" if ours == (ratio >= MARGIN) else ", but one side serves all numbers"
        reason = f"{ratio:.2f}x as quick as vLLM's" + (f"; {pinned} is pinned" if pinned else alone)
        row = {"kind": kind, "phase": f"{count} {unit}", "winner": OURS if ours else THEIRS, "reason": reason}
        rows.append({**row, "kernel": kernels[count] if ours else "vLLM's own", "times": timed})
    rows[-1]["phase"] += "" if max(times) == counts[-1] else " and more"
    return rows


def unraced(kind: str, reason: str) -> dict[str, Any]:
    """The row of what vLLM serves for a reason that is no time."""
    return {"kind": kind, "phase": "all", "winner": THEIRS, "reason": reason, "kernel": "vLLM's own", "times": {}}


def left_alone(kind: LayerKind, names: Iterable[str], reason: str) -> list[Choice]:
    """vLLM serves a kind in all phases, for a reason that is no time."""
    return [Choice(kind, name, THEIRS, reason, "vLLM's own") for name in names]
