"""The command line `lz`.

It is a package beside `layerzero`, whose import loads torch: help, completion and mistakes of usage are answered
without either. Modules of verbs import the library inside the functions that use it.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `lz` program."""
    from layerzero_cli.root import cli

    cli(prog_name="lz")
