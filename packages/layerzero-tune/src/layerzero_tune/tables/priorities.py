"""A dispatch table in the words of another stack: one value for each of its settings, and what that costs.

A table knows the best kernel of every bucket; another stack takes one value for all calls, or one for prefill and one
for decode. Where the buckets of a setting disagree, the value is the one whose time is known in most of them, and of
several such the cheapest over all. What is lost is said, case by case.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

from layerzero.errors import UnknownNameError
from layerzero.json_form import Plain, plain, reader
from layerzero.model.dispatch_table import DispatchTable, PlanEntry
from layerzero_tune.perfdb.exchange import bucket_words

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
    return {name: reader(Stack)({"name": name, **item}) for name, item in data.items()}


# Times of kernels in the bucket of an entry, by kernel id; as far as they were measured here.
Times = Callable[[PlanEntry], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Case(Plain):
    """One bucket of the table: its kernel with the measured time, and, where another value was set, that one's time."""

    op: str
    bucket: str
    kernel_id: str
    median_us: float | None
    instead_us: float | None = None


@dataclass(frozen=True, slots=True)
class Setting(Plain):
    """One line for the stack: `text` as it is written, the cases behind it, and those it does not do justice to.

    lost      cases whose kernel another value stands for
    nameless  cases whose kernel the stack has no word for
    """

    name: str
    form: str
    text: str
    value: str
    why: str
    backed: tuple[Case, ...]
    lost: tuple[Case, ...] = ()
    nameless: tuple[Case, ...] = ()


@dataclass(frozen=True, slots=True)
class Export:
    """What a table says to a stack. `ignored` are ops of the table that the stack cannot be told about."""

    stack: Stack
    hardware: str
    settings: tuple[Setting, ...]
    warnings: tuple[str, ...]
    ignored: tuple[tuple[str, int], ...]

    @property
    def command(self) -> str:
        """The settings in one line that can be copied."""
        environment, arguments, python = (
            [item.text for item in self.settings if item.form == form] for form in ("environment", "argument", "python")
        )
        command = self.stack.command
        if python:
            command = f"{command.removesuffix(')')}, {', '.join(python)})"
        return " ".join([*environment, command, *arguments])

    def to_json(self) -> dict[str, Any]:
        return {
            "for": self.stack.name,
            "version": self.stack.version,
            **{name: plain(getattr(self, name)) for name in ("hardware", "command", "settings", "warnings")},
            "ignored": dict(self.ignored),
        }


def export_priorities(table: DispatchTable, stack: str, times: Times | None = None) -> Export:
    """The settings of a stack that come nearest to a table. `times` gives what else was measured in a bucket."""
    known = stack_of(stack)
    entries = [entry for entry in table.entries if known.training or not dict(entry.when).get("needs_grad")]
    chosen: dict[str, tuple[Knob, Setting]] = {}
    warnings = []
    skipped = len(table.entries) - len(entries)
    if skipped:
        warnings.append(f"{skipped} cases need a gradient and were left out: {known.title} serves, it does not train")
    for knob in known.knobs:
        covered, aside = _covered(knob, entries, chosen)
        if aside:
            ops = ", ".join(sorted({entry.op for entry in covered if entry.op in knob.ops}))
            given_way = f"{len(aside)} cases of {', '.join(knob.otherwise)}"
            warnings.append(f"{knob.name}: {given_way} gave way to those of {ops}")
        setting = _decide(knob, covered, times or (lambda _: {}))
        if setting is not None:
            chosen[knob.name] = (knob, setting)
        elif covered:
            names = ", ".join(sorted({entry.kernel_id for entry in covered}))
            warnings.append(f"{knob.name}: {known.title} has no name for {names}; its own choice stands")
    settings = _grouped(known, chosen)
    for item in settings:
        warnings += _doubts(item, known)
    spoken = {op for knob in known.knobs for op in (*knob.ops, *knob.otherwise)}
    ignored = Counter(entry.op for entry in entries if entry.op not in spoken)
    return Export(known, str(table.hardware), tuple(settings), tuple(warnings), tuple(sorted(ignored.items())))


def _covered(
    knob: Knob, entries: Iterable[PlanEntry], chosen: dict[str, tuple[Knob, Setting]]
) -> tuple[list[PlanEntry], list[PlanEntry]]:
    """The cases that decide a knob, and those set aside."""
    if knob.under is None:
        return knob.cases(entries)
    name, value = knob.under
    if name not in chosen or chosen[name][1].value != value:
        return [], []
    found, _ = knob.cases(entries)
    return [entry for entry in found if chosen[name][0].value_of(entry.kernel_id) == value], []


def _decide(knob: Knob, entries: list[PlanEntry], times: Times) -> Setting | None:
    named = [(entry, value) for entry in entries if (value := knob.value_of(entry.kernel_id)) is not None]
    if not named:
        return None
    values = sorted({value for _, value in named})
    spent = {entry: _times_of(knob, entry, times) for entry, _ in named}
    won = {value: [entry for entry, own in named if own == value] for value in values}
    share = {value: sum(entry.median_us or 0.0 for entry in won[value]) for value in values}
    known = {value: [spent[entry][value] for entry, _ in named if value in spent[entry]] for value in values}
    missing = {value: len(named) - len(known[value]) for value in values}
    # A value whose time is not known in a bucket may not run there at all: the one known most widely comes first, and
    # only totals over all buckets can be compared.
    best = min(values, key=lambda v: (missing[v], -share[v] if missing[v] else sum(known[v]), -len(won[v]), v))
    if len(values) == 1:
        why = "every case that has a name here agrees"
    elif missing[best] == 0:
        words = [
            f"{v} {sum(known[v]):.4g} µs" if not missing[v] else f"{v} not measured in {missing[v]}" for v in values
        ]
        why = f"cheapest over its {len(named)} cases, each called once: {', '.join(words)}"
    else:
        why = f"best in {len(won[best])} of {len(named)} cases, with {share[best]:.4g} of {sum(share.values()):.4g} µs"
    backed = tuple(_case(entry) for entry, value in named if value == best)
    lost = tuple(_case(entry, spent[entry].get(best)) for entry, value in named if value != best)
    nameless = tuple(_case(entry) for entry in entries if knob.value_of(entry.kernel_id) is None)
    return Setting(knob.name, knob.form, _text(knob.form, knob.template, best), best, why, backed, lost, nameless)


def _times_of(knob: Knob, entry: PlanEntry, times: Times) -> dict[str, float]:
    """The best measured time in a bucket for each value: the table's own, and what else is known."""
    found: dict[str, float] = {}
    known = dict(times(entry))
    if entry.median_us is not None:
        known[entry.kernel_id] = entry.median_us
    for kernel_id, us in known.items():
        value = knob.value_of(kernel_id)
        if value is not None:
            found[value] = min(us, found.get(value, us))
    return found


def _grouped(stack: Stack, chosen: dict[str, tuple[Knob, Setting]]) -> list[Setting]:
    """Knobs of a group that have the same value, all of them, as the one setting that stands for the group."""
    done: list[Setting] = []
    for name, (knob, setting) in chosen.items():
        group = [item.name for item in stack.knobs if knob.group is not None and item.group == knob.group]
        same = len(group) > 1 and all(item in chosen and chosen[item][1].value == setting.value for item in group)
        if not same:
            done.append(setting)
        elif name == group[0]:
            parts = [chosen[item][1] for item in group]
            cases: dict[str, Any] = {
                kind: tuple(case for part in parts for case in getattr(part, kind))
                for kind in ("backed", "lost", "nameless")
            }
            text, why = _text(knob.form, knob.together, setting.value), "; ".join(f"{p.name}: {p.why}" for p in parts)
            done.append(replace(setting, name=str(knob.group), text=text, why=why, **cases))
    return done


def _doubts(setting: Setting, stack: Stack) -> list[str]:
    found = []
    if setting.lost:
        known = [case for case in setting.lost if case.instead_us is not None and case.median_us]
        words = f"{len(setting.lost)} of {len(setting.backed) + len(setting.lost)} cases are faster with another value"
        if known:
            worst = max(known, key=lambda case: (case.instead_us or 0.0) / (case.median_us or 1.0))
            factor = (worst.instead_us or 0.0) / (worst.median_us or 1.0)
            words += f"; at worst {factor:.2f}× slower ({worst.op}, {worst.bucket}: {worst.kernel_id})"
        else:
            words += "; by how much was not measured here"
        found.append(f"{setting.name}: one value cannot say what the table says: {words}")
    if setting.nameless:
        names = ", ".join(sorted({case.kernel_id for case in setting.nameless}))
        found.append(f"{setting.name}: {stack.title} has no name for {names} ({len(setting.nameless)} cases)")
    unmeasured = sum(case.median_us is None for case in setting.backed)
    if unmeasured:
        found.append(f"{setting.name}: {unmeasured} of {len(setting.backed)} cases behind it were never measured")
    return found


def _case(entry: PlanEntry, instead_us: float | None = None) -> Case:
    return Case(entry.op, bucket_words(entry.sizes, entry.when), entry.kernel_id, entry.median_us, instead_us)


def _text(form: str, template: tuple[str, ...], value: str) -> str:
    parts = [part.replace("{value}", value) for part in template]
    if form == "argument":
        return shlex.join(parts)
    return "=".join(parts) if form == "environment" else parts[0]
