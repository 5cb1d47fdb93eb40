"""`lz completion`: the script that teaches a shell to complete `lz`; and the names that it completes.

Names are read from the capabilities.json of every installed backend and from the metadata of packages: a shell that
asks does not wait for torch. Kernels that a plugin registers by Python code alone are not among them.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from layerzero_cli.output import Answer, Line
from layerzero_cli.root import cli, entries
from layerzero_cli.verbs import verb

_INSTALL = {
    "bash": 'eval "$(lz completion bash)"  in ~/.bashrc',
    "zsh": 'eval "$(lz completion zsh)"  in ~/.zshrc',
    "fish": "lz completion fish > ~/.config/fish/completions/lz.fish",
}


@verb(cli, "completion")
@click.argument("shell", type=click.Choice(sorted(_INSTALL)))
def completion(shell: str) -> Answer:
    """Print the script that completes verbs, options and names in a shell.

    \b
    eval "$(lz completion bash)"                                 in ~/.bashrc
    eval "$(lz completion zsh)"                                  in ~/.zshrc
    lz completion fish > ~/.config/fish/completions/lz.fish      once
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "lz", "_LZ_COMPLETE").source_template % {
        "complete_func": "_lz_completion", "complete_var": "_LZ_COMPLETE", "prog_name": "lz",
    }  # fmt: skip
    return Answer({"shell": shell, "script": script, "install": _INSTALL[shell]}, [Line(script.strip("\n"))])


Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _completing(known: Callable[[], Iterable[str]]) -> Completion:
    """The names that begin as what was typed."""
    return lambda ctx, param, incomplete: [name for name in sorted(known()) if name.startswith(incomplete)]


def _capabilities() -> Iterator[dict[str, Any]]:
    """What every installed backend says of its kernels; a file that cannot be read is for `lz doctor` to tell of."""
    import importlib.util

    for module, _ in entries("layerzero.backends").values():
        top, *inner = module.partition(":")[0].split(".")
        spec = importlib.util.find_spec(top)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in Path(folder, *inner[:-1]).rglob("capabilities.json"):
                try:
                    found = json.loads(file.read_bytes())
                except (OSError, ValueError):
                    continue
                if isinstance(found, dict):
                    yield found


def _kernels() -> set[str]:
    ops = (kernels for found in _capabilities() for kernels in found.get("ops", {}).values())
    return {kernel["kernel_id"] for kernels in ops for kernel in kernels}


def _devices() -> Iterable[str]:
    """Devices by name. The catalogue needs no torch, which the package's own `__init__` imports: it is left out."""
    if "layerzero" not in sys.modules:  # for the rest of this process, which ends with its answer to the shell
        sys.modules["layerzero"] = bare = types.ModuleType("layerzero")
        bare.__path__ = [str(Path(__file__).parents[1] / "layerzero")]
    return ("cpu", "cuda", *importlib.import_module("layerzero.device.catalogue").device_names())


complete_op = _completing(lambda: {op for found in _capabilities() for op in found.get("ops", ())})
complete_kernel = _completing(_kernels)
complete_backend = _completing(lambda: {str(found.get("backend")) for found in _capabilities()})
complete_device = _completing(_devices)
