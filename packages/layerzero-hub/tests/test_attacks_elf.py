"""Binaries whose section headers tell another story than what the loader reads, and tables without an end."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import struct

import pytest

from layerzero_hub import elf
from layerzero_hub.errors import HubError
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build, compile_c, stable_abi_variant = _kernels.build, _kernels.compile_c, _kernels.stable_abi_variant

NEW_GLIBC = """
#include <pthread.h>
static void *f(void *p) { return p; }
int go(void) { pthread_t t; return pthread_create(&t, 0, f, 0); }
"""
PRIVATE_PYTHON = "#include <Python.h>\nint go(void) { return _Py_IsFinalizing(); }\n"
PLAIN = '#include <stdio.h>\nint go(void) { return puts("x"); }\n'


def headers(data):
    """Section name → (offset of its header, header)."""
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    rows = [list(struct.unpack_from("<IIQQQQIIQQ", data, start + size * index)) for index in range(count)]
    table = rows[names][4]
    return {
        data[table + row[0] : data.index(b"\0", table + row[0])].decode(): (start + size * index, row)
        for index, row in enumerate(rows)
    }


def disguised(data: bytes, **sizes: int) -> bytes:
    """The same program headers, tables and code; section headers that point to a harmless copy cut to `sizes`."""
    out = bytearray(data)
    found = headers(data)
    for name, size in sizes.items():
        at, row = found["." + name.replace("__", ".")]
        honest = bytes(out[row[4] : row[4] + row[5]])
        row[4], row[5] = len(out), size
        if name == "gnu__version_r":
            row[7] = 0
        struct.pack_into("<IIQQQQIIQQ", out, at, *row)
        out += honest[:size] if name != "dynamic" else b"\0" * size
    return bytes(out)


def put(bench, name: str, data: bytes) -> str:
    repo = f"org/{name}"
    bench.put(repo, build({"__init__.py": b"", "part.abi3.so": data}, stable_abi_variant(), id=f"_lz_elf_{len(name)}"))
    return repo


@contextlib.contextmanager
def soon():
    """A walk without an end would run for hours: an alarm ends it, and the test with it."""

    def late(signum, frame):
        raise AssertionError("no end")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.fault(18)
def test_a_search_path_and_a_library_that_only_the_loader_sees(bench, tmp_path):
    compile_c(tmp_path, "int other(void) { return 41; }", name="libhidden.so")
    flags = (f"-L{tmp_path}", "-lhidden", f"-Wl,-rpath,{tmp_path}")
    data = disguised(compile_c(tmp_path, "int other(void); int go(void) { return other() + 1; }", *flags), dynamic=16)
    target = tmp_path / "disguised.so"
    target.write_bytes(data)
    assert ctypes.CDLL(str(target)).go() == 42  # the loader follows the hidden path
    with bench.refused("HUB_RUNPATH"):
        bench.lock(put(bench, "hidden-path", data))
    data = disguised(compile_c(tmp_path, "int other(void); int go(void) { return other(); }", *flags[:2]), dynamic=16)
    with bench.refused("HUB_NEEDED_REFUSED"):
        bench.lock(put(bench, "hidden-library", data))


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("code", "hidden", "refused"),
    [
        (NEW_GLIBC, {"gnu__version_r": 0}, "HUB_ABI_GLIBC"),
        (PRIVATE_PYTHON, {"dynsym": 24}, "HUB_ABI_SYMBOL"),
    ],
    ids=["glibc", "python"],
)
def test_versions_and_symbols_that_only_the_loader_sees(bench, tmp_path, code, hidden, refused):
    with bench.refused(refused):
        bench.lock(put(bench, f"hidden-{refused.lower()}", disguised(compile_c(tmp_path, code), **hidden)))


# A symbol of each library, and the newest version of a manylinux_2_28 system beside the next one, equally long.
NEWEST = {
    "glibc": (NEW_GLIBC, "GLIBC_2.28", "GLIBC_2.29"),
    "libstdc++": ("_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1Ev", "GLIBCXX_3.4.24", "GLIBCXX_3.4.25"),
    "the C++ ABI": ("__cxa_init_primary_exception", "CXXABI_1.3.11", "CXXABI_1.3.12"),
}


@pytest.mark.req("R-BK-HF-02")
@pytest.mark.parametrize("library", NEWEST)
def test_what_manylinux_2_28_has_passes_and_the_next_version_is_refused(tmp_path, library):
    code, newest, beyond = NEWEST[library]
    if library != "glibc":
        code = f"void {code}(void); void go(void) {{ {code}(); }}"
    data = compile_c(tmp_path, code, "-lstdc++")
    family, _, _ = newest.partition("_")
    found = re.findall(rf"{family}_[0-9.]+(?=\0)".encode(), data)
    asked = max(name for name in found if len(name) == len(newest))
    target = tmp_path / "asks.so"
    target.write_bytes(data.replace(asked, newest.encode()))
    elf.check_shared_object(target, "asks.so")
    check_refused(tmp_path, data.replace(asked, beyond.encode()), "HUB_ABI_GLIBC")


@pytest.mark.fault(18)
def test_no_section_headers_at_all_hide_nothing(tmp_path):
    data = bytearray(compile_c(tmp_path, PLAIN, "-Wl,-rpath,/tmp/evil"))
    struct.pack_into("<Q", data, 40, 0)
    struct.pack_into("<HH", data, 60, 0, 0)
    check_refused(tmp_path, data, "HUB_RUNPATH")


def check_refused(tmp_path, data: bytes, code: str):
    target = tmp_path / "mutated.so"
    target.write_bytes(bytes(data))
    with soon(), pytest.raises(HubError) as caught:
        elf.check_shared_object(target, "mutated.so")
    assert caught.value.code.value == code, str(caught.value)


def entry(data, tag: int) -> int:
    """Offset of an entry of the dynamic table; its value stands 8 bytes on."""
    at = headers(data)[".dynamic"][1][4]
    while struct.unpack_from("<Q", data, at)[0] != tag:
        at += 16
    return at


@pytest.mark.fault(18)
@pytest.mark.parametrize("what", ["count", "circle", "chain", "dynamic", "names", "relocations", "overlap", "twice"])
def test_malformed_tables_end_in_a_refusal(tmp_path, what):
    data = bytearray(compile_c(tmp_path, PLAIN))
    found = headers(data)
    needs = found[".gnu.version_r"][1][4]
    expected = "HUB_ELF_INVALID"
    if what == "count":
        # 2**32 - 1 entries by the section's word, the first of which names itself as the next; too new as well.
        at, row = found[".gnu.version_r"]
        row[7] = 2**32 - 1
        struct.pack_into("<IIQQQQIIQQ", data, at, *row)
        base = re.search(rb"GLIBC_2\.[0-9.]+\0", data)  # the architecture's first: 2.2.5 on x86-64, 2.17 on ARM
        assert base is not None
        data[base.start() : base.end()] = b"GLIBC_2.98".ljust(len(base[0]), b"\0")
        expected = "HUB_ABI_GLIBC"
    elif what == "circle":
        struct.pack_into("<I", data, needs + 12, 2**32 - 16)
    elif what == "chain":
        # The next one begins one byte on: entries lie over one another until one leads out of the file.
        struct.pack_into("<I", data, needs + struct.unpack_from("<I", data, needs + 8)[0] + 12, 1)
    elif what == "dynamic":
        for at in range(found[".dynamic"][1][4], len(data) - 16, 16):
            struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] or 0x6000000D)
    elif what == "names":
        struct.pack_into("<Q", data, entry(data, 10) + 8, 2**62)
    elif what == "relocations":
        struct.pack_into("<Q", data, entry(data, 8) + 8, 2**40 * 24)
    elif what == "overlap":
        (start,) = struct.unpack_from("<Q", data, 32)
        loads = [start + 56 * n for n in range(data[56]) if struct.unpack_from("<I", data, start + 56 * n)[0] == 1]
        struct.pack_into("<QQ", data, loads[1] + 8, 0, 0)
    else:
        at = entry(data, 5)
        struct.pack_into("<QQ", data, entry(data, 0x6FFFFEF5), *struct.unpack_from("<QQ", data, at))
    check_refused(tmp_path, data, expected)
