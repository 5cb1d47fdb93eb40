"""Hooks every test run of this workspace shares: requirement marks, lanes, missing tools, the order among workers."""

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile

import pytest

from tools import pytest_lanes
from tools.pytest_lanes import pytest_itemcollected, pytest_runtest_makereport, pytest_runtest_setup
from tools.req_plugin import pytest_configure, pytest_make_collect_report

# Inductor imports setuptools, which refuses where the standard distutils was imported before; both will do for it.
# From Python 3.12 on there is no standard one.
if sys.version_info < (3, 12):
    os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
# What somebody has measured on this machine must not decide what a test sees; tests that need a database name one.
os.environ.setdefault("LAYERZERO_PERFDB", "off")
# Nor what our machines have measured: it would depend on the processor here. Tests about it switch it on.
os.environ.setdefault("LAYERZERO_PERFDB_SHIPPED", "0")
# Nor which kernels crashed here: the run has a quarantine of its own.
if "LAYERZERO_QUARANTINE" not in os.environ:
    _quarantine = tempfile.mkdtemp(prefix="layerzero-tests-")
    os.environ["LAYERZERO_QUARANTINE"] = os.path.join(_quarantine, "quarantine.json")
    atexit.register(shutil.rmtree, _quarantine, ignore_errors=True)
elif _worker := os.environ.get("PYTEST_XDIST_WORKER"):  # nor what a test of another worker writes there
    _shared = os.path.dirname(os.environ["LAYERZERO_QUARANTINE"])
    os.environ["LAYERZERO_QUARANTINE"] = os.path.join(_shared, _worker, "quarantine.json")
# Nor what somebody has compiled: the run gets an empty folder, which its worker processes share.
if "LAYERZERO_JIT_CACHE_DIR" not in os.environ:
    os.environ["LAYERZERO_JIT_CACHE_DIR"] = _compiled = tempfile.mkdtemp(prefix="layerzero-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)

# Generated examples are the same in every quick run, new ones in the long lanes (LAYERZERO_PROVE=1); how long one takes
# is nobody's failure.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "layerzero", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow],
        derandomize=os.environ.get("LAYERZERO_PROVE") != "1",
    )  # fmt: skip
    settings.load_profile("layerzero")

pytest_plugins = ["tools.pytest_fixtures"]

__all__ = [
    "pytest_configure",
    "pytest_itemcollected",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
]

_TAKES_LONG = ("distributed", "integration", "timeout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lanes. Among several workers files with long tests come first, so that nobody waits for one at the end."""
    pytest_lanes.pytest_collection_modifyitems(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        long = {item.path for item in items if any(item.get_closest_marker(name) for name in _TAKES_LONG)}
        items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: a garbage collection in a test need not look through all of it again."""
    gc.collect()
    gc.freeze()
