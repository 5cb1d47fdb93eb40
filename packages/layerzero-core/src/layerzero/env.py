"""The environment as read: every LAYERZERO_* variable of the settings table (`layerzero.settings`).

Nothing else in LayerZero looks at os.environ for settings. A LAYERZERO_* name that is not known here may belong to a
plugin, so it is no error: `Env.unknown` keeps it with the nearest known name, for `lz doctor` to show.

Two families carry a name inside the variable's name, in any case, with `__` for the dot:
`LAYERZERO_LOCK_ATTENTION=sdpa.attention.flash`, `LAYERZERO_BOOST_SDPA__ATTENTION__FLASH=15`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any, Final

from layerzero.errors import ConfigurationError, nearest
from layerzero.settings import VARIABLES, Setting

PREFIX: Final = "LAYERZERO_"
_FAMILIES: Final = {PREFIX + name.removesuffix("<NAME>"): item for name, item in VARIABLES.items() if "<" in name}
_SINGLE: Final = {PREFIX + name: item for name, item in VARIABLES.items() if "<" not in name}

if TYPE_CHECKING:

    class Env:
        """The environment as read: a field for each variable. None means: not set, the next source decides."""

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    _rest = [(name, tuple, field(default=())) for name in ("locks", "boosts", "unknown")]
    Env = make_dataclass(
        "Env",
        [*((item.attribute, object, field(default=item.unset)) for item in _SINGLE.values()), *_rest],
        frozen=True,
        namespace={"__module__": __name__},
    )


def changed(env: Env, **values: Any) -> Env:
    """The same environment with other values for some variables."""
    return Env(**{**vars(env), **values})


def read(environ: Mapping[str, str] | None = None) -> Env:
    """Read all LAYERZERO_* variables. An empty value counts as not set, except LAYERZERO_PLUGINS (no plugin at all)."""
    values: dict[str, Any] = {}
    unknown: list[tuple[str, str | None]] = []
    named: dict[str, dict[str, Any]] = {family: {} for family in _FAMILIES}
    given = (os.environ if environ is None else environ).items()
    for name, raw in sorted((name, text.strip()) for name, text in given if name.startswith(PREFIX)):
        family = next((prefix for prefix in _FAMILIES if name.startswith(prefix) and name != prefix), None)
        if family is not None and raw:
            target = name.removeprefix(family).lower().replace("__", ".")
            if target in named[family]:
                text = f"two variables {family}… name {target}"
                raise ConfigurationError(text, value=target, limit="one", hint="unset one")
            named[family][target] = _parse(name, raw, _FAMILIES[family])
        elif name in _SINGLE and (raw or name == "LAYERZERO_PLUGINS"):
            values[_SINGLE[name].attribute] = _parse(name, raw, _SINGLE[name])
        elif family is None and name not in _SINGLE:
            near = nearest(name.removeprefix(PREFIX), [known.removeprefix(PREFIX) for known in _SINGLE], 1)
            unknown.append((name, PREFIX + near[0] if near else None))
    for family, found in named.items():
        values[_FAMILIES[family].key] = tuple(sorted(found.items()))
    return Env(**values, unknown=tuple(unknown))


def read_one(attribute: str) -> Any:
    """One variable by its name in `Env`, for what is needed before all others are read."""
    name = PREFIX + attribute.upper()
    raw = os.environ.get(name, "").strip()
    return _parse(name, raw, _SINGLE[name]) if raw else _SINGLE[name].unset


def _parse(name: str, raw: str, setting: Setting) -> Any:
    try:
        return (setting.said or setting.kind).parse(raw)
    except ValueError as expected:
        text = f"{name}={raw!r} is not understood, expected {expected}"
        raise ConfigurationError(text, value=f"{name}={raw}", limit=str(expected)) from None
