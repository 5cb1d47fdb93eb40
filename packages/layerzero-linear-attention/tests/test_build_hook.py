"""The build hook compiles a source once where it is told to keep what it compiled, and again once it changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("hatchling", reason="missing tool: hatchling")

HOOK = Path(__file__).resolve().parents[1] / "hatch_build.py"


def test_what_was_compiled_serves_the_next_wheel_of_the_same_source(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("linear_attention_hook", HOOK)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    source, made = tmp_path / "recurrence.cpp", []

    def build(out: Path) -> Path:
        made.append(out)
        out.write_bytes(b"of " + source.read_bytes())
        return out

    builder = SimpleNamespace(SOURCE=source, __file__=__file__, build=build)
    source.write_bytes(b"one")
    out = tmp_path / "out.so"
    monkeypatch.delenv("LAYERZERO_CPU_OBJECTS", raising=False)
    assert [hook.compiled(builder, out) for _ in range(2)] == [out, out] == made
    monkeypatch.setenv("LAYERZERO_CPU_OBJECTS", str(tmp_path / "kept"))
    for text, compiled in ((b"one", 3), (b"one", 3), (b"two", 4), (b"one", 4)):
        source.write_bytes(text)
        assert hook.compiled(builder, out).read_bytes() == b"of " + text
        assert len(made) == compiled
    monkeypatch.setenv("CXX", "another")
    hook.compiled(builder, out)
    assert len(made) == 5
