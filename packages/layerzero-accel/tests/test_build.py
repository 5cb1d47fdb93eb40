"""One binary, tied to no version of Python or torch; without a compiler the package is made all the same."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from layerzero_accel import build as builder

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY = Path(builder.__file__).with_name(builder.NAME)


@pytest.mark.needs_tool("gcc")
def test_it_compiles_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = builder.build(tmp_path / builder.NAME)
    assert made.stat().st_size < 200_000
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == [made]  # nothing half made is left behind


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(builder.BuildError, match="install gcc or clang"):
        builder.build(tmp_path / builder.NAME)
    assert builder.main(["--out", str(tmp_path / builder.NAME)]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs_tool("gcc")
def test_a_compiler_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tmp_path / builder.NAME
    before.write_bytes(b"as it was")
    monkeypatch.setenv("CC", "gcc -D__STDC_VERSION__=oops -include /nowhere.h")
    with pytest.raises(builder.BuildError, match="nowhere"):
        builder.build(before)
    assert before.read_bytes() == b"as it was"
    assert list(tmp_path.iterdir()) == [before]


@pytest.mark.needs_tool("gcc")
def test_only_what_changed_is_built_again(tmp_path: Path) -> None:
    out = tmp_path / builder.NAME
    assert builder.main(["--out", str(out), "--if-needed"]) == 0
    stamp = out.stat().st_mtime_ns
    assert builder.main(["--out", str(out), "--if-needed"]) == 0
    assert out.stat().st_mtime_ns == stamp
    out.write_bytes(out.read_bytes().replace(builder.source_hash().encode(), b"0" * 16))
    assert builder.main(["--out", str(out), "--if-needed"]) == 0
    assert out.stat().st_mtime_ns != stamp


@pytest.mark.needs_tool("nm")
def test_it_asks_python_for_its_stable_abi_only(native: Any) -> None:
    """Every function it needs is of the stable ABI of 3.11; what is newer is looked for by name at run time."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(LIBRARY)], capture_output=True, text=True, check=True)
    asked = set(re.findall(r"\bU (_?Py\w+)", listed.stdout))
    assert asked and "PyObject_Vectorcall" not in asked
    assert asked <= STABLE_3_11
    defined = subprocess.run(["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True)
    assert re.findall(r"\b[TDBR] (\w+)", defined.stdout) == ["PyInit__hot"]


# Of the stable ABI of Python 3.11 (docs.python.org, "Contents of Limited API") what such a library may use.
STABLE_3_11 = set(
    """
    PyArg_ParseTuple PyBytes_FromStringAndSize PyCFunction_GetFlags PyCFunction_GetFunction PyCFunction_GetSelf
    PyCFunction_NewEx PyCFunction_Type PyCapsule_GetPointer PyDict_GetItemWithError PyDict_New PyDict_SetItem
    PyDict_Size PyDict_Type PyErr_Clear PyErr_ExceptionMatches PyErr_Fetch PyErr_Format PyErr_NoMemory
    PyErr_NormalizeException PyErr_Occurred PyErr_SetString PyExc_Exception PyExc_RuntimeError PyExc_TypeError
    PyExc_ValueError PyException_SetTraceback PyFloat_AsDouble PyFloat_Type PyImport_ImportModule PyLong_AsLongLong
    PyLong_FromLongLong
    PyLong_Type PyMem_Calloc PyMem_Free PyMem_Malloc PyModule_AddIntConstant PyModule_AddObjectRef
    PyModule_AddStringConstant PyModule_Create2 PyNumber_Add PyObject_Call PyObject_CallFunctionObjArgs
    PyObject_CallMethodObjArgs PyObject_CallNoArgs PyObject_GC_UnTrack PyObject_GetAttr PyObject_GetAttrString
    PyObject_IsTrue PyObject_SetAttr PyTuple_GetItem PyTuple_New PyTuple_SetItem PyTuple_Size PyTuple_Type
    PyType_FromSpec PyType_GenericAlloc PyType_GetSlot PyUnicode_AsUTF8AndSize PyUnicode_CompareWithASCIIString
    PyUnicode_InternFromString PyUnicode_InternInPlace PyUnicode_Type Py_BuildValue Py_DecRef Py_IncRef Py_Version
    _Py_FalseStruct _Py_NoneStruct _Py_TrueStruct
    """.split()
)

OTHERS = [name for name in ("python3.12", "python3.13", "python3.14") if shutil.which(name)]


@pytest.mark.parametrize("python", OTHERS or [pytest.param("", marks=pytest.mark.skip("no other Python here"))])
def test_later_pythons_load_the_same_binary(native: Any, python: str) -> None:
    code = "import _hot; print(_hot.SEAM, _hot.counts()['exact'])"
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    folder = LIBRARY.parent
    found = subprocess.run(
        [python, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    if "not found" in found.stderr and "pyenv" in found.stderr:
        pytest.skip(f"{python} is a name without a program")
    assert found.stdout.split() == ["1", "0"], found.stderr


def wheel(out: Path, **environ: str) -> zipfile.ZipFile:
    env = {**os.environ, **environ}
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("*.whl")
    return zipfile.ZipFile(made)


GLIBC = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


@pytest.mark.fault(32)
@pytest.mark.needs_package("build", "hatchling")
@pytest.mark.needs_tool("gcc")
@pytest.mark.skipif(not GLIBC, reason="manylinux is Linux with glibc")
def test_the_wheel_holds_the_library_and_is_built_for_manylinux(tmp_path: Path) -> None:
    made = wheel(tmp_path)
    assert re.search(r"-cp311-abi3-manylinux_2_17_\w+\.manylinux2014_\w+\.whl$", str(made.filename))
    assert f"layerzero_accel/{builder.NAME}" in made.namelist()
    assert {"layerzero_accel/native/hot.c", "layerzero_accel/build.py"} <= set(made.namelist())


@pytest.mark.fault(32)
@pytest.mark.needs_package("hatchling")
@pytest.mark.skipif(not GLIBC, reason="manylinux is Linux with glibc")
@pytest.mark.parametrize("package", ["accel", "cpu"])
@pytest.mark.parametrize(
    ("asked", "tag"),
    [
        (b"GLIBC_2.2.5\0GLIBC_2.14\0", "manylinux_2_17_{0}.manylinux2014_{0}"),
        (b"GLIBC_2.17\0", "manylinux_2_17_{0}.manylinux2014_{0}"),
        (b"GLIBC_2.9\0GLIBC_2.28\0", "manylinux_2_28_{0}"),
        (b"no such words", "linux_{0}"),
    ],
)
def test_the_tag_names_the_c_library_the_binary_asks_for(package: str, asked: bytes, tag: str, tmp_path: Path) -> None:
    file = PACKAGE.parent / f"layerzero-{package}" / "hatch_build.py"
    spec = importlib.util.spec_from_file_location(f"{package}_hook", file)
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    (tmp_path / "library.so").write_bytes(b"\x7fELF\0" + asked)
    family = platform.machine()
    given = (tmp_path / "library.so", *([family] if package == "cpu" else []))
    assert hook.platform_tag(*given) == tag.format(family)


@pytest.mark.needs_package("build", "hatchling")
def test_without_a_compiler_the_wheel_is_plain_python(tmp_path: Path) -> None:
    made = wheel(tmp_path, CC=str(tmp_path / "no-such-compiler"))
    assert str(made.filename).endswith("py3-none-any.whl")
    assert not any(name.endswith(".so") for name in made.namelist())
    assert "layerzero_accel/native/hot.c" in made.namelist()  # to be compiled where there is one
