"""What a running process tells in numbers: counters checked by instruments, metrics by Prometheus itself."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.dispatch import compiling
from layerzero.dispatch.bind import Bound
from layerzero.errors import ConfigurationError
from layerzero.model.kernel import BackendSpec
from layerzero.runtime.observation import families
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements
from layerzero.startup.warm import Item, Manifest
from layerzero.telemetry.events import Histogram, KernelCounters, events
from layerzero.telemetry.metrics import CATALOGUE, Family, Sample, histogram, text
from layerzero_tune.telemetry.reading import parse_text, read

client = pytest.importorskip("prometheus_client")
text_string_to_metric_families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families

X, W = torch.ones(4, 8), torch.ones(8)
DASHBOARD = json.loads(files("layerzero.telemetry").joinpath("grafana.json").read_text())


def calls(op: str, kernel_id: str) -> int:
    return lz.observe(counters=False).calls().get((op, kernel_id), 0)


# -- counting ----------------------------------------------------------------------------------------
@pytest.mark.req("R-TEL-03")
def test_calls_are_counted_exactly_while_observed_and_not_at_all_otherwise(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    before = calls("rms_norm", "mine.rms_norm.a")
    for _ in range(3):
        lz.rms_norm(X, W)
    assert calls("rms_norm", "mine.rms_norm.a") == before
    lab.clear()
    with lz.observe() as seen:
        for _ in range(7):
            lz.rms_norm(X, W)
        with lz.scoped(prefer=["mine"]):  # a scope has a World of its own
            lz.rms_norm(X, W)
        assert seen.calls()["rms_norm", "mine.rms_norm.a"] - before == lab.ran().count("mine.rms_norm.a") == 8
    lz.rms_norm(X, W)
    assert calls("rms_norm", "mine.rms_norm.a") - before == 8


def test_while_nobody_counts_no_entry_has_a_guard_of_ours(lab: Any) -> None:
    def guards() -> list[Any]:
        lz.rms_norm(X, W)
        return [entry.guard for entry in state.world.hot.values() if isinstance(entry, Bound)]

    assert guards() == [None]
    with lz.observe():
        (guard,) = guards()
        assert guard is not None
        with lz.observe():  # a second observer swaps nothing and counts nothing twice
            world, before = state.world, calls("rms_norm", "torch.rms_norm.native")
            lz.rms_norm(X, W)
            assert state.world is world and calls("rms_norm", "torch.rms_norm.native") == before + 1
        assert guards() != [None]
    assert guards() == [None]


@pytest.mark.req("R-TEL-03")
def test_eight_threads_are_counted_exactly() -> None:
    lz.reset()
    lz.rms_norm(X, W)  # where its kernel has no proof, the first answer is checked and may be another's
    name = lz.which("rms_norm", X, W)
    before, each = calls("rms_norm", name), 2_000
    with lz.observe():
        threads = [threading.Thread(target=lambda: [lz.rms_norm(X, W) for _ in range(each)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls("rms_norm", name) - before == 8 * each


def test_a_guard_that_fails_is_not_counted_and_one_that_holds_is() -> None:
    counters, holds = KernelCounters(), True
    guard = counters.guard("op", "kernel", lambda: holds)
    assert guard() and guard()
    holds = False
    assert not guard()
    assert counters.calls() == {("op", "kernel"): 2}


def test_a_failover_is_counted_for_the_kernel_that_ran(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), lab.kernel("mine.rms_norm.b", priority=800.0), only=True)
    lab.faults["mine.rms_norm.a"] = RuntimeError("boom")
    a, b = calls("rms_norm", "mine.rms_norm.a"), calls("rms_norm", "mine.rms_norm.b")
    failed = events.histograms["failover"].count
    with lz.observe(trace=True) as seen:
        lz.rms_norm(X, W)
        rows = [row for row in seen.trace()["traceEvents"] if row["ph"] == "X"]
    assert calls("rms_norm", "mine.rms_norm.b") - b == 1 and calls("rms_norm", "mine.rms_norm.a") - a == 1
    assert events.histograms["failover"].count == failed + 1
    (failover,) = [row for row in rows if row["name"].startswith("failover")]
    assert failover["args"]["kernel"] == "mine.rms_norm.a" and "boom" in failover["args"]["cause"]


# -- metrics -----------------------------------------------------------------------------------------
@pytest.mark.req("R-TEL-03")
def test_the_hit_ratio_and_the_time_of_a_selection_are_those_of_the_calls(lab: Any) -> None:
    """Four calls of five are hot; the one selection takes as long as what it waits for, and no longer than its call."""

    def told() -> tuple[float, float, float, float]:
        found = {s.name: s.value for f in text_string_to_metric_families(text(families())) for s in f.samples}
        total = sum(lz.observe(counters=False).calls().values())
        hot = found.get("layerzero_hot_hit_ratio", 0.0) * total
        return total, hot, found["layerzero_select_seconds_count"], found["layerzero_select_seconds_sum"]

    def slow(kernel_id: str, ctx: Any) -> float:
        time.sleep(0.05)
        return 1.0

    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    with lz.observe():
        state.publish(measurements=Measurements(slow, "made up"))
        before, start = told(), time.perf_counter()
        for _ in range(5):
            lz.rms_norm(X, W)
        wall = time.perf_counter() - start
        total, hot, count, seconds = (now - then for now, then in zip(told(), before, strict=True))
    assert (total, round(hot, 3), count) == (5, 4, 1)
    assert 0.05 <= seconds <= wall


@pytest.mark.req("R-TEL-03", "R-TEL-04")
def test_the_text_is_what_prometheus_parses_and_holds_what_happened(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    with lz.observe():
        for _ in range(5):
            lz.rms_norm(X, W)
        found = {item.name: item for item in text_string_to_metric_families(text(families()))}
        numbers = state.counters
        assert found["layerzero_misses"].samples[0].value == numbers.misses >= 1
        assert found["layerzero_selections"].samples[0].value == numbers.selections >= 1
        assert found["layerzero_selection_cache_entries"].samples[0].value == len(state.cache)
        rows = {(s.labels["op"], s.labels["kernel"]): s.value for s in found["layerzero_kernel_calls"].samples}
        assert rows["rms_norm", "mine.rms_norm.a"] >= 5
        assert 0 < found["layerzero_hot_hit_ratio"].samples[0].value < 1
        select = {s.name: s.value for s in found["layerzero_select_seconds"].samples if "le" not in s.labels}
        assert select["layerzero_select_seconds_count"] == events.histograms["select"].count >= 1
        assert select["layerzero_select_seconds_sum"] > 0
    for name, item in found.items():
        assert (name if item.type != "counter" else f"{name}_total") in CATALOGUE
        assert item.documentation and item.type in ("counter", "gauge", "histogram")


def test_labels_survive_whatever_is_in_them() -> None:
    odd = 'a"b\\c\nd é {x="y"}'
    body = text([Family("m", "gauge", "help\nwith a line", (Sample("m", (("l", odd),), float("nan")),))])
    (family,) = text_string_to_metric_families(body)
    assert family.samples[0].labels == {"l": odd}
    assert list(parse_text(body)["m"]) == [(("l", odd),)]


def test_a_histogram_adds_up_and_bounds_its_quantiles() -> None:
    made = Histogram()
    assert made.quantile(0.5) is None
    for value in (2e-5, 2e-5, 2e-5, 0.04, 1_000.0):
        made.add(value)
    counts, total = made.read()
    assert counts[-1] == 5 and counts == sorted(counts) and total == pytest.approx(1_000.04006)
    assert made.quantile(0.5) == 2.5e-5 and made.quantile(0.7) == 0.05 and made.quantile(1.0) == float("inf")
    (family,) = text_string_to_metric_families(text([histogram("layerzero_select_seconds", made)]))
    assert [s.value for s in family.samples if s.labels.get("le") == "+Inf"] == [5]


@pytest.mark.req("R-TEL-04")
def test_the_client_library_has_the_same_numbers_in_its_own_registry() -> None:
    registry = client.CollectorRegistry()
    with lz.observe(registry=registry):
        lz.rms_norm(X, W)
        lz.rms_norm(X, W)
        theirs = parse_text(client.generate_latest(registry).decode())
        ours = parse_text(text(families()))
    for name in ("layerzero_kernel_calls_total", "layerzero_misses_total", "layerzero_select_seconds_bucket"):
        assert theirs[name] == ours[name]
    assert "layerzero_info" not in client.generate_latest(registry).decode()


@pytest.mark.req("R-TEL-06")
def test_health_compiles_and_warm_up_are_visible(lab: Any) -> None:
    from layerzero.model.context import Context

    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True)
    state.health.kernel_failed("mine.rms_norm.a", "boom")
    state.health.set_quarantined({"mine.rms_norm.a": "it crashed"})
    lz.warmup([Context("rms_norm", dims=(("rows", 4), ("hidden", 8)))])
    found = lz.metrics()
    assert {"kind": "kernel", "name": "mine.rms_norm.a", "value": 2.0} in found["layerzero_breaker_state"]
    assert found["layerzero_quarantined"] == [{"kernel": "mine.rms_norm.a", "value": 1.0}]
    assert {"backend": "reference", "value": 1.0} in found["layerzero_backend_available"]
    assert {row["state"] for row in found["layerzero_jit_artifacts"]} == {"ready", "failed", "pending"}
    assert {"state": "asked", "value": 1.0} in found["layerzero_warmup_calls"]
    state.health.set_quarantined({})


@pytest.mark.req("R-TEL-06")
def test_a_backend_that_is_ill_and_one_that_is_absent_are_told_apart_from_a_sound_one(lab: Any) -> None:
    lab.use(lab.kernel("mine.rms_norm.a", priority=900.0), only=True, breaker={"cooldown_s": 3600})
    registry = state.world.registry.add((), BackendSpec("sound")).add((), BackendSpec("absent", available=False))
    state.publish(registry=registry)

    def told(metric: str, **labels: str) -> list[float]:
        rows = lz.metrics()[metric]
        return [row["value"] for row in rows if labels.items() <= row.items()]

    assert [told("layerzero_backend_available", backend=name) for name in ("sound", "absent")] == [[1.0], [0.0]]
    assert told("layerzero_breaker_state", kind="backend", name="mine") == []
    state.health.backend_failed("mine", "its library is gone")
    assert told("layerzero_breaker_state", kind="backend", name="mine") == [2.0]
    state.health.reset()
    assert told("layerzero_breaker_state", kind="backend") == []


@pytest.mark.req("R-TEL-06")
def test_a_warm_up_is_told_while_it_goes_on_and_when_it_is_done(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critical kernel that does not compile, so that the next one is bound; another that takes its time."""
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))
    monkeypatch.setattr(compiling, "_queue", None)
    go = threading.Event()

    def compiled(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[-1] == 8:
            raise RuntimeError("no such instruction")
        assert go.wait(60)
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)

    lab.use(lab.kernel("slow.rms_norm.jit", compiled, priority=900.0, jit=True, jit_key=("hidden",)), only=True)
    lz.configure(jit="off")
    calls = [lz.select("rms_norm", torch.ones(4, hidden), torch.ones(hidden)).context for hidden in (8, 16)]
    try:
        result = lz.warmup(Manifest((Item(calls[0], critical=True), Item(calls[1]))))
        seen = [lz.metrics()]
    finally:
        go.set()
    assert result.wait(60)
    compiling.publish()
    seen.append(lz.metrics())
    named = [{row["state"]: row["value"] for row in found["layerzero_warmup_calls"]} for found in seen]
    assert named == [{"asked": 2, "bound": 1, "failed": 1, "waiting": waiting} for waiting in (1, 0)]
    named = [{row["state"]: row["value"] for row in found["layerzero_jit_artifacts"]} for found in seen]
    assert named == [{"ready": n, "failed": 1, "pending": 1 - n} for n in (0, 1)]


# -- export ------------------------------------------------------------------------------------------
def fetched(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.req("R-TEL-04")
def test_a_port_answers_on_this_machine_only_and_is_free_again_afterwards() -> None:
    with lz.observe(metrics=0) as seen:
        lz.rms_norm(X, W)
        assert seen.where is not None and "127.0.0.1" in seen.where
        status, body = fetched(seen.where)
        assert status == 200 and "layerzero_misses_total" in body
        status, data = fetched(f"{seen.where}.json")
        assert status == 200 and json.loads(data)["pid"] == os.getpid()
        assert fetched(seen.where.replace("/metrics", "/else"))[0] == 404
        port = int(seen.where.split(":")[-1].split("/")[0])
        with pytest.raises(ConfigurationError, match="cannot be offered"):
            lz.observe(metrics=port)
        by_port, by_address = read(str(port)), read(seen.where)
        assert by_port.value("layerzero_misses_total") == by_address.value("layerzero_misses_total")
    with pytest.raises(ConfigurationError, match="LAYERZERO_METRICS"):
        read(str(port))
    with lz.observe(metrics=port) as again:
        assert again.where == seen.where


def test_a_file_is_rewritten_whole_and_has_the_last_state(tmp_path: Path) -> None:
    for name in ("metrics.json", "metrics.prom"):
        path, torn, done = tmp_path / name, [], threading.Event()

        def look(path: Path = path, torn: list[Any] = torn, done: threading.Event = done) -> None:
            while not done.is_set():
                try:
                    if read(str(path)).value("layerzero_misses_total") is None:
                        torn.append(path.read_text())
                except ConfigurationError as error:
                    torn.append(error)

        with lz.observe(metrics=path, interval=0.05) as seen:
            watcher = threading.Thread(target=look)
            watcher.start()
            for _ in range(200):
                lz.rms_norm(X, W)
            time.sleep(0.3)
            done.set()
            watcher.join()
            last = seen.calls()
        assert not torn
        rows = {(r["op"], r["kernel"]): v for r, v in read(str(path)).rows("layerzero_kernel_calls_total")}
        assert rows == {key: float(value) for key, value in last.items()}
        assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []
        path.unlink()


def test_what_cannot_be_exported_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError) as caught:
        lz.observe(metrics=tmp_path / "file" / "metrics.json")
    assert "cannot be written" in str(caught.value) and state.counting is None
    for source in (str(tmp_path / "none"), str(tmp_path), "http://127.0.0.1:9/metrics"):
        with pytest.raises(ConfigurationError, match="no metrics at"):
            read(source)
    for body in ("{", '{"format": "other"}', '{"format": "layerzero-metrics-1", "metrics": [1]}', "[]\udcff"):
        (tmp_path / "file").write_bytes(body.encode("utf-8", "surrogatepass"))
        if body.startswith("{"):
            with pytest.raises(ConfigurationError, match="no metrics at"):
                read(str(tmp_path / "file"))


@pytest.mark.req("R-TEL-04")
@pytest.mark.needs_tool("prometheus")
def test_the_real_prometheus_scrapes_it_and_understands_the_dashboard(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with lz.observe(metrics=0) as seen:
        assert seen.where is not None
        target = seen.where.removeprefix("http://").removesuffix("/metrics")
        config = {"scrape_configs": [{"job_name": "lz", "scrape_interval": "1s", "scrape_timeout": "1s",
                                      "static_configs": [{"targets": [target]}]}]}  # fmt: skip
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(
                ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                 f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log,
            )  # fmt: skip
        try:
            for _ in range(11):
                lz.rms_norm(X, W)
            want = sum(seen.calls().values())
            answer: Any = None
            end = time.monotonic() + 120
            while time.monotonic() < end and answer != want:
                time.sleep(0.2)
                assert server.poll() is None, (tmp_path / "log").read_text()
                try:
                    data = json.loads(_asked(port, "query", "sum(layerzero_kernel_calls_total)"))
                    answer = float(data["data"]["result"][0]["value"][1])
                except (OSError, IndexError, KeyError, ValueError):  # not up yet: "Service Unavailable"
                    continue
            assert answer == want
            for expression in expressions():
                plain = expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
                assert json.loads(_asked(port, "query", plain))["status"] == "success", expression
        finally:
            server.terminate()
            server.wait(60)


def _asked(port: int, what: str, query: str) -> str:
    return fetched(f"http://127.0.0.1:{port}/api/v1/{what}?query={urllib.parse.quote(query)}")[1]


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.req("R-TEL-04")
def test_the_dashboard_names_only_metrics_that_exist_and_every_panel_has_some() -> None:
    known = set(CATALOGUE)
    for name, (kind, _) in CATALOGUE.items():
        if kind == "histogram":
            known |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    for panel in DASHBOARD["panels"]:
        assert panel["targets"] and panel["title"]
    named = {word for text_ in expressions() for word in re.findall(r"\blayerzero_\w+", text_)}
    assert named and named <= known, named - known
    variables = json.dumps(DASHBOARD["templating"])
    assert set(re.findall(r"\blayerzero_\w+", variables)) <= known
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_of_the_catalogue_is_told_by_some_process() -> None:
    """What no process ever tells has no business in the catalogue; rank metrics are shown in tests/distributed."""
    from layerzero.model.context import Context

    lz.rms_norm(X, W)
    with lz.observe():
        lz.rms_norm(X, W)
        lz.warmup([Context("rms_norm", dims=(("rows", 4), ("hidden", 8)))])
        told = {item.name for item in families()}
    assert set(CATALOGUE) - told == {"layerzero_ranks", "layerzero_rank_disagreements_total"}
