"""`pip install layerzero-core layerzero-flashinfer`, and nothing else of ours: README's first minute runs there.

`make prove NAME=offline` does the same in an environment that shares nothing with this one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import pytest

from tools.fresh import Forked, Fresh, fresh, sixty_seconds
from tools.workspace import ROOT, packages

pytest.importorskip("hatchling", reason="missing tool: hatchling")
pytest.importorskip("pip", reason="missing tool: pip")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

INSTALLED = ["layerzero-core", "layerzero-flashinfer"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    found = fresh(tmp_path_factory.mktemp("two"))
    found.install(*(ROOT / "packages" / name for name in INSTALLED))
    return found


@pytest.fixture(scope="module")
def forked(place: Fresh) -> Iterator[Forked]:
    with place.forking() as run:
        yield run


def answer(run: Callable[..., CompletedProcess[str]], program: str) -> str:
    done = run("-c", program)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


def test_nothing_else_of_ours_is_there(place: Fresh):
    ask = "from importlib.metadata import distributions as d; print(*sorted(x.name for x in d() if 'zero' in x.name))"
    assert answer(place.run, ask).split() == INSTALLED


def test_the_sixty_seconds_of_the_readme_run(place: Fresh):
    shown = answer(place.run, sixty_seconds())
    assert "attention" in shown.splitlines()[0], "the chosen kernel"
    assert "flashinfer" in shown, "the backend is a candidate, with its reason"


def test_doctor_and_list_of_the_readme_run_and_know_the_backend(forked: Forked):
    doctor = forked("-m", "layerzero_cli", "doctor")
    assert doctor.returncode == 0, doctor.stdout[-1500:] + doctor.stderr[-1500:]
    listed = forked("-m", "layerzero_cli", "list")
    assert listed.returncode == 0 and "flashinfer." in listed.stdout


NAMES = {"tune": "tune", "verify": "verify", "tokenize": "tokenizers"} | dict.fromkeys(
    ("patch", "kv_cache", "rope_tables", "sample_speculative", "tree_mask"), "models"
)
# One interpreter imports the library; each program runs in a child of it, as it is right after `import layerzero`.
_EACH = """
import json, os, sys, traceback
import layerzero as lz
said = {}
for program in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 2)
        try:
            exec(program)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    said[program] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def missing(place: Fresh) -> dict[str, tuple[int, str]]:
    """How a call of each name ended, and what it said."""
    done = place.run("-c", _EACH, stdin=json.dumps([f"lz.{name}()" for name in NAMES]))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("name", "package"), NAMES.items())
def test_a_name_of_a_missing_package_says_which_one_it_needs(
    missing: dict[str, tuple[int, str]], name: str, package: str
):
    assert f"layerzero-{package}" in {found.name for found in packages()}
    code, said = missing[f"lz.{name}()"]
    assert code != 0
    assert f"lz.{name} needs layerzero-{package}" in said
    assert f"pip install layerzero-{package}" in said


@pytest.mark.parametrize(("verb", "package"), [("tune", "tune"), ("verify", "verify")])
def test_a_verb_of_a_missing_package_says_which_one_it_needs(place: Fresh, verb: str, package: str):
    done = place.run("-m", "layerzero_cli", verb)
    assert done.returncode != 0
    assert f"pip install layerzero-{package}" in done.stdout + done.stderr


_OPS = """
import torch, layerzero as lz
key, value = torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[[[3.0, -4.0]]]])
zero = torch.zeros(1, 1, 1)
held, state = lz.ops.gated_delta_rule(key, key, value, zero, zero + 1, scale=1.0)
assert torch.equal(held, value), held
out, _ = lz.ops.causal_conv1d(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 3))
assert out.flatten().tolist() == [1.0, 3.0, 6.0], out
print(lz.which("gated_delta_rule", key, key, value, zero, zero + 1))
"""


@pytest.mark.needs_tool("g++")
def test_a_package_of_ops_works_beside_the_core_and_removed_leaves_nothing(tmp_path):
    alone = fresh(tmp_path)
    alone.install(ROOT / "packages" / "layerzero-core")
    with alone.forking() as run:
        before = (
            sorted(item.name for item in alone.site.iterdir()),
            answer(run, "import layerzero as lz; print(dir(lz.ops))"),
        )
        alone.install(ROOT / "packages" / "layerzero-linear-attention")
        assert answer(run, _OPS).split() == ["linear_attention.gated_delta_rule.native"]
        # named unasked, and well when probed; test_doctor_and_list_of_the_readme probes all there are
        for asked in ("--no-probe", "linear_attention"):
            doctor = run("-m", "layerzero_cli", "doctor", asked)
            assert doctor.returncode == 0 and "linear_attention" in doctor.stdout, doctor.stdout[-1500:]
        alone.pip("uninstall", "-y", "layerzero-linear-attention")
        left = sorted(item.name for item in alone.site.iterdir())
        gone = run("-c", "import layerzero as lz; print(dir(lz.ops)); lz.ops.gated_delta_rule")
        assert (left, gone.stdout) == before
        assert gone.returncode != 0 and "AttributeError" in gone.stderr
        listed = run("-m", "layerzero_cli", "list")
        assert listed.returncode == 0 and "delta" not in listed.stdout
