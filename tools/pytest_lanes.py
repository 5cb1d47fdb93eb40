"""Lanes, and what a test says it needs (a GPU, two, a program, a package, more time), in one place.

Every test has one lane: `long` where its marks say so (slow, stress, benchmark, memray), `check` where tests/lanes.toml
names it, else `short`. `pytest -m short` is what `make test` runs, `pytest -m "short or check"` what `make check` does.

A test whose tool is missing is skipped by name. Where the tools are meant to be there (LAYERZERO_REQUIRE=1, as in
`.ci/run`) that is a failure, and so is every skip whose reason tests/skips.toml does not allow, however it came about:
nothing is skipped unseen. Absent hardware is never a failure.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import tomllib
from collections.abc import Generator

import pytest

from tools.lanes import Lanes
from tools.requirements_doc import ROOT

__all__ = [
    "fail_unseen",
    "lane",
    "missing_packages",
    "missing_tools",
    "pytest_collection_modifyitems",
    "pytest_itemcollected",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
]

_LONG = ("slow", "stress", "benchmark", "memray")
_TIMEOUTS = {"stress": 1800, "slow": 600}

# a tool may go by several names
_ALIASES: dict[str, tuple[str, ...]] = {
    "chromium": ("chromium", "chromium-browser", "google-chrome", "chrome"),
    "g++": ("g++", "c++"),
    "gcc": ("gcc", "cc"),
}


def missing_tools(names: tuple[str, ...]) -> list[str]:
    """The programs among `names` that are not on PATH."""
    return [name for name in names if not any(shutil.which(alias) for alias in _ALIASES.get(name, (name,)))]


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """The modules among `names` that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def _named(item: pytest.Item, marker: str) -> tuple[str, ...]:
    return tuple(str(name) for mark in item.iter_markers(marker) for name in mark.args)


def _gpu_count() -> int:
    import torch  # only when a test asks: importing torch takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def lane(item: pytest.Item) -> str:
    """The lane of a test: short, check or long."""
    if any(item.get_closest_marker(name) is not None for name in _LONG):
        return "long"
    names = [part.name for part in item.listchain() if isinstance(part, pytest.Class)]
    own = getattr(item, "originalname", item.name)
    return "check" if "::".join((item.path.name, *names, own)) in _check() else "short"


def _shared(item: pytest.Item) -> list[str]:
    """The fixtures of its own file that a test shares with others, used directly or by another fixture."""
    info = getattr(item, "_fixtureinfo", None)
    found = info.name2fixturedefs.items() if info is not None else ()
    own = item.nodeid.partition("::")[0]
    return [name for name, made in found if made[-1].scope in ("module", "session") and made[-1].baseid == own]


@functools.cache
def _check() -> frozenset[str]:
    return frozenset(Lanes.read().check)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the test with its lane, and tell the junit file which faults it watches and which fixtures it shares."""
    item.add_marker(lane(item))
    item.user_properties += [("shares", name) for name in _shared(item)]
    item.user_properties += [("fault", str(number)) for mark in item.iter_markers("fault") for number in mark.args]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long lanes have longer to finish, unless a test says how long itself."""
    for item in items:
        for lane, seconds in _TIMEOUTS.items():
            if item.get_closest_marker(lane) is not None and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(seconds))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, or fail where a skip is not allowed, before any fixture of the test is made."""
    tools, packages = missing_tools(_named(item, "needs_tool")), missing_packages(_named(item, "needs_package"))
    if tools or packages:
        message = f"missing {'tool' if tools else 'package'}: {', '.join(tools or packages)}"
        if os.environ.get("LAYERZERO_REQUIRE") == "1":
            pytest.fail(f"{message} (LAYERZERO_REQUIRE=1 allows no skip)", pytrace=False)
        pytest.skip(message)
    if item.get_closest_marker("multigpu") is not None and _gpu_count() < 2:
        pytest.skip("needs two GPUs")
    if item.get_closest_marker("gpu") is not None and _gpu_count() < 1:
        pytest.skip("needs a GPU")


@functools.cache
def _allowed() -> re.Pattern[str]:
    table = tomllib.loads((ROOT / "tests" / "skips.toml").read_text(encoding="utf-8"))
    return re.compile("|".join(pattern for part in table.values() for pattern in part["allowed"]))


def fail_unseen(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where LAYERZERO_REQUIRE=1 and tests/skips.toml does not allow its reason."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("LAYERZERO_REQUIRE") == "1":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _allowed().search(why) is None:
            report.outcome = "failed"
            report.longrepr = f"{why} (LAYERZERO_REQUIRE=1 allows the skips of tests/skips.toml alone)"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See every skip, that of a plain `pytest.skip` too."""
    report = yield
    fail_unseen(report)
    return report
