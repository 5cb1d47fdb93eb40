"""What a device is, as a value: `DeviceSpec`, and the data that turns an SM number into a generation.

Nothing here looks at the machine but `DeviceSpec.detect`. `layerzero.device.probe` fills a `DeviceSpec` from torch,
`layerzero.device.catalogue` from a table, so selection for any GPU can be tried on a laptop.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerzero.errors import CapabilitiesError
from layerzero.json_form import Plain, digest

if TYPE_CHECKING:
    import torch


class Platform(enum.StrEnum):
    """Kind of device, in torch's words where torch has one."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    MPS = "mps"
    XPU = "xpu"
    HPU = "hpu"
    META = "meta"
    OTHER = "other"


class GPUGeneration(enum.IntEnum):
    """NVIDIA generations, ordered by age. UNKNOWN sorts first."""

    UNKNOWN = 0
    TURING = 1
    AMPERE = 2
    ADA_LOVELACE = 3
    HOPPER = 4
    BLACKWELL = 5


class InstructionFamily(enum.StrEnum):
    """Matrix instructions a kernel is written for; routing asks for these, never for "SM >= x"."""

    NONE = "none"
    MMA = "mma"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"
    MFMA = "mfma"
    AMX = "amx"


# Launch limits shared by every CUDA device LayerZero knows.
CUDA_MAX_GRID = (2**31 - 1, 65535, 65535)
CUDA_MAX_THREADS_PER_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class GenerationRange:
    """One row: SM versions `min_sm` to `max_sm` (inclusive, None = open) and what they are."""

    min_sm: int
    max_sm: int | None
    generation: GPUGeneration
    tensor_core_generation: int
    families: frozenset[InstructionFamily]

    def __contains__(self, sm: int) -> bool:
        return self.min_sm <= sm and (self.max_sm is None or sm <= self.max_sm)


_G = GPUGeneration
_UNKNOWN_ROW = GenerationRange(0, None, _G.UNKNOWN, 0, frozenset())
_MMA = frozenset({InstructionFamily.MMA})

# The tensor-core column is the specification's (Turing 3, Ada 3); NVIDIA itself counts Turing 2 and Ada 4.
# Routing must read the families, which are the hardware's: SM12x is Blackwell without tcgen05.
_DEFAULT_ROWS = (
    GenerationRange(70, 74, _G.UNKNOWN, 1, frozenset()),  # Volta: no enum member, no warp-level mma of today's shape
    GenerationRange(75, 79, _G.TURING, 3, _MMA),
    GenerationRange(80, 87, _G.AMPERE, 3, _MMA),
    GenerationRange(89, 89, _G.ADA_LOVELACE, 3, _MMA),
    GenerationRange(90, 99, _G.HOPPER, 4, _MMA | {InstructionFamily.WGMMA}),
    GenerationRange(100, 119, _G.BLACKWELL, 5, _MMA | {InstructionFamily.TCGEN05}),
    GenerationRange(120, None, _G.BLACKWELL, 5, _MMA),  # beyond what is known: promise only the oldest family
)

_RANGE_TEXT = re.compile(r"^\s*(\d{2,4})\s*(?:(\+)|-\s*(\d{2,4}))?\s*$")


@dataclass(frozen=True, slots=True)
class GenerationMap:
    """SM version → generation, tensor-core generation and instruction families. The first row that fits wins."""

    rows: tuple[GenerationRange, ...] = _DEFAULT_ROWS

    def lookup(self, sm: int | None) -> GenerationRange:
        """The row of an SM version (90 for SM 9.0). Unknown or None gives the UNKNOWN row, never an exception."""
        return next((row for row in self.rows if sm is not None and sm in row), _UNKNOWN_ROW)

    def override(self, descriptor: Mapping[str, Mapping[str, Any]], where: str = "generations") -> GenerationMap:
        """A new map in which the ranges of `descriptor` come first.

        Keys are "89", "75-79" or "130+"; values may set `generation`, `tensor_core_generation` and
        `instruction_families`, and inherit what they leave out from the row of their first SM. This is the
        `generation_map` of a capabilities descriptor, which has checked the values. Raises CapabilitiesError naming
        the wrong range, below `where`.
        """
        rows = tuple(self._row(key, row, f"{where}.{key}") for key, row in descriptor.items())
        return GenerationMap(rows + self.rows)

    def _row(self, text: str, given: Mapping[str, Any], where: str) -> GenerationRange:
        match = _RANGE_TEXT.match(str(text))
        if match is None:
            raise _wrong(where, "expected a range such as '89', '75-79' or '130+'", text)
        low = int(match[1])
        high = None if match[2] else int(match[3] or low)
        if high is not None and high < low:
            raise _wrong(where, "the range ends before it begins", text)
        base = self.lookup(low)
        tensor_core = given.get("tensor_core_generation", base.tensor_core_generation)
        generation = GPUGeneration[given.get("generation", base.generation.name).upper()]
        families = frozenset(map(InstructionFamily, given.get("instruction_families", base.families)))
        return GenerationRange(low, high, generation, tensor_core, families - {InstructionFamily.NONE})


def _wrong(where: str, text: str, value: str) -> CapabilitiesError:
    return CapabilitiesError(f"{where}: {text}", key=where, code="SCHEMA_INVALID", value=value)


DEFAULT_GENERATIONS = GenerationMap()

# Linux and compiler spellings → torch.cpu.get_capabilities() words, which are ours.
_FEATURE_ALIASES = {
    "avx512f": "avx512_f", "avx512cd": "avx512_cd", "avx512dq": "avx512_dq", "avx512bw": "avx512_bw",
    "avx512vl": "avx512_vl", "avx512vbmi": "avx512_vbmi", "avx512ifma": "avx512_ifma",
    "avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "avxvnni": "avx_vnni",
    "amx": "amx_tile", "fma": "fma3", "pni": "sse3", "bmi1": "bmi", "abm": "lzcnt", "sha_ni": "sha",
    "asimd": "neon", "asimdhp": "fp16_arith", "asimddp": "dot", "dotprod": "dot", "asimdrdm": "rdm",
    "asimdfhm": "fhm", "svebf16": "sve_bf16", "fp16": "fp16_arith",
}  # fmt: skip


def canonical_cpu_feature(word: str) -> str:
    """One spelling for a CPU feature: torch's (`avx512f` → `avx512_f`, `asimd` → `neon`)."""
    word = word.strip().lower()
    return _FEATURE_ALIASES.get(word, word)


@dataclass(frozen=True)
class DeviceSpec(Plain):
    """Everything selection asks of a device, detected here or written down for a device elsewhere.

    `device_type` is torch's word, so a ROCm device has platform ROCM and device_type "cuda".
    `sm_version` is 90 for SM 9.0. `supports_*` says that torch computes in the dtype on this device;
    how fast shows in `instruction_families` and `cpu_features`. None means not known.
    """

    platform: Platform
    device_type: str
    name: str = ""
    vendor: str = ""
    index: int = 0
    sm_version: int | None = None
    gpu_generation: GPUGeneration = GPUGeneration.UNKNOWN
    tensor_core_generation: int = 0
    instruction_families: frozenset[InstructionFamily] = frozenset()
    cpu_features: frozenset[str] = frozenset()
    gfx: str | None = None
    memory_bytes: int = 0
    cuda_version: str | None = None
    rocm_version: str | None = None
    driver_version: str | None = None
    torch_version: str | None = None
    backend_versions: tuple[tuple[str, str], ...] = ()
    supports_bf16: bool = False
    supports_fp16: bool = False
    supports_fp8: bool = False
    max_grid: tuple[int, int, int] = (0, 0, 0)
    max_threads_per_block: int = 0
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        # One form for equal content, so that equality, hash and signature agree whoever filled the fields.
        object.__setattr__(self, "cpu_features", frozenset(canonical_cpu_feature(word) for word in self.cpu_features))
        object.__setattr__(self, "backend_versions", tuple(sorted(self.backend_versions)))

    @classmethod
    def detect(cls, device: torch.device | str | int | None = None) -> DeviceSpec:
        """The device of this process: the named one, else the first accelerator, else the CPU."""
        from layerzero.device.probe import probe_device  # start-up time: nothing is asked of the machine before

        return probe_device(device)

    @classmethod
    def for_sm(cls, sm: int, *, generations: GenerationMap = DEFAULT_GENERATIONS, **given: Any) -> DeviceSpec:
        """A CUDA device with what follows from its SM version; `given` sets or replaces any other field."""
        row = generations.lookup(sm)
        filled: dict[str, Any] = {
            "platform": Platform.CUDA,
            "device_type": "cuda",
            "name": f"SM{sm}",
            "vendor": "nvidia",
            "sm_version": sm,
            "gpu_generation": row.generation,
            "tensor_core_generation": row.tensor_core_generation,
            "instruction_families": row.families,
            "supports_fp16": sm >= 53,
            "supports_bf16": sm >= 80,
            "supports_fp8": sm >= 89,
            "max_grid": CUDA_MAX_GRID,
            "max_threads_per_block": CUDA_MAX_THREADS_PER_BLOCK,
        }
        return cls(**(filled | given))

    @property
    def supports_tf32(self) -> bool:
        """Whether matrix products of float32 can run in TF32 (NVIDIA from SM80)."""
        return self.sm_version is not None and self.sm_version >= 80

    def __hash__(self) -> int:
        """Equal devices have equal signatures, and the signature is computed once."""
        return hash((self.signature, self.index))

    @cached_property
    def signature(self) -> str:
        """Short stable hash of what kernel choice depends on: the silicon and the torch, toolkit and driver under it.

        Equal GPUs of one machine share it (no index); backend versions are left to the caches that name kernels.
        """
        versions = {"cuda": self.cuda_version, "rocm": self.rocm_version, "driver": self.driver_version}
        return digest({**self._silicon(), **versions, "torch": self.torch_version})[:16]

    @cached_property
    def hardware_signature(self) -> str:
        """Like `signature`, for the silicon alone: survives upgrades of torch, toolkit and driver."""
        return digest(self._silicon())[:16]

    def _silicon(self) -> dict[str, Any]:
        gpu = self.platform is not Platform.CPU
        return {
            "platform": self.platform.value,
            "name": self.name,
            "vendor": self.vendor,
            "sm": self.sm_version,
            "gfx": self.gfx,
            "generation": self.gpu_generation.name,
            "tensor_core_generation": self.tensor_core_generation,
            "families": sorted(self.instruction_families),
            "features": sorted(self.cpu_features),
            "multiprocessors": self.multiprocessors,
            # Drivers report a few MiB more or less; a container's RAM limit does not change a kernel's speed.
            "memory_gib": round(self.memory_bytes / 2**30) if gpu else None,
        }

    def to_json(self) -> dict[str, Any]:
        """A JSON-compatible dict with the signature beside the fields; it is not read back but computed again."""
        return super().to_json() | {"backend_versions": dict(self.backend_versions), "signature": self.signature}
