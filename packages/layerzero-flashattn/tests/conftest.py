"""Stand-ins for libraries that do not run here: each call has to fit the recorded signature, then is computed by the
reference and given back in the library's own shapes and conventions."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from layerzero.backends.reference.attention import attention as reference
from layerzero.backends.reference.varlen import paged_attention as reference_paged
from layerzero.backends.reference.varlen import varlen_attention as reference_varlen
from layerzero.model.kv_cache import make_paged_batch

SIGNATURES = Path(__file__).parent / "signatures"


def signature(file: str, dotted: str) -> inspect.Signature:
    """A recorded signature; a default only says that there is one."""
    entries = json.loads((SIGNATURES / file).read_text(encoding="utf-8"))["calls"][dotted]
    return inspect.Signature(
        [
            inspect.Parameter(
                item["name"],
                inspect._ParameterKind[item["kind"]],
                default=inspect.Parameter.empty if item["default"] is None else item["default"],
            )
            for item in entries
        ]
    )


class Library:
    """A module whose functions bind their arguments to recorded signatures and note them."""

    def __init__(self, file: str, name: str) -> None:
        self.file, self.module = file, ModuleType(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def function(self, name: str, compute: Callable[..., Any]) -> None:
        """Add a function; `compute` gets the arguments that were given, by name."""
        bind = signature(self.file, f"{self.module.__name__}.{name}")

        def called(*args: Any, **kwargs: Any) -> Any:
            given = dict(bind.bind(*args, **kwargs).arguments)
            self.calls.append((name, given))
            return compute(SimpleNamespace(**given), given.get)

        called.__signature__ = bind  # type: ignore[attr-defined]
        setattr(self.module, name, called)


def dense(given: Any, get: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on [B, S, H, D] as the libraries define it, with +inf where a row attends nothing."""
    window = get("window_size", (-1, -1))
    sides = tuple(-1 if side is None else side for side in window)
    causal = "bottom_right" if get("causal", False) else False
    q, k, v = (t.transpose(1, 2) for t in (given.q, given.k, given.v))
    cap = get("softcap", 0.0) or None
    out, lse = reference(q, k, v, None, 0.0, causal, get("softmax_scale"), sides, cap, get("alibi_slopes"), True)
    return out.transpose(1, 2), lse.masked_fill(lse == -math.inf, math.inf)


def packed(given: Any, get: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over packed tokens, or over pages; the log-sum-exp has heads first."""
    causal = "bottom_right" if get("causal", False) else False
    assert given.cu_seqlens_q.dtype is torch.int32
    sides = tuple(-1 if side is None else side for side in get("window_size", (-1, -1)))
    cap, slopes = get("softcap", 0.0) or None, get("alibi_slopes")
    if get("block_table") is not None:
        lens = given.cu_seqlens_k.diff()
        batch = make_paged_batch(given.block_table, lens, given.cu_seqlens_q.diff())
        found = reference_paged(given.q, given.k, given.v, batch, get("softmax_scale"), sides, cap, slopes, True, "NHD")
    else:
        found = reference_varlen(
            given.q, given.k, given.v, given.cu_seqlens_q, given.cu_seqlens_k, 0, 0, causal, get("softmax_scale"),
            sides, cap, slopes, True,
        )  # fmt: skip
    return found[0], found[1].masked_fill(found[1] == -math.inf, math.inf).transpose(0, 1)


def cached(given: Any, get: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A paged cache: queries [B, S, H, D], or packed where offsets are given."""
    tables = get("block_table") if get("block_table") is not None else given.page_table
    assert given.cache_seqlens.dtype is torch.int32 and tables.dtype is torch.int32 and get("causal") is True
    offsets = get("cu_seqlens_q")
    count = tables.shape[0]
    lens = torch.full((count,), given.q.shape[1], dtype=torch.int32) if offsets is None else offsets.diff()
    batch = make_paged_batch(tables, given.cache_seqlens, lens)
    query = given.q.flatten(0, 1) if offsets is None else given.q
    out, lse = reference_paged(
        query, given.k_cache, given.v_cache, batch, get("softmax_scale"), given.window_size,
        get("softcap", 0.0) or None, get("alibi_slopes"), True, "NHD",
    )  # fmt: skip
    if offsets is not None:
        return out, lse.transpose(0, 1)
    return out.view(given.q.shape), lse.view(count, -1, lse.shape[1]).transpose(1, 2)


def _fa2() -> Library:
    library = Library("flash_attn_2.json", "flash_attn.flash_attn_interface")

    def lse_too(compute: Callable[..., Any], flag: str) -> Callable[..., Any]:
        def run(given: Any, get: Callable[..., Any]) -> Any:
            out, lse = compute(given, get)
            extra = (None,) if flag == "return_attn_probs" else ()
            return (out, lse, *extra) if get(flag, False) else out

        return run

    library.function("flash_attn_func", lse_too(dense, "return_attn_probs"))
    library.function("flash_attn_varlen_func", lse_too(packed, "return_attn_probs"))
    library.function("flash_attn_with_kvcache", lse_too(cached, "return_softmax_lse"))
    return library


def _fa3() -> Library:
    library = Library("flash_attn_interface.json", "flash_attn_interface")

    def lse_too(compute: Callable[..., Any], flag: str) -> Callable[..., Any]:
        return lambda given, get: compute(given, get) if get(flag, False) else compute(given, get)[0]

    library.function("flash_attn_func", lse_too(dense, "return_attn_probs"))
    library.function("flash_attn_varlen_func", lse_too(packed, "return_attn_probs"))
    library.function("flash_attn_with_kvcache", lse_too(cached, "return_softmax_lse"))
    return library


@pytest.fixture
def recorded() -> Callable[[str, str], inspect.Signature]:
    """Recorded signatures, by file and dotted name."""
    return signature


@pytest.fixture
def library_class() -> type[Library]:
    """What stand-ins are made of."""
    return Library


@pytest.fixture(params=["fa2", "fa3"])
def generation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The adapters of one generation over a stand-in of its library: `.name`, `.kernels`, `.library`."""
    library = {"fa2": _fa2, "fa3": _fa3}[request.param]()
    full = library.module.__name__
    for name in (full.split(".")[0], full):
        monkeypatch.setitem(sys.modules, name, library.module if name == full else ModuleType(name))
    module = f"layerzero_flashattn.{request.param}.kernels"
    monkeypatch.delitem(sys.modules, module, raising=False)
    yield SimpleNamespace(name=request.param, kernels=import_module(module), library=library)
    sys.modules.pop(module, None)
