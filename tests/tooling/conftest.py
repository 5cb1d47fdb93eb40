"""Collected by `make prove NAME=tools` only: the tools live in an environment of their own, see docs/tooling.md."""

import importlib.util

import pytest

if not hasattr(
    pytest.Function, "_nodeid"
):  # pytest-benchmark 5.3.0 reads it, pytest 9.2 has no such attribute any more
    pytest.Function._nodeid = property(lambda self: self.nodeid)

collect_ignore_glob = [] if importlib.util.find_spec("pytest_memray") else ["test_*.py"]
