"""The drawn calls, what they are judged by, and the files that the factory run writes."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from drawing import LIMITS, OPS, drawn
from timing import RESULTS
from untuned import judged, summary

from layerzero.registry.kinds import digest
from layerzero.runtime.state import state
from layerzero_cli.calls import context
from tools.shipped import _captured, documents, left_out, main, records, rendered


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drawn_calls_are_real_calls_inside_the_limits_and_the_same_for_a_seed(device):
    first = list(itertools.islice(drawn(3, device), 120))
    assert first == list(itertools.islice(drawn(3, device), 120))
    assert first != list(itertools.islice(drawn(4, device), 120))
    assert len({call.name for call in first}) == 120
    assert {call.op for call in first} == set(OPS)
    for call in first:
        assert call.bytes <= LIMITS[device][0] and call.operations <= LIMITS[device][1]
        options = {**call.options, "device": "h200" if device == "cuda" else "cpu"}
        assert context(call.op, options).op == call.op


def record(chosen_us, torch_us, call_us, best_us=None, **more):
    kernels = {"a.rms_norm.x": {"us": chosen_us}, "b.rms_norm.x": {"us": best_us or chosen_us}, "c.rms_norm.x": {}}
    return {"chosen": "a.rms_norm.x", "best": "b.rms_norm.x", "kernels": kernels, "torch": {"us": torch_us},
            "call": {"us": call_us}, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "torch", "call", "ok"),
    [(100, 100, 102, True), (100, 100, 110, False), (10, 10, 12.9, True), (10, 10, 13.5, False)],
)
def test_a_long_call_is_judged_by_its_share_and_a_short_one_by_microseconds(chosen, torch, call, ok):
    found = judged(record(chosen, torch, call, chosen / 2), 0.97)
    assert found["ok"] is ok and found["oracle"] == 2.0 and found["torch"] == torch / call


def test_a_short_call_on_a_gpu_also_has_to_hold_in_a_replayed_graph():
    graph = {"chosen": "a.rms_norm.x", "kernels": {"a.rms_norm.x": {"us": 5.0}}, "torch": {"us": 4.0}}
    assert not judged(record(10, 10, 11, graph=graph), 0.97)["ok"]
    graph = {**graph, "torch": {"us": 6.0}}
    assert judged(record(10, 10, 11, graph=graph), 0.97)["ok"]


def test_the_summary_holds_each_goal_beside_its_figure():
    found = [
        {"name": "x", "oracle": 1.0, "torch": 2.0, "ok": True},
        {"name": "y", "oracle": 1.4, "torch": 0.5, "ok": False},
    ]
    told = summary(found, "cpu")
    assert [item["met"] for item in told["figures"].values()] == [False, False, False]
    assert told["slower than torch"] == ["y"] and told["× torch, geomean"] == 1.0


def test_each_backend_gets_its_own_kernels_as_multiples_of_torch_and_a_hash():
    sizes = {"rows": 16, "hidden": 4096}
    taken = {"op": "rms_norm", "kind": "bfloat16", "mode": "eager", "sizes": sizes, "base": 10.0, "busy": 0.1,
             "cost": (1e5, 1e6), "errors": {"triton.rms_norm.rows": 0.25},
             "times": {"torch.rms_norm.native": 10.0, "triton.rms_norm.rows": 5.0}}  # fmt: skip
    wrong = {**taken, "sizes": {"rows": 32, "hidden": 4096}, "times": {"torch.rms_norm.native": 11.0}}
    gone = {**wrong, "sizes": {"rows": 64, "hidden": 4096}, "times": {"triton.rms_norm.gone": 1.0}}
    header = {"device": "H", "commit": "c", "versions": {"torch": "2", "triton": "3"}, "threads": 0, "capped": False,
              "family": "sm90", "backends": {"torch": "1.1", "triton": "1.2"}}  # fmt: skip
    made = documents([(header, [taken, wrong, gone])])
    assert set(made) == {"torch", "triton"}
    entry = made["triton"]["families"]["sm90"]
    (group,) = entry["groups"]
    assert group["kernels"] == ["triton.rms_norm.rows"] and group["points"] == [[16, 4096, 100000, 1000000, 10.0, 0.5]]
    assert group["errors"] == [0.25] and (entry["vendor"], entry["busy"]) == ("3", 0.1)
    assert entry["version"] == state.world.registry.backends["triton"].version  # the package they ship in
    (group,) = made["torch"]["families"]["sm90"]["groups"]
    assert [point[-2:] for point in group["points"]] == [[10.0, 1.0], [10.0, 1.1]]
    body = {name: value for name, value in made["triton"].items() if name != "hash"}
    assert made["triton"]["hash"] == digest(body) and json.loads(rendered(made["triton"])) == made["triton"]


def test_launches_in_place_of_replays_and_disturbed_calls_do_not_ship(tmp_path):
    header, *lines = (json.loads(line) for line in (RESULTS / "h200" / "factory.jsonl").read_text("utf-8").splitlines())
    taken = next(item for item in lines if len(item.get("graph", {}).get("times", {})) > 2)
    launched, replayed, *_ = taken["graph"]["times"]
    times = {launched: 1.3 * taken["times"][launched], replayed: 0.9 * taken["times"][replayed]}
    (found,) = _captured([{**taken, "graph": {"base": 3.0, "times": times}}])
    assert found["times"].keys() == {replayed} and found["base"] == 3.0
    file = tmp_path / "factory.jsonl"
    for busy, left in ((0.05, 2), (0.5, 1)):
        kept = [header, {**taken, "busy": busy}, {**next(item for item in lines if item is not taken), "busy": 0.0}]
        file.write_text("".join(json.dumps(item) + "\n" for item in kept), encoding="utf-8")
        assert len(records(file)[1]) == left
    file.write_text("".join(json.dumps(item) + "\n" for item in (header, {**taken, "busy": 0.5})), encoding="utf-8")
    with pytest.raises(SystemExit, match="take them anew"):
        records(file)


def test_what_a_run_with_another_seed_raced_ships_once_with_its_own_cost(tmp_path):
    call = next(call for call in drawn(11, "cuda") if call.op == "rms_norm")
    sizes = dict(zip(("rows", "hidden"), call.options["shape"], strict=True))
    kernels = {"triton.rms_norm.rows": {"us": 5.0, "error": 1e-4}, "liger.rms_norm.triton": {"why": "wrong: 3.0"}}
    graph = {"torch": {"us": 4.0}, "kernels": {"triton.rms_norm.rows": {"us": 2.0}}}
    record = {"name": call.name, "op": call.op, "sizes": sizes, "torch": {"us": 10.0}, "kernels": kernels, "busy": 0.0}
    machine = {"gpu": "Abacus", "torch": "2.11.0"}
    data = {"seed": 11, "device": "cuda", "asked": 60, "commit": "0123abc", "machine": machine,
            "records": [{**record, "graph": graph}]}  # fmt: skip
    header = {"family": "sm90", "device": "Abacus", "commit": "4567def", "versions": {"torch": "2.11.0"}}
    run, file = tmp_path / "untuned.json", tmp_path / "factory.jsonl"
    run.write_text(json.dumps(data))
    file.write_text(json.dumps(header) + "\n")
    assert main(["--raced", str(run), str(file)]) == main(["--raced", str(run), str(file)]) == 0
    told, (found,) = records(file)
    assert told["commit"] == "4567def, 0123abc (seed 11)" and found["seed"] == 11 and found["base"] == 10.0
    assert found["kind"] == call.options["dtype"] and found["times"] == {"triton.rms_norm.rows": 5.0}
    assert found["refused"] == {"liger.rms_norm.triton": "wrong: 3.0"} and found["graph"]["times"] == {
        "triton.rms_norm.rows": 2.0
    }
    described = context(call.op, {**call.options, "device": "h200"})
    assert found["cost"] == tuple(state.world.ops["rms_norm"].cost(described))
    run.write_text(json.dumps({**data, "machine": {**machine, "gpu": "Soroban"}}))
    with pytest.raises(SystemExit, match="Soroban"):
        main(["--raced", str(run), str(file)])


@pytest.fixture(scope="module")
def kept():
    """What each file of the factory holds: every call of it is drawn and described anew, which takes seconds."""
    return {file: records(file) for file in sorted(RESULTS.glob("*/factory.jsonl"))}


def test_the_files_in_the_packages_are_what_the_kept_measurements_say(kept, monkeypatch):
    monkeypatch.setattr("tools.shipped.records", kept.__getitem__)
    assert main(["--check"]) == 0


def test_calls_that_were_left_out_are_told_well_enough_to_choose_by(kept):
    """The kept figures, from the kept calls; the goal for choices without tuning holds on quiet machines."""
    assert kept
    for file, (header, calls) in kept.items():
        told = left_out(calls, header["family"].partition("-")[0])
        assert told == json.loads(file.with_name("left_out.json").read_text(encoding="utf-8"))
        assert told["shipped"]["calls"] >= 100
        if max(item["busy"] for item in calls) < 0.1:
            assert told["shipped"]["chosen ÷ fastest, geomean"] <= 1.05
