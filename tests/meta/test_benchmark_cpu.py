"""The CPU benchmark: peers are asked the way their own signatures say, checked before they are timed, and counted."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import layerzero as lz

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.integration, pytest.mark.needs_package("layerzero_cpu")]
# zentorch 2.11's signatures, without the name every op takes at its end
SIGNATURES = (
    "zentorch_rms_norm(Tensor input, Tensor weight, float epsilon) -> Tensor",
    "zentorch_add_rms_norm_(Tensor(a!) input, Tensor weight, Tensor(b!) residual, float epsilon) -> ()",
    "zentorch_sdpa(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *, "
    "Tensor? attn_mask=None, float? scale=None) -> (Tensor, Tensor)",
    "zentorch_weight_prepack_for_linear(Tensor weight) -> Tensor",
    "zentorch_linear_unary(Tensor input, Tensor weight, Tensor? bias=None, *, bool is_weight_prepacked=False, "
    "str post_op='none') -> Tensor",
    "zentorch_woq_repack_weight(Tensor unpacked_weight) -> Tensor",
    "zentorch_woq_linear(Tensor input, Tensor weight, Tensor weight_scales, Tensor? weight_zero_points, "
    "Tensor? bias=None) -> Tensor",
    "zentorch_dynamic_qlinear(Tensor input, Tensor weight, Tensor weight_scales, Tensor? bias=None) -> Tensor",
)


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules, which import each other by their own names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    parts = ("case", "cases_attention", "cases_rows", "peers", "figures", "plot", "race", "profile", "prepare")
    names = ("timing", *(f"cpu_{part}" for part in parts), "cpu")
    before = {name: sys.modules.pop(name, None) for name in names}
    with torch.no_grad():
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


# -- what zentorch is said to do, so that our calls of it can be tried where it does not install ------
def _rms(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _add_rms(x, weight, residual, eps):
    residual.add_(x)
    x.copy_(_rms(residual, weight, eps))


def _sdpa(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


def _linear(x, weight, bias=None, *, is_weight_prepacked=False, post_op="none"):
    return F.linear(x, weight.flip(0) if is_weight_prepacked else weight, bias)


def _repack(codes):
    assert codes.dtype is torch.int8 and codes.min() >= -8 and codes.max() <= 7
    nibbles = (codes.to(torch.int64) & 0xF).reshape(codes.shape[0], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _woq(x, weight, scales, zero_points, bias=None):
    words = weight.t().to(torch.int64)  # [N, K/8]; the op takes it turned
    codes = (words[..., None] >> (4 * torch.arange(8))) & 0xF
    codes = torch.where(codes > 7, codes - 16, codes).flatten(1)  # [N, K]
    groups = scales.t()  # [G, N] turned back
    wide = codes.reshape(*groups.shape, -1).float() * groups.float()[..., None]
    return F.linear(x.float(), wide.flatten(1)).to(x.dtype)


def _dynamic(x, weight, scales, bias=None):
    step = x.float().abs().amax(-1, keepdim=True) / 127.0
    return (F.linear((x.float() / step).round(), weight.float()) * step * scales.reshape(1, -1)).to(x.dtype)


@pytest.fixture
def zentorch():
    """The ops under zentorch's names and signatures, doing what they are said to do."""
    library = torch.library.Library("zentorch", "FRAGMENT")
    functions = (_rms, _add_rms, _sdpa, lambda w: w.flip(0), _linear, _repack, _woq, _dynamic)
    for signature, function in zip(SIGNATURES, functions, strict=True):
        library.define(signature)
        library.impl(signature.partition("(")[0], function, "CPU")
    yield
    library._destroy()


def _codes(fmt):
    made = lz.quantize(torch.randn(64, 256) / 16, fmt, granularity="channel" if fmt == "int8" else "block")
    return replace(made, scale=made.scale.bfloat16().float())


def _asked(bench, op):
    """What `lz` is asked for in a small case, with two sets of arguments where something is read cold."""
    Asked, asked = bench.cpu_case.Asked, bench.cpu_case.asked
    x, weight = torch.randn(3, 256).bfloat16(), torch.randn(256).bfloat16()
    q = torch.randn(2, 8, 1, 32).bfloat16()
    if op == "rms_norm":
        return asked("rms_norm", x, weight, 1e-6)
    if op == "add_rms_norm":
        return asked("add_rms_norm", x, torch.randn(3, 256).bfloat16(), weight, 1e-6)
    if op == "decode":
        kv = [tuple(torch.randn(2, 2, 40, 32).bfloat16() for _ in range(2)) for _ in range(2)]
        return Asked("attention", [(q, *pair) for pair in kv])
    if op == "prefill":
        q, k, v = (torch.randn(1, heads, 24, 32).bfloat16() for heads in (4, 2, 2))
        return Asked("attention", [(q, k, v)], {"is_causal": True})
    weights = [torch.randn(64, 256).bfloat16() / 16 if op == "linear" else _codes(op) for _ in range(2)]
    return Asked("linear", [(x, item) for item in weights])


RIGHT = {
    "rms_norm": {"zentorch"},
    "add_rms_norm": {"zentorch"},
    "decode": {"zentorch folded"},
    "prefill": {"zentorch repeated"},
    "linear": {"zentorch", "zentorch packed"},
    "int8": {"zentorch dynamic int8"},
    "int4": {"zentorch int4"},
}


@pytest.mark.usefixtures("zentorch")
@pytest.mark.parametrize("op", RIGHT)
def test_zentorch_is_called_as_its_signatures_say_and_gives_the_references_result(bench, op):
    asked = _asked(bench, op)
    truth = asked.call(backend="reference")()
    found = {
        peer.name: bench.cpu_peers.checked(peer, asked, truth)
        for peer in bench.cpu_peers.peers_of(asked, {"zentorch": "2.11"})
    }
    # With fewer heads of keys than of queries it reads past the keys: it is never called so.
    assert {name: "" for name in RIGHT[op]} == found


@pytest.mark.usefixtures("zentorch")
def test_calls_that_are_timed_take_every_set_in_turn_and_leave_the_arguments_alone(bench):
    asked = _asked(bench, "add_rms_norm")
    x = asked.args[0].clone()
    peer = next(bench.cpu_peers.peers_of(asked, {"zentorch": "2.11"}))
    peer.call()
    peer.call()
    assert torch.equal(asked.args[0], x)
    asked = _asked(bench, "linear")
    call = next(bench.cpu_peers.peers_of(asked, {"zentorch": "2.11"})).call
    first, second, third = call(), call(), call()
    assert torch.equal(first, third) and not torch.equal(first, second)


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_torchs_own_products_of_codes_are_right(bench, fmt):
    asked = _asked(bench, fmt)
    truth = asked.call(backend="reference")()
    found = {
        peer.name: bench.cpu_peers.checked(peer, asked, truth)
        for peer in bench.cpu_peers.peers_of(asked, {"torch": torch.__version__})
    }
    assert found.pop("int8pack" if fmt == "int8" else "int4pack") == ""
    assert set(found) == ({"oneDNN dynamic int8"} if fmt == "int8" else set())


@pytest.mark.parametrize("off", [1.0 / 127, 1e-2])
def test_a_product_that_rounds_x_may_err_by_its_rounding_and_no_more(bench, off):
    asked, peers = _asked(bench, "int8"), bench.cpu_peers
    truth = asked.call(backend="reference")()
    x, weight = asked.args
    exact = peers._row_rounded(x, weight)
    good = bench.cpu_case.Peer("p", lambda: exact, exact=lambda: exact)
    bad = bench.cpu_case.Peer("p", lambda: exact + off * truth.abs().max(), exact=lambda: exact)
    assert peers.checked(good, asked, truth) == ""
    assert peers.checked(bad, asked, truth).startswith("wrong")


# -- a case, measured ---------------------------------------------------------------------------------
def _case(bench, **extra):
    x, w = torch.randn(4, 64), torch.randn(64)
    made = {
        "eager": lambda: F.rms_norm(x, (64,), w, 1e-6),
        "lz": bench.cpu_case.asked("rms_norm", x, w, 1e-6),
        **extra,
    }
    return bench.cpu_case.Case("overhead", "small", lambda: dict(made), (bench.cpu_case.Goal("eager", 1e-6),))


def _run(bench, database=None):
    return bench.cpu.Run({}, database, 0.01, time.monotonic() + 60.0)


def test_a_peer_that_is_wrong_or_raises_is_named_and_not_timed(bench, monkeypatch):
    def peers(asked, kinds):
        x = asked.args[0]
        right = asked.call(backend="torch")
        yield bench.cpu_case.Peer("right", right)
        yield bench.cpu_case.Peer("wrong", lambda: right() * 1.01)
        yield bench.cpu_case.Peer("flat", lambda: right().flatten())
        yield bench.cpu_case.Peer("broken", lambda: x.view(7, -1))

    monkeypatch.setattr(bench.cpu_peers, "peers_of", peers)
    row = bench.cpu.measured(_case(bench), 0.01, _run(bench))
    assert set(row["us"]) == {"eager", "lz", "right"}
    assert set(row["refused"]) == {"wrong", "flat", "broken"}
    assert row["refused"]["broken"].startswith("raises RuntimeError") and row["refused"]["wrong"].startswith("wrong")
    assert row["kernel"] == "cpu.rms_norm.rows" and "untuned_kernel" not in row
    json.dumps(row)


def test_a_tuned_case_names_both_kernels_and_times_what_it_would_have_been(bench, tmp_path, monkeypatch):
    from layerzero.runtime.state import state

    lz.reset()
    monkeypatch.setattr(bench.cpu, "contested", lambda asked: "torch.rms_norm.native")
    try:
        row = bench.cpu.measured(_case(bench), 0.01, _run(bench, tmp_path / "a.sqlite"))
        assert row["untuned_kernel"] == "cpu.rms_norm.rows" and "not_tuned" not in row
        assert ("lz untuned" in row["us"]) == (row["kernel"] != row["untuned_kernel"])
        before = state.world

        def lied(asked, run):  # whatever tuning finds: here, that another kernel is the better one
            lz.lock("rms_norm", "torch.rms_norm.native")
            return ""

        monkeypatch.setattr(bench.cpu, "tuned", lied)
        row = bench.cpu.measured(_case(bench), 0.01, _run(bench, tmp_path / "b.sqlite"))
        assert state.world is not before and row["kernel"] == "torch.rms_norm.native"
        assert set(row["us"]) == {"eager", "lz", "lz untuned"}
    finally:
        lz.reset()


def test_tuning_is_spared_only_where_no_other_kernel_comes_near(bench, tmp_path, monkeypatch):
    asked, race = _asked(bench, "rms_norm"), bench.cpu_race
    ranking = lz.explain(asked.op, *asked.args).decision.ranking
    assert ranking[0] == "cpu.rms_norm.rows" and len(ranking) > 2
    times = dict.fromkeys(ranking, 1.0)
    monkeypatch.setattr(race, "_quickest", lambda call: times[call.keywords["backend"]])
    rival = next(name for name in ranking[1:] if not name.startswith(race.UNFIT))
    assert race.contested(asked) == rival
    times |= {name: race.CLEAR + 0.01 for name in ranking[1:] if not name.startswith("reference.")}
    assert race.contested(asked) == ""  # the reference may be as quick as it likes: it is no choice
    times[rival] = 0.5  # and one that is quicker than the choice is tuned for all the more
    assert race.contested(asked) == rival
    monkeypatch.setattr(bench.cpu, "contested", lambda asked: "")
    row = bench.cpu.measured(_case(bench), 0.01, _run(bench, tmp_path / "d.sqlite"))
    assert row["not_tuned"] == "no other kernel comes within 1.7 times of it"


def test_who_is_left_out_is_neither_called_nor_timed_and_the_row_says_why(bench, monkeypatch):
    def peers(asked, kinds):
        for name in ("zentorch", "zentorch packed", "int8pack"):
            yield bench.cpu_case.Peer(name, asked.call(backend="torch"))

    monkeypatch.setattr(bench.cpu_peers, "peers_of", peers)
    run = replace(_run(bench), left_out={"overhead small": {"zentorch packed": "died by signal 11 (SIGSEGV) in it"}})
    row = bench.cpu.measured(_case(bench), 0.01, run)
    assert set(row["us"]) == {"eager", "lz", "zentorch", "int8pack"}
    assert row["refused"] == {"zentorch packed": "died by signal 11 (SIGSEGV) in it"}
    run = replace(_run(bench), left_out={"overhead": {"*": "the run died"}})  # of a whole group: all other libraries
    row = bench.cpu.measured(_case(bench), 0.01, run)
    assert set(row["us"]) == {"eager", "lz", "int8pack"}
    assert row["refused"] == {"zentorch": "the run died", "zentorch packed": "the run died"}


CRASHES = """
import json, os, signal, sys
given = sys.argv[1:]
first = int(given[given.index("--from") + 1])
dead = given[given.index("--dead") + 1:] if "--dead" in given else []
def say(**words): print(json.dumps(words), flush=True)
say(loaded="1.0")
for index, (peer, act) in enumerate((("a", "well"), ("b", "crash"), ("b", "crash"), ("c", "raise"), ("d", "well"))):
    if index < first:
        continue
    at = {"index": index, "case": f"norm {index}", "peer": peer, "kind": peer}
    if peer in dead:
        if index > first:
            say(why="not tried: it died on a call of this kind", **at)
        continue
    say(trying=True, **at)
    if act == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    say(**at, **({"why": "raises X"} if act == "raise" else {"done": True}))
say(finished=True)
"""


def test_a_child_that_dies_is_started_again_behind_the_attempt_it_died_in(bench, tmp_path):
    script = tmp_path / "crashes.py"
    script.write_text(CRASHES)
    version, found = bench.cpu_prepare.tried([sys.executable, str(script)], time.monotonic() + 60.0)
    assert version == "1.0"
    assert found == {
        ("norm 0", "a"): "",
        ("norm 1", "b"): "died by signal 11 (SIGSEGV) in norm 1",
        ("norm 2", "b"): "not tried: it died on a call of this kind",
        ("norm 3", "c"): "raises X",
        ("norm 4", "d"): "",
    }
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    version, found = bench.cpu_prepare.tried([sys.executable, str(script)], time.monotonic() + 60.0)
    assert version == "cannot be imported: died by signal 11 (SIGSEGV)" and found == {}
    script.write_text("import time; time.sleep(60)")
    version, found = bench.cpu_prepare.tried([sys.executable, str(script)], time.monotonic() + 0.3)
    assert version == "cannot be imported: not within the time for it" and found == {}


CRASHING = """
import os, signal, torch
import torch.nn.functional as F
__version__ = "9"
library = torch.library.Library("zentorch", "FRAGMENT")
library.define("zentorch_rms_norm(Tensor input, Tensor weight, float epsilon) -> Tensor")
library.define("zentorch_add_rms_norm_(Tensor(a!) input, Tensor weight, Tensor(b!) residual, float epsilon) -> ()")

def rms(x, weight, eps):
    if x.dtype is torch.bfloat16:
        os.kill(os.getpid(), signal.SIGSEGV)
    return F.rms_norm(x, x.shape[-1:], weight, eps)

def add(x, weight, residual, eps):
    residual.add_(x)
    x.copy_(F.rms_norm(residual, x.shape[-1:], weight, eps))

library.impl("zentorch_rms_norm", rms, "CPU")
library.impl("zentorch_add_rms_norm_", add, "CPU")
"""


@pytest.mark.slow
def test_a_library_that_crashes_in_one_op_takes_part_with_the_others(bench, tmp_path, monkeypatch):
    (tmp_path / "zentorch.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    plan = bench.cpu_prepare.Plan("python cpu.py", time.monotonic())
    bench.cpu_prepare.prepared(plan, ["torch", "zentorch"], ["norm"], 1, time.monotonic() + 200.0)
    assert plan.peers == {"zentorch": "9"}
    died = "died by signal 11 (SIGSEGV) in norm RMSNorm 1×4096 bf16"
    never = "not tried: it died on a call of this kind"
    assert plan.left_out == {
        "norm RMSNorm 1×4096 bf16": {"zentorch": died},
        "norm RMSNorm 16×4096 bf16": {"zentorch": never},
        "norm RMSNorm 512×4096 bf16": {"zentorch": never},
    }


FATAL = """
import os, signal, sys
sys.path.insert(0, {benchmarks!r})
import cpu, cpu_peers
from cpu_case import Case, Peer, asked
import torch
import torch.nn.functional as F

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def case(group, name):
    x, w = torch.randn(4, 64), torch.randn(64)
    made = {{"eager": lambda: F.rms_norm(x, (64,), w, 1e-6), "lz": asked("rms_norm", x, w, 1e-6)}}
    return Case(group, name, lambda: dict(made))

cpu.cases = lambda: [case("norm", "first"), case("decode", "second"), case("decode", "third"), case("linear", "fourth")]
cpu_peers.load = lambda kinds: dict.fromkeys(kinds, "9")

def peers(asked, kinds):
    yield Peer("zentorch", crash if os.environ["NOW"] in sys.argv_now else asked.call(backend="torch"))

cpu_peers.peers_of = peers
real = cpu.measured

def measured(case, budget, run):
    sys.argv_now = case.name
    return real(case, budget, run)

cpu.measured = measured
code = cpu.main()
if os.environ["NOW"] == "the end":
    crash()
sys.exit(code)
"""


def test_a_run_that_a_peer_ends_goes_on_without_it_and_keeps_what_it_had(bench, tmp_path, monkeypatch):
    script = tmp_path / "cpu.py"
    script.write_text(FATAL.format(benchmarks=str(BENCHMARKS)))
    out = tmp_path / "cpu.json"
    out.write_text(json.dumps({"now": "linear of yesterday", "begin": 1.0, "rows": [{"case": "old"}]}))
    monkeypatch.setattr(bench.cpu_prepare, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--json", str(out), "--budget", "60", "--peers", "zentorch"])
    monkeypatch.setenv("NOW", "second")
    begin = time.monotonic()
    plan = bench.cpu_prepare.Plan("python cpu.py", begin, {"zentorch": "9"})
    assert bench.cpu_prepare.supervised(plan, out, begin + 120.0) in (0, 1)  # 1: tiny calls on a busy machine
    data = json.loads(out.read_text())
    assert [row["case"] for row in data["rows"]] == ["first", "second", "third", "fourth"] and data["now"] == ""
    assert ["zentorch" in row["us"] for row in data["rows"]] == [True, False, False, True]
    assert data["rows"][1]["refused"] == {"zentorch": "the run died by signal 11 (SIGSEGV) in decode second"}
    assert data["died"] == ["the run died by signal 11 (SIGSEGV) in decode second"]
    assert data["command"] == "python cpu.py" and data["peers"]["zentorch"] == "9"
    monkeypatch.setenv("NOW", "the end")  # all is measured: nothing has to be done again
    plan = bench.cpu_prepare.Plan("python cpu.py", time.monotonic(), {"zentorch": "9"})
    assert bench.cpu_prepare.supervised(plan, out, time.monotonic() + 120.0) in (0, 1)
    assert plan.died == [] and json.loads(out.read_text())["left"] == 0


def test_after_its_time_nothing_is_tuned_or_compiled_and_the_row_says_so(bench, tmp_path):
    late = bench.cpu.Run({"compile": ""}, tmp_path / "c.sqlite", 0.01, time.monotonic() - 1.0)
    case = replace(_case(bench), group="norm")
    row = bench.cpu.measured(case, 0.01, late)
    assert row["not_tuned"] == "the budget was spent"
    assert row["refused"] == {"compile": "not compiled: the budget was spent"} and "compile" not in row["us"]


# -- what all cases say together ----------------------------------------------------------------------
def _row(bench, case, **us):
    goals = (bench.cpu_case.Goal("floor", 0.5, through=1.0),)
    return {"group": "norm", "case": case, "kernel": "k", "us": us, **bench.cpu_figures.ratios(us, goals)}


def test_the_summary_counts_goals_slower_cases_and_the_best_peer(bench):
    names = {"lz untuned": 1.0, "torch codes": 1.0, "direct": 1.0}  # ours: no peers
    rows = [
        _row(bench, "a", eager=30.0, zentorch=12.0, compile=11.0, lz=10.0, floor=6.0, **names),
        _row(bench, "b", eager=30.0, zentorch=9.0, lz=10.0, floor=4.0),
        _row(bench, "c", eager=9.6, lz=10.0, floor=9.0),
        _row(bench, "d", eager=9.0, lz=10.0, floor=9.0) | {"refused": {"zentorch": "wrong: x"}},
        {"group": "norm", "case": "e", "error": "RuntimeError: x"},
    ]
    assert (rows[0]["best_peer"], rows[0]["against_best_peer"]) == ("compile", 1.1)
    assert rows[2]["best_peer"] == "eager"
    found = bench.cpu_figures.summary(rows)
    assert (found["cases"], found["goals"], found["goals_met"]) == (4, 4, 3)
    assert found["slower_than_eager"] == ["norm d"] and found["failed"] == ["norm e"]
    assert (found["as_fast_as_best_peer"], found["as_fast_within_noise"]) == (1, 2)
    assert (found["as_fast_as_others"], found["cases_with_others"]) == (1, 2)  # in the others eager ran alone
    assert not found["goal_of_peers_met"] and found["peers_not_timed"] == {"zentorch": 1}
    assert set(found["behind_best_peer"]) == {"norm b", "norm d"}
    assert bench.cpu_figures.summary([rows[0]] * 3 + [rows[1]])["goal_of_peers_met"]
    text = bench.cpu_figures.verdict(found)
    assert "1 of 4 (MISSED: three quarters)" in text and "norm d" in text and "zentorch in 1" in text
    assert "1.10× compile" in bench.cpu_figures.line(rows[0])


@pytest.mark.parametrize(
    ("direct", "lz", "met"),
    [(4.9, 5.5, True), (4.9, 5.6, False), (5.1, 5.2, False), (5.1, 5.0, True), (None, 5.0, True), (None, 5.1, False)],
)
def test_the_kernel_has_to_reach_the_goal_and_the_public_function_nine_tenths_of_it(bench, direct, lz, met):
    us = {"eager": 10.0, "floor": 4.0, "lz": lz, **({} if direct is None else {"direct": direct})}
    row = bench.cpu_figures.ratios(us, (bench.cpu_case.Goal("eager", 2.0),))
    assert row["goals"][0]["met"] is met and row["goals"][0]["through_factor"] == 1.8
    assert row["allowed_by_floor"] == 2.5 and not row["goals"][0]["above_floor"]
    # what costs a call is asked of the call itself
    whole = bench.cpu_figures.ratios({**us, "direct": 1.0}, (bench.cpu_case.Goal("eager", 2.0, through=1.0),))
    assert whole["goals"][0]["met"] is (lz <= 5.0)


def test_a_goal_above_what_memory_allows_is_named_with_the_figure(bench):
    row = bench.cpu_figures.ratios(
        {"eager": 581.6, "direct": 536.5, "floor": 390.0, "lz": 520.2}, (bench.cpu_case.Goal("eager", 2.0),)
    )
    assert row["allowed_by_floor"] == 1.491 and row["goals"][0]["above_floor"] and not row["goals"][0]["met"]
    call = bench.cpu_case.asked("layer_norm", torch.randn(16, 64), torch.randn(64), torch.randn(64), 1e-5)
    us = {"eager": 581.6, "direct": 536.5, "floor": 390.0, "lz": 520.2}
    before = torch.get_num_threads()
    found = bench.cpu_profile.where(call, us, row["goals"])
    assert torch.get_num_threads() == before
    assert "allows at most 1.49×" in found["words"][1] and "390.0 (75 %)" in found["words"][0]
    assert found["empty_call_us"] > 0 and found["one_thread_us"] > 0


def test_every_op_with_a_goal_has_a_smallest_call_through_the_same_entry(bench):
    ops = set()
    for op in ("rms_norm", "add_rms_norm", "prefill", "linear", "int8", "int4"):
        small = bench.cpu_profile.smallest(_asked(bench, op))
        assert small is not None
        small.call()()
        ops.add(small.op)
    for case in bench.cpu.cases():
        if case.goals and case.group in ("norm", "rope", "gated", "sampling"):
            asked = case.make()["lz"]
            small = bench.cpu_profile.smallest(asked)
            small.call()()
            assert small.op == asked.op and small.kernel().split(".")[0] == asked.kernel().split(".")[0]
            ops.add(small.op)
    assert {"rope", "silu_and_mul", "layer_norm", "sample", "attention", "linear"} <= ops


def test_the_page_tells_what_the_file_says(bench):
    page = importlib.import_module("page_cpu")
    rows = [
        _row(bench, "a", eager=30.0, zentorch=12.0, direct=9.0, lz=10.0, floor=4.0) | {"where": {"words": ["w", "v"]}},
        {"group": "norm", "case": "e", "error": "x"},
    ]
    data = {
        "machine": {"cpu": "c", "cores": 2, "arch": "a", "python": "3", "torch": "2", "load": 0.1},
        "threads": 2, "isa": "neon", "commit": "1", "command": "python benchmarks/cpu.py", "lz": "untuned",
        "peers": {"torch": "2", "zentorch": "2.11"}, "summary": bench.cpu_figures.summary(rows), "rows": rows,
    }  # fmt: skip
    text = page.cpu_section("m", data)
    goal = "missed: 0.44 of 0.5 floor, through lz 0.40 of 0.5"
    assert f"| norm: a | `k` | 10.0 | 3.00 | 1.20 (zentorch) | 40 % | 7.50 | {goal} |" in text
    assert "- norm: a: w. v." in text
    assert "failed: x" in text and "in 1 of 1 cases" in text and "zentorch 2.11" in text


def test_unknown_peers_are_refused_and_torchs_are_always_there(bench):
    assert bench.cpu.chosen_peers("") == ["torch"]
    assert bench.cpu.chosen_peers("zentorch,compile") == ["torch", "zentorch", "compile"]
    with pytest.raises(SystemExit, match="expected some of torch, compile, zentorch"):
        bench.cpu.chosen_peers("ipex")


def test_a_library_that_cannot_be_imported_gives_no_peers_and_says_why(bench, monkeypatch):
    def broken(name):
        raise ImportError("another torch")

    monkeypatch.setattr(bench.cpu_peers.importlib, "import_module", broken)
    found = bench.cpu_peers.load(["torch", "zentorch"])
    assert found["zentorch"] == "cannot be imported: ImportError: another torch"
    assert list(bench.cpu_peers.peers_of(_asked(bench, "rms_norm"), found)) == []


def test_every_case_asks_for_a_public_op_and_has_an_eager_form(bench):
    names = set()
    for case in bench.cpu.cases():
        names.add((case.group, case.name))
        assert case.goals is not None and {goal.against for goal in case.goals} <= {"eager", "floor"}
    assert len(names) == len(bench.cpu.cases()) >= 60
    small = [case for case in bench.cpu.cases() if case.group == "overhead"]
    for case in small:
        made = case.make()
        assert isinstance(made["lz"], bench.cpu_case.Asked) and callable(made["eager"])
        lz_out, eager = made["lz"].call()(), made["eager"]()
        for got, want in zip(*((o if isinstance(o, tuple) else (o,)) for o in (lz_out, eager)), strict=True):
            assert torch.allclose(got, want, atol=1e-5)
