"""On a GPU: every kernel that is here, of our own, of fla-core and of FlashInfer, against the reference; models."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from linear_attention_calls import BY_NAME, NAMES, NEEDS, example

import layerzero as lz
from layerzero_linear_attention.architectures import MODELS

pytestmark = pytest.mark.gpu
OTHERS = ("flashattn", "flashinfer", "hub", "inductor", "liger", "triton", "xformers")


@pytest.fixture(autouse=True)
def _compiled_first():
    """A kernel's first call waits until it is compiled: otherwise others would be tested in its place.

    Kernels of other ops stay out: they would be compiled, too, and are tested elsewhere. So does FlashInfer's gated
    delta rule where it is not built yet: 32 variants take minutes on every core.
    """
    with lz.scoped(jit="block", deny=OTHERS if built() else (*OTHERS, "flashinfer_linear.gated_delta_rule.sm90")):
        yield


def built():
    """Whether FlashInfer's gated delta rule is compiled."""
    try:
        from flashinfer.jit.gdn import gen_gdn_prefill_sm90_module
    except Exception:
        return False
    return gen_gdn_prefill_sm90_module().is_compiled


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_that_is_here_is_right(name, needs, dtype):
    for sizes in ({"batch": 3, "seq_len": 200}, {"batch": 3, "seq_len": 1}):
        wide = dict.fromkeys(("key_dim", "value_dim", "head_dim", "state_size"), 128) | {"heads": 16, "key_heads": 16}
        wide = {key: size for key, size in wide.items() if key in BY_NAME[name].sizes}
        args = example(name, *needs, dtype=dtype, device="cuda", **sizes, **wide)
        truth = [
            item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item for item in args
        ]
        wanted = BY_NAME[name].function(*truth)
        ids = [item.kernel_id for item in lz.explain(name, *args).decision.candidates if item.accepted]
        bound = 2e-2 if dtype == "bfloat16" else 1e-3
        for kernel, recorded in itertools.product(ids, (False, True)):  # fla-core's has two ways
            with torch.set_grad_enabled(recorded):
                results = getattr(lz.ops, name)(*args, backend=kernel)
            for found, expected in zip(results, wanted, strict=True):
                torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound, msg=kernel)


@pytest.mark.parametrize("tokens", [1, 200])
def test_the_scan_is_right_where_large_terms_cancel(tokens):
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    x, dt, B, C = drawn(8, tokens, 16, 128), drawn(8, tokens, 16), drawn(8, tokens, 1, 128), drawn(8, tokens, 1, 128)
    A, D, bias = -drawn(16).abs().float() - 0.1, drawn(16).float(), drawn(16).float()
    args = (x, dt, A, B, C, D, bias, drawn(8, 16, 128, 128).float(), None, True, 0.0, None)
    truth = [item.double() if isinstance(item, torch.Tensor) else item for item in args]
    wanted = BY_NAME["mamba2_scan"].function(*truth)
    kernel = "linear_attention.mamba2_scan.triton" + ("_step" if tokens == 1 else "")
    for found, expected in zip(lz.ops.mamba2_scan(*args, backend=kernel), wanted, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def moved(item):
    """The same numbers at an address that is no multiple of 16."""
    if not isinstance(item, torch.Tensor) or not item.is_floating_point():
        return item
    room = item.new_empty(item.numel() + 1)[1:]
    return room.copy_(item.flatten()).view(item.shape)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_launched_straight_once_it_is_compiled_and_is_right_at_any_address(name, monkeypatch):
    from triton.runtime.jit import JITFunction

    from layerzero_linear_attention import gpu

    args = example(name, *NEEDS["everything"], dtype="bfloat16", device="cuda", batch=3, seq_len=5)
    step = getattr(gpu, "delta_step" if "delta" in name else f"{name}_step")
    wanted, through, run = step(*args), [], JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *given, **words: through.append(self) or run(self, *given, **words)
    )
    again = step(*args)
    assert not through
    elsewhere = step(*map(moved, args))
    assert not through  # copied to addresses that the compiler counted on
    for one, other, third in zip(wanted, again, elsewhere, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention", "mamba2_scan"])
def test_more_heads_than_a_grid_has_rows(name):
    small = {
        "heads": 16,
        "key_heads": 16,
        "key_dim": 16,
        "value_dim": 16,
        "head_dim": 16,
        "state_size": 16,
        "groups": 1,
    }
    sizes = {key: size for key, size in small.items() if key in BY_NAME[name].sizes}
    args = example(name, "initial_state", dtype="float32", device="cuda", batch=4100, seq_len=1, **sizes)
    kernel = f"linear_attention.{name}.triton_step"
    found, wanted = getattr(lz.ops, name)(*args, backend=kernel), BY_NAME[name].function(*args)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_log_probabilities_of_a_model_in_bfloat16_are_as_near_the_truth_as_the_models_own(name):
    from layerzero_verify import models

    model = models.made(name, length=48)
    module = copy.deepcopy(model.module)
    for part in module.modules():
        if hasattr(part, "top_k"):
            part.top_k = 4  # every expert: rounding would send single tokens to others
    truth = module(**model.padded).logits.log_softmax(-1)  # by itself: transformers would call fla-core, on any device
    padded = {key: item.cuda() for key, item in model.padded.items()}
    kept = model.padded["attention_mask"].bool()

    def off(module):
        """The mean and the largest distance from the truth, of what is no padding."""
        found = module(**padded).logits.float().log_softmax(-1).cpu()
        distance = (found - truth)[kept].abs()
        return distance.mean().item(), distance.max().item()

    module = module.to("cuda", torch.bfloat16)
    own = off(module)
    lz.patch(module)
    mean, far = off(module)
    ops = {op for item in lz.patched(module).patched for op in item.op.split(" + ")}
    assert set(MODELS[name][3]) <= ops
    assert mean <= 1.5 * own[0] + 1e-3 and far <= 2 * own[1] + 1e-2, (mean, far, own)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_model_goes_on_from_its_cache_token_by_token(name):
    from layerzero_verify import models

    model = models.made(name, length=48)
    module = lz.patch(copy.deepcopy(model.module).to("cuda", torch.bfloat16))
    ids = model.inputs["input_ids"].cuda()
    whole = module(ids, use_cache=False).logits.float().log_softmax(-1)
    word, cache, parts = "cache_params" if name == "mamba2" else "past_key_values", None, []
    for begin, end in ((0, 40), *((t, t + 1) for t in range(40, 48))):
        found = module(ids[:, begin:end], use_cache=True, **{word: cache})
        cache = found[word]
        parts.append(found.logits.float().log_softmax(-1))
    distance = (torch.cat(parts, 1) - whole).abs()
    mean, far = distance.mean().item(), distance.quantile(0.99).item()
    assert mean < 3e-2 and far < 0.3, (mean, far)
