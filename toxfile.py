"""tox reads this file: one environment per package, `pkg-core`, `pkg-flashattn`, …, derived from packages/*.

Each installs core and that package alone (the metapackage: what it asks for), as a user would, asserts that nothing
else came with them, and only then brings in the test tools and runs the package's own tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.config.types import Command
from tox.plugin import impl
from tox.session.state import State

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # tox does not put the project's root on the path

from tools.workspace import Package, group, packages  # noqa: E402  (needs the line above)

PREFIX = "pkg-"


def _settings(package: Package, found: Sequence[Package]) -> dict[str, object]:
    pip = ["python", "-m", "pip", "install", "-q"]
    wanted = [p for p in found if p.short == "core" or p.name in (package.name, *package.ours)]
    # every package's tests use the conformance kit; its level 4 patches models; some tune the calls they make
    used = [str(p.path) for p in found if p.short in ("verify", "models", "tune")]
    return {
        "description": f"{package.name} in an environment of its own",
        "labels": {"packages"},
        "commands_pre": [
            Command([*pip, "torch"]),  # at the version PIP_CONSTRAINT names; a CPU build where the machine offers one
            Command([*pip, *(str(p.path) for p in wanted)]),
            Command(["python", "-m", "tools.installed_only", *(p.name for p in wanted)]),
            Command([*pip, *used, *group("test")]),
        ],
        "commands": [Command(["python", "-m", "pytest", str(package.path / "tests"), "-m", "not slow and not stress"])],
    }


@impl
def tox_extend_envs() -> Iterable[str]:
    """One environment per package."""
    return [PREFIX + package.short for package in packages(ROOT)]


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Give each of them its commands."""
    found = packages(ROOT)
    for package in found:
        loader = MemoryLoader(**_settings(package, found))
        state.conf.memory_seed_loaders[PREFIX + package.short].append(loader)
