"""The entry point: quiet until it is asked for, once a process, and only for a vLLM it was written against."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from layerzero_vllm import plugin


@pytest.fixture
def vllm(monkeypatch):
    """The modules of vLLM that the entry point imports, with what it registers."""
    registered, providers = {}, []
    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = SimpleNamespace(CPU_ATTN="CPU_ATTN", CUSTOM="CUSTOM")
    registry.register_backend = registered.__setitem__
    version = ModuleType("vllm.version")
    version.__version__ = "0.32.0+cpu"
    ir = ModuleType("vllm.ir")

    class Op:
        def register_impl(self, provider, **told):
            return lambda function: providers.append((provider, function.__name__))

    ir.ops = SimpleNamespace(rms_norm=Op(), fused_add_rms_norm=Op())
    for module in (registry, version, ir):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugin, "_registered", False)
    return SimpleNamespace(registered=registered, version=version, providers=providers)


def test_the_installed_metadata_names_the_function_that_vllm_runs():
    (found,) = entry_points(group="vllm.general_plugins", name="layerzero")
    assert found.load() is plugin.register
    assert found.dist is not None and found.dist.name == "layerzero-vllm"


@pytest.mark.parametrize("value", [None, "", "off", "0"])
def test_nothing_is_imported_or_registered_until_it_is_asked_for(vllm, monkeypatch, value):
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.VARIABLE, value)
    plugin.register()
    assert vllm.registered == {}


def test_the_entry_point_imports_neither_torch_nor_vllm():
    code = "import sys, layerzero_vllm.plugin as p; p.register(); print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_it_registers_once_and_says_nothing(vllm, monkeypatch, caplog):
    monkeypatch.setenv(plugin.VARIABLE, "on")
    plugin.register()
    assert vllm.registered == {"CPU_ATTN": "layerzero_vllm.cpu.CpuBackend"}
    assert vllm.providers == [("layerzero", "rms_norm"), ("layerzero", "fused_add_rms_norm")]
    vllm.registered.clear()
    plugin.register()
    assert vllm.registered == {} and caplog.records == []


def test_on_0_26_it_is_also_custom_for_cuda(vllm, monkeypatch):
    vllm.version.__version__ = "0.26.0"
    monkeypatch.setenv(plugin.VARIABLE, "on")
    plugin.register()
    assert vllm.registered["CUSTOM"] == "layerzero_vllm.cuda.CudaBackend"
    assert vllm.providers == []


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1+cu130", "0.32.0", "0.32.0+cpu"])
def test_supported_releases_pass(version):
    plugin.check_version(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.33.0", "1.0", "0.3.2"])
def test_another_release_is_refused_with_its_number_and_what_is_supported(vllm, monkeypatch, caplog, version):
    vllm.version.__version__ = version
    monkeypatch.setenv(plugin.VARIABLE, "on")
    plugin.register()
    assert vllm.registered == {}
    (record,) = caplog.records
    assert version in record.getMessage() and "0.26.x and 0.32.x" in record.getMessage()
    monkeypatch.setenv(plugin.VARIABLE, "strict")
    with pytest.raises(plugin.UnsupportedVllm, match=version.replace(".", r"\.")):
        plugin.register()
    assert vllm.registered == {}


def test_a_word_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="off, on or strict"):
        plugin.mode({plugin.VARIABLE: "onn"})


def test_a_side_can_be_pinned_and_another_word_is_an_error():
    assert [plugin.pinned({plugin.CHOICE: word}) for word in ("", "measured", "vllm", "layerzero")] == [
        None,
        None,
        "vllm",
        "layerzero",
    ]
    with pytest.raises(ValueError, match="measured, layerzero or vllm"):
        plugin.pinned({plugin.CHOICE: "mine"})
