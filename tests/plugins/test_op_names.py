"""Ops of a plugin whose names, and whose arguments' names, stand in the functions that LayerZero writes for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Words of `_ops.signature`, `dispatch.hot` and `torch_ops.declared`, Python's own, and one of no meaning.
WORDS = (
    "bound", "world", "active", "error", "now", "miss", "recover", "dispatch", "functools", "part", "type", "args",
    "own", "found", "place", "chosen", "dense", "split", "fastest", "differentiable", "torch", "list", "plan", "ops",
    "anything",
)  # fmt: skip

PLUGIN = '''
import torch
from torch import Tensor
from layerzero.plugin import Op, hookimpl, simple_context

WORDS = {words!r}


def described(name):
    def describe(call):
        x = call.args[0]
        return simple_context(call, name, x, {{}}, {{"rows": x.shape[0], "hidden": x.shape[-1]}}, ())

    return describe


SOURCE = """
def named_{{0}}(x: Tensor, {{0}}: float = 2.0) -> Tensor:
    return x * {{0}}

def {{1}}(x: Tensor, scale: float = 2.0) -> Tensor:
    return x * scale
"""
space = {{"Tensor": Tensor, "__name__": __name__}}
for word in WORDS:
    exec(SOURCE.format(word, word if word != "torch" else "torch_"), space)
NAMES = [name for word in WORDS for name in ("named_" + word, word if word != "torch" else "torch_")]


def strange(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return x


def listed(x: Tensor, sizes: list[int] = [1]) -> Tensor:
    return x * sum(sizes)


@hookimpl
def layerzero_register(registrar):
    registrar.op(Op(function=strange, describe=described("rms_norm")))
    registrar.op(Op(function=listed, describe=described("listed"), fake=lambda x, sizes: torch.empty_like(x)))
    for name in NAMES:
        function = space[name]
        globals()["formula_of_" + name] = function
        registrar.op(Op(function=function, describe=described(name), fake=lambda x, *rest: torch.empty_like(x),
                        fallback_impl=function, reference=__name__ + ":formula_of_" + name, growing=("rows",)))
'''

DRIVER = """
import torch
import layerzero as lz
from layerzero.runtime.state import state
from torch._dynamo import reset

state.load()
record = state.plugin_manager and next(item for item in state.records if item.name == "words")
assert record.state == "ok", record.reasons
x, wanted, wrong = torch.randn(4, 64), [], []
norm = lz.rms_norm(x, torch.ones(64))
TRACED = ("named_args", "named_own", "named_place", "named_chosen", "named_dense", "place", "dense", "split", "chosen")
for name in record.ops[2:]:
    call, argument = getattr(lz.ops, name), state.world.ops[name].arguments[1]
    found = {
        "cold": lambda: call(x, 3.0), "hot": lambda: call(x, 3.0), "by name": lambda: call(x, **{argument: 3.0}),
        "default": lambda: call(x) * 1.5, "planned": lambda: lz.plan(name, x, 3.0)(x, 3.0),
        "gradient": lambda: call(x.clone().requires_grad_(), 3.0).detach(),
    }
    if name in TRACED:
        found["traced"] = lambda: torch.compile(lambda y: call(y, 3.0), fullgraph=True, backend="eager")(x)
        reset()
    for how, run in found.items():
        try:
            right = torch.equal(run(), x * 3.0)
        except Exception as error:
            right = f"{type(error).__name__}: {error}"[:200]
        if right is not True:
            wrong.append((name, how, right))
assert not wrong, wrong
reset()
again = torch.compile(lambda y: lz.rms_norm(y, torch.ones(64)), fullgraph=True, backend="eager")(x)
assert torch.allclose(again, norm, atol=1e-6)
try:  # its arguments are those of another op, whose kernels it must not be given
    raise SystemExit(f"taken: {lz.ops.strange(x, torch.ones(64), 1e-6)}")
except lz.errors.ConfigurationError as error:
    assert "'strange': `describe` gives a context of 'rms_norm'" in str(error), error
assert torch.equal(lz.ops.listed(x, [1, 2]), x * 3)  # no schema of torch holds a list[int]: outside of graphs
print("RIGHT", len(record.ops) - 2)
"""


@pytest.mark.timeout(300)
def test_no_name_of_an_op_or_argument_gets_in_the_way_of_the_functions_written_for_it(tmp_path: Path) -> None:
    (tmp_path / "words_plugin.py").write_text(PLUGIN.format(words=WORDS), encoding="utf-8")
    info = tmp_path / "words-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nwords = words_plugin\n", encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LAYERZERO_", "COV_", "PYTEST_"))}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), env.get("PYTHONPATH", ""))))}
    env |= {"LAYERZERO_QUARANTINE": str(tmp_path / "quarantine.json")}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "op 'listed' cannot be traced" in done.stderr and "got sizes: list[int]" in done.stderr
    assert done.stdout.strip() == f"RIGHT {2 * len(WORDS)}"  # more than have a C form (48)
