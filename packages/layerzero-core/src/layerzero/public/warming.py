"""`lz.warmup`: everything compiled, loaded and bound before the first request."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerzero.dispatch import compiling as jit
from layerzero.errors import InvalidInputError
from layerzero.recording.traffic import read_mapping
from layerzero.runtime.state import state
from layerzero.startup.manifest import Manifest, config_hash, is_manifest, mark_critical
from layerzero.startup.warm import Warmup, warm


def manifest(source: Any, *, config: Any = None) -> Manifest:
    """The calls to be ready for, critical ones marked.

    `source` is a manifest file, traffic that `lz.record` wrote, a model folder or config.json, a configuration as a
    mapping, or contexts. Of recorded traffic the calls that make up nine tenths are critical, of a model's its decode
    steps; in a manifest file the marks are the author's. `config` checks that the manifest was made from that
    configuration.
    """
    made = _manifest(source)
    if config is not None:
        made.require(_config(config))
    return made


def _manifest(source: Any) -> Manifest:
    from layerzero.public.traffic import calls_of

    if isinstance(source, Manifest):
        return source
    if isinstance(source, (str, os.PathLike)) and is_manifest(source):
        return Manifest.load(source)
    model, made_from = "", ""
    named = Path(source) if isinstance(source, (str, os.PathLike)) else None
    if isinstance(source, Mapping) or (named is not None and (named.is_dir() or named.name == "config.json")):
        found = _config(source)
        made_from = config_hash(found)
        model = str(found.get("_name_or_path") or found.get("model_type") or "")
    return Manifest(mark_critical(call for _, call in calls_of(source)), model, made_from)


def _config(source: Any) -> dict[str, Any]:
    return dict(source) if isinstance(source, Mapping) else read_mapping(source)


def warmup(
    source: Any,
    *,
    config: Any = None,
    kernels: str | Sequence[str] = (),
    timeout: float | None = None,
    workers: int | None = None,
    background: bool = True,
    retry: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Warmup:
    """Compile, load and bind what these calls need; returns when the critical ones are ready.

    source      see `layerzero.public.warming.manifest`: manifest, traffic, model configuration or contexts
    config      configuration the manifest must have been made from
    kernels     globs of further kernels to compile, whatever selection thinks of them
    timeout     seconds to wait for critical kernels; those that are late are left to the fallback and go on compiling
    workers     kernels compiled at a time
    background  False: wait for the rest as well
    retry       try again what could not be compiled before
    progress    called with (done, all) while artifacts get ready

    Afterwards requests for these calls compile nothing. The result says what was compiled, what failed and why;
    `result.wait()` waits for the background.
    """
    if timeout is not None and not timeout >= 0:
        raise InvalidInputError(code="VALUE_INVALID", value=f"timeout={timeout}", limit="seconds, 0 or more")
    if workers is not None and workers < 1:
        raise InvalidInputError(code="VALUE_INVALID", value=f"workers={workers}", limit="1 or more")
    _ = state.world
    if retry:
        jit.forget_failures()
    named = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    items = manifest(source, config=config).items
    result = warm(items, kernels=named, timeout_s=timeout, workers=workers, told=progress)
    if not background:
        result.wait()
        jit.publish()
    return result
