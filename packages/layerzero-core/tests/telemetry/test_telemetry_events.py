"""Events off the hot path as traces, spans and log lines; and nothing at all from a hot call."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.errors import ConfigurationError, InvalidInputError, NoKernelFoundError
from layerzero.telemetry.events import Event, Events, events, observed
from layerzero.telemetry.logs import HIDDEN, Redactor
from layerzero_cli.root import cli
from layerzero_tune.cli.top import frame, summary
from layerzero_tune.cli.trace import totals
from layerzero_tune.telemetry.chrome import Trace
from layerzero_tune.telemetry.reading import Reading, read

X, W = torch.ones(4, 8), torch.ones(8)

# The part of the trace event format that Perfetto's JSON importer needs.
TRACE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "ph", "ts", "pid", "tid"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "cat": {"type": "string"},
                    "ph": {"enum": ["X", "M"]},
                    "ts": {"type": "number", "minimum": 0},
                    "dur": {"type": "number", "minimum": 0},
                    "pid": {"type": "integer"},
                    "tid": {"type": "integer"},
                    "args": {"type": "object"},
                },
                "if": {"properties": {"ph": {"const": "X"}}},
                "then": {"required": ["dur", "cat"]},
                "else": {"properties": {"name": {"enum": ["process_name", "thread_name"]}}, "required": ["args"]},
            },
        },
    },
}


# -- events ------------------------------------------------------------------------------------------
def test_trees_are_handed_over_whole_and_outermost_first() -> None:
    made, heard = Events(), []
    stop = made.subscribe(heard.append)
    outer = made.begin()
    made.tell("select", 0.001, op="a")
    inner = made.begin()
    made.tell("compile", 0.5, kernel="k")
    assert not heard
    made.end(inner, "failover", 10, {})
    made.end(outer, "dispatch", 20, {}, "Boom: x")
    (tree,) = heard
    assert [item.kind for item in tree] == ["dispatch", "failover", "compile", "select"]
    by_kind = {item.kind: item for item in tree}
    assert by_kind["compile"].parent == by_kind["failover"].number
    assert by_kind["select"].parent == by_kind["failover"].parent == by_kind["dispatch"].number
    assert by_kind["dispatch"].parent == 0 and by_kind["dispatch"].error == "Boom: x"
    stop()
    made.tell("select")
    assert len(heard) == 1 and made.histograms["select"].count == 2


def test_a_sink_that_raises_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    made, heard = Events(), []

    def broken(tree: tuple[Event, ...]) -> None:
        raise RuntimeError("full disk")

    made.subscribe(broken)
    made.subscribe(heard.append)
    made.tell("select")
    assert len(heard) == 1 and "a telemetry sink raised" in caplog.text


def test_a_function_that_raises_is_an_event_with_its_error() -> None:
    heard: list[tuple[Event, ...]] = []
    stop = events.subscribe(heard.append)
    try:

        @observed("tune", lambda args, out: {"x": args[0], "out": out})
        def work(x: int) -> int:
            if x:
                raise KeyboardInterrupt
            return 7

        assert work(0) == 7
        with pytest.raises(KeyboardInterrupt):
            work(1)
    finally:
        stop()
    assert [tree[0].attributes["out"] for tree in heard] == [7, None]
    assert heard[1][0].error.startswith("KeyboardInterrupt") and not events._here.open


def test_threads_do_not_mix_their_trees() -> None:
    made, heard = Events(), []
    made.subscribe(heard.append)

    def work() -> None:
        for _ in range(200):
            outer = made.begin()
            made.tell("select")
            made.end(outer, "dispatch", 1, {})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 800 and all([e.kind for e in tree] == ["dispatch", "select"] for tree in heard)
    assert all(tree[1].parent == tree[0].number and tree[0].thread == tree[1].thread for tree in heard)


@pytest.mark.req("R-TEL-04")
def test_a_hot_call_is_no_event_and_a_cold_one_is_a_tree(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    heard: list[tuple[Event, ...]] = []
    stop = events.subscribe(heard.append)
    try:
        lz.rms_norm(X, W)
        assert [e.kind for e in heard[0]] == ["dispatch", "select"] and len(heard) == 1
        assert heard[0][1].attributes["kernel"] == "mine.rms_norm.a" and heard[0][1].attributes["hidden"] == 8
        assert heard[0][0].start <= heard[0][1].start and heard[0][1].end <= heard[0][0].end + 1_000_000
        for _ in range(50):
            lz.rms_norm(X, W)
        assert len(heard) == 1
    finally:
        stop()


def test_tuning_is_an_event(tmp_path: Path) -> None:
    from layerzero_tune.trial import trial

    before = events.histograms["tune"].count
    trial(lz.explain("rms_norm", X, W).context, seconds=0.01, least=2, jit="off")
    assert events.histograms["tune"].count == before + 1
    lz.reset()


# -- traces ------------------------------------------------------------------------------------------
def test_a_trace_has_perfettos_form_and_nests(lab: Any, tmp_path: Path) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    path = tmp_path / "trace.json"
    with lz.observe(counters=False, trace=path) as seen:
        lz.rms_norm(X, W)
        lz.layer_norm(X, W)
        seen.save_trace(tmp_path / "early.json")
    data = json.loads(path.read_bytes())
    jsonschema.Draft202012Validator(TRACE_SCHEMA).validate(data)
    rows = [row for row in data["traceEvents"] if row["ph"] == "X"]
    assert [row["name"] for row in rows] == [
        "dispatch rms_norm", "select rms_norm", "dispatch layer_norm", "select layer_norm",
    ]  # fmt: skip
    for outer, inner in (rows[:2], rows[2:]):
        # A complete event lies inside another when its times do: that is how the track is drawn.
        assert outer["ts"] <= inner["ts"] + 1e3 and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e3
        assert inner["args"]["inside"] == outer["args"]["event"]
    names = {row["args"]["name"] for row in data["traceEvents"] if row["ph"] == "M"}
    assert threading.current_thread().name in names
    assert totals(data)["select"]["count"] == 2
    with pytest.raises(InvalidInputError, match="nothing is traced"):
        lz.observe(counters=False).trace()


def test_a_trace_keeps_the_newest_and_writes_any_attribute() -> None:
    kept = Trace(limit=3)
    for number in range(5):
        kept((Event("select", number, 1, {"odd": {1, 2}, "nan": float("nan"), "deep": {"a": (1, None)}}),))
    assert [event.start for event in kept.events] == [2, 3, 4]
    json.dumps(kept.to_json(), allow_nan=False)


def test_lz_trace_runs_a_program_and_sums_it_up(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import torch, layerzero as lz\nlz.rms_norm(torch.ones(2, 8), torch.ones(8))\n")
    out = tmp_path / "t.json"
    done = CliRunner().invoke(cli, ["trace", "--json", "--out", str(out), str(script)])
    answer = json.loads(done.stdout)
    assert done.exit_code == 0 and answer["events"]["dispatch"]["count"] == 1
    jsonschema.Draft202012Validator(TRACE_SCHEMA).validate(json.loads(out.read_bytes()))
    script.write_text("import sys; sys.exit(3)\n")
    done = CliRunner().invoke(cli, ["trace", "--json", "--out", str(out), str(script)])
    assert done.exit_code == 1 and json.loads(done.stdout)["code"] == 3 and not out.exists()


# -- spans -------------------------------------------------------------------------------------------
@pytest.mark.req("R-TEL-04")
@pytest.mark.needs_package("opentelemetry.sdk")
def test_the_otel_sdk_receives_spans_under_the_callers_own(lab: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), lab.kernel("mine.rms_norm.b", priority=800.0), only=True)
    with lz.observe(counters=False, spans=tracer), tracer.start_as_current_span("request"):
        lz.rms_norm(X, W)
        lz.rms_norm(X, W)  # hot: no span
        lab.faults["mine.rms_norm.a"] = RuntimeError("boom")
        lz.rms_norm(X, W)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(sorted(span.name for span in exporter.get_finished_spans())) == [
        "layerzero.dispatch", "layerzero.failover", "layerzero.select", "request",
    ]  # fmt: skip
    request = spans["request"].context.span_id
    assert spans["layerzero.dispatch"].parent.span_id == spans["layerzero.failover"].parent.span_id == request
    assert spans["layerzero.select"].parent.span_id == spans["layerzero.dispatch"].context.span_id
    assert spans["layerzero.select"].attributes["layerzero.kernel"] == "mine.rms_norm.a"
    assert "boom" in spans["layerzero.failover"].attributes["layerzero.cause"]
    for span in spans.values():
        assert span.start_time <= span.end_time
    outer, inner = spans["layerzero.dispatch"], spans["layerzero.select"]
    assert inner.end_time - inner.start_time <= outer.end_time - outer.start_time


@pytest.mark.req("R-TEL-04")
@pytest.mark.needs_package("opentelemetry.sdk")
def test_without_a_tracer_spans_go_to_the_provider_of_the_program(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # the program set it at its start, as one can once
    with lz.observe(spans=True):
        lz.rms_norm(X, W)
    lz.layer_norm(X, W)  # not observed any more
    found = exporter.get_finished_spans()
    assert sorted(span.name for span in found) == ["layerzero.dispatch", "layerzero.select"]
    assert {(span.attributes or {}).get("layerzero.op") for span in found} == {"rms_norm"}
    assert {getattr(span.instrumentation_scope, "name", None) for span in found} == {"layerzero"}


# -- logs --------------------------------------------------------------------------------------------
@pytest.fixture
def lines() -> Iterator[Any]:
    stream = io.StringIO()
    stops = []

    def begin(**options: Any) -> Any:
        stops.append(lz.structured_logs(stream, **options))
        return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]

    yield begin
    for stop in stops:
        stop()
    assert logging.getLogger("layerzero").handlers == [] or all(
        type(item) is logging.NullHandler for item in logging.getLogger("layerzero").handlers
    )


@pytest.mark.req("R-TEL-01")
def test_a_selection_is_one_json_line_with_kernel_reasons_and_cost(lab: Any, lines: Any) -> None:
    fits = lab.kernel("mine.rms_norm.a", priority=900.0)
    narrow = lab.kernel("mine.rms_norm.narrow", dtypes=frozenset({"float16"}), priority=950.0)
    lab.use(fits, narrow, only=True)
    told = lines()
    lz.rms_norm(X, W)
    lz.rms_norm(X, W)
    (row,) = [line for line in told() if line.get("event") == "selection"]
    assert row["kernel_id"] == "mine.rms_norm.a" and row["op"] == "rms_norm" and row["level"] == "info"
    assert row["reasons"]["mine.rms_norm.narrow"] == ["DTYPE_UNSUPPORTED"]
    assert row["transform_cost_total"] == 0.0 and row["dims"] == {"rows": 4, "hidden": 8}
    assert row["logger"] == "layerzero.selection" and row["pid"] == os.getpid() and row["time"].endswith("+00:00")


@pytest.mark.req("R-TEL-01")
def test_the_line_of_a_selection_that_adapts_its_inputs_has_what_that_costs(lab: Any, lines: Any) -> None:
    dense = lab.kernel("mine.rms_norm.dense", priority=900.0, contiguous=True, adapt=frozenset({"contiguous"}))
    lab.use(dense, only=True)
    told = lines()
    strided = torch.randn(8, 4).t()
    lz.rms_norm(strided, W)
    (row,) = [line for line in told() if line.get("event") == "selection"]
    decision = lz.explain("rms_norm", strided, W).decision
    assert row["kernel_id"] == "mine.rms_norm.dense" and [step.name for step in decision.winner.transforms]
    assert row["transform_cost_total"] == decision.transform_cost_total > 0.0


@pytest.mark.req("R-TEL-01")
def test_a_selection_that_finds_the_reference_alone_or_nothing_is_a_line_with_what_was_lacking(
    lab: Any, lines: Any
) -> None:
    lab.use(lab.kernel("mine.rms_norm.narrow", dtypes=frozenset({"float16"})), only=True)
    told = lines()
    lz.rms_norm(X, W)
    with lz.scoped(fallback_enabled=False), pytest.raises(NoKernelFoundError):
        lz.rms_norm(X, W)
    rows = [line for line in told() if line.get("event") == "selection"]
    found = [(row["level"], row["op"], row["kernel_id"], row["transform_cost_total"]) for row in rows]
    assert found == [("warning", "rms_norm", "reference.rms_norm.plain", 0.0), ("info", "rms_norm", "", 0.0)]
    assert all(row["reasons"]["mine.rms_norm.narrow"] == ["DTYPE_UNSUPPORTED"] for row in rows)


@pytest.mark.req("R-TEL-01")
def test_a_failover_is_one_json_line_with_its_traceback(lab: Any, lines: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    lab.faults["mine.rms_norm.a"] = RuntimeError("boom")
    told = lines(level="ERROR")
    lz.rms_norm(X, W)
    (row,) = told()
    assert row["event"] == "failover" and row["kernel_id"] == "mine.rms_norm.a"
    assert row["ran"] == "reference.rms_norm.plain" and row["reasons"] == ["KERNEL_RAISED"]
    assert "RuntimeError: boom" in row["exception"]


@pytest.mark.req("R-TEL-02")
def test_a_report_is_json_with_every_candidate_and_its_reasons(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.narrow", dtypes=frozenset({"float16"}), priority=950.0), only=True)
    lz.rms_norm(X, W)
    report = lz.explain("rms_norm", X, W)
    data = json.loads(report.to_json())
    assert data["chosen"] == data["ran"] == report.chosen and data["call"]["dims"] == {"rows": 4, "hidden": 8}
    by_name = {item["kernel_id"]: item for item in data["candidates"]}
    assert [item["code"] for item in by_name["mine.rms_norm.narrow"]["reasons"]] == ["DTYPE_UNSUPPORTED"]
    told = {item.kernel_id: [why.code for why in item.reasons] for item in report.decision.candidates}
    assert {name: [why["code"] for why in item["reasons"]] for name, item in by_name.items()} == told
    assert {name for name, item in by_name.items() if item["accepted"]} == {report.chosen} and len(told) == 2
    assert data["transform_cost_total"] == 0.0 and data == json.loads(json.dumps(report.to_dict()))


SECRETS = [
    "hf_" + "aB3" * 10, "sk-proj-" + "a1" * 16, "ghp_" + "Z9" * 12, "AKIA" + "A1B2" * 4,
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "https://user:hunter22@example.org/x",
    "Authorization: Bearer " + "t0k" * 8,
    "DB_PASSWORD=hunter22", '{"api_key": "hunter22"}', "token: hunter22",
]  # fmt: skip
HARMLESS = [
    "rms_norm -> torch.rms_norm.native (transform_cost_total=0.0 us)", "tokens=4096 vocab=32000", "https://example.org/x",
    "special_token handling", "sdpa.attention.flash rejected: SM_TOO_OLD", "key 3 of 7",
]  # fmt: skip


@pytest.mark.req("R-TEL-05")
@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", ["json", "text"])
def test_secrets_are_left_out_when_configured(lines: Any, secret: str, form: str) -> None:
    stream = io.StringIO()
    core = "hunter22" if "hunter22" in secret else secret.split()[-1]
    for redact in (True, False):
        stop = lz.structured_logs(stream, json=form == "json", redact=redact)
        try:
            raise ValueError(f"while fetching with {secret}")
        except ValueError:
            logging.getLogger("layerzero.test").exception(
                "it was %s, too", secret, extra={"layerzero": {"url": [secret]}}
            )
        stop()
        written = stream.getvalue()
        assert (core not in written) is redact, written
        assert not redact or HIDDEN in written
        stream.seek(0), stream.truncate()


@pytest.mark.req("R-TEL-05")
def test_what_is_no_secret_stays_and_own_patterns_add() -> None:
    plain = Redactor()
    assert [plain(line) for line in HARMLESS] == HARMLESS
    assert Redactor([r"customer-\d+"])("for customer-17 only") == f"for {HIDDEN} only"
    assert plain.value({"password": "abcd", "n": 3, "deep": [{"x": "AKIA" + "A1B2" * 4}]}) == {
        "password": HIDDEN, "n": 3, "deep": [{"x": HIDDEN}],
    }  # fmt: skip
    for bad in ("(", "x*", "", 3):
        with pytest.raises(ConfigurationError, match="cannot redact"):
            Redactor([bad])  # type: ignore[list-item]


def test_wrong_log_settings_are_one_clear_error(tmp_path: Path) -> None:
    for wrong in ({"level": "LOUD"}, {"redact": "word"}):
        with pytest.raises(InvalidInputError):
            lz.structured_logs(io.StringIO(), **wrong)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        lz.structured_logs(tmp_path / "no" / "log")
    assert not [h for h in logging.getLogger("layerzero").handlers if type(h) is not logging.NullHandler]


@pytest.mark.req("R-TEL-01", "R-TEL-05")
def test_a_whole_process_is_seen_by_its_environment(tmp_path: Path) -> None:
    log, metrics, trace = tmp_path / "log.jsonl", tmp_path / "m.json", tmp_path / "t.json"
    code = (
        "import torch, layerzero as lz\n"
        "for _ in range(6): lz.rms_norm(torch.ones(2, 8), torch.ones(8))\n"
        "import logging; logging.getLogger('layerzero').warning('password=hunter22')\n"
    )
    env = {**os.environ, "LAYERZERO_LOG": str(log), "LAYERZERO_METRICS": str(metrics), "LAYERZERO_TRACE": str(trace),
           "LAYERZERO_REDACT": "1"}  # fmt: skip
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=240)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(row.get("event") == "selection" for row in rows) and "hunter22" not in log.read_text()
    assert sum(value for _, value in read(str(metrics)).rows("layerzero_kernel_calls_total")) == 6
    assert totals(json.loads(trace.read_bytes()))["dispatch"]["count"] == 1


# -- top ---------------------------------------------------------------------------------------------
def reading(time: float, calls: dict[str, float], **more: float) -> Reading:
    samples: dict[str, Any] = {
        "layerzero_kernel_calls_total": {(("kernel", k), ("op", k.split(".")[1])): v for k, v in calls.items()},
        "layerzero_counting": {(): 1.0},
        **{f"layerzero_{name}": {(): value} for name, value in more.items()},
    }
    return Reading(samples, time, 42, "test")


def test_top_shows_rates_by_kernel_and_survives_a_restart() -> None:
    before = reading(10.0, {"a.rms_norm.x": 100, "b.attention.y": 50}, misses_total=4)
    after = reading(12.0, {"a.rms_norm.x": 110, "b.attention.y": 650, "c.rope.z": 2}, misses_total=4)
    data = summary(before, after)
    rates = {row["kernel"]: row["per_s"] for row in data["kernels"]}
    assert rates == {"b.attention.y": 300.0, "a.rms_norm.x": 5.0, "c.rope.z": 1.0}
    assert data["totals"]["misses"] == {"total": 4.0, "per_s": 0.0}
    assert data["kernels"][0]["kernel"] == "b.attention.y"
    again = reading(14.0, {"a.rms_norm.x": 8})  # the process was started anew: its counters begin at zero
    assert summary(after, again)["kernels"][0]["per_s"] == 4.0
    assert len(frame(before, after, rows=1)[-1].rows) == 1  # type: ignore[union-attr]


def test_lz_top_reads_a_live_process_by_port_and_by_file(tmp_path: Path) -> None:
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            lz.rms_norm(X, W)

    worker = threading.Thread(target=traffic)
    with lz.observe(metrics=0) as by_port, lz.observe(metrics=tmp_path / "m.prom", interval=0.05):
        worker.start()
        try:
            assert by_port.where is not None
            for source in (by_port.where, str(tmp_path / "m.prom")):
                done = CliRunner().invoke(cli, ["top", source, "--once", "--interval", "0.4", "--json"])
                data = json.loads(done.stdout)
                assert done.exit_code == 0 and data["counting"] is True
                assert sum(row["per_s"] for row in data["kernels"]) > 0 and data["hit_ratio"] > 0.9
            done = CliRunner().invoke(cli, ["top", by_port.where, "--once", "--interval", "0.1"])
            assert "calls/s" in done.stdout and "rms_norm" in done.stdout
        finally:
            stop.set()
            worker.join()
    done = CliRunner().invoke(cli, ["top", str(tmp_path / "gone"), "--once"])
    assert done.exit_code == 1 and "LAYERZERO_METRICS" in done.stderr
