"""Layers of wishes and how they become one Policy.

A `PolicyLayer` is what one source said: a file, the environment, `lz.configure`, a `with` block, one call. `merge`
puts them together: call > context manager > programmatic > environment > file; of two layers on one level the later
one is stronger. Settings: the strongest layer that names one decides. Locks, allow, prefer, avoid: the strongest
statement about a kernel decides. Boosts: the strongest value of each pattern counts. Deny: all of them, always.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from layerzero.env import Env
from layerzero.errors import PolicyValidationError
from layerzero.model.config import (
    ISOLATION_MODES,
    JIT_MODES,
    ON_FAULT,
    ON_FIRST_USE,
    BreakerSettings,
    CacheSettings,
    FrozenMap,
    Policy,
    Rule,
    level_program,
)

__all__ = ["Level", "PolicyLayer", "from_env", "is_kernel_id", "merge", "next_expiry"]


class Level(enum.IntEnum):
    """Where a layer comes from; the greater is the stronger."""

    FILE = 1
    ENV = 2
    PROGRAMMATIC = 3
    CONTEXT = 4
    CALL = 5


_SUBMAPS: Final = ("breaker", "cache", "canary", "perfdb", "distributed", "hub", "plugins")
_FORBIDDING: Final = ("deny", "revoked")
_OFF: Final = ("off", "none", "0")  # of LAYERZERO_PERFDB: no database at all
_KERNEL_ID: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+){2,}")


def is_kernel_id(text: str) -> bool:
    """Whether a text reads backend.op.variant."""
    return _KERNEL_ID.fullmatch(text) is not None


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _number(low: float, *, none: bool = False, whole: bool = False) -> Callable[[object], str | None]:
    expected = f"a {'whole ' if whole else ''}number, {low:g} or more{', or nothing' if none else ''}"

    def check(value: object) -> str | None:
        if value is None:
            return None if none else expected
        fits = isinstance(value, int) if whole else isinstance(value, (int, float))
        # NaN fails every comparison; infinity is no setting either.
        return None if fits and not isinstance(value, bool) and low <= value < float("inf") else expected  # type: ignore[operator]

    return check


def _one_of(*words: str) -> Callable[[object], str | None]:
    return lambda value: None if value in words else " or ".join(words)


def _submap(**checks: Callable[[object], str | None]) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        if not isinstance(value, Mapping):
            return "a mapping"
        for name, item in value.items():
            if checks and name not in checks:
                return f"only {', '.join(checks)}, not {name}"
            if checks and (wrong := checks[name](item)):
                return f"{name}: {wrong}"
        return None

    return check


def _fraction(value: object) -> str | None:
    expected = "a number above 0, at most 1"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return expected
    return None if 0 < value <= 1 else expected


def _path(value: object) -> str | None:
    return None if value is None or (isinstance(value, str) and value) else "a path, or nothing"


def _texts(value: object) -> str | None:
    fine = isinstance(value, (list, tuple)) and all(isinstance(item, str) and item for item in value)
    return None if fine else "a list of patterns"


def _folders(value: object) -> str | None:
    # Relative to the working directory would let that directory decide which code runs.
    if (wrong := _texts(value)) is not None:
        return wrong.replace("patterns", "folders")
    return None if all(os.path.isabs(item) for item in value) else "absolute paths"  # type: ignore[attr-defined]


def _words_by_name(value: object) -> str | None:
    fine = isinstance(value, Mapping) and all(
        isinstance(name, str) and name and "=" not in name and isinstance(word, str) for name, word in value.items()
    )
    return None if fine else "names and their texts"


def _isolation(value: object) -> str | None:
    """One mode for all, or backend → mode, or backend → mode and how its process is set up."""
    if not isinstance(value, Mapping):
        return _one_of(*ISOLATION_MODES)(value)
    for backend, entry in value.items():
        wrong = _ISOLATION_ENTRY(entry) if isinstance(entry, Mapping) else _one_of(*ISOLATION_MODES)(entry)
        if wrong:
            return f"{backend}: {wrong}"
    return None


_ISOLATION_ENTRY: Final = _submap(
    mode=_one_of(*ISOLATION_MODES),
    env=_words_by_name,
    path=_folders,
    hide=_texts,
    deadline_s=_number(0.001),
    start_s=_number(0.1),
    memory_mb=_number(64),
)

# Every setting a layer may carry, with a function that says what is expected when the value is wrong.
SETTINGS: Final[Mapping[str, Callable[[object], str | None]]] = {
    "enabled": _flag,
    "fallback_enabled": _flag,
    "strict_mode": _flag,
    "allow_adaptation": _flag,
    "deterministic": _flag,
    "graph_strict_mode": _flag,
    "plan_mode": _flag,
    "graph_whitelist": _texts,
    "memory_headroom_mb": _number(0, none=True),
    "on_fault": _one_of(*ON_FAULT),
    "on_first_use": _one_of(*ON_FIRST_USE),
    "isolation": _isolation,
    "jit": _one_of(*JIT_MODES),
    "breaker": _submap(
        failures=_number(1, whole=True),
        cooldown_s=_number(0),
        successes=_number(1, whole=True),
        enabled=_flag,
        backend_kernels=_number(1, whole=True),
        probe=_flag,
        probe_timeout_s=_number(0.1),
        deadline_s=_number(0.001, none=True),
    ),
    "canary": _submap(kernels=_texts, fraction=_fraction, calls=_number(1, whole=True)),
    "cache": _submap(max_entries=_number(1, whole=True), ttl_s=_number(0, none=True)),
    "dispatch_table": _path,
    "perfdb": _submap(
        enabled=_flag,
        path=_path,
        auto_tune=_flag,
        tune_samples=_number(1, whole=True),
        ttl_s=_number(0, none=True),
        drift_s=_number(0, none=True),
    ),
    "distributed": _submap(),
    "hub": _submap(),
    "plugins": _submap(allow=_texts, deny=_texts),
}


@dataclass(frozen=True)
class PolicyLayer:
    """What one source said. Absent means: says nothing. Build it with `PolicyLayer.of`, `from_mapping`, `from_env`.

    `locks` pairs an op glob with a kernel id, or with "" to lift a lock of a weaker layer. `allow` None says nothing,
    () lifts an allow list. `expires_at` is a time of the clock that `merge` is given as `now`.
    """

    level: Level = Level.PROGRAMMATIC
    source: str = ""
    locks: tuple[tuple[str, str], ...] = ()
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    boosts: tuple[tuple[str, float], ...] = ()
    rules: tuple[Rule, ...] = ()
    settings: FrozenMap = field(default_factory=FrozenMap)
    expires_at: float | None = None

    @classmethod
    def of(
        cls,
        level: Level = Level.PROGRAMMATIC,
        *,
        source: str = "",
        locks: Mapping[str, str | None] | None = None,
        allow: str | Iterable[str] | None = None,
        deny: str | Iterable[str] = (),
        prefer: str | Iterable[str] = (),
        avoid: str | Iterable[str] = (),
        boosts: Mapping[str, float] | None = None,
        rules: Iterable[Rule | Mapping[str, Any]] = (),
        expires_at: float | None = None,
        **settings: Any,
    ) -> PolicyLayer:
        """A layer from plain Python values, checked. Needs no pydantic, so scopes and calls may use it freely.

        Settings are named as in the file: `strict_mode=True`, `cache={"max_entries": 100}`, `isolation="subprocess"`.
        """
        for name, value in settings.items():
            if name not in SETTINGS:
                raise _wrong(source, name, value, "a setting named " + ", ".join(SETTINGS))
            if expected := SETTINGS[name](value):
                raise _wrong(source, name, value, expected)
        for op, kernel in (locks or {}).items():
            if kernel is not None and not (isinstance(kernel, str) and is_kernel_id(kernel)):
                raise _wrong(source, f"locks.{op}", kernel, "a kernel id such as sdpa.attention.flash, or None")
        for pattern, points in (boosts or {}).items():
            if _number(float("-inf"))(points) or points == float("-inf"):
                raise _wrong(source, f"boosts.{pattern}", points, "a finite number")
        return cls(
            level=level,
            source=source,
            locks=tuple((op, kernel or "") for op, kernel in (locks or {}).items()),
            allow=None if allow is None else _patterns(source, "allow", allow),
            deny=_patterns(source, "deny", deny),
            prefer=_patterns(source, "prefer", prefer),
            avoid=_patterns(source, "avoid", avoid),
            boosts=tuple((pattern, float(points)) for pattern, points in (boosts or {}).items()),
            rules=_rules(source, rules),
            settings=FrozenMap(settings),
            expires_at=expires_at,
        )

    def until(self, expires_at: float) -> PolicyLayer:
        """The same layer, timeboxed."""
        return replace(self, expires_at=expires_at)

    def expired(self, now: float) -> bool:
        """Whether the timebox is over: it holds before `expires_at`, not at it."""
        return self.expires_at is not None and now >= self.expires_at


def _rules(source: str, given: Iterable[Rule | Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Rules as values; those in the form of the file are read as the file would be."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise _wrong(source, "rules", given, "a list of rules")
    found: list[Rule] = []
    for index, item in enumerate(given):
        if isinstance(item, Rule):
            found.append(item)
        elif isinstance(item, Mapping):
            from layerzero.policy.load import from_mapping  # late: it brings pydantic

            found.extend(from_mapping({"rules": [dict(item)]}, source=source).rules)
        else:
            raise _wrong(
                source, f"rules[{index}]", item, "a rule: match and allow, deny, prefer, avoid, boosts or lock"
            )
    return tuple(found)


def _patterns(source: str, name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    items = (given,) if isinstance(given, str) else tuple(given)
    for item in items:
        if not isinstance(item, str) or not item:
            raise _wrong(source, name, item, "a glob over kernel ids or backend names")
    return tuple(dict.fromkeys(items))


def _wrong(source: str, key: str, value: object, expected: str) -> PolicyValidationError:
    where = f"{source}: " if source else ""
    return PolicyValidationError(
        f"{where}{key}: expected {expected}, got {value!r}", key=key, value=value, limit=expected
    )


def from_env(env: Env) -> PolicyLayer:
    """The layer the environment speaks. Empty when no variable is set."""
    settings: dict[str, Any] = {
        "enabled": None if env.disabled is None else not env.disabled,
        "strict_mode": env.strict,
        "allow_adaptation": env.allow_adaptation,
        "deterministic": env.deterministic,
        "graph_strict_mode": env.graph_strict_mode,
        "fallback_enabled": env.fallback,
        "on_fault": env.on_fault,
        "on_first_use": env.on_first_use,
        "plan_mode": env.plan_mode,
        "isolation": env.isolation,
        "jit": env.jit,
        "memory_headroom_mb": env.memory_headroom_mb,
        "cache": _given(max_entries=env.cache_size, ttl_s=env.cache_ttl),
        "breaker": _given(failures=env.breaker_failures, cooldown_s=env.breaker_cooldown),
        "perfdb": {"enabled": False} if env.perfdb in _OFF else _given(path=env.perfdb),
        "dispatch_table": env.dispatch_table,
        "plugins": {**_given(allow=env.plugins), **({"deny": env.plugins_deny} if env.plugins_deny else {})},
    }
    return PolicyLayer.of(
        Level.ENV,
        source="environment",
        locks=dict(env.locks),
        allow=env.allow or None,
        deny=env.deny,
        prefer=env.prefer,
        avoid=env.avoid,
        boosts=dict(env.boosts),
        **{name: value for name, value in settings.items() if value is not None and value != {}},
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def merge(layers: Iterable[PolicyLayer], *, now: float | None = None) -> Policy:
    """One Policy from all layers. With `now`, layers whose timebox is over are left out."""
    alive = [layer for layer in layers if now is None or not layer.expired(now)]
    strongest_first = sorted(reversed(alive), key=lambda layer: -layer.level)
    program: list[Rule] = []
    boosted: dict[str, float] = {}
    settings: dict[str, Any] = {}
    for layer in strongest_first:
        boosts = tuple((pattern, points) for pattern, points in layer.boosts if pattern not in boosted)
        boosted.update(boosts)
        program += level_program(
            layer.rules, layer.locks, layer.allow, layer.deny, layer.prefer, layer.avoid, boosts, layer.source
        )
        for name, value in layer.settings.items():
            settings[name] = _combine(name, settings[name], value) if name in settings else value
    fields = _policy_fields(settings)
    return Policy(
        locks=tuple(lock for layer in strongest_first for lock in _locks_in_order(layer)),
        allow=next((layer.allow for layer in strongest_first if layer.allow is not None), ()),
        deny=_union(layer.deny for layer in strongest_first),
        prefer=_union(layer.prefer for layer in strongest_first),
        avoid=_union(layer.avoid for layer in strongest_first),
        boosts=tuple(boosted.items()),
        rules=tuple(rule for layer in strongest_first for rule in layer.rules),
        expires_at=next_expiry(alive),
        levels=tuple(program),
        **fields,
    )


def next_expiry(layers: Iterable[PolicyLayer]) -> float | None:
    """When the first of these timeboxes ends: a Policy merged from them is good until then."""
    return min((layer.expires_at for layer in layers if layer.expires_at is not None), default=None)


def _locks_in_order(layer: PolicyLayer) -> list[tuple[str, str]]:
    program = level_program((), layer.locks, None, (), (), (), ())
    return [(rule.match_op, rule.lock or "") for rule in program]


def _union(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pattern for patterns in lists for pattern in patterns))


def _combine(name: str, stronger: Any, weaker: Any) -> Any:
    """Sub-mappings merge key by key; of anything else the stronger stands. What they forbid adds up."""
    if name == "isolation":
        return _isolations(_by_backend(stronger), _by_backend(weaker))
    if name not in _SUBMAPS:
        return stronger
    combined = {**weaker, **stronger}
    for key in _FORBIDDING:
        if key in weaker and key in stronger:
            combined[key] = _union((tuple(stronger[key]), tuple(weaker[key])))
    return combined


def _by_backend(value: Any) -> dict[str, dict[str, Any]]:
    """Isolation as backend → entry; an entry that names no mode wants a process of its own."""
    given = value if isinstance(value, Mapping) else {"*": value}
    return {
        backend: {"mode": "subprocess", **entry} if isinstance(entry, Mapping) else {"mode": entry}
        for backend, entry in given.items()
    }


def _isolations(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The stronger layer says where backends run, a word for all included; what it does not say is how."""
    merged = {backend: dict(entry) for backend, entry in theirs.items()}
    if "*" in ours:
        for entry in merged.values():
            entry["mode"] = ours["*"]["mode"]
    for backend, entry in ours.items():
        merged[backend] = {**merged.get(backend, {}), **entry}
    return merged


def _policy_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(settings)
    if "isolation" in fields:
        entries = _by_backend(fields.pop("isolation"))
        fields["backend_isolation"] = tuple(sorted((backend, entry.pop("mode")) for backend, entry in entries.items()))
        fields["isolation"] = FrozenMap({backend: entry for backend, entry in entries.items() if entry})
    if "graph_whitelist" in fields:
        fields["graph_whitelist"] = tuple(fields["graph_whitelist"])
    if "breaker" in fields:
        fields["breaker"] = BreakerSettings(**fields["breaker"])
    if "cache" in fields:
        fields["cache"] = CacheSettings(**fields["cache"])
    for name in ("canary", "perfdb", "distributed", "hub", "plugins"):
        if name in fields:
            fields[name] = FrozenMap(fields[name])
    return fields
