"""Attributes replaced on living objects, with a record that puts back the very same ones."""

from __future__ import annotations

from typing import Any

__all__ = ["Changes"]


class _Absent:
    """Stands for "had none". A class, since copying a patched model copies the record and must keep it the same."""


class Changes:
    """A list of what was replaced where. `undo` goes backwards, so that a thing changed twice ends as it began.

    Only what an object holds itself is recorded: an attribute that came from its class is deleted at the end, which
    brings the class's own back.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give `owner` another attribute, and remember the one it has."""
        self._made.append((owner, name, vars(owner).get(name, _Absent)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._made:
            owner, name, before = self._made.pop()
            if before is _Absent:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __len__(self) -> int:
        return len(self._made)
