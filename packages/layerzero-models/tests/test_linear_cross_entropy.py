"""`lz.ops.linear_cross_entropy`: reference and baseline against torch's own loss of all logits, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero_models import linear_loss

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, of a CPU without bfloat16 instructions

VOCAB, HIDDEN = 37, 16
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 5.0},
    "z_loss": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "softcap": 4.0, "z_loss": 1e-3},
}
BACKENDS = ("reference", "torch")


def drawn(*shape, seed, grad=True, dtype=torch.float64):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(dtype).requires_grad_(grad)


def inputs(dtype=torch.float64):
    labels = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    labels[0, 1] = labels[1, 6] = -100
    tensors = (drawn(2, 7, HIDDEN, seed=0, dtype=dtype), drawn(VOCAB, HIDDEN, seed=1, dtype=dtype),
               drawn(VOCAB, seed=2, dtype=dtype))  # fmt: skip
    return *tensors, labels


def expected(x, weight, bias, labels, reduction, label_smoothing=0.0, softcap=None, z_loss=0.0):
    logits = F.linear(x, weight, bias)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    rows = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=label_smoothing
    ).view_as(labels)
    rows = rows + z_loss * logits.logsumexp(-1).square() * (labels != -100)
    return rows if reduction == "none" else rows.sum() / (1 if reduction == "sum" else (labels != -100).sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_loss_and_gradients_are_those_of_all_logits(monkeypatch, backend, reduction, options):
    monkeypatch.setattr(linear_loss, "_CHUNK", 4 * VOCAB)  # four rows at a time, the last chunk shorter
    x, weight, bias, labels = inputs()
    loss = lz.ops.linear_cross_entropy(
        x, weight, labels, bias, reduction=reduction, backend=backend, **OPTIONS[options]
    )
    wanted = expected(x, weight, bias, labels, reduction, **OPTIONS[options])
    torch.testing.assert_close(loss, wanted)
    above = torch.randn_like(loss)
    found, right = (torch.autograd.grad(item, (x, weight, bias), above) for item in (loss, wanted))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_to_count_costs_nothing(backend):
    x, weight, _, labels = inputs(torch.bfloat16)
    loss = lz.ops.linear_cross_entropy(x, weight, torch.full_like(labels, -100), backend=backend)
    loss.backward()
    assert loss.dtype is torch.float32 and loss.item() == 0.0
    assert weight.grad is not None and not weight.grad.any()


def test_all_logits_are_never_there_at_once(monkeypatch):
    monkeypatch.setattr(linear_loss, "_CHUNK", 4 * VOCAB)
    shapes = []
    real = linear_loss._logits
    monkeypatch.setattr(linear_loss, "_logits", lambda x, *rest: shapes.append(x.shape[0]) or real(x, *rest))
    x, weight, _, labels = inputs()
    lz.ops.linear_cross_entropy(x, weight, labels, backend="torch").backward()
    assert shapes == [4, 4, 4, 2] * 2


def test_compiled_it_gives_the_same_loss_and_gradients():
    x, weight, bias, labels = inputs()
    call = torch.compile(lz.ops.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found, wanted = call(x, weight, labels, bias), expected(x, weight, bias, labels, "mean")
    torch.testing.assert_close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found, (x, weight)), torch.autograd.grad(wanted, (x, weight)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_compiled_with_what_stands_around_it_the_products_are_those_of_a_models_own_head():
    """In bfloat16: float32 products of a head take many times as long on a GPU, and twice the memory."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, given):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    x, weight, bias, labels = inputs(torch.bfloat16)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    loss = torch.compile(lz.ops.linear_cross_entropy, fullgraph=True, backend=backend)(x, weight, labels, bias)
    found = torch.autograd.grad(loss, (x, weight, bias))
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    products = [node for node in nodes if "mm" in str(node.target)]
    assert [node.meta["val"].dtype for node in products] == [torch.bfloat16] * 3
    assert not [node for node in nodes if "layerzero" in str(node.target)]
    assert loss.dtype is torch.float32
    wide = [item.detach().double().requires_grad_() for item in (x, weight, bias)]
    wanted = expected(*wide, labels, "mean")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-2, atol=1e-2)
    for one, other in zip(found, torch.autograd.grad(wanted, wide), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo does, of any autograd.Function
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_compiled_graph_holds_neither_all_logits_nor_all_their_gradients(monkeypatch, reduction, dtype):
    """The gradient is computed beside the loss, in pieces of equal size, by three products each."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    monkeypatch.setattr(linear_loss, "_PIECE", 4 * VOCAB)  # fourteen rows in pieces of four
    torch._dynamo.reset()
    nodes = []

    def keep(graph, given):
        nodes.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    x, weight, _, labels = inputs(dtype)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    call = torch.compile(lz.ops.linear_cross_entropy, fullgraph=True, backend=backend)
    loss = call(x, weight, labels, reduction=reduction)
    found = torch.autograd.grad(loss * 3.0, (x, weight))
    values = [node.meta["val"] for node in nodes]
    rows = {item.shape[0] for item in values if isinstance(item, torch.Tensor) and item.shape[-1:] == (VOCAB,)}
    assert max(rows - {VOCAB, HIDDEN}) == 4
    products = [node for node in nodes if str(node.target).startswith(("aten.mm", "aten.addmm"))]
    assert [node.meta["val"].dtype for node in products] == [dtype] * 12
    wide = [item.detach().double().requires_grad_() for item in (x, weight)]
    wanted = expected(*wide, None, labels, reduction)
    near = {} if dtype is torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(loss.double(), wanted, **near)
    near = {} if dtype is torch.float64 else {"rtol": 5e-2, "atol": 5e-3 * (12 if reduction == "sum" else 1)}
    for one, other in zip(found, torch.autograd.grad(wanted * 3.0, wide), strict=True):
        torch.testing.assert_close(one.double(), other, **near)


@pytest.mark.parametrize(
    "changes",
    [{"weight": drawn(VOCAB, 8, seed=1)}, {"labels": torch.zeros(3, dtype=torch.int64)}, {"reduction": "median"},
     {"label_smoothing": 1.5}, {"z_loss": -1.0}, {"bias": drawn(3, seed=1)}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_calls_that_mean_nothing_are_refused(changes):
    x, weight, _, labels = inputs()
    with pytest.raises(InvalidInputError):
        lz.ops.linear_cross_entropy(**{"x": x, "weight": weight, "labels": labels, **changes})
