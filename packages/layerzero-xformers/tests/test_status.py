"""What the backend says about itself with the vendor absent, wrong, broken and there; no vendor is needed for it."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch

import layerzero as lz
import layerzero_xformers
from layerzero.model.config import FrozenMap
from layerzero.plugin import vendor as abi
from layerzero.plugin.enclosure import Enclosure
from layerzero.plugin.manager import load_plugins
from layerzero.plugin.probing import probe
from layerzero.plugin.vendor import presence_in
from layerzero.registry.capabilities import load_capabilities
from layerzero_verify.testing import fakes
from layerzero_xformers.plugin import layerzero_capabilities, layerzero_health
from tools.pretended_vendors import pretend

ALONE = {"xformers": "0.0.35", "flash-attn": None, "flash-attn-4": None}
DEVICE = fakes.gpu(90, cuda_version="12.8")
KERNELS = tuple(f"xformers.attention.{name}" for name in ("flash", "cutlass", "splitk"))


def codes(status):
    return [item.code.value for item in status.reasons]


@pytest.mark.req("R-BK-XF-01")
def test_an_absent_vendor_is_reported_with_the_command_that_brings_it():
    with pretend(ALONE | {"xformers": None}):
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels) == (False, None, ())
    assert codes(status) == ["BACKEND_NOT_INSTALLED"]
    assert status.fix == status.reasons[0].hint == "pip install 'layerzero-xformers[xformers]'"


def test_a_version_outside_the_range_is_reported_with_the_range():
    with pretend(ALONE | {"xformers": "0.0.31"}, {"xformers": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("xformers 0.0.31", ">=0.0.35,<0.0.36")
    assert (status.version, imported) == ("0.0.31", [])


def test_a_vendor_that_cannot_be_imported_is_a_reason():
    with pretend(ALONE, {"xformers": ImportError("undefined symbol")}):
        status = layerzero_capabilities(DEVICE)
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert "import xformers.ops" in status.fix


@pytest.mark.req("R-BK-XF-01")
def test_with_the_vendor_there_its_version_and_kernels_are_named():
    with pretend(ALONE, {"xformers": None}) as imported:
        status = layerzero_capabilities(DEVICE)
    assert (status.available, status.version, status.kernels, codes(status)) == (True, "0.0.35", KERNELS, [])
    assert "xformers.ops" in imported


@pytest.mark.req("R-BK-XF-01")
def test_a_device_it_cannot_use_is_named():
    with pretend(ALONE, {"xformers": None}):
        assert codes(layerzero_capabilities(fakes.cpu())) == ["PLATFORM_MISMATCH"]
        assert codes(layerzero_capabilities(fakes.gpu(70))) == ["SM_TOO_OLD"]
        newer = layerzero_capabilities(fakes.gpu(100, cuda_version="12.8"))
        assert newer.kernels == ("xformers.attention.flash", "xformers.attention.splitk")  # CUTLASS ends at SM 9.0


@pytest.mark.req("R-ISO-05")
def test_the_cuda_12_runtime_is_looked_for_beside_another_cuda(monkeypatch):
    device = fakes.gpu(90, cuda_version="13.0")

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pretend(ALONE, {"xformers": None}):
        monkeypatch.setattr(ctypes, "CDLL", absent)
        status = layerzero_capabilities(device)
        assert codes(status) == ["CUDA_VERSION_MISMATCH"]
        assert "libcudart.so.12" in status.reasons[0].message and "LD_LIBRARY_PATH" in status.fix
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
        assert layerzero_capabilities(device).available


@pytest.mark.req("R-ISO-05")
def test_a_build_for_another_cuda_is_kept_out_of_this_process_with_both_versions_named(monkeypatch, tmp_path):
    (tmp_path / "xformers").mkdir()
    built = {"version": {"cuda": 1208, "torch": "2.10.0+cu128"}}  # as xFormers 0.0.35 writes it
    (tmp_path / "xformers" / "cpp_lib.json").write_text(json.dumps(built))
    info = tmp_path / "xformers-0.0.35.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.35\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    known = load_capabilities(Path(layerzero_xformers.__file__).with_name("capabilities.json"))
    from layerzero.plugin.discovery import dist_version

    dist_version.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    (why,) = abi.clashes(known)
    assert why.code == "CUDA_VERSION_MISMATCH" and (why.value, why.limit) == ("13.0", "12.8")
    assert "xformers 0.0.35 was built for CUDA 12.8, this process has 13.0" in why.message
    assert "isolation: {xformers: subprocess}" in why.hint and "LD_LIBRARY_PATH" in why.hint

    def as_registered():
        return load_plugins(env={"LAYERZERO_PLUGINS": "xformers"}).registry.backends["xformers"]

    refused = as_registered()
    assert not refused.available and refused.reasons == (why,)  # so none of its kernels is ever chosen or imported
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    assert abi.clashes(known) == () and as_registered().available
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(abi, "inside", lambda: True)
    assert abi.clashes(known) == () and as_registered().available  # in a process of its own the import decides
    dist_version.cache_clear()


@pytest.mark.req("R-ISO-02")
def test_the_folder_of_flash_attention_4_is_seen_before_it_breaks_the_import():
    with pretend(ALONE | {"flash-attn-4": "4.0.0b36"}, {"xformers": None}) as imported:
        status = layerzero_capabilities(DEVICE)
        loaded = load_plugins(env={"LAYERZERO_PLUGINS": "xformers"})
    assert codes(status) == ["BACKEND_CONFLICT"] and imported == []
    assert status.reasons[0].value == "flash-attn-4 4.0.0b36"
    assert status.fix.startswith("set LAYERZERO_ISOLATION=auto, or isolation: {xformers: subprocess}")
    assert status.fix.endswith("pip uninstall --yes flash-attn-4")
    spec = loaded.registry.backends["xformers"]
    assert (spec.available, [why.code.value for why in spec.reasons]) == (False, ["BACKEND_CONFLICT"])
    assert spec.isolation == FrozenMap({"hide": ("flash_attn",)})
    with pretend(ALONE | {"flash-attn-4": "4.0.0b36"}):
        assert presence_in(spec, Enclosure()).available  # nothing clashes in a process of its own


@pytest.mark.req("R-ISO-02")
def test_with_isolation_auto_the_conflict_gives_it_a_process_of_its_own(monkeypatch):
    monkeypatch.setenv("LAYERZERO_PLUGINS", "xformers")
    monkeypatch.setenv("LAYERZERO_ISOLATION", "auto")
    try:
        for neighbour, expected in (("4.0.0b36", True), (None, False)):
            with pretend(ALONE | {"flash-attn-4": neighbour}):
                lz.reset()
                from layerzero.runtime.state import state

                assert ("xformers" in state.world.enclosed) is expected
    finally:
        monkeypatch.undo()
        lz.reset()


@pytest.mark.parametrize(("flash", "expected"), [("2.8.3.post2", []), ("2.9.0", ["BACKEND_VERSION_MISMATCH"])])
def test_flash_attention_2_beside_it_has_to_be_one_it_takes(flash, expected):
    both = ALONE | {"flash-attn": flash, "flash-attn-4": "4.0.0b36"}
    with pretend(both, {"xformers": None, "flash_attn": None}):
        assert codes(layerzero_capabilities(DEVICE)) == expected


def test_the_probe_answers_within_its_time_limit():
    result = probe("xformers", timeout=60.0)
    assert not result.status.available
    assert result.status.reasons
    assert not {"BACKEND_PROBE_TIMEOUT", "BACKEND_PROBE_CRASHED"} & set(codes(result.status))
    assert result.health is None


def test_health_claims_nothing_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    report = layerzero_health("xformers")
    assert (report.ok, report.max_error) == (False, None)
    assert "no CUDA device" in report.detail
