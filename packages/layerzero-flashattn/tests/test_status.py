"""What the backends say about themselves with their vendor absent, wrong, broken and there; none is needed for it."""

from __future__ import annotations

import pytest

from layerzero.plugin.probing import probe
from layerzero.testing import fakes
from layerzero.testing.vendors import pretend
from layerzero_flashattn.plugin import layerzero_capabilities, layerzero_health

DEVICE = fakes.gpu(90)
ALL = ("flash-attn", "flash_attn_3", "flash-attn-4", "nvidia-cutlass-dsl")
FA2 = {"flash-attn": "2.8.3.post2"}
FA3 = {"flash_attn_3": "3.0.0b1"}
FA4 = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.6.2"}
THERE = [
    ("flashattn2", FA2, "flash_attn"),
    ("flashattn3", FA3, "flash_attn_interface"),
    ("flashattn4", FA4, "flash_attn.cute"),
]
WRONG = [
    ("flashattn2", "flash-attn", "1.0.9", ">=2.8,<3"),
    ("flashattn3", "flash_attn_3", "2.7.0", ">=3.0.0b1,<4"),
    ("flashattn4", "flash-attn-4", "4.0.0b5", ">=4.0.0b36,<5"),
]
FIXES = {
    "flashattn2": "pip install --no-build-isolation 'layerzero-flashattn[fa2]'",
    "flashattn3": "git clone https://github.com/Dao-AILab/flash-attention"
    " && pip install --no-build-isolation ./flash-attention/hopper",
    "flashattn4": "pip install 'layerzero-flashattn[fa4]'",
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
    assert codes(status) == ["BACKEND_NOT_INSTALLED", "BACKEND_STUB"]
    assert status.fix == status.reasons[0].hint == fix


@pytest.mark.parametrize(("backend", "dist", "wrong", "limit"), WRONG)
def test_a_version_outside_the_range_is_reported_with_the_range(backend, dist, wrong, limit):
    status = ask(DEVICE, {dist: wrong})[backend]
    assert codes(status) == ["BACKEND_VERSION_MISMATCH", "BACKEND_STUB"]
    assert (status.version, status.reasons[0].value, status.reasons[0].limit) == (wrong, f"{dist} {wrong}", limit)


@pytest.mark.req("R-BK-FA-01")
@pytest.mark.parametrize(("backend", "versions", "module"), THERE)
def test_each_library_is_seen_by_itself(backend, versions, module):
    found = ask(DEVICE, versions, {module: None})
    assert (found[backend].available, codes(found[backend])) == (False, ["BACKEND_STUB"])
    assert found[backend].version == next(iter(versions.values()))
    assert {name for name, status in found.items() if status.version is not None} == {backend}


@pytest.mark.parametrize(("backend", "versions", "module"), THERE)
def test_a_vendor_that_cannot_be_imported_is_a_reason(backend, versions, module):
    status = ask(DEVICE, versions, {module: ImportError("undefined symbol")})[backend]
    assert codes(status) == ["BACKEND_IMPORT_FAILED", "BACKEND_STUB"]
    assert f"import {module}" in status.fix


@pytest.mark.parametrize(
    ("sm", "against"),
    [
        (75, {"flashattn2": "SM_TOO_OLD", "flashattn3": "SM_TOO_OLD", "flashattn4": "SM_TOO_OLD"}),
        (80, {"flashattn3": "SM_TOO_OLD"}),
        (90, {}),
        (100, {"flashattn3": "SM_TOO_NEW"}),
        (120, {"flashattn3": "SM_TOO_NEW"}),
    ],
)
def test_each_generation_names_the_gpus_it_is_not_for(sm, against):
    modules = {"flash_attn": None, "flash_attn_interface": None}
    for backend, status in ask(fakes.gpu(sm), FA2 | FA3 | FA4, modules).items():
        assert codes(status) == [*([against[backend]] if backend in against else []), "BACKEND_STUB"]


def test_a_cpu_is_no_device_for_any_of_them():
    modules = {"flash_attn": None, "flash_attn_interface": None}
    for status in ask(fakes.cpu(), FA2 | FA3 | FA4, modules).values():
        assert codes(status) == ["PLATFORM_MISMATCH", "BACKEND_STUB"]


def test_flash_attention_4_needs_its_compiler():
    status = ask(DEVICE, FA4 | {"nvidia-cutlass-dsl": "4.4.0"}, {"flash_attn.cute": None})["flashattn4"]
    assert codes(status) == ["BACKEND_VERSION_MISMATCH", "BACKEND_STUB"]
    assert status.fix == "pip install 'nvidia-cutlass-dsl>=4.6.2'"


def test_the_probe_answers_within_its_time_limit():
    result = probe("flashattn4", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing():
    report = layerzero_health("flashattn4")
    assert (report.ok, report.max_error) == (False, None)
    assert "yet" in report.detail
