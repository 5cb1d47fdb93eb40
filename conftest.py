"""Hooks every test run of this workspace shares: requirement marks, lanes, missing tools."""

import os

from tools.pytest_lanes import pytest_collection_modifyitems, pytest_runtest_setup
from tools.req_plugin import pytest_configure, pytest_make_collect_report

# What somebody has measured on this machine must not decide what a test sees; tests that need a database name one.
os.environ.setdefault("LAYERZERO_PERFDB", "off")

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_make_collect_report", "pytest_runtest_setup"]
