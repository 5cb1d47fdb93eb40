"""A path as one Python function: its steps as lines, tensors as local names, kernels called where they stand.

Calling a step through a table of names takes a µs or two of the interpreter's time, and a layer of short kernels has
some twenty steps. Written out as its author would, a planned layer takes no longer than the same layer in public
functions. A step that raises goes to `recover` from its own line, which costs nothing while nothing raises; a tensor
that no later step reads is let go, so that the next one finds its memory warm. The text can be read:
`print(plan.code)`.
"""

from __future__ import annotations

import keyword
import linecache
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from layerzero.dispatch.bind import Bound
from layerzero.dispatch.run import current_world, recover
from layerzero.model.op import OperationSpec
from layerzero_tune.blocks.block import ACTIVATIONS, Block, Ref, Step, unread

Line = tuple[Step, OperationSpec | None, Bound | None]
"""A step with the kernel that runs it; glue has none."""

_PLAIN = (type(None), bool, int, str)


class Code:
    """The text of a function over a block's inputs, and what its names stand for; `bind` puts in the weights."""

    def __init__(self, text: str, made: Callable[..., Any], weights: Sequence[str]) -> None:
        self.text = text
        self._made = made
        self._weights = tuple(weights)

    def bind(self, tensors: Mapping[str, Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = self._made(*(tensors.get(name) for name in self._weights))
        return found


def written(block: Block, lines: Sequence[Line]) -> Code:
    """The function that runs these steps for a block; weights that were packed are weights like the others."""
    names = _Names()
    inputs = [names.of_tensor(name) for name in block.inputs]
    made = {name for step, _, _ in lines for name in step.outputs}
    weights = list(dict.fromkeys(n for step, _, _ in lines for n in step.reads() if n not in made | {*block.inputs}))
    cells = [names.of_tensor(name) for name in weights]
    body: list[str] = []
    steps = [step for step, _, _ in lines]
    for number, line in enumerate(lines):
        body += _step(line, names)
        done = unread(block, steps, number)
        if done:
            body.append(f"del {', '.join(names.of_tensor(name) for name in done)}")
    out = ", ".join(names.of_tensor(name) for name in block.outputs)
    name = names.fresh(block.name)
    text = "\n".join(
        [f"def bind({', '.join(cells)}):", f"    def {name}({', '.join(inputs)}):"]
        + [f"        {line}" for line in body]
        + [f"        return {out}", f"    return {name}", ""]
    )
    space = dict(names.values)
    file = f"<layerzero block {block.name} {id(space):#x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(text, file, "exec"), space)  # the text is made here, of names made here
    weakref.finalize(space["bind"], linecache.cache.pop, file, None)
    return Code(text, space["bind"], weights)


def _step(line: Line, names: _Names) -> Iterator[str]:
    step, spec, bound = line
    outputs = ", ".join(names.of_tensor(name) for name in step.outputs)
    if bound is None or spec is None:
        yield f"{outputs} = {_glue(step, names)}"
        return
    args = [names.of_argument(item) for item in step.args]
    count = step.heads_first
    if count:
        ending = ".contiguous()" if step.layout == "BHSD copied" else ""
        views = [names.fresh(f"{step.op}_{number}") for number in range(count)]
        for view, given in zip(views, args[:count], strict=True):
            yield f"{view} = None if {given} is None else {given}.transpose(1, 2){ending}"
        args[:count] = views
    call, kernel = ", ".join(args), names.of_value(bound.kernel_id, bound.run)
    instead = names.of_value(f"instead_of_{bound.kernel_id}", _instead(step, spec, bound))
    yield "try:"
    yield f"    {outputs} = {kernel}({call})"
    yield "except Exception as error:"
    yield f"    {outputs} = {instead}(error, {call})"
    if count:
        yield f"del {', '.join(views)}"
        for name in (names.of_tensor(item) for item in step.outputs):
            yield f"{name} = None if {name} is None else {name}.transpose(1, 2)"


def _instead(step: Step, spec: OperationSpec, bound: Bound) -> Callable[..., Any]:
    layout = step.op_layout

    def instead(error: Exception, *args: Any) -> Any:
        return recover(spec, current_world(), bound, args, layout, None, error)

    return instead


def _glue(step: Step, names: _Names) -> str:
    """Glue as a layer's author would write it, by the shortest way into torch."""
    args = [names.of_argument(item) for item in step.args]
    if step.op == "add":
        return f"{args[0]} + {args[1]}"
    if step.op == "heads":
        return f"{names.of_value('unflatten', torch.unflatten)}({args[0]}, -1, ({args[1]}, -1))"
    if step.op == "merge":
        return f"{args[0]}.flatten(-2)"
    if step.op == "gate":
        act = step.args[2]
        return f"{names.of_value(act, ACTIVATIONS[act])}({args[0]}) * {args[1]}"
    assert step.op == "split", step.op  # packs are made when weights are bound
    only = "" if len(step.outputs) > 1 else "[0]"
    return f"{names.of_value('split_with_sizes', torch.split_with_sizes)}({args[0]}, {args[1]}, -1){only}"


class _Names:
    """Identifiers for tensors, kernels and constants: close to their own names, each used once."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._tensors: dict[str, str] = {}
        self._known: dict[int, str] = {}
        self._taken = {"bind", "error", "Exception"}

    def fresh(self, wanted: str) -> str:
        stem = re.sub(r"\W", "_", wanted, flags=re.ASCII)
        if not stem or stem[0].isdigit() or keyword.iskeyword(stem) or keyword.issoftkeyword(stem):
            stem = f"_{stem}"
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name

    def of_tensor(self, name: str) -> str:
        if name not in self._tensors:
            self._tensors[name] = self.fresh(name)
        return self._tensors[name]

    def of_value(self, wanted: str, value: Any) -> str:
        if id(value) not in self._known:
            name = self._known[id(value)] = self.fresh(wanted)
            self.values[name] = value  # which also keeps it, and so its id
        return self._known[id(value)]

    def of_argument(self, item: Any) -> str:
        """A tensor's name, a constant as it is written, a name for any other object."""
        if isinstance(item, Ref):
            return self.of_tensor(item.name)
        if type(item) is tuple:
            return f"({''.join(f'{self.of_argument(part)}, ' for part in item)})"
        if type(item) in _PLAIN or (type(item) is float and math.isfinite(item)):
            return repr(item)
        return self.of_value("constant", item)
