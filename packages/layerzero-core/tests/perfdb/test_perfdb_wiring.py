"""The database at start-up: opened when first needed, believed as far as it may be; and its commands."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.errors import ConfigurationError
from layerzero.perfdb.store import PerfDB
from layerzero.reasons import ReasonCode
from layerzero.runtime.state import state
from layerzero_cli.root import cli
from layerzero_tune import tuning_run as ranks_module
from layerzero_tune.perfdb.exchange import Tactic, is_autotune_cache, prune, read_autotune_cache, tactics
from layerzero_tune.trial import trial

FLASH, MATH = "sdpa.attention.flash_cpu", "sdpa.attention.math"


def call():
    torch.manual_seed(0)
    return tuple(torch.randn(1, 2, 8, 16) for _ in range(3))


@functools.cache
def rows_of():
    with torch.no_grad():
        ctx = lz.select("attention", *call()).context
    return {row.kernel_id: replace(row, variance=0.0) for row in trial(ctx, seconds=0.02, jit="off").rows}


@pytest.fixture
def swapped(lab, tmp_path):
    """A database in which the kernel nobody expects is the fastest."""
    rows = rows_of()
    path = tmp_path / "perf.db"
    PerfDB(path).put([replace(rows[FLASH], median_us=50.0), replace(rows[MATH], median_us=20.0)])
    return path


def run(*args, code=0):
    result = CliRunner().invoke(cli, [*map(str, args), "--json"], catch_exceptions=False)
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert found.pop("schema_version") == 1
    return found


@pytest.mark.req("R-PDB-02", "R-SEL-03")
def test_a_fresh_process_believes_the_database_the_environment_names(swapped):
    code = (
        "import torch, layerzero as lz, sys\n"
        "assert 'sqlite3' not in sys.modules\n"
        "torch.manual_seed(0)\n"
        "with torch.no_grad():\n"
        "    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))\n"
        "    lz.configure(perfdb={'enabled': False})\n"
        "    lz.which('attention', q, k, v)\n"
        "    before = set(sys.modules)\n"
        "    lz.configure(perfdb={'enabled': True})\n"
        "    print(lz.which('attention', q, k, v), 'sqlite3' in sys.modules)\n"
        "print(*sorted(name for name in set(sys.modules) - before if '.' not in name))\n"
    )
    environ = {**os.environ, "LAYERZERO_PLUGINS": "", "LAYERZERO_PERFDB": str(swapped)}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    chosen, brought = found.stdout.splitlines()
    assert chosen.split() == [MATH, "True"]
    # The first selection waits for what opening imports: statistics alone, with decimal, would take a third of that.
    assert set(brought.split()) == {"_sqlite3", "sqlite3"}


def test_without_a_database_nothing_is_opened(lab, tmp_path):
    lz.configure(perfdb={"path": str(tmp_path / "none.db"), "enabled": True})
    assert state.world.measurements.fingerprint == "" and not (tmp_path / "none.db").exists()
    assert lz.which("attention", *call()) == FLASH


def test_the_policy_names_the_database_and_switches_it_off(swapped):
    assert lz.which("attention", *call()) == FLASH
    lz.configure(perfdb={"path": str(swapped), "enabled": True})
    assert lz.which("attention", *call()) == MATH
    lz.configure(perfdb={"path": str(swapped), "enabled": False})
    assert lz.which("attention", *call()) == FLASH


@pytest.mark.req("R-PDB-05")
def test_a_time_to_live_lets_times_expire(swapped):
    db = PerfDB(swapped)
    db.put([replace(row, measured_at=time.time() - 100) for row in db.all()])
    lz.configure(perfdb={"path": str(swapped), "enabled": True, "ttl_s": 1000})
    assert lz.which("attention", *call()) == MATH
    lz.configure(perfdb={"path": str(swapped), "enabled": True, "ttl_s": 10})
    assert lz.which("attention", *call()) == FLASH


@pytest.mark.req("R-FAIL-09")
@pytest.mark.parametrize(
    ("harm", "code"),
    [(lambda raw: raw[:4096], "CACHE_CORRUPT"), (lambda raw: b"a diary, " * 999, "PERF_FILE_FOREIGN")],
    ids=["truncated", "another_file"],
)
def test_a_damaged_database_costs_its_times_and_not_the_call_and_doctor_says_what_became_of_it(
    lab, swapped, harm, code
):
    here = {"path": str(swapped), "enabled": True}
    lz.configure(perfdb=here)
    assert lz.which("attention", *call()) == MATH
    before = harm(swapped.read_bytes())
    swapped.write_bytes(before)
    lab.use()  # as a new process
    lz.configure(perfdb=here)
    torch.testing.assert_close(lz.attention(*call()), torch.nn.functional.scaled_dot_product_attention(*call()))
    assert lz.which("attention", *call()) == FLASH
    checks = lz.doctor(probe=False).checks
    told = [check for check in checks if check.group == "measured times" and check.code == code]
    assert told and all(check.status == "warn" and check.fix for check in told)
    aside = [path.read_bytes() for path in swapped.parent.glob(f"{swapped.name}.corrupt-*")]
    if code == "CACHE_CORRUPT":
        assert before in aside, "set aside, not thrown away"
    else:
        assert not aside and swapped.read_bytes() == before, "what is not ours is left alone"


@pytest.mark.req("R-FAIL-09")
def test_a_call_that_no_entry_is_about_is_ranked_as_without_a_database(swapped):
    lz.configure(perfdb={"path": str(swapped), "enabled": True})
    longer = tuple(torch.randn(1, 2, 300, 16) for _ in range(3))
    torch.testing.assert_close(lz.attention(*longer), torch.nn.functional.scaled_dot_product_attention(*longer))
    assert (lz.which("attention", *longer), lz.which("attention", *call())) == (FLASH, MATH)
    assert ReasonCode.PERF_RANKED_BY not in {note.code for note in lz.explain("attention", *longer).decision.notes}


@pytest.mark.req("R-PDB-06")
def test_a_similar_device_ranks_the_kernels_and_explain_names_it(swapped):
    db = PerfDB(swapped)
    rows = [replace(row, platform=row.platform._replace(device="cousin")) for row in db.all()]
    prune(db, older_than_s=-1)
    db.put(rows)
    lz.configure(perfdb={"path": str(swapped), "enabled": True})
    report = lz.explain("attention", *call())
    assert report.chosen == MATH
    assert {note.code for note in report.decision.notes} == {ReasonCode.PERF_NOT_BELIEVED, ReasonCode.PERF_RANKED_BY}
    assert "cousin" in str(report)


def test_asking_for_a_bucket_twice_reads_the_database_once(swapped, monkeypatch):
    lz.configure(perfdb={"path": str(swapped), "enabled": True})
    asked = []
    real = PerfDB.find
    monkeypatch.setattr(PerfDB, "find", lambda self, *args: asked.append(args) or real(self, *args))
    for _ in range(3):
        state.cache.invalidate_all()
        lz.which("attention", *call())
    assert len(asked) == 1


# -- commands --------------------------------------------------------------------------------------------
def test_show_lists_the_fastest_first_and_says_why_others_do_not_count(swapped):
    db = PerfDB(swapped)
    db.put([replace(row, platform=row.platform._replace(torch="1.0")) for row in db.all()])
    found = run("perfdb", "show", "--database", swapped)
    assert found["rows"] == 4 and found["believed"] == 2
    assert [item["kernel_id"] for item in found["measurements"]] == [MATH, FLASH]
    every = run("perfdb", "show", "--database", swapped, "--all")["measurements"]
    assert sum("torch 1.0" in (item["not_believed"] or "") for item in every) == 2
    plain = CliRunner().invoke(cli, ["perfdb", "show", "--database", str(swapped)]).stdout
    assert MATH in plain and "20.0" in plain and "--all" in plain


def test_verify_prune_export_import_and_merge(swapped, tmp_path):
    assert run("perfdb", "verify", "--database", swapped) == {
        "path": str(swapped), "intact": 2, "damaged": 0, "problems": [],
    }  # fmt: skip
    run("perfdb", "export", tmp_path / "out.json", "--database", swapped)
    assert run("perfdb", "import", tmp_path / "out.json", "--database", tmp_path / "new.db")["rows"] == 2
    assert run("perfdb", "merge", swapped, tmp_path / "new.db", "--database", tmp_path / "all.db")["rows"] == 2
    assert PerfDB(tmp_path / "all.db").all() == PerfDB(swapped).all()
    import sqlite3

    with sqlite3.connect(swapped) as raw:
        raw.execute("UPDATE measurements SET median_us = 1 WHERE kernel_id = ?", (FLASH,))
    assert run("perfdb", "verify", "--database", swapped, code=1)["damaged"] == 1
    assert run("perfdb", "prune", "--database", swapped)["removed"] == 1
    assert run("perfdb", "show", "--database", tmp_path / "none.db", code=1)["error"]["code"] == "CONFIG_FILE_MISSING"
    run("perfdb", "merge", tmp_path / "none.db", "--database", swapped, code=1)


def test_a_database_that_is_none_or_damaged_is_no_empty_one(lab, tmp_path):
    diary, torn, out = tmp_path / "diary.db", tmp_path / "torn.db", tmp_path / "out.json"
    diary.write_text("a diary, not a database")
    for words in (["show"], ["verify"], ["prune"], ["export", out]):
        error = run("perfdb", *words, "--database", diary, code=1)["error"]
        assert error["code"] == "PERF_FILE_FOREIGN" and "another file" in error["hint"]
    run("perfdb", "merge", diary, "--database", tmp_path / "new.db", code=1)
    run("report", "--perfdb", diary, "--out", tmp_path / "page.html", code=1)
    assert not out.exists() and diary.read_text() == "a diary, not a database"
    PerfDB(torn).put(rows_of().values())
    torn.write_bytes(torn.read_bytes()[:4096])
    (told,) = run("perfdb", "verify", "--database", torn, code=1)["problems"]
    assert "malformed" in told and "kept as torn.db.corrupt-" in told
    assert run("perfdb", "verify", "--database", torn)["intact"] == 0  # the fresh one


def test_a_dtype_that_torch_does_not_know_costs_only_its_call(lab, tmp_path):
    path = tmp_path / "t.json"
    with lz.record(path):
        lz.rms_norm(torch.randn(4, 32), torch.ones(32))
        lz.rms_norm(torch.randn(4, 32).half(), torch.ones(32).half())
    path.write_text(path.read_text().replace("float16", "floaty"))
    found = run("tune", path, "--database", tmp_path / "perf.db", "--seconds", "0.02", "--no-compile", code=1)
    assert found["rows"] > 0 and "unknown dtype 'floaty'" in json.dumps(found)


def test_tune_and_solve_from_the_command_line(lab, tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'schema_version = "1.0"\n[[case]]\nname = "norm {r}"\nop = "rms_norm"\neach = { r = [4, 64] }\n'
        'shape = "{r},32"\ndtype = "float32"\n'
    )
    db = tmp_path / "perf.db"
    options = ("--database", db, "--device", "cpu")
    found = run("tune", "--grid", grid, *options, "--seconds", "0.02", "--no-compile")
    assert {item["name"] for item in found["calls"]} == {"norm 4", "norm 64"} and found["rows"] >= 4
    table = run("solve", *options, "-o", tmp_path / "a.json")
    assert table["entries"] == 2 and all(plan["ops"][0]["median_us"] for plan in table["table"]["plans"])
    run("solve", "--grid", grid, *options, "-o", tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert run("solve", "--diff", tmp_path / "a.json", tmp_path / "b.json")["equal"] is True
    data = json.loads((tmp_path / "b.json").read_text())
    assert data["hardware_signature"]["device"] and data["kernels"]
    lz.use_table(tmp_path / "a.json")
    drift = run("tune", "--drift", *options, "--budget", "0.5")
    assert drift["ranks"] == 1
    for wrong in (("tune",), ("solve", "--diff", "x"), ("solve", "a", "b"), ("tune", "x", "--grid", "y")):
        assert CliRunner().invoke(cli, [*wrong, "--database", str(tmp_path / "n.db")]).exit_code == 2


def test_drift_at_the_command_line_names_the_kernel_with_both_times(lab, tmp_path):
    grid = tmp_path / "grid.toml"
    grid.write_text('schema_version = "1.0"\n[[case]]\nname = "norm"\nop = "rms_norm"\nshape = "64,32"\n')
    db = PerfDB(tmp_path / "perf.db")
    options = ("--database", db.path, "--device", "cpu", "--seconds", "0.02", "--no-compile")
    run("tune", "--grid", grid, *options)
    db.put([replace(row, median_us=row.median_us / 100) for row in db.all()])  # as if it had been so fast
    said = (
        CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200"}).invoke(cli, ["tune", "--drift", *map(str, options)]).output
    )
    (line,) = (line for line in said.splitlines() if "PERF_DRIFTED" in line)
    assert any(row.kernel_id in line for row in db.all()), said


def test_a_flashinfer_autotune_cache_is_read_and_never_run(tmp_path, lab):
    module = tmp_path / "v0_1_trtllm_fused_moe_NVIDIA_B200.py"
    module.write_text(
        "best_configs = {\n"
        "  \"('trtllm::fused_moe::gemm1', 'MoERunner', ((1, 3584), (256, 512, 448), (0,)))\": (0, 5),\n"
        "  \"('trtllm::fused_moe::gemm1', 'MoERunner', ((2, 3584), (256, 512, 448), (0,)))\": (0, 3),\n}\n"
    )
    found = read_autotune_cache(module)
    assert found[0] == Tactic(
        "trtllm::fused_moe::gemm1", "MoERunner", "((1, 3584), (256, 512, 448), (0,))", "5", "NVIDIA B200"
    )
    assert run("perfdb", "import", module, "--database", tmp_path / "p.db") == {
        "kind": "flashinfer-autotune", "tactics": 2,
    }  # fmt: skip
    db = PerfDB(tmp_path / "p.db")
    assert [item.tactic for item in tactics(db, "trtllm::fused_moe::gemm1", "NVIDIA B200")] == ["5", "3"]
    assert db.all() == [] and tactics(db, "other") == [] and tactics(PerfDB(tmp_path / "none.db")) == []
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nbest_configs = {{'a': __import__('os')}}\n")
    with pytest.raises(ConfigurationError, match=r"evil\.py"):
        read_autotune_cache(evil)
    assert not (tmp_path / "ran").exists()
    written = tmp_path / "cache.json"
    written.write_text(json.dumps({"_metadata": {"gpu": "NVIDIA H200"}, "('op', 'R', ((1, 2),))": ["R", 7]}))
    assert is_autotune_cache(written) and read_autotune_cache(written)[0].device == "NVIDIA H200"


def test_flashinfer_bench_traces_become_rows_that_rank_and_no_more(tmp_path, lab):
    root = tmp_path / "data"
    folder = root / "definitions" / "rmsnorm"
    folder.mkdir(parents=True)
    (folder / "norm_h32.json").write_text(json.dumps({
        "name": "norm_h32", "op_type": "rmsnorm",
        "axes": {"rows": {"type": "var"}, "hidden": {"type": "const", "value": 32}},
        "inputs": {
            "hidden_states": {"shape": ["rows", "hidden"], "dtype": "float32"},
            "weight": {"shape": ["hidden"], "dtype": "float32"},
        },
        "outputs": {"output": {"shape": ["rows", "hidden"], "dtype": "float32"}},
        "reference": "EPS = 1e-6\ndef run(hidden_states, weight):\n    return hidden_states\n",
    }))  # fmt: skip

    def trace(solution, status, ms):
        return json.dumps({
            "definition": "norm_h32", "workload": {"uuid": "u1", "axes": {"rows": 4}, "inputs": {}},
            "solution": solution,
            "evaluation": {
                "status": status, "environment": {"hardware": "NVIDIA H200", "libs": {"torch": "2.11"}},
                "timestamp": "2026-01-01T00:00:00", "log": "",
                "correctness": {"max_relative_error": 0.0, "max_absolute_error": 0.001, "extra": None},
                "performance": {"latency_ms": ms, "reference_latency_ms": 1.0, "speedup_factor": 1.0},
            },
        })  # fmt: skip

    lines = [trace("torch.rms_norm.native", "PASSED", 0.02), trace("someone_else", "PASSED", 0.01), "not json"]
    (root / "t.jsonl").write_text("\n".join(lines) + "\n")
    found = run("perfdb", "import", root / "t.jsonl", "--dataset", root, "--database", tmp_path / "p.db")
    assert found["rows"] == 2 and len(found["problems"]) == 1
    rows = {row.kernel_id: row for row in PerfDB(tmp_path / "p.db").all()}
    assert set(rows) == {"torch.rms_norm.native", "flashinfer-bench.rms_norm.someone_else"}
    row = rows["torch.rms_norm.native"]
    assert row.median_us == 20.0 and row.max_error == 0.001 and row.platform.family == "sm90"
    assert json.loads(row.bucket)["sizes"] == {"hidden": 32, "rows": 4}


# -- ranks -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ranks_share_the_work_and_all_hold_the_merged_result(tmp_path):
    """Two processes under gloo, as torchrun starts them."""
    script = Path(tmp_path) / "work.py"
    script.write_text(
        "import json, os, sys, torch, layerzero as lz\n"
        "torch.set_num_threads(1)\n"
        "ctxs = [lz.select('rms_norm', torch.randn(r, 32), torch.randn(32)).context for r in (1, 2, 4, 8, 16)]\n"
        "found = lz.tune(ctxs, database=sys.argv[1] + os.environ['RANK'], seconds=0.02, compile=False, device='cpu')\n"
        "print(json.dumps({'winners': found.winners, 'ranks': found.ranks, 'rows': found.rows}))\n"
    )
    environ = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 500), "WORLD_SIZE": "2",
        "LAYERZERO_PLUGINS": "", "LAYERZERO_PERFDB": "off",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "perf.db")], stdout=subprocess.PIPE, text=True,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = [json.loads(process.communicate(timeout=240)[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] and len(answers[0]["winners"]) == 5 and answers[0]["ranks"] == 2
    # rank 0 wrote what both found; rank 1 its own share
    first, second = (PerfDB(tmp_path / f"perf.db{rank}") for rank in range(2))
    assert len(first) == answers[0]["rows"] and 0 < len(second) < len(first)


def test_one_process_is_one_rank():
    alone = ranks_module.Ranks()
    assert alone.rank == 0 and alone.share([1, 2, 3]) == [1, 2, 3] and alone.gathered("x") == ["x"]
    two = ranks_module.Ranks(1, 2)
    assert two.share([1, 2, 3, 4, 5]) == [2, 4]
