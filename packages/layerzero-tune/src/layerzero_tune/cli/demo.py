"""`lz demo`: a tour of one Llama-shaped block on this machine, in the terminal, as JSON and as one HTML page."""

from __future__ import annotations

import importlib
import importlib.util
import json as json_module
import shutil
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import Line, is_plain, progress_bar, show, stamped
from layerzero_cli.root import cli

_PROMPT = "The quick brown fox"
_NARROW = 104  # columns of a terminal below which a kernel stands under its step


@cli.command("demo")
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
    ctx.exit(run(html=html, json=as_json, device=device, quick=quick))


def run(html: Path | None = None, json: bool = False, device: str | None = None, quick: bool = False) -> int:
    """Take the tour and tell of it. 0: every result matches the reference; 1: one does not; 2: no such device."""
    from layerzero.errors import InvalidInputError, LayerZeroError
    from layerzero.files import write_whole
    from layerzero_tune.demo.page import render
    from layerzero_tune.demo.stations import blocks
    from layerzero_tune.demo.tour import TICKS, take

    done = count(1)
    try:
        with nullcontext() if json else progress_bar() as bar:
            tick = (lambda _: None) if bar is None else (lambda name: bar(next(done), TICKS + 1, name))
            tour = take(device, quick=quick, tick=tick)
    except InvalidInputError as error:
        print(f"lz demo: {error}", file=sys.stderr)
        return 2
    except LayerZeroError as error:
        print(f"lz demo: the block could not run: {error}", file=sys.stderr)
        return 1
    text = text_round_trip()
    written, problem = html, ""
    if html is not None:
        try:
            write_whole(html, render(tour))
        except OSError as error:
            written, problem = None, f"the page could not be written: {error}"
    if json:
        page = None if written is None else str(written)
        print(json_module.dumps(stamped({**tour.to_json(), "text": text, "page": page}), indent=2))
    else:
        narrow = not is_plain(sys.stdout) and shutil.get_terminal_size().columns < _NARROW
        told = [Line(), *(Line(line, hang=4) for line in text_lines(text))] if text is not None else []
        show([*blocks(tour, written, narrow=narrow), *told], sys.stdout)
    if problem:
        print(f"lz demo: {problem}", file=sys.stderr)
    return 0 if tour.ok and not problem and (text is None or text.get("round_trip", True)) else 1


# -- the last stop: text in, text out --------------------------------------------------------------
def text_round_trip() -> dict[str, Any] | None:
    """Tokenize, generate and detokenize with a tokenizer trained on the spot; None where the package is not there."""
    package = "layerzero_tokenizers"
    if any(importlib.util.find_spec(name) is None for name in (package, "tokenizers")):
        return None
    import layerzero as lz
    from layerzero.errors import LayerZeroError

    small, pipeline, sources = (importlib.import_module(f"{package}.{n}") for n in ("small", "pipeline", "sources"))
    try:
        tokenizer = sources.load(small.gpt2())
        model = pipeline.TinyTransformer(tokenizer.vocab_size)
        made = pipeline.generate(_PROMPT, tokenizer, model, max_new_tokens=12)
        report = lz.explain("tokenize", _PROMPT, tokenizer)
        return {
            "prompt": _PROMPT,
            "prompt_ids": made.prompt_ids,
            "ids": made.ids,
            "text": made.text,
            "kernel": report.ran or report.chosen,
            "round_trip": lz.detokenize(made.prompt_ids, tokenizer) == _PROMPT,
        }
    except LayerZeroError as error:  # a policy that keeps tokenizers out, say
        return {"error": str(error)}


def text_lines(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    if "error" in found:
        return [f"Text in, text out: {found['error']}"]
    back = "comes back unchanged" if found["round_trip"] else "DOES NOT come back"
    return [
        "Text in, text out (random weights, so the words mean nothing)",
        f"  {found['prompt']!a}: {len(found['prompt_ids'])} tokens by {found['kernel']}, and {back}",
        f"  then {len(found['ids'])} more, streamed: {found['text']!a}",
    ]
