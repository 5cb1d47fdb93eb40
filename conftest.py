"""Hooks every test run of this workspace shares: requirement marks, lanes, missing tools."""

import atexit
import os
import shutil
import tempfile

from tools.pytest_lanes import pytest_collection_modifyitems, pytest_runtest_setup
from tools.req_plugin import pytest_configure, pytest_make_collect_report

# Inductor imports setuptools, which refuses where the standard distutils was imported before; both will do for it.
os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
# What somebody has measured on this machine must not decide what a test sees; tests that need a database name one.
os.environ.setdefault("LAYERZERO_PERFDB", "off")
# Nor which kernels crashed here: the run has a quarantine of its own.
if "LAYERZERO_QUARANTINE" not in os.environ:
    _quarantine = tempfile.mkdtemp(prefix="layerzero-tests-")
    os.environ["LAYERZERO_QUARANTINE"] = os.path.join(_quarantine, "quarantine.json")
    atexit.register(shutil.rmtree, _quarantine, ignore_errors=True)
# Nor what somebody has compiled: the run gets an empty folder, which its worker processes share.
if "LAYERZERO_JIT_CACHE_DIR" not in os.environ:
    os.environ["LAYERZERO_JIT_CACHE_DIR"] = _compiled = tempfile.mkdtemp(prefix="layerzero-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_make_collect_report", "pytest_runtest_setup"]
