"""The prefix cache never changes an id, never mixes tokenizers, stays within its budget, and checks itself."""

from __future__ import annotations

import json
import os
import random
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero_tokenizers import CACHE, load, small
from layerzero_tokenizers.boundaries import last_cut
from layerzero_tokenizers.cache import PrefixCache, due

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
PROMPTS, THREADS = (100_000, 16) if PROVE else (800, 4)
SPLITTING = ("gpt2", "llama3", "bert", "unigram", "cl100k", "sp_bpe", "sp_bytes")
PROMPT = (
    "You are a helpful assistant. Answer briefly, don't guess; use 12 sources at most.\n\nRules:\n1. Be kind.\n"
    "2. Größe, naïve café: keep accents.  Two spaces, \ttabs and <s>tags</s> stay as they are. 日本語 too! "
) * 4
TAILS = (
    "", " ", "  ", "\n", "\n\n", " x", "x", "'s", " 's", "\u0301", " \u0301", "<|im_end|>", " <|im_end|> ok", "1",
    " 12345",
    ".", " .", "\u00a0x", "😀", "\u200d👧", "▁a", "\t\tq", "  two  spaces  ", "\r\nline", " don't", "日", " [MASK] a",
)  # fmt: skip


def pieces(rng):
    """A tail of any kind; some make the boundary between prompt and tail a nasty one."""
    return "".join(rng.choice(TAILS) for _ in range(rng.randint(1, 5)))


@pytest.mark.req("R-TOK-08")
@pytest.mark.parametrize("name", SPLITTING)
def test_every_cut_gives_the_ids_of_the_whole(name, opened):
    """The rule itself, by brute force: at each place where a text may be cut the two halves give its ids."""
    handle = opened(name)
    assert handle.splits
    engine, rng = handle.engines[handle.home], random.Random(5)
    for _ in range(400 if PROVE else 60):
        text = "".join(rng.choice((*TAILS, "word", " and", "Don't", "!?", ")", "42", " (a)")) for _ in range(14))
        whole, end = engine.encode(text, False, True), len(text)
        while (at := last_cut(text, end)) > 0:
            assert engine.encode(text[:at], False, True) + engine.encode(text[at:], False, True) == whole, text
            end = at


@pytest.mark.req("R-TOK-08")
@pytest.mark.parametrize("name", SPLITTING)
def test_any_text_may_be_cut_there(name, opened):
    handle = opened(name)
    engine = handle.engines[handle.home]

    @settings(max_examples=400 if PROVE else 40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.text(max_size=60), st.sampled_from("aZ09.,'!)~#<>|"), st.text(max_size=60))
    def run(left, edge, right):
        first, second = left + edge, " " + right
        cut = engine.encode(first, False, True) + engine.encode(second, False, True)
        assert cut == engine.encode(first + second, False, True)

    run()


def test_texts_of_other_tokenizers_are_never_cut(opened):
    from tokenizers import Tokenizer, models, pre_tokenizers

    assert not opened("sp_unigram").splits  # float32 scores along the whole text
    assert not load(small.encoding(pattern=r"[\s\S]+"), prove=False).splits
    assert not load(small.encoding(special={"a b": 700}), prove=False).splits
    raw = small.gpt2()
    assert not load(Tokenizer(models.BPE({"a": 0}, [])), prove=False).splits
    raw.add_special_tokens([__import__("tokenizers").AddedToken("<r>", rstrip=True)])
    assert not load(raw, prove=False).splits
    cut = small.gpt2()
    cut.enable_truncation(10)
    assert not load(cut, prove=False).splits
    whole = small.gpt2()
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert not load(whole, prove=False).splits
    for text in (PROMPT + "one", PROMPT + "two", PROMPT + "three"):
        assert lz.tokenize(text, opened("sp_unigram")) == small.processor().encode(text)
    assert CACHE.stats().hits == 0


@pytest.mark.req("R-TOK-08", "R-TOK-11", "R-CACHE-12", "R-TOK-04")
@pytest.mark.timeout(3_000)
def test_cached_and_uncached_agree_over_many_prompts_tokenizers_and_threads(opened):
    """Differential: shared prompts, changing tokenizers and namespaces, all threads at once, eviction all the while."""
    CACHE.configure(max_bytes=1_200_000, min_chars=200)
    handles = [opened(name) for name in SPLITTING]
    handles += [handles[0].within("tenant"), handles[4].within("tenant")]
    prompts = [PROMPT[index * 30 :][: 700 + 60 * index] for index in range(6)]
    errors, counts = [], []

    def work(seed):
        rng, done = random.Random(seed), 0
        try:
            for _ in range(PROMPTS // THREADS):
                handle, text = rng.choice(handles), rng.choice(prompts) + pieces(rng)
                parse = rng.random() < 0.9
                engine = handle.engines[handle.home]
                found = lz.tokenize(text, handle, parse_special=parse)
                if found != engine.encode(text, True, parse):
                    errors.append((handle, text, parse))
                done += 1
        except BaseException as error:
            errors.append(error)
        counts.append(done)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stats = CACHE.stats()
    print(f"{sum(counts)} prompts from {THREADS} threads, {len(errors)} differences; {stats}")
    assert errors == [] and sum(counts) == PROMPTS
    assert stats.hits > PROMPTS // 4 and stats.revalidated > 0 and stats.invalidated == 0
    assert 0 < stats.bytes <= stats.max_bytes and stats.evicted > 0


@pytest.mark.req("R-TOK-11", "R-CACHE-12")
def test_two_models_interleaved_keep_their_own_ids(make, opened):
    names = ("gpt2", "llama3", "cl100k")
    for turn in range(30):
        for name in names:
            text = f"{PROMPT} question {turn}"
            assert lz.tokenize(text, opened(name)) == small_own(make(name), text), name
    assert CACHE.stats().hits > 60 and CACHE.stats().entries >= 3


@pytest.mark.req("R-TOK-11")
def test_interleaved_models_keep_their_own_kernels_texts_and_ids(make, opened):
    """Selection included: each model is served by what serves it alone, and the text of ids is its own."""
    names = ("gpt2", "bert", "cl100k", "sp_bpe")
    alone = {name: lz.which("tokenize", "the dog", opened(name)) for name in names}
    assert alone["bert"] == "tokenizers.tokenize.fast" and alone["sp_bpe"] == "sentencepiece.tokenize.processor"
    for turn in range(4):
        for name in names:
            tok, text = make(name), f"the lazy dog {turn}"
            ids = lz.tokenize(text, opened(name))
            assert ids == (small_own(tok, text) if name != "sp_bpe" else tok.encode(text)), name
            report = lz.explain("tokenize", text, opened(name))
            assert report.ran == report.chosen == alone[name]
            assert report.context.tokenizer == opened(name).identity
            skipped = {"skip_special_tokens": False} if name in ("gpt2", "bert") else {}
            assert lz.detokenize(ids, opened(name)) == tok.decode(ids, **skipped), name


def small_own(tok, text):
    return tok.encode(text).ids if hasattr(tok, "get_vocab_size") else tok.encode(text, allowed_special="all")


def exchanged(document):
    """Two letters of the vocabulary with each other's ids."""
    vocab = document["model"]["vocab"]
    vocab["e"], vocab["a"] = vocab["a"], vocab["e"]


TWINS = {
    "vocab": exchanged,
    "merges": lambda document: document["model"]["merges"].reverse(),
    "normalizer": lambda document: document.update(normalizer={"type": "Lowercase"}),
    "added_tokens": lambda document: document["added_tokens"].append(
        {"id": 9_999, "content": "assistant", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False}
    ),
}  # fmt: skip


@pytest.mark.req("R-TOK-04", "R-TOK-11", "R-CACHE-12")
@pytest.mark.parametrize("part", TWINS)
def test_tokenizers_that_differ_in_one_part_share_nothing(part):
    """Both in use at once, so no change of a file drops anything: the key alone keeps their ids apart."""
    from tokenizers import Tokenizer

    document = json.loads(small.gpt2().to_str())
    own = Tokenizer.from_str(json.dumps(document))
    TWINS[part](document)
    other = Tokenizer.from_str(json.dumps(document))
    assert own.encode(PROMPT).ids != other.encode(PROMPT).ids
    pairs = [(load(item, prove=False), item) for item in (own, other)]
    assert all(handle.splits for handle, _ in pairs) and pairs[0][0].tokenizer_id != pairs[1][0].tokenizer_id
    assert pairs[0][0].remember(PROMPT) > 0
    before = CACHE.stats()
    assert lz.tokenize(PROMPT + " once", pairs[1][0]) == other.encode(PROMPT + " once").ids
    assert (CACHE.stats().hits, CACHE.stats().misses) == (before.hits, before.misses + 1)
    assert pairs[1][0].remember(PROMPT) > 0
    for turn in range(4):
        for handle, library in pairs:
            text = f"{PROMPT} turn {turn}"
            assert lz.tokenize(text, handle) == library.encode(text).ids
    assert CACHE.stats().hits == before.hits + 8 and CACHE.stats().invalidated == before.invalidated


@pytest.mark.req("R-TOKCTX-03", "R-CACHE-12", "R-TOK-08")
def test_namespaces_do_not_see_each_other(opened):
    one, two = opened("gpt2").within("a"), opened("gpt2").within("b")
    one.remember(PROMPT)
    lz.tokenize(PROMPT + " x", one)
    before = CACHE.stats()
    assert before.hits == 1
    lz.tokenize(PROMPT + " x", two)
    assert CACHE.stats().hits == 1 and CACHE.stats().misses == before.misses + 1


@pytest.mark.req("R-TOK-08")
def test_a_system_prompt_is_learned_or_told(opened, make):
    handle = opened("llama3").within("learning")
    for index in range(12):
        text = f"{PROMPT} user {index}"
        assert lz.tokenize(text, handle) == make("llama3").encode(text).ids
    assert CACHE.stats().learned == 1 and CACHE.stats().hits >= 9
    told = opened("llama3").within("told")
    assert told.remember(PROMPT) > 500
    assert lz.tokenize(PROMPT + "hi", told) == make("llama3").encode(PROMPT + "hi").ids
    assert opened("sp_unigram").remember(PROMPT) == 0
    batch = [f"{PROMPT} {index}" for index in range(5)]
    assert lz.tokenize(batch, told) == [make("llama3").encode(text).ids for text in batch]


def test_short_texts_and_offsets_pass_by_the_cache(opened):
    lz.tokenize("short", opened("gpt2"))
    lz.tokenize(PROMPT, opened("gpt2"), return_offsets=True)
    stats = CACHE.stats()
    assert (stats.hits, stats.misses, stats.entries) == (0, 0, 0)


def test_results_may_be_changed_by_the_caller(opened, make):
    handle = opened("gpt2").within("mutating")
    handle.remember(PROMPT)
    for _ in range(3):
        ids = lz.tokenize(PROMPT + " x", handle)
        assert ids == make("gpt2").encode(PROMPT + " x").ids
        ids[:] = [0] * len(ids)


def test_the_budget_holds_whatever_comes(opened):
    CACHE.configure(max_bytes=100_000, min_chars=100)
    rng = random.Random(3)
    for index in range(120):
        handle = opened(rng.choice(SPLITTING)).within(f"n{index % 20}")
        base = f"{index % 30} " + PROMPT[: rng.randint(200, 1_500)]
        for tail in (" a", " b", " c"):
            lz.tokenize(base + tail, handle)
            assert 0 <= CACHE.stats().bytes <= 100_000
    assert CACHE.stats().evicted > 0
    CACHE.configure(max_bytes=0)
    assert CACHE.stats().entries == 0
    lz.tokenize(PROMPT + " a", opened("gpt2"))
    assert CACHE.stats().bytes == 0
    with pytest.raises(InvalidInputError):
        CACHE.configure(max_bytes=-1)


def test_what_is_counted_is_what_is_held(opened):
    """Against the interpreter's own sizes: the budget is about real memory."""
    import sys

    handle = opened("gpt2").within("sizes")
    handle.remember(PROMPT * 5)
    ((entry,),) = [space.ordered for key, space in CACHE._spaces.items() if key[0] == handle.tokenizer_id]
    real = sys.getsizeof(entry.text) + sys.getsizeof(entry.ids) + sum(sys.getsizeof(item) for item in set(entry.ids))
    assert real <= entry.size <= 8 * real


def test_hits_are_checked_again_one_in_ten_then_hundred_then_thousand():
    checked = [number for number in range(1, 5_101) if due(number)]
    assert [n for n in checked if n <= 100] == list(range(10, 101, 10))
    assert [n for n in checked if 100 < n <= 1_100] == list(range(200, 1_101, 100))
    assert [n for n in checked if n > 1_100] == [2_000, 3_000, 4_000, 5_000]


@pytest.mark.req("R-TOK-06", "R-FAIL-08", "R-TOK-08")
def test_an_entry_that_went_wrong_is_found_and_everything_of_its_identity_dropped(caplog):
    class Engine:
        shift = 0

        def encode(self, text, add, parse):
            return [ord(char) + self.shift for char in text]

    cache, engine = PrefixCache(min_chars=100), Engine()
    cache.remember(engine, "t", PROMPT, True)
    cache.remember(engine, "other", PROMPT, True)
    engine.shift = 1  # the tokenizer is not the one it was
    wrong = 0
    for _ in range(10):
        found = cache.encode(engine, "t", PROMPT + " x", True)
        wrong += found != engine.encode(PROMPT + " x", False, True)
    assert wrong == 9  # the tenth hit was checked, and answered right
    stats = cache.stats()
    assert (stats.revalidated, stats.invalidated) == (1, 1)
    assert stats.reasons[0].code == "TOKENIZER_HASH_MISMATCH" and stats.entries == 1
    assert cache.encode(engine, "t", PROMPT + " x", True) == engine.encode(PROMPT + " x", False, True)
