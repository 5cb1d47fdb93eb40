"""Linears of a CPU: the plain weight is kept where ours wins, both ways give the product, graphs may hold either."""

from __future__ import annotations

import time

import pytest
import torch

from layerzero_vllm import linear
from layerzero_vllm.choice import OURS, THEIRS, rows_won


def stock(layer, remove_weight):
    """As vLLM does: keeps the weight packed for itself and takes it away from the layer."""
    packed = layer.weight.detach().t().contiguous()
    calls = layer.calls = []

    def theirs(x, weight, bias):
        calls.append(x.shape[0])
        return x @ packed if bias is None else x @ packed + bias

    layer.cpu_linear = theirs
    if remove_weight:
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def prepared(*won):
    layer = torch.nn.Linear(32, 48)
    layer.requires_grad_(False)
    expected = (layer.weight.clone(), layer.bias)
    linears = linear.Linears(stock, lambda layers: frozenset(won))
    linears.dispatch(layer, remove_weight=True)
    linears.settle()
    return layer, expected


def test_each_number_of_rows_goes_to_the_side_that_won_it():
    layer, (weight, bias) = prepared(8, 128)
    for rows in (1, 2, 8, 9, 32, 33, 500, 600):
        x = torch.randn(rows, 32)
        found = layer.cpu_linear(x, layer.weight, bias)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
    assert layer.calls == [1, 9, 32, 500, 600]


def test_a_linear_that_vllm_wins_is_left_as_vllm_left_it():
    layer, _ = prepared()
    assert layer.weight.numel() == 0
    layer.cpu_linear(torch.randn(1, 32), layer.weight, None)
    assert layer.calls == [1]


def test_one_that_we_always_win_drops_the_packed_weight_and_the_next_is_not_packed():
    asked = []

    def choose(layers):
        asked.append(len(layers))
        return frozenset(linear.ROWS)

    linears = linear.Linears(stock, choose)
    for _ in range(2):
        layer = torch.nn.Linear(32, 48, bias=False).requires_grad_(False)
        weight, x = layer.weight.clone(), torch.randn(300, 32)
        linears.dispatch(layer, remove_weight=True)
        linears.settle()
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), torch.nn.functional.linear(x, weight))
        assert layer.weight.data_ptr() not in linear._entries
    assert asked == [1] and not hasattr(layer, "calls")


def test_what_was_chosen_for_a_weight_is_forgotten_with_it_since_another_may_lie_at_its_address():
    layer, _ = prepared(8, 128)
    address = layer.weight.data_ptr()
    assert address in linear._entries
    del layer
    assert address not in linear._entries


def test_layers_of_a_shape_wait_until_no_cache_holds_their_weights(monkeypatch):
    monkeypatch.setattr(linear, "ENOUGH", 2 * 32 * 48 * 4)
    asked = []
    linears = linear.Linears(stock, lambda layers: asked.append(len(layers)) or frozenset({1}))
    layers = [torch.nn.Linear(32, 48, bias=False).requires_grad_(False) for _ in range(3)]
    for layer, done in zip(layers, (0, 2, 3), strict=True):
        linears.dispatch(layer, remove_weight=True)
        assert [one.cpu_linear is linear.either for one in layers if hasattr(one, "cpu_linear")].count(True) == done
    assert asked == [2] and linears.waiting == {}


@pytest.mark.parametrize(("won", "kept", "asked"), [({1}, True, 2), ({1, 8}, False, 2), ({8, 128}, False, 0)])
def test_shapes_won_for_few_rows_alone_stay_only_where_the_whole_model_is_quicker(won, kept, asked):
    seen = []

    def keep(layers, doubtful):
        times = linear.measure_all(layers)
        assert list(times) == [1, 8] and all(set(timed) == {OURS, THEIRS} for timed in times.values())
        seen.extend(doubtful)
        return kept

    linears = linear.Linears(stock, lambda layers: frozenset(won), keep)
    layers = [torch.nn.Linear(32, 48, bias=False).requires_grad_(False) for _ in range(2)]
    weights = [layer.weight.clone() for layer in layers]
    for layer in layers:
        linears.dispatch(layer, remove_weight=True)
    linears.settle()
    assert len(seen) == asked and linears.settled == []
    for layer, weight in zip(layers, weights, strict=True):
        ours = kept or not asked
        assert (layer.cpu_linear is linear.either) == ours and layer.weight.numel() == (weight.numel() if ours else 0)
        x = torch.randn(1, 32)
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), torch.nn.functional.linear(x, weight))
    linears.settle()
    assert len(seen) == asked, "a model is asked about once"


@pytest.mark.parametrize("change", [lambda w: w.to(torch.float64), lambda w: w.t(), lambda w: w.reshape(4, 8, 48)])
def test_weights_that_are_no_plain_matrix_are_not_touched(change):
    layer = torch.nn.Linear(32, 48, bias=False)
    layer.weight = torch.nn.Parameter(change(layer.weight.detach()), requires_grad=False)
    seen = []
    linears = linear.Linears(lambda *given: seen.append(given), lambda *given: 1 / 0)
    linears.dispatch(layer, False)
    linears.settle()
    assert seen == [(layer, False)] and not hasattr(layer, "cpu_linear")


def test_a_graph_holds_the_op_and_rows_stay_dynamic():
    layer, (weight, bias) = prepared(1, 8)

    def model(x):
        return layer.cpu_linear(x, layer.weight, bias).relu()

    exported = torch.export.export(
        torch.nn.Module.__new__(_Model).ready(model),
        (torch.randn(3, 32),),
        dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}},
    )
    assert "layerzero_vllm.linear" in str(exported.graph)
    for rows in (2, 40):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(exported.module()(x), torch.nn.functional.linear(x, weight, bias).relu())


class _Model(torch.nn.Module):
    def ready(self, function):
        torch.nn.Module.__init__(self)
        self.function = function
        return self

    def forward(self, x):
        return self.function(x)


def test_measuring_gives_times_and_kernels_and_nothing_where_the_results_disagree(monkeypatch):
    monkeypatch.setattr(linear, "PIECE", 32 * 16)
    pieces = []

    def packed(weight):
        pieces.append(tuple(weight.shape))
        return torch.nn.functional.linear

    layers = [linear.Packed(None, torch.randn(48, 32), torch.nn.functional.linear) for _ in range(2)]
    times, kernels = linear.measure(layers, packed)
    assert set(times) == set(kernels) == set(linear.ROWS) and pieces == [(16, 32)]
    assert all(set(timed) == {OURS, THEIRS} for timed in times.values())
    wrong = [linear.Packed(None, torch.randn(48, 32), lambda x, w, b: x @ w.t() + 1)]
    assert linear.measure(wrong, packed) == ({}, {})


def test_more_rows_are_not_waited_for_where_vllm_has_no_kernel():
    def slow(x, weight, bias):
        time.sleep(0.05)
        return torch.nn.functional.linear(x, weight, bias)

    layers = [linear.Packed(None, torch.randn(48, 32), slow)]
    times, _ = linear.measure(layers, lambda weight: slow)
    assert set(times) == {1} and rows_won(times, linear.ROWS) == set(linear.ROWS)


def test_ours_wins_the_rows_at_which_it_is_clearly_quicker():
    times = {rows: {OURS: 1.0, THEIRS: ratio} for rows, ratio in zip((1, 8, 32), (1.01, 2.0, 0.5), strict=True)}
    assert rows_won(times, (1, 8, 32)) == {8} and rows_won(times, (1, 8, 32, 128)) == {8}
