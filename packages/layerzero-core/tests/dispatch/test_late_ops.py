"""Late ops: known by name from the start, imported at first use, complete when they come."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import layerzero as lz
from layerzero._ops.signature import PUBLIC
from layerzero.op_tables import LATE_OPS, LateTable
from layerzero.torch_ops.declared import traced_form
from layerzero.torch_ops.functions import functions
from layerzero.torch_ops.library import opaque_ops


def test_import_layerzero_imports_no_late_op():
    script = "import sys, json, layerzero; print(json.dumps([name for name in sys.modules if '._ops' in name]))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", script], text=True))
    assert "layerzero._ops.attention" in loaded
    assert set(LATE_OPS.values()).isdisjoint(loaded)


def test_names_are_known_before_the_module_is():
    table: LateTable[int] = LateTable({"late": "no_such_module_of_ours"})
    table["early"] = 1
    assert "late" in table and list(table) == ["early", "late"] and len(table) == 2
    with pytest.raises(ModuleNotFoundError):
        table["late"]
    with pytest.raises(KeyError):
        table["never"]


TEXT_OPS = {"tokenize", "detokenize"}  # their kernels are a package's own, and no tensor goes through them


@pytest.mark.parametrize("name", sorted(LATE_OPS))
def test_a_late_op_is_complete(name):
    op = PUBLIC[name]
    assert op.op_id == name
    assert getattr(lz, name) is functions.accelerated.get(name, op.function), "the C form, where there is one"
    assert op in lz.list_ops()
    if name not in TEXT_OPS:
        assert any(kernel.kernel_id == op.fallback_id for kernel in lz.list_kernels(name))


@pytest.mark.parametrize("name", sorted(set(LATE_OPS) - TEXT_OPS))
def test_a_late_op_has_an_opaque_op_and_a_traced_form(name):
    assert name in {op.name for op in opaque_ops()}
    assert traced_form(PUBLIC[name]).__name__ == name
