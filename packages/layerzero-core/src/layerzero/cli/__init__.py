"""The command line `lz`. click and rich are imported when it is called, never with the library."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `lz` program."""
    from layerzero.cli.app import cli

    cli(prog_name="lz")
