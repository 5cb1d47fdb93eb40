"""A stranger's backend, from `lz plugin new` to a wheel, in a fresh virtual environment beside layerzero-core alone.

Core and the plugin are really built and pip-installed; nothing of LayerZero comes another way (tools/fresh.py): the
first test checks it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from layerzero_verify.scaffold import write_plugin
from tools import faulty_plugins as faults
from tools.fresh import Forked, Fresh, fresh
from tools.workspace import ROOT

pytest.importorskip("hatchling", reason="missing tool: hatchling")
pytest.importorskip("pip", reason="missing tool: pip")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

_ASK = """
import json
import torch
import layerzero as lz
from layerzero.plugin.manager import load_plugins

x, w = torch.randn(4, 64), torch.randn(64)
q = torch.randn(1, 2, 8, 64)
out = lz.rms_norm(x, w)
try:
    from layerzero_acme.kernels import CALLS
except ImportError:
    CALLS = None
expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w
loaded = load_plugins()
print("ANSWER " + json.dumps({
    "rms_norm": lz.which("rms_norm", x, w),
    "chosen": lz.explain("rms_norm", x, w).chosen,
    "attention": lz.which("attention", q, q, q),
    "right": bool(torch.allclose(out, expected, atol=1e-5)),
    "calls": CALLS,
    "records": {
        r.name: [r.state, [item.code.value for item in r.reasons], r.dist, r.dist_version] for r in loaded.records
    },
    "core": lz.__file__,
}))
"""


def ask(run: Callable[..., CompletedProcess[str]]) -> dict[str, Any]:
    """What LayerZero in the environment selects, runs and has loaded."""
    done = run("-c", _ASK)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-1500:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("ANSWER "))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """A virtual environment with core, built and installed from a wheel, and shared third-party dependencies."""
    found = fresh(tmp_path_factory.mktemp("fresh"))
    found.install(ROOT / "packages" / "layerzero-core")
    return found


@pytest.fixture(scope="module")
def forked(place: Fresh) -> Iterator[Forked]:
    """A Python there that has loaded torch; what it is asked, a child of it answers."""
    with place.forking() as run:
        yield run


@pytest.fixture(scope="module")
def alone(forked: Forked) -> dict[str, Any]:
    """What the core alone answers, before any plugin has been there."""
    return ask(forked)


@pytest.fixture(scope="module")
def package(place: Fresh) -> Path:
    """The package a stranger makes: scaffold, then a higher priority and a kernel that leaves a trace."""
    # What `lz plugin new acme` calls; the command itself is tested with the other commands.
    target = write_plugin("acme", place.folder)
    descriptor = target / "src" / "layerzero_acme" / "capabilities.json"
    document = json.loads(descriptor.read_text(encoding="utf-8"))
    document["ops"]["rms_norm"][0]["priority"] = 95
    descriptor.write_text(json.dumps(document), encoding="utf-8")
    kernels = target / "src" / "layerzero_acme" / "kernels.py"
    text = kernels.read_text(encoding="utf-8")
    head = "    wide = x if"
    assert head in text
    text = text.replace(head, f'    CALLS.append("rms_norm")\n{head}').replace(
        "def rms_norm", "CALLS = []\n\n\ndef rms_norm", 1
    )
    kernels.write_text(text, encoding="utf-8")
    return target


def test_core_alone_is_installed_and_knows_no_stranger(place: Fresh, alone: dict[str, Any]) -> None:
    answer = alone
    assert Path(answer["core"]).is_relative_to(place.site), "core runs from the wheel, not from the source tree"
    assert sorted(answer["records"]) == ["inductor", "reference", "sdpa", "torch"]
    assert answer["rms_norm"].split(".")[0] in ("torch", "reference") and answer["right"]


@pytest.mark.req("R-REG-05")
def test_the_wheel_is_found_selected_run_and_gone_after_uninstalling(
    place: Fresh, forked: Forked, alone: dict[str, Any], package: Path
) -> None:
    before = alone
    place.install(package)
    try:
        with_it = ask(forked)
        assert with_it["records"]["acme"] == ["ok", [], "layerzero-acme", "0.1.0"]
        assert with_it["rms_norm"] == with_it["chosen"] == "acme.rms_norm.plain", "selected where its score wins"
        assert with_it["attention"] == before["attention"], "and not where it does not"
        assert with_it["right"] and with_it["calls"], "it ran: its own list says so"

        # what the package's extra `test` asks for
        place.install(ROOT / "packages" / "layerzero-verify")
        kit = forked("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package)
        assert kit.returncode == 0, kit.stdout[-3000:]
        assert int(kit.stdout.split(" passed")[0].split()[-1]) >= 80
    finally:
        place.pip("uninstall", "-y", "layerzero-acme")
    after = ask(forked)
    assert "acme" not in after["records"] and after["calls"] is None
    assert {key: after[key] for key in ("rms_norm", "attention", "records")} == {
        key: before[key] for key in ("rms_norm", "attention", "records")
    }


_ASK_IN_C = """
import torch
import layerzero as lz

x, weight = torch.randn(4, 64), torch.randn(64)
lz.reset()
out = lz.rms_norm(x, weight)
torch.testing.assert_close(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight)
torch.testing.assert_close(lz.ops.squared_relu(x, 2.0), 2.0 * torch.relu(x) ** 2)
print("ANSWER", lz.which("rms_norm", x, weight), lz.which("squared_relu", x, 2.0))
"""


@pytest.mark.needs_tool("cc")
def test_a_kernel_in_c_and_a_new_op_go_from_scaffold_to_chosen_wheels(place: Fresh, forked: Forked) -> None:
    norm = write_plugin("cnorm", place.folder, op="rms_norm", lang="c")
    descriptor = norm / "src" / "layerzero_cnorm" / "capabilities.json"
    descriptor.write_text(descriptor.read_text(encoding="utf-8").replace('"priority": 1', '"priority": 95'))
    new_op = write_plugin("crelu", place.folder, op="squared_relu", lang="c")
    place.install(norm, new_op, ROOT / "packages" / "layerzero-verify")
    try:
        tags = [wheel.name.split("-", 2)[2] for wheel in (place.folder / "wheels").glob("layerzero_c[nr]*.whl")]
        assert len(tags) == 2 and all(tag.startswith("cp311-abi3-") for tag in tags)
        assert sys.platform != "linux" or all("-manylinux_2_" in tag for tag in tags)
        answer = forked("-c", _ASK_IN_C)
        assert answer.stdout == "ANSWER cnorm.rms_norm.c crelu.squared_relu.c\n", answer.stderr[-3000:]
        for package in (norm, new_op):
            kit = forked("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package)
            assert kit.returncode == 0, kit.stdout[-3000:]
            assert int(kit.stdout.split(" passed")[0].split()[-1]) >= 20, kit.stdout[-300:]
    finally:
        place.pip("uninstall", "-y", "layerzero-cnorm", "layerzero-crelu")


@pytest.mark.req("R-REG-04")
def test_installed_packages_that_break_in_every_way_cost_only_themselves(place: Fresh, alone: dict[str, Any]) -> None:
    before = alone
    for kind in faults.SOURCES:
        faults.install(place.folder / "faulty", kind)
    extra = place.site / "faulty.pth"
    extra.write_text(f"{place.folder / 'faulty'}\n", encoding="utf-8")
    try:
        broken = ask(place.run)  # from the start: .pth files are read then
    finally:
        extra.unlink()
    for kind in faults.SOURCES:
        state, codes, _, _ = broken["records"][kind]
        assert (state, codes) == (("failed", [faults.EXPECTED[kind]]) if kind in faults.EXPECTED else ("ok", [])), kind
    assert {name: broken["records"][name] for name in before["records"]} == before["records"]
    assert broken["attention"] == before["attention"] and broken["right"]
