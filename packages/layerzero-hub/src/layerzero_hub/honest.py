"""What a kernel's sources import from elsewhere: brought in before anything is compared.

`import torch._dynamo`, `torch.distributed.tensor` or Triton register ops of their own. Imported before the kernel, they
are part of what was there; what changes afterwards, the kernel did.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterable
from typing import Final

from layerzero_hub.contents import Contents

# Attributes of torch that import on first use.
_LAZY: Final = {
    "compile": "torch._inductor.compile_fx",
    "_dynamo": "torch._dynamo",
    "_inductor": "torch._inductor",
    "_export": "torch._export",
    "export": "torch.export",
    "onnx": "torch.onnx",
}


def import_for(builds: Iterable[Contents]) -> None:
    """Import the installed modules that the sources import when they are imported. What fails is left to the kernel."""
    import_all(sorted({name for contents in builds for name in _wanted(contents)}))


def import_all(names: Iterable[str]) -> bool:
    """Import these installed modules, as far as that goes; whether anything new came."""
    before = len(sys.modules)
    for name in names:
        if name not in sys.modules and name.partition(".")[0] not in sys.stdlib_module_names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compile(_nothing)  # its first use replaces functions of torch
    return len(sys.modules) > before


def _nothing() -> None:
    """Never called, only wrapped."""


def _wanted(contents: Contents) -> set[str]:
    own = contents.variant.id
    found: set[str] = set()
    for path, data in contents.files.items():
        if path.endswith(".py"):
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                _visit(ast.parse(data), found)
    return {name for name in found if name.partition(".")[0] != own}


def _visit(node: ast.AST, found: set[str]) -> None:
    """What runs when a module is imported: not the bodies of functions."""
    if isinstance(node, ast.Import):
        found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        found.add(node.module)
        if node.module == "torch":
            found.update(_LAZY[alias.name] for alias in node.names if alias.name in _LAZY)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        if node.attr in _LAZY:
            found.add(_LAZY[node.attr])
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        inner = [*node.decorator_list, *node.args.defaults, *(one for one in node.args.kw_defaults if one)]
    elif isinstance(node, ast.Lambda):
        inner = []
    for one in inner:
        _visit(one, found)
