"""One measurement: which kernel, for which calls, on what; and what was found."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

from layerzero.errors import InvalidInputError, invalid
from layerzero.model.context import Context
from layerzero.model.situation import situation

# A spread (standard deviation over median) at which a measurement counts half, and one beyond which it counts nothing.
HALF_TRUST = 0.25
NO_TRUST = 1.0


# The first selection of a process that has a database waits for these classes: a tuple is made in a third of the time.
class Platform(NamedTuple):
    """Everything under a kernel that a time depends on. A change of any field makes old times worthless here.

    device   the silicon's own signature; `family` is what similar devices share ("sm90", "cpu-avx512")
    threads  of torch, where they compute (a CPU); 0 where they do not, and for rows of before they were written down:
             those count where a process uses as many threads as torch does by itself
    """

    device: str
    family: str
    driver: str = ""
    runtime: str = ""
    torch: str = ""
    threads: int = 0


class Surroundings(NamedTuple):
    """The state of the machine while measuring; unknown values are None."""

    temperature_c: float | None = None
    power_w: float | None = None
    memory_used: float | None = None
    shared: bool | None = None

    @property
    def bucket(self) -> str:
        """A coarse word for it, so that like can be compared with like."""
        hot = "unknown" if self.temperature_c is None else "hot" if self.temperature_c >= 80 else "cool"
        watts = "unknown" if self.power_w is None else f"{self.power_w // 100 * 100:.0f} W"
        full = "unknown" if self.memory_used is None else "full" if self.memory_used >= 0.9 else "free"
        return f"{hot}/{watts}/{full}/{'shared' if self.shared else 'alone'}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kernel in one bucket of calls on one platform. Times in µs; `max_error` against the reference.

    bucket   the calls it speaks for, as `bucket_of` spells them
    mode     how it was run: eager or graph, hot or cold cache ("eager/hot")
    """

    op: str
    bucket: str
    kernel_id: str
    kernel_version: str
    backend_version: str
    platform: Platform
    median_us: float
    p95_us: float
    p99_us: float
    variance: float
    samples: int
    max_error: float | None = None
    mode: str = "eager/hot"
    surroundings: Surroundings = Surroundings()  # noqa: RUF009
    measured_at: float = 0.0

    def __post_init__(self) -> None:
        for name in ("median_us", "p95_us", "p99_us", "variance", "measured_at"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise InvalidInputError(f"{name} is {value}", code="VALUE_INVALID", value=str(value), limit=">= 0")
        if self.samples < 1 or not self.median_us > 0:
            given = f"{self.samples}, {self.median_us}"
            raise invalid("VALUE_INVALID", given, message="a measurement needs samples and a time")

    @property
    def key(self) -> bytes:
        """What this is a measurement of: 16 bytes, equal for measurements that replace each other."""
        threads = self.platform.threads
        return _digest(*_KEY(self), str(threads)) if threads else _digest(*_KEY(self))

    @property
    def place(self) -> bytes:
        """Where a lookup finds it: op, bucket and mode, whatever the kernel and the machine."""
        return place_of(self.op, self.bucket, self.mode)

    @property
    def spread(self) -> float:
        return math.sqrt(self.variance) / self.median_us

    def values(self) -> tuple[Any, ...]:
        """All fields flat, in a fixed order: what a row holds and its checksum covers."""
        return _VALUES(self)

    def checksum(self) -> int:
        """CRC over every field: SQLite does not notice 10 to 40 % of flipped bits itself."""
        return checksum_of(self.values())

    def to_json(self) -> dict[str, Any]:
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**plain, "platform": self.platform._asdict(), "surroundings": self.surroundings._asdict()}


_INNER: dict[str, Any] = {"platform": Platform, "surroundings": Surroundings}
FLAT_NAMES = [
    f"{item.name}.{part}" if part else item.name
    for item in fields(Measurement)
    for part in (_INNER[item.name]._fields if item.name in _INNER else ("",))
]
"""Every field by its dotted name, in the order of the fields."""
# A query reads and checks every row it finds, so these are looked up in one step each.
_VALUES = attrgetter(*FLAT_NAMES)
_KEY = attrgetter(
    "op", "bucket", "kernel_id", "kernel_version", "backend_version", "mode",
    *(f"platform.{name}" for name in Platform._fields if name != "threads"),
)  # fmt: skip
_THREADS = FLAT_NAMES.index("platform.threads")
_encode = json.JSONEncoder(separators=(",", ":")).encode


def checksum_of(values: tuple[Any, ...] | list[Any]) -> int:
    """The checksum of a row's values, in the order of `Measurement.values`.

    A row without a number of threads has the checksum (and the key) it had before those were written down.
    """
    threads = values[_THREADS]
    if type(threads) is int and not threads:
        values = [*values[:_THREADS], *values[_THREADS + 1 :]]
    return zlib.crc32(_encode(values).encode())


def place_of(op: str, bucket: str, mode: str = "eager/hot") -> bytes:
    """The lookup key of a bucket of calls."""
    return _digest(op, bucket, mode)


def weight(measurement: Measurement) -> float:
    """How far to believe a time: 1 for a steady one, a half at a spread of a quarter, nothing beyond one."""
    spread = measurement.spread
    return 0.0 if spread >= NO_TRUST else 1.0 / (1.0 + (spread / HALF_TRUST) ** 2)


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode()).digest()[:16]


# Sizes that vary with traffic rather than with the model.
GROWING = frozenset({"batch", "seq_len_q", "seq_len_k", "rows", "tokens", "tokens_k", "num_blocks"})


def upper(size: int) -> int:
    """The end of the bucket of a size: the next power of two; 0 and 1 stand for themselves."""
    return size if size < 2 else 1 << (size - 1).bit_length()


def bucket_of(ctx: Context, growing: Iterable[str] = ()) -> str:
    """The bucket of a call as stable text. `growing` names further axes of the op that vary from call to call."""
    axes = GROWING | set(growing)
    sizes = {name: upper(size) if name in axes else size for name, size in ctx.dims}
    return json.dumps({"sizes": sizes, "when": dict(situation(ctx))}, sort_keys=True, separators=(",", ":"))


SURE = 2.0  # standard errors
_MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean
_WIDEST = 0.05  # the band ends here, however unsteady the times are


def median_error(variance: float, samples: int) -> float:
    """Standard error of the median of so many samples."""
    return _MEDIAN_ERROR * math.sqrt(variance / samples)


def alike(best_us: float, best_error: float, us: float, error: float, noise: float) -> bool:
    """Whether a time is inside the noise band of the best one.

    The band is `noise`, or two standard errors of the difference where the times are less steady than that, but never
    more than five percent: a kernel that is further behind is not chosen for its name.
    """
    spread = SURE * math.hypot(best_error, error) / best_us
    return us <= best_us * (1.0 + max(noise, min(_WIDEST, spread)))
