"""The policy as a value: what the user wants, already merged, frozen and hashed.

A `Policy` is read by selection and dispatch and never changed; another wish is another `Policy`, and `policy_hash`
tells them apart. How files, variables and calls become a Policy is the business of `layerzero.policy`.

Patterns are case-sensitive globs. One in allow, deny, prefer, avoid or boosts matches a kernel when it matches the
kernel id (`sdpa.attention.flash`) or the backend name (`sdpa`). A rule or lock names ops by glob (`attention*`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, Final

from layerzero.errors import ConfigurationError
from layerzero.json_form import Plain, digest, plain
from layerzero.settings import POLICY, default

PREFER_BONUS: Final = 20.0
"""Score points a preferred kernel gains. The order is decided by the preference itself, whatever the points."""
AVOID_BONUS: Final = -50.0
"""Score points an avoided kernel loses: enough to sink it, not to forbid it (that is what deny is for)."""

OPERATORS: Final = ("==", "!=", ">", ">=", "<", "<=", "in", "glob")
ORDERING: Final = frozenset((">", ">=", "<", "<="))

Scalar = str | int | float | bool


class FrozenMap(Mapping[str, Any]):
    """An immutable, hashable, picklable string-keyed mapping; nested mappings and lists are frozen too."""

    __slots__ = ("_data",)
    _data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        object.__setattr__(self, "_data", {str(key): _freeze(value) for key, value in dict(data).items()})

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a FrozenMap cannot change ({name})")

    def __hash__(self) -> int:
        return hash(frozenset(self._data.items()))

    def __reduce__(self) -> tuple[type[FrozenMap], tuple[dict[str, Any]]]:
        return FrozenMap, (self._data,)

    def __repr__(self) -> str:
        return f"FrozenMap({self._data!r})"


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenMap(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((_freeze(item) for item in value), key=str))
    return value


def specificity(pattern: str) -> tuple[int, int, str]:
    """Sort key that puts the most specific glob first: exact names, then more literal characters, then the alphabet."""
    wild = sum(pattern.count(mark) for mark in "*?[")
    return (1 if wild else 0, wild - len(pattern), pattern)


@dataclass(frozen=True, slots=True)
class Condition(Plain):
    """`field operator operand`, e.g. head_dim >= 64. The field is any field of the Context."""

    field: str
    operator: str
    operand: Scalar | tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if self.operator not in OPERATORS:
            raise ValueError(f"unknown operator {self.operator!r}, expected one of {', '.join(OPERATORS)}")
        if (self.operator == "in") != isinstance(self.operand, tuple):
            raise ValueError(f"operator {self.operator!r} does not take {self.operand!r}; a tuple goes with 'in'")
        if self.operator == "glob" and not isinstance(self.operand, str):
            raise ValueError(f"a glob is text, got {self.operand!r}")
        number = isinstance(self.operand, (int, float)) and not isinstance(self.operand, bool)
        if self.operator in ORDERING and not number:
            raise ValueError(f"{self.operator} needs a number, got {self.operand!r}")
        for item in self.operand if isinstance(self.operand, tuple) else (self.operand,):
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"expected a finite number, got {item}")

    def __str__(self) -> str:
        return f"{self.field} {self.operator} {self.operand}"


@dataclass(frozen=True, slots=True)
class Rule(Plain):
    """What holds for the ops that `match_op` names, when every condition is true.

    `allow` None says nothing, () lifts an allow list of a weaker rule. `lock` None says nothing, "" lifts a lock.
    `source` is file:line, a variable or a call; it is shown in reasons and is no part of the hash.
    """

    match_op: str = "*"
    when: tuple[Condition, ...] = ()
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    boosts: tuple[tuple[str, float], ...] = ()
    lock: str | None = None
    source: str = ""

    def to_json(self, *, canonical: bool = False) -> dict[str, Any]:
        """JSON-compatible form. Canonical: without the source, and with lists whose order means nothing sorted."""
        data = Plain.to_json(self)
        if canonical:
            del data["source"]
            data["when"].sort(key=json.dumps)
            for name in ("allow", "deny", "prefer", "avoid", "boosts"):
                data[name] = data[name] and sorted(data[name])
        return data

    @property
    def silent(self) -> bool:
        return self.allow is None and self.lock is None and not (self.deny or self.prefer or self.avoid or self.boosts)


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a failing kernel is set aside, for how long, and how many good runs bring it back."""

    failures: int = 1
    cooldown_s: float = 30.0
    successes: int = 1
    enabled: bool = True
    # So many kernels of a backend set aside at once mean that the backend itself is ill.
    backend_kernels: int = 3
    # Whether a backend's own self test comes before traffic when a cooldown is over, and how long it may take.
    probe: bool = True
    probe_timeout_s: float = 60.0
    # A call that runs longer is reported and its kernel set aside; None: calls are not watched.
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.failures < 1 or self.successes < 1 or self.backend_kernels < 1:
            value = f"failures={self.failures}, successes={self.successes}, backend_kernels={self.backend_kernels}"
            raise ConfigurationError(f"breaker counts must be at least 1, got {value}", value=value, limit=1)
        if not (math.isfinite(self.cooldown_s) and self.cooldown_s >= 0):
            message = f"breaker cooldown must be a finite number >= 0, got {self.cooldown_s}"
            raise ConfigurationError(message, value=self.cooldown_s, limit=">= 0")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Bounds of the selection cache. `ttl_s` None: entries do not age."""

    max_entries: int = 10_000
    ttl_s: float | None = None


@dataclass(frozen=True)
class Policy:
    """Everything the user decided, merged over all levels.

    The lists are a summary of the merged levels, in order of precedence. What is evaluated is `program`: the rules
    of the strongest level, its locks (most specific first), its lists, then those of the next level, and so on. A
    Policy built directly has one level. `rules.evaluate` says what a program means.
    """

    enabled: bool = True
    locks: tuple[tuple[str, str], ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    boosts: tuple[tuple[str, float], ...] = ()
    rules: tuple[Rule, ...] = ()
    strict_mode: bool = False
    allow_adaptation: bool = True
    deterministic: bool = False
    batch_invariant: bool = False
    graph_strict_mode: bool = False
    graph_whitelist: tuple[str, ...] = ()
    memory_headroom_mb: float | None = None
    on_fault: str = "raise"
    on_first_use: str = "check"
    fallback_enabled: bool = True
    backend_isolation: tuple[tuple[str, str], ...] = ()
    isolation: FrozenMap = field(default_factory=FrozenMap)
    """Backend → env, path, hide, deadline_s, start_s, memory_mb of its own process; the mode stands above."""
    plan_mode: bool = False
    jit: str = "background"
    breaker: BreakerSettings = BreakerSettings()
    cache: CacheSettings = CacheSettings()
    canary: FrozenMap = field(default_factory=FrozenMap)
    """kernels (patterns), fraction, calls: new kernels that run in shadow before they may be chosen."""
    dispatch_table: str | None = None
    perfdb: FrozenMap = field(default_factory=FrozenMap)
    distributed: FrozenMap = field(default_factory=FrozenMap)
    hub: FrozenMap = field(default_factory=FrozenMap)
    plugins: FrozenMap = field(default_factory=FrozenMap)
    expires_at: float | None = None
    levels: tuple[Rule, ...] = field(default=(), repr=False)
    """Filled by `merge`: the program over all levels. Empty: the program follows from the lists above."""

    def __post_init__(self) -> None:
        if isinstance(self.boosts, Mapping):
            object.__setattr__(self, "boosts", tuple(self.boosts.items()))
        for name in ("on_fault", "on_first_use", "jit"):
            allowed = POLICY[name][0].schema["enum"]
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        if self.levels and not self._levels_agree():
            # dataclasses.replace(policy, prefer=...) on a merged policy would otherwise be ignored without a word.
            raise ValueError("the lists of a merged Policy do not change alone: add a PolicyLayer and merge again")

    def _levels_agree(self) -> bool:
        own = [rule for rule in self.levels if rule not in self.rules]

        def agrees(listed: Iterable[Any], pick: Callable[[Rule], Iterable[Any]]) -> bool:
            """Every entry of a level's list is in the summary, and nothing in the summary is from nowhere."""
            given = {item for rule in self.levels for item in pick(rule)}
            return {item for rule in own for item in pick(rule)} <= set(listed) <= given

        return (
            set(self.rules) <= set(self.levels)
            and agrees(self.locks, lambda rule: () if rule.lock is None else ((rule.match_op, rule.lock),))
            and all(agrees(getattr(self, name), attrgetter(name)) for name in ("deny", "prefer", "avoid", "boosts"))
            and (not self.allow or self.allow in {rule.allow for rule in self.levels})
        )

    @cached_property
    def program(self) -> tuple[Rule, ...]:
        """The rules to evaluate, strongest first."""
        if self.levels:
            return self.levels
        lists = Rule("*", (), self.allow or None, self.deny, self.prefer, self.avoid, self.boosts)
        return level_program(self.rules, self.locks, lists)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What evaluation has worked out for this policy; it dies with it and is no part of its value."""
        return {}

    @cached_property
    def policy_hash(self) -> str:
        """sha256 over the canonical JSON of all that decides. Equal policies from other places hash equal."""
        data: dict[str, Any] = {"program": [rule.to_json(canonical=True) for rule in self.program]}
        for item in fields(self):
            value = getattr(self, item.name)
            # Those that came later count only where they are used: other policies hash as they did before.
            unused = item.name in _LATER and value == _LATER[item.name]
            if not unused and item.name not in _IN_PROGRAM and item.name not in _PLACES:
                data[item.name] = _canonical(value)
        data["graph_whitelist"] = sorted(self.graph_whitelist)
        return digest(data, allow_nan=False, default=str)

    def setting(self, key: str) -> Any:
        """A setting of a group, its default where nobody set it: `canary.calls`."""
        group, _, name = key.partition(".")
        return getattr(self, group).get(name, default(key))

    def locks_by_op(self) -> dict[str, str]:
        """Op glob → kernel id, the strongest statement about each glob, lifted ones left out."""
        strongest = dict(reversed(self.locks)) if self.levels else dict(self.locks)
        return {op: kernel for op, kernel in strongest.items() if kernel}

    def isolation_of(self, backend: str) -> str:
        """in_process, subprocess or auto: the entry for this backend, else the one for "*", else in_process."""
        modes = dict(self.backend_isolation)
        return modes.get(backend, modes.get("*", "in_process"))

    def isolation_entry(self, backend: str) -> Mapping[str, Any]:
        """How this backend's own process is to be set up: its entry over the one for "*"."""
        return {**self.isolation.get("*", {}), **self.isolation.get(backend, {})}

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible form for reports and `lz.get_config`."""
        last = {
            "locks": self.locks_by_op(),
            "boosts": dict(self.boosts),
            "backend_isolation": dict(self.backend_isolation),
            "rules": [rule.to_json() for rule in self.rules],
            "policy_hash": self.policy_hash,
        }
        names = (item.name for item in fields(self) if item.name not in last and item.name != "levels")
        return {name: _canonical(getattr(self, name)) for name in names} | last

    def __hash__(self) -> int:
        return hash(self.policy_hash)

    def __getstate__(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


# Where measurements and tables lie, not what is wished: what they hold has fingerprints of its own.
_PLACES: Final = frozenset(("perfdb", "dispatch_table"))
_LATER: Final[Mapping[str, Any]] = {"canary": FrozenMap(), "on_first_use": "check", "batch_invariant": False}
_IN_PROGRAM: Final = frozenset(
    ("locks", "allow", "deny", "prefer", "avoid", "boosts", "rules", "levels", "expires_at", "graph_whitelist")
)
_LATER_OF_BREAKER: Final = ("backend_kernels", "probe", "probe_timeout_s", "deadline_s")
_PLAIN_BREAKER: Final = BreakerSettings()


def _canonical(value: Any) -> Any:
    if isinstance(value, BreakerSettings):
        # Settings that came later are part of the hash only where they are used: older tables stay valid.
        unused = [name for name in _LATER_OF_BREAKER if getattr(value, name) == getattr(_PLAIN_BREAKER, name)]
        found = asdict(value) | {"cooldown_s": float(value.cooldown_s)}
        return {name: item for name, item in found.items() if name not in unused}
    if isinstance(value, CacheSettings):
        return asdict(value) | {"ttl_s": None if value.ttl_s is None else float(value.ttl_s)}
    return plain(value)


def by_specificity(locks: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Locks with the most specific glob first."""
    return sorted(locks, key=lambda lock: specificity(lock[0]))


def level_program(rules: Iterable[Rule], locks: Iterable[tuple[str, str]], lists: Rule) -> tuple[Rule, ...]:
    """One level as rules: its own rules in order, its locks most specific first, its lists as one rule for all ops."""
    locked = (Rule(match_op=op, lock=kernel, source=lists.source) for op, kernel in by_specificity(locks))
    return (*rules, *locked, *(() if lists.silent else (lists,)))
