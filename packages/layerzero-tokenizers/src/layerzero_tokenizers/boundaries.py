"""Where a text may be cut in two without changing a single id.

The one place used is between a printable ASCII character and a space (U+0020). For the tokenizers accepted here this
is shown as follows; for every other tokenizer nothing is cut.

1. Splitting. Each accepted splitter (a regex of `PATTERNS`, ByteLevel, Metaspace, Bert, Whitespace) ends a piece
   before a space that follows a visible character: no alternative of any of these regexes matches a visible ASCII
   character followed by a space. They look ahead only from white space (`\\s+(?!\\S)`, `\\s++$`) or by the character
   that ends a run, and the end of the text ends a run as the space does; so the pieces before the cut do not depend on
   what follows. None looks behind, and the second half begins with its space, so the pieces after the cut do not
   depend on what came before; for the same reason no prefix space is added to it.
2. Models. Pieces are encoded one by one (BPE, WordPiece, Unigram). SentencePiece BPE has no pieces; there no symbol of
   the vocabulary has a visible character before ▁, so no merge crosses the cut. SentencePiece Unigram is not
   accepted: it adds up float32 scores along the whole text, and a near tie may fall the other way.
3. Normalizers. Accepted are those that map characters one by one, or compose: a space never composes with what
   precedes it, and ASCII has no decomposition.
4. Added tokens are found before all this. Those that strip white space, ask for whole words or contain white space
   could lie across the cut; a tokenizer that has one is not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The families of patterns in use, as their models write them; possessive or not makes no difference to the argument.
PATTERNS = frozenset({
    GPT2,
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "|".join((
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    )),
})  # fmt: skip

_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"})
_WORDS = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})


def last_cut(text: str, end: int, start: int = 1) -> int:
    """The last place n in text[start:end] where a text may be cut; text[n] is a space. 0: there is none."""
    while True:
        at = text.rfind(" ", start, end)
        if at <= 0:
            return 0
        if "!" <= text[at - 1] <= "~":
            return at
        end = at


def whitespace_free(tokens: Iterable[str]) -> bool:
    """Whether no special token contains white space, and none is empty."""
    return all(token and not any(char.isspace() for char in token) for token in tokens)


def tiktoken_splits(pattern: str, special: Iterable[str]) -> bool:
    """Whether texts of this encoding may be cut."""
    return pattern in PATTERNS and whitespace_free(special)


def hf_splits(document: Mapping[str, Any]) -> bool:
    """Whether texts of the tokenizer in this tokenizer.json may be cut."""
    if document.get("truncation") or document.get("padding") or document["model"].get("dropout"):
        return False
    added = document.get("added_tokens") or ()
    if any(item.get("lstrip") or item.get("rstrip") or item.get("single_word") for item in added):
        return False
    if not whitespace_free(item["content"] for item in added):
        return False
    return _normalizer(document.get("normalizer")) and _splitter(document.get("pre_tokenizer"))


def _normalizer(item: Mapping[str, Any] | None) -> bool:
    if item is None:
        return True
    if item["type"] == "Sequence":
        return all(_normalizer(part) for part in item["normalizers"])
    return item["type"] in _NORMALIZERS


def _splitter(item: Mapping[str, Any] | None) -> bool:
    """The first splitter of a sequence makes the cut; the others see the same pieces with and without it."""
    if item is None:
        return False
    kind = item["type"]
    if kind == "Sequence":
        parts = item["pretokenizers"]
        # Metaspace asks where in the text a piece lies, so it may only come first.
        return bool(parts) and _splitter(parts[0]) and all(part["type"] != "Metaspace" for part in parts[1:])
    if kind == "ByteLevel":
        return bool(item.get("use_regex", True))
    if kind == "Metaspace":
        return bool(item.get("split", True)) and item.get("replacement", "▁") == "▁"
    if kind == "Split":
        isolated = item.get("behavior") == "Isolated" and not item.get("invert")
        return isolated and item["pattern"].get("Regex") in PATTERNS
    return kind in _WORDS


def sentencepiece_splits(model: Any) -> bool:
    """Whether texts of this model may be cut: see the module's docstring."""
    if model.model_type != "bpe" or model.whitespace_as_suffix or not model.escape_whitespaces:
        return False
    if model.add_dummy_prefix is not model.remove_extra_whitespaces:
        return False  # the second half would lose its space, or get a second one
    if any(piece.type == "user_defined" and ("▁" in piece.text or " " in piece.text) for piece in model.pieces):
        return False
    return not any("▁" in piece.text.lstrip("▁") for piece in model.pieces)
