"""Tuning: only what is right is timed, the fastest wins, an interruption costs nothing, and lies are found out."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace

import pytest
import torch

import layerzero as lz
from layerzero.dispatch.run import describe
from layerzero.errors import InvalidInputError, TuningError
from layerzero.measurements.believed import measurements_from
from layerzero.model.device import DeviceSpec
from layerzero.model.variants import GradientVariant, twins
from layerzero.perfdb.store import PerfDB
from layerzero.reasons import ReasonCode
from layerzero.recording.traffic import Recorded, Traffic
from layerzero.runtime.state import state
from layerzero.selection.world import measurement_settings
from layerzero.tuning.inputs import build
from layerzero_cli.calls import context as written
from layerzero_tune import candidates as bench_module
from layerzero_tune import drift as drift_module
from layerzero_tune import tuning_run
from layerzero_tune.cli import tune as tuning_cli
from layerzero_tune.drift import Watcher, drifted
from layerzero_tune.timing import baselines
from layerzero_tune.timing.baselines import maker
from layerzero_tune.timing.clock import cpu_clock
from layerzero_tune.timing.race import pass_screening, screened
from layerzero_tune.trial import trial as any_trial
from layerzero_tune.tuning import _replayed
from tests import own_time

FAST, SLOW = 60e-6, 600e-6


def trial(ctx, **options):
    """Without kernels that would be compiled first: that takes many seconds, and is not the matter here."""
    return any_trial(ctx, **{"jit": "off", **options})


def tune(source, **options):
    return lz.tune(source, **{"compile": False, **options})


def normed(x, weight, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def taking(seconds, compute=normed):
    return own_time.taking(seconds, compute)


@pytest.fixture(autouse=True)
def races_go_by_their_own_time(monkeypatch):
    own_time.use_own_time(monkeypatch)


def liar(x, weight, eps):
    """Fast, and wrong in one element of the last row."""
    out = normed(x, weight, eps)
    out[-1, -1] += 0.01
    return out


def call():
    torch.manual_seed(0)
    return torch.randn(16, 64), torch.randn(64)


def context():
    with torch.no_grad():
        return lz.select("rms_norm", *call()).context


class Bench:
    """A laboratory to which kernels are added one by one."""

    def __init__(self, lab):
        self.lab, self.kernels = lab, []

    def add(self, kernel_id, function, priority, **fields):
        self.kernels.append(self.lab.kernel(kernel_id, function, priority=float(priority), **fields))
        self.publish()

    def publish(self, **settings):
        self.lab.use(*self.kernels, **settings)


@pytest.fixture
def bench(lab):
    made = Bench(lab)
    made.add("lab.rms_norm.slow", taking(SLOW), 90)
    made.add("lab.rms_norm.fast", taking(FAST), 10)
    return made


# -- who races -----------------------------------------------------------------------------------------
@pytest.mark.req("R-TUNE-01", "R-TUNE-03")
def test_one_interruption_does_not_throw_the_winner_out(bench, monkeypatch):
    """Whatever is timed second or later is interrupted for a second at its first sample."""
    seen = set()

    def interrupted(call, count):
        us = cpu_clock(call, count)
        first = bool(seen) and id(call) not in seen
        seen.add(id(call))
        return us + 1e6 if first else us

    monkeypatch.setattr(bench_module, "clock_for", lambda device: interrupted)
    found = trial(context(), seconds=0.05, only=frozenset({"lab.rms_norm.slow", "lab.rms_norm.fast"}))
    assert found.winner == "lab.rms_norm.fast"
    assert found.times["lab.rms_norm.fast"].samples >= 12 and found.times["lab.rms_norm.fast"].median_us < 600


def test_screening_takes_three_samples_in_turns_and_the_fastest_counts():
    told = {"good": [9_000.0, 9_000.0, 120.0], "slow": [210.0, 210.0, 230.0], "bad": [9_000.0, 8_000.0, 7_000.0]}
    order, counts = [], []
    calls = {name: (lambda name=name: order.append(name)) for name in told}
    left = {name: list(us) for name, us in told.items()}

    def clock(call, count):
        call()
        counts.append(count)
        return left[order[-1]].pop(0)

    found = screened(calls, clock)
    assert found == told and order == ["good", "slow", "bad"] * 4  # one to warm up, three samples
    assert pass_screening(found) == ["good", "slow"]
    assert counts == [1, 1, 1, 1, 5, 1, 1, 5, 1]  # long calls are not made more often than needed
    lucky = {"lucky": [4_000.0, 20_000.0, 21_000.0], "steady": [17_000.0, 17_500.0, 18_000.0]}
    assert pass_screening(lucky) == ["lucky", "steady"]  # one sample on an idle machine sends nobody away
    # A late launch is as long as many kernels: nobody is sent away for 44 µs against 5.
    assert pass_screening({"a": [5.0], "late": [44.0], "far": [300.0]}) == ["a", "late"]


# -- the gate ------------------------------------------------------------------------------------------
def test_the_most_frequent_calls_come_first_and_of_equals_the_largest():
    """A library's buffers are then as large as they will be: a small call first would be timed slower than it is."""
    ctx = context()
    sized = {rows: replace(ctx, dims=(("rows", rows), ("hidden", 64))) for rows in (4, 64, 512)}
    calls = [("small", Recorded(sized[4], 1)), ("large", Recorded(sized[512], 1)), ("often", Recorded(sized[64], 9))]
    assert [name for name, _ in tuning_run.distinct(calls)] == ["often", "large", "small"]


@pytest.mark.req("R-TUNE-03")
def test_a_kernel_does_not_race_against_itself(lab):
    """A variant that differs in its gradient alone has its sibling's times, and chance decides nothing between them."""
    made = Bench(lab)
    made.add("lab.rms_norm.plain", taking(FAST), 10)
    made.add("lab.rms_norm.a_variant", taking(FAST), 10)
    base, other = made.kernels
    module, _, name = base.function.partition(":")
    module = sys.modules[module]
    module.of_the_gradient = GradientVariant(getattr(module, name))
    made.kernels[1] = replace(other, function=f"{module.__name__}:of_the_gradient")
    made.publish()
    ids = frozenset(item.kernel_id for item in made.kernels)
    found = trial(context(), seconds=0.05, only=ids)
    assert found.times["lab.rms_norm.plain"] == found.times["lab.rms_norm.a_variant"]
    assert found.winner == "lab.rms_norm.a_variant"  # by name, as every tie
    assert sorted(row.kernel_id for row in found.rows) == [*sorted(ids), "torch.default"]
    known = {item.kernel_id: item for item in made.kernels}
    assert twins(known) == {"lab.rms_norm.a_variant": "lab.rms_norm.plain"}
    assert twins({"lab.rms_norm.a_variant": made.kernels[1]}) == {}  # alone it runs for itself


@pytest.mark.req("R-TUNE-03", "R-SEL-03")
def test_who_ties_here_is_raced_at_the_other_end_of_the_bucket(lab):
    """Two kernels alike at 16 rows; with 9 the first by name takes nine times as long."""

    def even(x, weight, eps):
        return taking(3e-4 if x.shape[0] > 12 else 27e-4)(x, weight, eps)

    made = Bench(lab)
    made.add("lab.rms_norm.a", even, 10)
    made.add("lab.rms_norm.b", taking(3e-4), 10)
    found = trial(context(), seconds=0.2, only=frozenset({"lab.rms_norm.a", "lab.rms_norm.b"}))
    assert found.winner == "lab.rms_norm.b"
    assert found.times["lab.rms_norm.a"].median_us > 1.3 * found.times["lab.rms_norm.b"].median_us


@pytest.mark.req("R-TUNE-01", "R-TUNE-02", "R-TUNE-03")
def test_the_fastest_right_kernel_wins(bench):
    found = trial(context(), seconds=0.2)
    assert found.winner not in ("lab.rms_norm.slow",)
    slow, fast = found.times["lab.rms_norm.slow"], found.times["lab.rms_norm.fast"]
    assert slow.median_us >= 600 > fast.median_us >= 60
    assert found.errors["lab.rms_norm.fast"] < 1e-6
    data = found.to_json()["kernels"]["lab.rms_norm.fast"]
    assert data["median_us"] <= data["p95_us"] <= data["p99_us"] and data["samples"] >= 3
    told = {item.kernel_id: item for item in found.rows}["lab.rms_norm.fast"]
    assert (told.median_us, told.p95_us, told.p99_us) == (fast.median_us, fast.p95_us, fast.p99_us)
    assert (told.variance, told.samples) == (fast.steady, fast.samples) and fast.variance > 0.0


def test_times_of_a_call_inside_a_graph_are_kept_apart_from_those_of_eager_calls(lab):
    lab.use(lab.kernel("lab.rms_norm.fast", taking(FAST), priority=90.0, graph_safe=True))
    found = trial(replace(context(), capturing=True), seconds=0.1)
    assert found.context.capturing and {row.mode for row in found.rows} == {"graph/hot"}
    assert {row.mode for row in trial(context(), seconds=0.1).rows} == {"eager/hot"}


def test_calls_on_a_gpu_are_also_meant_for_a_graph_where_that_is_asked_for():
    eager = Recorded(replace(context(), device=DeviceSpec.for_sm(90)), count=3)
    inside = replace(eager, context=replace(eager.context, capturing=True))
    trained = replace(eager, context=replace(eager.context, needs_grad=True))
    assert _replayed([("norm", eager), ("trained", trained), ("here", Recorded(context()))]) == [
        ("norm in a graph", inside)
    ]
    assert _replayed([("norm", eager), ("recorded", inside)]) == []


@pytest.mark.req("R-TUNE-04")
def test_a_fast_but_wrong_kernel_is_never_timed_and_never_wins(bench, tmp_path):
    bench.add("lab.rms_norm.liar", liar, 100)
    assert lz.which("rms_norm", *call()) == "lab.rms_norm.liar"  # what its author says of it
    tuned = tune([context()], database=tmp_path / "perf.db", seconds=0.1)
    (outcome,) = tuned.outcomes
    assert "lab.rms_norm.liar" not in outcome.trial.times
    assert "off by 0.01" in outcome.trial.refused["lab.rms_norm.liar"]
    report = lz.explain("rms_norm", *call())
    assert report.chosen in outcome.trial.times
    assert [r.code for r in report.reasons["lab.rms_norm.liar"]] == [ReasonCode.NUMERICS_MISMATCH]
    # also where it is preferred, and in a call of the same bucket with other sizes
    with lz.prefer("lab.rms_norm.liar"):
        assert lz.which("rms_norm", torch.randn(13, 64), torch.randn(64)) != "lab.rms_norm.liar"
    # and in the next process
    state.reset()


def test_a_kernel_that_raises_is_left_out_with_its_words(bench, tmp_path):
    def broken(x, weight, eps):
        raise RuntimeError("no such tile")

    bench.add("lab.rms_norm.broken", broken, 100)
    tuned = tune([context()], database=tmp_path / "perf.db", seconds=0.1)
    assert "no such tile" in tuned.outcomes[0].trial.refused["lab.rms_norm.broken"]
    assert lz.explain("rms_norm", *call()).reasons["lab.rms_norm.broken"][0].code is ReasonCode.KERNEL_RAISED


@pytest.mark.parametrize("wrong", ["last row", "one head", "late rows"])
def test_the_gate_sees_what_is_wrong_only_in_a_part_of_a_long_call(bench, wrong):
    """Where the truth is computed in pieces, the pieces lie where kernels go wrong: at the ends."""

    def kernel(q, k, v, *rest):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        part = {"last row": out[:, :, -1], "one head": out[:, -1], "late rows": out[:, :, -40:]}[wrong]
        part += 0.05
        return out

    bench.add("lab.attention.partly", kernel, 100)
    q = torch.randn(1, 4, 1024, 16)
    with torch.no_grad():
        ctx = lz.select("attention", q, q, q, is_causal=True).context
    found = trial(ctx, seconds=0.05, only=frozenset({"lab.attention.partly", "sdpa.attention.flash_cpu"}))
    assert "off by 0.05" in found.refused["lab.attention.partly"] and found.winner == "sdpa.attention.flash_cpu"


@pytest.mark.parametrize("op", ["varlen", "paged", "gqa", "window", "mask", "top_left", "bshd", "grouped"])
def test_right_kernels_pass_the_gate_in_every_form_that_is_checked_in_pieces(op, monkeypatch):
    monkeypatch.setitem(__import__("layerzero.tuning.truth", fromlist=["ROOM"]).ROOM, "cpu", 1 << 12)
    q, k = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 90, 16)
    cu = torch.tensor([0, 30, 40, 100], dtype=torch.int32)
    t = torch.randn(100, 4, 16)
    pages = torch.randn(40, 16, 2, 16)
    batch = lz.paged_batch(
        torch.arange(20, dtype=torch.int32).view(4, 5), torch.tensor([80, 70, 5, 33], dtype=torch.int32)
    )
    groups = lz.grouped_batch(torch.tensor([0, 20, 50]), torch.tensor([0, 100]), torch.tensor([[40], [100]]))
    with torch.no_grad():
        given = {
            "varlen": ("varlen_attention", (t, t, t, cu, cu), {"is_causal": True}),
            "paged": ("paged_attention", (torch.randn(4, 4, 16), pages, pages, batch), {}),
            "gqa": ("attention", (q, k, k), {"is_causal": "bottom_right", "return_lse": True}),
            "window": ("attention", (q, k, k), {"window": (7, 3)}),
            "mask": ("attention", (q, k, k), {"attn_mask": torch.rand(70, 90) < 0.7}),
            "top_left": ("attention", (q, k, k), {"is_causal": True}),
            "bshd": ("attention", (q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2)), {"layout": "BSHD"}),
            "grouped": ("grouped_attention", (torch.randn(50, 4, 16), t, t, groups), {}),
        }[op]
        ctx = lz.select(given[0], *given[1], **given[2]).context
    found = trial(ctx, seconds=0.02)
    assert not found.refused and len(found.times) >= 2


def test_random_kernels_are_held_to_their_distribution(bench):
    def own_way(logits, k, temperature, generator):
        values, ids = logits.topk(k, dim=-1)
        drawn = torch.multinomial((values / temperature).softmax(-1), 1, generator=generator)
        return ids.gather(-1, drawn).squeeze(-1)

    def ignores_k(logits, k, temperature, generator):
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(-1)

    bench.add("lab.sample_topk.other", own_way, 90)
    bench.add("lab.sample_topk.wrong", ignores_k, 95)
    ctx = lz.select("sample_topk", torch.randn(64, 200), 4).context
    found = trial(ctx, seconds=0.05)
    assert "lab.sample_topk.other" in found.times
    assert "another distribution" in found.refused["lab.sample_topk.wrong"]


def test_gradients_are_compared_and_timed_where_they_are_asked_for(bench):
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return normed(x, weight, 1e-6)

        @staticmethod
        def backward(ctx, grad):
            x, weight = (item.detach().requires_grad_() for item in ctx.saved_tensors)
            with torch.enable_grad():
                found = torch.autograd.grad(normed(x, weight, 1e-6), (x, weight), grad)
            return found[0] * 0.5, found[1]

    bench.add("lab.rms_norm.halved", lambda x, w, eps: Halved.apply(x, w), 99)
    x, w = call()
    ctx = lz.select("rms_norm", x.requires_grad_(), w.requires_grad_()).context
    found = trial(ctx, seconds=0.05)
    assert found.refused["lab.rms_norm.halved"].startswith("gradient")
    assert "lab.rms_norm.fast" in found.times


# -- against torch itself ------------------------------------------------------------------------------
@pytest.fixture
def plain(monkeypatch, held_against_torch):
    """Torch's own code for rms_norm takes a millisecond by the clock of the races, long beside what is computed."""
    code = taking(1e-3)
    monkeypatch.setitem(
        baselines.BASELINES, "rms_norm", lambda given: lambda: code(given["x"], given["weight"], given["eps"])
    )


def alone(lab, **milliseconds):
    """A World in which these kernels are the only ones that may run rms_norm; gives what each of them takes."""
    made = Bench(lab)
    kernels = {name: taking(ms * 1e-3) for name, ms in milliseconds.items()}
    for name, kernel in kernels.items():
        made.add(f"lab.rms_norm.{name}", kernel, 50)
    made.publish(deny=["torch", "reference", "cpu", "inductor"])
    return {name: kernel.state for name, kernel in kernels.items()}


@pytest.mark.fault(26)
def test_torch_itself_races_in_the_same_rounds_and_by_the_same_clock(lab, plain):
    alone(lab, a=0.9, b=0.95, c=1.7)
    found = trial(context(), seconds=0.05)
    assert found.torch is not None and 1_000.0 <= found.torch.median_us < 1_700.0 and not found.lost
    # Close ones are raced again, together: as many samples of torch's code as of the kernel it is close to.
    assert found.torch.samples == found.times["lab.rms_norm.a"].samples
    assert found.choice == found.winner == "lab.rms_norm.a"
    (row,) = [item for item in found.rows if item.kernel_id == "torch.default"]
    assert row.median_us == found.torch.median_us and row.max_error is not None
    assert found.to_json()["stored"] and found.to_json()["torch_us"] == pytest.approx(found.torch.median_us, abs=0.001)


@pytest.mark.fault(26)
def test_a_choice_that_loses_to_torch_is_never_stored_and_what_was_known_stays(lab, plain, tmp_path, monkeypatch):
    """Tuned when it was quiet, and again while others took the cores that kernels need: 0.63 times torch's speed."""
    monkeypatch.setenv("LAYERZERO_PERFDB", str(tmp_path / "perf.db"))
    takes = alone(lab, a=0.5, b=0.7)
    tune([context()], seconds=0.05)
    before = PerfDB(tmp_path / "perf.db").all()
    assert {row.kernel_id for row in before} == {"lab.rms_norm.a", "lab.rms_norm.b", "torch.default"}
    takes["a"]["seconds"], takes["b"]["seconds"] = 2.5e-3, 1.6e-3
    busy = tune([context()], seconds=0.05)
    (outcome,) = busy.outcomes
    assert outcome.trial.lost and outcome.trial.choice == "lab.rms_norm.b" and busy.rows == 0
    assert not outcome.trial.to_json()["stored"]
    assert sorted(map(str, PerfDB(tmp_path / "perf.db").all())) == sorted(map(str, before))
    assert lz.which("rms_norm", *call()) == "lab.rms_norm.a"
    (line,) = tuning_cli._lost(busy.outcomes)
    assert "torch default took 1" in line and "lab.rms_norm.b" in line and "no time was stored" in line
    # Without anything known before, nothing is known: no time of the busy moment decides.
    fresh = tune([context()], seconds=0.05, database=tmp_path / "fresh.db")
    assert fresh.outcomes[0].trial.lost and PerfDB(tmp_path / "fresh.db").all() == []


@pytest.mark.fault(26)
def test_a_choice_that_lost_for_a_moment_is_raced_again(lab, plain, monkeypatch):
    takes = alone(lab, a=3.0)
    races = []

    def passing(self, *given, timed=bench_module.Bench.timed):
        races.append(takes["a"]["seconds"])
        found = timed(self, *given)
        takes["a"]["seconds"] = 0.6e-3  # whoever was there is gone
        return found

    monkeypatch.setattr(bench_module.Bench, "timed", passing)
    found = trial(context(), seconds=0.05)
    assert races == [3e-3, 0.6e-3] and not found.lost and found.times["lab.rms_norm.a"].median_us < 1_000.0
    takes["a"]["seconds"] = 3e-3
    beside = trial(context(), seconds=0.05, patient=False)
    assert beside.lost and len(races) == 3 and not beside.rows  # beside a program that serves there is one look


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    ("op", "options", "takes_part"),
    [
        ("attention", {"q": (2, 9, 4, 16), "k": (2, 9, 2, 16), "layout": "BSHD", "causal": "top_left"}, True),
        ("attention", {"shape": (1, 2, 24, 16), "causal": "top_left", "window": (5, 0)}, True),
        ("attention", {"shape": (1, 2, 24, 16), "softcap": 5.0}, False),
        ("paged_attention", {"q": (3, 4, 16), "k": (12, 4, 2, 16), "context": 14}, True),
        ("varlen_attention", {"q": (20, 4, 16), "k": (20, 2, 16), "context": 10, "causal": "top_left"}, True),
        ("rms_norm", {"shape": (5, 32)}, True),
        ("add_rms_norm", {"shape": (5, 32)}, True),
        ("layer_norm", {"shape": (5, 32), "bias": True}, True),
        ("rope", {"q": (1, 7, 4, 16), "k": (1, 7, 2, 16), "layout": "BSHD"}, True),
        ("silu_and_mul", {"shape": (5, 32)}, True),
        ("gelu_and_mul", {"shape": (5, 32), "approximate": "tanh"}, True),
        ("linear", {"shape": (5, 32), "weight": (8, 32), "bias": True}, True),
        ("linear", {"shape": (5, 32), "weight": (8, 32), "format": "int8", "granularity": "channel"}, False),
        ("embedding", {}, False),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_torch_itself_takes_part_where_it_gives_what_the_op_gives(op, options, takes_part, built_in):
    if op == "embedding":
        assert maker(state.world.ops["rms_norm"], replace(context(), op=op), None) is None
        return
    asked = written(op, {**options, "device": "cpu", "dtype": "fp32"})
    spec, here = state.world.ops[op], state.world.changed()
    made = build(asked)
    ctx = describe(spec, made.args, made.layout, None, here)
    admitted = bench_module.Bench(spec, ctx, lambda: build(asked), measurement_settings(here, jit="off"))
    admitted.admit(frozenset(item for item in admitted._decision.ranking if item.startswith("reference.")))
    assert (admitted.plain_error is not None) is takes_part


# -- sittings ------------------------------------------------------------------------------------------
@pytest.mark.req("R-TUNE-04", "R-TUNE-05", "R-PDB-02", "R-SEL-03", "R-API-26")
def test_tuning_changes_what_is_selected_at_once(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERZERO_PERFDB", str(tmp_path / "perf.db"))
    lz.reset()
    bench.publish()
    assert lz.which("rms_norm", *call()) == "lab.rms_norm.slow"
    tuned = tune([context()], seconds=0.1)
    winner = tuned.outcomes[0].trial.winner
    assert winner != "lab.rms_norm.slow" and lz.which("rms_norm", *call()) != "lab.rms_norm.slow"
    rows = {item.kernel_id: item for item in PerfDB(tmp_path / "perf.db").all()}
    assert rows == {item.kernel_id: item for item in tuned.outcomes[0].trial.rows} and winner in rows
    assert lz.explain("rms_norm", *call()).decision.winner.measured_us > 0


def many(count):
    with torch.no_grad():
        return [
            lz.select("rms_norm", torch.randn(rows, 64), torch.randn(64)).context
            for rows in (2**i for i in range(count))
        ]


def test_a_budget_ends_a_sitting_and_the_next_one_goes_on(bench, tmp_path):
    contexts = many(3)
    first = tune(contexts, database=tmp_path / "p.db", seconds=0.05, budget=1e-6)
    assert len(first.outcomes) == 0 and len(first.left) == 3
    one = tune(contexts, database=tmp_path / "p.db", seconds=0.05, budget=0.01)
    assert len(one.outcomes) == 1 and len(one.left) == 2
    rest = tune(contexts, database=tmp_path / "p.db", seconds=0.05)
    assert len(rest.resumed) == 1 and len(rest.outcomes) == 2 and not rest.left
    again = tune(contexts, database=tmp_path / "p.db", seconds=0.05)
    assert not again.resumed and len(again.outcomes) == 3  # a finished tuning run is begun anew
    assert not list(tmp_path.glob(".p.db.tuning-*"))


def test_a_killed_sitting_goes_on_where_it_stopped(bench, tmp_path, monkeypatch):
    contexts, path = many(4), tmp_path / "p.db"
    child = os.fork()
    if child == 0:  # a process of its own, killed in the middle of its third call
        torch.set_num_threads(1)
        count = [0]

        def deadly(*args, **kwargs):
            count[0] += 1
            if count[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return trial(*args, **kwargs)

        tuning_run.trial = deadly
        tune(contexts, database=path, seconds=0.02)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert len({item.bucket for item in PerfDB(path).all()}) == 2
    found = tune(contexts, database=path, seconds=0.02)
    assert len(found.resumed) == 2 and len(found.outcomes) == 2
    assert len({item.bucket for item in PerfDB(path).all()}) == 4


def test_the_most_frequent_calls_come_first_and_one_of_each_bucket_is_enough(bench, tmp_path):
    few, often, same = many(3)[0], many(3)[2], many(3)[2]
    order = []
    tune(
        Traffic((Recorded(few, 1), Recorded(often, 50), Recorded(same, 9))),
        database=tmp_path / "p.db", seconds=0.02, progress=lambda p: p.name and order.append(p.name),
    )  # fmt: skip
    assert len(order) == 2 and "rows=4" in order[0] and "rows=1" in order[1]


def test_a_call_that_cannot_be_measured_is_said_and_the_others_go_on(bench, tmp_path):
    good = context()
    with lz.scoped(deny=["*"]):
        tuned = tune([good], database=tmp_path / "p.db", seconds=0.02)
    assert len(tuned.outcomes) == 1
    with pytest.raises(InvalidInputError):
        tune(42, database=tmp_path / "p.db")
    with pytest.raises(InvalidInputError, match="budget"):
        tune([good], database=tmp_path / "p.db", budget=-1)
    with pytest.raises(TuningError, match="no kernel is asked for"):
        trial(good, only=frozenset({"none.of.these"}))


# -- drift ---------------------------------------------------------------------------------------------
@pytest.mark.req("R-TUNE-04")
def test_a_kernel_that_has_become_slow_is_noticed_and_tuned_again(bench, tmp_path):
    kernel = taking(0.0)
    bench.add("lab.rms_norm.moody", kernel, 10)
    db = PerfDB(tmp_path / "p.db")
    rows = {row.kernel_id: row for row in tune([context()], database=db.path, seconds=0.05).outcomes[0].trial.rows}
    # As if it had taken a hundredth of what it takes now, and everything else ten times as long.
    now = rows["lab.rms_norm.moody"].median_us
    db.put([replace(row, median_us=10 * now, variance=0.0) for row in rows.values()])
    db.put([replace(rows["lab.rms_norm.moody"], median_us=now / 100, variance=0.0)])
    state.publish(measurements=measurements_from(db, state.world))
    assert lz.which("rms_norm", *call()) == "lab.rms_norm.moody"
    assert list(drifted([context()], db, slower=1e6)) == []
    found = tune([context()], database=db.path, check=True, seconds=0.2)
    # How many rows: a kernel far behind may be left out of one race and not of the other.
    assert "PERF_DRIFTED" in found.outcomes[0].why and found.rows > 1
    times = {row.kernel_id: row.median_us for row in db.all()}
    assert times["lab.rms_norm.moody"] > now / 50 and times["lab.rms_norm.fast"] < 10 * now
    measured = lz.explain("rms_norm", *call()).decision.candidate("lab.rms_norm.moody").measured_us
    assert measured is not None and measured > now / 50


def test_the_watcher_looks_at_hot_calls_beside_the_program(bench, tmp_path, monkeypatch):
    kernel = taking(3e-3)  # long beside what it computes, whose time is the processor's and moves
    bench.add("lab.rms_norm.moody", kernel, 99)
    bench.publish(locks={"rms_norm": "lab.rms_norm.moody"})
    db = PerfDB(tmp_path / "p.db")
    tune([context()], database=db.path, seconds=0.1)
    monkeypatch.setattr(type(state), "remeasured", lambda self: self.world)
    with torch.no_grad():
        lz.rms_norm(*call())
    watcher = Watcher(3600.0, lambda: db)
    assert watcher.look() is None
    kernel.state["seconds"] = 20e-3
    found = watcher.look()
    assert found is not None and found.kernel_id == "lab.rms_norm.moody" and found.now_us > 2 * found.before_us
    thread = Watcher(0.01, lambda: None).start()
    assert thread.alive
    thread.stop()
    assert drift_module.watcher(None, lambda: None) is None


def test_what_auto_tune_measures_gets_the_samples_that_the_policy_asks_for(bench, tmp_path, monkeypatch):
    bench.add("lab.rms_norm.plain", taking(1e-3), 99)
    bench.publish(perfdb={"auto_tune": True, "tune_samples": 31})
    monkeypatch.setattr(type(state), "remeasured", lambda self: self.world)
    with torch.no_grad():
        lz.rms_norm(*call())
    asked = []
    made = drift_module.trial
    monkeypatch.setattr(
        drift_module, "trial", lambda *args, **named: asked.append(named["least"]) or made(*args, **named)
    )
    db = PerfDB(tmp_path / "p.db")
    assert Watcher(3600.0, lambda: db, auto=True).look() is None
    assert asked == [31] and [row for row in db.all() if row.kernel_id == "lab.rms_norm.plain"]


# -- believing -----------------------------------------------------------------------------------------
@pytest.mark.req("R-PDB-05", "R-PDB-06")
def test_a_database_of_another_machine_is_not_believed_and_explain_says_so(bench, tmp_path):
    tuned = tune([context()], database=tmp_path / "p.db", seconds=0.1)
    rows = tuned.outcomes[0].trial.rows
    other = PerfDB(tmp_path / "other.db")
    other.put([replace(row, platform=row.platform._replace(device="gpu-9", family="sm90", driver="9")) for row in rows])
    state.publish(measurements=measurements_from(other, state.world))
    report = lz.explain("rms_norm", *call())
    assert report.decision.winner.measured_us is None and report.chosen == "lab.rms_norm.slow"
    notes = [note for note in report.decision.notes if note.code is ReasonCode.PERF_NOT_BELIEVED]
    assert notes and "device gpu-9" in notes[0].message and "lz tune" in notes[0].hint


def test_json_of_a_sitting_can_be_read(bench, tmp_path):
    found = tune([context()], database=tmp_path / "p.db", seconds=0.02)
    data = json.loads(json.dumps(found.to_json()))
    assert data["calls"][0]["winner"] in data["calls"][0]["kernels"] and data["rows"] == found.rows
