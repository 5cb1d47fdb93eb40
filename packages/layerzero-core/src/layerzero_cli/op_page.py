"""The documentation page of an op, in Markdown, made from its declaration: a plugin's op has the same page as ours."""

from __future__ import annotations

import inspect
from typing import Any

from layerzero._ops.signature import public_op
from layerzero.dispatch.run import current_world
from layerzero.model.op import Op


def page(op_id: str) -> str:
    """Signature, arguments, sizes on the command line, tolerance and kernels of an op."""
    op = public_op(op_id)
    lines = [f"# lz.ops.{op_id}", "", "```python", f"lz.ops.{op_id}{_signature(op)}", "```", ""]
    lines += [inspect.getdoc(op.function) or "", ""]
    rows = [(f"`{name}`", kind, *_default(op, name)) for name, kind in zip(op.arguments, op.input_kinds, strict=True)]
    lines += _table(("argument of a kernel", "kind", "default"), rows)
    facts = {
        "result": op.output_kind,
        "features": ", ".join(f"`{word}`" for word in op.features),
        "sizes that grow with traffic": ", ".join(f"`{name}`" for name in op.growing) or "none",
        "tolerance": op.tolerance or "that of the dtype",
        "on the command line": _command(op),
        "in torch graphs": f"`torch.ops.layerzero.{op_id}`"
        if op.fake is not None or op.lowering
        else "breaks the graph",
    }
    lines += _table(("", ""), [row for row in facts.items() if row[1]])
    kernels = sorted(current_world().registry.by_op(op_id), key=lambda kernel: (-kernel.priority, kernel.kernel_id))
    found = [
        (
            f"`{kernel.kernel_id}`",
            " ".join(sorted(item.value for item in kernel.platforms)),
            " ".join(sorted(kernel.dtypes)),
        )
        for kernel in kernels
    ]
    return "\n".join(lines + _table(("kernel", "platforms", "dtypes"), found)).rstrip() + "\n"


def _signature(op: Op) -> str:
    """The public signature, as it is written; `backend` is added where the function is the bare formula."""
    shown = [str(item.replace(annotation=item.empty)).replace(" = ", "=") for item in op.signature.parameters.values()]
    star = next((i for i, item in enumerate(op.signature.parameters.values()) if item.kind is item.KEYWORD_ONLY), None)
    if "backend" not in op.signature.parameters:
        star = len(shown) if star is None else star
        shown.append("backend=None")
    if star is not None:
        shown.insert(star, "*")
    return f"({', '.join(shown)})"


def _default(op: Op, name: str) -> tuple[str]:
    item = op.signature.parameters.get(name)
    return ("" if item is None or item.default is item.empty else f"`{item.default!r}`",)


def _command(op: Op) -> str:
    shapes = op.shapes or ({"shape": ",".join(op.sizes)} if op.sizes else {})
    asked = [f"--{name} {form.upper()}" for name, form in shapes.items() if name in ("shape", "q", "k", "v", "weight")]
    if op.example is None or not asked:
        return "from Python only"
    options = [f"[--{name.replace('_', '-')}]" for name in op.options]
    return f"`lz explain {op.op_id} {' '.join([*asked, *options])}`"


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    lines = [" | ".join(("", *row, "")).strip() for row in (head, ("---",) * len(head), *rows)]
    return [*lines, ""]
