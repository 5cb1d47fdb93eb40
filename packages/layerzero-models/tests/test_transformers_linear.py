"""Linear layers of patched models: through `lz.linear` where the selection has a kernel of its own for few rows."""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.model.kernel import Limit
from layerzero_models.transformers.parts import Linears
from layerzero_verify.thresholds import LOGITS

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("transformers"),
]
FEW = "lab.linear.few"


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()


@pytest.fixture
def few(lab: Any) -> Any:
    """A laboratory with a kernel for up to four rows, preferred to torch's product."""
    lab.use(lab.kernel(FEW, limits=(("rows", Limit(max=4)),)))
    return lab


def products(lab: Any) -> Counter[str]:
    return Counter(kernel for kernel in lab.ran() if ".linear." in kernel)


def step(model: Any, batch: int = 1) -> torch.Tensor:
    """The logits of one token without a context."""
    with torch.no_grad():
        found: torch.Tensor = model(zoo.tokens(batch, 1), use_cache=False).logits
    return found


@pytest.mark.req("R-HFT-01")
def test_few_rows_run_on_the_kernel_made_for_them_and_a_prompt_on_torchs_product(few: Any) -> None:
    model = zoo.made("llama")
    want = step(model), zoo.logits(model, zoo.inputs(model))
    report = lz.patched(lz.patch(model))
    assert report is not None
    names = {item.name for item in report.patched if item.op == "linear"}
    assert names == {"lm_head"} | {
        f"model.layers.{i}.{part}"
        for i in range(3)
        for part in ("self_attn", "self_attn.o_proj", "mlp", "mlp.down_proj")
    }
    few.clear()
    assert (step(model) - want[0]).abs().max().item() < LOGITS / 10
    assert products(few) == {FEW: 13}  # three layers of q+k+v, o, gate+up, down; and the head
    few.clear()
    assert (zoo.logits(model, zoo.inputs(model)) - want[1]).abs().max().item() < LOGITS / 10
    assert products(few) == {"torch.linear.native": 13}


@pytest.mark.parametrize("name", ["llama", "qwen2", "bart", "t5"])
def test_greedy_tokens_are_the_same_and_unpatching_restores_the_very_same_objects(few: Any, name: str) -> None:
    model = zoo.made(name)
    before, given = zoo.traces(model), zoo.inputs(model)
    want = zoo.generated(model, given, max_new_tokens=24, min_new_tokens=24)
    lz.patch(model)
    few.clear()
    assert torch.equal(zoo.generated(model, given, max_new_tokens=24, min_new_tokens=24), want)
    assert products(few)[FEW] >= 24
    lz.unpatch(model)
    assert zoo.traces(model) == before


def test_they_can_be_left_out_and_are_left_alone_where_torchs_product_would_run(few: Any, lab: Any) -> None:
    model = zoo.made("llama")
    report = lz.patched(lz.patch(copy.deepcopy(model), skip=("linear",)))
    assert report is not None and not [item for item in report.patched if item.op == "linear"]
    lab.use()  # no kernel of its own any more
    report = lz.patched(lz.patch(model))
    assert report is not None and not [item for item in report.patched if item.op == "linear"]
    assert report.left == ()
    lab.clear()
    step(model)
    assert not products(lab)


def test_without_joined_projections_every_layer_goes_by_itself(few: Any) -> None:
    model = lz.patch(zoo.made("llama"), skip=("projections", "mlp"))
    few.clear()
    step(model)
    assert products(few) == {FEW: 3 * 7 + 1}


def test_a_policy_in_force_decides_at_every_call(few: Any) -> None:
    model = lz.patch(zoo.made("llama"))
    want = step(model)
    with lz.scoped(deny=[FEW]):
        few.clear()
        assert (step(model) - want).abs().max().item() < LOGITS / 10
        assert products(few) == {"torch.linear.native": 13}


def test_a_kernel_that_raises_fails_over(few: Any) -> None:
    model = lz.patch(zoo.made("llama"))
    want = step(model)
    few.faults[FEW] = RuntimeError("planted")
    assert (step(model) - want).abs().max().item() < LOGITS / 10


def test_gradients_go_the_models_own_way(few: Any) -> None:
    model = zoo.made("llama")
    other = lz.patch(copy.deepcopy(model))
    few.clear()
    for one in (model, other):
        one(zoo.tokens(1, 3), use_cache=False).logits.sum().backward()
    assert not products(few)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4), name


def test_weights_changed_afterwards_and_hooks_count(few: Any) -> None:
    model = lz.patch(zoo.made("llama"))
    before = step(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert torch.allclose(step(model), before * 2.0, atol=1e-5)
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert not step(model).any()
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    step(model)
    assert seen == [(1, 1, 64)]
    assert step(model.double()).dtype == torch.float64


def test_a_forward_somebody_else_put_on_a_layer_is_left_alone(few: Any) -> None:
    model = zoo.made("llama")
    model.lm_head.forward = lambda x: x[..., :1].expand(*x.shape[:-1], zoo.VOCAB)
    report = lz.patched(lz.patch(model))
    assert report is not None and "lm_head" not in {item.name for item in report.patched if item.op == "linear"}
    assert step(model).unique().numel() == 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("joined", [True, False])
def test_everything_takes_in_every_linear_layer_and_embedding(name: str, joined: bool) -> None:
    model = zoo.made(name)
    linear = [n for n, m in model.named_modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    want = zoo.logits(model, zoo.inputs(model))
    report = lz.patched(lz.patch(model, everything=True, joined=joined))
    assert report is not None
    patched = {op: {item.name for item in report.patched if item.op == op} for op in ("linear", "embedding")}
    embeddings = {n for n, m in model.named_modules() if type(m) is nn.Embedding and "relative" not in n}
    assert embeddings <= patched["embedding"]
    alone = {
        n for n in linear if not n.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "wi_0", "wi_1"))
    }
    assert (alone if joined else set(linear)) <= patched["linear"]
    assert (zoo.logits(model, zoo.inputs(model)) - want).abs().max().item() < LOGITS / 10
    assert joined or not [item for item in report.patched if "+" in item.op or item.op == "add_rms_norm"]


def test_unjoined_parts_are_seen_by_hooks_and_still_run_on_the_ops(lab: Any) -> None:
    model = zoo.made("llama")
    lz.patch(model, everything=True, joined=False)
    seen: list[str] = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(lambda module, args, out, name=name: seen.append(name))
    lab.clear()
    zoo.logits(model, zoo.inputs(model))
    assert len(seen) == sum(type(module) is nn.Linear for module in model.modules())
    assert sum(".linear." in kernel for kernel in lab.ran()) == len(seen)
    assert sum(".silu_and_mul." in kernel for kernel in lab.ran()) == model.config.num_hidden_layers


def test_a_compiled_model_is_still_one_graph(few: Any) -> None:
    model = zoo.made("llama", num_hidden_layers=1)
    want = step(model)
    lz.patch(model)
    few.clear()
    with torch.no_grad():
        got = torch.compile(model, backend="eager", fullgraph=True)(zoo.tokens(1, 1), use_cache=False).logits
    assert (got - want).abs().max().item() < LOGITS / 10 and not products(few)


def test_a_kernel_for_the_rows_of_a_small_batch_is_enough(lab: Any) -> None:
    """Torch may be the faster one for a single row, and slow for two to eight."""
    lab.use(lab.kernel(FEW, limits=(("rows", Limit(min=2, max=4)),)))
    model = zoo.made("llama")
    want = step(model), step(model, 4)
    lz.patch(model)
    for batch, logits, kernel in ((1, want[0], "torch.linear.native"), (4, want[1], FEW)):
        lab.clear()
        assert (step(model, batch) - logits).abs().max().item() < LOGITS / 10
        assert products(lab) == {kernel: 13}


def test_worth_is_asked_once_for_a_size_and_not_where_there_is_no_cpu(
    few: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerzero_models.transformers import parts

    asked = []
    own = parts.which
    monkeypatch.setattr(parts, "which", lambda *args: asked.append(args[0]) or own(*args))
    found, weight = Linears(), torch.zeros(8, 16)
    assert found.worth(weight, None) and found.worth(torch.ones(8, 16), None) and len(asked) == 2  # one row and four
    assert found.worth(weight, torch.zeros(8)) and found.worth(weight.bfloat16(), None) and len(asked) == 6
    assert not found.worth(torch.zeros(8, 16, device="meta"), None) and len(asked) == 6
    with lz.scoped(deny=["*linear*"]):
        assert not Linears().worth(weight, None)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_few_rows_of_a_gated_block_run_on_a_kernel_for_the_whole_block_unless_somebody_hangs_on_a_part(
    lab: Any, name: str
) -> None:
    block = "lab.mlp.few"
    words = frozenset(("gated", "activation_silu", "activation_gelu_tanh"))
    lab.use(lab.kernel(block, limits=(("rows", Limit(max=4)),), features=words))
    model = zoo.made(name)
    want = step(model), zoo.logits(model, zoo.inputs(model))
    lz.patch(model)
    lab.clear()
    assert (step(model) - want[0]).abs().max().item() < LOGITS / 10
    assert lab.ran().count(block) == len(model.model.layers)
    lab.clear()
    assert (zoo.logits(model, zoo.inputs(model)) - want[1]).abs().max().item() < LOGITS / 10
    assert block not in lab.ran(), "a prompt has more rows"
    seen: list[Any] = []
    handle = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *args: seen.append(args[0]))
    lab.clear()
    assert (step(model) - want[0]).abs().max().item() < LOGITS / 10
    assert lab.ran().count(block) == len(model.model.layers) - 1 and len(seen) == 1
    handle.remove()
