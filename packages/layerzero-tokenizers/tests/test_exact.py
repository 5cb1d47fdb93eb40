"""Ids, offsets and text are those of each library itself, to the last one."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import tolerance
from layerzero.runtime.state import state
from layerzero_tokenizers import load, small
from layerzero_tokenizers.candidates import EDGES
from tools.pytest_fixtures import module_beside

kinds = module_beside(__file__, "trained_kinds")

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
EXAMPLES = 2_600 if PROVE else 25  # for each of eight tokenizers: over 20 000 with the hand-picked ones
HAND = [
    *EDGES,
    "Å vs Å vs A\u030a; ﬁ→fi; ①②; ㎏; \u1e9b\u0323; ½; ﷺ",
    "the <s>special</s> <|im_start|>user\nhello<|im_end|> [CLS] [MASK]x <|endoftext|>!",
    "<|im_start|><|im_start|>",
    "[SEP][SEP] [sep]",
    "word " * 3_000,
    "a" * 20_000,
    "line\n" * 500,
    "\x00" * 10,
    "مرحبا بالعالم " * 20,
    "👩‍🚀🏴‍☠️ " * 20,
]
TEXT = st.one_of(
    st.text(max_size=200),
    st.text(st.sampled_from("abc XYZ'sd.,123\n\t é\u0301日😀\u200d👍🏽א<|>[]_▁"), max_size=120),
    st.lists(st.sampled_from([*EDGES, *small.CORPUS[:5]]), max_size=6).map("".join),
)


def own_ids(tok, text, *, add=True, special=True):
    """The ids by calling the library as its own documentation does."""
    home = type(tok).__module__.partition(".")[0]
    if home == "tokenizers":
        return tok.encode(text, add_special_tokens=add).ids
    if home == "tiktoken":
        return tok.encode(text, allowed_special="all") if special else tok.encode(text, disallowed_special=())
    return tok.encode(text)


def own_text(tok, ids):
    if type(tok).__module__.startswith("tokenizers"):
        return tok.decode(ids, skip_special_tokens=False)
    return tok.decode(ids)


def own_offsets(tok, text):
    home = type(tok).__module__.partition(".")[0]
    if home == "tokenizers":
        return tok.encode(text).offsets
    if home == "tiktoken":
        ids = tok.encode(text, allowed_special="all")
        return None if not ids else tok.decode_with_offsets(ids)[1]
    return [tuple(item) for item in tok.encode(text, return_type="offset_mapping")["offsets"]]


def check(tok, handle, text):
    ids = own_ids(tok, text)
    assert lz.tokenize(text, handle) == ids
    assert lz.detokenize(ids, handle) == own_text(tok, ids)
    found = lz.tokenize(text, handle, return_offsets=True)
    assert found.ids == ids
    wanted = own_offsets(tok, text)
    if type(tok).__module__.startswith("tiktoken"):  # it has starts alone
        assert [start for start, _ in found.offsets] == (wanted or [])
    else:
        assert found.offsets == wanted


@pytest.mark.req("R-TOK-01", "R-TOK-02", "R-TOK-03", "R-TOK-05", "R-TOL-05")
def test_hand_picked_texts_are_exact(tok, handle):
    for text in HAND:
        check(tok, handle, text)
    ids = [own_ids(tok, text) for text in HAND]
    assert lz.tokenize(HAND, handle) == ids
    assert lz.detokenize(ids, handle) == [own_text(tok, row) for row in ids]
    assert [item.ids for item in lz.tokenize(HAND, handle, return_offsets=True)] == ids


@pytest.mark.timeout(1800)
@pytest.mark.req("R-TOK-01", "R-TOK-02", "R-TOK-03", "R-TOK-05")
def test_generated_texts_are_exact(tok, handle):
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
    )
    @given(TEXT)
    def run(text):
        check(tok, handle, text)

    run()


@pytest.mark.req("R-TOK-01")
def test_every_backend_that_may_serve_gives_the_same(tok, handle):
    for backend in (*handle.engines, "own"):
        for text in (*EDGES[::5], *small.CORPUS[:5]):
            assert lz.tokenize(text, handle, backend=backend) == own_ids(tok, text), backend


@pytest.mark.req("R-TOK-01", "R-TOK-05")
def test_special_tokens_in_a_text_can_be_read_as_text(make, opened):
    text = "a <s>b</s> <|im_start|>"
    for name in ("gpt2", "llama3"):
        tok, handle = make(name), opened(name)
        parsed, plain = lz.tokenize(text, handle), lz.tokenize(text, handle, parse_special=False)
        assert tok.token_to_id("<s>") in parsed[1:] and tok.token_to_id("<|im_start|>") in parsed
        assert tok.token_to_id("<|im_start|>") not in plain
        assert lz.detokenize(plain, handle, skip_special_tokens=True) == text
        assert lz.detokenize(parsed, handle, skip_special_tokens=True) == "a b "
    enc = make("cl100k")
    assert lz.tokenize("x<|endoftext|>", opened("cl100k"), parse_special=False) == enc.encode_ordinary("x<|endoftext|>")
    assert lz.tokenize("x<|endoftext|>", opened("cl100k"))[-1] == 500


@pytest.mark.req("R-TOK-01")
def test_what_is_put_around_a_text_can_be_left_out(make, opened):
    tok, handle = make("bert"), opened("bert")
    assert lz.tokenize("the dog", handle)[0] == 2 and lz.tokenize("the dog", handle)[-1] == 3
    assert (
        lz.tokenize("the dog", handle, add_special_tokens=False) == tok.encode("the dog", add_special_tokens=False).ids
    )
    with_bos = small.processor("bpe", add_bos=True, add_eos=True)
    assert lz.tokenize("the dog", with_bos) == with_bos.encode("the dog")
    assert lz.tokenize("the dog", with_bos, add_special_tokens=False) == small.processor("bpe").encode("the dog")


@pytest.mark.req("R-TOK-03")
def test_sentencepiece_normalises_as_its_model_says(make, opened):
    assert lz.tokenize("ﬁne １２３", opened("sp_bpe")) == lz.tokenize("fine 123", opened("sp_bpe"))
    assert lz.tokenize("ﬁne １２３", opened("sp_bpe")) == make("sp_bpe").encode("fine 123")


@pytest.mark.req("R-TOK-09")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama3"])
def test_truncation_and_padding_are_those_of_the_library(name, side, make, opened):
    tok = type(make(name)).from_str(make(name).to_str())
    texts = ["the quick brown fox jumps", "a", "", "numbers 123 and words of language models"]
    tok.enable_truncation(7, direction=side)
    wanted = [item.ids for item in tok.encode_batch(texts)]
    assert lz.tokenize(texts, opened(name), max_length=7, truncation_side=side) == wanted
    tok.enable_padding(direction=side, pad_id=0, pad_token="[PAD]")
    padded = tok.encode_batch(texts)
    batch = lz.tokenize(
        texts, opened(name), max_length=7, truncation_side=side, padding="longest", padding_side=side, pad_id=0
    )
    assert torch.equal(batch.input_ids, torch.tensor([item.ids for item in padded]))
    assert torch.equal(batch.attention_mask, torch.tensor([item.attention_mask for item in padded]))
    spans = lz.tokenize(texts, opened(name), max_length=7, truncation_side=side, return_offsets=True)
    tok.no_padding()
    assert [item.offsets for item in spans] == [item.offsets for item in tok.encode_batch(texts)]


@pytest.mark.req("R-TOK-09")
def test_padding_to_a_length_and_what_cannot_be_padded(opened):
    batch = lz.tokenize(["the dog", "a"], opened("bert"), padding=12, return_offsets=True)
    assert batch.input_ids.shape == (2, 12) and len(batch.offsets[1]) == 12
    alone = lz.tokenize("the dog", opened("bert"), padding="longest")
    assert alone.input_ids.shape[0] == 1 and alone.attention_mask.all()
    for wrong in ({"padding": 1}, {"padding": "short"}, {"padding": 20, "padding_side": "up"}, {"max_length": 1}):
        with pytest.raises(InvalidInputError):
            lz.tokenize("the quick dog", opened("bert"), **wrong)
    with pytest.raises(InvalidInputError) as caught:
        lz.tokenize(["a"], opened("gpt2"), padding="longest")
    assert "no padding token" in str(caught.value)


@pytest.mark.req("R-TOK-09")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["cl100k", "sp_bytes"])
def test_libraries_without_truncation_and_padding_get_them(name, side, make, opened):
    """tiktoken and SentencePiece only encode: what is kept and filled is worked out from their ids."""
    texts = ["the quick brown fox jumps", "a", "", "numbers 123 and words of language models"]
    rows = [own_ids(make(name), text) for text in texts]
    kept = [row[:7] if side == "right" else row[-7:] for row in rows]
    assert lz.tokenize(texts, opened(name), max_length=7, truncation_side=side) == kept
    options = {"max_length": 7, "truncation_side": side, "padding_side": side, "pad_id": 3}
    batch = lz.tokenize(texts, opened(name), padding="longest", **options)
    right = side == "right"
    filled = [[*row, *[3] * (7 - len(row))] if right else [*[3] * (7 - len(row)), *row] for row in kept]
    real = [[1] * len(row) + [0] * (7 - len(row)) for row in kept]
    assert batch.input_ids.tolist() == filled
    assert batch.attention_mask.tolist() == [row if right else row[::-1] for row in real]


@pytest.mark.req("R-TOK-09")
@pytest.mark.parametrize("name", ["gpt2", "cl100k", "sp_bytes"])
def test_a_batch_is_one_selection_and_one_call_of_the_library(name, make, opened):
    handle, calls = opened(name).within("batch"), []

    class Counting:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            found = getattr(self._engine, name)
            return (lambda *args: calls.append(name) or found(*args)) if callable(found) else found

    handle.engines = {backend: Counting(engine) for backend, engine in handle.engines.items()}
    texts = [f"text {number} of many" for number in range(200)]
    before = state.counters.selections
    assert lz.tokenize(texts, handle) == [own_ids(make(name), text) for text in texts]
    assert calls == ["encode_batch"] and state.counters.selections == before + 1


@pytest.mark.req("R-TOL-05")
def test_tokens_and_texts_are_held_to_equality():
    """By the ops themselves: an op without a row of its own would be let off in a dtype that is not whole numbers."""
    lz.list_ops()
    assert all(tolerance(op, dtype).exact for op in ("tokenize", "detokenize") for dtype in ("int64", "float32"))


def test_a_tokenizer_that_truncates_by_itself_still_does():
    tok = kinds.bert()
    tok.enable_truncation(5)
    text = "the quick brown fox jumps over the lazy dog"
    assert lz.tokenize(text, tok) == tok.encode(text).ids and len(tok.encode(text).ids) == 5


@pytest.mark.req("R-TOK-05")
def test_merges_written_by_hand_are_followed_in_their_own_order():
    """The order of the merges is not that of the ids, and one merge crosses what another would have joined."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = [("c", "d"), ("b", "c"), ("a", "b"), ("ab", "cd"), ("Ã", "©"), ("Ġ", "a")]
    vocab |= {left + right: 400 - number for number, (left, right) in enumerate(merges)}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.add_special_tokens(["<|cd|>"])
    handle = load(tok)
    assert [tok.id_to_token(item) for item in lz.tokenize("abcd bc abc", handle)] == [
        "abcd", "Ġ", "bc", "Ġa", "bc"
    ]  # fmt: skip
    for text in ("abcd bc abc", "e\u0301 é", "ab<|cd|>cd <|cd|>", "dcba ab", *HAND):
        check(tok, handle, text)
        for backend in handle.engines:
            assert lz.tokenize(text, handle, backend=backend) == tok.encode(text).ids, backend


@pytest.mark.req("R-TOK-05")
def test_lone_surrogates_are_refused_with_their_place(handle):
    for _ in range(2):  # cold and hot
        with pytest.raises(InvalidInputError) as caught:
            lz.tokenize("ab\ud800c", handle)
        assert caught.value.code == "TEXT_INVALID"
        assert (caught.value.reasons[0].value, caught.value.reasons[0].limit) == ("U+D800", "character 2")
        lz.tokenize("warm", handle)
    with pytest.raises(InvalidInputError) as caught:
        lz.tokenize(["fine", "x\udfff"], handle)
    assert "text[1], character 1" in str(caught.value)


def test_what_is_no_text_and_what_are_no_ids_is_refused(handle):
    for wrong in (None, 3, b"bytes", ["a", 3]):
        with pytest.raises(InvalidInputError) as caught:
            lz.tokenize(wrong, handle)
        assert caught.value.code == "TYPE_INVALID"
    for wrong in ("text", 3, torch.zeros(2), torch.zeros(2, 2, 2, dtype=torch.long)):
        with pytest.raises(InvalidInputError):
            lz.detokenize(wrong, handle)
    with pytest.raises(InvalidInputError):
        lz.tokenize("a", handle, add_special_tokens=[])


def test_ids_of_nobody_are_treated_as_the_library_does(kind, tok, handle):
    far = 10_000_000
    if kind in ("gpt2", "llama3", "bert", "unigram"):  # this library passes over them
        ids = own_ids(tok, "the dog", add=False)
        assert lz.detokenize([*ids, far], handle) == tok.decode([*ids, far], skip_special_tokens=False)
    else:
        for _ in range(2):
            with pytest.raises(InvalidInputError) as caught:
                lz.detokenize([far], handle)
            assert caught.value.code == "TOKEN_ID_INVALID"
            lz.detokenize(own_ids(tok, "dog"), handle)
    with pytest.raises(InvalidInputError) as caught:
        lz.detokenize([-1], handle)
    assert caught.value.code == "TOKEN_ID_INVALID"


def test_ids_come_as_lists_tuples_and_tensors(handle):
    ids = lz.tokenize("the lazy dog", handle)
    text = lz.detokenize(ids, handle)
    assert lz.detokenize(tuple(ids), handle) == lz.detokenize(torch.tensor(ids), handle) == text
    assert lz.detokenize(torch.tensor([ids, ids]), handle) == [text, text]
    assert lz.detokenize([torch.tensor(ids), tuple(ids)], handle) == [text, text]
    assert lz.detokenize([], handle) == "" and lz.tokenize([], handle) == []
    assert lz.tokenize(("the lazy dog",), handle) == [ids]
