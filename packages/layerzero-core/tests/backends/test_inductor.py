"""The built-in backend `inductor`: its programs are the ops; compiled (prove lane) they still are, for any rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.backends.inductor import compiling
from layerzero.backends.inductor.kernels import PROGRAMS
from layerzero.errors import BackendNotAvailableError, ConfigurationError
from layerzero.jit import cache as jit_cache
from layerzero.numerics import assert_close, tolerance

PROVE = os.environ.get("LAYERZERO_PROVE") == "1"
WIDTH = 64


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def calls(rows: int, dtype: torch.dtype) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A call of every op the backend has: name, op, arguments."""
    x, r, w, b = (draw(*shape, dtype=dtype) for shape in ((rows, WIDTH), (rows, WIDTH), (WIDTH,), (WIDTH,)))
    wide = draw(rows, 2 * WIDTH, dtype=dtype)
    q, k = draw(2, 4, rows, WIDTH, dtype=dtype), draw(2, 2, rows, WIDTH, dtype=dtype)
    tables = tuple(draw(rows + 3, WIDTH // 2, dtype=dtype) for _ in "cs")
    swapped = (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous())
    return {
        "rms_norm": ("rms_norm", (x, w, 1e-5), {}),
        "other eps": ("rms_norm", (x, w, 0.5), {}),
        "add_rms_norm": ("add_rms_norm", (x, r, w, 1e-5), {}),
        "layer_norm": ("layer_norm", (x, w, b, 1e-5), {}),
        "no bias": ("layer_norm", (x, w, None, 1e-5), {}),
        "silu": ("silu_and_mul", (wide,), {}),
        "gelu": ("gelu_and_mul", (wide, "none"), {}),
        "gelu tanh": ("gelu_and_mul", (wide, "tanh"), {}),
        "relu": ("relu_and_mul", (wide,), {}),
        "rope": ("rope", (q, k, *tables), {"layout": "BHSD"}),
        "rope BSHD": ("rope", (*swapped, *tables), {"layout": "BSHD"}),
    }


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("jit")
    folder.chmod(0o700)
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(folder))
    for name in jit_cache.VENDOR_FOLDERS:
        monkeypatch.setenv(name, "")
    lz.reset()
    yield folder
    lz.reset()


def test_the_programs_are_the_ops() -> None:
    x, r, w, b = (draw(*shape, dtype=torch.float32) for shape in ((5, 8), (5, 8), (8,), (8,)))
    eps = torch.tensor(1e-5)
    wanted = lz.add_rms_norm(x, r, w, 1e-5, backend="reference")
    torch.testing.assert_close(PROGRAMS["rms_norm"](x, w, eps), lz.rms_norm(x, w, 1e-5, backend="reference"))
    torch.testing.assert_close(PROGRAMS["add_rms_norm"](x, r, w, eps), wanted)
    torch.testing.assert_close(PROGRAMS["layer_norm"](x, w, b, eps), lz.layer_norm(x, w, b, 1e-5, backend="reference"))
    for name, given in (("silu_and_mul", {}), ("gelu_and_mul", {}), ("relu_and_mul", {})):
        torch.testing.assert_close(PROGRAMS[name](x), getattr(lz, name)(x, backend="reference", **given))
    tanh = lz.gelu_and_mul(x, "tanh", backend="reference")
    torch.testing.assert_close(PROGRAMS["gelu_tanh_and_mul"](x), tanh)
    q, cos, sin = draw(2, 3, 6, 8, dtype=torch.float32), *(draw(6, 4, dtype=torch.float32) for _ in "cs")
    turned = PROGRAMS["rope"](q.reshape(6, 6, 1, 8), cos, sin).view(q.shape)
    torch.testing.assert_close(turned, lz.rope(q, None, cos, sin, backend="reference")[0])


def test_its_kernels_wait_for_a_warm_up_and_are_not_compiled_unasked(cache: Path) -> None:
    for name, (op, args, kwargs) in calls(4, torch.float32).items():
        with lz.scoped(jit="background"):
            getattr(lz, op)(*args, **kwargs)
        found = lz.explain(op, *args, **kwargs).decision
        (why,) = found.candidate(f"inductor.{op}.compiled").reasons
        assert why.code == "JIT_NOT_READY" and found.pending == (), name
    assert not list((cache / "artifacts").glob("*")) if (cache / "artifacts").exists() else True


def test_without_a_compiler_it_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(BackendNotAvailableError, match=r"C\+\+ compiler"):
        compiling.load("rms_norm", (((37, 8), "float32", (0,)), ((8,), "float32", ()), ((), "float32", ())), "cpu")


@pytest.mark.slow
def test_what_the_compiler_says_is_passed_on(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="nonsense"):  # no such program: the child fails, nothing is left behind
        compiling.load("nonsense", (((37, 8), "float32", (0,)),), "cpu")
    assert not list((cache / "artifacts").iterdir())


_WITHOUT = """
import sys


class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._inductor":
            raise ModuleNotFoundError("No module named 'torch._inductor'")


sys.meta_path.insert(0, Without())
"""


@pytest.mark.slow
def test_a_compiler_that_lacks_a_part_is_missing_and_the_program_is_not_blamed(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WITHOUT)
    monkeypatch.syspath_prepend(tmp_path)
    inputs = (((37, 8), "float32", (0,)), ((8,), "float32", ()), ((), "float32", ()))
    with pytest.raises(BackendNotAvailableError, match=r"torch\._inductor") as caught:
        compiling.load("rms_norm", inputs, "cpu")
    assert caught.value.reasons[0].code == "JIT_TOOLCHAIN_MISSING" and not list((cache / "artifacts").iterdir())


@pytest.mark.slow
@pytest.mark.req("R-WARM-06")
def test_a_compiled_program_is_loaded_without_asking_a_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own way of loading finds out the vector instructions of an x86 first, by compiling for each of them."""
    assert jit_cache.prepare() == cache  # the compiler keeps its own files there, too
    from torch._inductor import codecache

    inputs = (((37, 8), "float32", (0,)), ((8,), "float32", ()), ((), "float32", ()))
    compiling.load("rms_norm", inputs, "cpu")
    asked: list[str] = []
    monkeypatch.setattr(codecache, "get_device_information", lambda kind: asked.append(kind) or {})
    monkeypatch.setattr(compiling, "_compile", lambda *given: pytest.fail("it is on disk"))
    run = compiling.load("rms_norm", inputs, "cpu")
    x, w = draw(5, 8, dtype=torch.float32), draw(8, dtype=torch.float32)
    torch.testing.assert_close(run([x, w, torch.tensor(1e-5)])[0], lz.rms_norm(x, w, 1e-5, backend="reference"))
    assert asked == []


def test_code_is_not_loaded_from_a_folder_others_can_write_to(cache: Path) -> None:
    cache.chmod(0o777)
    with pytest.raises(ConfigurationError, match="0777"):
        compiling.load("rms_norm", (), "cpu")


@pytest.mark.slow
@pytest.mark.skipif(not PROVE, reason="eleven programs in two dtypes take ten minutes: make prove NAME=warmup")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_programs_agree_with_the_reference_for_any_rows(cache: Path, dtype: torch.dtype) -> None:
    with lz.scoped(jit="block"):
        for rows in (4, 1, 130):
            for name, (op, args, kwargs) in calls(rows, dtype).items():
                found = getattr(lz, op)(*args, backend="inductor", **kwargs)
                wide = tuple(item.double() if isinstance(item, Tensor) else item for item in args)
                wanted = getattr(lz, op)(*wide, backend="reference", **kwargs)
                print(name, dtype, rows)
                assert_close(found, wanted, tolerance(op, dtype, k=WIDTH))
