"""What vLLM runs in each of its processes, by entry point; nothing changes unless LAYERZERO_VLLM asks for it.

| LAYERZERO_VLLM | |
|---|---|
| unset, off | vLLM is left alone: none of its modules is imported or changed |
| on | what runs on a CPU, and CUSTOM on CUDA, is chosen here; other vLLMs are left alone, with a warning |
| strict | the same, but what would be a warning stops vLLM |

LAYERZERO_VLLM_CHOICE=layerzero or vllm takes that side wherever it can serve, instead of the quicker one.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping

VARIABLE = "LAYERZERO_VLLM"
CHOICE = "LAYERZERO_VLLM_CHOICE"
SUPPORTED = ("0.26", "0.32")

_log = logging.getLogger("layerzero.vllm")
_registered = False


class UnsupportedVllm(RuntimeError):
    """A vLLM whose interfaces this package was not written against."""


def mode(environ: Mapping[str, str]) -> str:
    """`off`, `on` or `strict`; raises ValueError for anything else, since a misspelt word would serve without us."""
    said = environ.get(VARIABLE, "").strip().lower()
    words = {"": "off", "0": "off", "off": "off", "1": "on", "on": "on", "strict": "strict"}
    if said not in words:
        raise ValueError(f"{VARIABLE}={said!r} is not understood, expected off, on or strict")
    return words[said]


def pinned(environ: Mapping[str, str]) -> str | None:
    """The side that is taken without measuring, None where times decide; raises ValueError for another word."""
    said = environ.get(CHOICE, "").strip().lower()
    if said not in ("", "measured", "layerzero", "vllm"):
        raise ValueError(f"{CHOICE}={said!r} is not understood, expected measured, layerzero or vllm")
    return said if said in ("layerzero", "vllm") else None


def check_version(version: str) -> None:
    """Raise UnsupportedVllm, with the number and what is supported, for a vLLM this package was not written against."""
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release not in SUPPORTED:
        known = " and ".join(f"{one}.x" for one in SUPPORTED)
        raise UnsupportedVllm(f"vLLM {version} is not supported by layerzero-vllm, which knows {known}")


def register() -> None:
    """Register the attention backend and the norms with vLLM, once a process; vLLM may call this many times."""
    global _registered
    wanted = mode(os.environ)
    if _registered or wanted == "off":
        return
    version = importlib.import_module("vllm.version").__version__
    try:
        check_version(version)
    except UnsupportedVllm as error:
        if wanted == "strict":
            raise
        _log.warning("%s; vLLM runs as if LayerZero were not installed", error)
        return
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    backends = registry.AttentionBackendEnum
    # vLLM imports a class when it builds the first attention layer. The CPU platform takes no other backend than
    # CPU_ATTN, whatever --attention-backend says; on CUDA ours is used where it is asked for as CUSTOM.
    registry.register_backend(backends.CPU_ATTN, "layerzero_vllm.cpu.CpuBackend")
    if version.startswith("0.26."):
        registry.register_backend(backends.CUSTOM, "layerzero_vllm.cuda.CudaBackend")
    else:  # a provider has to be known wherever --ir-op-priority may name it: in the front end as in the workers
        importlib.import_module("layerzero_vllm.norm").register(importlib.import_module("vllm.ir").ops)
    _registered = True
