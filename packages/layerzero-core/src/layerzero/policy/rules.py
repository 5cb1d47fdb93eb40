"""What a policy says about one kernel for one call. Pure functions, used by selection.

The program of a Policy (see `Policy.program`) is read in order, strongest level first. Of the rules that name the op
and whose conditions hold:

- every deny counts, whatever level it comes from;
- the first lock decides, the first allow list decides;
- the first prefer or avoid that matches the kernel decides (inside one rule the more specific pattern, then avoid);
  a preferred kernel comes before every other that fits, one preferred by a stronger rule first of all;
- all boosts that match the kernel are added.

A condition on a field that the call does not have never holds, not even `!=`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from operator import ge, gt, le, lt
from typing import Any, Final

from layerzero.model.config import AVOID_BONUS, ORDERING, PREFER_BONUS, Condition, Policy, Rule, Scalar, specificity

Getter = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says about one kernel.

    `denied_by` names the pattern and its source. `allowed` is False when an allow list holds that does not match the
    kernel; `allow_list` is that list, () when there is none. `bonus` is the sum of prefer, avoid and boosts.
    `preferred` is 0 for a kernel that no rule prefers, and the greater the stronger the rule that does.
    `locked_to` is the kernel id the op is locked to, whichever kernel was asked about.
    """

    denied_by: str | None = None
    allowed: bool = True
    allow_list: tuple[str, ...] = ()
    bonus: float = 0.0
    avoided: bool = False
    preferred: int = 0
    locked_to: str | None = None


NEUTRAL: Final = Verdict()
"""The verdict of a policy that says nothing about a kernel."""
_MEMO_LIMIT: Final = 256


@lru_cache(maxsize=65_536)
def matches(pattern: str, kernel_id: str, backend: str) -> bool:
    """Whether a glob names this kernel, by its id or by its backend."""
    return fnmatchcase(kernel_id, pattern) or fnmatchcase(backend, pattern)


def matches_any(patterns: Iterable[str], kernel_id: str, backend: str) -> str | None:
    """The most specific pattern that names the kernel, or None."""
    found = [pattern for pattern in patterns if matches(pattern, kernel_id, backend)]
    return (found[0] if len(found) == 1 else min(found, key=specificity)) if found else None


class Judge:
    """The rules that hold for one call, ready to be asked about many kernels. Remembers its verdicts."""

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.rules = rules
        self._judged = cache(self._judge)
        lock = next((rule.lock for rule in rules if rule.lock is not None), None)
        self.locked_to = lock or None
        silent = all(not (r.allow or r.deny or r.prefer or r.avoid or r.boosts) for r in rules)
        self._neutral = (Verdict(locked_to=self.locked_to) if self.locked_to else NEUTRAL) if silent else None

    def __call__(self, kernel_id: str, backend: str) -> Verdict:
        return self._neutral or self._judged(kernel_id, backend)

    def _judge(self, kernel_id: str, backend: str) -> Verdict:
        denied_by: str | None = None
        allow_list: tuple[str, ...] | None = None
        preference: float | None = None
        preferred = 0
        boosts: list[float] = []
        for weaker, rule in zip(range(len(self.rules), 0, -1), self.rules, strict=True):
            if denied_by is None and rule.deny and (hit := matches_any(rule.deny, kernel_id, backend)):
                denied_by = f"{hit} ({rule.source})" if rule.source else hit
            if allow_list is None and rule.allow is not None:
                allow_list = rule.allow
            if preference is None and (rule.prefer or rule.avoid):
                preference = _preference(rule, kernel_id, backend)
                preferred = weaker if preference == PREFER_BONUS else 0
            boosts += [points for pattern, points in rule.boosts if matches(pattern, kernel_id, backend)]
        return Verdict(
            denied_by=denied_by,
            allowed=not allow_list or matches_any(allow_list, kernel_id, backend) is not None,
            allow_list=allow_list or (),
            # fsum: the same boosts in another order must not give another score.
            bonus=math.fsum((preference or 0.0, *boosts)),
            avoided=preference == AVOID_BONUS,
            preferred=preferred,
            locked_to=self.locked_to,
        )


def _preference(rule: Rule, kernel_id: str, backend: str) -> float | None:
    liked = matches_any(rule.prefer, kernel_id, backend)
    shunned = matches_any(rule.avoid, kernel_id, backend)
    if liked is None and shunned is None:
        return None
    if shunned is None or (liked is not None and specificity(liked) < specificity(shunned)):
        return PREFER_BONUS
    return AVOID_BONUS


def judge(policy: Policy, op: str, getter: Getter) -> Judge:
    """Check every condition once for a call; the result is asked per kernel. `getter` is `Context.get` or the like."""
    held = tuple(
        index
        for index, rule in _for_op(policy, op)
        if not rule.when or all(holds(item, getter(item.field)) for item in rule.when)
    )
    # Few different sets of rules ever hold, and a World lives through many selections: keep what was worked out.
    judges: dict[Any, Judge] = policy.memo
    known = judges.get(held)
    if known is None:
        if len(judges) > _MEMO_LIMIT:
            judges.clear()
        known = judges[held] = Judge(tuple(policy.program[index] for index in held))
    return known


def evaluate(policy: Policy, op: str, kernel_id: str, backend: str, getter: Getter) -> Verdict:
    """The verdict on one kernel for one call. Many kernels, one call: use `judge`."""
    return judge(policy, op, getter)(kernel_id, backend)


def _for_op(policy: Policy, op: str) -> Iterator[tuple[int, Rule]]:
    return (
        (index, rule)
        for index, rule in enumerate(policy.program)
        if rule.match_op in ("*", op) or fnmatchcase(op, rule.match_op)
    )


_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {">": gt, ">=": ge, "<": lt, "<=": le}


# -- conditions -----------------------------------------------------------------------------------------------------
def holds(condition: Condition, value: object) -> bool:
    """Whether a condition is true of a field's value. A set or sequence satisfies it through any of its members."""
    if value is None:
        return False
    if isinstance(value, (set, frozenset, list, tuple)):
        if condition.operator == "!=":
            return all(holds(condition, item) for item in value)
        return any(holds(condition, item) for item in value)
    operator, operand = condition.operator, condition.operand
    if operator == "in":
        return any(_equal(value, item) for item in operand)  # type: ignore[union-attr]  # Condition keeps it a tuple
    if operator == "==":
        return _equal(value, operand)
    if operator == "!=":
        return not _equal(value, operand)
    if operator == "glob":
        return fnmatchcase(_text(value), str(operand))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return _COMPARE[operator](value, operand)


def _equal(value: object, operand: object) -> bool:
    if isinstance(value, bool) or isinstance(operand, bool):
        return value is operand  # true is not 1
    if isinstance(value, (int, float)) and isinstance(operand, (int, float)):
        return value == operand
    if isinstance(operand, str) and not isinstance(value, (int, float)):
        return _text(value) == operand
    return False


def _text(value: object) -> str:
    """How a value is spelled in a policy: `true`, and dtypes with or without the `torch.` of their repr."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value).removeprefix("torch.")


_COMPARISON: Final = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*(.*?)\s*", re.DOTALL)


def parse_conditions(field: str, wanted: object) -> tuple[Condition, ...]:
    """The conditions a `when` entry means. Raises ValueError saying what is expected.

    64, "64", "cuda"     equal            "float*"          glob
    ">=64", "!=cuda"     comparison       ">=64, <256"      all of them
    [64, 128]            any of them
    """
    if isinstance(wanted, (list, tuple)):
        if not wanted:
            raise ValueError("expected at least one value, got an empty list")
        return (Condition(field, "in", tuple(_scalar(item) for item in wanted)),)
    value = _scalar(wanted)
    if not isinstance(value, str):
        return (Condition(field, "==", value),)
    if not _COMPARISON.match(value):
        if any(mark in value for mark in "*?["):
            return (Condition(field, "glob", value.strip()),)
        return (Condition(field, "==", _literal(value.strip())),)
    parsed = []
    for part in value.split(","):
        found = _COMPARISON.fullmatch(part)
        if found is None or not found[2]:
            raise ValueError(f"expected comparisons such as '>=64' or '>=64, <256', got {value!r}")
        operand = _literal(found[2])
        if found[1] in ORDERING and (isinstance(operand, (str, bool))):
            raise ValueError(f"{found[1]} needs a number, got {found[2]!r}")
        parsed.append(Condition(field, found[1], operand))
    return tuple(parsed)


def _scalar(value: object) -> Scalar:
    if isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(f"expected a number, a text, true or false, or a list of these, got {type(value).__name__}")


def _literal(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- what the hot key must respect ----------------------------------------------------------------------------------
def thresholds(policy: Policy, op: str, field: str) -> list[int]:
    """Where the rules for this op cut a whole-number field: each entry is the last value of the lower side.

    Between two neighbouring cuts no condition changes its mind. `>=1024` gives 1023, `>1024` gives 1024, `==n` gives
    n-1 and n. Globs cannot be cut: ask `has_exact`.
    """
    cuts: set[int] = set()
    for item in _conditions(policy, op, field):
        for operand in item.operand if isinstance(item.operand, tuple) else (item.operand,):
            if isinstance(operand, bool) or not isinstance(operand, (int, float)):
                continue
            if item.operator in (">=", "<"):
                cuts.add(math.ceil(operand) - 1)
            elif item.operator in (">", "<="):
                cuts.add(math.floor(operand))
            elif operand == math.floor(operand):
                cuts.update((int(operand) - 1, int(operand)))
    return sorted(cuts)


def has_exact(policy: Policy, op: str, field: str) -> bool:
    """Whether a rule for this op asks something of the field that no cut can express: its value must be keyed."""
    return any(item.operator == "glob" for item in _conditions(policy, op, field))


def _conditions(policy: Policy, op: str, field: str) -> Iterator[Condition]:
    return (item for _, rule in _for_op(policy, op) for item in rule.when if item.field == field)
