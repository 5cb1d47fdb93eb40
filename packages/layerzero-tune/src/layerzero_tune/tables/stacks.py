"""What other stacks can be told about kernels, and in which words: `stacks.json`, with the version each was read in."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from layerzero.errors import UnknownNameError
from layerzero.model.dispatch_table import PlanEntry

_DECODE_AT_MOST = 1  # new tokens a sequence in a call that counts as decoding


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting of a stack.

    ops       the ops it speaks for, all their calls or those of one `phase` ("prefill", "decode"); where the table has
              none of these in a phase, `otherwise` names the nearest (a server reads a paged cache, no contiguous one)
    form      "argument", "environment" or "python"; `template` is how it is written
    together  how it is written, once, when every knob of its `group` has the same value
    under     (knob, value): it matters only where that knob has that value, and for its cases
    values    patterns of kernel ids with the stack's word for them, the first that fits
    """

    name: str
    ops: tuple[str, ...]
    form: str
    template: tuple[str, ...]
    values: tuple[tuple[str, str], ...]
    otherwise: tuple[str, ...] = ()
    phase: str | None = None
    group: str | None = None
    together: tuple[str, ...] = ()
    under: tuple[str, str] | None = None

    def cases(self, entries: Iterable[PlanEntry]) -> tuple[list[PlanEntry], list[PlanEntry]]:
        """The cases of a table that this setting is decided by, and those that only stand in where there are none."""
        found: list[PlanEntry] = []
        aside: list[PlanEntry] = []
        rows = [(entry, dict(entry.sizes).get("seq_len_q", 0)) for entry in entries]
        for phase in ("prefill", "decode") if self.phase is None else (self.phase,):
            here = [entry for entry, count in rows if (count <= _DECODE_AT_MOST) == (phase == "decode")]
            first = [entry for entry in here if entry.op in self.ops]
            second = [entry for entry in here if entry.op in self.otherwise]
            found += first or second
            aside += second if first else []
        return found, aside

    def value_of(self, kernel_id: str) -> str | None:
        """The stack's word for what a kernel is, None where it has none."""
        return next((value for pattern, value in self.values if fnmatchcase(kernel_id, pattern)), None)


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack and its knobs. `instead` says how to follow a table entirely, where that is possible."""

    name: str
    title: str
    version: str
    training: bool
    command: str
    knobs: tuple[Knob, ...]
    instead: str = ""


def stack_of(name: str) -> Stack:
    """A stack by name; an error with the names there are otherwise."""
    found = _stacks().get(name)
    if found is None:
        raise UnknownNameError(
            f"no settings for {name!r} are known", code="VALUE_INVALID", value=name, limit=", ".join(_stacks())
        )
    return found


@functools.cache
def _stacks() -> dict[str, Stack]:
    data = json.loads((files("layerzero_tune.tables") / "stacks.json").read_text(encoding="utf-8"))
    return {
        name: Stack(name=name, **{**item, "knobs": tuple(_knob(knob) for knob in item["knobs"])})
        for name, item in data.items()
    }


def _knob(data: dict[str, Any]) -> Knob:
    """A knob as it is written: lists are tuples, and how it is written stands under its form."""
    form = next(form for form in ("argument", "environment", "python") if form in data)
    given: dict[str, Any]
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key != form}
    given["values"] = tuple((pattern, value) for pattern, value in data["values"])
    template = (data[form],) if isinstance(data[form], str) else tuple(data[form])
    return Knob(form=form, template=template, **given)
