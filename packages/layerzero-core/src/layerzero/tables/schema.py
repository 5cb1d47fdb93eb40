"""The file form of a dispatch table. Imported only when a table is read or its JSON Schema is asked for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["SCHEMA_VERSION", "Bucketed", "Op", "TableFile"]

SCHEMA_VERSION = "1.0"
Edge = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Machine(_Strict):
    """Where the table was solved; `signature` decides whether it holds."""

    signature: str = Field(min_length=8)
    device: str
    driver: str | None = None
    torch: str | None = None
    backends: dict[str, str] = Field(default_factory=dict)
    threads: Annotated[int, Field(ge=1)] | None = Field(None, description="of torch, for times on a CPU")


class Bucketed(_Strict):
    """Which calls a plan speaks of."""

    op: str = Field(min_length=1)
    when: dict[str, Any] = Field(default_factory=dict, description="properties of the call that are not defaults")
    sizes: dict[str, int] = Field(description="axis → upper end of its bucket, or the exact size")


class Op(_Strict):
    """The kernel that serves one op of a plan."""

    op: str = Field(min_length=1)
    kernel_id: str = Field(min_length=1)
    median_us: Annotated[float, Field(ge=0)] | None = None
    error: Annotated[float, Field(ge=0)] | None = None
    busy: bool = Field(False, description="others used the machine while the time was taken")


class Plan(_Strict):
    """One bucket and the kernels of its ops; a plan of one call has one op."""

    bucket: Bucketed
    ops: list[Op] = Field(min_length=1, max_length=1)
    jit_artifacts: list[str] = Field(default_factory=list)


class Fallback(_Strict):
    """What happens to a call that no plan covers."""

    mode: Literal["runtime_select"] = "runtime_select"


class TableFile(_Strict):
    """dispatch_table.json."""

    schema_version: Literal["1.0"]
    model_id: str = ""
    hardware_signature: Machine
    policy_hash: str = Field(min_length=8)
    kernels: dict[str, str]
    buckets: dict[str, dict[str, list[Edge]]]
    plans: list[Plan]
    fallback: Fallback = Fallback()
    content_hash: str = Field(min_length=64, max_length=64)
    signature: str | None = None
