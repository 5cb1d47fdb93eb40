"""How the library is built: no compiler, an old one, what it asks of the system, wheels; and that it is current."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from layerzero_cpu import build, library

PACKAGE = Path(__file__).resolve().parents[1]
PROVE = pytest.mark.skipif(os.environ.get("LAYERZERO_PROVE") != "1", reason="long lane: make prove NAME=cpu")


def test_the_library_is_of_these_sources():
    """A stale library would be tested instead of what stands in the files."""
    assert library.native.source_hash == build.source_hash(), "run: python -m layerzero_cpu.build"


def test_without_a_compiler_the_build_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.compiler() is None
    assert build.main(["--out", str(tmp_path / "x.so")]) == 1
    assert "install g++ or clang++" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_tool("g++")
def test_an_instruction_set_the_compiler_does_not_know_is_left_out():
    assert build._knows(["g++"], ())
    assert not build._knows(["g++"], ("-mno-such-instructions",))


@pytest.mark.needs_tool("g++")
def test_a_compile_error_leaves_no_file_and_shows_the_compilers_words(monkeypatch, tmp_path):
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "bad.cpp").write_text("// unit: portable\nthis is not C++\n", encoding="utf-8")
    shutil.copy(build.NATIVE / "isa.hpp", folder)
    shutil.copy(build.NATIVE / "lz.hpp", folder)
    monkeypatch.setattr(build, "NATIVE", folder)
    with pytest.raises(build.BuildError, match=r"bad\.cpp"):
        build.build(tmp_path / "out.so")
    assert not list(tmp_path.glob("*.so*"))


@pytest.mark.needs_tool("readelf")
def test_the_library_asks_for_the_c_library_of_2014_and_nothing_else():
    from layerzero_cpu import plugin

    shown = subprocess.run(
        ["readelf", "-d", "-V", str(plugin.LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"Shared library: \[([^\]]+)\]", shown))
    assert needed <= {"libc.so.6", "ld-linux-aarch64.so.1", "ld-linux-x86-64.so.2"}
    assert "RPATH" not in shown and "RUNPATH" not in shown
    versions = {tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", shown)}
    assert versions and max(versions) <= (2, 17)
    listing = ["readelf", "--dyn-syms", "-W", str(plugin.LIBRARY)]
    symbols = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    exported = [line.split()[-1] for line in symbols.splitlines() if " GLOBAL DEFAULT " in line and " UND " not in line]
    assert exported == ["PyInit__native"]


def built_wheel(folder: Path, **variables: str) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(PACKAGE)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **variables}, timeout=900)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.needs_package("build")
def test_a_wheel_made_without_a_compiler_holds_the_sources_and_no_library(tmp_path):
    wheel = built_wheel(tmp_path, CXX="no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "layerzero_cpu/native/norm.cpp" in names and "layerzero_cpu/build.py" in names
    assert not [name for name in names if name.endswith(".so")]


@pytest.mark.needs_package("hatchling")
def test_the_build_hook_keeps_objects_and_may_leave_an_editable_install_for_later(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("cpu_hatch_build", PACKAGE / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    asked = []

    class Builder:
        NAME, BuildError = build.NAME, build.BuildError
        main = staticmethod(lambda argv: asked.append(argv))

        @staticmethod
        def build(out, *, cache):
            asked.append(cache)
            raise build.BuildError("enough seen")

    monkeypatch.setattr(hook, "_builder", lambda root: Builder)
    made = hook.NativeKernels(str(PACKAGE), {}, None, None, str(tmp_path), "wheel")
    for name in ("LAYERZERO_CPU_OBJECTS", "LAYERZERO_CPU_LATER", "LAYERZERO_CPU_REQUIRE_NATIVE"):
        monkeypatch.delenv(name, raising=False)

    def both() -> None:
        for version in ("editable", "standard"):
            made.initialize(version, {})
            made.finalize(version, {}, "")

    both()
    kept = tmp_path / "objects"
    monkeypatch.setenv("LAYERZERO_CPU_OBJECTS", str(kept))
    both()
    assert asked == [["--if-needed"], None, ["--if-needed", "--cache", str(kept)], kept]
    monkeypatch.setenv("LAYERZERO_CPU_LATER", "1")
    both()
    assert asked[4:] == [kept]  # a wheel has its kernels in it or never


@PROVE
@pytest.mark.needs_tool("g++")
@pytest.mark.needs_package("build")
@pytest.mark.timeout(1200)
def test_a_wheel_works_in_a_fresh_environment_without_the_compiler(tmp_path):
    wheel = built_wheel(tmp_path)
    assert re.search(r"-cp311-abi3-manylinux_2_17_\w+\.manylinux2014_\w+\.whl$", wheel.name)
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert libraries == ["layerzero_cpu/_native.abi3.so"]
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # torch and the core come from this environment; the package itself from the wheel alone
    import torch

    import layerzero

    (site / "rest.pth").write_text(f"{Path(torch.__file__).parents[1]}\n{Path(layerzero.__file__).parents[1]}\n")
    code = """
import layerzero as lz, torch, layerzero_cpu
from layerzero_cpu.library import native
x = torch.randn(3, 64)
out = lz.rms_norm(x, torch.ones(64), backend="cpu")
assert torch.allclose(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), atol=1e-6)
print(layerzero_cpu.__file__, native.isa())
"""
    python = tmp_path / "env" / "bin" / "python"
    bare = {"PATH": "/nonexistent", "HOME": str(tmp_path)}
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, env=bare, timeout=300)
    assert found.returncode == 0, found.stderr
    assert str(site) in found.stdout
