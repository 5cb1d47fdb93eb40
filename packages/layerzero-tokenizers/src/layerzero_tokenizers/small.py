"""Small tokenizers of each library, trained on the spot: for the demo, examples, benchmarks and tests.

Nothing is fetched and nothing is shipped but the sentences below.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections import Counter
from typing import Any

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic, it's fine; 123 456 numbers!",
    "Größe naïve café, 日本語 テキスト, emoji 😀👍🏽 and 👨‍👩‍👧 families; שלום مرحبا.",
    "You are a helpful assistant. Answer the question of the user as well as you can, step by step.",
    "def f(x):\n    return x ** 2\n\nmany different words are useful for training models of language",
    "ﬁne １２３ Straße e\u0301clair, tabs\tand\u00a0spaces, URLs http://example.org/a?b=c",
] * 20
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
    r"\s+(?!\S)|\s"
)


def byte_level(
    pre: Any, *, special: tuple[str, ...] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>"), vocab: int = 700
) -> Any:
    """Byte-level BPE behind this pre-tokenizer, nothing around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def gpt2(**options: Any) -> Any:
    """Byte-level BPE with GPT-2's regex, nothing around a text."""
    from tokenizers import pre_tokenizers

    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), **options)


@functools.cache
def ranks() -> dict[bytes, int]:
    """A small merge table of ours: all bytes, then the commonest pairs of the corpus, merged one after the other."""
    table = {bytes([byte]): byte for byte in range(256)}
    sentences = (" " + " ".join(CORPUS[:5])).encode().replace(b" ", b"\n ")
    words = [[bytes([byte]) for byte in word] for word in sentences.split(b"\n")]
    while len(table) < 500:
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(counts, key=lambda pair: (counts[pair], pair))
        table[best[0] + best[1]] = len(table)
        for index, word in enumerate(words):
            merged, at = [], 0
            while at < len(word):
                if at + 1 < len(word) and (word[at], word[at + 1]) == best:
                    merged.append(word[at] + word[at + 1])
                    at += 2
                else:
                    merged.append(word[at])
                    at += 1
            words[index] = merged
    return table


def encoding(name: str = "ours", pattern: str = CL100K, special: dict[str, int] | None = None) -> Any:
    """A tiktoken encoding over our merge table."""
    import tiktoken

    tokens = {"<|endoftext|>": 500, "<|im_start|>": 501, "<|im_end|>": 502} if special is None else special
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks(), special_tokens=tokens)


@functools.cache
def sp_bytes(kind: str = "unigram", **options: Any) -> bytes:
    """A SentencePiece model file."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=options.pop("vocab_size", 300), model_type=kind,
        character_coverage=1.0, hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def processor(kind: str = "unigram", **options: Any) -> Any:
    """A SentencePiece processor."""
    import sentencepiece

    training = {
        name: options.pop(name) for name in ("byte_fallback", "user_defined_symbols", "vocab_size") if name in options
    }
    return sentencepiece.SentencePieceProcessor(model_proto=sp_bytes(kind, **training), **options)
