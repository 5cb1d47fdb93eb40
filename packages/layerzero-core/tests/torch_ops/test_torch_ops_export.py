"""torch.export and make_fx: LayerZero's ops stand in the program, with the right shapes, and run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import layerzero as lz


class Block(nn.Module):
    """Norm, projection, rotation, attention, gated activation: a small transformer block on LayerZero's ops."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.ones(width))
        self.project = nn.Parameter(torch.randn(3 * width, width, generator=torch.Generator().manual_seed(0)) / 4)
        theta = torch.arange(16.0)[:, None] * torch.logspace(0, -2, width // heads // 2)
        self.register_buffer("cos", theta.cos())
        self.register_buffer("sin", theta.sin())

    def forward(self, x):
        q, k, v = lz.linear(lz.rms_norm(x, self.weight), self.project).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = lz.rope(q, k, self.cos, self.sin)
        out = lz.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y, stream = lz.add_rms_norm(out, x, self.weight)
        return lz.silu_and_mul(torch.cat((y, stream), dim=-1))


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ops_in(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function" and "layerzero" in str(node.target)}


OPS = {f"layerzero.{name}.default" for name in
       ("rms_norm", "linear", "rope", "attention", "add_rms_norm", "silu_and_mul")}  # fmt: skip


@pytest.mark.req("R-PT-03")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_holds_the_ops_and_runs(strict):
    block, x = Block(), rand(2, 5, 16)
    program = torch.export.export(block, (x,), strict=strict)
    assert ops_in(program.graph) == OPS
    torch.testing.assert_close(program.module()(x), block(x))


@pytest.mark.req("R-PT-03")
def test_exported_metadata_equals_what_runs():
    block, x = Block(), rand(2, 5, 16)
    program = torch.export.export(block, (x,))
    compared = set()

    class Compare(torch.fx.Interpreter):
        def run_node(self, node):
            out = super().run_node(node)
            if "layerzero" in str(node.target):
                expected = node.meta["val"]
                pairs = zip(expected, out, strict=True) if isinstance(out, tuple) else [(expected, out)]
                for fake, real in pairs:
                    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
                compared.add(node.target)
            return out

    Compare(program.module(), garbage_collect_values=False).run(x)
    assert len(compared) == len(OPS)


@pytest.mark.req("R-PT-03")
def test_a_dynamic_dimension_is_honoured_and_its_limits_are_enforced():
    block = Block()
    seq = torch.export.Dim("seq", min=2, max=12)
    program = torch.export.export(block, (rand(2, 5, 16),), dynamic_shapes={"x": {1: seq}})
    assert ops_in(program.graph) == OPS
    for length in (2, 7, 12):
        x = rand(2, length, 16)
        torch.testing.assert_close(program.module()(x), block(x))
    with pytest.raises(Exception, match=r"(?i)guard|seq|<= 12"):
        program.module()(rand(2, 13, 16))


@pytest.mark.req("R-PT-04")
def test_an_exported_module_has_gradients():
    block, x = Block(), rand(2, 5, 16)
    program = torch.export.export(block, (x,)).module()
    block(x).square().sum().backward()
    program(x).square().sum().backward()
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(program.get_parameter(name).grad, parameter.grad)


def test_a_saved_program_loads_where_no_op_was_asked_for_yet(tmp_path):
    import subprocess
    import sys

    block, x = Block(), rand(2, 5, 16)
    path = tmp_path / "block.pt2"
    torch.export.save(torch.export.export(block, (x,)), path)
    torch.save((x, block(x)), tmp_path / "io.pt")
    code = (
        "import sys, torch, layerzero\n"
        "x, want = torch.load(sys.argv[2])\n"
        "got = torch.export.load(sys.argv[1]).module()(x)\n"
        "torch.testing.assert_close(got, want)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "io.pt")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Named(nn.Module):
    """A program that names its backend, and one op that names none."""

    def forward(self, x, weight):
        return lz.layer_norm(lz.rms_norm(x, weight, backend="vendor"))


ELSEWHERE = """
import sys, torch
import layerzero as lz
from layerzero.runtime.state import state
x, weight, want, long = torch.load(sys.argv[2])
program = torch.export.load(sys.argv[1]).module()
try:
    program(x, weight)
except lz.errors.UnknownNameError as error:
    assert error.code == "BACKEND_UNKNOWN" and "vendor" in str(error), error
    assert "layer_norm" not in {ctx.op for ctx, _ in state.ran}  # refused, not computed by another
else:
    raise SystemExit("a backend that is not here was not missed")
lz.configure(on_fault="fallback")
torch.testing.assert_close(program(x, weight), want)
lz.lock("rms_norm", "reference.rms_norm.plain")  # it selects here, by the policy that is in force here
program(x, weight)
assert "reference.rms_norm.plain" in state.ran.values(), state.ran
try:
    program(long, weight)
except Exception as error:
    assert "12" in str(error), error
else:
    raise SystemExit("a size outside of the exported range was taken")
"""


@pytest.mark.req("R-PT-03")
def test_in_a_fresh_process_without_its_backend_a_program_fails_clearly_or_falls_back_as_configured(lab, tmp_path):
    import subprocess
    import sys

    lab.use(lab.kernel("vendor.rms_norm.fast"))
    x, weight = rand(5, 16), rand(16)
    rows = torch.export.Dim("rows", min=2, max=12)
    program = torch.export.export(Named(), (x, weight), dynamic_shapes={"x": {0: rows}, "weight": None})
    want, ran = lab.run(program.module(), x, weight)
    assert ran[0] == "vendor.rms_norm.fast"
    torch.export.save(program, tmp_path / "named.pt2")
    torch.save((x, weight, want, rand(13, 16)), tmp_path / "io.pt")
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "named.pt2"), str(tmp_path / "io.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx_records_the_opaque_op(mode):
    x, weight = rand(3, 8), rand(8)
    graph = make_fx(lambda a, b: lz.rms_norm(a, b) + 1, tracing_mode=mode)(x, weight)
    assert ops_in(graph.graph) == {"layerzero.rms_norm.default"}
    torch.testing.assert_close(graph(x, weight), lz.rms_norm(x, weight) + 1)


def test_make_fx_on_real_tensors_records_what_ran(lab):  # torch's own kernels: a library's call is no torch op
    x, weight = rand(3, 8), rand(8)
    graph = make_fx(lambda a, b: lz.rms_norm(a, b) + 1)(x, weight)
    other = rand(3, 8) * 2
    torch.testing.assert_close(graph(other, weight), lz.rms_norm(other, weight) + 1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_kind_of_op_can_be_exported(dynamic):
    class Many(nn.Module):
        def forward(self, logits, x, table, cache, pages, lens):
            ids = lz.sample_topp(logits, 0.5, temperature=0.0)
            found = lz.embedding(ids, table)
            normed = lz.layer_norm(x)
            codes = lz.dequantize(lz.quantize(normed, "int8", granularity="channel"))
            batch = lz.paged_batch(pages, lens, host_lens=[3, 4])
            paged, lse = lz.paged_attention(found.unflatten(-1, (2, -1)), cache, cache, batch, return_lse=True)
            return ids, codes, paged, lse, lz.gelu_and_mul(x), lz.relu_and_mul(x)

    inputs = (
        rand(2, 11), rand(3, 8), rand(11, 8), rand(4, 4, 2, 4), torch.tensor([[0], [2]]), torch.tensor([3, 4]),
    )  # fmt: skip
    shapes = ({}, {0: torch.export.Dim("rows", min=2)}, {}, {}, {}, {}) if dynamic else None
    module = Many()
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(*inputs), module(*inputs))
