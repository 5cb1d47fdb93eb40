"""Grid files: which calls are tuned and measured, as text that `lz tune` and `lz bench` both read.

    schema_version = "1.0"

    [[case]]
    name = "decode B{b} Sk{s}"                      # unique after the values are filled in
    op = "attention"
    devices = ["cpu", "cuda"]                       # kinds of devices; any, where it is left out
    tags = ["decode"]                               # words to pick cases by
    each = { b = [1, 16], s = { from = 1024, to = 8192, times = 2 } }
    q = "{b},1,32,128"                              # the rest is the call, in the words of `lz explain`
    k = "{b},{s},8,128"
    layout = "BSHD"
    grows = ["b", "s"]                              # those of `each` that vary with traffic; the others with the model

`each` makes one case of every combination of its values. Braces hold arithmetic over them: "{b * s // 16},16,8,128".
A case remembers what it was made from, so that another size of the same call can be asked for (`Case.at`).
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerzero.device.probe import probe_device
from layerzero.errors import CapabilitiesError, ConfigurationError
from layerzero.model.device import DeviceSpec
from layerzero.model.formula import Formula
from layerzero.reasons import ReasonCode
from layerzero.recording.traffic import Recorded
from layerzero_cli.calls import context
from layerzero_tune.perfdb.exchange import read_text

VERSION = "1.0"
_MAX_BYTES = 1 << 20
_MAX_CASES = 10_000
_MAX_SIZE = 2**40
_KINDS = ("cpu", "cuda", "rocm", "xpu", "hpu", "mps")
_BRACES = re.compile(r"\{([^{}]*)\}")

# The words of a call, as `lz explain` takes them, and what each holds.
OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("shape", "q", "k", "v", "weight", "window"), "shape"),
    **dict.fromkeys(("dtype", "backend", "layout", "activation", "approximate", "format", "granularity"), "word"),
    **dict.fromkeys(("alibi", "sinks", "lse", "grad", "interleaved", "no_weight", "bias"), "flag"),
    **dict.fromkeys(("context", "rotary_dim", "top_k"), "whole"),
    **dict.fromkeys(("softcap", "dropout", "top_p"), "number"),
    "causal": "choice",
    "mask": "choice",
}
_CHOICES = {"causal": ("top_left", "bottom_right"), "mask": ("bool", "float")}
_OWN = ("name", "op", "devices", "tags", "each", "grows")


@dataclass(frozen=True, slots=True)
class Case:
    """One call to tune or measure. `options` are the words of `lz explain`, shapes as tuples of whole numbers.

    values     what the braces of the case stand for; empty for a case without `each`
    grows      those values that vary from call to call
    """

    name: str
    op: str
    options: Mapping[str, Any]
    devices: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    values: Mapping[str, int] = field(default_factory=dict)
    grows: tuple[str, ...] = ()
    _template: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def at(self, **values: int) -> Case:
        """The same call with other sizes in its braces; the name says which."""
        return _filled(self._template, {**self.values, **values}, self.name)


@dataclass(frozen=True, slots=True)
class Grid:
    """The cases of a file, in its order."""

    cases: tuple[Case, ...]

    def pick(self, *, device: str | None = None, tags: Iterable[str] = (), ops: Iterable[str] = ()) -> Grid:
        """Those for a kind of device, with any of these tags, of any of these ops."""
        wanted, named = set(tags), set(ops)
        found = (
            case
            for case in self.cases
            if (device is None or not case.devices or device in case.devices)
            and (not wanted or wanted & set(case.tags))
            and (not named or case.op in named)
        )
        return Grid(tuple(found))

    def __len__(self) -> int:
        return len(self.cases)


def load(path: str | os.PathLike[str]) -> Grid:
    """Read a grid file. Raises ConfigurationError with the file, the case and the word that is wrong."""
    return parse(read_text(path, _MAX_BYTES), Path(path).name)


def calls(path: str | os.PathLike[str], device: DeviceSpec | None) -> Iterator[tuple[str, Recorded]]:
    """The calls of a grid file on one device, this machine's where none is named; `lz.tune` and `lz.warmup` read it."""
    where = probe_device() if device is None else device
    word = f"{where.device_type}:{where.index}"
    for case in load(path).pick(device=where.device_type).cases:
        yield case.name, Recorded(context(case.op, {**case.options, "device": word}))


def parse(text: str, source: str = "grid") -> Grid:
    """The cases written in a text; `source` names it in errors."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _bad(source, f"not TOML: {error}", value=str(error)) from None
    version = data.pop("schema_version", None)
    if version != VERSION:
        raise _bad(source, f"schema_version {version!r}", ReasonCode.SCHEMA_VERSION_UNKNOWN, version, VERSION)
    tables = data.pop("case", [])
    if data:
        raise _bad(source, f"unknown key {next(iter(data))!r}", value=next(iter(data)), limit="schema_version, case")
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        raise _bad(source, "cases are written as [[case]] tables", value="case", limit="[[case]]")
    cases: dict[str, Case] = {}
    for number, table in enumerate(tables, start=1):
        where = f"{source}: case {number} ({table['name']})" if table.get("name") else f"{source}: case {number}"
        for case in _expanded(table, where):
            if case.name in cases:
                raise _bad(where, f"the name {case.name!r} comes twice", value=case.name, limit="unique names")
            cases[case.name] = case
            if len(cases) > _MAX_CASES:
                raise _bad(source, "too many cases", value=len(cases), limit=_MAX_CASES)
    return Grid(tuple(cases.values()))


# -- one table ------------------------------------------------------------------------------------
def _expanded(table: Mapping[str, Any], where: str) -> Iterable[Case]:
    for name in ("name", "op"):
        if not isinstance(table.get(name), str) or not table[name]:
            raise _bad(where, f'needs {name} = "..."', value=name, limit="text")
    for name in ("devices", "tags", "grows"):
        words = table.get(name, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise _bad(where, f"{name} is a list of words", value=str(words), limit="a list of words")
    for kind in table.get("devices", []):
        if kind not in _KINDS:
            raise _bad(where, f"unknown device {kind!r}", value=kind, limit=_KINDS)
    for name in table:
        if name not in _OWN and name not in OPTIONS:
            near = difflib.get_close_matches(name, [*OPTIONS, *_OWN], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _bad(where, f"unknown key {name!r}{hint}", value=name, limit=sorted((*OPTIONS, *_OWN)))
    each = table.get("each", {})
    if not isinstance(each, dict):
        raise _bad(where, "each is a table of names and values", value=str(each), limit="each = { s = [1, 2] }")
    strange = [name for name in table.get("grows", []) if name not in each]
    if strange:
        raise _bad(where, f"grows names {strange[0]!r}, which is not in each", value=strange[0], limit=sorted(each))
    axes = {name: _values(name, given, where) for name, given in each.items()}
    count = math.prod(map(len, axes.values()))
    if count > _MAX_CASES:
        raise _bad(where, f"each makes {count} cases", value=count, limit=_MAX_CASES)
    for chosen in itertools.product(*axes.values()):
        yield _filled(table, dict(zip(axes, chosen, strict=True)), where)


def _values(name: str, given: Any, where: str) -> list[int]:
    """The values of one name in `each`: a list, or a range by steps or by factors."""
    if not name.isidentifier():
        raise _bad(where, f"{name!r} is no name", value=name, limit="letters, digits and _")
    if isinstance(given, dict):
        return _range(name, given, where)
    if not isinstance(given, list) or not given or not all(_whole(item) for item in given):
        raise _bad(where, f"{name} needs whole numbers", value=str(given), limit="[1, 2] or { from, to, step | times }")
    if len(set(given)) != len(given):
        raise _bad(where, f"{name} names a value twice", value=str(given), limit="values that differ")
    return given


def _range(name: str, given: Mapping[str, Any], where: str) -> list[int]:
    known = set(given) in ({"from", "to", "step"}, {"from", "to", "times"})
    if not known or not all(_whole(item) for item in given.values()):
        form = "{ from = 1, to = 8, step = 1 } or { from = 1, to = 8, times = 2 }"
        raise _bad(where, f"{name} is no range", value=str(dict(given)), limit=form)
    low, high, grows = given["from"], given["to"], given.get("times")
    if low < 1 or high < low or (grows is not None and grows < 2) or given.get("step", 1) < 1:
        raise _bad(where, f"the range of {name} does not grow", value=str(dict(given)), limit="1 <= from <= to")
    if grows is None:
        return list(range(low, high + 1, given["step"])[: _MAX_CASES + 1])
    sizes = (low * grows**power for power in itertools.count())
    return list(itertools.takewhile(lambda size: size <= high, sizes))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


# -- one case -------------------------------------------------------------------------------------
def _filled(table: Mapping[str, Any], values: Mapping[str, int], where: str) -> Case:
    each = table.get("each", {})
    unknown = sorted(set(values) - set(each))
    if unknown:
        raise _bad(where, f"no {unknown[0]!r} in each", value=unknown[0], limit=sorted(each))
    asked = {name: given for name, given in table.items() if name not in _OWN and given is not False}
    options = {name: _option(name, given, values, where) for name, given in asked.items()}
    devices, tags, grows = (tuple(table.get(name, ())) for name in ("devices", "tags", "grows"))
    name = _text(table["name"], values, where)
    return Case(name, table["op"], options, devices, tags, dict(values), grows, table)


def _option(name: str, given: Any, values: Mapping[str, int], where: str) -> Any:
    kind = OPTIONS[name]
    if isinstance(given, str):
        given = _text(given, values, where)
    if kind == "shape":
        parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
        sizes = [int(part) if isinstance(part, str) and part.strip().isdecimal() else part for part in parts]
        if not sizes or not all(_whole(size) for size in sizes):
            raise _bad(where, f"{name} is no shape", value=str(given), limit='"1,32,4096,128" or [1, 32, 4096, 128]')
        return tuple(sizes)
    if kind == "choice":
        choice = _CHOICES[name][0] if given is True else given
        if choice not in _CHOICES[name]:
            raise _bad(where, f"{name} cannot be {given!r}", value=str(given), limit=_CHOICES[name])
        return choice
    if kind == "whole" and isinstance(given, str) and given.strip().isdecimal():
        given = int(given)
    fits = {
        "word": isinstance(given, str) and bool(given),
        "flag": given is True,
        "whole": _whole(given),
        "number": isinstance(given, (int, float)) and not isinstance(given, bool),
    }[kind]
    if not fits:
        raise _bad(where, f"{name} cannot be {given!r}", value=str(given), limit=f"a {kind}")
    return given


def _text(text: str, values: Mapping[str, int], where: str) -> str:

    def put(found: re.Match[str]) -> str:
        try:
            formula = Formula(found[1].strip())
            missing = sorted(formula.names() - set(values))
            if missing:
                raise _bad(where, f"{missing[0]!r} is not in each", value=missing[0], limit=sorted(values))
            return str(formula(lambda name: values[name]))
        except CapabilitiesError as error:
            raise _bad(where, f"{{{found[1]}}} is no arithmetic", value=found[1], limit=str(error)) from None

    return _BRACES.sub(put, text)


def _bad(
    where: str, why: str, code: ReasonCode = ReasonCode.SCHEMA_INVALID, value: object = None, limit: object = None
) -> ConfigurationError:
    return ConfigurationError(f"{where}: {why}", code=code, value=value, limit=limit)
