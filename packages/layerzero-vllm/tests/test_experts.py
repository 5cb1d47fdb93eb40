"""Experts of a CPU: plain weights are kept where ours wins, both ways give the sum, graphs may hold either."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch

from layerzero_vllm import experts
from layerzero_vllm.choice import OURS, THEIRS, experts_won, told

EXPERTS, HIDDEN, INNER, TOP_K = 4, 32, 16, 2


class Activation(enum.Enum):
    """vLLM's, as far as it is used here."""

    SILU = "silu"
    GELU = "gelu"
    RELU2 = "relu2"


def reference(x, gate_up, down, shares, ids, activation="silu"):
    out = torch.zeros_like(x)
    act = getattr(torch.nn.functional, activation)
    for token in range(x.shape[0]):
        for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += share * (down[expert] @ (act(gate) * up))
    return out


class Kernel:
    """Stands for vLLM's CPUUnquantizedExperts; it keeps both weights turned."""

    def __init__(self, **config):
        parallel = SimpleNamespace(**{"use_ep": False, "enable_eplb": False} | config)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        self.quant_config = SimpleNamespace(gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None)
        self.w1_bias = self.w2_bias = None
        self.calls, self.wrong = [], 0.0

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ):
        self.calls.append(hidden_states.shape[0])
        plain = w1.transpose(1, 2), w2.transpose(1, 2)
        output.copy_(reference(hidden_states, *plain, topk_weights, topk_ids, activation.value) + self.wrong)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def stock(kernel, layer):
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.detach().transpose(1, 2).contiguous(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(layer.w2_weight.detach().transpose(1, 2).contiguous(), requires_grad=False)


def layer_of(dtype=torch.float32, **changed):
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(
        torch.randn(EXPERTS, 2 * INNER, HIDDEN).div(HIDDEN**0.5).to(dtype), requires_grad=False
    )
    layer.w2_weight = torch.nn.Parameter(
        torch.randn(EXPERTS, HIDDEN, INNER).div(INNER**0.5).to(dtype), requires_grad=False
    )
    plain = {"activation": Activation.SILU, "apply_router_weight_on_input": False, "expert_map": None, "top_k": TOP_K}
    for name, value in (plain | changed).items():
        setattr(layer, name, value)
    return layer


def routed(tokens):
    best = torch.rand(tokens, EXPERTS).topk(TOP_K)
    return torch.randn(tokens, HIDDEN), best.values.softmax(-1), best.indices.int()


def served(layer, kernel, x, shares, ids):
    """As vLLM's modular kernel calls it."""
    output = torch.full_like(x, torch.nan)
    kernel.apply(
        output=output,
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=shares,
        topk_ids=ids,
        activation=layer.activation,
        global_num_experts=EXPERTS,
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=x.new_empty(0),
        workspace2=x.new_empty(0),
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return output


def prepared(*won, layer=None):
    layer, kernel = layer or layer_of(), Kernel()
    plain = layer.w13_weight.detach().clone(), layer.w2_weight.detach().clone()
    held = experts.Experts(stock, lambda layers: frozenset(won))
    held.process(kernel, layer)
    held.settle()
    return layer, kernel, plain


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU])
def test_each_number_of_tokens_goes_to_the_side_that_won_it(activation):
    layer, kernel, plain = prepared(8, 64, layer=layer_of(activation=activation))
    for tokens in (1, 2, 8, 9, 64, 65, 300):
        x, *routing = routed(tokens)
        expected = reference(x, *plain, *routing, activation.value)
        close(served(layer, kernel, x, *routing), expected)
    assert kernel.calls == [1, 65, 300]


def test_experts_that_vllm_wins_are_left_as_vllm_left_them():
    layer, kernel, plain = prepared()
    x, *routing = routed(3)
    close(served(layer, kernel, x, *routing), reference(x, *plain, *routing))
    assert kernel.calls == [3] and "apply" not in vars(kernel)
    assert layer.w13_weight.shape == plain[0].transpose(1, 2).shape


def test_experts_that_we_always_win_drop_the_packed_weights_and_the_next_are_not_packed():
    asked, packed = [], []

    def packs(kernel, layer):
        packed.append(layer)
        stock(kernel, layer)

    def choose(layers):
        asked.append(len(layers))
        return frozenset(experts.TOKENS)

    held = experts.Experts(packs, choose)
    for _ in range(2):
        layer, kernel = layer_of(), Kernel()
        plain = layer.w13_weight.detach().clone(), layer.w2_weight.detach().clone()
        held.process(kernel, layer)
        held.settle()
        x, *routing = routed(20)
        found = served(layer, kernel, x, *routing)
        close(found, reference(x, *plain, *routing))
        assert torch.equal(layer.w13_weight, plain[0]) and layer.w13_weight.data_ptr() not in experts._entries
        assert kernel.calls == []
    assert asked == [1] and len(packed) == 1


def test_layers_of_a_kind_wait_until_no_cache_holds_their_weights(monkeypatch):
    monkeypatch.setattr(experts, "ENOUGH", 2 * EXPERTS * 3 * INNER * HIDDEN * 4)
    asked = []
    held = experts.Experts(stock, lambda layers: asked.append(len(layers)) or frozenset({1}))
    kernels = [Kernel() for _ in range(3)]
    for kernel, done in zip(kernels, (0, 2, 3), strict=True):
        held.process(kernel, layer_of())
        assert [vars(one).get("apply") for one in kernels].count(experts.either) == done
    assert asked == [2] and held.waiting == {}


@pytest.mark.parametrize(
    ("layer", "kernel", "reason"),
    [
        ({"activation": Activation.RELU2}, {}, "activation relu2"),
        ({"apply_router_weight_on_input": True}, {}, "weights on the input"),
        ({"expert_map": torch.arange(EXPERTS)}, {}, "experts of several ranks"),
        ({}, {"use_ep": True}, "experts of several ranks"),
        ({}, {"enable_eplb": True}, "experts of several ranks"),
        ({"dtype": torch.float64}, {}, "dtype torch.float64"),
    ],
)
def test_what_ours_cannot_serve_is_packed_by_vllm_and_the_reason_is_told(layer, kernel, reason):
    told, layer, kernel = [], layer_of(**layer), Kernel(**kernel)
    held = experts.Experts(stock, lambda layers: 1 / 0, lambda kind, said: told.append(said))
    held.process(kernel, layer)
    held.settle()
    assert told == [reason] and "apply" not in vars(kernel) and layer.w13_weight.shape[1] == HIDDEN


@pytest.mark.parametrize("name", ["w1_bias", "w2_bias"])
def test_a_bias_and_a_clamped_gate_are_vllms(name):
    kernel = Kernel()
    setattr(kernel, name, torch.zeros(EXPERTS, HIDDEN))
    assert experts.refusal(layer_of(), kernel) == "bias"
    clamped = Kernel()
    clamped.quant_config.gemm1_clamp_limit = 7.0
    assert experts.refusal(layer_of(), clamped) == "options of the gate"
    assert experts.refusal(layer_of(), Kernel()) is None


def test_a_graph_holds_the_op_and_the_number_of_tokens_stays_dynamic():
    layer, kernel, plain = prepared(1, 8)
    seen = []

    def backend(graph, inputs):
        seen.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: served(layer, kernel, *given).relu(), backend=backend, dynamic=True)
    for tokens in (3, 20):
        x, *routing = routed(tokens)
        expected = reference(x, *plain, *routing).relu()
        close(compiled(x, *routing), expected)
    assert len(seen) == 1 and "layerzero_vllm.experts" in seen[0]


def test_what_was_chosen_for_experts_is_forgotten_with_them_since_others_may_lie_at_their_address():
    layer, kernel, _ = prepared(1, 8)
    address = layer.w13_weight.data_ptr()
    assert address in experts._entries
    del layer, kernel
    assert address not in experts._entries


def packed(layer, kernel):
    kind, plain = experts.kind_of(layer), (layer.w13_weight.detach(), layer.w2_weight.detach())
    stock(kernel, layer)
    return experts.Packed(kind, layer, kernel, *plain, experts._theirs(layer, kernel))


def test_measuring_gives_times_and_kernels_and_nothing_where_the_results_disagree(monkeypatch):
    monkeypatch.setattr(experts, "TOKENS", (1, 4))
    layers = [packed(layer_of(), Kernel()) for _ in range(2)]
    times, kernels = experts.measure(layers)
    assert set(times) == set(kernels) == {1, 4} and all(set(timed) == {OURS, THEIRS} for timed in times.values())
    assert all(one.kernel.calls for one in layers)
    wrong = Kernel()
    wrong.wrong = 1.0
    assert experts.measure([packed(layer_of(), wrong)]) == ({}, {})


def test_a_model_that_is_loaded_in_bfloat16_is_measured():
    torch.set_default_dtype(torch.bfloat16)
    try:
        ((_, x, shares, ids),) = experts._drawn([packed(layer_of(torch.bfloat16), Kernel())], 64)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x.dtype, shares.dtype, ids.dtype) == (torch.bfloat16, torch.float32, torch.int32)


def test_few_tokens_read_other_experts_at_each_call():
    layers = [packed(layer_of(), Kernel()) for _ in range(2)]
    drawn = list(experts._drawn(layers, 1))
    assert [one.layer for one, *_ in drawn] == [layer.layer for layer in layers] * 2
    assert len({tuple(ids.flatten().tolist()) for *_, ids in drawn}) > 1
    assert len(list(experts._drawn(layers, 256))) == 1


def test_weights_are_held_twice_only_with_room_and_for_a_clear_win():
    def times(*ratios):
        return {tokens: {OURS: 1.0, THEIRS: ratio} for tokens, ratio in zip(experts.TOKENS, ratios, strict=True)}

    every = frozenset(experts.TOKENS)
    assert experts_won(times(1.3, 1.3, 1.3, 1.3), experts.TOKENS, room=False) == every
    assert experts_won(times(0.9, 0.9, 1.3, 1.3), experts.TOKENS, room=True) == {64, 256}
    assert experts_won(times(0.9, 0.9, 1.3, 1.3), experts.TOKENS, room=False) == frozenset()
    assert experts_won(times(1.3, 1.0, 1.3, 1.3), experts.TOKENS, room=False) == every
    assert experts_won(times(0.9, 0.9, 0.9, 1.05), experts.TOKENS, room=True) == frozenset()
    assert experts_won(times(0.5, 0.5, 0.5, 0.5), experts.TOKENS, room=False, side=OURS) == every


def test_the_report_says_why_a_number_of_tokens_does_not_go_to_the_quicker_side():
    times = {1: {OURS: 1.0, THEIRS: 0.9}, 8: {OURS: 1.0, THEIRS: 1.05}}
    kernels = {1: "cpu.moe.experts", 8: "cpu.moe.experts"}

    def rows(won, pinned=None, raced=times):
        return told("experts", experts.TOKENS, "tokens", (raced, kernels), won, pinned)

    few, more = rows(frozenset())
    assert (few["winner"], few["kernel"], few["reason"]) == (THEIRS, "vLLM's own", "0.90x as quick as vLLM's")
    assert more["winner"] == THEIRS and more["reason"] == "1.05x as quick as vLLM's, but one side serves all numbers"
    assert (few["phase"], more["phase"]) == ("1 tokens", "8 tokens and more")
    _, more = rows(frozenset({8}))
    assert (more["winner"], more["kernel"]) == (OURS, "cpu.moe.experts") and more["reason"].endswith("vLLM's")
    few, _ = rows(frozenset(experts.TOKENS), OURS)
    assert few["winner"] == OURS and few["reason"].endswith("layerzero is pinned")
    (left,) = rows(frozenset(), raced={})
    assert (left["winner"], left["reason"]) == (THEIRS, "the two disagree on a drawn input")
    (left,) = rows(frozenset(), THEIRS, raced={})
    assert left["reason"] == "vllm is pinned"
