"""Dispatch tables: obeyed without a selection, left as soon as their world is gone, never a wrong result."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.device.probe import probe_device
from layerzero.dispatch.run import current_world
from layerzero.errors import DispatchTableError
from layerzero.model.dispatch_table import PlanEntry, bucket_sizes, situation
from layerzero.numerics import assert_close, tolerance
from layerzero.public.checks import Status
from layerzero.reasons import ReasonCode
from layerzero.runtime.state import state
from layerzero.selection.engine import follow, objections, select
from layerzero.tables.file import hardware_of, load_table, make_table, save_table, table_json

EDGES = {"seq_len_k": (64, 128, 256), "batch": (1, 4, 16)}
MATH = "sdpa.attention.math"


def tensors(length=8, batch=1, heads=2):
    torch.manual_seed(length)
    return tuple(torch.randn(batch, heads, n, 16) for n in (1, length, length))


def solved(*, kernel=MATH, calls=((8, 1), (100, 1), (8, 3)), **changes):
    """A table that sends these decode calls to one kernel; each named by its length and batch."""
    entries = []
    for length, batch in calls:
        ctx = lz.select("attention", *tensors(length, batch)).context
        entries.append(PlanEntry("attention", situation(ctx), bucket_sizes(ctx, EDGES), kernel, 12.5, 1e-7))
    world = current_world()
    given = {
        "hardware": hardware_of(probe_device("cpu")),
        "policy_hash": world.policy.policy_hash,
        "kernels": {kernel: world.registry.get(kernel).version},
        "buckets": {"attention": EDGES},
        "entries": tuple(entries),
        **changes,
    }
    return make_table(**given)


def obeying(table, tmp_path):
    path = tmp_path / "dispatch_table.json"
    save_table(table, path)
    lz.use_table(path)
    return path


@pytest.mark.req("R-SOLV-04")
def test_a_table_is_obeyed_without_any_selection(tmp_path):
    q, k, v = tensors(8)
    before = lz.which("attention", q, k, v)
    assert before != MATH
    plain = lz.attention(q, k, v)
    obeying(solved(), tmp_path)
    state.counters.reset()
    for length in range(2, 129):
        args = tensors(length)
        out = lz.attention(*args)
        assert_close(out, torch.nn.functional.scaled_dot_product_attention(*args), tolerance("attention", "float32"))
    assert state.counters.selections == 0 and state.counters.followed >= 2
    assert lz.which("attention", q, k, v) == MATH
    assert_close(lz.attention(q, k, v), plain, tolerance("attention", "float32"))
    report = lz.explain("attention", q, k, v)
    assert report.chosen == MATH
    assert report.decision.winner.reasons[0].code is ReasonCode.PLAN_FOLLOWED
    assert before in [item.kernel_id for item in report.decision.candidates]


def calls_made(work):
    """How many functions a piece of work calls, those in C included."""
    made = 0

    def count(frame, event, value):
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()  # a measurement of coverage may be under way
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


@pytest.mark.req("R-TUNE-07")
def test_a_decision_from_a_table_is_less_work_than_a_selection_however_many_kernels_there_are(lab):
    """By the functions that are called, so that no clock has a say: for a new call, and for one that came before."""

    def with_kernels(count):
        lab.use(*(lab.kernel(f"many.attention.k{number}") for number in range(count)))
        world, table = current_world(), solved()
        ctx, spec = lz.select("attention", *tensors(8)).context, world.ops["attention"]
        baked = world.changed(table=table)
        runs = [lambda: follow(spec, ctx, baked), lambda: select(ctx, world)]
        assert all(run().chosen for run in runs)  # what is worked out once for a world is worked out
        table.find.cache_clear()
        return [calls_made(run) for run in (runs[0], *runs)]

    (_, again, selected), (first_of_many, again_of_many, selected_of_many) = with_kernels(4), with_kernels(40)
    assert 0 < again < selected
    assert again_of_many < first_of_many < selected_of_many / 2
    assert again_of_many < 1.2 * again and selected_of_many > 2 * selected


@pytest.mark.req("R-SOLV-04", "R-SOLV-05")
def test_a_bucket_that_is_missing_is_selected_and_says_so(tmp_path):
    obeying(solved(), tmp_path)
    for length, batch, hit in ((64, 1, True), (129, 1, False), (300, 1, False), (8, 4, True), (8, 5, False)):
        report = lz.explain("attention", *tensors(length, batch))
        codes = [note.code for note in report.decision.notes]
        assert (report.chosen == MATH) is hit, (length, batch)
        assert (ReasonCode.PLAN_BUCKET_MISS in codes) is not hit
    # Another situation is another bucket: a mask, a dtype, a gradient.
    q, k, v = tensors(8)
    assert lz.which("attention", q.double(), k.double(), v.double()) is not None
    for other in ({"is_causal": True}, {"window": 4}):
        notes = [note.code for note in lz.explain("attention", q, k, v, **other).decision.notes]
        assert ReasonCode.PLAN_BUCKET_MISS in notes, other


@pytest.mark.usefixtures("built_in")
@pytest.mark.req("R-SOLV-05")
def test_a_miss_honours_the_policy(tmp_path):
    lz.configure(deny=["sdpa.attention.flash*"])
    obeying(solved(), tmp_path)
    report = lz.explain("attention", *tensors(300))
    assert "flash" not in report.chosen
    assert any(
        reason.code is ReasonCode.POLICY_DENIED for item in report.decision.candidates for reason in item.reasons
    )


@pytest.mark.usefixtures("built_in")
@pytest.mark.req("R-SOLV-05")
@pytest.mark.parametrize("strict", [False, True])
def test_a_miss_honours_strict_mode(tmp_path, strict):
    """The table is made under the same policy, so that it holds; what it lacks would need the axes exchanged."""
    lz.configure(strict_mode=strict)
    obeying(solved(), tmp_path)
    report = lz.explain("attention", *(item.transpose(1, 2) for item in tensors(300)), layout="BSHD")
    refused = [reason.code for item in report.decision.candidates for reason in item.reasons]
    assert ReasonCode.PLAN_BUCKET_MISS in [note.code for note in report.decision.notes]
    assert (ReasonCode.ADAPTATION_NOT_ALLOWED in refused) is strict


def test_the_call_s_own_backend_and_an_empty_call_are_stronger_than_the_table(tmp_path):
    obeying(solved(), tmp_path)
    q, k, v = tensors(8)
    assert lz.which("attention", q, k, v, backend="reference").startswith("reference.")
    assert lz.attention(q[:, :, :0], k, v).shape == (1, 2, 0, 16)


@pytest.mark.req("R-SOLV-06")
def test_another_policy_is_not_served_by_the_table(tmp_path):
    obeying(solved(), tmp_path)
    q, k, v = tensors(8)
    with lz.prefer("reference*"):
        notes = [note.code for note in lz.explain("attention", q, k, v).decision.notes]
        assert ReasonCode.PLAN_POLICY_MISMATCH in notes
    assert lz.which("attention", q, k, v) == MATH
    lz.configure(avoid=[MATH])
    assert lz.which("attention", q, k, v) != MATH
    with pytest.raises(DispatchTableError) as caught:
        lz.use_table(tmp_path / "dispatch_table.json")
    assert caught.value.code is ReasonCode.PLAN_POLICY_MISMATCH


@pytest.mark.req("R-SOLV-03")
@pytest.mark.parametrize("change", ["driver_version", "torch_version", "name", "backend_versions"])
def test_another_machine_driver_or_version_invalidates(change):
    table = solved()
    here = probe_device("cpu")
    assert objections(table, current_world(), here) == []
    value = (("flash-attn", "9.9"),) if change == "backend_versions" else "another"
    elsewhere = replace(here, **{change: value})
    (found,) = objections(table, current_world(), elsewhere)
    assert found.code is ReasonCode.PLAN_HARDWARE_MISMATCH


@pytest.mark.req("R-SOLV-03")
@pytest.mark.parametrize("field", ["driver_version", "name"])
def test_plans_baked_under_another_driver_or_on_another_machine_are_not_followed(field, tmp_path, monkeypatch):
    here, path = probe_device("cpu"), tmp_path / "dispatch_table.json"
    foreign = solved(hardware=hardware_of(replace(here, **{field: "another"})))
    save_table(solved(), path)  # the same decisions, solved here
    monkeypatch.setenv("LAYERZERO_DISPATCH_TABLE", str(path))
    state.reset()
    assert lz.which("attention", *tensors(8)) == MATH
    lz.use_table(None)
    save_table(foreign, path)
    assert foreign.hardware.signature in path.read_text() and load_table(path).hardware == foreign.hardware
    assert foreign.hardware.signature != hardware_of(here).signature
    with pytest.raises(DispatchTableError) as caught:
        lz.use_table(path)
    assert caught.value.code is ReasonCode.PLAN_HARDWARE_MISMATCH
    selected = lz.which("attention", *tensors(8))
    assert selected != MATH
    # Named before the process starts, nobody refuses it: it is the calls that leave it aside, hot ones too.
    state.reset()
    state.counters.reset()
    for _ in range(3):
        lz.attention(*tensors(8))
        assert lz.which("attention", *tensors(8)) == selected
    notes = [note.code for note in lz.explain("attention", *tensors(8)).decision.notes]
    assert ReasonCode.PLAN_HARDWARE_MISMATCH in notes
    assert state.counters.followed == 0 and state.counters.selections > 0
    lz.use_table(None)


@pytest.mark.req("R-SOLV-03")
def test_another_kernel_version_invalidates():
    (found,) = objections(solved(kernels={MATH: "99"}), current_world(), probe_device("cpu"))
    assert found.code is ReasonCode.PLAN_KERNEL_CHANGED
    table = solved(kernels={MATH: current_world().registry.get(MATH).version, "gone.attention.x": "1"})
    (found,) = objections(table, current_world(), probe_device("cpu"))
    assert "not registered" in found.message


def test_a_kernel_that_is_set_aside_is_not_run_by_the_table(tmp_path):
    obeying(solved(), tmp_path)
    q, k, v = tensors(8)
    assert lz.which("attention", q, k, v) == MATH
    state.health.kernel_failed(MATH, RuntimeError("broken"))
    report = lz.explain("attention", q, k, v)
    assert report.chosen not in ("", MATH)
    assert any(note.code is ReasonCode.PLAN_KERNEL_REFUSED for note in report.decision.notes)


def test_a_kernel_that_raises_under_a_table_fails_over(tmp_path, monkeypatch):
    obeying(solved(), tmp_path)
    args = tensors(8)

    def broken(*_):
        raise RuntimeError("this kernel broke")

    monkeypatch.setattr("layerzero.backends.sdpa.kernels.math", broken)
    out = lz.attention(*args)
    assert_close(out, torch.nn.functional.scaled_dot_product_attention(*args), tolerance("attention", "float32"))
    assert lz.which("attention", *args) != MATH


def test_none_goes_back_to_selecting(tmp_path):
    obeying(solved(), tmp_path)
    lz.use_table(None)
    assert lz.which("attention", *tensors(8)) != MATH


# -- the file ----------------------------------------------------------------------------------------------------------
def test_equal_tables_are_equal_bytes_whatever_the_order(tmp_path):
    one, two = solved(), solved(calls=((8, 3), (100, 1), (8, 1)))
    save_table(one, tmp_path / "one.json")
    save_table(two, tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    back = load_table(tmp_path / "one.json")
    assert table_json(back) == table_json(one)
    ctx = lz.select("attention", *tensors(100)).context
    assert back.find(ctx) == one.find(ctx) is not None


def damaged(text, change):
    data = json.loads(text)
    change(data)
    return json.dumps(data)


DAMAGE = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "not json": lambda text: "dispatch: table",
    "deep": lambda text: "[" * 100_000,
    "a list": lambda text: "[]",
    "another version": lambda text: damaged(text, lambda d: d.update(schema_version="9.0")),
    "an unknown key": lambda text: damaged(text, lambda d: d.update(extra=1)),
    "a missing key": lambda text: damaged(text, lambda d: d.pop("kernels")),
    "an edited kernel": lambda text: text.replace(MATH, "reference.attention.plain"),
    "an edited bucket": lambda text: damaged(text, lambda d: d["buckets"]["attention"]["batch"].append(99)),
    "a key that comes twice": lambda text: text.replace('"model_id"', '"policy_hash": "x", "model_id"'),
    "not a number": lambda text: text.replace("12.5", "NaN"),
    "a text for a number": lambda text: damaged(text, lambda d: d["plans"][0]["ops"][0].update(median_us="fast")),
}


@pytest.mark.req("R-OPS-03")
@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_a_damaged_table_is_not_ready_and_the_process_selects(name, tmp_path, monkeypatch):
    path = tmp_path / "dispatch_table.json"
    save_table(solved(), path)
    path.write_text(DAMAGE[name](path.read_text()))
    with pytest.raises(DispatchTableError) as caught:
        lz.use_table(path)
    assert "dispatch_table.json" in str(caught.value) and len(str(caught.value)) < 400
    monkeypatch.setenv("LAYERZERO_DISPATCH_TABLE", str(path))
    state.reset()
    assert lz.attention(*tensors(8)).shape == (1, 2, 1, 16)
    report = lz.readiness_check()
    (found,) = [check for check in report.checks if check.name == "dispatch table"]
    assert not report.ok and found.status == Status.FAIL and found.fix


@pytest.mark.req("R-OPS-03")
def test_a_table_of_another_machine_is_not_ready_and_a_good_one_is(tmp_path, monkeypatch):
    table = solved()
    for signature, ready in ((table.hardware.signature, True), ("0123456789abcdef", False)):
        path = tmp_path / f"{signature}.json"
        save_table(solved(hardware=replace(table.hardware, signature=signature)), path)
        monkeypatch.setenv("LAYERZERO_DISPATCH_TABLE", str(path))
        state.reset()
        report = lz.readiness_check()
        (found,) = [check for check in report.checks if check.name == "dispatch table"]
        assert (found.status == Status.OK) is ready and report.ok is ready
        assert ready or found.code is ReasonCode.PLAN_HARDWARE_MISMATCH


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(DispatchTableError) as caught:
        load_table(tmp_path / "none.json")
    assert caught.value.code is ReasonCode.CONFIG_FILE_MISSING


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_flipped_byte_is_believed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips")
    path = folder / "table.json"
    table = solved(calls=((8, 1),))
    save_table(table, path)
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(raw))
    try:
        back = load_table(path)
    except DispatchTableError:
        return
    assert table_json(back) == table_json(table)  # only white space may change unnoticed
