"""The matrix kernels of AVX-512, VNNI and AMX, compiled for the processor at hand with their intrinsics emulated.

    python build.py OUT [--cache FOLDER] [--sanitize]

The sources are those of the package, untouched; immintrin.h beside this file comes first on the path. The library is an
ordinary build of `_native` whose instruction sets are portable, avx512, avx512_vnni and amx, with the units named here.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from layerzero_cpu import build

HERE = Path(__file__).resolve().parent
PRETEND = (
    "-U__aarch64__", "-U__ARM_NEON", "-U__AVX2__", "-U__F16C__",
    "-D__AVX512F__=1", "-D__AVX512BW__=1", "-D__AVX512DQ__=1", "-D__AVX512VL__=1", f"-I{HERE}",
)  # fmt: skip
# What the tiles are for, and what their units send everything else to.
UNITS = {
    "amx": ("amx_linear", "amx_prefill", "amx_quant"),
    "avx512": ("attn_prefill", "experts", "experts_codes", "gemm_linear"),
    "avx512_vnni": ("experts_bytes", "gemm_quant_dot"),
}


def _units(family: str, isas: Sequence[str] | None = None, skip: Sequence[str] = ()) -> Iterator[tuple[Path, str]]:
    for file in sorted(build.NATIVE.glob("*.cpp")):
        if not file.read_text(encoding="utf-8").startswith("// unit:"):
            yield file, ""
        yield from ((file, isa) for isa, stems in UNITS.items() if file.stem in stems)


def made(out: Path, cache: Path | None = None, *, sanitize: bool = False) -> Path:
    """Compile into `out`; `cache` keeps objects between builds."""
    build.units = _units
    build.FLAGS = dict.fromkeys(("aarch64", "x86_64"), dict.fromkeys(UNITS, PRETEND))
    # a quick compiler matters more here than quick code; the header is part of what an object is made of
    header = (HERE / "immintrin.h").read_bytes()
    stamp = hashlib.sha256(header).hexdigest()[:12]
    quick = "-O1" if sanitize else "-Og"
    return build.build(out, cache=cache, sanitize=sanitize, extra=(quick, "-DLZ_EMULATED", f"-DLZ_HEADER_{stamp}"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--sanitize", action="store_true")
    given = parser.parse_args()
    try:
        print(made(given.out, given.cache, sanitize=given.sanitize))
    except build.BuildError as error:
        sys.exit(str(error))
