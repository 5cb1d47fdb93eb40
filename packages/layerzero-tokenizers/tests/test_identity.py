"""A tokenizer's identity covers all of it, is the same everywhere, and names what changed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.model.context import Context, TokenizerIdentity
from layerzero.model.enums import OpKind
from layerzero_tokenizers import load, small
from layerzero_tokenizers.identity import changes, of_hf, of_tiktoken
from tools.pytest_fixtures import module_beside

kinds = module_beside(__file__, "trained_kinds")

_IN_ANOTHER_PROCESS = """
from layerzero_tokenizers import load, small
import tokenizers, sys
print(load(tokenizers.Tokenizer.from_file(sys.argv[1]), prove=False).tokenizer_id)
print(load(small.encoding(), prove=False).tokenizer_id)
print(load(sys.argv[2], prove=False).tokenizer_id)
"""


def document(tok=None):
    return json.loads((tok or kinds.llama3()).to_str())


def changed_parts(before, after):
    found = changes(of_hf(before), of_hf(after))
    assert all(item.code == "TOKENIZER_HASH_MISMATCH" for item in found)
    return {str(item.value).split()[0] for item in found}


@pytest.mark.req("R-TOKCTX-01", "R-TOKCTX-04")
def test_the_identity_has_every_part_in_full_sha256(handle):
    identity = lz.select("tokenize", "a", handle).context.tokenizer
    assert identity == handle.identity and not identity.return_offsets
    assert lz.select("tokenize", "a", handle, return_offsets=True).context.tokenizer.return_offsets
    family, _, digest = identity.tokenizer_id.partition(":")
    assert family == handle.home and len(bytes.fromhex(digest)) == 32
    assert len(bytes.fromhex(identity.vocab_hash)) == len(bytes.fromhex(identity.special_tokens_hash)) == 32
    for part in (identity.normalizer_id, identity.pretokenizer_id, identity.merges_hash):
        assert part == "none" or len(bytes.fromhex(part)) == 32


@pytest.mark.req("R-TOKCTX-02")
def test_the_identity_is_the_same_in_another_process(make, tmp_path):
    file, model = tmp_path / "tokenizer.json", tmp_path / "tokenizer.model"
    make("gpt2").save(str(file))
    model.write_bytes(small.sp_bytes("bpe"))
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-W", "ignore", "-c", _IN_ANOTHER_PROCESS, str(file), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    here = [load(item, prove=False).tokenizer_id for item in (make("gpt2"), make("cl100k"), make("sp_bpe"))]
    assert done.stdout.split() == here


def sha(*parts):
    """SHA-256 over parts with their lengths before them, written apart from the package."""
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.sha256(framed).hexdigest()


@pytest.mark.req("R-TOKCTX-02")
def test_the_digests_are_sha256_over_all_parts():
    found = of_tiktoken(small.ranks(), {"<|e|>": 600}, small.CL100K)
    assert found.pre_tokenizer == sha(b"pre_tokenizer", small.CL100K.encode())
    assert found.special_tokens == sha(b"special_tokens", b'[["<|e|>",600]]')
    parts = ("vocab", "merges", "normalizer", "pre_tokenizer", "post_processor", "added_tokens", "special_tokens")
    whole = sha(b"tiktoken", *(getattr(found, part).encode() for part in (*parts, "rest")))
    assert found.digest == whole and found.identity("").tokenizer_id == f"tiktoken:{whole}"
    for part in (*parts, "rest"):
        assert replace(found, **{part: sha(b"another")}).digest != whole, part


@pytest.mark.req("R-TOKCTX-06", "R-TOKCTX-02", "R-TOK-08")
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("vocab", lambda d: d["model"]["vocab"].update({"zzz": 9_999})),
        ("vocab", lambda d: d["model"].update(byte_fallback=True)),
        ("vocab", lambda d: d["model"].update(dropout=0.1)),
        ("merges", lambda d: d["model"]["merges"].reverse()),
        ("normalizer", lambda d: d.update(normalizer={"type": "NFC"})),
        ("pre_tokenizer", lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)),
        ("post_processor", lambda d: d.update(post_processor=None)),
        ("special_tokens", lambda d: d["added_tokens"].pop()),
        ("special_tokens", lambda d: d["added_tokens"][0].update(rstrip=True)),
        ("added_tokens", lambda d: d["added_tokens"].append({"id": 1, "content": "x", "special": False})),
        ("rest", lambda d: d.update(decoder=None)),
        ("rest", lambda d: d.update(truncation={"max_length": 3})),
        ("rest", lambda d: d.update(padding={"pad_id": 3})),
    ],
)
def test_every_change_is_seen_and_named(part, change):
    before, after = document(), document()
    change(after)
    assert changed_parts(before, after) == {part}
    assert of_hf(before).digest != of_hf(after).digest


def test_the_way_merges_are_written_does_not_matter():
    before, after = document(), document()
    after["model"]["merges"] = [" ".join(pair) for pair in after["model"]["merges"]]
    assert changed_parts(before, after) == set()


@pytest.mark.req("R-TOKCTX-02", "R-TOKCTX-04", "R-TOKCTX-06")
def test_tiktoken_and_sentencepiece_changes_are_seen_too():
    ranks = small.ranks()
    before = of_tiktoken(ranks, {"<|e|>": 600}, small.CL100K)
    swapped = {**ranks, b"a": ranks[b"b"], b"b": ranks[b"a"]}
    parts = [
        {str(item.value).split()[0] for item in changes(before, after)}
        for after in (
            of_tiktoken(swapped, {"<|e|>": 600}, small.CL100K),
            of_tiktoken(ranks, {"<|e|>": 601}, small.CL100K),
            of_tiktoken(ranks, {"<|e|>": 600}, kinds.LLAMA3),
        )
    ]
    assert parts == [{"vocab", "merges"}, {"special_tokens"}, {"pre_tokenizer"}]
    models = [
        load(small.processor("bpe"), prove=False),
        load(small.processor("bpe", user_defined_symbols=("<x>",)), prove=False),
    ]
    seen = {str(item.value).split()[0] for item in changes(models[0].fingerprint, models[1].fingerprint)}
    assert {"vocab", "added_tokens"} <= seen
    bos = load(small.processor("bpe", add_bos=True), prove=False)
    assert [str(i.value).split()[0] for i in changes(models[0].fingerprint, bos.fingerprint)] == ["post_processor"]


@pytest.mark.req("R-TOKCTX-06", "R-TOKCTX-02")
def test_the_normalizer_and_the_settings_of_a_sentencepiece_model_are_part_of_its_hash():
    """Pieces and scores stay: field 3 of the file is how it normalises, field 2 how it takes a text apart."""
    from sentencepiece import SentencePieceProcessor

    data = small.sp_bytes("bpe")
    before = load(SentencePieceProcessor(model_proto=data), prove=False)
    fields = {"normalizer": b"\x1a\x02\x20\x00", "pre_tokenizer": b"\x12\x03\xc0\x01\x01", "rest": b"\x2a\x02\x20\x00"}
    for part, field in fields.items():
        # Of a field that is given twice the later one holds: remove_extra_whitespaces off, whitespace as a suffix.
        after = load(SentencePieceProcessor(model_proto=data + field), prove=False)
        assert [str(i.value).split()[0] for i in changes(before.fingerprint, after.fingerprint)] == [part]
        assert before.fingerprint.digest != after.fingerprint.digest
        assert before.tokenizer_id != after.tokenizer_id and before.identity.vocab_hash == after.identity.vocab_hash
        if part != "rest":
            ids = [getattr(item.identity, f"{part.replace('_', '')}_id") for item in (before, after)]
            assert ids[0] != ids[1]


@pytest.mark.req("R-TOKCTX-05", "R-CORE-25")
def test_without_an_id_or_a_vocabulary_hash_nothing_is_tokenized():
    for arguments, code in ((("", "ab"), "TOKENIZER_ID_MISSING"), (("ab", ""), "VOCAB_HASH_MISSING")):
        with pytest.raises(InvalidInputError) as caught:
            TokenizerIdentity(*arguments)
        assert caught.value.code == code
    with pytest.raises(InvalidInputError) as caught:
        Context(op="tokenize", kind=OpKind.TOKENIZATION)
    assert caught.value.code == "VOCAB_HASH_MISSING"
    for nothing in (None, ""):
        with pytest.raises(InvalidInputError) as caught:
            lz.tokenize("a", nothing)
        assert caught.value.code == "TOKENIZER_ID_MISSING"


@pytest.mark.req("R-TOKCTX-03")
def test_a_namespace_is_part_of_the_identity(opened):
    one, two = opened("gpt2").within("model-a"), opened("gpt2").within("model-b")
    assert len({one.tokenizer_id, two.tokenizer_id, opened("gpt2").tokenizer_id}) == 3
    assert one.fingerprint == two.fingerprint
    assert lz.select("tokenize", "a", one).context != lz.select("tokenize", "a", two).context
    assert lz.which("tokenize", "a", one) in ("tiktoken.tokenize.bpe", "tokenizers.tokenize.fast")
