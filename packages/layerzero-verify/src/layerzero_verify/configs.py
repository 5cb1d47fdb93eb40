"""The small models of the ladder, each there to show one kind of mistake."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.errors import UnknownNameError

__all__ = ["CONFIGS", "Config", "named"]


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a small decoder. `purpose` says which mistakes it is there for."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    purpose: str
    rope: bool = True
    vocab: int = 97

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def ffn(self) -> int:
        """Width of the gated MLP."""
        return 2 * self.hidden


CONFIGS: dict[str, Config] = {
    config.name: config
    for config in (
        Config("tiny", 64, 2, 2, 2, "the baseline"),
        Config("gqa", 128, 8, 2, 2, "grouped query heads"),
        Config("deep", 64, 2, 2, 6, "errors that add up over layers"),
        Config("wide", 128, 8, 8, 2, "many heads"),
        Config("no_rope", 64, 2, 2, 2, "learned positions only", rope=False),
        Config("medium", 256, 4, 4, 4, "a larger scale"),
    )
}


def named(name: str) -> Config:
    """A config by name, or an error that lists them."""
    if name not in CONFIGS:
        raise UnknownNameError(f"no config {name!r}", code="VALUE_INVALID", value=name, limit=sorted(CONFIGS))
    return CONFIGS[name]
