"""Recording: the calls that occur, exactly as often as they occur, and nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import layerzero as lz
from layerzero.errors import ConfigurationError, InvalidInputError
from layerzero.recording.tally import CountingTable
from layerzero.recording.traffic import Recorded, Traffic, add_to_file, load, save
from layerzero.runtime.state import state


def decode(steps, width=16):
    torch.manual_seed(0)
    q, cache = torch.randn(1, 2, 1, width), torch.randn(1, 2, 256, width)
    with torch.no_grad():
        return [lz.attention(q, cache[:, :, :n], cache[:, :, :n]) for n in range(1, steps + 1)]


@pytest.fixture(autouse=True)
def fresh(lab):
    return lab


def test_every_call_is_counted_once():
    x, w = torch.randn(4, 32), torch.randn(32)
    lz.rms_norm(x, w)  # hot before
    with lz.record() as found:
        for _ in range(7):
            lz.rms_norm(x, w)
        lz.rms_norm(torch.randn(5, 32), w)
        decode(100)
    counts = {item.context.op: 0 for item in found.traffic.calls}
    for item in found.traffic.calls:
        counts[item.context.op] += item.count
    assert counts == {"rms_norm": 8, "attention": 100}
    rows = {
        dict(item.context.dims)["rows"]: item.count for item in found.traffic.calls if item.context.op == "rms_norm"
    }
    assert rows == {4: 7, 5: 1}
    lz.rms_norm(x, w)
    assert sum(item.count for item in found.traffic.calls) == 108  # the block has ended


def test_results_and_choices_are_the_same_while_recording():
    plain = decode(70)
    with lz.record():
        recorded = decode(70)
    assert all(torch.equal(left, right) for left, right in zip(plain, recorded, strict=True))
    assert type(state.world.hot) is dict  # nothing of it is left


def test_strides_are_those_of_the_real_tensors():
    q, wide = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 64, 16)
    with lz.record() as found, torch.no_grad():
        lz.attention(q, wide[:, :, :20], wide[:, :, :20])
    (item,) = found.traffic.calls
    assert item.strides[1] == wide[:, :, :20].stride() == (2048, 1024, 16, 1)
    assert item.context.strides.order == "other"


def test_threads_and_scopes_are_counted_exactly():
    x, w = torch.randn(4, 32), torch.randn(32)

    def work():
        for _ in range(500):
            lz.rms_norm(x, w)
        with lz.prefer("torch"):
            for _ in range(100):
                lz.rms_norm(x, w)

    with lz.record() as found:
        lz.rms_norm(x, w)
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(item.count for item in found.traffic.calls) == 1 + 8 * 600


def test_a_swap_of_the_world_loses_no_count():
    x, w = torch.randn(4, 32), torch.randn(32)
    with lz.record() as found:
        for _ in range(5):
            lz.rms_norm(x, w)
        lz.configure(prefer=["torch"])
        for _ in range(5):
            lz.rms_norm(x, w)
        assert isinstance(state.world.hot, CountingTable)
    assert sum(item.count for item in found.traffic.calls) == 10


def test_one_recording_at_a_time():
    with lz.record(), pytest.raises(InvalidInputError, match="recorded already"), lz.record():
        pass
    with lz.record() as found:
        pass
    assert len(found.traffic) == 0


def test_a_file_keeps_everything_and_several_runs_add_up(tmp_path):
    path = tmp_path / "traffic.json"
    with lz.record(path) as found:
        decode(40)
    assert load(path) == found.traffic
    with lz.record(path):
        decode(40)
    twice = load(path)
    assert [item.count for item in twice.calls] == [2 * item.count for item in found.traffic.calls]
    assert {item.context for item in twice.calls} == set(found.traffic.contexts)


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"format": "other"}', '{"format": "layerzero-traffic/1", "calls": [{}]}']
)
def test_a_damaged_file_is_one_clear_error_and_is_set_aside(tmp_path, damage):
    path = tmp_path / "traffic.json"
    path.write_text(damage)
    with pytest.raises(ConfigurationError, match=r"traffic\.json"):
        load(path)
    ctx = lz.select("rms_norm", torch.randn(2, 8), torch.randn(8)).context
    add_to_file(Traffic((Recorded(ctx, 3),)), path)
    assert [item.count for item in load(path).calls] == [3]
    assert [item.read_text() for item in tmp_path.glob("traffic.json.corrupt-*")] == [damage]


def test_calls_of_a_device_that_is_not_here_name_those_that_are(tmp_path):
    ctx = lz.select("rms_norm", torch.randn(2, 8), torch.randn(8)).context
    save(Traffic((Recorded(ctx),)), tmp_path / "t.json")
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text().replace('"cpu"', '"xpu"'))
    with pytest.raises(ConfigurationError, match=r"calls\[0\]: device xpu:0 is not") as caught:
        load(tmp_path / "t.json")
    assert "cpu" in caught.value.hint and "None" not in str(caught.value)


def test_every_kind_of_context_survives_the_file(tmp_path):
    q = torch.randn(1, 4, 8, 16, requires_grad=True)
    k = torch.randn(1, 2, 8, 16)
    contexts = [
        lz.select("attention", q, k, k, is_causal="bottom_right", window=(3, 0), softcap=5.0, return_lse=True).context,
        lz.select("attention", k, k, k, attn_mask=lz.chunk_mask(4)).context,
        lz.select("linear", torch.randn(2, 64), lz.quantize(torch.randn(8, 64), "int8", granularity="channel")).context,
        lz.select("sample", torch.randn(2, 50), top_k=4, generator=torch.Generator()).context,
    ]
    save(Traffic(tuple(Recorded(ctx) for ctx in contexts)), tmp_path / "t.json")
    assert set(load(tmp_path / "t.json").contexts) == set(contexts)


def test_the_environment_records_a_whole_process(tmp_path):
    path = tmp_path / "run.json"
    code = (
        "import torch, layerzero as lz\nx, w = torch.randn(2, 8), torch.randn(8)\nfor _ in range(9): lz.rms_norm(x, w)"
    )
    environ = {**os.environ, "LAYERZERO_RECORD": str(path), "LAYERZERO_PLUGINS": ""}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    (item,) = load(path).calls
    assert item.context.op == "rms_norm" and item.count == 9


def test_a_call_bears_the_threads_it_was_recorded_with_and_a_file_without_them_is_read(tmp_path):
    path, before = tmp_path / "traffic.json", torch.get_num_threads()
    for threads in (before, before + 1):
        torch.set_num_threads(threads)
        try:
            with lz.record(path):
                lz.rms_norm(torch.randn(2, 8), torch.randn(8))
        finally:
            torch.set_num_threads(before)
        (item,) = load(path).calls
        assert item.threads == threads
    assert item.count == 2
    data = json.loads(path.read_text())
    del data["calls"][0]["threads"]
    path.write_text(json.dumps(data))
    assert load(path).calls[0].threads == 0
    data["calls"][0]["threads"] = "many"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match="'many' is no size"):
        load(path)
