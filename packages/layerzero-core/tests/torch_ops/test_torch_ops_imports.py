"""Nothing is loaded before it is needed, and what waits for an import hears of it exactly once."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import textwrap
import threading

import pytest

from layerzero.torch_ops.imports import after_import

# An interpreter that has loaded torch and nothing of ours, and runs each program in a child of it.
_STAGE = """
import json, os, sys, traceback, warnings
import torch
assert not [name for name in sys.modules if name.startswith(("layerzero", "torch._dynamo"))]
for line in sys.stdin:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads; torch's are idle here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(write, 1), os.dup2(write, 2)
            exec(json.loads(line), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said]), flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Runs code in an interpreter that has loaded torch alone."""
    stage = subprocess.Popen([sys.executable, "-c", _STAGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(code):
        print(json.dumps(textwrap.dedent(code)), file=stage.stdin, flush=True)
        status, said = json.loads(stage.stdout.readline())
        assert status == 0, said

    yield run
    stage.communicate()


@pytest.fixture
def late_module(tmp_path, monkeypatch):
    """A module that can be imported and counts its executions, and the list of what heard of it."""
    (tmp_path / "lz_late.py").write_text("import builtins\nbuiltins.lz_runs = getattr(builtins, 'lz_runs', 0) + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "lz_late.py"
    sys.modules.pop("lz_late", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "name", "") != "lz_late"]


USE = """
x = torch.ones(2, 8)
out = torch.compile(lambda a: lz.rms_norm(a) + 1, fullgraph=True, backend="eager")(x)
torch.testing.assert_close(out, lz.rms_norm(x) + 1)
assert type(torch._dynamo.__loader__).__name__ == "SourceFileLoader"
assert not [f for f in sys.meta_path if type(f).__module__.startswith("layerzero")]
"""


def test_nothing_is_loaded_before_it_is_needed(run):
    run(
        """
        import sys, threading, torch
        import layerzero as lz

        # eager use loads neither Dynamo nor the opaque ops
        q = torch.ones(1, 2, 3, 8)
        for _ in range(2):
            lz.rms_norm(q, torch.ones(8))
            lz.attention(q, q, q, is_causal=True)
        for name in ("torch._dynamo", "layerzero.torch_ops.library", "layerzero.torch_ops.traced"):
            assert name not in sys.modules, name

        # asking for one op registers all of them, still without Dynamo, also from many threads at once
        barrier, failed = threading.Barrier(10), []
        def work(name):
            barrier.wait()
            try:
                getattr(torch.ops.layerzero, name).default
            except Exception as error:
                failed.append(error)
        names = ("rms_norm", "attention", "dequantize", "sample", "rope")
        threads = [threading.Thread(target=work, args=(name,)) for name in names * 2]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert not failed, failed
        assert torch.ops.layerzero.rms_norm(q, None, 1e-6).shape == q.shape
        assert "torch._dynamo" not in sys.modules

        from layerzero._ops.signature import PUBLIC
        from layerzero.torch_ops import install
        before = set(sys.modules)
        install(PUBLIC)  # what `import layerzero` does: tables only
        assert set(sys.modules) == before, set(sys.modules) - before

        # torch.compile brings Dynamo in, and with it the twins
        """
        + textwrap.indent(USE, " " * 8)
    )


def test_dynamo_may_have_been_imported_before(run):
    run("import sys, torch, torch._dynamo, layerzero as lz\n" + USE)


def test_the_action_runs_after_the_first_import_and_leaves_no_trace(late_module):
    heard = []
    after_import("lz_late", lambda: heard.append(sys.modules["lz_late"]))
    assert heard == []
    module = importlib.import_module("lz_late")
    assert heard == [module]
    assert type(module.__spec__.loader).__name__ == type(module.__loader__).__name__ == "SourceFileLoader"
    assert not [finder for finder in sys.meta_path if getattr(finder, "name", "") == "lz_late"]
    importlib.reload(module)
    assert heard == [module]


def test_a_module_that_is_there_already_counts_at_once(late_module):
    importlib.import_module("lz_late")
    heard = []
    after_import("lz_late", lambda: heard.append(1))
    assert heard == [1]


def test_an_import_that_fails_leaves_the_hook_for_the_next(late_module):
    text = late_module.read_text()
    late_module.write_text("raise ImportError('not yet')")
    heard = []
    after_import("lz_late", lambda: heard.append(1))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("lz_late")
    assert heard == []
    late_module.write_text(text + "# a longer file, so that no stale bytecode is taken\n")
    importlib.invalidate_caches()
    importlib.import_module("lz_late")
    assert heard == [1]


def test_looking_for_the_module_is_not_importing_it(late_module):
    heard = []
    after_import("lz_late", lambda: heard.append(1))
    assert importlib.util.find_spec("lz_late") is not None
    assert heard == []
    importlib.import_module("lz_late")
    assert heard == [1]


def test_several_may_wait_for_the_same_module(late_module):
    heard = []
    for word in ("one", "two", "three"):
        after_import("lz_late", lambda word=word: heard.append(word))
    module = importlib.import_module("lz_late")
    assert sorted(heard) == ["one", "three", "two"]
    assert type(module.__loader__).__name__ == "SourceFileLoader"


def test_an_import_in_the_middle_of_the_import_waits_for_its_end(late_module):
    done = threading.Event()
    late_module.write_text("import lz_middle\nfinished = True\n")
    (late_module.parent / "lz_middle.py").write_text(
        "import builtins, layerzero.torch_ops.imports as i\ni.after_import('lz_late', builtins.lz_heard)\n"
    )
    import builtins

    builtins.lz_heard = done.set
    try:
        importlib.import_module("lz_late")
        assert done.wait(60)
    finally:
        del builtins.lz_heard
        sys.modules.pop("lz_middle", None)


def test_many_threads_importing_hear_once(late_module):
    heard = []
    after_import("lz_late", lambda: heard.append(1))
    barrier = threading.Barrier(8)

    def work():
        barrier.wait()
        importlib.import_module("lz_late")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == [1]


def test_an_unknown_op_is_an_attribute_error():
    import torch

    import layerzero  # noqa: F401 - opens the namespace

    with pytest.raises(AttributeError):
        torch.ops.layerzero.no_such_op  # noqa: B018


def test_the_twins_come_although_torchs_own_biases_are_imported_first(run):
    """`torch.nn.attention.bias` imports Dynamo half way through itself, which calls us while it is incomplete."""
    run(
        """
        import layerzero as lz
        from torch.nn.attention.bias import causal_lower_right
        from torch._dynamo.trace_rules import is_polyfilled_callable
        assert is_polyfilled_callable(lz.attention)
        """
    )
