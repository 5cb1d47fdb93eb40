"""Registration of a user's own Triton kernel: the spec that is made of it, and what is refused before it can run."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")

from layerzero.errors import LayerZeroError
from layerzero.model.context import Context
from layerzero.model.enums import Platform
from layerzero_verify.testing import fakes


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A module with one kernel: Triton reads a kernel's source from its file."""
    text = """
        import triton
        import triton.language as tl

        @triton.jit
        def double(x, out, count, BLOCK: tl.constexpr):
            place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + place, 2 * tl.load(x + place, mask=place < count), mask=place < count)
    """
    (tmp_path / "one_kernel.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("one_kernel", None)
    import one_kernel

    yield one_kernel.double
    sys.modules.pop("one_kernel", None)


@pytest.fixture
def register(source):
    from layerzero_triton.custom import Arguments, kernel, unregister

    def make(**changes):
        given = {
            "op": "silu_and_mul", "name": "test", "kernel": source, "grid": ("rows", "ceil(hidden / BLOCK)"),
            "constants": {"BLOCK": 128}, "dtypes": ("float16",), **changes,
        }  # fmt: skip
        return kernel(**given)(lambda x: Arguments((x, x, 1), x, rows=1, hidden=1))

    yield make
    unregister("triton.silu_and_mul.test")


@pytest.mark.req("R-BK-TR-01")
def test_the_spec_is_made_from_what_was_said(register):
    from layerzero_triton.custom import registered

    made = register(features=("backward",), deterministic=True)
    assert made in registered()
    assert (made.spec.kernel_id, made.spec.op, made.spec.backend) == (
        "triton.silu_and_mul.test", "silu_and_mul", "triton",
    )  # fmt: skip
    assert made.spec.platforms == {Platform.CUDA, Platform.ROCM}
    assert (made.spec.jit, made.spec.jit_key, made.spec.deterministic) == (True, ("dtype",), True)
    assert [formula.text for formula in made.spec.grid_layout] == ["rows", "ceil(hidden / 128)", "1"]


@pytest.mark.req("R-BK-TR-03")
def test_the_grid_is_held_against_the_device(register):
    spec = register().spec

    def reasons(rows, hidden, device):
        dims = (("rows", rows), ("hidden", hidden))
        found = spec.check(Context(op="silu_and_mul", device=device, dtype="float16", dims=dims, dtypes=("float16",)))
        return [item.code.value for item in found]

    assert reasons(1000, 4096, fakes.gpu(90)) == []
    assert reasons(1000, 65536 * 128 + 1, fakes.gpu(90)) == ["CUDA_BLOCK_LIMIT_EXCEEDED"]
    assert reasons(2**31, 4096, fakes.gpu(90)) == ["CUDA_BLOCK_LIMIT_EXCEEDED"]
    assert reasons(1000, 4096, fakes.cpu()) == ["PLATFORM_MISMATCH"]


@pytest.mark.req("R-BK-TR-03")
def test_a_grid_is_looked_at_once_more_when_it_is_launched(source):
    """Sizes that its function returns and that no device takes: nothing is started; without work nothing is either."""
    from layerzero_triton.custom import Arguments, kernel, unregister

    sizes = {}
    made = kernel(
        op="silu_and_mul", name="test", kernel=source, grid=("rows", "ceil(hidden / BLOCK)", "2 * rows"),
        constants={"BLOCK": 128}, dtypes=("float16",),
    )(lambda x: Arguments((x, x, 1), "nothing was done", **sizes))  # fmt: skip
    try:
        for given in ((2**31, 1), (1, 65536 * 128), (32768, 1), (-1, 1)):
            sizes.update(zip(("rows", "hidden"), given, strict=True))
            with pytest.raises(LayerZeroError) as caught:
                made(1.0)
            assert caught.value.code == "LAUNCH_CONFIG_INVALID" and "65535" in str(caught.value), given
        sizes.update(rows=0, hidden=1)
        assert made(1.0) == "nothing was done"
    finally:
        unregister("triton.silu_and_mul.test")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"constants": {"BLOCK": 100}}, "LAUNCH_CONFIG_INVALID", "power of two"),
        ({"warps": 3}, "LAUNCH_CONFIG_INVALID", "1, 2, 4, 8, 16, 32"),
        ({"stages": 0}, "LAUNCH_CONFIG_INVALID", "1 to 16"),
        ({"constants": {}}, "LAUNCH_CONFIG_INVALID", "BLOCK"),
        ({"constants": {"BLOCK": 16, "MORE": 1}}, "LAUNCH_CONFIG_INVALID", "tl.constexpr"),
        ({"grid": ()}, "LAUNCH_CONFIG_INVALID", "1 to 3"),
        ({"grid": ("rows", "1", "1", "1")}, "LAUNCH_CONFIG_INVALID", "1 to 3"),
        ({"grid": ("__import__('os')",)}, "SCHEMA_INVALID", "not allowed"),
        ({"name": "No Name"}, "KERNEL_ID_INVALID", "lowercase"),
        ({"kernel": print}, "TYPE_INVALID", "@triton.jit"),
        ({"dtypes": ()}, "SCHEMA_FIELD_MISSING", "dtypes"),
    ],
)
@pytest.mark.req("R-BK-TR-03")
def test_what_does_not_fit_together_is_refused(register, changes, code, words):
    with pytest.raises(LayerZeroError) as caught:
        register(**changes)
    assert caught.value.code == code
    assert words in str(caught.value)


@pytest.mark.req("R-BK-TR-02")
def test_compiled_kernels_live_in_a_folder_of_their_owner(tmp_path, monkeypatch, source):
    """A first compilation misses and writes, a second process finds it; all below our folder, 0700."""
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    script = """
        import torch, triton
        from layerzero_triton import cache
        from layerzero_triton.kernels.launch import collecting
        from layerzero_triton.kernels.offline import compile_for, target
        from layerzero_triton.norm import norm

        heard = []
        triton.knobs.compilation.listener = lambda **kw: heard.append(kw["cache_hit"])
        with collecting() as launches:
            norm(torch.empty(4, 256, device="meta"), None, None, 1e-6, False)
        with cache.scoped():
            compile_for(launches[0], target("sm_90"))
        print(heard)
    """
    runs = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240, check=False
        )
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["[False]", "[True]"], runs[0].stderr[-2000:]
    folder = tmp_path / "jit" / "triton"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(folder.rglob("*.cubin"))


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path):
    from layerzero_triton.cache import private_folder

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert private_folder(shared) is None
    shared.chmod(0o755)
    assert private_folder(shared) == shared
    assert shared.stat().st_mode & 0o777 == 0o700
    assert private_folder(tmp_path / "file" / "below") is not None
    (tmp_path / "plain").write_text("")
    assert private_folder(tmp_path / "plain" / "below") is None


def test_cpu_tensors_without_the_interpreter_are_one_clear_error():
    import torch

    from layerzero_triton.kernels.launch import interpreting
    from layerzero_triton.norm import rms_norm

    if interpreting():
        pytest.skip("Triton interprets in this process")
    with pytest.raises(LayerZeroError) as caught:
        rms_norm(torch.ones(2, 4), None, 1e-6)
    assert caught.value.code == "PLATFORM_MISMATCH"
    assert "TRITON_INTERPRET=1" in str(caught.value)
