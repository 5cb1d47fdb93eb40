"""Which library may serve which tokenizer: the proof, the verdicts that selection reads, and the measured times."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerzero.model.context import Context
from layerzero.reasons import Reason, reason
from layerzero_tokenizers.convert import NotConvertible
from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.handle import Tokenizer
from layerzero_tokenizers.probe import probe_corpus, sweep

KERNELS = {"tokenizers": "fast", "tiktoken": "bpe", "sentencepiece": "processor"}
_SAMPLE = "The quick brown fox jumps over the lazy dog, and 12 jugs of liquor don't mind."


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one library for one tokenizer: None for identical, else the reason against it."""

    ids: Reason | None
    offsets: Reason | None
    decode: Reason | None
    texts: int = 0


# tokenizer_id -> (home, backend -> Verdict); filled when a handle is made and when a library is proven
_known: dict[str, tuple[str, dict[str, Verdict]]] = {}
# (digest, backend) -> verdict and engine: a tokenizer met twice is proven once
_proven: dict[tuple[str, str], tuple[Verdict, Engine | None]] = {}


def register(handle: Tokenizer) -> None:
    """Make a handle known to selection: its own library serves it."""
    _known.setdefault(handle.tokenizer_id, (handle.home, {}))


def share(handle: Tokenizer, other: Tokenizer) -> None:
    """What holds for a handle holds for the same tokenizer in another namespace."""
    _known[other.tokenizer_id] = _known.get(handle.tokenizer_id, (handle.home, {}))


def verdicts(handle: Tokenizer) -> dict[str, Verdict]:
    """What was found for each other library; empty before a proof."""
    return dict(_known[handle.tokenizer_id][1]) if handle.tokenizer_id in _known else {}


def prove(
    handle: Tokenizer,
    backend: str,
    build: Callable[[], Engine],
    vocab: Sequence[str],
    special: Sequence[str],
    *,
    thorough: bool = False,
) -> Verdict:
    """Hold another library's engine against the tokenizer's own on the probe corpus; where equal, it may serve."""
    key = (handle.fingerprint.digest, backend)
    if key not in _proven:
        _proven[key] = _judge(handle, backend, build, vocab, special, thorough)
    verdict, engine = _proven[key]
    if engine is not None:
        handle.engines[backend] = engine
    home, table = _known[handle.tokenizer_id]
    _known[handle.tokenizer_id] = (home, {**table, backend: verdict})
    return verdict


def _judge(
    handle: Tokenizer, backend: str, build: Callable[[], Engine], vocab: Sequence[str], special: Sequence[str],
    thorough: bool,
) -> tuple[Verdict, Engine | None]:  # fmt: skip
    try:
        engine = build()
    except NotConvertible as error:
        why = reason("TOKENIZER_NOT_CONVERTIBLE", str(error), handle.home)
        return Verdict(why, why, why), None
    except Exception as error:  # a vendor's own refusal to build it
        why = reason("TOKENIZER_NOT_CONVERTIBLE", f"{type(error).__name__}: {error}"[:200], handle.home)
        return Verdict(why, why, why), None
    own = handle.engines[handle.home]
    verdict = compare(own, engine, probe_corpus(vocab, special), special)
    if verdict.ids is None:
        swept = list(sweep(1 if thorough else 7))
        wrong = _swept(own, engine, swept)
        verdict = replace(verdict, ids=wrong, offsets=wrong or verdict.offsets, texts=verdict.texts + len(swept))
    return verdict, engine if verdict.ids is None or verdict.decode is None else None


def _swept(own: Engine, other: Engine, texts: list[str]) -> Reason | None:
    """The first code point run on which the ids differ."""
    pairs = zip(texts, own.encode_batch(texts, False, True), other.encode_batch(texts, False, True), strict=True)
    for text, left, right in pairs:
        if left != right:
            return reason("TOKENIZER_DIFFERS", f"ids of {text[:20]!r}...", own.backend)
    return None


def compare(own: Engine, other: Engine, texts: Sequence[str], special: Sequence[str]) -> Verdict:
    """Ids, offsets and decoded text of every probe, in all modes; the first difference of each kind is the reason."""
    found: dict[str, Reason | None] = {"ids": None, "offsets": None, "decode": None}

    def differ(kind: str, text: str) -> None:
        if found[kind] is None:
            shown = text if len(text) <= 40 else text[:37] + "..."
            found[kind] = reason("TOKENIZER_DIFFERS", f"{kind} of {shown!r}", own.backend)

    for text in texts:
        try:
            ids = own.encode(text, True, True)
            if other.encode(text, True, True) != ids:
                differ("ids", text)
            elif special and any(item in text for item in special):
                if other.encode(text, False, False) != own.encode(text, False, False):
                    differ("ids", text)
            if found["offsets"] is None and other.encode_offsets(text, True, True) != own.encode_offsets(
                text, True, True
            ):
                differ("offsets", text)
            if other.decode(ids, False) != own.decode(ids, False) or other.decode(ids[1::2], True) != own.decode(
                ids[1::2], True
            ):  # every second token: broken characters too
                differ("decode", text)
        except Exception:  # an engine that raises where the other does not is not the same
            for kind in found:
                differ(kind, text)
        if all(found.values()):
            break
    offsets = found["offsets"] or found["ids"]
    return Verdict(found["ids"], offsets, found["decode"], len(texts))


def measure(handle: Tokenizer, rounds: int = 60) -> dict[str, dict[str, float]]:
    """Median µs of each engine that may serve the handle, interleaved; by op and kernel id. Selection learns them."""
    ids = handle.engines[handle.home].encode(_SAMPLE, True, True)
    runs: dict[str, dict[str, Callable[[], Any]]] = {"tokenize": {}, "detokenize": {}}
    for backend, engine in handle.engines.items():
        variant = KERNELS[backend]
        runs["tokenize"][f"{backend}.tokenize.{variant}"] = lambda engine=engine: engine.encode(_SAMPLE, True, True)  # type: ignore[misc]
        runs["detokenize"][f"{backend}.detokenize.{variant}"] = lambda engine=engine: engine.decode(ids, False)  # type: ignore[misc]
    times: dict[str, dict[str, float]] = {}
    for op, calls in runs.items():
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter_ns()
                call()
                samples[name].append((time.perf_counter_ns() - start) / 1e3)
        times[op] = {name: statistics.median(values) for name, values in samples.items()}
        _learn(op, handle.tokenizer_id, times[op])
    return times


# (op, tokenizer_id, kernel id) -> median µs of this process
_times: dict[tuple[str, str, str], float] = {}


def time_of(op: str, tokenizer_id: str, kernel_id: str) -> float | None:
    """The measured median in µs, None for what was never measured."""
    return _times.get((op, tokenizer_id, kernel_id))


def _learn(op: str, tokenizer_id: str, times: Mapping[str, float]) -> None:
    """Times by kernel id; selection weighs them from the next call on."""
    from layerzero.runtime.state import state  # registering the ops needs none of it

    _times.update({(op, tokenizer_id, kernel_id): us for kernel_id, us in times.items()})
    before = state.world.measurements
    inner = getattr(before.lookup, "inner", before)

    def lookup(kernel_id: str, ctx: Context) -> float | None:
        if ctx.tokenizer is not None:
            return _times.get((ctx.op, ctx.tokenizer.tokenizer_id, kernel_id))
        return inner.lookup(kernel_id, ctx)

    lookup.inner = inner  # type: ignore[attr-defined]
    content = hashlib.sha256(repr(sorted(_times.items())).encode()).hexdigest()[:16]
    fingerprint = f"{inner.fingerprint}+tokenizers:{content}"
    state.publish(measurements=replace(inner, lookup=lookup, fingerprint=fingerprint))


# -- what selection asks -------------------------------------------------------------------------
def _serves(backend: str) -> Callable[[Context], list[Reason]]:
    def serves(ctx: Context) -> list[Reason]:
        assert ctx.tokenizer is not None
        home, table = _known.get(ctx.tokenizer.tokenizer_id, ("", {}))
        if home == "":
            return [reason("TOKENIZER_NOT_PROVEN", backend, "a tokenizer that was never loaded")]
        if backend in (home, "own"):  # its own library serves whatever was loaded
            return []
        if "live_tokenizer" in ctx.needs:
            return [reason("TOKENIZER_LIVE", backend, home)]
        verdict = table.get(backend)
        if verdict is None:
            return [reason("TOKENIZER_NOT_PROVEN", backend, home)]
        why = verdict.decode if ctx.op == "detokenize" else verdict.offsets if "offsets" in ctx.needs else verdict.ids
        return [] if why is None else [why]

    return serves


hf_serves, tiktoken_serves, sp_serves = _serves("tokenizers"), _serves("tiktoken"), _serves("sentencepiece")
own_serves = _serves("own")
