"""`lz.topk_gate`, `lz.moe` and `lz.mlp` in the place of transformers' own modules: Mixtral, Qwen3, DeepSeek, Llama.

The modules are randomly initialised here; forward and the gradient of the hidden states are compared.
"""

from __future__ import annotations

import importlib

import pytest
import torch

import layerzero as lz
from layerzero.numerics import assert_close, tolerance

pytestmark = pytest.mark.integration
HIDDEN, INNER = 32, 24


@pytest.fixture(scope="module", autouse=True)
def transformers():
    return pytest.importorskip("transformers")


def module(family, name, **config):
    home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kind = importlib.import_module("transformers").CONFIG_MAPPING[family]
    made = getattr(home, name)(kind(hidden_size=HIDDEN, intermediate_size=INNER, **config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for item in [*made.parameters(), *made.buffers()]:
            item.copy_(torch.randn(item.shape, generator=generator) * 0.2)
    return made.eval()


def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 6, HIDDEN, generator=generator).requires_grad_()


def compare(ours, block):
    """Same hidden states, same output, same gradient of them and of the experts."""
    x = tokens()
    y = x.detach().clone().requires_grad_()
    leaves = [p for n, p in block.named_parameters() if "experts." in n or "proj" in n]
    got, want = ours(block, x.view(-1, HIDDEN)).view(x.shape), block(y)
    assert_close(got, want, tolerance("moe", torch.float32, k=HIDDEN))
    slope = torch.linspace(-1, 1, got.numel()).view(got.shape)
    mine, theirs = (torch.autograd.grad(o, [leaf, *leaves], slope) for o, leaf in ((got, x), (want, y)))
    assert_close(list(mine), list(theirs), tolerance("gradient", torch.float32))


def routed(block, x, **options):
    logits = torch.nn.functional.linear(x.float(), block.gate.weight.float())
    weights, ids = lz.topk_gate(logits, block.gate.top_k, **options)
    return lz.moe(x, block.experts.gate_up_proj, block.experts.down_proj, weights, ids)


def shared(block, x):
    part = block.shared_experts
    return lz.mlp(x, part.up_proj.weight, part.down_proj.weight, part.gate_proj.weight)


@pytest.mark.req("R-MOE-01", "R-MOE-02")
def test_mixtral():
    block = module("mixtral", "MixtralSparseMoeBlock", num_local_experts=8, num_experts_per_tok=2)
    compare(routed, block)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.req("R-MOE-01", "R-MOE-02")
def test_qwen3(renormalize):
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": INNER}
    block = module("qwen3_moe", "Qwen3MoeSparseMoeBlock", norm_topk_prob=renormalize, **sizes)
    compare(lambda b, x: routed(b, x, renormalize=renormalize), block)


@pytest.mark.req("R-MOE-01", "R-MOE-02", "R-MOE-03")
def test_deepseek_v3():
    sizes = {"n_routed_experts": 32, "num_experts_per_tok": 6, "moe_intermediate_size": INNER, "n_group": 8}
    block = module("deepseek_v3", "DeepseekV3MoE", topk_group=3, n_shared_experts=1, routed_scaling_factor=2.5, **sizes)
    bias = block.gate.e_score_correction_bias

    def ours(b, x):
        return shared(b, x) + routed(
            b, x, scoring="sigmoid", bias=bias, num_groups=8, top_groups=3, scale=2.5, renormalize=b.gate.norm_topk_prob
        )

    assert bias.min() < 0 < bias.max() and block.gate.norm_topk_prob
    compare(ours, block)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
@pytest.mark.req("R-MOE-01", "R-MOE-02")
def test_deepseek_v2(method):
    sizes = {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": INNER}
    block = module(
        "deepseek_v2", "DeepseekV2Moe", n_group=4, topk_group=2, topk_method=method, n_shared_experts=2,
        routed_scaling_factor=1.5, **sizes,
    )  # fmt: skip
    groups = {} if method == "greedy" else {"num_groups": 4, "top_groups": 2}
    compare(lambda b, x: shared(b, x) + routed(b, x, renormalize=False, scale=1.5, **groups), block)


@pytest.mark.parametrize(
    ("family", "name", "activation"),
    [("llama", "LlamaMLP", "silu"), ("gemma", "GemmaMLP", "gelu_tanh"), ("mistral", "MistralMLP", "silu")],
)
@pytest.mark.req("R-MLP-01")
def test_gated_blocks(family, name, activation):
    block = module(family, name, hidden_activation="gelu_pytorch_tanh") if family == "gemma" else module(family, name)
    compare(
        lambda b, x: lz.mlp(x, b.up_proj.weight, b.down_proj.weight, b.gate_proj.weight, activation), block
    )  # the same from a packed weight
    compare(
        lambda b, x: lz.mlp(
            x, torch.cat((b.gate_proj.weight, b.up_proj.weight)), b.down_proj.weight, activation=activation
        ),
        block,
    )
