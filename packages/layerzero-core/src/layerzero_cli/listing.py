"""`lz list`: every kernel, and whether it can be used here; and the documentation page of an op."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import click

from layerzero_cli.completion import complete_backend, complete_op
from layerzero_cli.output import STYLES, Answer, Cell, Line, Table
from layerzero_cli.root import cli
from layerzero_cli.verbs import verb
from layerzero_cli.words import known_names

if TYPE_CHECKING:
    from layerzero.model.kernel import KernelSpec
    from layerzero.model.op import Op
    from layerzero.reasons import Reason


@verb(cli, "list")
@click.option("--op", help="Only kernels of this op.", shell_complete=complete_op)
@click.option("--backend", help="Only kernels of this backend.", shell_complete=complete_backend)
@click.option("--available/--unavailable", default=None, help="Only kernels that can (or cannot) be used here.")
@click.option("--page", is_flag=True, help="The documentation page of the op, in Markdown, instead.")
def list_(op: str | None, backend: str | None, available: bool | None, page: bool) -> Answer:
    """List the kernels with platforms and dtypes, and say which can be used here.

    \b
    lz list --op attention --available
    lz list --backend flashinfer
    lz list --op rms_norm --page               the documentation of an op
    """
    import layerzero as lz

    if page:
        if op is None:
            raise click.UsageError("--page needs --op OP")
        text = op_page(op)
        return Answer({"op": op, "page": text}, [Line(line) for line in text.splitlines()])
    if backend is not None:
        known_names([backend])
    found = [(kernel, _against(kernel)) for kernel in lz.list_kernels(op, backend=backend)]
    if available is not None:
        found = [(kernel, why) for kernel, why in found if (not why) is available]
    from layerzero.public.check_backends import standing
    from layerzero.public.checks import look

    now = look()
    proofs = {kernel.kernel_id: standing(kernel, now) for kernel, _ in found}
    data = [
        {
            **kernel.to_json(), "available": not why, "reasons": [item.to_json() for item in why],
            "proof": proofs[kernel.kernel_id],
        }
        for kernel, why in found
    ]  # fmt: skip
    rows = [_row(kernel, why, proofs[kernel.kernel_id]) for kernel, why in found]
    columns = ("kernel", "here", "proof", "priority", "platforms", "dtypes")
    usable = sum(not why for _, why in found)
    summary = Line(f"{len(found)} kernels, {usable} usable here", "dim")
    return Answer(data, [Table(columns, rows, right=frozenset({3})), Line(), summary])


def _against(kernel: KernelSpec) -> list[Reason]:
    """Why a kernel cannot be used on any device of this machine, before any call is looked at."""
    from layerzero.device.probe import probe_devices
    from layerzero.dispatch.run import current_world

    world = current_world()
    backend = world.registry.backends.get(kernel.backend)
    found = [] if backend is None or backend.available else list(backend.reasons)
    if kernel.kernel_id in world.unbindable:
        found.append(world.unbindable[kernel.kernel_id])
    blocked = world.health.blocked_by(kernel.kernel_id, kernel.backend)
    if blocked is not None:
        found.append(blocked)
    problems = [kernel.check_device(device) for device in probe_devices()]
    return found + (problems[0] if all(problems) else [])


def _row(kernel: KernelSpec, why: list[Reason], proof: str | None) -> tuple[Any, ...]:
    here = Cell("yes", STYLES["ok"]) if not why else Cell(why[0].code.value, STYLES["skip"])
    platforms = sorted(item.value for item in kernel.platforms)
    shown = " ".join(platforms[:2]) + (f" +{len(platforms) - 2}" if len(platforms) > 2 else "")
    name = Cell(kernel.kernel_id, "bold" if not why else "dim")
    short = "–" if proof is None else proof.partition(" ")[0]  # kit, baseline, checked
    return name, here, Cell(short, "dim"), f"{kernel.priority:g}", shown, _dtypes(kernel.dtypes)


_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_ORDER = list(_SHORT)


def _dtypes(words: frozenset[str]) -> str:
    order = sorted(words, key=lambda word: (_ORDER.index(word) if word in _ORDER else 99, word))
    return " ".join(_SHORT.get(word, word.replace("float8_", "f8_")) for word in order)


# -- the page of an op -------------------------------------------------------------------------------------------
def op_page(op_id: str) -> str:
    """Signature, arguments, sizes on the command line, tolerance and kernels of an op, in Markdown.

    All of it is made from the op's declaration: a plugin's op has the same page as ours.
    """
    from layerzero._ops.signature import public_op
    from layerzero.dispatch.run import current_world

    op = public_op(op_id)
    lines = [f"# lz.ops.{op_id}", "", "```python", f"lz.ops.{op_id}{_signature(op)}", "```", ""]
    lines += [inspect.getdoc(op.function) or "", ""]
    told = op.signature.parameters
    defaults = {name: f"`{item.default!r}`" for name, item in told.items() if item.default is not item.empty}
    kinds = zip(op.arguments, op.input_kinds, strict=True)
    rows = [(f"`{name}`", kind, defaults.get(name, "")) for name, kind in kinds]
    lines += _markdown(("argument of a kernel", "kind", "default"), rows)
    traced = op.fake is not None or op.lowering
    facts = {
        "result": op.output_kind,
        "features": ", ".join(f"`{word}`" for word in op.features),
        "sizes that grow with traffic": ", ".join(f"`{name}`" for name in op.growing) or "none",
        "tolerance": op.tolerance or "that of the dtype",
        "on the command line": _command(op),
        "in torch graphs": f"`torch.ops.layerzero.{op_id}`" if traced else "breaks the graph",
    }
    lines += _markdown(("", ""), [row for row in facts.items() if row[1]])
    found = []
    for kernel in sorted(current_world().registry.by_op(op_id), key=lambda item: (-item.priority, item.kernel_id)):
        platforms = sorted(item.value for item in kernel.platforms)
        found.append((f"`{kernel.kernel_id}`", " ".join(platforms), " ".join(sorted(kernel.dtypes))))
    return "\n".join(lines + _markdown(("kernel", "platforms", "dtypes"), found)).rstrip() + "\n"


def _signature(op: Op) -> inspect.Signature:
    """The public signature without types; `backend` is added where the function is the bare formula."""
    shown = [item.replace(annotation=item.empty) for item in op.signature.parameters.values()]
    if "backend" not in op.signature.parameters:
        shown.append(inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None))
    return inspect.Signature(shown)


def _command(op: Op) -> str:
    shapes = op.shapes or ({"shape": ",".join(op.sizes)} if op.sizes else {})
    asked = [f"--{name} {form.upper()}" for name, form in shapes.items() if name in ("shape", "q", "k", "v", "weight")]
    if op.example is None or not asked:
        return "from Python only"
    options = [f"[--{name.replace('_', '-')}]" for name in op.options]
    return f"`lz explain {op.op_id} {' '.join([*asked, *options])}`"


def _markdown(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    lines = [" | ".join(("", *row, "")).strip() for row in (head, ("---",) * len(head), *rows)]
    return [*lines, ""]
