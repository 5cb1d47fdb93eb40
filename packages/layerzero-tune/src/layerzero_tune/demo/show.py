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
from typing import TYPE_CHECKING, Any

from layerzero.errors import InvalidInputError, LayerZeroError
from layerzero.files import write_whole
from layerzero_cli.output import Line, is_plain, progress_bar, show, stamped

if TYPE_CHECKING:
    from layerzero_tune.demo.stations import Tour

_PROMPT = "The quick brown fox"
_NARROW = 104  # columns of a terminal below which a kernel stands under its step


def run(html: Path | None = None, json: bool = False, device: str | None = None, quick: bool = False) -> int:
    """Take the tour and tell of it. 0: every result matches the reference; 1: one does not; 2: no such device.

    `html` names a page to write (whole or not at all), `json` prints JSON alone, `quick` takes a smaller block
    and fewer rounds.
    """
    try:
        tour = _take(device, quick=quick, quiet=json)
    except InvalidInputError as error:
        print(f"lz demo: {error}", file=sys.stderr)
        return 2
    except LayerZeroError as error:
        print(f"lz demo: the block could not run: {error}", file=sys.stderr)
        return 1
    text = text_round_trip()
    written, problem = html, ""
    if html is not None:
        from layerzero_tune.demo.page import render

        try:
            write_whole(html, render(tour))
        except OSError as error:
            written, problem = None, f"the page could not be written: {error}"
    if json:
        page = None if written is None else str(written)
        print(json_module.dumps(stamped({**tour.to_json(), "text": text, "page": page}), indent=2))
    else:
        from layerzero_tune.demo.text import blocks

        narrow = not is_plain(sys.stdout) and shutil.get_terminal_size().columns < _NARROW
        told = [Line(), *(Line(line, hang=4) for line in text_lines(text))] if text is not None else []
        show([*blocks(tour, written, narrow=narrow), *told], sys.stdout)
    if problem:
        print(f"lz demo: {problem}", file=sys.stderr)
    return 0 if tour.ok and not problem and (text is None or text.get("round_trip", True)) else 1


def _take(device: str | None, *, quick: bool, quiet: bool) -> Tour:
    """The tour itself, behind a progress bar where somebody is watching."""
    from layerzero_tune.demo.tour import TICKS, take

    done = count(1)
    with nullcontext() if quiet else progress_bar() as bar:
        if bar is None:
            return take(device, quick=quick, tick=lambda _: None)
        return take(device, quick=quick, tick=lambda name: bar(next(done), TICKS + 1, name))


# -- the last stop: text in, text out --------------------------------------------------------------
def text_round_trip() -> dict[str, Any] | None:
    """Tokenize, generate and detokenize with a tokenizer trained on the spot; None where the package is not there."""
    package = "layerzero_tokenizers"
    if any(importlib.util.find_spec(name) is None for name in (package, "tokenizers")):
        return None
    import layerzero as lz

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
