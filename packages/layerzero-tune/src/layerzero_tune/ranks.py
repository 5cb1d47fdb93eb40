"""Work split over ranks: each tunes its share on its own device, and all end with the same merged result.

Under torchrun (RANK and WORLD_SIZE are set) a process group of the host backend, gloo, is used, the program's own
where it has one. Anywhere else there is one rank, and nothing is imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that work together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _group: Any = None
    _own: bool = False

    @staticmethod
    def of_process() -> Ranks:
        """From the environment that torchrun sets, or from the group that the program has joined already."""
        import torch.distributed as dist

        if not dist.is_available():
            return Ranks()
        local = int(os.environ.get("LOCAL_RANK", "0") or 0)
        if dist.is_initialized():
            size = dist.get_world_size()
            return Ranks(dist.get_rank(), size, local, _host_group()) if size > 1 else Ranks()
        if int(os.environ.get("WORLD_SIZE", "1") or 1) < 2 or "RANK" not in os.environ:
            return Ranks()
        dist.init_process_group("gloo")
        return Ranks(dist.get_rank(), dist.get_world_size(), local, None, True)

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of a list that all ranks hold: every size-th, so that each gets large and small ones."""
        return list(items[self.rank :: self.size])

    def gathered(self, mine: Item) -> list[Item]:
        """What every rank found, in the order of ranks, on all of them."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def close(self) -> None:
        if self._own:
            import torch.distributed as dist

            dist.destroy_process_group()


def _host_group() -> Any:
    """A group that carries Python objects: the program's own on the CPU, else one beside it."""
    import torch.distributed as dist

    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
