"""The seam of layerzero-accel in the core: found, left aside or refused with a reason, and Python's keys told truly."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.dispatch.accel as seam
from layerzero._ops.accelerated import KINDS, _find, accelerated, attention_key, rms_norm_key
from layerzero._ops.near import bucket_ends, near_key
from layerzero._ops.signature import PUBLIC
from layerzero.errors import BackendNotAvailableError, ConfigurationError
from layerzero.runtime.state import state

X, W = torch.randn(2, 8), torch.ones(8)
Q, K = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
TESTS = Path(__file__).parent


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LAYERZERO_PLUGINS": "", "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env)


# -- found or not ----------------------------------------------------------------------------------------------------
def test_off_leaves_every_function_in_python() -> None:
    code = "import layerzero as lz; print({type(f).__name__ for f in (lz.attention, lz.rms_norm, lz.rope)})"
    assert python(code, LAYERZERO_ACCEL="off").stdout.strip() == "{'function'}"


def test_a_word_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAYERZERO_ACCEL", "perhaps")
    with pytest.raises(ConfigurationError, match="LAYERZERO_ACCEL"):
        seam.look()


class Hidden:
    """A finder that refuses the accelerator's modules."""

    def __init__(self, error: ImportError) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "layerzero_accel" or name.startswith("layerzero_accel."):
            raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModuleNotFoundError("No module named 'layerzero_accel'", name="layerzero_accel"), "BACKEND_NOT_INSTALLED"),
        (ModuleNotFoundError("No module named 'layerzero_accel._hot'", name="layerzero_accel._hot"), "ACCEL_NOT_BUILT"),
        (ImportError("wrong ELF class"), "ACCEL_UNFIT"),
    ],
    ids=["not installed", "not compiled", "not loadable"],
)
def test_what_is_missing_is_a_reason_and_on_makes_it_an_error(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, code: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("layerzero_accel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(error), *sys.meta_path])
    monkeypatch.delenv("LAYERZERO_ACCEL", raising=False)
    found = seam.look()
    assert found.native is None and found.why is not None
    assert found.why.code == code and found.why.hint
    monkeypatch.setenv("LAYERZERO_ACCEL", "on")
    with pytest.raises(BackendNotAvailableError, match="LAYERZERO_ACCEL=on") as raised:
        seam.look()
    assert raised.value.reasons[0].code == code


def library(**fields: Any) -> Any:
    return SimpleNamespace(**{"SEAM": seam.SEAM, "setup": lambda *args: None, "forget": lambda: None, **fields})


def refuse(*args: Any) -> None:
    raise ValueError("the exchange table is not of DLPack 1")


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"SEAM": seam.SEAM + 1}, "of the interface"), ({"setup": refuse}, "not of DLPack 1")],
    ids=["another release", "another DLPack"],
)
def test_a_library_that_does_not_fit_is_left_aside(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "layerzero_accel._hot", library(**fields))
    monkeypatch.delenv("LAYERZERO_ACCEL", raising=False)
    found = seam.look()
    assert found.native is None and found.why is not None
    assert found.why.code == "ACCEL_UNFIT" and says in found.why.message


def test_a_torch_without_the_exchange_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "layerzero_accel._hot", library())
    monkeypatch.delenv("LAYERZERO_ACCEL", raising=False)
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    found = seam.look()
    assert found.why is not None and torch.__version__ in found.why.message


def test_doctor_warns_of_a_missing_library_and_stays_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerzero.model.status import BackendStatus
    from layerzero.plugin.probing import ProbeResult
    from layerzero.public.check_backends import judge_probe
    from layerzero.reasons import reason

    why = reason("ACCEL_NOT_BUILT")
    status = BackendStatus("accel", False, "0.1.0", (), (why,), why.hint)
    record: Any = SimpleNamespace(name="accel", kernels=(), dist="layerzero-accel")
    check = judge_probe("accel", None, record, ProbeResult(status=status, health=None))
    assert (check.status, check.code) == ("warn", "ACCEL_NOT_BUILT")
    assert "layerzero_accel.build" in check.fix


# -- what C is told of each op ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", sorted(set(KINDS) - {"attention", "rms_norm"}))
def test_an_accelerated_function_does_nothing_but_dispatch(op: str) -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(PUBLIC[op].function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    body = [node for node in tree.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    (only,) = body
    assert isinstance(only, ast.Return) and isinstance(only.value, ast.Call)
    assert getattr(only.value.func, "id", "") == "dispatch"
    canonical = only.value.args[1]
    assert isinstance(canonical, ast.Tuple)
    assert tuple(getattr(item, "id", "") for item in canonical.elts) == PUBLIC[op].arguments


def test_each_description_is_what_the_library_is_given() -> None:
    given: dict[str, tuple[Any, ...]] = {}
    native = SimpleNamespace(function=lambda *args: given.setdefault(args[0], args))
    assert set(accelerated(native)) == set(KINDS)
    name, module, doc, parameters, canonical, function, *_, bucketed = given["attention"]
    assert (name, module, function, bucketed) == ("attention", "layerzero", PUBLIC["attention"].function, True)
    assert doc.startswith("attention(query, key, value, attn_mask=None,")
    assert [parameters[i][0] for i in canonical] == list(PUBLIC["attention"].arguments)
    assert parameters[0] == ("query", "T", True) and parameters[7] == ("layout", "W", False, "BHSD")
    assert not given["rope"][-1]


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": "bottom_right"},
    "masked": {"attn_mask": torch.ones(4, 6, dtype=torch.bool)},
    "slopes": {"alibi_slopes": torch.ones(2)},
    "lse": {"return_lse": True},
    "scale": {"scale": 0.25},
    "backend": {"backend": "reference"},
    "softcap": {"softcap": 2.0},
    "gradient": {},
    "deterministic": {},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_the_key_told_to_c_is_the_key_attention_writes(lab: Any, case: str) -> None:
    options = ATTENTION[case]
    q = Q.clone().requires_grad_() if case == "gradient" else Q
    torch.use_deterministic_algorithms(case == "deterministic")
    try:
        PUBLIC["attention"].function(q, K, K, **options)
        args, layout, backend = PUBLIC["attention"].normalize((q, K, K), options)
        key = attention_key(args, layout, backend)
    finally:
        torch.use_deterministic_algorithms(False)
    assert key in state.world.hot
    near = near_key(state.world, key)
    assert (near is None) == (case == "masked")
    assert near is None or state.world.hot[near] is state.world.hot[key]
    assert bucket_ends(state.world)


def test_the_keys_told_to_c_are_those_of_the_other_ops(lab: Any) -> None:
    world = state.world
    PUBLIC["rms_norm"].function(X, W, backend="reference")
    assert rms_norm_key(X, W, "reference") in state.world.hot
    calls: dict[str, tuple[Any, ...]] = {
        "layer_norm": (X, W, None, 1e-5),
        "rms_norm": (X, None, 1e-6),
        "rope": (Q, None, torch.randn(4, 4), torch.randn(4, 4), False, "BHSD", None, False),
        "embedding": (torch.tensor([1]), X, None),
    }
    for op, args in calls.items():
        layout = "BHSD" if op == "rope" else None
        find = _find(PUBLIC[op])
        assert find(state.world, args, layout, None) is None
        given = dict(zip(PUBLIC[op].arguments, args, strict=True))
        PUBLIC[op].function(**given)
        found = find(state.world, args, layout, None)
        assert found is not None and found[0].decision.op == op
    assert state.world is world


# -- the same tests without it ---------------------------------------------------------------------------------------
@pytest.mark.timeout(300)
def test_the_dispatch_tests_pass_with_the_other_setting() -> None:
    """A quick part; `make prove NAME=accel` runs all of them both ways."""
    other = "off" if seam.accelerator.native is not None else "on"
    if other == "on" and seam.accelerator.wanted is not False:
        pytest.skip(f"layerzero-accel cannot be used here: {seam.accelerator.why}")
    files = [str(TESTS / "test_hot_key.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *files]
    env = {**os.environ, "LAYERZERO_ACCEL": other, "OMP_NUM_THREADS": "1"}
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TESTS.parents[3])
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_public_face_is_the_accelerated_one_where_it_is_in_use() -> None:
    for op in KINDS:
        function = PUBLIC[op].function
        assert type(function).__name__ == "function"
        built_in = type(getattr(lz, op)).__name__ == "builtin_function_or_method"
        assert built_in is (seam.accelerator.native is not None)
        # Integrations import from the op's own module.
        assert getattr(sys.modules[function.__module__], op) is getattr(lz, op)
        assert getattr(sys.modules["layerzero.ops"], op) is getattr(lz, op)
