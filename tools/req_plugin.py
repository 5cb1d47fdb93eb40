"""pytest hooks behind `@pytest.mark.req("R-SEL-03")`: known ids only, written into the junit file.

`make requirements` reads them back. The ids are checked at collection, so a misspelt one stops the run at once.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from tools.pytest_lanes import fail_unseen
from tools.requirements_doc import ROOT, Checklist, ChecklistError

__all__ = ["current_commit", "pytest_configure", "pytest_make_collect_report"]

_KNOWN = pytest.StashKey[frozenset[str]]()


def current_commit(root: Path = ROOT) -> str:
    """The commit under test: LAYERZERO_COMMIT where the tree travels without git, else git's word, else "unknown"."""
    if named := os.environ.get("LAYERZERO_COMMIT"):
        return named
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return asked.stdout.strip() or "unknown"


@pytest.hookimpl(trylast=True)  # after pytest has made its junit writer
def pytest_configure(config: pytest.Config) -> None:
    """Read the checklist, and write the commit into the junit file, so that a kept file says what it was made from."""
    try:
        config.stash[_KNOWN] = Checklist.load().ids
    except (OSError, ChecklistError) as error:
        raise pytest.UsageError(f"cannot read the requirement checklist: {error}") from error
    if hasattr(config, "workerinput"):  # an xdist worker writes no junit file
        return
    from _pytest.junitxml import xml_key  # no public way works together with xdist

    xml = config.stash.get(xml_key, None)
    if xml is not None:
        xml.add_global_property("commit", current_commit())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn `req` marks into junit properties; refuse a file with an id that docs/requirements.md does not have.

    It happens while a file is collected, not afterwards, so that it holds under xdist and for tests `-m` leaves out.
    """
    report = yield
    fail_unseen(report)
    known = collector.config.stash[_KNOWN]
    wrong: list[str] = []
    for item in report.result or ():
        if not isinstance(item, pytest.Item):
            continue
        ids = dict.fromkeys(str(i) for mark in item.iter_markers("req") for i in mark.args)
        wrong += [f"{item.name}: {i}" for i in ids if i not in known]
        item.user_properties += [("req", i) for i in ids]
    if wrong:
        report.outcome = "failed"
        report.longrepr = "unknown requirement ids, docs/requirements.md has none such:\n  " + "\n  ".join(wrong)
    return report
