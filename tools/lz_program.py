"""The `lz` program called in the tests' own process: what it prints, and what it says as JSON."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from layerzero_cli.root import cli

__all__ = ["data", "run"]


def run(*args: str, code: int = 0) -> Result:
    """Call a verb, which has to end with this exit code."""
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def data(*args: str, code: int = 0) -> Any:
    """What the verb says as JSON, behind the version of its form."""
    found = json.loads(run(*args, "--json", code=code).stdout)
    if "$schema" not in found:
        assert found.pop("schema_version") == 1
    return found.get("items", found)
