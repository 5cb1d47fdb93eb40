"""Every kernel against the reference, on the double: the conformance kit's own cases, run on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from layerzero.numerics import assert_close
from layerzero.registry.capabilities import load_capabilities
from layerzero_flashinfer import plugin, rope, sampling
from layerzero_verify.testing.cases import cases_of, load_cases
from layerzero_verify.testing.kit import import_string, operation
from layerzero_verify.testing.run import bounds

KERNELS = {
    spec.kernel_id: spec
    for spec in load_capabilities(plugin.CAPABILITIES).kernels
    if importlib.util.find_spec(spec.function.partition(":")[0]) and ".grouped" not in spec.function
}
CALLS = Path(__file__).with_name("signatures").joinpath("calls.txt").read_text(encoding="utf-8").split()
STATISTICAL = ("sampling", "speculation")


def swapped(case, value):
    """Kernels of attention take [B, S, H, D], the kit and the reference [B, H, S, D]."""
    if case.spec.op != "attention":
        return value
    return tuple(x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.ndim == 4 else x for x in value)


def cases(spec):
    for name, groups in load_cases().items():
        if name in STATISTICAL:
            continue
        for group in groups:
            if group.op == spec.op and group.requires <= spec.features:
                yield from cases_of(group, spec)


def described(case, args):
    from layerzero.model.op import Call
    from layerzero_verify.testing import fakes

    op = operation(case.spec.op)
    layout = (
        "BHSD"
        if case.spec.op == "attention"
        else args[op.arguments.index("layout")]
        if "layout" in op.arguments
        else None
    )
    return op.describe(Call(args, fakes.gpu(90), layout, None, False))


@pytest.mark.req("R-BK-FI-02", "R-BK-FI-03", "R-BK-FI-04")
@pytest.mark.parametrize("kernel_id", sorted(KERNELS))
def test_every_declared_capability_is_asked_of_flashinfer_in_its_own_words(vendor, kernel_id):
    all_cases(KERNELS[kernel_id])


@pytest.mark.parametrize("kernel_id", [name for name in sorted(KERNELS) if "rope" in name or ".decode" in name])
def test_the_public_doors_give_the_same(vendor, monkeypatch, kernel_id):
    """A release whose inner functions have other parameters."""
    vendor.inner = False
    monkeypatch.setattr(rope, "_inner", lambda: None)
    all_cases(KERNELS[kernel_id])
    assert any(name.endswith((".run", "apply_rope_with_cos_sin_cache")) for name, _ in vendor.calls)


def all_cases(spec):
    function = import_string(spec.function)
    tried = 0
    for case in cases(spec):
        args = case.arguments(torch.device("cpu"))
        if spec.predicate is not None and import_string(spec.predicate)(described(case, args)):
            continue
        result = function(*swapped(case, args))
        result = swapped(case, result) if isinstance(result, tuple) else swapped(case, (result,))[0]
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        if spec.op == "rope":
            args = case.arguments(torch.device("cpu"))  # in place: what was given is gone
            wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        assert_close(result, operation(spec.op).fallback_impl(*wide), bounds(case))
        tried += 1
    assert tried or spec.op in ("sample", "sample_topk"), "the kit has no case for this kernel"


def test_every_call_of_the_adapters_is_recorded(recorded):
    assert set(CALLS) <= set(recorded["calls"])
    assert recorded["absent"] == {}
    source = "".join(path.read_text() for path in Path(plugin.__file__).parent.glob("*.py"))
    for name in CALLS:
        short = name.rpartition(".")[2]
        assert short in source or short in ("plan", "run") or short.startswith("gen_"), f"{name} is not called"


@pytest.mark.parametrize("kernel_id", [name for name in sorted(KERNELS) if name.split(".")[1].startswith("sampl")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [True, False])
def test_the_tokens_are_those_of_the_built_in_kernels(vendor, monkeypatch, kernel_id, dtype, inner):
    """Ties at the cut, bans, NaN and infinities included; bfloat16 logits of 2000 tokens have many equals."""
    spec = KERNELS[kernel_id]
    if not inner:
        monkeypatch.setattr(sampling, "_inner", lambda: None)
    logits = torch.randn(64, 2000, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits[1] = logits[1].round()  # hundreds of equals around the cut
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5] = torch.nan
    logits[5, :1990] = -torch.inf
    logits[6, 8] = -torch.tensor(torch.nan)  # which a radix selection takes for the smallest
    filters = {"sample_topk": (50,), "sample": (50, 0.9, 0.02), "sampling_probs": (50, 0.9, None)}[spec.op]
    for temperature in (0.7, 1.0, 0.0):
        state = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
        found, wanted = (
            fn(logits, *filters, temperature, *((generator,) if spec.op != "sampling_probs" else ()))
            for fn, generator in zip(
                (import_string(spec.function), operation(spec.op).fallback_impl), state, strict=True
            )
        )
        if spec.op == "sampling_probs":
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
        else:
            assert torch.equal(found, wanted), (found != wanted).nonzero().flatten().tolist()
