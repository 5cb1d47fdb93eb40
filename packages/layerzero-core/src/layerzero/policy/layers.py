"""Layers of wishes and how they become one Policy.

A `PolicyLayer` is what one source said: a file, the environment, `lz.configure`, a `with` block, one call. `merge`
puts them together: call > context manager > programmatic > environment > file; of two layers on one level the later
one is stronger. Settings: the strongest layer that names one decides. Locks, allow, prefer, avoid: the strongest
statement about a kernel decides. Boosts: the strongest value of each pattern counts. Deny: all of them, always.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from layerzero.env import Env
from layerzero.errors import PolicyValidationError, did_you_mean
from layerzero.kinds import PATTERNS, Place, spell
from layerzero.model.config import (
    BreakerSettings,
    CacheSettings,
    FrozenMap,
    Policy,
    Rule,
    by_specificity,
    level_program,
)
from layerzero.settings import GROUPS, POLICY, VARIABLES


class Level(enum.IntEnum):
    """Where a layer comes from; the greater is the stronger."""

    FILE = 1
    ENV = 2
    PROGRAMMATIC = 3
    CONTEXT = 4
    CALL = 5


_FORBIDDING: Final = ("deny", "revoked")
_OFF: Final = ("off", "none", "0")  # of LAYERZERO_PERFDB: no database at all
_CLASSES: Final[Mapping[str, Callable[..., Any]]] = {"breaker": BreakerSettings, "cache": CacheSettings}


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
        rules: Iterable[Rule | Mapping[str, Any]] = (),
        expires_at: float | None = None,
        **said: Any,
    ) -> PolicyLayer:
        """A layer from plain Python values, checked.

        Everything is named as in the file: `deny="sdpa"`, `locks={"attention": "sdpa.attention.flash"}`,
        `strict_mode=True`, `cache={"max_entries": 100}`, `isolation="subprocess"`.
        """
        lists = {name: said.pop(name) for name in ("allow", "deny", "prefer", "avoid") if name in said}
        locks, boosts = said.pop("locks", None) or {}, said.pop("boosts", None) or {}
        for name, value in {**said, "locks": locks, "boosts": boosts}.items():
            if name not in POLICY:
                near = did_you_mean(name, POLICY, f"use one of: {', '.join(POLICY)}")
                raise _wrong(source, (name,), f"expected the name of a setting; {near}", value)
            for problem in POLICY[name][0].problems(value, (name,)):
                raise _wrong(source, problem.place, problem.text, problem.value, problem.expected)
        return cls(
            level=level,
            source=source,
            locks=tuple((op, kernel or "") for op, kernel in locks.items()),
            **{name: _patterns(source, name, given) for name, given in lists.items() if given is not None},
            boosts=tuple((pattern, float(points)) for pattern, points in boosts.items()),
            rules=tuple(_rules(source, rules)),
            settings=FrozenMap(said),
            expires_at=expires_at,
        )

    def until(self, expires_at: float) -> PolicyLayer:
        return replace(self, expires_at=expires_at)

    def expired(self, now: float) -> bool:
        """Whether the timebox is over: it holds before `expires_at`, not at it."""
        return self.expires_at is not None and now >= self.expires_at


def _rules(source: str, given: Any) -> Iterator[Rule]:
    """Rules as values; those in the form of the file are read as the file would be."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise _wrong(source, ("rules",), f"expected a list of rules, got {given!r}", given, "a list of rules")
    for index, item in enumerate(given):
        if isinstance(item, Rule):
            yield item
        elif isinstance(item, Mapping):
            from layerzero.policy.load import from_mapping  # that module stands on this one

            yield from from_mapping({"rules": [dict(item)]}, source=source).rules
        else:
            expected = "a rule: match and allow, deny, prefer, avoid, boosts or lock"
            raise _wrong(source, ("rules", index), f"expected {expected}, got {item!r}", item, expected)


def _patterns(source: str, name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    for problem in PATTERNS.problems(found, (name,)):
        raise _wrong(source, (name,), problem.text, problem.value, problem.expected)
    return tuple(dict.fromkeys(found))


def _wrong(source: str, place: Place, text: str, value: object, expected: str = "") -> PolicyValidationError:
    where = f"{source}: " if source else ""
    # of a setting its own name is the key, of a lock or boost the entry
    key = spell(place if place[0] in ("locks", "boosts", "rules") else place[:1])
    hint = "`lz policy init` writes a file with every setting, its values and its default"
    limit = expected or None
    return PolicyValidationError(f"{where}{spell(place)}: {text}", key=key, value=value, limit=limit, hint=hint)


def from_env(env: Env) -> PolicyLayer:
    """The layer the environment speaks. Empty when no variable is set."""
    settings: dict[str, Any] = {}
    for item in VARIABLES.values():
        if not item.key or "<" in item.variable or (value := getattr(env, item.attribute)) == item.unset:
            continue
        group, _, name = item.key.partition(".")
        settings[group] = {**settings.get(group, {}), name: value} if name else value
    if env.disabled is not None:  # the one variable that says the opposite of its key
        settings["enabled"] = not env.disabled
    if env.perfdb in _OFF:
        others = {name: value for name, value in settings.get("perfdb", {}).items() if name != "path"}
        settings["perfdb"] = {**others, "enabled": False}
    return PolicyLayer.of(Level.ENV, source="environment", locks=dict(env.locks), boosts=dict(env.boosts), **settings)


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
        lists = Rule("*", (), layer.allow, layer.deny, layer.prefer, layer.avoid, boosts, source=layer.source)
        program += level_program(layer.rules, layer.locks, lists)
        for name, value in layer.settings.items():
            settings[name] = _combine(name, settings[name], value) if name in settings else value
    fields = _policy_fields(settings)
    return Policy(
        locks=tuple(lock for layer in strongest_first for lock in by_specificity(layer.locks)),
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


def _union(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pattern for patterns in lists for pattern in patterns))


def _combine(name: str, stronger: Any, weaker: Any) -> Any:
    """Sub-mappings merge key by key; of anything else the stronger stands. What they forbid adds up."""
    if name == "isolation":
        # The stronger layer says where backends run, a word for all included; what it does not say is how.
        ours, merged = _by_backend(stronger), _by_backend(weaker)
        if "*" in ours:
            for entry in merged.values():
                entry["mode"] = ours["*"]["mode"]
        return merged | {backend: {**merged.get(backend, {}), **entry} for backend, entry in ours.items()}
    if name not in GROUPS and name != "hub":
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


def _policy_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        name: _CLASSES[name](**value) if name in _CLASSES else FrozenMap(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name != "isolation"
    }
    if "isolation" in settings:
        entries = _by_backend(settings["isolation"])
        fields["backend_isolation"] = tuple(sorted((backend, entry.pop("mode")) for backend, entry in entries.items()))
        fields["isolation"] = FrozenMap({backend: entry for backend, entry in entries.items() if entry})
    return fields
