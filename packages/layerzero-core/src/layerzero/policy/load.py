"""Policy files and mappings → PolicyLayer: what may stand in a file, where one is looked for and how it is watched.

YAML and TOML are imported inside the functions: a process without a policy file never loads them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from layerzero.env import Env
from layerzero.errors import ConfigurationError, PolicyValidationError, nearest
from layerzero.kinds import KERNEL, PATTERN, TEXT, Kind, Place, Problem, items, maybe, pairs, spell, table, words
from layerzero.model.config import Rule
from layerzero.policy.layers import Level, PolicyLayer
from layerzero.policy.parse import MAX_BYTES, MAX_NODES, Parsed, parse_toml, parse_yaml, refusal, texts_in, too_large
from layerzero.policy.rules import parse_conditions
from layerzero.reasons import ReasonCode
from layerzero.settings import GROUPS, POLICY, SETTINGS

_NAMES: Final = ("layerzero.yaml", "layerzero.toml", "pyproject.toml")

# What a file that merely lies in the working directory may say about trust: key → entries it may set, with the only
# value that narrows, or ... for any. Every other entry of these keys is refused there.
_NARROWING: Final[Mapping[str, Mapping[str, object]]] = {
    "plugins": {"deny": ...},
    "hub": {"deny": ..., "revoked": ..., "enabled": False, "offline": True, "require_trusted_publisher": True},
    "perfdb": {"enabled": ..., "shipped": ..., "auto_tune": ..., "tune_samples": ...},
}
_NARROW_KEYS: Final = {"dispatch_table": None, "on_first_use": "check"}


class Found(NamedTuple):
    """A policy file that discovery found. `trusted` is False for one in the working directory."""

    path: Path
    trusted: bool


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a policy file. Refuses what is missing, no regular file, or too large, before reading it all."""
    name = os.fspath(path)
    descriptor = None
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer that never comes.
        descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigurationError(f"{name} is not a regular file", value=name, limit="a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigurationError(code=ReasonCode.CONFIG_FILE_MISSING, value=name) from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {name}: {error}", value=name, limit="a readable file") from None
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if len(raw) > MAX_BYTES:
        raise too_large(raw, name)
    return raw


def load_file(path: str | os.PathLike[str], *, trusted: bool = True) -> PolicyLayer:
    """The layer a file speaks. The name decides the format: .yaml, .yml, .toml; pyproject.toml gives [tool.layerzero].

    Raises PolicyValidationError with line and key.
    """
    return from_bytes(read_bytes(path), os.fspath(path), trusted=trusted)


def from_bytes(raw: bytes, name: str, *, trusted: bool = True) -> PolicyLayer:
    """`load_file` for content that is already read."""
    return _layer(_parsed(raw, name), Level.FILE, trusted)


def mistakes(
    path: str | os.PathLike[str], *, known_fields: Collection[str] | None = None, trusted: bool = True
) -> list[ConfigurationError]:
    """Everything that is wrong with a file, in its order; what cannot be read or parsed at all is one mistake.

    `known_fields`, when given, are the context fields a rule may name.
    """
    try:
        parsed = _parsed(read_bytes(path), os.fspath(path))
    except ConfigurationError as error:
        return [error]
    return list(_mistakes(parsed, trusted, known_fields))


def _parsed(raw: bytes, name: str) -> Parsed:
    base, suffix = os.path.basename(name), os.path.splitext(name)[1].lower()
    if suffix in (".yaml", ".yml"):
        return parse_yaml(raw, name)
    if suffix == ".toml":
        return parse_toml(raw, name, ("tool", "layerzero") if base == "pyproject.toml" else ())
    raise ConfigurationError(f"{name}: unknown kind of policy file", value=suffix, limit=".yaml, .yml or .toml")


def from_mapping(data: object, *, source: str = "configure") -> PolicyLayer:
    """The layer a dict in the form of the file speaks."""
    if not isinstance(data, Mapping):
        kind = type(data).__name__
        raise PolicyValidationError(f"{source}: expected a mapping, got {kind}", key="", value=kind, limit="a mapping")
    return _layer(Parsed(source, dict(data), {}), Level.PROGRAMMATIC, True)


def _layer(parsed: Parsed, level: Level, trusted: bool) -> PolicyLayer:
    for mistake in _mistakes(parsed, trusted, None):  # the one that stands first in the file
        raise mistake
    said = FILE.spelled_out(parsed.data)
    rules = [_rule(parsed, index, entry) for index, entry in enumerate(said.pop("rules", ()))]
    said.pop("version", None)
    return PolicyLayer.of(level, source=parsed.name, rules=rules, **said)


def _mistakes(parsed: Parsed, trusted: bool, known_fields: Collection[str] | None) -> Iterator[PolicyValidationError]:
    """What is wrong, in the order of the file; what widens trust and unknown context fields, once the rest is right."""
    for place, text in islice(texts_in(parsed.data), 2 * MAX_NODES):
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            shown = ascii(text)[:60]
            yield _problem(
                parsed, place, f"{spell(place)}: {shown} holds half a character", value=shown, limit="whole characters"
            )
            return
    problems = sorted(FILE.problems(parsed.data, written=True), key=lambda item: parsed.line_of(item.place) or 0)
    yield from (_refusal(parsed, problem) for problem in problems)
    if problems:
        return
    if not trusted:
        yield from _widening(parsed)
    if known_fields is None:
        return
    for index, entry in enumerate(FILE.spelled_out(parsed.data).get("rules", ())):
        for name in entry.get("match", {}).get("when", ()):
            if name not in known_fields:
                yield _unknown(parsed, ("rules", index, "match", "when", name), known_fields, "context field")


def _rule(parsed: Parsed, index: int, entry: Mapping[str, Any]) -> Rule:
    line = parsed.line_of(("rules", index))
    match = entry.get("match", {})
    return Rule(
        match_op=match.get("op", "*"),
        when=tuple(c for name, wanted in match.get("when", {}).items() for c in parse_conditions(name, wanted)),
        allow=None if entry.get("allow") is None else tuple(entry["allow"]),
        **{name: tuple(entry.get(name, ())) for name in ("deny", "prefer", "avoid")},
        boosts=tuple(entry.get("boosts", {}).items()),
        lock=entry.get("lock") or ("" if "lock" in entry else None),
        source=f"{parsed.name}:{line}" if line else f"{parsed.name} rules[{index}]",
    )


# -- refusals -------------------------------------------------------------------------------------------------------
def _refusal(parsed: Parsed, problem: Problem) -> PolicyValidationError:
    if problem.known:
        return _unknown(parsed, problem.place, problem.known, "key")
    text = f"{spell(problem.place)}: {problem.text}"
    near = nearest(str(problem.value), problem.allowed, 1)
    hint = {"hint": f"did you mean {near[0]}?"} if near else {}
    return _problem(parsed, problem.place, text, value=text, **hint)


def _unknown(parsed: Parsed, place: Place, known: Collection[str], what: str) -> PolicyValidationError:
    near = nearest(str(place[-1]), known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return _problem(
        parsed,
        place,
        f"unknown {what} {spell(place)}",
        code=ReasonCode.POLICY_UNKNOWN_KEY,
        value=spell(place),
        limit=near[0] if near else None,
        hint=hint,
    )


def _problem(parsed: Parsed, place: Place, text: str, **kwargs: Any) -> PolicyValidationError:
    line = parsed.line_of(place) if parsed.lines else None
    return refusal(parsed.name, line, spell(place), text, **kwargs)


def _widening(parsed: Parsed) -> Iterator[PolicyValidationError]:
    """Law: nothing found in the working directory widens trust."""
    for key, narrowing in _NARROWING.items():
        for entry, value in (parsed.data.get(key) or {}).items():
            only = narrowing.get(entry)
            if entry not in narrowing or (only is not ... and value is not only):
                yield _widens(parsed, (key, entry))
    for key, only in _NARROW_KEYS.items():
        if parsed.data.get(key, only) != only:
            yield _widens(parsed, (key,))
    isolation = parsed.data.get("isolation") or {}
    for backend, entry in isolation.items() if isinstance(isolation, dict) else (("*", isolation),):
        if isinstance(entry, dict):  # variables, paths and hidden modules decide which code runs
            foreign = [key for key in entry if key not in ("mode", "deadline_s", "start_s")]
            if foreign:
                yield _widens(parsed, ("isolation", backend, foreign[0]))
            entry = entry.get("mode", "subprocess")
        if entry != "subprocess":
            yield _widens(parsed, ("isolation",))


def _widens(parsed: Parsed, place: Place) -> PolicyValidationError:
    return _problem(
        parsed,
        place,
        f"{spell(place)}: a file found in the working directory may narrow trust, never widen it",
        value=spell(place),
        limit="a file named by LAYERZERO_CONFIG or the user's own",
        hint="move this entry to the user-level file, or name this file in LAYERZERO_CONFIG",
    )


# -- discovery ------------------------------------------------------------------------------------------------------
def discover(env: Env, *, cwd: Path | None = None, user_dir: Path | None = None) -> tuple[Found, ...]:
    """The files that speak here, weakest first.

    LAYERZERO_CONFIG alone when it is set; else the user-level file, then one of the working directory
    (layerzero.yaml, layerzero.toml, pyproject.toml with a layerzero table: the first that is there).
    """
    if env.config is not None:
        return (Found(Path(env.config), True),)
    if user_dir is None:
        import platformdirs

        user_dir = Path(platformdirs.user_config_dir("layerzero", appauthor=False))
    found = [Found(path, True) for path in (user_dir / name for name in _NAMES[:2]) if path.is_file()][:1]
    here = [path for path in ((cwd or Path.cwd()) / name for name in _NAMES) if path.is_file() and _speaks(path)]
    return (*found, *(Found(path, False) for path in here[:1]))


def _speaks(path: Path) -> bool:
    """A pyproject.toml counts only when it names us; anybody else's may be as broken as it likes."""
    if path.name != "pyproject.toml":
        return True
    try:
        with path.open("rb") as file:
            return b"tool.layerzero" in file.read(MAX_BYTES)
    except OSError:
        return False


def load_discovered(env: Env, *, cwd: Path | None = None, user_dir: Path | None = None) -> tuple[PolicyLayer, ...]:
    """All discovered files as layers, weakest first, ready for `merge`."""
    found = discover(env, cwd=cwd, user_dir=user_dir)
    return tuple(load_file(item.path, trusted=item.trusted) for item in found)


# -- watching a file: a change is noticed, and the last good policy kept when the new one is bad ----------------------
class Reload(NamedTuple):
    """What a poll found. On an error `layer` is still the last good one."""

    layer: PolicyLayer
    changed: bool = False
    error: ConfigurationError | None = None


class FileWatch:
    """One watched file. The first load raises when the file is bad; later polls never do.

    Polling is the caller's: `poll()` costs one stat while nothing changes. An error is reported once per change.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._stamp = self._look()
        self._raw: bytes | None = read_bytes(self.path)
        self.layer = from_bytes(self._raw, str(self.path))

    def _look(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.path)
        except OSError:
            return None  # so that its return is a change
        return status.st_mtime_ns, status.st_size

    def poll(self) -> Reload:
        """Look once. Call it from a timer, a request boundary or `lz.reload_config`."""
        now = self._look()
        if now == self._stamp:
            return Reload(self.layer)
        self._stamp = now
        before, self._raw = self._raw, None
        try:
            self._raw = read_bytes(self.path)
            if self._raw == before:  # rewritten with equal content
                return Reload(self.layer)
            layer = from_bytes(self._raw, str(self.path))
        except ConfigurationError as error:
            return Reload(self.layer, error=error)
        changed, self.layer = layer != self.layer, layer
        return Reload(layer, changed)


# -- the file as a whole: the settings of the table, the version of the format, and conditional rules -----------------
def _condition(wanted: object) -> str | None:
    try:
        parse_conditions("", wanted)
    except ValueError as error:
        return str(error)
    return None


_WHEN = 'context field → value, list of values, glob, or comparison such as ">=64, <256"'
_MATCH = table(
    "Which calls a rule speaks about.",
    {
        "op": (PATTERN, "*", "glob over op names, e.g. attention*"),
        "when": (pairs(TEXT, Kind({}, _condition)), {}, _WHEN),
    },
)
_RULE = table(
    "One rule; rules are read in order.",
    {
        "match": (_MATCH, {}, "the calls it speaks about; default: all"),
        "allow": (maybe(POLICY["allow"][0]), None, "only these kernels or backends"),
        **{name: POLICY[name] for name in ("deny", "prefer", "avoid", "boosts")},
        "lock": (maybe(KERNEL), None, "the kernel id that must run"),
    },
)
FILE: Final = table(
    "The whole file. Every key may be absent.",
    {
        "version": (words(1), 1, "version of this format"),
        **POLICY,
        "rules": (items(_RULE, alone=False), (), "conditional wishes, read in order"),
    },
)


def json_schema() -> Mapping[str, Any]:
    """JSON Schema of the policy file, for editors and for `lz policy schema`."""
    keys = FILE.schema["properties"]
    parts = {name: keys[name] for name in GROUPS} | {"rule": _RULE.schema}
    rules = {**keys["rules"], "items": {"$ref": "#/$defs/rule"}}
    keys = {**keys, **{name: {"$ref": f"#/$defs/{name}"} for name in GROUPS}, "rules": rules}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "LayerZero policy"}
    return {**head, **FILE.schema, "properties": keys, "$defs": parts}


def commented(schema: str) -> str:
    """A policy file that says nothing yet: every key as a comment with its meaning and its default.

    A setting stands right behind its #, so that taking that away sets it; remarks keep a blank.
    `schema` is the name of the JSON Schema beside it, by which editors complete and check.
    """
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "# Policy of LayerZero. Every key may be absent; what stands here are the defaults.",
        "# `lz policy check` checks the file, `lz policy show` shows what holds and where it comes from.",
        "version: 1",
    ]
    group = ""
    for item in (item for item in SETTINGS if item.key):
        top, _, name = item.key.partition(".")
        value = json.dumps(list(item.default) if isinstance(item.default, tuple) else item.default)
        if name and top != group:
            lines += ["", f"# {GROUPS[top]}", f"#{top}:"]
        lines += [f"#  {name}: {value}  # {item.doc}"] if name else ["", f"# {item.doc}", f"#{top}: {value}"]
        group = top
    rule = ["#rules:", '#  - match: {op: attention, when: {seq_len_q: ">=1024"}}', "#    prefer: [sdpa]"]
    return "\n".join([*lines, "", f"# {FILE.schema['properties']['rules']['description']}", *rule]) + "\n"
