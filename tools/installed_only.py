"""Asserts that this environment holds only what the named packages declare.

    python -m tools.installed_only layerzero-core layerzero-flashattn

Run right after an install, before test tools come in: whatever is installed must follow from the dependencies of the
named packages, and no vendor library may be among it unless torch itself brings it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["check", "closure", "main"]

VENDORS = re.compile(
    r"^(flash-attn.*|flashinfer-.*|xformers|liger-kernel|triton|zentorch|intel-extension-for-pytorch|torchao|vllm.*|sglang"
    r"|tokenizers|tiktoken|sentencepiece|transformers|diffusers|kernels|huggingface-hub|nvidia-.*|cuda-.*)$"
)
# what a fresh virtual environment holds before anything is installed
INSTALLERS = frozenset({"pip", "setuptools", "wheel"})


def closure(roots: Iterable[str], requires: dict[str, tuple[str, ...]]) -> set[str]:
    """Every project that follows from `roots`, by the dependencies that hold here and without any extra asked for."""
    found: set[str] = set()
    waiting = [(canonicalize_name(root), frozenset[str]()) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        for line in requires.get(name, ()):
            wanted = Requirement(line)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return found


def check(roots: Sequence[str], requires: dict[str, tuple[str, ...]]) -> list[str]:
    """What is wrong, one line each: a named package that is missing, a stranger, a vendor library."""
    names = [canonicalize_name(root) for root in roots]
    expected = closure(names, requires)
    torch_brings = closure(["torch"], requires)
    problems = [f"{name} is not installed" for name in names if name not in requires]
    for name in sorted(requires):
        if name not in expected and name not in INSTALLERS:
            problems.append(f"{name} is installed, but {' and '.join(names)} do not ask for it")
        elif VENDORS.match(name) and name not in torch_brings:
            problems.append(f"{name} is a vendor library; it belongs into an extra")
    return problems


def _installed(found: Iterable[Distribution]) -> dict[str, tuple[str, ...]]:
    return {canonicalize_name(d.metadata["Name"]): tuple(d.requires or ()) for d in found}


def main(argv: Sequence[str]) -> int:
    """0 when the environment holds what it should and no more, else 1."""
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    requires = _installed(distributions())
    problems = check(argv, requires)
    print("\n".join(problems) or f"{len(requires)} distributions, all asked for by {' and '.join(argv)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
