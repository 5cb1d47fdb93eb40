"""Warm-up: after it, the first request compiles nothing; the critical calls are ready first."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.dispatch import compiling as jit
from layerzero.errors import ConfigurationError, InvalidInputError
from layerzero.public.traffic import manifest
from layerzero.recording.traffic import Recorded
from layerzero.runtime.state import state
from layerzero.startup.warm import Item, Manifest, mark_critical
from layerzero_cli.root import cli
from tools.pytest_fixtures import module_beside

HERE = Path(__file__).parent

_shared = module_beside(__file__, "compiled_lab")
cache, compiler = _shared.cache, _shared.compiler
Compiler, KERNEL, load_kernel = _shared.Compiler, _shared.KERNEL, _shared.load_kernel
use, wait_until = _shared.use, _shared.wait_until

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 50, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "max_position_embeddings": 256, "hidden_act": "silu",
}  # fmt: skip

GRID = """
schema_version = "1.0"
[[case]]
name = "norm {n}x{h}"
op = "rms_norm"
devices = ["cpu"]
each = { n = [1, 16, 300], h = [8, 16] }
grows = ["n"]
shape = "{n},{h}"
dtype = "float32"
"""


def norm_of(rows: int, hidden: int) -> Any:
    return lz.select("rms_norm", torch.ones(rows, hidden), torch.ones(hidden)).context


@pytest.mark.req("R-WARM-01", "R-WARM-02", "R-WARM-05", "R-API-27")
def test_after_a_warm_up_from_a_model_configuration_the_first_request_compiles_nothing(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    use(lab)
    result = lz.warmup(CONFIG, background=False)
    assert result.ok and result.bound > 0 and any(KERNEL in words for words in result.compiled)
    runs = compiler.runs
    assert runs == 1  # one artifact serves every length of the model
    for rows in (1, 7, 200):
        x, w = torch.randn(rows, 64), torch.ones(64)
        assert lab.run(lz.rms_norm, x, w)[0].shape == x.shape
        assert lz.explain("rms_norm", x, w).chosen == KERNEL
    assert compiler.runs == runs
    load_kernel().forget()
    use(lab)  # as after a restart
    again = lz.warmup(CONFIG, background=False)
    assert again.already == 1 and compiler.runs == runs


@pytest.mark.req("R-WARM-01")
def test_critical_calls_block_and_the_rest_follows_without_holding_up_requests(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    """Named last, with one compiler: it is compiled first; then the compiler is held up, and only the rest waits."""
    use(lab)
    items = (*(Item(norm_of(2, hidden)) for hidden in (16, 24, 32)), Item(norm_of(2, 8), critical=True))
    started: list[int] = []

    def told(done: int, everything: int) -> None:
        started.append(done)
        if done == 1:
            compiler.gate.touch()

    result = lz.warmup(Manifest(items), workers=1, timeout=20, progress=told)
    assert result.ok and [words.endswith("hidden=8)") for words in result.compiled] == [True]
    assert lz.explain("rms_norm", torch.ones(2, 8), torch.ones(8)).chosen == KERNEL
    wait_until(lambda: compiler.runs == 2)
    assert started == [1] and result.waiting == 3 and not result.wait(0.0)
    for hidden in (16, 24, 48):  # requests in the middle of it
        out, ran = lab.run(lz.rms_norm, torch.ones(2, hidden), torch.ones(hidden))
        assert out.shape == (2, hidden) and ran and ran != [KERNEL]
    compiler.gate.unlink()
    assert result.wait(90) and started == [1, 2, 3, 4]
    assert len(result.compiled) == 4 and result.compiled[0].endswith("hidden=8)")


@pytest.mark.req("R-WARM-03")
def test_what_is_not_ready_in_time_is_left_to_the_fallback(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab)
    compiler.gate.touch()
    result = lz.warmup(Manifest((Item(norm_of(2, 8), critical=True),)), timeout=0.2)
    assert compiler.gate.exists() and jit.queue().busy == 1, "it waited for the compile"
    assert not result.ok and result.failed[0].reason is not None and result.failed[0].reason.code == "JIT_TIMEOUT"
    _, ran = lab.run(lz.rms_norm, torch.ones(2, 8), torch.ones(8))
    assert ran and ran != [KERNEL]
    compiler.gate.unlink()
    assert result.wait(90)
    wait_until(lambda: lz.explain("rms_norm", torch.ones(2, 8), torch.ones(8)).chosen == KERNEL)


@pytest.mark.req("R-WARM-08")
def test_a_critical_kernel_that_fails_gives_way_to_the_next_one(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab)
    compiler.fault.touch()
    result = lz.warmup(Manifest((Item(norm_of(2, 8), critical=True),)))
    assert not result.ok and result.bound == 1
    (failed,) = result.failed
    assert failed.reason is not None and failed.reason.code == "JIT_FAILED"
    compiler.fault.unlink()
    assert lz.warmup(Manifest((Item(norm_of(2, 8), critical=True),))).compiled == ()  # not tried again by itself
    assert lz.warmup(Manifest((Item(norm_of(2, 8), critical=True),)), retry=True).ok
    assert compiler.runs == 2


def test_kernels_that_selection_would_not_choose_are_compiled_when_named(
    lab: Any, cache: Path, compiler: Compiler
) -> None:
    use(lab, priority=-50.0)
    contexts = Manifest((Item(norm_of(2, 8), critical=True),))
    assert lz.warmup(contexts).compiled == () and compiler.runs == 0
    assert len(lz.warmup(contexts, kernels="cc").compiled) == 1 and compiler.runs == 1


def test_recorded_traffic_makes_the_frequent_calls_critical(lab: Any, cache: Path, tmp_path: Path) -> None:
    common, rare = norm_of(1, 8), norm_of(128, 8)
    items = mark_critical([Recorded(rare, 1), Recorded(common, 99)])
    assert [item.critical for item in items] == [True, False] and items[0].context == common
    with lz.record(tmp_path / "traffic.json"):
        for _ in range(30):
            lz.rms_norm(torch.ones(1, 8), torch.ones(8))
        lz.rms_norm(torch.ones(128, 8), torch.ones(8))
    found = manifest(tmp_path / "traffic.json")
    assert [dict(item.context.dims)["rows"] for item in found.items if item.critical] == [1]
    assert found.items[0].strides is not None


@pytest.mark.req("R-WARM-02")
def test_a_manifest_is_a_file_tied_to_its_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    made = manifest(config)
    assert any(item.critical for item in made.items) and not all(item.critical for item in made.items)
    path = tmp_path / "warm.json"
    made.save(path)
    assert manifest(path, config=config) == made
    config.write_text(json.dumps({**CONFIG, "hidden_size": 128}))
    with pytest.raises(ConfigurationError, match="another model configuration"):
        manifest(path, config=config)
    data = json.loads(path.read_text())
    for broken in ("critical", "context"):
        path.write_text(json.dumps({**data, "calls": [{**data["calls"][0], broken: 3}]}))
        with pytest.raises(ConfigurationError, match=r"calls\[0\]"):
            manifest(path)


def test_settings_that_mean_nothing_are_refused() -> None:
    for given in ({"timeout": -1}, {"workers": 0}, {"timeout": float("nan")}):
        with pytest.raises(InvalidInputError):
            lz.warmup(CONFIG, **given)
    with pytest.raises(ConfigurationError):
        lz.warmup("nowhere.json")


def test_backends_with_needs_of_their_own_are_asked_and_may_fail(
    lab: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import pluggy

    from layerzero.plugin import hookimpl
    from layerzero.plugin import spec as hooks

    heard: list[Any] = []

    class Mine:
        @hookimpl
        def layerzero_warmup(self, shapes: list[dict[str, Any]]) -> None:
            heard.extend(shapes)

    class Broken:
        @hookimpl
        def layerzero_warmup(self, shapes: list[dict[str, Any]]) -> None:
            raise RuntimeError("boom")

    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(Mine())
    manager.register(Broken())
    monkeypatch.setattr(state, "plugin_manager", manager)
    lz.warmup(Manifest((Item(norm_of(3, 8), critical=True),)))
    assert heard[0]["op"] == "rms_norm" and heard[0]["dims"]["rows"] == 4 and heard[0]["critical"]
    assert "layerzero_warmup" in caplog.text


def test_a_backend_that_compiles_all_at_once_does_so_before_its_kernels_and_beside_the_others(
    lab: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own kernels wait for it, those of the others do not."""
    import pluggy

    from layerzero.plugin import hookimpl
    from layerzero.plugin import spec as hooks
    from layerzero.startup import warm as module

    told: list[str] = []
    others = threading.Event()

    class Mine:
        @hookimpl
        def layerzero_warmup(self, shapes: list[dict[str, Any]]) -> None:
            assert others.wait(60)
            told.append("all at once")

    turns: list[float] = []

    def compiled(job: Any, result: Any, said: Any) -> None:
        told.append(job.kernel_id)
        turns.append(sys.getswitchinterval())
        if job.kernel_id == "other.norm":
            others.set()

    item = Item(norm_of(3, 8), critical=True)
    jobs = {(name, ("", "")): module._Job(item, name, True) for name in ("mine.a", "other.norm", "mine.b")}
    given = iter([jobs, {}])
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(Mine(), name="mine")
    monkeypatch.setattr(state, "plugin_manager", manager)
    monkeypatch.setattr(module, "_compile", compiled)
    monkeypatch.setattr(module, "_jobs", lambda *args, **kwargs: next(given))
    usual = sys.getswitchinterval()
    module.warm([item], workers=1)
    assert told == ["other.norm", "all at once", "mine.a", "mine.b"]
    # Who imports beside a compiler written in Python does not wait long for the interpreter; afterwards as before.
    assert max(turns) <= 0.001 < usual == sys.getswitchinterval()


def test_the_last_of_several_warm_ups_gives_the_interpreter_its_turns_back() -> None:
    from layerzero.dispatch.compiling import short_turns

    usual = sys.getswitchinterval()
    one, two = short_turns(), short_turns()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() < usual
    two.__exit__(None, None, None)
    assert sys.getswitchinterval() == usual


def test_what_differs_in_its_gradient_alone_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType, SimpleNamespace

    from layerzero.model.variants import GradientVariant
    from layerzero.startup import warm as module

    home = ModuleType("lab_of_twins")
    home.plain = lambda x: x  # type: ignore[attr-defined]
    home.careful = GradientVariant(home.plain, deterministic=True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    names = {"lab.plain": "lab_of_twins:plain", "lab.careful": "lab_of_twins:careful", "lab.far": "not_there:run"}
    world: Any = SimpleNamespace(
        registry=SimpleNamespace(
            kernels={name: SimpleNamespace(function=path, backend="lab") for name, path in names.items()}
        ),
        enclosed={},
    )
    assert module.each_once(list(names), world) == ["lab.plain", "lab.far"]
    assert module.each_once(["lab.careful", "lab.far"], world) == ["lab.careful", "lab.far"]


def test_adapters_are_looked_through_after_their_vendors_were_told_where_to_keep_kernels(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QuACK reads the variable when it is imported; a vendor that has a process of its own is not imported at all."""
    from types import SimpleNamespace

    from layerzero.startup import warm as module

    for name in ("lab_that_looks", "lab_apart"):
        (tmp_path / f"{name}.py").write_text(
            "import os\nfound = os.environ.get('QUACK_CACHE_DIR')\nrun = other = print\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QUACK_CACHE_DIR", "")  # and put back at the end
    kernels = {
        f"{backend}.{name}": SimpleNamespace(function=f"{home}:{name}", backend=backend)
        for backend, home in (("looks", "lab_that_looks"), ("apart", "lab_apart"))
        for name in ("run", "other")
    }
    world: Any = SimpleNamespace(registry=SimpleNamespace(kernels=kernels), enclosed={"apart": object()})
    assert module.each_once(list(kernels), world) == list(kernels)
    assert Path(sys.modules["lab_that_looks"].found).parent == cache  # type: ignore[attr-defined]
    assert "lab_apart" not in sys.modules
    monkeypatch.delitem(sys.modules, "lab_that_looks")


def test_the_command_line_writes_manifests_and_warms_up(
    tmp_path: Path, cache: Path, lab: Any, compiler: Compiler
) -> None:
    use(lab)
    config, path = tmp_path / "config.json", tmp_path / "warm.json"
    config.write_text(json.dumps(CONFIG))
    runner = CliRunner()
    wrote = runner.invoke(cli, ["warmup", str(config), "--write", str(path), "--json"])
    assert wrote.exit_code == 0 and json.loads(wrote.stdout)["critical"] > 0
    done = runner.invoke(cli, ["warmup", str(path), "--config", str(config), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["ok"] and found["waiting"] == 0
    assert any(item["kernel_id"] == KERNEL and item["reason"] is None for item in found["artifacts"])
    words = runner.invoke(cli, ["warmup", str(path)])
    assert words.exit_code == 0 and "ready" in words.stdout and KERNEL in words.stdout
    assert runner.invoke(cli, ["warmup", str(tmp_path / "none.json")]).exit_code == 1


@pytest.mark.req("R-SOLV-02")
def test_solving_compiles_for_every_bucket_first_where_it_is_asked_to(
    tmp_path: Path, cache: Path, lab: Any, compiler: Compiler
) -> None:
    """Without it, a kernel that is not compiled is not in the table; with it every bucket has it, ready."""
    use(lab)
    grid, table, runner = tmp_path / "grid.toml", tmp_path / "table.json", CliRunner()
    grid.write_text(GRID)
    words = ["solve", "--grid", str(grid), "-o", str(table), "--device", "cpu", "--json"]

    def kernels() -> list[str]:
        done = runner.invoke(cli, [*words, *more])
        assert done.exit_code == 0, done.output
        plans = json.loads(table.read_text())["plans"]
        return [item["kernel_id"] for plan in plans for item in plan["ops"]]

    more: list[str] = []
    with lz.scoped(jit="off"):
        assert KERNEL not in kernels() and compiler.runs == 0
    more = ["--warm"]
    found = kernels()
    assert len(found) == 6 and set(found) == {KERNEL}
    runs = compiler.runs
    assert runs > 0
    lz.use_table(table)
    with lz.scoped(jit="off"):
        for rows, hidden in ((1, 8), (16, 16), (300, 8)):
            lab.run(lz.rms_norm, torch.randn(rows, hidden), torch.ones(hidden))
    assert compiler.runs == runs


@pytest.mark.req("R-WARM-05")
@pytest.mark.parametrize("key", [("dtype",), ("dtype", "rows")], ids=["one for all sizes", "one for each size"])
def test_nothing_compiles_in_a_request_inside_a_solved_bucket(
    tmp_path: Path, cache: Path, lab: Any, key: tuple[str, ...]
) -> None:
    """Solved for 1, 16 and 300 rows; where sizes have artifacts of their own, a bucket is one size and no more."""
    compiled: dict[int, int] = {}

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        compiled.setdefault(len(x) if "rows" in key else 0, threading.get_ident())
        return torch.rms_norm(x, (x.shape[-1],), weight, eps)

    lab.use(lab.kernel(KERNEL, norm, jit=True, jit_key=key, priority=90.0))
    grid, table = tmp_path / "grid.toml", tmp_path / "table.json"
    grid.write_text(GRID)
    words = ["solve", "--grid", str(grid), "-o", str(table), "--device", "cpu", "--warm"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    lz.use_table(table)
    solved = len(compiled)
    for rows in (1, 16, 300, 290, 257):
        known = rows in (1, 16, 300) or "rows" not in key
        _, ran = lab.run(lz.rms_norm, torch.randn(rows, 8), torch.ones(8))
        assert (ran == [KERNEL]) is known and (len(compiled) == solved or not known), rows
    assert threading.get_ident() not in compiled.values()


def test_a_request_that_asked_first_is_not_compiled_twice(lab: Any, cache: Path, compiler: Compiler) -> None:
    use(lab)
    compiler.gate.touch()
    lz.rms_norm(torch.ones(2, 8), torch.ones(8))
    wait_until(lambda: compiler.runs == 1)
    threading.Timer(0.1, compiler.gate.unlink).start()
    assert lz.warmup(Manifest((Item(norm_of(2, 8), critical=True),))).ok
    assert compiler.runs == 1 and not jit.queue().busy


# -- the real compilers -------------------------------------------------------------------------------------------
INDUCTOR = """
import sys, torch, layerzero as lz
from layerzero.runtime.state import state
x, w = torch.randn(5, 64), torch.randn(64)
ctx = lz.select("rms_norm", x, w).context
if sys.argv[1] == "warm":
    print(lz.warmup([ctx], kernels="inductor").to_json())
lz.configure(jit="off")
out = lz.rms_norm(x, w, backend="inductor")
torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (64,), w, 1e-6))
torch.testing.assert_close(lz.rms_norm(x[:1], w, backend="inductor"), out[:1])
"""


@pytest.mark.slow
@pytest.mark.req("R-WARM-05", "R-WARM-06")
def test_inductor_kernels_come_from_the_cache_after_a_warm_up(cache: Path, compiler: Compiler, tmp_path: Path) -> None:
    script = tmp_path / "inductor.py"
    script.write_text(INDUCTOR)
    subprocess.run([sys.executable, str(script), "warm"], check=True, timeout=300)
    runs = compiler.runs
    assert runs > 0  # the compiler named by CXX did the work
    compiler.fault.touch()  # from here on any compile fails, and would be counted
    subprocess.run([sys.executable, str(script), "use"], check=True, timeout=240)
    assert compiler.runs == runs


@pytest.mark.slow
def test_without_a_compiler_inductor_says_so_and_the_fallback_runs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layerzero.backends.inductor import compiling

    lz.reset()
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    x, w = torch.randn(5, 40), torch.randn(40)
    with lz.scoped(jit="block", prefer=["inductor"], boosts={"inductor": 1000.0}):
        out = lz.rms_norm(x, w)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (40,), w, 1e-6))
    (why,) = lz.explain("rms_norm", x, w).decision.candidate("inductor.rms_norm.compiled").reasons[:1]
    assert why.code == "BACKEND_NOT_INSTALLED" and "C++ compiler" in why.message
    lz.reset()


@pytest.mark.gpu
@pytest.mark.req("R-WARM-04", "R-WARM-05")
def test_a_triton_kernel_compiles_in_warm_up_and_not_in_a_request(lab: Any, cache: Path) -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language
    from layerzero.model.enums import Platform

    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    def adapter(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        double[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out

    lab.use(
        lab.kernel(
            KERNEL, adapter, jit=True, jit_key=("dtype",), priority=90.0, platforms=frozenset({Platform.CUDA}),
            grid_layout="library",
        )
    )  # fmt: skip
    x, w = torch.ones(4, 64, device="cuda"), torch.ones(64, device="cuda")
    assert lz.warmup([lz.select("rms_norm", x, w).context]).ok
    made = {path.name for path in (cache / "triton").rglob("*.cubin")}
    assert made  # the cache is ours, and the compiler has filled it
    assert torch.equal(lz.rms_norm(x, w), x * 2)
    assert torch.equal(lz.rms_norm(x[:2], w), x[:2] * 2)
    assert {path.name for path in (cache / "triton").rglob("*.cubin")} == made


@pytest.mark.gpu
def test_a_compile_beside_a_graph_capture_does_not_end_it(lab: Any, cache: Path) -> None:
    from layerzero.dispatch.compiling import relaxed_capture

    done = threading.Event()
    go = threading.Event()

    def allocate() -> None:
        go.wait(60)
        with relaxed_capture(), torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(64 * 2**20, device="cuda").fill_(1)
        done.set()

    x = torch.ones(16, device="cuda")
    thread = threading.Thread(target=allocate)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        go.set()
        assert done.wait(60)
        y = y + 1
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2 + 1)
