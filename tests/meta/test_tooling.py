"""The tools of the checklist are in the group `tools` and pinned, or it is said why not; none is needed to set up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.workspace import dev_requirements, group, project_name, run_requirements

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.req("R-ENV-13")
# what the line of the checklist calls a tool, where that is not its distribution; and what takes a tool's place
CALLED = {"pyright": "basedpyright", **{name: f"pytest-{name}" for name in
          ("cov", "xdist", "timeout", "asyncio", "benchmark", "mock")}}  # fmt: skip
ELSEWHERE = {"beartype": "typeguard", "atheris": "tools/fuzz.py", "scalene": "pyinstrument"}


def listed() -> set[str]:
    """The words of R-ENV-13 that name tools."""
    text = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("- **R-ENV-13**"))
    return set(re.findall(r"[a-z][a-z-]+", line.partition(":")[2]))


def test_every_tool_of_the_checklist_is_in_the_group_or_has_a_stand_in() -> None:
    wanted = listed()
    assert {"ruff", "pyright", "atheris", "nvidia-ml-py"} <= wanted and len(wanted) >= 18
    have = {project_name(line) for line in group("tools")}
    missing = {name for name in wanted if CALLED.get(name, name) not in have}
    assert missing == set(ELSEWHERE)
    page = (ROOT / "docs" / "tooling.md").read_text(encoding="utf-8")
    for name, stand_in in ELSEWHERE.items():
        assert name in page and stand_in in page
        assert stand_in in have or (ROOT / stand_in).exists()


def test_every_tool_is_pinned_and_none_is_part_of_the_set_up() -> None:
    pins = {project_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    tools = {project_name(line) for line in group("tools")}
    assert tools - pins == set()
    installed = {project_name(line) for line in (*run_requirements(), *dev_requirements())}
    heavy = {"basedpyright", "pre-commit", "typeguard", "memray", "pytest-memray", "pyinstrument", "nvidia-ml-py"}
    assert heavy <= tools and not heavy & installed


def test_the_hooks_name_commands_that_exist() -> None:
    import yaml

    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in config["repos"]} == {"local"}, "nothing is fetched"
    for hook in hooks:
        words = hook["entry"].split()
        module = words[2] if words[1] == "-m" else words[1]
        known = module == "ruff" or (ROOT / module).exists() or (ROOT / f"{module.replace('.', '/')}.py").exists()
        assert words[0] == "python" and known, hook["entry"]
