"""What a CPU case is: contestants that do the same work, what they are measured against, and the goals."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import layerzero as lz

__all__ = ["Asked", "Call", "Case", "Goal", "Peer", "asked", "in_turn"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class Goal:
    """The kernel shall be at least `factor` times as fast as `against` ("eager"), or reach that share of the "floor".

    Through the public function, call overhead included, the share `through` of that is asked for.
    """

    against: str
    factor: float
    through: float = 0.9


@dataclass(frozen=True)
class Asked:
    """A public op with its arguments, of which there may be several sets, taken in turn: what `lz` is asked for."""

    op: str
    sets: Sequence[tuple[Any, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Any, ...]:
        """The first set."""
        return self.sets[0]

    def call(self, backend: str | None = None) -> Call:
        """Through the public function, a backend or kernel forced or not."""
        options = dict(self.options) if backend is None else {**self.options, "backend": backend}
        return in_turn(functools.partial(getattr(lz, self.op), **options), self.sets)

    def kernel(self) -> str:
        """The kernel that would run now."""
        return lz.which(self.op, *self.args, **self.options)


def asked(op: str, *args: Any, **options: Any) -> Asked:
    """One set of arguments."""
    return Asked(op, [args], options)


def in_turn(run: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> Call:
    """Each call takes the next set of arguments."""
    if len(sets) == 1:
        return functools.partial(run, *sets[0])
    order = staggered(sets)
    return lambda: run(*next(order))


_begun = itertools.count()


def staggered(sets: Sequence[Any]) -> Iterator[Any]:
    """Round and round, each time from another place: nobody finds in the cache what its neighbour has just read."""
    first = next(_begun) * (len(sets) // 2 + 1) % len(sets)
    return itertools.cycle([*sets[first:], *sets[:first]])


@dataclass(frozen=True)
class Peer:
    """What another library does for the same op.

    call   what is timed
    once   what is checked, where that is not the same: a kernel that writes into its inputs is given copies of them
    truth  what its result must be, where that is not LayerZero's reference; then the generic row of the tolerance table
           holds
    exact  for a product that rounds x as well: what it gives in exact arithmetic. Its own result may lie no further
           from the reference than that does, root mean square, a quarter more allowed for ties
    """

    name: str
    call: Call
    once: Call | None = None
    truth: Call | None = None
    exact: Call | None = None


@dataclass(frozen=True)
class Case:
    """One line of the table. `make` gives the contestants by name.

    Always among them: "eager" (what a torch user writes) and "lz" (what is asked of the public function; call overhead
    is included). Usual: "direct" (our kernel's adapter alone), "floor" (the same bytes, moved by the same threads and
    nothing else: `copied` or `read` of layerzero's own library). Other libraries come from cpu_peers.py.
    """

    group: str
    name: str
    make: Callable[[], dict[str, Call | Asked]]
    goals: tuple[Goal, ...] = ()


# contestants that are LayerZero itself, or no contestant at all
OURS = ("lz", "lz untuned", "direct", "floor", "torch codes")


def others(names: Iterable[str]) -> list[str]:
    """The peers among contestants; torch eager is one."""
    return [name for name in names if name not in OURS]
