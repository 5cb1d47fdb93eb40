"""A descriptor's own generation map decides what its kernels take an SM version for."""

from __future__ import annotations

import pytest

from layerzero.model.config import Policy
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.op import OperationSpec
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.current import builtin_ops
from layerzero.selection.engine import select
from layerzero.selection.world import World
from layerzero_verify.testing import fakes


def kernel(**more):
    return {
        "kernel_id": "novel.attention.fast",
        "function": "layerzero.backends.reference.attention:attention",
        "dtypes": ["float16"],
        "platforms": ["cuda"],
        "grid": "library",
        "priority": 90,
        **more,
    }


def decide(descriptor, device, **dims):
    plugin = fakes.plugin(descriptor)
    loaded = load_plugins(entry_points=[fakes.FakeEntryPoint("novel", plugin)])
    ops: dict[str, OperationSpec] = {**loaded.ops, **builtin_ops}
    world = World(registry=loaded.registry, ops=ops, policy=Policy())
    sizes = {
        "batch": 1,
        "num_heads": 4,
        "num_kv_heads": 4,
        "seq_len_q": 16,
        "seq_len_k": 16,
        "head_dim": 64,
        "head_dim_v": 64,
    }
    ctx = Context(op="attention", device=device, dtype="float16", dims=tuple({**sizes, **dims}.items()))
    return select(ctx, world)


@pytest.mark.req("R-DEV-08")
def test_an_unknown_sm_becomes_usable_when_the_descriptor_names_it():
    base = {
        "schema_version": "1.0",
        "backend": "novel",
        "ops": {"attention": [kernel(instruction_families=["tcgen05"])]},
    }
    device = DeviceSpec.for_sm(130)
    plain = decide(base, device)
    assert [r.code for r in plain.candidate("novel.attention.fast").reasons] == ["INSTRUCTION_FAMILY_MISSING"]
    named = {**base, "generation_map": {"130+": {"generation": "BLACKWELL", "instruction_families": ["tcgen05"]}}}
    assert decide(named, device).chosen == "novel.attention.fast"


def test_a_pair_of_head_dims_lifts_the_limit_it_exceeds():
    limited = kernel(head_dim={"max": 128, "pairs": [[192, 128]]})
    base = {"schema_version": "1.0", "backend": "novel", "ops": {"attention": [limited]}}
    device = DeviceSpec.for_sm(90)
    assert decide(base, device, head_dim=192, head_dim_v=128).chosen == "novel.attention.fast"
    refused = decide(base, device, head_dim=192, head_dim_v=192).candidate("novel.attention.fast")
    assert [r.code for r in refused.reasons] == ["HEAD_DIM_TOO_LARGE"]


@pytest.mark.req("R-GEN-02")
@pytest.mark.parametrize("named", [["HOPPER"], ["AMPERE", "BLACKWELL"]])
def test_a_kernel_runs_on_the_generations_that_its_descriptor_names_and_on_no_other(named):
    base = {"schema_version": "1.0", "backend": "novel", "ops": {"attention": [kernel(generations=named)]}}
    sms = {
        75: "TURING",
        80: "AMPERE",
        86: "AMPERE",
        89: "ADA_LOVELACE",
        90: "HOPPER",
        100: "BLACKWELL",
        120: "BLACKWELL",
    }
    for sm, generation in sms.items():
        found = decide(base, DeviceSpec.for_sm(sm))
        against = [(why.code, why.value) for why in found.candidate("novel.attention.fast").reasons]
        assert against == ([] if generation in named else [("GENERATION_UNSUPPORTED", generation)]), sm
        assert (found.chosen == "novel.attention.fast") is (generation in named)
