"""Which library may serve which tokenizer: the proof, the verdicts that selection reads, and the measured times."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from layerzero.model.context import Context
from layerzero.reasons import Reason, reason
from layerzero.runtime.state import state
from layerzero_tokenizers.convert import NotConvertible, hf_to_tiktoken, sentencepiece_to_hf, tiktoken_to_hf
from layerzero_tokenizers.engines import Engine
from layerzero_tokenizers.identity import Opened, Tokenizer

# The probe corpus: texts on which two tokenizers must agree before one may stand in for the other. Deterministic.
EDGES: tuple[str, ...] = (
    "", " ", "  ", "   ", "\n", "\r\n", "\t", " \n", "\n ", "\n\n\n", "a", " a", "a ", " a ", "a  b", "a   b", "  a  ",
    "a\nb", "a\n\nb", "a \n b", "a\r\nb", "a\tb", "\t\ta", "a\u00a0b", "a\u2003b", "a\u200bb", "\ufeffa", "\u3000a",
    "Hello, world!", "don't DON'T we'll I'M you've they're he'd it's", "'s 't 're ''s '' ' x's's", "“quoted” ‘text’",
    "1", "12", "123", "1234", "12345", "1,234,567.89", "3.14e-10", "0x1F", "v2.0.1", "²³½¾", "٣٤٥", "１２３", "Ⅳ ⅷ",
    "CamelCaseHTTPServer", "snake_case_name", "kebab-case", "ALLCAPS", "mIxEd", "ﬁ ﬂ ﬃ", "Straße STRASSE ẞ", "İıIi",
    "café", "cafe\u0301", "Å Å A\u030a", "n\u0303 ñ", "e\u0301\u0301\u0301", "\u0301start",
    "q\u0307\u0323 q\u0323\u0307",
    "한국어", "\u1112\u1161\u11ab", "日本語テキスト", "中文字符。", "ｶﾀｶﾅ", "カ゛ガ", "ไทยภาษา", "हिन्दी क्षि", "தமிழ்",
    "עברית שלום", "العربية مرحبا", "مرحبا 123 hello", "\u202eabc\u202c", "\u200fRTL\u200e", "ﷺ", "ﻻ",
    "😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️ ❤", "e\u20e3 1️⃣", "a😀b 😀 😀😀", "\U0001f9d1\u200d\U0001f680",
    "\x00", "a\x00b", "\x01\x02\x7f", "\x85\u2028\u2029", "\ufffd", "a\ufffdb", "\ufffe", "\U0010ffff", "\ue000",
    "x" * 300, "ab" * 200, " " * 70, "\n" * 40, "!" * 50, "a b " * 60, "😀" * 20, "日" * 60, "e\u0301" * 30,
    "http://example.org/a?b=c&d=%20#e", "user@example.org", "<s>", "</s>", "[CLS] [SEP] [MASK] [UNK] [PAD]",
    "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>", "a<s>b", " <s> ", "<s><s>", "<S>", "▁", "▁▁a", "a▁b", "Ġ Ċ Âł",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n", "{\"a\": [1, 2.5, null, true]}", "a/b\\c|d",
    "∀x∈ℝ: ⌈x⌉ ≥ x", "€100 £20 ¥3 $4", "→ ⇒ ↔", "…—–-‐", "§¶†‡", "\u00ad soft\u00adhyphen", "a\u034fb", "ǆ ǅ Ǆ",
)  # fmt: skip

_POOLS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", " ", "  \n\t", ".,;:!?'\"-()",
    "'sdmtrevl",
    "äöüßéèñçåøæœ", "\u0301\u0308\u0323\u200d\ufe0f", "日本語中文字한국어", "אבגדהوزحطي",
    "😀👍🏽👨👩👧🏳🌈", "\u00a0\u2003\u3000\u200b",
    "ǅﬁ½²Ⅳ٣", "<>|/_[]{}#",
)  # fmt: skip


def probe_corpus(vocab: Sequence[str], special: Sequence[str]) -> list[str]:
    """Edge cases, random mixes of scripts, the vocabulary's own strings alone and in pairs, special tokens inside."""
    rng, count = random.Random(20_240_229), 400
    texts = list(EDGES)
    texts += [f"{left}{token}{right}" for token in special for left, right in (("", ""), ("a", "b"), (" ", " x"))]
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            pool = rng.choice(_POOLS)
            parts.append("".join(rng.choice(pool) for _ in range(rng.randint(1, 6))))
            if special and rng.random() < 0.05:
                parts.append(rng.choice(special))
        texts.append("".join(parts))
    known = [item for item in vocab if item]
    texts += known
    texts += ["".join(rng.choice(known) for _ in range(rng.randint(2, 5))) for _ in range(count if known else 0)]
    return texts


def sweep(stride: int) -> Iterable[str]:
    """Code points of planes 0 and 1 between letters, digits and spaces: two regex engines may know two Unicodes."""
    points = [c for c in range(0x80, 0x20000, stride) if not 0xD800 <= c < 0xE000]
    for at in range(0, len(points), 64):
        yield "".join(f"x{chr(c)}y {chr(c)}1 " for c in points[at : at + 64])


KERNELS = {"tokenizers": "fast", "tiktoken": "bpe", "sentencepiece": "processor"}
# home -> the other library that could serve its tokenizers, and the way there
_WAYS: dict[str, tuple[str, Callable[..., Engine]]] = {
    "tokenizers": ("tiktoken", hf_to_tiktoken),
    "tiktoken": ("tokenizers", tiktoken_to_hf),
    "sentencepiece": ("tokenizers", sentencepiece_to_hf),
}
_SAMPLE = "The quick brown fox jumps over the lazy dog, and 12 jugs of liquor don't mind."


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one library for one tokenizer: None for identical, else the reason against it."""

    ids: Reason | None
    offsets: Reason | None
    decode: Reason | None
    texts: int = 0


# digest -> (home, backend -> Verdict); filled when a handle is made and when a library is proven
_known: dict[str, tuple[str, dict[str, Verdict]]] = {}
# (digest, backend) -> verdict and engine: a tokenizer met twice is proven once
_proven: dict[tuple[str, str], tuple[Verdict, Engine | None]] = {}


def register(handle: Tokenizer) -> None:
    """Make a handle known to selection: its own library serves it."""
    _known.setdefault(handle.fingerprint.digest, (handle.home, {}))


def verdicts(handle: Tokenizer) -> dict[str, Verdict]:
    """What was found for each other library; empty before a proof."""
    return dict(_known[handle.fingerprint.digest][1])


def prove(handle: Tokenizer, opened: Opened, *, thorough: bool) -> None:
    """Hold the other library that could serve a tokenizer against its own on the probe corpus; where equal, it may.

    It is timed then, as the tokenizer's own is. Nothing happens where it is not installed.
    """
    backend, convert = _WAYS[handle.home]
    if importlib.util.find_spec(backend) is None:
        return
    digest = handle.fingerprint.digest
    if (digest, backend) not in _proven:
        _proven[digest, backend] = _judge(opened, convert, thorough)
    verdict, engine = _proven[digest, backend]
    _known[digest] = (handle.home, {**_known[digest][1], backend: verdict})
    if engine is not None:
        handle.engines[backend] = engine
        _measure(handle)


def _judge(opened: Opened, convert: Callable[..., Engine], thorough: bool) -> tuple[Verdict, Engine | None]:
    own, special = opened.engine, opened.special_texts
    around = () if own.backend == "tiktoken" else (opened.prefix, opened.suffix)
    try:
        engine = convert(*opened.parts, *around)
    except Exception as error:  # a vendor's own refusal to build it, if not ours
        said = str(error) if isinstance(error, NotConvertible) else f"{type(error).__name__}: {error}"[:200]
        why = reason("TOKENIZER_NOT_CONVERTIBLE", said, own.backend)
        return Verdict(why, why, why), None
    step = max(1, opened.vocab_size // 4_000)
    vocab = [_text(own, number) for number in range(0, opened.vocab_size, step)]
    verdict = compare(own, engine, probe_corpus(vocab, special), special)
    if verdict.ids is None:
        swept = list(sweep(1 if thorough else 7))
        wrong = _swept(own, engine, swept)
        verdict = replace(verdict, ids=wrong, offsets=wrong or verdict.offsets, texts=verdict.texts + len(swept))
    return verdict, engine if verdict.ids is None or verdict.decode is None else None


def _text(engine: Engine, number: int) -> str:
    try:
        return engine.decode([number], False)
    except Exception:  # a hole in the numbering
        return ""


def _swept(own: Engine, other: Engine, texts: list[str]) -> Reason | None:
    """The first code point run on which the ids differ."""
    pairs = zip(texts, own.encode_batch(texts, False, True), other.encode_batch(texts, False, True), strict=True)
    differing = next((text for text, left, right in pairs if left != right), None)
    return None if differing is None else reason("TOKENIZER_DIFFERS", f"ids of {differing[:20]!r}...", own.backend)


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
            same = other.encode(text, True, True) == ids
            if same and any(item in text for item in special):
                same = other.encode(text, False, False) == own.encode(text, False, False)
            if not same:
                differ("ids", text)
            if found["offsets"] is None:
                if other.encode_offsets(text, True, True) != own.encode_offsets(text, True, True):
                    differ("offsets", text)
            rows = ((ids, False), (ids[1::2], True))  # every second token: broken characters too
            if any(other.decode(row, skip) != own.decode(row, skip) for row, skip in rows):
                differ("decode", text)
        except Exception:  # an engine that raises where the other does not is not the same
            for kind in found:
                differ(kind, text)
        if all(found.values()):
            break
    offsets = found["offsets"] or found["ids"]
    return Verdict(found["ids"], offsets, found["decode"], len(texts))


# (op, tokenizer_id, kernel id) -> median µs of this process
_times: dict[tuple[str, str, str], float] = {}


def time_of(op: str, tokenizer_id: str, kernel_id: str) -> float | None:
    """The measured median in µs, None for what was never measured."""
    return _times.get((op, tokenizer_id, kernel_id))


def _measure(handle: Tokenizer) -> None:
    """Median µs of each engine that may serve the handle, interleaved; selection weighs them from the next call on."""
    ids = handle.engines[handle.home].encode(_SAMPLE, True, True)
    for op in ("tokenize", "detokenize"):
        calls: dict[str, Callable[[], Any]] = {
            f"{backend}.{op}.{KERNELS[backend]}": partial(engine.encode, _SAMPLE, True, True)
            if op == "tokenize"
            else partial(engine.decode, ids, False)
            for backend, engine in handle.engines.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(60):
            for name, call in calls.items():
                start = time.perf_counter_ns()
                call()
                samples[name].append((time.perf_counter_ns() - start) / 1e3)
        for name, values in samples.items():
            _times[op, handle.tokenizer_id, name] = statistics.median(values)
    _publish()


def _publish() -> None:
    """Put the times before the measurements that selection has."""
    before = state.world.measurements
    inner = getattr(before.lookup, "inner", before)

    def lookup(kernel_id: str, ctx: Context) -> float | None:
        if ctx.tokenizer is not None:
            return time_of(ctx.op, ctx.tokenizer.tokenizer_id, kernel_id)
        return inner.lookup(kernel_id, ctx)

    lookup.inner = inner  # type: ignore[attr-defined]
    content = hashlib.sha256(repr(sorted(_times.items())).encode()).hexdigest()[:16]
    fingerprint = f"{inner.fingerprint}+tokenizers:{content}"
    state.publish(measurements=replace(inner, lookup=lookup, fingerprint=fingerprint))


# -- what selection asks -------------------------------------------------------------------------
def _serves(backend: str) -> Callable[[Context], list[Reason]]:
    def serves(ctx: Context) -> list[Reason]:
        assert ctx.tokenizer is not None
        digest = ctx.tokenizer.tokenizer_id.rpartition(":")[2]  # the same in any namespace
        home, table = _known.get(digest, ("", {}))
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
