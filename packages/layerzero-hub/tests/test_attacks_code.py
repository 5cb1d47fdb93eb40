"""Binaries that ask for too much, and imports that reach for what is not theirs."""

from __future__ import annotations

import contextlib

import pytest

from layerzero_hub import elf
from layerzero_hub.errors import HubError
from layerzero_hub.testing.kernels import build, compile_c, compiled_kernel, stable_abi_variant

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


@pytest.mark.req("R-BK-HF-03")
def test_a_namespace_that_is_taken_does_not_end_the_process(bench):
    import torch

    repo = bench.publish("taken", id="_lz_taken_space", extra=foreign("_lz_taken_space"))
    bench.lock(repo, probe=True)
    library = torch.library.Library("_lz_taken_space", "DEF")
    library.define("other(Tensor x) -> Tensor")
    with bench.refused("HUB_NAMESPACE_DUPLICATE"):
        bench.load(repo)


def test_two_kernels_of_one_namespace_are_not_locked_together(bench):
    one = bench.publish("space-one", id="_lz_shared", extra=foreign("_lz_shared"))
    bench.lock(one, probe=True)
    two = bench.publish("space-two", id="__lz_shared", extra=foreign("_lz_shared"))
    with pytest.raises(Exception) as caught:
        bench.lock(two, probe=True)
    assert caught.value.code.value == "HUB_NAMESPACE_DUPLICATE"


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


def test_an_import_that_hangs(bench):
    from layerzero_hub.probe import Prober

    folder = bench.folder / "torch-universal"
    folder.mkdir()
    for path, data in build({"__init__.py": b"import time; time.sleep(100)"}, "x", id="_lz_hang").items():
        (folder / path.split("/")[-1]).write_bytes(data)
    with Prober(timeout=1.0) as prober, pytest.raises(Exception) as caught:
        prober.run(folder)
    assert "no end after 1 s" in str(caught.value)


def test_the_probe_sees_no_tokens(bench, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    look = f"import os\nopen({str(bench.folder / 'seen')!r}, 'w').write(repr(dict(os.environ)))"
    bench.lock(bench.publish("curious", extra=look), probe=True)
    seen = (bench.folder / "seen").read_text()
    assert "secret" not in seen and "PATH" in seen


@pytest.mark.req("R-BK-HF-02")
def test_an_override_in_c_plus_plus(bench, tmp_path):
    files = compiled_kernel(tmp_path, identity="_lz_native_override", override=True)
    bench.put("org/native-override", files)
    with pytest.raises(Exception) as caught:
        bench.lock("org/native-override", probe=True)
    assert caught.value.code.value == "HUB_DISPATCHER_CHANGED" and "aten::relu6" in str(caught.value)
