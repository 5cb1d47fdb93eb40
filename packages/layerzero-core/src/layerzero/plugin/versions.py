"""Whether a version lies in a specifier (PEP 440), without `packaging` where numbers alone decide.

Importing packaging takes ten milliseconds, a fifth of the first call's time; nearly every installed version is numbers
with dots, and nearly every range bounds them from below and above.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

_Release = tuple[int, ...]
# Longer operators first: ">=1" begins with ">" too.
_OPERATORS: dict[str, Callable[[_Release, _Release], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def contains(specifier: str, version: str) -> bool:
    """Whether `version` is in the range: a pre-release may be, since somebody chose it; what is no version never is."""
    plain = _plainly(specifier, version)
    if plain is not None:
        return plain
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _plainly(specifier: str, version: str) -> bool | None:
    """The answer where every version is numbers with dots; None leaves the question to packaging."""
    here = _release(version)
    if here is None:
        return None
    answer = True
    for clause in specifier.split(",") if specifier else ():
        sign = next((known for known in _OPERATORS if clause.startswith(known)), "")
        bound = _release(clause.removeprefix(sign)) if sign else None
        if bound is None:
            return None
        answer = answer and _OPERATORS[sign](here, bound)
    return answer


def _release(text: str) -> _Release | None:
    """The numbers, without zeros at the end (1.0 is 1); None for anything but ASCII digits and dots."""
    parts = text.split(".")
    if not (text.isascii() and all(part.isdigit() for part in parts)):
        return None
    numbers = [int(part) for part in parts]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
