"""The policy file, as pydantic models: `layerzero.yaml`, `layerzero.toml`, `[tool.layerzero]`.

Imported only by the load functions, never at `import layerzero`. Types are strict (no "yes" for true), unknown keys
are errors. The descriptions end up in the exported JSON Schema, which editors show while a user types.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
    field_validator,
)

from layerzero.model.config import ISOLATION_MODES
from layerzero.policy.layers import is_kernel_id
from layerzero.policy.rules import parse_conditions

__all__ = ["PolicyFile", "json_schema"]


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _pattern(value: str) -> str:
    if not value.strip() or value != value.strip():
        raise ValueError(f"expected a glob over kernel ids or backend names, got {value!r}")
    return value


def _kernel(value: str | None) -> str | None:
    if value is not None and not is_kernel_id(value):
        raise ValueError(f"expected a kernel id such as sdpa.attention.flash, got {value!r}")
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value}")
    return value


def _same_for_all(value: object) -> object:
    return {"*": value} if isinstance(value, str) else value


def _folder(value: str) -> str:
    if not os.path.isabs(value):
        raise ValueError(f"expected an absolute path, got {value!r}")
    return value


Folder = Annotated[str, AfterValidator(_folder)]
Pattern = Annotated[str, AfterValidator(_pattern)]
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Patterns = Annotated[list[Pattern], BeforeValidator(_one_or_many), WithJsonSchema(_TEXTS)]
KernelId = Annotated[str | None, AfterValidator(_kernel)]
Points = Annotated[float, AfterValidator(_finite)]
Mode = Literal["in_process", "subprocess", "auto"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Enclosed(_Strict):
    """How a backend's own process is set up; everything but the mode is for a file that may be trusted."""

    mode: Mode = Field(default="subprocess", description="auto: only where it cannot live in this process")
    env: dict[str, str] = Field(default_factory=dict, description="variables of its process, e.g. LD_LIBRARY_PATH")
    path: list[Folder] = Field(default_factory=list, description="folders its process searches first, absolute")
    hide: list[str] = Field(default_factory=list, description="modules its process does not see")
    deadline_s: Points = Field(default=30.0, gt=0, description="a call without an answer by then is given up")
    start_s: Points = Field(default=120.0, gt=0, description="the same for starting it and importing the vendor")
    memory_mb: Points = Field(default=4096.0, ge=64, description="most shared memory of one call, host and each GPU")


def _with_mode(value: object) -> object:
    return {"mode": value} if isinstance(value, str) else value


_MODE = {"enum": list(ISOLATION_MODES)}
_PER_BACKEND = {"anyOf": [_MODE, Enclosed.model_json_schema()]}
Isolation = Annotated[
    dict[Pattern, Annotated[Enclosed, BeforeValidator(_with_mode)]],
    BeforeValidator(_same_for_all),
    WithJsonSchema({"anyOf": [_MODE, {"type": "object", "additionalProperties": _PER_BACKEND}]}),
]


class Match(_Strict):
    """Which calls a rule speaks about."""

    op: Pattern = Field(default="*", description="glob over op names, e.g. attention*")
    when: dict[str, Any] = Field(
        default_factory=dict,
        description='context field → value, list of values, glob, or comparison such as ">=64, <256"',
    )

    @field_validator("when")
    @classmethod
    def _conditions(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name, wanted in value.items():
            try:
                parse_conditions(name, wanted)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return value


class RuleEntry(_Strict):
    """One rule; rules are read in order."""

    match: Match = Match()
    allow: Patterns | None = Field(default=None, description="only these kernels or backends")
    deny: Patterns = Field(default_factory=list, description="never these")
    prefer: Patterns = Field(default_factory=list, description="+20 points")
    avoid: Patterns = Field(default_factory=list, description="-50 points")
    boosts: dict[Pattern, Points] = Field(default_factory=dict, description="pattern → points added to the score")
    lock: KernelId = Field(default=None, description="the kernel id that must run")


class Breaker(_Strict):
    """When a failing kernel is set aside."""

    failures: int = Field(default=1, ge=1, description="failures that open the breaker")
    cooldown_s: Points = Field(default=30.0, ge=0, description="seconds it stays open")
    successes: int = Field(default=1, ge=1, description="good runs that close it again")
    backend_kernels: int = Field(default=3, ge=1, description="open kernels of a backend that open the backend's own")
    probe: bool = Field(default=True, description="run the backend's self test before it gets traffic again")
    probe_timeout_s: Points = Field(default=60.0, ge=0.1, description="seconds that self test may take")
    deadline_s: Points | None = Field(
        default=None, ge=0.001, description="a call that runs longer is reported and its kernel set aside; null: none"
    )


class Canary(_Strict):
    """New kernels on trial: they run in shadow, beside the kernel that would be chosen without them."""

    kernels: Patterns = Field(default_factory=list, description="kernels or backends on trial")
    fraction: float = Field(default=0.05, gt=0, le=1, description="share of calls they run beside")
    calls: int = Field(default=100, ge=1, description="good comparisons that promote one")


class Cache(_Strict):
    """Bounds of the selection cache."""

    max_entries: int = Field(default=10_000, ge=1)
    ttl_s: Points | None = Field(default=None, ge=0, description="seconds an entry lives; null: for ever")


class PerfDB(_Strict):
    """Measured kernel times."""

    enabled: bool = True
    path: str | None = Field(default=None, description="file; default: in the user's cache directory")
    auto_tune: bool = Field(default=False, description="measure kernels that have no times yet")
    tune_samples: int = Field(default=20, ge=1)
    ttl_s: Points | None = Field(default=None, ge=0, description="seconds a measurement is believed; null: for ever")
    drift_s: Points | None = Field(
        default=None, ge=0, description="seconds between two checks that a measured kernel is still as fast; null: none"
    )


class Distributed(_Strict):
    """How ranks agree."""

    mode: Literal["rank0_broadcast", "independent"] = "rank0_broadcast"
    tp_invariant: bool = Field(default=False, description="only kernels whose result does not depend on the TP size")
    wait_s: Points = Field(default=1.0, ge=0, description="seconds a rank waits for the first rank's choice")


class Plugins(_Strict):
    """Which installed plugins are loaded."""

    allow: Patterns | None = Field(
        default=None, description="only these; refused in a file found in the working directory"
    )
    deny: Patterns = Field(default_factory=list, description="never these")


class PolicyFile(_Strict):
    """The whole file. Every key may be absent."""

    version: Literal[1] = Field(default=1, description="version of this format")
    enabled: bool = Field(default=True, description="false: only fallbacks run, as inside lz.disabled()")
    fallback_enabled: bool = Field(default=True, description="whether the reference may run when nothing else fits")
    locks: dict[Pattern, KernelId] = Field(default_factory=dict, description="op glob → kernel id, null lifts a lock")
    allow: Patterns = Field(default_factory=list, description="only these kernels or backends; empty: all")
    deny: Patterns = Field(default_factory=list, description="never these; adds up over all levels")
    prefer: Patterns = Field(default_factory=list, description="+20 points")
    avoid: Patterns = Field(default_factory=list, description="-50 points")
    boosts: dict[Pattern, Points] = Field(default_factory=dict, description="pattern → points added to the score")
    rules: list[RuleEntry] = Field(default_factory=list, description="conditional wishes, read in order")
    strict_mode: bool = Field(default=False, description="refuse implicit layout and dtype transforms")
    allow_adaptation: bool = Field(default=True, description="allow transforms, their cost counted in the score")
    deterministic: bool = Field(default=False, description="only deterministic kernels")
    graph_strict_mode: bool = Field(default=False, description="in a capture, only whitelisted kernels")
    graph_whitelist: Patterns = Field(default_factory=list, description="kernels known to be safe in a capture")
    memory_headroom_mb: Points | None = Field(default=None, ge=0, description="MiB of device memory to keep free")
    on_fault: Literal["raise", "fallback"] = Field(default="raise", description="what a locked kernel's failure does")
    on_first_use: Literal["check", "off"] = Field(
        default="check",
        description="a kernel without proof: hold its first answer against the baseline, or use it unchecked",
    )
    isolation: Isolation = Field(
        default_factory=dict,
        description="where backends run: one mode for all, backend → mode, or backend → mode and surroundings",
    )
    jit: Literal["background", "block", "off"] = Field(
        default="background",
        description="a kernel that is not compiled yet: compile it beside the requests, make the call wait, or neither",
    )
    plan_mode: bool = Field(default=False, description="plan whole blocks of ops together")
    breaker: Breaker = Breaker()
    cache: Cache = Cache()
    canary: Canary = Canary()
    dispatch_table: str | None = Field(default=None, min_length=1, description="table of lz solve to obey")
    perfdb: PerfDB = PerfDB()
    distributed: Distributed = Distributed()
    hub: dict[str, JsonValue] = Field(default_factory=dict, description="settings of layerzero-hub, checked there")
    plugins: Plugins = Plugins()


def known_keys(place: tuple[str | int, ...]) -> list[str]:
    """The keys allowed at a place of the file, for "did you mean"."""
    if len(place) == 2 and place[0] == "isolation":
        return list(Enclosed.model_fields)
    model: type[BaseModel] | None = PolicyFile
    for part in place:
        if isinstance(part, int):
            continue
        entry = model.model_fields.get(part) if model is not None else None
        inner = None if entry is None else entry.annotation
        if part == "rules":
            inner = RuleEntry
        model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return [] if model is None else list(model.model_fields)


def json_schema() -> Mapping[str, Any]:
    """JSON Schema of the policy file, for editors and for `lz policy schema`."""
    schema = PolicyFile.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "LayerZero policy", **schema}
