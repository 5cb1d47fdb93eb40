"""What the backends say about themselves with their vendor absent, wrong, broken and there; none is needed for it."""

from __future__ import annotations

import pytest

from layerzero.plugin.probing import probe
from layerzero_tokenizers.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

DEVICE = fakes.cpu()
ALL = ("tokenizers", "tiktoken", "sentencepiece")
THERE = [
    ("tokenizers", {"tokenizers": "0.23.3"}, "tokenizers"),
    ("tiktoken", {"tiktoken": "0.14.0"}, "tiktoken"),
    ("sentencepiece", {"sentencepiece": "0.2.2"}, "sentencepiece"),
]
WRONG = [
    ("tokenizers", "tokenizers", "0.15.0", ">=0.22,<1"),
    ("tiktoken", "tiktoken", "0.5.0", ">=0.9,<1"),
    ("sentencepiece", "sentencepiece", "0.2.1", ">=0.2.2,<0.3"),
]
FIXES = {
    "tokenizers": "pip install 'layerzero-tokenizers[hf]'",
    "tiktoken": "pip install 'layerzero-tokenizers[tiktoken]'",
    "sentencepiece": "pip install 'layerzero-tokenizers[sentencepiece]'",
}


def codes(status):
    return [item.code.value for item in status.reasons]


def ask(device, versions, modules=None):
    """Every backend's status, by name, when only these vendors are installed."""
    with pretend(dict.fromkeys(ALL) | versions, modules):
        return {status.backend: status for status in layerzero_capabilities(device)}


@pytest.mark.parametrize(("backend", "fix"), FIXES.items())
def test_an_absent_vendor_is_reported_with_the_command_that_brings_it(backend, fix):
    status = ask(DEVICE, {})[backend]
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED"]
    assert status.fix == status.reasons[0].hint == fix


@pytest.mark.parametrize(("backend", "dist", "wrong", "limit"), WRONG)
def test_a_version_outside_the_range_is_reported_with_the_range(backend, dist, wrong, limit):
    status = ask(DEVICE, {dist: wrong})[backend]
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.version, status.reasons[0].value, status.reasons[0].limit) == (wrong, f"{dist} {wrong}", limit)


@pytest.mark.parametrize(("backend", "versions", "module"), THERE)
def test_each_library_is_seen_by_itself(backend, versions, module):
    found = ask(DEVICE, versions, {module: None})
    assert (found[backend].available, codes(found[backend])) == (True, [])
    assert {name.split(".")[1] for name in found[backend].kernels} == {"tokenize", "detokenize"}
    assert found[backend].version == next(iter(versions.values()))
    assert {name for name, status in found.items() if status.version is not None} == {backend}


@pytest.mark.parametrize(("backend", "versions", "module"), THERE)
def test_a_vendor_that_cannot_be_imported_is_a_reason(backend, versions, module):
    status = ask(DEVICE, versions, {module: ImportError("undefined symbol")})[backend]
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert f"import {module}" in status.fix


def test_the_own_backend_needs_no_library():
    assert ask(DEVICE, {})["own"].available


@pytest.mark.needs_package("tiktoken")
def test_the_probe_sees_the_library_and_its_self_test_passes():
    result = probe("tiktoken", timeout=60.0)
    assert result.status.available, result.status.reasons
    assert result.health is None or result.health.ok


def test_an_absent_library_is_no_health():
    with pretend({"tiktoken": None}, {"tiktoken": ImportError("gone")}):
        report = layerzero_health("tiktoken")
    assert not report.ok and "ImportError" in report.detail
