"""Share the suite out among processes so that none compiles what another compiles too (pytest-xdist).

    pytest -p layerzero_verify.testing.pytest_plugin -p layerzero_verify.testing.suite.shards -n 5 --dist loadgroup …

Every test of a kernel gets the mark `xdist_group`, and xdist runs a group in one process: the kernel is the group, or,
for one that is compiled, the values it is compiled for. Kernels of a backend for one op are taken together, because
they often differ in their options only and share what the library compiles. Without xdist the mark means nothing;
xdist 3.8 does not see it under pytest 9.2, whose tests keep their ids elsewhere.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from layerzero.model.artifact import artifact_of
from layerzero.model.kernel import KernelSpec
from layerzero_verify.testing.cases import Case, tried_by
from layerzero_verify.testing.kit import Kit
from layerzero_verify.testing.pytest_plugin import _kit
from layerzero_verify.testing.run import context
from layerzero_verify.testing.suite.kernels import _plain_case

__all__ = ["shard"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test before xdist looks at the marks. What will be skipped belongs to no group."""
    case, spec = tried_by(item)
    if spec is not None:
        item.add_marker(pytest.mark.xdist_group(shard(_kit(item.config), spec, case)))


def shard(kit: Kit, spec: KernelSpec, case: Case | None = None) -> str:
    """The group of a case of a kernel; of its plain case where the test is about the kernel as such."""
    if not spec.jit_key:
        return spec.kernel_id
    try:
        case = case or _plain_case(kit, spec)
        ctx = context(kit, case, case.arguments(torch.device("cpu")))  # only described, never run
    except (Exception, pytest.skip.Exception):  # the test itself will say what is wrong
        return spec.kernel_id
    values = artifact_of(spec, ctx, "")[1][2:]
    return f"{spec.backend}.{spec.op}-{zlib.crc32(repr(values).encode()):08x}"
