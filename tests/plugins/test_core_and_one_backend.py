"""`pip install layerzero-core layerzero-flashinfer`, and nothing else of ours: README's first minute runs there.

`make prove NAME=offline` does the same in an environment that shares nothing with this one.
"""

from __future__ import annotations

import pytest

from tools.fresh import Fresh, fresh, sixty_seconds
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


def answer(place: Fresh, program: str) -> str:
    done = place.run("-c", program)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


def test_nothing_else_of_ours_is_there(place: Fresh):
    ask = "from importlib.metadata import distributions as d; print(*sorted(x.name for x in d() if 'zero' in x.name))"
    assert answer(place, ask).split() == INSTALLED


def test_the_sixty_seconds_of_the_readme_run(place: Fresh):
    shown = answer(place, sixty_seconds())
    assert "attention" in shown.splitlines()[0], "the chosen kernel"
    assert "flashinfer" in shown, "the backend is a candidate, with its reason"


def test_doctor_and_list_of_the_readme_run_and_know_the_backend(place: Fresh):
    doctor = place.run("-m", "layerzero_cli", "doctor")
    assert doctor.returncode == 0, doctor.stdout[-1500:] + doctor.stderr[-1500:]
    listed = place.run("-m", "layerzero_cli", "list")
    assert listed.returncode == 0 and "flashinfer." in listed.stdout


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("tune", "tune"),
        ("verify", "verify"),
        ("tokenize", "tokenizers"),
        *((name, "models") for name in ("patch", "kv_cache", "rope_tables", "sample_speculative", "tree_mask")),
    ],
)
def test_a_name_of_a_missing_package_says_which_one_it_needs(place: Fresh, name: str, package: str):
    assert f"layerzero-{package}" in {found.name for found in packages()}
    done = place.run("-c", f"import layerzero as lz; lz.{name}()")
    assert done.returncode != 0
    assert f"lz.{name} needs layerzero-{package}" in done.stderr
    assert f"pip install layerzero-{package}" in done.stderr


@pytest.mark.parametrize(("verb", "package"), [("tune", "tune"), ("verify", "verify")])
def test_a_verb_of_a_missing_package_says_which_one_it_needs(place: Fresh, verb: str, package: str):
    done = place.run("-m", "layerzero_cli", verb)
    assert done.returncode != 0
    assert f"pip install layerzero-{package}" in done.stdout + done.stderr
