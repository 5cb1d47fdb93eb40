"""Everything the scope names is a backend here, or said by one: found, or not available with a reason and a fix."""

from __future__ import annotations

import pytest

import layerzero as lz
from layerzero.plugin.manager import load_plugins

SCOPE = {
    "FlashAttention": ("flashattn2", "flashattn3", "flashattn4"),
    "FlashInfer": ("flashinfer",),
    "xFormers": ("xformers",),
    "Triton and Liger": ("triton", "liger"),
    "the Kernel Hub": ("hub",),
    "PyTorch": ("sdpa", "torch", "reference"),
    "CPU libraries": ("cpu",),
}


@pytest.mark.req("R-BK-OT-01")
@pytest.mark.parametrize(("library", "backends"), SCOPE.items(), ids=str)
def test_every_library_of_the_scope_is_found_or_says_why_not(library: str, backends: tuple[str, ...]) -> None:
    records = {name: record for record in load_plugins(env={}).records for name in (*record.backends, record.name)}
    for backend in backends:
        record = records[backend]
        assert record.state in ("ok", "unavailable"), record
        if record.state == "unavailable":
            assert record.reasons and record.fix, record


@pytest.mark.req("R-BK-OT-01")
def test_the_cpu_backend_speaks_of_onednn_and_zendnn() -> None:
    from layerzero_cpu.plugin import libraries

    words = " ".join(libraries())
    assert "oneDNN" in words
    assert lz.list_kernels("attention")
