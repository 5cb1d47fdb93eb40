from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from layerzero.errors import InvalidInputError
from layerzero.plugin.manager import load_plugins
from layerzero.registry.capabilities import load_capabilities
from layerzero.version import __version__
from layerzero_verify.scaffold import write_plugin


def test_the_package_is_complete(tmp_path: Path) -> None:
    target = write_plugin("my-thing", tmp_path)
    assert target == tmp_path / "layerzero-my-thing"
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert files == [
        "README.md",
        "pyproject.toml",
        "src/layerzero_my_thing/__init__.py",
        "src/layerzero_my_thing/capabilities.json",
        "src/layerzero_my_thing/kernels.py",
        "src/layerzero_my_thing/plugin.py",
        "src/layerzero_my_thing/py.typed",
        "tests/test_my_thing.py",
    ]
    project = tomllib.loads((target / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == "layerzero-my-thing"
    assert project["project"]["entry-points"]["layerzero.backends"] == {"my_thing": "layerzero_my_thing.plugin"}
    release = ".".join(__version__.split(".")[:2])
    assert project["project"]["dependencies"] == [f"layerzero-core>={release}"], "it pulls in nothing else"
    assert not any("@NAME@" in (target / file).read_text(encoding="utf-8") for file in files)
    assert load_capabilities(target / "src/layerzero_my_thing/capabilities.json").backend == "my_thing"
    assert target.stat().st_mode & 0o700 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["layerzero-my-thing"], "no draft is left behind"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Mine",
        "1st",
        "a b",
        "../evil",
        "a/b",
        "class",
        "sdpa",
        "reference",
        "core",
        "cpu",
        "triton",
        "verify",
        "linear-attention",
        "x" * 41,
        "ä",
        "a_",
        "a\n",
        "-x",
    ],
)
def test_a_bad_name_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError):
        write_plugin(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cpu", "hub", "linear_attention"])
def test_a_name_of_our_own_packages_is_refused_because_pip_would_replace_them(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"layerzero-{name.replace('_', '-')}.*PLUGIN_DUPLICATE"):
        write_plugin(name, tmp_path)


@pytest.mark.parametrize("op", ["torch", "max", "self_test", "tl"])
def test_an_op_named_like_what_its_files_use_is_refused(tmp_path: Path, op: str) -> None:
    with pytest.raises(InvalidInputError, match=f"use the name {op!r}"):
        write_plugin("fresh", tmp_path, op=op)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("op", ["exp", "free", "double"])
def test_an_op_named_like_a_function_or_word_of_c_has_a_kernel_that_compiles(tmp_path: Path, op: str) -> None:
    source = write_plugin("fresh", tmp_path, op=op, lang="c") / "src/layerzero_fresh/native/kernels.c"
    text = source.read_text(encoding="utf-8")
    assert f'{{"{op}", run, METH_VARARGS' in text and f" *{op}(" not in text
    compiler = shutil.which("cc")
    if compiler is not None:
        include = f"-I{sysconfig.get_path('include')}"
        done = subprocess.run(
            [compiler, "-fsyntax-only", include, str(source)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or "Python.h" in done.stderr, done.stderr


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "layerzero-mine").mkdir()
    (tmp_path / "layerzero-mine" / "work.txt").write_text("a year of it", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="exists already"):
        write_plugin("mine", tmp_path)
    assert (tmp_path / "layerzero-mine" / "work.txt").read_text(encoding="utf-8") == "a year of it"


def test_the_new_plugin_registers_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero_verify.testing.fakes import FakeDist, FakeEntryPoint
    from layerzero_verify.testing.kit import import_string

    target = write_plugin("fresh", tmp_path)
    monkeypatch.syspath_prepend(target / "src")
    loaded = load_plugins(
        [FakeEntryPoint("fresh", import_string("layerzero_fresh.plugin"), FakeDist("layerzero-fresh"))], {}
    )
    found = loaded.record("fresh")
    assert found is not None and found.state == "ok"
    assert found.kernels == ("fresh.rms_norm.plain", "fresh.attention.plain")
    assert "layerzero_fresh.kernels" not in sys.modules, "adapters are imported at bind"


@pytest.mark.timeout(520)
def test_the_new_plugin_passes_the_kit(tmp_path: Path) -> None:
    target = write_plugin("fresh", tmp_path)
    paths = [str(target / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    report = tmp_path / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging",
        "--lz-plugin", "layerzero_fresh.plugin",
        f"--junitxml={report}",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=target, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= 80, done.stdout[-500:]


@pytest.mark.parametrize("op", [None, "rms_norm", "squared_relu"])
@pytest.mark.parametrize("lang", ["python", "triton", "c"])
def test_every_language_and_a_new_op_give_a_package_that_can_be_read(tmp_path: Path, lang: str, op: str | None) -> None:
    target = write_plugin("fresh", tmp_path, op=op, lang=lang)
    texts = {path: path.read_text(encoding="utf-8") for path in target.rglob("*") if path.is_file()}
    assert not [str(path) for path, text in texts.items() if re.search("@[A-Z]+@", text)]
    for path in target.rglob("*.py"):
        compile(texts[path], str(path), "exec")
    tomllib.loads(texts[target / "pyproject.toml"])
    found = load_capabilities(target / "src/layerzero_fresh/capabilities.json")
    assert {kernel.op for kernel in found.kernels} == (
        {"rms_norm", "attention"} if (op, lang) == (None, "python") else {op or "rms_norm"}
    )
    assert (target / "src/layerzero_fresh/op.py").exists() == (op == "squared_relu")
    assert (target / "hatch_build.py").exists() == (lang == "c")


def test_an_op_without_an_example_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no example in c of the known op 'attention'"):
        write_plugin("fresh", tmp_path, op="attention", lang="c")
    with pytest.raises(InvalidInputError, match="cannot be the name of an op"):
        write_plugin("fresh", tmp_path, op="Not an op")
    assert list(tmp_path.iterdir()) == []


_INTERPRETED = """
import torch
from layerzero_fresh import kernels

x, weight = torch.randn(5, 96), torch.randn(96)
if hasattr(kernels, "rms_norm"):
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(kernels.rms_norm(x, None, 1e-6), wanted)
    torch.testing.assert_close(kernels.rms_norm(x.T.contiguous().T, weight, 1e-6), wanted * weight)
else:
    torch.testing.assert_close(kernels.squared_relu(x, 2.0), 2.0 * torch.relu(x) ** 2)
print("right")
"""


@pytest.mark.needs_package("triton")
@pytest.mark.parametrize("op", ["rms_norm", "squared_relu"])
def test_the_triton_kernels_are_right_in_tritons_interpreter(tmp_path: Path, op: str) -> None:
    target = write_plugin("fresh", tmp_path, op=op, lang="triton")
    env = {**os.environ, "PYTHONPATH": str(target / "src"), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "right\n", done.stderr[-2000:]


def test_the_kernels_do_not_outrank_the_built_in_ones(tmp_path: Path) -> None:
    descriptor = json.loads((write_plugin("fresh", tmp_path) / "src/layerzero_fresh/capabilities.json").read_text())
    assert all(kernel["priority"] <= 5 for kernels in descriptor["ops"].values() for kernel in kernels)
