"""Two tuning runs choose alike (`make prove NAME=tune`): on 98 % of calls or more, else within 2 % of each other.

A race is only as steady as its machine, so this runs in the prove lane alone, on an idle one.
"""

from __future__ import annotations

import statistics

import pytest
import torch

import layerzero as lz
from layerzero import env
from layerzero.device.probe import probe_device
from layerzero.measurements.believed import measurements_from
from layerzero.perfdb.store import PerfDB
from layerzero.runtime.state import state
from layerzero_tune.model_calls import model_traffic

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8000,
    "intermediate_size": 1024, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
    "max_position_embeddings": 2048,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not env.read().prove, reason="a matter of timing: make prove NAME=tune runs it")


@pytest.mark.req("R-TUNE-04", "R-TUNE-05")
def test_two_runs_choose_alike(tmp_path, capsys):
    lz.reset()
    torch.set_num_threads(1)
    device = probe_device()
    traffic = model_traffic(CONFIG, device=device, prefill=(64, 256), decode=(64, 256, 1024), batches=(1, 4))
    runs = [
        lz.tune(traffic, database=tmp_path / f"{number}.db", seconds=1.0, compile=False, seed=number)
        for number in range(2)
    ]
    chosen = []
    for number in range(2):
        state.publish(measurements=measurements_from(PerfDB(tmp_path / f"{number}.db"), state.world))
        chosen.append(
            {item.name: lz.select(item.trial.context.op, item.trial.context).chosen for item in runs[0].outcomes}
        )
    times = [{item.name: item.trial.times for item in run.outcomes} for run in runs]
    differ = [name for name in chosen[0] if chosen[0][name] != chosen[1][name]]
    gaps = []
    for name in differ:
        one, two = chosen[0][name], chosen[1][name]
        # How far apart the two kernels are, by both runs together.
        ratio = statistics.mean(found[name][one].median_us / found[name][two].median_us for found in times)
        gaps.append(max(ratio, 1 / ratio))
    agree = 1 - len(differ) / len(chosen[0])
    with capsys.disabled():
        print(
            f"\n{len(chosen[0])} calls on {device.name}, {agree:.1%} chosen alike, "
            f"seconds {runs[0].seconds:.0f} and {runs[1].seconds:.0f}"
        )
        for name, gap in zip(differ, gaps, strict=True):
            print(f"  {name}: {chosen[0][name]} and {chosen[1][name]}, {gap:.3f}x apart")
    lz.reset()
    assert not runs[0].skipped and len(chosen[0]) >= 30
    assert agree >= 0.98
    assert all(gap <= 1.02 for gap in gaps)
