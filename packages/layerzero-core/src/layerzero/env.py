"""Every LAYERZERO_* variable, in one place.

`read()` gives a frozen `Env`; nothing else in LayerZero looks at os.environ for settings. A value that cannot be
understood raises ConfigurationError with the variable, the value and what is expected. A LAYERZERO_* name that is not
known here may belong to a plugin, so it is no error: it is kept in `Env.unknown` with the nearest known name, for
`lz doctor` to show, since a misspelt variable has no effect.

Two families carry a name inside the variable's name, in any case, with `__` for the dot:
`LAYERZERO_LOCK_ATTENTION=sdpa.attention.flash`, `LAYERZERO_BOOST_SDPA__ATTENTION__FLASH=15`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

from layerzero.errors import ConfigurationError

__all__ = ["Env", "Variable", "documentation", "read", "read_one"]

PREFIX: Final = "LAYERZERO_"
_LOCK, _BOOST = "LAYERZERO_LOCK_", "LAYERZERO_BOOST_"


class _Bad(ValueError):
    """A value that does not parse; the text says what is expected."""


def _flag(text: str) -> bool:
    word = text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise _Bad("1, true, yes, on, 0, false, no or off")


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in re.split(r"[,\s]+", text) if word))


def _path(text: str) -> str:
    return os.path.expanduser(text)


def _folders(text: str) -> tuple[str, ...]:
    found = tuple(os.path.expanduser(part.strip()) for part in text.split(os.pathsep) if part.strip())
    if not all(os.path.isabs(part) for part in found):  # a relative one would mean another place in each directory
        raise _Bad(f"absolute paths separated by {os.pathsep}")
    return found


def _expressions(text: str) -> tuple[str, ...]:
    return () if text.lower() in ("0", "false", "no", "off") else tuple(text.split())


def _number(text: str, low: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _Bad(expected) from None
    if not math.isfinite(value) or value < low:
        raise _Bad(expected)
    return value


def _seconds(text: str) -> float:
    return _number(text, 0.0, "a number of seconds, 0 or more")


def _positive_seconds(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise _Bad("a number of seconds above 0")
    return value


def _megabytes(text: str) -> float:
    return _number(text, 0.0, "a number of MiB, 0 or more")


def _points(text: str) -> float:
    return _number(text, -math.inf, "a finite number of score points")


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < low:
            raise _Bad(f"a whole number, {low} or more")
        return int(text)

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise _Bad(" or ".join(words))
        return text

    return parse


def _kernel_id(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){2,}", text):
        raise _Bad("a kernel id such as sdpa.attention.flash")
    return text


def _var(name: str, parse: Callable[[str], Any], default: Any, doc: str) -> Any:
    return field(default=default, metadata={"name": PREFIX + name, "parse": parse, "doc": doc})


_PREFIXES: Final = {
    _LOCK: (_kernel_id, "lock an op to a kernel id; the op follows in the name"),
    _BOOST: (_points, "add score points to a kernel or backend; it follows in the name, __ for the dot"),
}


@dataclass(frozen=True)
class Env:
    """The environment as read. None means: not set, the next source decides."""

    disabled: bool | None = _var("DISABLED", _flag, None, "run only fallbacks, as inside lz.disabled()")
    config: str | None = _var("CONFIG", _path, None, "policy file to use instead of the discovered ones")
    prefer: tuple[str, ...] = _var("PREFER", _words, (), "kernels or backends to prefer (globs, separated by commas)")
    avoid: tuple[str, ...] = _var("AVOID", _words, (), "kernels or backends to avoid")
    allow: tuple[str, ...] = _var("ALLOW", _words, (), "only these kernels or backends may be selected")
    deny: tuple[str, ...] = _var("DENY", _words, (), "these kernels or backends are never selected")
    strict: bool | None = _var("STRICT", _flag, None, "refuse implicit layout and dtype transforms")
    allow_adaptation: bool | None = _var("ALLOW_ADAPTATION", _flag, None, "allow transforms, their cost counted")
    deterministic: bool | None = _var("DETERMINISTIC", _flag, None, "only deterministic kernels")
    graph_strict_mode: bool | None = _var("GRAPH_STRICT_MODE", _flag, None, "in a capture, only whitelisted kernels")
    fallback: bool | None = _var("FALLBACK", _flag, None, "whether the reference may run when nothing else fits")
    on_fault: str | None = _var("ON_FAULT", _one_of("raise", "fallback"), None, "what a locked kernel's failure does")
    on_first_use: str | None = _var(
        "ON_FIRST_USE", _one_of("check", "off"), None, "hold a kernel without proof against the baseline, or use it"
    )
    plan_mode: bool | None = _var("PLAN_MODE", _flag, None, "plan whole blocks of ops together")
    isolation: str | None = _var("ISOLATION", _one_of("in_process", "subprocess", "auto"), None, "where backends run")
    memory_headroom_mb: float | None = _var("MEMORY_HEADROOM_MB", _megabytes, None, "MiB of device memory to keep free")
    cache_size: int | None = _var("CACHE_SIZE", _whole(1), None, "entries of the selection cache")
    cache_ttl: float | None = _var("CACHE_TTL", _positive_seconds, None, "seconds a cached selection lives")
    breaker_failures: int | None = _var("BREAKER_FAILURES", _whole(1), None, "failures that open a breaker")
    breaker_cooldown: float | None = _var("BREAKER_COOLDOWN", _seconds, None, "seconds an open breaker stays open")
    plugins: tuple[str, ...] | None = _var(
        "PLUGINS", _words, None, "only these plugins are loaded (globs); empty: none"
    )
    plugins_deny: tuple[str, ...] = _var("PLUGINS_DENY", _words, (), "these plugins are never loaded")
    probe_timeout: float = _var(
        "PROBE_TIMEOUT", _positive_seconds, 60.0, "seconds a vendor probe may take in lz doctor"
    )
    perfdb: str | None = _var("PERFDB", _path, None, "file of measured kernel times; off: none")
    quarantine: str | None = _var(
        "QUARANTINE", _path, None, "file of kernels that took a process down, crumbs beside it; off: none"
    )
    dispatch_table: str | None = _var("DISPATCH_TABLE", _path, None, "table of decisions to obey, written by lz solve")
    jit: str | None = _var(
        "JIT", _one_of("background", "block", "off"), None, "compile beside requests, let calls wait, or neither"
    )
    jit_workers: int | None = _var(
        "JIT_WORKERS", _whole(1), None, "kernels compiled at a time; default: a quarter of the cores, at most 4"
    )
    jit_timeout: float = _var("JIT_TIMEOUT", _positive_seconds, 300.0, "seconds a background compile may take")
    table_key: str | None = _var("TABLE_KEY", _path, None, "key file; only dispatch tables signed with it are obeyed")
    accel: bool | None = _var("ACCEL", _flag, None, "layerzero-accel: off leaves it aside, on refuses to go without")
    record: str | None = _var("RECORD", _path, None, "file to write the calls of this process to, when it ends")
    jit_cache_dir: str | None = _var("JIT_CACHE_DIR", _path, None, "directory of compiled kernels (made with 0700)")
    trusted_definitions: tuple[str, ...] = _var(
        "TRUSTED_DEFINITIONS", _folders, (), "folders or files whose definitions may run their reference code"
    )
    debug: bool = _var("DEBUG", _flag, False, "check plans at each call; the CLI shows tracebacks")
    verbose: bool = _var("VERBOSE", _flag, False, "log every selection")
    log: str | None = _var("LOG", _path, None, "json or text: log to stderr in that form; else a file for JSON lines")
    redact: tuple[str, ...] = _var(
        "REDACT", _expressions, (), "leave secrets out of that log: 1, or regular expressions (separated by blanks)"
    )
    metrics: str | None = _var("METRICS", _path, None, "port or file by which lz top and Prometheus see the process")
    trace: str | None = _var("TRACE", _path, None, "file for a Chrome trace of what was not hot, written at the end")
    prove: bool = _var("PROVE", _flag, False, "tests: the long counts of the prove lanes")
    commit: str | None = _var("COMMIT", _path, None, "tests and benchmarks: the commit to write where git cannot tell")
    require: bool = _var("REQUIRE", _flag, False, "tests: a missing tool fails instead of skipping")
    locks: tuple[tuple[str, str], ...] = ()
    boosts: tuple[tuple[str, float], ...] = ()
    unknown: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Variable:
    """One documented variable."""

    name: str
    default: object
    doc: str
    parse: Callable[[str], Any]


def _variables() -> dict[str, tuple[str, Variable]]:
    return {
        item.metadata["name"]: (
            item.name,
            Variable(item.metadata["name"], item.default, item.metadata["doc"], item.metadata["parse"]),
        )
        for item in fields(Env)
        if item.metadata and item.default is not MISSING
    }


_VARIABLES: Final = _variables()


def documentation() -> tuple[Variable, ...]:
    """All variables, for `lz doctor`, the documentation and shell completion."""
    families = (Variable(f"{name}<NAME>", None, doc, parse) for name, (parse, doc) in _PREFIXES.items())
    return (*(variable for _, variable in _VARIABLES.values()), *families)


def read(environ: Mapping[str, str] | None = None) -> Env:
    """Read all LAYERZERO_* variables. An empty value counts as not set, except LAYERZERO_PLUGINS (no plugin at all)."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    unknown: list[tuple[str, str | None]] = []
    families: dict[str, list[tuple[str, Any]]] = {_LOCK: [], _BOOST: []}
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        raw = environ[name].strip()
        family = next((prefix for prefix in _PREFIXES if name.startswith(prefix) and name != prefix), None)
        if family is not None:
            if raw:
                target = name.removeprefix(family).lower().replace("__", ".")
                families[family].append((target, _parse(name, raw, _PREFIXES[family][0])))
        elif name in _VARIABLES:
            attribute, variable = _VARIABLES[name]
            if raw or name == "LAYERZERO_PLUGINS":
                values[attribute] = _parse(name, raw, variable.parse)
        else:
            unknown.append((name, _nearest(name)))
    for family, attribute in ((_LOCK, "locks"), (_BOOST, "boosts")):
        targets = [target for target, _ in families[family]]
        twice = next((target for target in targets if targets.count(target) > 1), None)
        if twice is not None:
            raise ConfigurationError(
                f"two variables {family}… name {twice}", value=twice, limit="one", hint="unset one"
            )
        values[attribute] = tuple(sorted(families[family]))
    return Env(**values, unknown=tuple(unknown))


def read_one(attribute: str) -> Any:
    """One variable by its name in `Env`, for what is needed before all others are read."""
    name, variable = next((name, found[1]) for name, found in _VARIABLES.items() if found[0] == attribute)
    raw = os.environ.get(name, "").strip()
    return _parse(name, raw, variable.parse) if raw else variable.default


def _parse(name: str, raw: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(raw)
    except _Bad as expected:
        raise ConfigurationError(
            f"{name}={raw!r} is not understood, expected {expected}", value=f"{name}={raw}", limit=str(expected)
        ) from None


def _nearest(name: str) -> str | None:
    near = difflib.get_close_matches(
        name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in _VARIABLES], n=1
    )
    return PREFIX + near[0] if near else None
