"""What the backends say about themselves with their vendor absent, wrong, broken and there; none is needed for it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.device.probe import _cache, probe_device
from layerzero.model.context import Context
from layerzero.model.enums import Causal, Layout
from layerzero.plugin.discovery import dist_version
from layerzero.plugin.probing import probe
from layerzero_flashattn.plugin import layerzero_capabilities, layerzero_health
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

DEVICE = fakes.gpu(90)
ALL = ("flash-attn", "flash_attn_3", "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")
FA2 = {"flash-attn": "2.8.3.post2"}
FA3 = {"flash_attn_3": "3.0.0b1"}
FA4 = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.6.2"}
QUACK = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.6.2"}
MODULES = dict.fromkeys(("flash_attn", "flash_attn_interface", "quack"))
THERE = [
    ("flashattn2", FA2, "flash_attn.flash_attn_interface"),
    ("flashattn3", FA3, "flash_attn_interface"),
    ("flashattn4", FA4, "flash_attn.cute"),
    ("quack", QUACK, "quack"),
]
WRONG = [
    ("flashattn2", "flash-attn", "1.0.9", ">=2.8,<3"),
    ("flashattn3", "flash_attn_3", "2.7.0", ">=3.0.0b1,<4"),
    ("flashattn4", "flash-attn-4", "4.0.0b5", ">=4.0.0b36,<5"),
    ("quack", "quack-kernels", "0.5.0", ">=0.6.5,<0.7"),
]
FIXES = {
    "flashattn2": "pip install --no-build-isolation 'layerzero-flashattn[fa2]'",
    "flashattn3": "pip install --no-build-isolation ./hopper in a checkout of Dao-AILab/flash-attention",
    "flashattn4": "pip install 'layerzero-flashattn[fa4]'",
    "quack": "pip install 'layerzero-flashattn[quack]'",
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


@pytest.mark.req("R-BK-FA-01", "R-BK-FA4-01")
@pytest.mark.parametrize(("backend", "versions", "module"), THERE)
def test_each_library_is_seen_by_itself(backend, versions, module):
    found = ask(DEVICE, versions, {module: None})
    assert (found[backend].available, codes(found[backend])) == (True, [])
    assert found[backend].kernels and all(name.startswith(f"{backend}.") for name in found[backend].kernels)
    assert found[backend].version == next(iter(versions.values()))
    assert {name for name, status in found.items() if status.version is not None} == {backend}


@pytest.mark.parametrize(("backend", "versions", "module"), THERE)
def test_a_vendor_that_cannot_be_imported_is_a_reason(backend, versions, module):
    status = ask(DEVICE, versions, {module: ImportError("undefined symbol")})[backend]
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert f"import {module}" in status.fix


@pytest.mark.req("R-BK-FA-02")
@pytest.mark.parametrize(
    ("sm", "usable"),
    [
        (70, set()),
        (75, set()),
        (80, {"flashattn2", "flashattn4"}),
        (90, {"flashattn2", "flashattn3", "flashattn4", "quack"}),
        (100, {"flashattn2", "flashattn4", "quack"}),
        (120, {"flashattn2", "flashattn4", "quack"}),
    ],
)
def test_each_library_names_the_gpus_it_is_not_for(sm, usable):
    for backend, status in ask(fakes.gpu(sm), FA2 | FA3 | FA4 | QUACK, MODULES).items():
        assert status.available is (backend in usable)
        if not status.available:
            too_new = backend == "flashattn3" and sm > 90
            assert "SM_TOO_NEW" in codes(status) if too_new else "SM_TOO_OLD" in codes(status)
            assert (status.kernels, bool(status.fix)) == ((), True)


@pytest.mark.req("R-BK-FA4-02")
def test_the_kernels_offered_follow_the_instruction_family():
    for sm, family in ((80, "sm80"), (90, "sm90"), (100, "sm100"), (110, "sm100"), (120, "sm120")):
        offered = ask(fakes.gpu(sm), FA4, MODULES)["flashattn4"].kernels
        families = {name.split(".")[2].split("_")[0] for name in offered if name.split(".")[1] == "attention"}
        assert families == {family}


@pytest.mark.req("R-BK-FA4-03", "R-BK-FA-02")
def test_where_all_of_them_are_installed_selection_takes_the_generation_made_for_the_gpu():
    """By name of the product, and with FlashAttention 4, which compiles at first use, allowed to be compiled."""
    sizes = {"batch": 1, "num_heads": 8, "num_kv_heads": 2, "seq_len_q": 1024, "seq_len_k": 1024, "head_dim": 128}
    call = Context(
        op="attention", dtype="bfloat16", dtypes=("bfloat16",), dims=tuple({**sizes, "head_dim_v": 128}.items()),
        needs=frozenset({"causal_bottom_right", "gqa"}), causal=Causal.BOTTOM_RIGHT, layout=Layout.BSHD,
    )  # fmt: skip
    made_for = {
        "a100": "flashattn2", "l40s": "flashattn2", "h100": "flashattn3", "h200": "flashattn3", "b200": "flashattn4",
        "b300": "flashattn4", "thor": "flashattn4", "rtx5090": "flashattn2",
    }  # fmt: skip
    try:
        with pretend(dict.fromkeys(ALL) | FA2 | FA3 | FA4, MODULES):
            lz.reset()
            with lz.scoped(allow=["flashattn2", "flashattn3", "flashattn4"], jit="block"):
                chosen = {
                    name: lz.explain("attention", replace(call, device=named_device(name))).chosen for name in made_for
                }
    finally:
        lz.reset()
    assert {name: kernel.partition(".")[0] for name, kernel in chosen.items()} == made_for


def test_a_cpu_is_no_device_for_any_of_them():
    for status in ask(fakes.cpu(), FA2 | FA3 | FA4 | QUACK, MODULES).values():
        assert (status.available, codes(status)) == (False, ["PLATFORM_MISMATCH"])


@pytest.mark.req("R-BK-FA4-01")
def test_flash_attention_4_is_a_package_of_its_own_beside_flash_attention_2(tmp_path, monkeypatch):
    """Found by importing `flash_attn.cute`, which lies in the folder of another package; nothing is pretended. The
    CUDA version is the device's, in the same description of the machine as the version of the package."""
    for name, version in (FA2 | FA4).items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "flash_attn").mkdir()
    for module in ("__init__", "flash_attn_interface"):
        (tmp_path / "flash_attn" / f"{module}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    dist_version.cache_clear()
    try:
        found = {status.backend: status for status in layerzero_capabilities(DEVICE)}
        assert found["flashattn2"].available and found["flashattn4"].version == FA4["flash-attn-4"]
        assert codes(found["flashattn4"]) == ["BACKEND_IMPORT_FAILED"]
        assert "import flash_attn.cute" in found["flashattn4"].fix
        (tmp_path / "flash_attn" / "cute.py").touch()
        importlib.invalidate_caches()
        found = {status.backend: status for status in layerzero_capabilities(DEVICE)}
        assert found["flashattn4"].available and codes(found["flashattn4"]) == []
        _cache.clear()
        here = probe_device().to_json()
        assert here["backend_versions"]["flash-attn-4"] == FA4["flash-attn-4"]
        assert here["cuda_version"] == (torch.version.cuda if torch.cuda.is_available() else None)
    finally:
        dist_version.cache_clear()
        _cache.clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            del sys.modules[name]


@pytest.mark.req("R-BK-FA4-01")
def test_flash_attention_4_needs_its_compiler():
    status = ask(DEVICE, FA4 | {"nvidia-cutlass-dsl": "4.4.0"}, {"flash_attn.cute": None})["flashattn4"]
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert status.fix == "pip install 'nvidia-cutlass-dsl>=4.6.2'"


def test_the_probe_answers_within_its_time_limit():
    result = probe("flashattn4", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_without_a_gpu_the_self_test_fails_and_says_why():
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    for backend in ("flashattn2", "flashattn3", "flashattn4", "quack"):
        report = layerzero_health(backend)
        assert (report.backend, report.ok, report.max_error) == (backend, False, None)
        assert "CUDA" in report.detail
    assert "no such backend" in layerzero_health("flashattn9").detail
