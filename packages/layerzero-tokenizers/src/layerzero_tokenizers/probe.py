"""The probe corpus: texts on which two tokenizers must agree before one may stand in for the other. Deterministic."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

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


def probe_corpus(vocab: Sequence[str] = (), special: Sequence[str] = (), count: int = 400) -> list[str]:
    """Edge cases, random mixes of scripts, the vocabulary's own strings alone and in pairs, special tokens inside."""
    rng = random.Random(20_240_229)
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
    step = max(1, len(vocab) // 4_000)
    known = [item for item in vocab[::step] if item]
    texts += known
    texts += ["".join(rng.choice(known) for _ in range(rng.randint(2, 5))) for _ in range(count if known else 0)]
    return texts


def sweep(stride: int = 7) -> Iterable[str]:
    """Code points of planes 0 and 1 between letters, digits and spaces: two regex engines may know two Unicodes."""
    points = [c for c in range(0x80, 0x20000, stride) if not 0xD800 <= c < 0xE000]
    for at in range(0, len(points), 64):
        yield "".join(f"x{chr(c)}y {chr(c)}1 " for c in points[at : at + 64])
