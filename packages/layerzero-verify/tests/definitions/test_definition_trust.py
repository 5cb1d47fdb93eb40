"""The code of a definition runs only from a place that was named on purpose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.errors import ConfigurationError
from layerzero_verify.definitions import Options, check, open_dataset
from layerzero_verify.definitions.reference import CompileError, NotTrustedError, Trust, compile_reference, in_order
from layerzero_verify.definitions.schema import load_definition, parse_definition

MARK = "import pathlib\npathlib.Path({path!r}).write_text('ran')\ndef run(A, B):\n    return A @ B.T\n"


def marked(sets: Any, folder: str = "data") -> tuple[Path, Path]:
    """A dataset whose code leaves a mark when it runs, and the mark."""
    mark = sets.root / "mark"
    item = sets.samples()["gemm_n24_k64"]
    item["reference"] = MARK.format(path=str(mark))
    return sets.put(sets.root / folder, item) / "definitions" / "gemm" / "gemm_n24_k64.json", mark


@pytest.mark.req("R-DEF-03")
def test_the_code_gets_torch_math_and_numpy_and_gives_back_run(sets: Any) -> None:
    code = "def run(A, B):\n    assert math.pi > 3 and np.float32(1) == 1\n    return torch.matmul(A, B.T)\n"
    path = sets.only("gemm_n24_k64", lambda item: item.update(reference=code)) / "definitions/gemm/gemm_n24_k64.json"
    run = compile_reference(load_definition(path), Trust.of([sets.root]))
    a, b = torch.randn(2, 64), torch.randn(24, 64)
    assert torch.equal(run(a, b), a @ b.T)


def test_nothing_is_trusted_by_itself(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mark = marked(sets)
    monkeypatch.chdir(path.parent)
    with pytest.raises(NotTrustedError) as refused:
        compile_reference(load_definition(path), Trust.of())
    assert refused.value.code == "PATH_NOT_TRUSTED"
    assert "--trust" in str(refused.value) and str(path) in str(refused.value)
    dataset = open_dataset(path.parents[2])
    report = check(dataset, dataset.select(everything=True), Options(repeats=1), sizes=["small"])
    own = [outcome for outcome in report.outcomes if outcome.solution == "reference"]
    assert own and all(item.skipped and item.reason.code == "PATH_NOT_TRUSTED" for item in own)
    assert not mark.exists(), "reading, listing and checking run none of it"


def test_a_named_folder_a_named_file_and_the_environment_allow_it(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mark = marked(sets)
    for trusted in (path, path.parent, sets.root, path.parent / ".." / "gemm"):
        mark.unlink(missing_ok=True)
        compile_reference(load_definition(path), Trust.of([trusted]))
        assert mark.read_text() == "ran"
    mark.unlink()
    monkeypatch.setenv("LAYERZERO_TRUSTED_DEFINITIONS", os.pathsep.join(["/", str(path.parent)])[2:])
    compile_reference(load_definition(path), Trust.of())
    assert mark.exists()


def test_a_folder_beside_and_a_name_that_only_begins_alike_are_not_trusted(sets: Any) -> None:
    path, mark = marked(sets, "data-evil")
    (sets.root / "data").mkdir()
    with pytest.raises(NotTrustedError):
        compile_reference(load_definition(path), Trust.of([sets.root / "data"]))
    assert not mark.exists()


@pytest.mark.parametrize("way", ["link to file", "link to folder", "dots"])
def test_links_and_dots_that_lead_out_of_trust_are_refused(sets: Any, way: str) -> None:
    path, mark = marked(sets, "outside")
    inside = sets.root / "inside"
    inside.mkdir()
    if way == "link to file":
        entry = inside / "gemm_n24_k64.json"
        entry.symlink_to(path)
    elif way == "link to folder":
        (inside / "gemm").symlink_to(path.parent)
        entry = inside / "gemm" / path.name
    else:
        entry = inside / ".." / "outside" / "definitions" / "gemm" / path.name
    with pytest.raises(NotTrustedError) as refused:
        compile_reference(load_definition(entry), Trust.of([inside]))
    assert "outside" in str(refused.value)
    assert not mark.exists()


def test_a_link_into_a_trusted_folder_is_judged_by_where_it_leads(sets: Any) -> None:
    path, mark = marked(sets, "inside")
    entry = sets.root / "entry.json"
    entry.symlink_to(path)
    compile_reference(load_definition(entry), Trust.of([path.parent]))
    assert mark.exists()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("loose", ["file", "folder", "root"])
def test_what_anybody_may_rewrite_is_not_trusted(sets: Any, loose: str) -> None:
    path, mark = marked(sets)
    place = {"file": path, "folder": path.parent, "root": path.parents[2]}[loose]
    place.chmod(place.stat().st_mode | 0o002)
    with pytest.raises(NotTrustedError, match="anybody may write"):
        compile_reference(load_definition(path), Trust.of([path.parents[2]]))
    assert not mark.exists()


def test_a_file_that_changed_after_it_was_read_is_refused(sets: Any) -> None:
    path, mark = marked(sets)
    definition = load_definition(path)
    path.write_text(path.read_text(encoding="utf-8").replace("A @ B.T", "A @ B.T * 2"), encoding="utf-8")
    with pytest.raises(NotTrustedError, match="changed"):
        compile_reference(definition, Trust.of([sets.root]))
    assert not mark.exists()


def test_a_definition_from_nowhere_is_not_trusted(sets: Any) -> None:
    definition = parse_definition(sets.samples()["gemm_n24_k64"])
    with pytest.raises(NotTrustedError, match="not in a file"):
        compile_reference(definition, Trust.of([sets.root]))


def test_a_trusted_path_that_does_not_exist_is_an_error_not_a_guess(sets: Any) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        Trust.of([sets.root / "nowhere"])
    with pytest.raises(ConfigurationError, match="absolute"):
        Trust.of(environ={"LAYERZERO_TRUSTED_DEFINITIONS": "relative/path"})


@pytest.mark.req("R-DEF-03")
def test_code_that_does_not_compile_says_so_and_names_the_line(sets: Any) -> None:
    code = "raise ValueError('not today')\ndef run(A, B):\n    return A\n"
    path = sets.only("gemm_n24_k64", lambda item: item.update(reference=code)) / "definitions/gemm/gemm_n24_k64.json"
    with pytest.raises(CompileError, match="not today") as failed:
        compile_reference(load_definition(path), Trust.of([sets.root]))
    assert isinstance(failed.value.__cause__, ValueError)


def test_results_are_brought_into_the_order_of_the_outputs(sets: Any) -> None:
    definition = parse_definition(sets.samples()["fused_add_rmsnorm_h32"])
    one, two, cpu = torch.zeros(1), torch.ones(1), torch.device("cpu")
    for result in ((one, two), [one, two], {"new_residual": two, "output": one, "more": 3}):
        found = in_order(definition, result, cpu)
        assert list(found) == ["output", "new_residual"] and found["new_residual"] is not one
        assert torch.equal(found["new_residual"], two)
    for wrong in (one, (one,), {"output": one}, (one, "two"), None):
        with pytest.raises(TypeError):
            in_order(definition, wrong, cpu)
    single = parse_definition(sets.samples()["gemm_n24_k64"])
    assert in_order(single, 2.5, cpu)["C"].dtype == torch.float16
