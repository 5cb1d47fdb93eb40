"""Hooks every test run of this workspace shares: requirement marks, lanes, missing tools."""

from tools.pytest_lanes import pytest_collection_modifyitems, pytest_runtest_setup
from tools.req_plugin import pytest_configure, pytest_make_collect_report

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_make_collect_report", "pytest_runtest_setup"]
