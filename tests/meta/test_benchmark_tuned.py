"""The tuned-choice benchmark: its cases and baselines, what its figures mean, and what travels to the GPU machine."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from layerzero.perfdb.measurement import upper
from layerzero_tune.grid import load

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
GRID = load(BENCHMARKS / "grid.toml")
KEPT = sorted(BENCHMARKS.glob("results/*/tuned.json"))


def module(name: str):
    """A script of the benchmarks folder, whose scripts find each other by name."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[f"benchmarks_{name}"] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def math_of_it():
    return module("tuned_figures")


# -- cases -------------------------------------------------------------------------------------------
def test_the_34_cases_are_in_the_grid_under_their_names_with_their_recorded_times():
    recorded = module("baselines").RECORDED
    assert len(recorded) == 34
    assert {case.name for case in GRID.pick(tags=["gpu34"], device="cuda").cases} == set(recorded)
    # The best library of each case gave 1.94 times torch default: the columns are the right ones.
    gains = [math.log(plain / best) for plain, best in recorded.values()]
    assert math.exp(sum(gains) / 34) == pytest.approx(1.943, abs=0.001)


def test_there_is_a_set_for_a_small_machine_without_a_gpu():
    assert 30 <= len(GRID.pick(device="cpu")) <= 60


# -- drawn sizes ---------------------------------------------------------------------------------------
def test_drawn_sizes_stay_inside_the_tuned_buckets_and_are_the_same_every_time(math_of_it):
    cases = GRID.pick(device="cpu").cases
    found = list(math_of_it.drawn(cases, 50, lambda case, made: True))
    assert len({case.name for case in found}) == 50
    assert [case.name for case in found] == [c.name for c in math_of_it.drawn(cases, 50, lambda case, made: True)]
    by_template = {}
    for case in cases:
        by_template.setdefault((case.op, case.tags, case.options.get("dtype")), []).append(case)
    for made in found:
        near = by_template[made.op, made.tags, made.options.get("dtype")]
        assert any(
            all(upper(made.values[name]) == upper(case.values[name]) for name in case.grows)
            and all(made.values[name] == case.values[name] for name in case.values if name not in case.grows)
            for case in near
        ), made.name
        assert made.name not in {case.name for case in cases}


def test_a_size_whose_bucket_differs_after_all_is_drawn_again(math_of_it):
    assert list(math_of_it.drawn(GRID.pick(device="cpu").cases, 5, lambda case, made: False)) == []


# -- figures -------------------------------------------------------------------------------------------
def record(name: str, chosen: str, torch_us: float, tags=(), dtype="float32", **us: float) -> dict:
    return {
        "name": name, "op": "rms_norm", "dtype": dtype, "sizes": {"rows": 1, "hidden": 2}, "device": "x",
        "mode": "eager", "chosen": f"{chosen}.rms_norm.x", "torch": {"us": torch_us}, "call": {}, "tags": list(tags),
        "kernels": {f"{lib}.rms_norm.x": {"us": value} for lib, value in us.items()},
    }  # fmt: skip


def test_two_runs_that_differ_within_the_noise_are_told_apart_from_those_that_do_not(math_of_it):
    times = {"a": {"k": 10.0, "l": 10.1}, "b": {"k": 10.0}}
    found = math_of_it.agreement({"a": "k", "b": "k", "c": "k"}, {"a": "l", "b": "k"}, times)
    assert found["cases"] == 2 and found["agree"] == 0.5 and found["worst_difference"] == pytest.approx(1.01)
    assert found["apart"] == [{"case": "a", "first": "k", "second": "l", "ratio": 1.01}]
    assert math_of_it.agreement({}, {}, {})["agree"] is None
    assert math_of_it.agreement({"b": "k"}, {"b": "m"}, times)["apart"][0]["ratio"] is None


def test_verdicts_hold_the_figures_against_the_targets(math_of_it):
    cases = [
        record("one", "a", 20.0, ["gpu34"], a=10.0, b=12.0),
        record("two", "b", 30.0, ["gpu34"], dtype="bfloat16", a=40.0, b=10.5, c=10.0),
    ]
    found = math_of_it.summary(cases, [record("drawn", "a", 20.0, a=12.0, b=10.0)])
    assert set(found) == {"grid", "gpu34", "float32", "bfloat16", "random"}
    told = math_of_it.verdicts(found, {"agree": 0.99, "worst_difference": 1.01})
    assert told["chosen ÷ oracle, worst"] == {"value": 1.05, "at_most": 1.10, "met": True}
    assert told["chosen ÷ oracle, geomean"]["value"] == pytest.approx(1.05**0.5, abs=1e-4)
    assert told["random sizes: chosen ÷ oracle, worst"]["met"] is False
    assert told["× torch default, geomean of the 34"]["value"] == pytest.approx((2 * 30 / 10.5) ** 0.5, abs=1e-3)
    assert "× torch default, geomean" not in told
    # b alone: 1.2 and 1.05 of the fastest; LayerZero: 1 and 1.05
    assert told["nearest single library ÷ LayerZero"]["value"] == pytest.approx(1.2**0.5, abs=1e-3)
    assert told["two tuning runs agree"]["met"] and told["where they differ, within"]["met"]


# -- keeping what is done ------------------------------------------------------------------------------
def test_a_run_goes_on_where_it_was_and_begins_anew_for_another_commit(tmp_path: Path):
    tuned = module("tuned_state")
    kept = tuned.Kept(tmp_path, {"commit": "a"}, fresh=False)
    kept.put("cases", "one", {"chosen": "k"})
    with open(tmp_path / "done.jsonl", "a") as file:
        file.write('{"torn": ')
    again = tuned.Kept(tmp_path, {"commit": "a"}, fresh=False)
    assert again.records["cases", "one"]["chosen"] == "k" and len(again.of("cases")) == 1
    (tmp_path / "first.db").write_text("measured at another commit")
    assert tuned.Kept(tmp_path, {"commit": "b"}, fresh=False).records == {}
    assert not (tmp_path / "first.db").exists()
    assert tuned.Kept(tmp_path, {"commit": "b"}, fresh=True).records == {}


def test_the_budget_is_shared_by_the_stages_to_come():
    tuned = module("tuned_state")
    budget = tuned.Budget(100.0, ["tune", "cases"])
    share = tuned.SHARES["tune"] / (tuned.SHARES["tune"] + tuned.SHARES["cases"])
    assert budget.for_stage("tune") == pytest.approx(100.0 * share, rel=0.01)
    assert budget.for_stage("cases") == pytest.approx(100.0, rel=0.01)  # nothing was spent: all of it is left


def test_kept_runs_say_where_they_come_from_and_their_figures_are_those_of_their_cases(math_of_it):
    for path in KEPT:
        data = json.loads(path.read_text())
        assert data["command"].startswith("python benchmarks/tuned.py") and data["commit"] not in ("", "unknown")
        assert data["machine"]["torch"] and data["cases"]
        assert data["figures"] == math_of_it.summary(data["cases"], data["random"]), path
        assert data["targets"] == math_of_it.verdicts(data["figures"], data["agreement"]), path


# -- the GPU machine -------------------------------------------------------------------------------------
def test_archives_go_in_pieces_and_come_together_again(tmp_path: Path):
    parcels = module("gpu_parcels")
    source, out, home = tmp_path / "cache", tmp_path / "out", tmp_path / "home"
    for folder in (source / "sub", out, home):
        folder.mkdir(parents=True)
    (source / "sub" / "kernel.so").write_bytes(bytes(range(256)) * 64)
    (source / "notes.txt").write_text("hello")
    whole = tmp_path / "caches.tar.xz"
    assert parcels.pack([source], tmp_path, whole) == 2
    parts = parcels.split(whole, out, piece=100)
    assert len(parts) > 1 and parts[0].name == "caches.tar.xz.00" and all(p.stat().st_size <= 100 for p in parts)
    parcels.unpack(out, tmp_path / "lib", tmp_path / "apart", home)
    assert (home / "cache" / "sub" / "kernel.so").read_bytes() == (source / "sub" / "kernel.so").read_bytes()
    parts[0].unlink()
    with pytest.raises(SystemExit, match="one is missing"):
        parcels.pieces_of(out)


def test_too_many_pieces_are_refused_before_any_is_written(tmp_path: Path):
    parcels = module("gpu_parcels")
    whole, out = tmp_path / "big.tar.xz", tmp_path / "out"
    whole.write_bytes(b"x" * 1000)
    out.mkdir()
    with pytest.raises(SystemExit, match="10 pieces, 7 can be brought back"):
        parcels.split(whole, out, piece=100, most=7)
    assert list(out.iterdir()) == []


def test_wheels_for_another_cuda_are_kept_apart(tmp_path: Path):
    parcels = module("gpu_parcels")
    parcel = tmp_path / "1"
    parcel.mkdir()
    for name in ("liger_kernel-1-py3-none-any.whl", "xformers-1-py3-none-any.whl"):
        with zipfile.ZipFile(parcel / name, "w") as wheel:
            wheel.writestr(f"{name.split('-')[0]}/__init__.py", "")
    assert parcels.unpack(parcel, tmp_path / "lib", tmp_path / "apart", tmp_path) == "1: 2 wheels"
    assert (tmp_path / "lib" / "liger_kernel").is_dir() and (tmp_path / "apart" / "xformers").is_dir()
    with pytest.raises(SystemExit, match="no such parcel"):
        parcels.unpack(tmp_path / "2", tmp_path, tmp_path, tmp_path)


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path):
    parcels = module("gpu_parcels")
    evil, home = tmp_path / "evil.tar", tmp_path / "home"
    home.mkdir()
    (tmp_path / "payload").write_text("x")
    with tarfile.open(evil, "w") as archive:
        archive.add(tmp_path / "payload", "../escaped")
    with pytest.raises(tarfile.TarError):
        parcels.unpack(evil, home, home, home)
    assert not (tmp_path / "escaped").exists()


def test_shards_leave_out_what_is_done_and_a_log_says_what_happened(tmp_path: Path):
    gpu = module("gpu")
    tests = [f"test_kit.py::test_it[{n} of x]" for n in range(5)]
    kept = gpu.KitFile(tmp_path / "kit.jsonl")
    kept.add("x", {tests[0]: "passed"})
    (tmp_path / "kit.jsonl").write_text((tmp_path / "kit.jsonl").read_text() + '{"backend": "x", "te')
    again = gpu.KitFile(tmp_path / "kit.jsonl")
    todo = list(gpu.shards(tests, lambda test: ("x", test) in again.done, 3))
    assert todo == [tests[1:4], tests[4:]]
    log = f"{tests[1]} PASSED [ 20%]\nnoise\n{tests[2]} SKIPPED (no bf16) [ 40%]\n"
    assert gpu.outcomes(log, tests[1:4], 139) == {tests[1]: "passed", tests[2]: "skipped", tests[3]: "crashed"}
    assert gpu.outcomes(log, tests[1:4], None) == {tests[1]: "passed", tests[2]: "skipped"}
    again.add("x", {tests[1]: "failed"})
    assert again.counts() == {"x": {"passed": 1, "failed": 1}} and "1 BAD" in gpu._told(again)
    assert gpu.collected(f"{tests[0]}\n\n5 tests collected in 0.1s\n") == tests[:1]


def test_the_gpu_script_refuses_words_it_does_not_know(capsys):
    gpu = module("gpu")
    with pytest.raises(SystemExit):
        gpu._arguments(["--stages", "kit,dance"])
    assert "expected some of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu._arguments(["--limit", "kit=soon"])
    given = gpu._arguments(["--limit", "kit=12.5", "--stages", "kit"])
    assert given.limits["kit"] == 12.5 and given.limits["grid"] == gpu.LIMITS["grid"]


def test_a_stage_that_fails_is_told_and_the_next_one_runs(tmp_path: Path, capsys):
    gpu = module("gpu")
    words = ["--stages", "unpack,install,caches", "--parcel", str(tmp_path / "none"), "--wheels", str(tmp_path)]
    words += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--lib", str(tmp_path / "lib")]
    gpu.CACHES = ()
    assert gpu.main(words) == 1
    told = capsys.readouterr().out.splitlines()
    assert (
        "no such parcel" in told[0]
        and "no wheels" in told[1]
        and told[2].startswith("caches")
        and "0 files in 1" in told[2]
    )
