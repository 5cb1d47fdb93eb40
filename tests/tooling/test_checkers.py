"""Programs that look at the code: each runs on our own, and finds nothing that was not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = "packages/layerzero-core/src"
pytestmark = pytest.mark.req("R-ENV-13")


def run(*command: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pyright_finds_nothing_beyond_its_baseline() -> None:
    done = run("basedpyright", timeout=1700)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "0 errors" in done.stdout, done.stdout


def test_pyright_sees_a_wrong_type(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "from layerzero.numerics.tolerances import tolerance\ntolerance(op=3, dtype='x')\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"include": ["wrong.py"], "extraPaths": [str(ROOT / CORE)]})
    )
    done = run("basedpyright", "-p", str(tmp_path))
    assert done.returncode == 1 and "reportArgumentType" in done.stdout


def test_ruff_and_mypy_pass_and_see_what_is_wrong(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "ruff", "check", f"{CORE}/layerzero/numerics", "tools")
    assert done.returncode == 0, done.stdout
    done = run(sys.executable, "-m", "mypy", "--strict", "tools/workspace.py", "--cache-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout  # the core as a whole: `make check`
    wrong = tmp_path / "wrong.py"
    wrong.write_text('"""Wrong."""\nimport os\nx: int = "a"\n')
    assert "F401" in run(sys.executable, "-m", "ruff", "check", str(wrong)).stdout
    assert "Incompatible types" in run(sys.executable, "-m", "mypy", str(wrong), "--cache-dir", str(tmp_path)).stdout


@pytest.mark.slow
def test_the_hooks_pass_on_all_files() -> None:
    done = run("pre-commit", "run", "--all-files")
    passed = [line for line in done.stdout.splitlines() if line.endswith("Passed")]
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(passed) >= 5, done.stdout


def test_the_hooks_are_our_own_and_need_no_network() -> None:
    import yaml

    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"} and len(hooks) >= 5


# Pure parts of the core whose annotations hold at run time; what only type checkers import is left unchecked.
TYPED = ("layerzero.numerics", "layerzero.policy", "layerzero.selection")
TESTS = (
    "numerics/test_numerics.py",
    "policy/test_policy_rules.py",
    "plugin/test_registry.py",
    "selection/test_selection.py",
    "selection/test_selection_report.py",
)


@pytest.mark.slow
def test_annotations_hold_at_run_time_in_the_pure_parts_of_the_core() -> None:
    tests = [f"packages/layerzero-core/tests/{name}" for name in TESTS]
    # before pytest begins: what its conftest files import must come through the hook, too
    code = (
        "import sys, typeguard, pytest\n"
        "typeguard.config.forward_ref_policy = typeguard.ForwardRefPolicy.IGNORE\n"
        f"typeguard.install_import_hook({TYPED!r})\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    flags = [
        part
        for name in ("cacheprovider", "memray", "benchmark", "asyncio", "typeguard")
        for part in ("-p", f"no:{name}")
    ]
    done = run(sys.executable, "-c", code, "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", *flags, *tests)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_the_import_hook_sees_a_wrong_type() -> None:
    code = (
        "from typeguard import TypeCheckError, install_import_hook\n"
        "install_import_hook(['layerzero.numerics'])\n"
        "from layerzero.numerics.tolerances import Tolerance\n"
        "from layerzero.numerics import tolerances\n"
        "try:\n    tolerances.tolerance('linear', 'float32', k='many')\n"
        "except TypeCheckError as error:\n    print('seen', error)\n"
    )
    done = run(sys.executable, "-c", code)
    assert done.stdout.startswith('seen argument "k"'), done.stdout + done.stderr
