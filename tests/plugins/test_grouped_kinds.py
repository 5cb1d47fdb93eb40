"""Grouped attention has three kinds of implementation behind one call: core's own in Python, CUDA libraries, Triton.

The GPU is described, not here: what is asked is who stands behind `lz.grouped_attention` there. The numbers of each are
those of the formula in test_grouped_attention.py, over every kernel that can run.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.model.config import Policy
from layerzero.model.context import Context
from layerzero.plugin.manager import load_plugins
from layerzero.registry.capabilities import load_capabilities
from layerzero.registry.kernels import KernelRegistry
from layerzero.runtime.current import builtin_ops
from layerzero.selection.engine import select
from layerzero.selection.world import World
from layerzero_verify.testing import fakes

OP = "grouped_attention"
KINDS = {
    "python": {"reference.grouped_attention.plain", "torch.grouped_attention.flash"},
    "cuda": {"flashattn4.grouped_attention.sm90_shared_keys", "flashinfer.grouped_attention.shared_keys"},
    "triton": {"triton.grouped_attention.work_list", "triton.grouped_attention.shared_tiles"},
}


def everybody() -> KernelRegistry:
    """The built-in kernels and those of the three packages, as their descriptors say, whatever is installed."""
    registry = load_plugins(entry_points=()).registry
    for package, name in (("flashattn", "FA4"), ("flashinfer", "CAPABILITIES"), ("triton", "CAPABILITIES")):
        plugin = importlib.import_module(f"layerzero_{package}.plugin")
        registry = registry.add(load_capabilities(getattr(plugin, name)).kernels)
    return registry


def on_hopper() -> Context:
    """Two groups over prefixes of the same keys, eight query heads over two."""
    offsets_q, offsets_k = torch.tensor([0, 5, 12]), torch.tensor([0, 20])
    batch = lz.grouped_batch(offsets_q, offsets_k, torch.tensor([[9], [20]]))
    q, k, v = (torch.zeros(*shape, 64, dtype=torch.bfloat16) for shape in ((12, 8), (20, 2), (20, 2)))
    return replace(lz.explain(OP, q, k, v, batch).context, device=fakes.gpu(90))


@pytest.mark.req("R-GRP-01")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_has_python_cuda_and_triton_behind_the_one_call(kind: str) -> None:
    world = World(registry=everybody(), ops=builtin_ops, policy=Policy(jit="block"))
    decision = select(on_hopper(), world)
    assert {item.kernel_id for item in decision.candidates if item.accepted} >= KINDS[kind]
    for kernel_id in KINDS[kind]:
        assert select(replace(on_hopper(), backend=kernel_id), world).chosen == kernel_id


@pytest.mark.req("R-GRP-01")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_the_arguments_of_the_call(kind: str) -> None:
    if kind == "triton":
        pytest.importorskip("triton")
    registry, arguments = everybody(), builtin_ops[OP].arguments
    for kernel_id in KINDS[kind]:
        module, _, name = registry.get(kernel_id).function.partition(":")
        function = getattr(importlib.import_module(module), name)
        taken = list(inspect.signature(function).bind(*arguments).arguments)
        assert taken[:4] == ["query", "key", "value", "batch"], kernel_id
