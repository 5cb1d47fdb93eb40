"""The edits of the author's tutorials fit what the scaffold writes, and a tutorial that leads elsewhere is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerzero_verify.scaffold import write_plugin
from tools import author


def test_the_edits_of_the_tutorial_fit_the_scaffold(tmp_path: Path) -> None:
    package = write_plugin("mybackend", tmp_path, op="rms_norm", lang="c")
    changes = author.edits(author.BACKEND)
    files = [author.apply(edit, package).name for edit in changes]
    assert files == ["kernels.c", "capabilities.json"] and author.edits(author.NEW_OP) == []
    text = (package / "src/layerzero_mybackend/native/kernels.c").read_text(encoding="utf-8")
    assert "        double sums[4]" in text and "double sum = 0.0" not in text
    said = json.loads((package / "src/layerzero_mybackend/capabilities.json").read_text(encoding="utf-8"))
    assert said["ops"]["rms_norm"][0]["priority"] == 95
    with pytest.raises(ValueError, match="0 files of layerzero-mybackend hold"):
        author.apply(changes[0], package)  # it was made already


def test_lines_are_replaced_at_their_depth_and_only_where_they_stand() -> None:
    text = "if (x) {\n    a;\n    b;\n    c;\n}\n"
    assert author.edited(text, "a;\nb;\n", "d;\n  e;\n") == "if (x) {\n    d;\n      e;\n    c;\n}\n"
    assert author.edited(text, "a;\nc;\n", "d;\n") is None


def test_a_tutorial_that_leads_elsewhere_is_noticed(tmp_path: Path) -> None:
    which = "LAYERZERO_DENY=cpu lz which rms_norm --shape 4,4096"
    right = author.Step("page", which, 1.0, 0, "mybackend.rms_norm.c\n")
    wheel = tmp_path / "layerzero_mybackend-0.1.0-cp311-abi3-manylinux_2_17_aarch64.whl"
    wheel.touch()
    assert list(author.problems(author.BACKEND, "c", tmp_path, [right])) == []
    other = right._replace(said="torch.rms_norm.native\n")
    assert "does not choose mybackend.rms_norm.c" in next(author.problems(author.BACKEND, "c", tmp_path, [other]))
    failed = right._replace(status=1)
    assert list(author.problems(author.BACKEND, "c", tmp_path, [failed])) == [f"{which}: exit 1"]
    assert "asks which kernel" in next(author.problems(author.BACKEND, "c", tmp_path, []))
    wheel.rename(tmp_path / "layerzero_mybackend-0.1.0-py3-none-any.whl")
    assert "not one that ends in" in next(author.problems(author.BACKEND, "c", tmp_path, [right]))
    assert list(author.problems(author.BACKEND, "python", tmp_path, [right])) != []


def test_a_command_is_typed_for_the_language_and_its_failure_kept(tmp_path: Path) -> None:
    assert author._typed("lz plugin new relu2 --op squared_relu", "c").endswith("--op squared_relu --lang c")
    assert author._typed("lz plugin new m --op rms_norm --lang c", "triton").endswith("--op rms_norm --lang triton")
    assert author._typed("pip wheel --no-deps ./layerzero-m", "c") == "pip wheel --no-deps ./layerzero-m"
    assert author._typed("LAYERZERO_DENY=cpu lz which a", "python") == "LAYERZERO_PREFER=mybackend lz which a"
    step = author.run("page", "echo told; exit 3", tmp_path, {"PATH": "/usr/bin:/bin"})
    assert (step.status, step.said) == (3, "told\n") and "exit 3\ntold" in str(step)
