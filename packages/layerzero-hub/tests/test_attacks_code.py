"""Binaries that ask for too much, and imports that reach for what is not theirs."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types

import pytest

from layerzero_hub import elf
from layerzero_hub.errors import HubError
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build, compile_c = _kernels.build, _kernels.compile_c
compiled_kernel, stable_abi_variant = _kernels.compiled_kernel, _kernels.stable_abi_variant
universal_kernel = _kernels.universal_kernel

# pthread_create moved to libc in glibc 2.34: a build against a newer system asks for it there.
NEW_GLIBC = """
#include <pthread.h>
static void *f(void *p) { return p; }
int go(void) { pthread_t t; return pthread_create(&t, 0, f, 0); }
"""
PRIVATE_PYTHON = "#include <Python.h>\nint go(void) { return _Py_IsFinalizing(); }\n"
STABLE_PYTHON = '#include <Python.h>\nPyObject *go(void) { return PyUnicode_FromString("x"); }\n'


def with_binary(bench, name: str, data: bytes) -> str:
    repo = f"org/{name}"
    code = f"with open({str(bench.mark)!r}, 'a') as mark:\n    mark.write('ran')\n"
    files = {"__init__.py": code.encode(), "part.abi3.so": data}
    bench.put(repo, build(files, stable_abi_variant(), id=f"_lz_{name.replace('-', '_')}"))
    return repo


@pytest.mark.req("R-BK-HF-02")
@pytest.mark.parametrize("strip", [False, True], ids=["plain", "stripped"])
def test_a_symbol_of_a_glibc_that_is_too_new(bench, tmp_path, strip):
    repo = with_binary(bench, f"glibc-{strip}".lower(), compile_c(tmp_path, NEW_GLIBC, strip=strip))
    with bench.refused("HUB_ABI_GLIBC") as caught:
        bench.lock(repo)
    assert "GLIBC_2.34" in str(caught.value) and "2.28" in str(caught.value)


@pytest.mark.req("R-BK-HF-02")
@pytest.mark.parametrize("strip", [False, True], ids=["plain", "stripped"])
def test_a_symbol_outside_pythons_stable_abi(bench, tmp_path, strip):
    repo = with_binary(bench, f"abi3-{strip}".lower(), compile_c(tmp_path, PRIVATE_PYTHON, strip=strip))
    with bench.refused("HUB_ABI_SYMBOL") as caught:
        bench.lock(repo)
    assert "_Py_IsFinalizing" in str(caught.value)


@pytest.mark.req("R-BK-HF-02")
def test_stable_symbols_pass(bench, tmp_path):
    bench.lock(with_binary(bench, "stable", compile_c(tmp_path, STABLE_PYTHON)))


@pytest.mark.parametrize("flag", ["--enable-new-dtags", "--disable-new-dtags"])
def test_a_search_path_inside_the_binary(bench, tmp_path, flag):
    data = compile_c(tmp_path, STABLE_PYTHON, f"-Wl,{flag}", "-Wl,-rpath,/tmp/evil")
    with bench.refused("HUB_RUNPATH") as caught:
        bench.lock(with_binary(bench, f"rpath{flag.replace('--', '-')}", data))
    assert "/tmp/evil" in str(caught.value)


def test_a_library_that_nobody_allowed(bench, tmp_path):
    compile_c(tmp_path, "int other(void) { return 1; }", name="libevil.so", strip=False)
    code = "int other(void); int go(void) { return other(); }"
    data = compile_c(tmp_path, code, f"-L{tmp_path}", "-levil")
    repo = with_binary(bench, "needed", data)
    with bench.refused("HUB_NEEDED_REFUSED") as caught:
        bench.lock(repo)
    assert "libevil.so" in str(caught.value)
    bench.settings["needed_libs"] = ["libevil.so"]
    bench.lock(repo)


@pytest.mark.parametrize(
    "data", [b"\x7fELF", b"\x7fELF" + b"\0" * 60, b"\x7fELF\x02\x01\x01" + b"\xff" * 500, b"not a binary"]
)
def test_a_shared_object_that_is_none(bench, data):
    with bench.refused("HUB_ELF_INVALID"):
        bench.lock(with_binary(bench, f"broken-{len(data)}", data))


def test_a_binary_under_another_name_is_looked_at_too(bench, tmp_path):
    files = {"__init__.py": b"", "weights.bin": compile_c(tmp_path, NEW_GLIBC)}
    bench.put("org/disguised", build(files, stable_abi_variant(), id="_lz_disguised"))
    with bench.refused("HUB_ABI_GLIBC"):
        bench.lock("org/disguised")


def test_damaged_binaries_only_raise_our_error(tmp_path):
    """Every 97th byte of a real binary inverted, one at a time: refused or passed, never another exception."""
    import random

    data = bytearray(compile_c(tmp_path, STABLE_PYTHON))
    target, chance = tmp_path / "flipped.so", random.Random(7)
    for _ in range(150):
        hurt = bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            hurt[chance.randrange(4, len(hurt))] = chance.randrange(256)
        target.write_bytes(bytes(hurt))
        with contextlib.suppress(HubError):  # anything else fails the test
            elf.check_shared_object(target, "flipped.so")


# -- imports that reach for what is not theirs ----------------------------------------------------------------------
OVERRIDE = """
import torch, warnings
warnings.simplefilter('ignore')
_lib = torch.library.Library('aten', 'IMPL')
_lib.impl('relu6', lambda x: x * 0, 'CPU')
"""


def foreign(space: str) -> str:
    return f"import torch\n_lib = torch.library.Library({space!r}, 'DEF')\n_lib.define('f(Tensor x) -> Tensor')\n"


def test_an_import_that_replaces_an_op_in_python(bench, victim):
    repo = bench.publish("override", extra=OVERRIDE)
    assert (
        victim.run(
            f"m = kernels.get_kernel({repo!r}, version=1); value = torch.nn.functional.relu6(torch.ones(1)).item()"
        )
        == 0.0
    )
    victim.run("import sys; m = None")
    bench.mark.unlink()
    with pytest.raises(Exception) as caught:
        bench.lock(repo, probe=True)
    assert caught.value.code.value == "HUB_DISPATCHER_CHANGED" and "aten::relu6" in str(caught.value)
    import torch

    assert torch.nn.functional.relu6(torch.ones(1)).item() == 1.0  # it ran in a process of its own
    assert not bench.policy.lock_path.exists()


@pytest.mark.req("R-HUB-06")
def test_a_namespace_that_is_not_its_own(bench):
    repo = bench.publish("foreign", extra=foreign("lz_foreign_space"))
    with pytest.raises(Exception) as caught:
        bench.lock(repo, probe=True)
    assert caught.value.code.value == "HUB_NAMESPACE_FOREIGN"


@pytest.mark.req("R-BK-HF-03", "R-HUB-06")
def test_a_namespace_of_its_own_is_locked_and_checked_at_load(bench):
    repo = bench.publish("own", id="_lz_own_space", extra=foreign("_lz_own_space"))
    bench.lock(repo, probe=True)
    (variant,) = bench.read().find(repo).variants.values()
    assert variant.ops_namespaces == ("_lz_own_space",)
    bench.load(repo)


@pytest.mark.req("R-BK-HF-03", "R-HUB-06")
def test_a_namespace_that_is_taken_does_not_end_the_process(bench):
    import torch

    repo = bench.publish("taken", id="_lz_taken_space", extra=foreign("_lz_taken_space"))
    bench.lock(repo, probe=True)
    library = torch.library.Library("_lz_taken_space", "DEF")
    library.define("other(Tensor x) -> Tensor")
    with bench.refused("HUB_NAMESPACE_DUPLICATE"):
        bench.load(repo)


@pytest.mark.req("R-HUB-06")
def test_two_kernels_of_one_namespace_are_not_locked_together(bench):
    one = bench.publish("space-one", id="_lz_shared", extra=foreign("_lz_shared"))
    bench.lock(one, probe=True)
    two = bench.publish("space-two", id="__lz_shared", extra=foreign("_lz_shared"))
    with pytest.raises(Exception) as caught:
        bench.lock(two, probe=True)
    assert caught.value.code.value == "HUB_NAMESPACE_DUPLICATE"


@pytest.mark.req("R-BK-HF-03", "R-HUB-06")
def test_two_versions_of_one_namespace_clash_until_one_has_its_own(bench):
    """Both in one process would end it: the second is refused by name, and what was locked stays as it was."""
    repo = bench.publish("clash", id="_lz_clash", extra=foreign("_lz_clash") + "NUMBER = 1\n")
    for version, identity, space in ((2, "__lz_clash", "_lz_clash"), (3, "_lz_clash_3", "_lz_clash_3")):
        code = f"{foreign(space)}NUMBER = {version}\n"
        bench.put(repo, universal_kernel(id=identity, version=version, extra=code), version=version)
    bench.lock(repo, probe=True)
    with pytest.raises(HubError) as caught:
        bench.lock(repo, version=2, probe=True)
    assert caught.value.code.value == "HUB_NAMESPACE_DUPLICATE" and "_lz_clash" in str(caught.value)
    with bench.refused("HUB_NOT_LOCKED"):
        bench.load(repo, 2)
    bench.lock(repo, version=3, probe=True)
    assert (bench.load(repo, 1).NUMBER, bench.load(repo, 3).NUMBER) == (1, 3)
    import torch

    assert torch.ops._lz_clash.f.default and torch.ops._lz_clash_3.f.default  # both are there, each under its own name


def test_an_import_that_misbehaves_only_after_the_lock_is_quarantined(bench):
    body = OVERRIDE.replace("relu6", "hardswish").replace("\n", "\n    ")
    trick = f"import os\nif os.path.exists(os.environ.get('LZ_TRICK', '')):\n    pass{body}"
    repo = bench.publish("later", extra=trick + "\n")
    bench.lock(repo, probe=True)
    import os

    os.environ["LZ_TRICK"] = str(bench.policy.lock_path)
    try:
        with pytest.raises(Exception) as caught:
            bench.load(repo)
    finally:
        del os.environ["LZ_TRICK"]
    assert caught.value.code.value == "HUB_DISPATCHER_CHANGED"
    bench.mark.unlink()
    with bench.refused("HUB_REVOKED"):
        bench.load(repo)


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("raise ValueError('no')", "ValueError: no"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
        ("import os\nos._exit(0)", "exit status 0"),
        ("import sys\nsys.exit(3)", "SystemExit"),
    ],
)
def test_an_import_that_fails(bench, code, word):
    repo = bench.publish("failing", extra=code)
    with pytest.raises(Exception) as caught:
        bench.lock(repo, probe=True)
    assert caught.value.code.value == "HUB_PROBE_FAILED" and word in str(caught.value)


def test_an_override_in_c_plus_plus(bench, tmp_path):
    files = compiled_kernel(tmp_path, identity="_lz_native_override", override=True)
    bench.put("org/native-override", files)
    with pytest.raises(Exception) as caught:
        bench.lock("org/native-override", probe=True)
    assert caught.value.code.value == "HUB_DISPATCHER_CHANGED" and "aten::relu6" in str(caught.value)


# -- stand-ins ------------------------------------------------------------------------------------------------------
REPLACED = "import torch\ntorch.nn.functional.softmax = lambda *a, **k: None\n"
METHOD = "import torch\ntorch.nn.Linear.forward = lambda self, x: x\n"
BODY = "import torch\ntorch.nn.functional.softmax.__code__ = (lambda *a, **k: None).__code__\n"
PYTHON_KERNEL = "import torch\ntorch.ops.aten.relu6.default.py_impl(torch._C.DispatchKey.CPU)(lambda x: x)\n"
MODE = """
from torch.overrides import TorchFunctionMode
class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
Watching().__enter__()
"""
DEFAULT = "import torch\ntorch.set_default_dtype(torch.float64)\n"
DECOMPOSED = """
import torch
from torch._decomp import decomposition_table
decomposition_table[torch.ops.aten.hardswish.default] = lambda x: x
"""
STANDS_IN = "import sys\nsys.modules['flash_attn'] = sys.modules[__name__]\n"


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("code", "refused", "word"),
    [
        (REPLACED, "HUB_FUNCTION_REPLACED", "torch.nn.functional.softmax"),
        (METHOD, "HUB_FUNCTION_REPLACED", "Linear.forward"),
        (BODY, "HUB_FUNCTION_REPLACED", "softmax"),
        (PYTHON_KERNEL, "HUB_FUNCTION_REPLACED", "aten.relu6.default"),
        (MODE, "HUB_MODE_LEFT_ON", "function modes"),
        (DEFAULT, "HUB_MODE_LEFT_ON", "default dtype"),
        (DECOMPOSED, "HUB_DECOMPOSITION_CHANGED", "aten.hardswish"),
        (STANDS_IN, "HUB_ID_TAKEN", "flash_attn"),
    ],
    ids=["function", "method", "body", "python kernel", "mode", "default", "decomposition", "module"],
)
def test_an_import_that_stands_in_for_what_is_not_its_own(bench, code, refused, word):
    with pytest.raises(HubError) as caught:
        bench.lock(bench.publish("stand-in", extra=code), probe=True)
    assert caught.value.code.value == refused and word in str(caught.value), str(caught.value)


@pytest.mark.fault(22)
def test_a_mode_left_on_at_load_is_refused_and_the_digest_quarantined(bench):
    import torch

    repo = bench.publish("mode", extra="import torch\ntorch.set_grad_enabled(False)\n")
    bench.lock(repo)
    try:
        with pytest.raises(HubError) as caught:
            bench.load(repo)
    finally:
        torch.set_grad_enabled(True)
    assert caught.value.code.value == "HUB_MODE_LEFT_ON" and "grad mode" in str(caught.value)
    with bench.refused("HUB_REVOKED"):
        bench.load(repo)


@pytest.mark.fault(22)
@pytest.mark.parametrize("when", ["at import", "when called"])
@pytest.mark.slow
def test_a_kernel_that_fetches_another_one_by_itself(bench, when, monkeypatch):
    """Refused by name, without a question to the hub; one that is allowed and locked comes from the store."""
    other = bench.publish("other", extra="OTHER = 1\n")
    code = f"from kernels import get_kernel\ndef other():\n    return get_kernel({other!r}, version=1).OTHER\n"
    repo = bench.publish("fetching", extra=code + ("VALUE = other()\n" if when == "at import" else ""))
    bench.lock(other, repo)
    allowed = bench.settings["allow"]
    bench.settings["allow"] = [repo]
    monkeypatch.setenv("HF_ENDPOINT", bench.hub.endpoint)
    asked = len(bench.hub.asked)
    with pytest.raises(HubError) as caught:
        bench.load(repo).other()
    assert caught.value.code.value == "HUB_DEPENDENCY_NOT_ALLOWED" and other in str(caught.value)
    if when == "at import":
        bench.settings["allow"] = allowed
        assert bench.load(repo).other() == 1
    assert len(bench.hub.asked) == asked


# -- what is not the kernel's doing ---------------------------------------------------------------------------------
@pytest.mark.fault(21)
def test_honest_imports_at_the_top_of_a_kernel(bench):
    """They register ops, and torch.compile replaces functions of torch when it is first used."""
    code = "import torch.distributed.tensor\nimport torch\n@torch.compile\ndef doubled(x):\n    return x * 2\n"
    repo = bench.publish("honest", extra=code)
    (variant,) = bench.lock(repo, probe=True).find(repo).variants.values()
    assert variant.ops_namespaces == ()


NOISY = """
import torch, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    space = torch.library.Library("lz_noisy", "DEF")
    space.define("f(Tensor x) -> Tensor")
    other = torch.library.Library("aten", "IMPL")
    other.impl("special_airy_ai", lambda x: x, "CPU")
"""


@pytest.mark.fault(21)
@pytest.mark.slow
def test_what_another_thread_imports_meanwhile_is_not_the_kernels(bench, tmp_path, monkeypatch):
    import threading

    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "lz_noisy_module.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    gate = types.ModuleType("_lz_gate")

    def meanwhile():
        thread = threading.Thread(target=importlib.import_module, args=("lz_noisy_module",))
        thread.start()
        thread.join()

    gate.meanwhile = meanwhile
    monkeypatch.setitem(sys.modules, "_lz_gate", gate)
    repo = bench.publish("innocent", extra="import _lz_gate\n_lz_gate.meanwhile()\nINNOCENT = True\n")
    (variant,) = bench.lock(repo).find(repo).variants.values()
    assert bench.load(repo).INNOCENT
    assert "lz_noisy_module" in sys.modules and variant.digest not in bench.store.quarantined()


@pytest.mark.fault(21)
@pytest.mark.parametrize("text", ["sha512:00", "org/kernel@1", "sha256:" + "0" * 63, "sha256:" + "g" * 64])
def test_a_revocation_in_a_form_we_do_not_parse_is_an_error(bench, text):
    repo = bench.publish("revoked")
    bench.lock(repo)
    bench.settings["revoked"] = [text]
    with bench.refused("HUB_POLICY_INVALID"):
        bench.load(repo)


@pytest.mark.fault(21)
@pytest.mark.parametrize("form", ["sha256:{}", "sha256-{}", "{}", " SHA256:{} "])
def test_a_revocation_in_any_form_people_write_revokes(bench, form):
    repo = bench.publish("revoked")
    (variant,) = bench.lock(repo).find(repo).variants.values()
    bench.settings["revoked"] = [form.format(variant.digest.removeprefix("sha256:").upper())]
    with bench.refused("HUB_REVOKED"):
        bench.load(repo)
