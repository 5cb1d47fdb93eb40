"""Linears of a CPU: the plain weight is kept where ours wins, both ways give the product, graphs may hold either."""

from __future__ import annotations

import pytest
import torch

from layerzero_vllm import linear
from layerzero_vllm.choice import OURS, THEIRS, rows_won


def stock(layer, remove_weight):
    """As vLLM does: keeps the weight packed for itself and takes it away from the layer."""
    packed = layer.weight.detach().t().contiguous()
    layer.calls = []

    def theirs(x, weight, bias):
        layer.calls.append(x.shape[0])
        return x @ packed if bias is None else x @ packed + bias

    layer.cpu_linear = theirs
    if remove_weight:
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def prepared(*won):
    layer = torch.nn.Linear(32, 48)
    layer.requires_grad_(False)
    expected = (layer.weight.clone(), layer.bias)
    linear.dispatching(stock, lambda weight, theirs: frozenset(won))(layer, remove_weight=True)
    return layer, expected


def test_each_number_of_rows_goes_to_the_side_that_won_it():
    layer, (weight, bias) = prepared(8, 128)
    for rows in (1, 2, 8, 9, 32, 33, 500):
        x = torch.randn(rows, 32)
        found = layer.cpu_linear(x, layer.weight, bias)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
    assert layer.calls == [1, 9, 32]


def test_a_linear_that_vllm_wins_is_left_as_vllm_left_it():
    layer, _ = prepared()
    assert layer.weight.numel() == 0
    layer.cpu_linear(torch.randn(1, 32), layer.weight, None)
    assert layer.calls == [1]


def test_one_that_we_always_win_drops_the_packed_weight():
    layer, (weight, _) = prepared(*linear.ROWS)
    x = torch.randn(300, 32)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), torch.nn.functional.linear(x, weight))
    assert linear._entries[layer.weight.data_ptr()].theirs is None


@pytest.mark.parametrize("change", [lambda w: w.to(torch.float64), lambda w: w.t(), lambda w: w.reshape(4, 8, 48)])
def test_weights_that_are_no_plain_matrix_are_not_touched(change):
    layer = torch.nn.Linear(32, 48, bias=False)
    layer.weight = torch.nn.Parameter(change(layer.weight.detach()), requires_grad=False)
    seen = []
    linear.dispatching(lambda *given: seen.append(given), lambda *given: 1 / 0)(layer, remove_weight=False)
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


def test_measuring_gives_times_and_kernels_and_nothing_where_the_results_disagree():
    weight = torch.randn(48, 32)
    times, kernels = linear.measure(weight, torch.nn.functional.linear)
    assert set(times) == set(kernels) == set(linear.ROWS)
    assert all(set(timed) == {OURS, THEIRS} for timed in times.values())
    assert linear.measure(weight, lambda x, w, b: x @ w.t() + 1) == ({}, {})


def test_ours_wins_the_rows_at_which_it_is_clearly_quicker():
    times = {rows: {OURS: 1.0, THEIRS: ratio} for rows, ratio in zip((1, 8, 32), (1.01, 2.0, 0.5), strict=True)}
    assert rows_won(times) == {8}
