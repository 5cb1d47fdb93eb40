"""What the tests of the CPU kernels share: each instruction set of this machine, used once and put back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layerzero_cpu.library import native


@pytest.fixture(params=native.isas_here())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set this machine has, in turn."""
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)
