"""Every test starts with a fresh World, an empty prefix cache and no remembered tokenizer."""

from __future__ import annotations

import functools

import pytest

import layerzero as lz
from layerzero_tokenizers import CACHE, forget, load, small
from tools.pytest_fixtures import module_beside

kinds = module_beside(__file__, "trained_kinds")

MAKERS = {
    "gpt2": small.gpt2,
    "llama3": kinds.llama3,
    "bert": kinds.bert,
    "unigram": kinds.unigram,
    "cl100k": small.encoding,
    "sp_unigram": small.processor,
    "sp_bpe": lambda: small.processor("bpe"),
    "sp_bytes": lambda: small.processor("bpe", byte_fallback=True, vocab_size=600),
}
NAMES = tuple(MAKERS)


@functools.cache
def trained(name):
    """One library object of each kind for the whole run; tests that change one train their own."""
    return MAKERS[name]()


@functools.cache
def frozen(name):
    """Its proven handle."""
    return load(trained(name))


@pytest.fixture(autouse=True)
def _fresh():
    budget, shortest = CACHE.max_bytes, CACHE.min_chars
    yield
    CACHE.clear()
    CACHE.configure(max_bytes=budget, min_chars=shortest)
    forget()
    lz.reset()


@pytest.fixture(params=NAMES)
def kind(request):
    """The name of each kind in turn."""
    return request.param


@pytest.fixture
def tok(kind):
    """The library's own object."""
    return trained(kind)


@pytest.fixture
def handle(kind):
    """The handle of the same tokenizer."""
    return frozen(kind)


@pytest.fixture(scope="session")
def make():
    """(name) -> the library's object, made once."""
    return trained


@pytest.fixture(scope="session")
def opened():
    """(name) -> its proven handle, made once."""
    return frozen
