"""The tokenizer of a model is found from its folder, its configuration, an object or an id; changes are seen."""

from __future__ import annotations

import json
import logging
import sys
import types

import pytest

import layerzero as lz
from layerzero.errors import BackendNotAvailableError, InvalidInputError
from layerzero_tokenizers import CACHE, load, small, sources

TEXT = "The quick brown fox"


def folder_of(path, make, name="gpt2", **settings):
    path.mkdir(exist_ok=True)
    make(name).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.req("R-TOK-07")
def test_a_model_folder_is_enough(tmp_path, make):
    model = folder_of(tmp_path / "model", make, pad_token="<s>", eos_token={"content": "</s>"})
    wanted = make("gpt2").encode(TEXT).ids
    assert lz.tokenize(TEXT, str(model)) == lz.tokenize(TEXT, model) == wanted
    assert lz.tokenize(TEXT, model / "tokenizer.json") == wanted
    handle = load(model)
    assert handle.pad_id == make("gpt2").token_to_id("<s>") and handle.eos_id == make("gpt2").token_to_id("</s>")
    assert lz.detokenize(wanted, str(model)) == TEXT


@pytest.mark.req("R-TOK-08")
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_a_change_of_any_file_beside_the_model_is_noticed(tmp_path, make, name):
    model = folder_of(tmp_path / "model", make, pad_token="<s>")
    (model / "tokenizer_config.json").unlink()
    for token in ("<s>", "</s>"):
        (model / name).write_text(json.dumps({"pad_token": token}))
        batch = lz.tokenize([TEXT, "a"], model, padding="longest")
        assert batch.input_ids[1, -1] == make("gpt2").token_to_id(token)


@pytest.mark.req("R-TOK-07")
@pytest.mark.parametrize("file", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_a_sentencepiece_folder_is_told_by_its_file(tmp_path, make, file):
    (tmp_path / file).write_bytes(small.sp_bytes("bpe"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    sp = make("sp_bpe")
    assert lz.tokenize(TEXT, tmp_path) == [sp.bos_id(), *sp.encode(TEXT)]
    assert lz.which("tokenize", TEXT, tmp_path) == "sentencepiece.tokenize.processor"


@pytest.mark.req("R-TOK-07", "R-TOK-02")
def test_tiktoken_plugins_and_names_are_found(tmp_path, monkeypatch):
    import tiktoken
    import tiktoken.registry
    import tiktoken_ext

    plugin = types.ModuleType("tiktoken_ext.ours")
    plugin.ENCODING_CONSTRUCTORS = {
        "ours_base": lambda: {
            "name": "ours_base", "pat_str": small.CL100K, "mergeable_ranks": small.ranks(), "special_tokens": {},
        }
    }  # fmt: skip
    (tmp_path / "ours.py").write_text("from sys import modules\n")
    monkeypatch.setitem(sys.modules, "tiktoken_ext.ours", plugin)
    monkeypatch.setattr(tiktoken_ext, "__path__", [*tiktoken_ext.__path__, str(tmp_path)])
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    tiktoken.registry._available_plugin_modules.cache_clear()
    try:
        wanted = small.encoding(special={}).encode(TEXT)
        assert lz.tokenize(TEXT, "ours_base") == lz.tokenize(TEXT, "tiktoken:ours_base") == wanted
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps({"encoding_name": "ours_base"}))
        assert lz.tokenize(TEXT, tmp_path / "model") == wanted
    finally:
        tiktoken.registry.ENCODINGS.pop("ours_base", None)
        tiktoken.registry._available_plugin_modules.cache_clear()


@pytest.mark.req("R-TOK-02")
def test_cl100k_is_known_and_refused_in_one_clear_way_where_its_table_cannot_be_had(monkeypatch):
    import tiktoken.load

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("tiktoken_ext.openai_public.load_tiktoken_bpe", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    for name in ("cl100k_base", "gpt-4"):
        with pytest.raises(InvalidInputError) as caught:
            lz.tokenize("a", name)
        assert (caught.value.code, caught.value.reasons[0].value) == ("TOKENIZER_UNKNOWN", "cl100k_base")
    # With its table (ours, cut to what cl100k's own pattern needs) the very encoding is built and served.
    monkeypatch.setattr("tiktoken_ext.openai_public.load_tiktoken_bpe", lambda *a, **k: small.ranks())
    ids = lz.tokenize("The quick <|endoftext|> fox's 12345", "cl100k_base")
    assert ids == tiktoken.get_encoding("cl100k_base").encode(
        "The quick <|endoftext|> fox's 12345", allowed_special="all"
    )
    assert 100257 in ids


@pytest.mark.req("R-TOK-07")
def test_a_configuration_names_its_tokenizer(tmp_path, make):
    model = folder_of(tmp_path / "model", make)
    wanted = make("gpt2").encode(TEXT).ids
    assert lz.tokenize(TEXT, {"name_or_path": str(model)}) == wanted
    assert lz.tokenize(TEXT, {"tokenizer_file": str(model / "tokenizer.json")}) == wanted
    assert lz.tokenize(TEXT, types.SimpleNamespace(name_or_path=str(model))) == wanted
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_layer=1).save_pretrained(model)
    assert lz.tokenize(TEXT, transformers.AutoConfig.from_pretrained(model)) == wanted
    for wrong in ({}, {"hidden_size": 3}, types.SimpleNamespace(), object(), 3):
        with pytest.raises(InvalidInputError) as caught:
            lz.tokenize(TEXT, wrong)
        assert caught.value.code == "TOKENIZER_UNKNOWN"


@pytest.mark.req("R-TOK-07")
def test_a_model_in_the_local_hub_cache_is_named_by_its_id(tmp_path, make, monkeypatch):
    """As huggingface_hub keeps it: blobs, snapshots by commit, and a name for the latest. Nothing is fetched."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--someone--gpt2"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots").mkdir()
    folder_of(kept / "snapshots" / ("0" * 40), make)
    wanted = make("gpt2").encode(TEXT).ids
    assert lz.tokenize(TEXT, "someone/gpt2") == lz.tokenize(TEXT, {"_name_or_path": "someone/gpt2"}) == wanted
    with pytest.raises(InvalidInputError):
        lz.tokenize(TEXT, "someone/else")


def test_a_transformers_tokenizer_is_its_backend(make):
    transformers = pytest.importorskip("transformers")
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=make("bert"), pad_token="[PAD]")
    assert lz.tokenize(TEXT, tok) == tok(TEXT)["input_ids"]
    batch = lz.tokenize([TEXT, "a"], tok, padding="longest")
    own = tok([TEXT, "a"], padding=True, return_tensors="pt")
    assert batch.input_ids.equal(own["input_ids"]) and batch.attention_mask.equal(own["attention_mask"])


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": "1.0"}', b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_damaged_file_is_one_clear_error(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError) as caught:
        lz.tokenize("a", tmp_path)
    assert caught.value.code == "TOKENIZER_UNKNOWN"


def test_what_is_not_there_is_refused_with_what_would_be_looked_for(tmp_path):
    for wrong in (str(tmp_path), str(tmp_path / "absent"), "no-such-model", "no/such"):
        with pytest.raises(InvalidInputError) as caught:
            lz.tokenize("a", wrong)
        assert caught.value.code == "TOKENIZER_UNKNOWN" and caught.value.reasons[0].limit


def test_a_missing_library_is_named_with_the_command_that_brings_it(tmp_path, make, monkeypatch):
    model = folder_of(tmp_path / "model", make)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BackendNotAvailableError) as caught:
        load(model)
    assert "layerzero-tokenizers[hf]" in str(caught.value)


@pytest.mark.req("R-TOK-04", "R-TOK-06", "R-TOK-08", "R-FAIL-08")
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("vocab", lambda d: d["model"]["vocab"].update({"zzz": 9_999})),
        ("merges", lambda d: (d["model"]["merges"].reverse(),)),
        ("special_tokens", lambda d: d["added_tokens"][0].update(rstrip=True)),
        ("normalizer", lambda d: d.update(normalizer={"type": "Lowercase"})),
    ],
)
def test_a_changed_file_drops_what_was_cached_and_says_which_part(part, change, tmp_path, make, caplog):
    model = folder_of(tmp_path / "model", make)
    prompt = "You are a helpful assistant. " * 40
    for tail in ("one", "two", "three"):
        lz.tokenize(prompt + tail, str(model))
    assert CACHE.stats().entries == 1 and CACHE.stats().hits >= 1
    document = json.loads((model / "tokenizer.json").read_text())
    change(document)
    (model / "tokenizer.json").write_text(json.dumps(document))
    from tokenizers import Tokenizer

    with caplog.at_level(logging.WARNING):
        found = lz.tokenize(prompt + "Two", str(model))
    assert found == Tokenizer.from_file(str(model / "tokenizer.json")).encode(prompt + "Two").ids
    stats = CACHE.stats()
    assert stats.invalidated == 1 and [item.code.value for item in stats.reasons] == ["TOKENIZER_HASH_MISMATCH"]
    assert str(stats.reasons[0].value).startswith(part)
    assert part in caplog.text


@pytest.mark.req("R-TOK-08")
def test_a_changed_tokenizer_config_drops_the_system_prompt_too(tmp_path, make):
    """The model file is the same; its configuration now asks for a BOS, and names another padding token."""
    config, sp = tmp_path / "tokenizer_config.json", make("sp_bpe")
    (tmp_path / "tokenizer.model").write_bytes(small.sp_bytes("bpe"))
    config.write_text(json.dumps({"add_bos_token": False}))
    prompt = "You are a helpful assistant. " * 40
    for tail in ("one", "two", "three"):
        assert lz.tokenize(prompt + tail, tmp_path) == sp.encode(prompt + tail)
    assert CACHE.stats().entries == 1 and CACHE.stats().hits >= 1
    config.write_text(json.dumps({"add_bos_token": True}))
    assert lz.tokenize(prompt + "two", tmp_path) == [sp.bos_id(), *sp.encode(prompt + "two")]
    stats = CACHE.stats()
    assert stats.invalidated == 1 and str(stats.reasons[-1].value).startswith("post_processor")

    model = folder_of(tmp_path / "model", make, pad_token="<s>")
    for token in ("<s>", "</s>"):
        folder_of(model, make, pad_token=token)
        batch = lz.tokenize([TEXT, "a"], model, padding="longest")
        assert batch.input_ids[1, -1] == make("gpt2").token_to_id(token)


@pytest.mark.req("R-TOK-04")
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
def test_a_token_that_is_added_to_a_file_drops_what_was_cached_with_the_old_one(special, tmp_path, make):
    """A word that becomes one token: neither vocabulary, merges nor normalizer changed, and the ids did."""
    from tokenizers import AddedToken, Tokenizer

    model = folder_of(tmp_path / "model", make)
    prompt = "You are a helpful assistant. " * 40
    before = [lz.tokenize(prompt + tail, str(model)) for tail in ("one", "two", "three")]
    assert CACHE.stats().entries == 1 and CACHE.stats().hits >= 1
    grown = Tokenizer.from_file(str(model / "tokenizer.json"))
    (grown.add_special_tokens if special else grown.add_tokens)([AddedToken("helpful", special=special)])
    grown.save(str(model / "tokenizer.json"))
    found = lz.tokenize(prompt + "two", str(model))
    assert found == grown.encode(prompt + "two").ids != before[1]
    stats = CACHE.stats()
    assert stats.invalidated == 1 and [item.code.value for item in stats.reasons] == ["TOKENIZER_HASH_MISMATCH"]
    assert str(stats.reasons[0].value).startswith("special_tokens" if special else "added_tokens")


@pytest.mark.req("R-TOK-06", "R-FAIL-08")
def test_an_object_that_changes_is_noticed_at_once_or_by_sampling(monkeypatch):
    monkeypatch.setattr(sources, "PACE", 0)
    tok = small.gpt2()
    assert lz.tokenize("the zebra", tok) == tok.encode("the zebra").ids
    first = sources.resolve(tok).tokenizer_id
    tok.add_special_tokens(["zebra"])
    assert lz.tokenize("the zebra", tok) == tok.encode("the zebra").ids
    second = sources.resolve(tok).tokenizer_id
    assert second != first
    assert str(CACHE.stats().reasons[-1].value).startswith(("special_tokens", "vocab"))
    from tokenizers import normalizers

    tok.normalizer = normalizers.Lowercase()  # the size does not tell
    for _ in range(10):  # one use in ten is looked at closely; the ids are right all the while
        assert lz.tokenize("The ZEBRA", tok) == tok.encode("The ZEBRA").ids
    assert sources.resolve(tok).tokenizer_id != second
    assert str(CACHE.stats().reasons[-1].value).startswith("normalizer")


def test_a_frozen_handle_keeps_what_it_was_made_from():
    tok = small.gpt2()
    handle, before = load(tok), tok.encode("the zebra").ids
    tok.add_special_tokens(["zebra"])
    assert lz.tokenize("the zebra", handle) == before != tok.encode("the zebra").ids


def test_many_objects_are_not_held_for_ever():
    made = [small.encoding(f"e{index}") for index in range(70)]
    for item in made:
        lz.tokenize("a", item)
    assert len(sources._live) <= 64
    sources.forget(made[-1])
    assert id(made[-1]) not in sources._live


def test_a_processor_that_samples_is_refused():
    with pytest.raises(InvalidInputError):
        lz.tokenize("a", small.processor("unigram", enable_sampling=True, nbest_size=-1, alpha=0.1))
