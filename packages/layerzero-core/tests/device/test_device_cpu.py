"""CPU features from torch's report and from /proc/cpuinfo texts of several machines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.device.cpu import cpu_families, cpu_spec, features_from_capabilities, features_from_cpuinfo
from layerzero.model.device import canonical_cpu_feature
from layerzero.model.enums import InstructionFamily

SAPPHIRE_RAPIDS = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse pni ssse3 fma sse4_1 sse4_2 popcnt avx f16c bmi1 avx2 bmi2 avx512f avx512dq avx512ifma avx512cd \
avx512bw avx512vl avx_vnni avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_fp16 amx_bf16 amx_tile \
amx_int8 hypervisor
processor\t: 1
vendor_id\t: GenuineIntel
model name\t: another
"""
ICE_LAKE = """vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8380
flags\t\t: fma avx avx2 f16c avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni
"""
ZEN3 = "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7763\nflags\t\t: fma avx avx2 f16c bmi1 bmi2 sse4a\n"
ZEN4 = (
    "vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9654\n"
    "flags\t\t: fma avx avx2 f16c avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni\n"
)
NEOVERSE_N1 = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd0c
"""
GRACE = "Features\t: fp asimd asimdhp asimddp sve sve2 svebf16 i8mm bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"

OLD_TORCH = SimpleNamespace(__version__="2.10.0", cpu=SimpleNamespace())


def describe(text: str, torch: Any = OLD_TORCH) -> Any:
    return cpu_spec(torch, cpuinfo=text, machine="x86_64")


@pytest.mark.req("R-ENV-03", "R-BK-CPU-04")
@pytest.mark.parametrize(
    ("text", "vendor", "has", "lacks", "amx"),
    [
        (ICE_LAKE, "intel", {"avx512_f", "avx512_vnni"}, {"amx_tile", "avx512_bf16"}, False),
        (SAPPHIRE_RAPIDS, "intel", {"amx_bf16", "amx_int8", "amx_tile", "avx512_bf16"}, {"neon"}, True),
        (ZEN3, "amd", {"avx2", "fma3"}, {"avx512_f"}, False),
        (ZEN4, "amd", {"avx512_f", "avx512_bf16"}, {"amx_tile"}, False),
    ],
)
def test_x86_targets_are_told_apart(text: str, vendor: str, has: set[str], lacks: set[str], amx: bool) -> None:
    spec = describe(text)
    assert spec.vendor == vendor
    assert has <= spec.cpu_features and not lacks & spec.cpu_features
    assert (InstructionFamily.AMX in spec.instruction_families) is amx


def test_aarch64_features_are_read_in_torchs_words() -> None:
    n1 = describe(NEOVERSE_N1)
    assert (n1.name, n1.vendor) == ("Neoverse N1", "arm")
    assert n1.cpu_features == {"neon", "fp16_arith", "rdm", "dot"}
    assert {"sve", "sve2", "sve_bf16", "i8mm", "bf16"} <= describe(GRACE).cpu_features


def test_the_first_processor_names_the_cpu() -> None:
    assert describe(SAPPHIRE_RAPIDS).name == "Intel(R) Xeon(R) Platinum 8480+"


def test_torchs_own_report_comes_before_the_file() -> None:
    capabilities = {"avx2": True, "avx512_f": False, "num_sockets": 1, "architecture": "x86_64", "sve_max_length": 0}
    torch = SimpleNamespace(__version__="2.13.0", cpu=SimpleNamespace(get_capabilities=lambda: capabilities))
    assert describe(SAPPHIRE_RAPIDS, torch).cpu_features == {"avx2"}


def test_a_raising_or_empty_report_falls_back_to_the_file() -> None:
    def get_capabilities() -> dict[str, Any]:
        raise RuntimeError("built without cpuinfo")

    for get in (get_capabilities, dict):
        torch = SimpleNamespace(__version__="2.13.0", cpu=SimpleNamespace(get_capabilities=get))
        assert "avx2" in describe(ZEN3, torch).cpu_features


@pytest.mark.req("R-BK-CPU-04")
def test_both_sources_agree_on_this_machine() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this torch does not report capabilities")
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        from_file = features_from_cpuinfo(file.read())
    from_torch = features_from_capabilities(torch.cpu.get_capabilities())
    main = {"avx2", "avx512_f", "avx512_bf16", "avx512_vnni", "amx_tile", "neon", "sve", "dot", "bf16"}
    assert from_torch & main == from_file & main


def test_an_empty_file_gives_a_cpu_without_features() -> None:
    spec = describe("")
    assert spec.cpu_features == frozenset() and spec.name


def test_tiles_without_a_multiply_are_not_amx() -> None:
    assert cpu_families(frozenset({"amx_tile"})) == frozenset()
    assert cpu_families(frozenset({"amx_tile", "amx_int8"})) == {InstructionFamily.AMX}


@pytest.mark.parametrize(
    ("word", "canonical"),
    [("AVX512F", "avx512_f"), ("fma", "fma3"), ("asimd", "neon"), (" avx2 ", "avx2"), ("dotprod", "dot")],
)
def test_spellings_meet_in_one_word(word: str, canonical: str) -> None:
    assert canonical_cpu_feature(word) == canonical
    assert canonical_cpu_feature(canonical) == canonical


@given(st.text())
def test_any_text_is_read_without_an_exception(text: str) -> None:
    features_from_cpuinfo(text)
