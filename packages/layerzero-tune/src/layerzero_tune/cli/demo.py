"""`lz demo`: the tour itself lives in `layerzero_tune.demo.show`."""

from __future__ import annotations

from pathlib import Path

import click


def add(group: click.Group) -> None:
    """Declare the verb."""

    @group.command("demo")
    @click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the tour as a page.")
    @click.option("--device", help="cpu, cuda:0; default: the first accelerator, else the CPU.")
    @click.option("--quick", is_flag=True, help="A smaller block and fewer rounds.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
    @click.pass_context
    def demo(ctx: click.Context, html: Path | None, device: str | None, quick: bool, as_json: bool) -> None:
        """Take a Llama-shaped block through LayerZero.

        \b
        lz demo --quick
        lz demo --html tour.html

        Shows what ran and why, how fast, and whether it is right.
        """
        from layerzero_tune.demo.show import run

        ctx.exit(run(html=html, json=as_json, device=device, quick=quick))
