"""What other libraries have for the ops of the CPU benchmark, each called the way its own users call it.

    torch     oneDNN's product with a packed weight, SDPA with the group folded into the queries (in the cases
              themselves), `_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`, oneDNN's dynamic INT8
    compile   torch.compile of what the case calls eager; for work that reads and writes each number about once
    zentorch  AMD's extension: RMSNorm, add+RMSNorm, SDPA, linear (plain and packed), INT4 weights, dynamic INT8. It has
              no op for RoPE, SiLU·mul alone, LayerNorm, pages, sampling or quantizing

A peer is asked for by what `lz` is asked for, so that it gets the same tensors. Another library's code is tried in a
process of its own first (cpu_prepare.py), since it may crash. `checked` runs it once and compares; one that raises, or
whose result is not right, is not timed and the reason stands in the row.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from cpu_case import Asked, Call, Peer, in_turn

from layerzero.model.quant import QuantizedTensor
from layerzero.numerics.compare import assert_close
from layerzero.numerics.tolerances import tolerance

__all__ = ["COMPILED", "FOREIGN", "KINDS", "ZENTORCH", "checked", "compiled", "load", "peers_of"]

KINDS = ("torch", "compile", "zentorch")
FOREIGN = ("zentorch",)  # other libraries, whose peers' names begin so
COMPILED = ("norm", "rope", "gated", "sampling", "quantize")  # groups of cases whose eager form is worth a compiler
ZENTORCH = ("norm", "decode", "prefill", "linear")  # groups with cases for which zentorch has an op


def load(kinds: list[str]) -> dict[str, str]:
    """Import what has to be imported, last of all; versions by kind, or why there is none."""
    found = {}
    for kind in kinds:
        if kind == "zentorch":
            try:
                found[kind] = str(importlib.import_module("zentorch").__version__)
            except (Exception, SystemExit) as error:  # a wrong torch makes its import fail, in one way or another
                found[kind] = f"cannot be imported: {type(error).__name__}: {error}"[:300]
        else:
            found[kind] = torch.__version__
    return found


def peers_of(asked: Asked, kinds: dict[str, str]) -> Iterator[Peer]:
    """Those of torch and of zentorch; what has no op for this gives none."""
    if "torch" in kinds and asked.op == "linear":
        yield from _torch(asked)
    if "zentorch" in kinds and not kinds["zentorch"].startswith("cannot"):
        yield from _zentorch(asked)


def compiled(eager: Call, drawn: bool = False) -> Peer:
    """What the case calls eager, compiled for these sizes; torch's own result is its truth.

    `drawn`: it takes random numbers, so that both are given the same ones to be compared.
    """
    torch._dynamo.reset()  # cases share code objects: without it, later ones would be compiled for any size
    made = torch.compile(eager, dynamic=False)
    if drawn:
        return Peer("compile", made, once=_seeded(made), truth=_seeded(eager))
    return Peer("compile", made, truth=eager)


def _seeded(call: Call) -> Call:
    def run() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return call()

    return run


def checked(peer: Peer, asked: Asked, truth: Any) -> str:
    """Runs it once; empty where the result is right, else what is wrong with it."""
    try:
        got = _plain((peer.once or peer.call)())
        if peer.exact is not None:
            return _far(got, truth, peer.exact())
        want = _plain(truth if peer.truth is None else peer.truth())
        op = asked.op if peer.truth is None else ""
        first = asked.args[0]
        assert_close(got, want, tolerance(op, first.dtype, k=first.shape[-1] if op == "linear" else None))
    except AssertionError as error:
        return f"wrong: {error}"[:300]
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    return ""


def _far(got: torch.Tensor, truth: torch.Tensor, exact: torch.Tensor) -> str:
    found, allowed = (float((item.double() - truth.double()).pow(2).mean().sqrt()) for item in (got, exact))
    return (
        "" if found <= 1.25 * allowed else f"wrong: {found:.3g} from the reference, rounding x explains {allowed:.3g}"
    )


def _plain(result: Any) -> Any:
    return result.data if isinstance(result, QuantizedTensor) else result


# -- torch -------------------------------------------------------------------------------------------
def _torch(asked: Asked) -> Iterator[Peer]:
    x, weight = asked.args[:2]
    weights = [args[1] for args in asked.sets]
    if isinstance(weight, torch.Tensor):
        if torch.backends.mkldnn.is_available():
            yield Peer("oneDNN packed", _later(lambda: _onednn_packed(x, weights)))
    elif weight.data.dtype is torch.int8:
        rows = [(w.data, w.scale.reshape(-1).to(x.dtype)) for w in weights]
        yield Peer("int8pack", in_turn(lambda c, s: torch._weight_int8pack_mm(x, c, s), rows))
        yield Peer(
            "oneDNN dynamic int8", _later(lambda: _onednn_dynamic(x, weights)), exact=lambda: _tensor_rounded(x, weight)
        )
    else:
        tiles = [(_int4_tiles(w), _int4_scales(w).to(x.dtype)) for w in weights]
        run = torch.ops.aten._weight_int4pack_mm_for_cpu
        yield Peer("int4pack", in_turn(lambda c, s: run(x, c, weight.block_size, s), tiles))


def _later(make: Any) -> Call:
    """A call that is made when it is first called: what cannot be prepared is the peer's error, not the case's."""
    kept: list[Call] = []

    def run() -> Any:
        if not kept:
            kept.append(make())
        return kept[0]()

    return run


def _onednn_packed(x: torch.Tensor, weights: list[torch.Tensor]) -> Call:
    """Packed once, as Inductor does it with frozen weights."""
    run = torch.ops.mkldnn._linear_pointwise
    packed = [(torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0]),) for w in weights]
    return in_turn(lambda w: run(x, w, None, "none", [], ""), packed)


def _onednn_dynamic(x: torch.Tensor, weights: list[QuantizedTensor]) -> Call:
    """torch.ao's dynamic linear: one scale for the whole of x, found at every call; it takes float32 only."""
    torch.backends.quantized.engine = "onednn"
    packed = []
    for weight in weights:
        scale = weight.scale.reshape(-1).double()
        codes = torch._make_per_channel_quantized_tensor(
            weight.data, scale, torch.zeros_like(scale, dtype=torch.long), 0
        )
        packed.append((torch.ops.quantized.linear_prepack(codes, None),))
    return in_turn(lambda w: torch.ops.quantized.linear_dynamic(x.float(), w).to(x.dtype), packed)


def _int4_tiles(weight: QuantizedTensor) -> torch.Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(_signed(weight).to(torch.int32) + 8, 1)


def _int4_scales(weight: QuantizedTensor) -> torch.Tensor:
    return torch.stack((weight.scale, torch.zeros_like(weight.scale)), dim=-1).transpose(0, 1).contiguous()


def _signed(weight: QuantizedTensor) -> torch.Tensor:
    """INT4 codes one a byte, from -8 to 7."""
    both = torch.stack((weight.data & 0xF, weight.data >> 4), dim=-1).flatten(-2)
    return ((both ^ 8).to(torch.int8) - 8).contiguous()


# -- zentorch ----------------------------------------------------------------------------------------
def _zentorch(asked: Asked) -> Iterator[Peer]:
    ops: Any = torch.ops.zentorch
    if asked.op == "rms_norm":
        yield Peer("zentorch", in_turn(ops.zentorch_rms_norm, asked.sets))
    elif asked.op == "add_rms_norm":
        yield _zentorch_add(ops, *asked.args)
    elif asked.op == "attention":
        yield from _zentorch_attention(ops, asked)
    elif asked.op == "linear":
        yield from _zentorch_linear(ops, asked)


def _zentorch_add(ops: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Peer:
    """It writes the norm over x and the sum over the residual."""

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = x.clone(), residual.clone()
        ops.zentorch_add_rms_norm_(normed, weight, total, eps)
        return normed, total

    own = x.clone(), residual.clone()
    return Peer("zentorch", lambda: ops.zentorch_add_rms_norm_(own[0], weight, own[1], eps), once)


def _zentorch_attention(ops: Any, asked: Asked) -> Iterator[Peer]:
    """It knows one number of heads and reads as many of the keys, whether they are there or not: never with fewer."""
    causal = bool(asked.options.get("is_causal", False))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.zentorch_sdpa(q, k, v, 0.0, causal)[0]

    q, k = asked.args[:2]
    group = q.shape[1] // k.shape[1]
    if group == 1:
        yield Peer("zentorch", in_turn(run, asked.sets))
    elif q.shape[2] == 1:  # the group in the place of the queries, as in "folded sdpa"
        folded = q.view(q.shape[0], k.shape[1], group, q.shape[3])
        sets = [(folded, *args[1:3]) for args in asked.sets]
        yield Peer("zentorch folded", in_turn(lambda *a: run(*a).view(q.shape), sets))
    else:  # its own users repeat the keys where heads have to be equal in number
        yield Peer("zentorch repeated", in_turn(lambda q, k, v: run(q, *_repeated(k, v, group)), asked.sets))


def _repeated(k: torch.Tensor, v: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _zentorch_linear(ops: Any, asked: Asked) -> Iterator[Peer]:
    x, weight = asked.args[:2]
    weights = [args[1] for args in asked.sets]
    if isinstance(weight, torch.Tensor):
        yield Peer("zentorch", in_turn(ops.zentorch_linear_unary, [(x, w) for w in weights]))

        def packed() -> Call:
            sets = [(x, ops.zentorch_weight_prepack_for_linear(w)) for w in weights]
            return in_turn(lambda a, w: ops.zentorch_linear_unary(a, w, is_weight_prepacked=True), sets)

        yield Peer("zentorch packed", _later(packed))
    elif weight.data.dtype is torch.int8:  # it has no INT8 product that leaves x as it is

        def dynamic() -> Call:
            return in_turn(ops.zentorch_dynamic_qlinear, [(x, w.data, w.scale.reshape(-1).float()) for w in weights])

        yield Peer("zentorch dynamic int8", _later(dynamic), exact=lambda: _row_rounded(x, weight))
    else:

        def codes() -> Call:
            repack = ops.zentorch_woq_repack_weight
            sets = [(x, repack(_signed(w)).t(), w.scale.to(x.dtype).t().contiguous(), None) for w in weights]
            return in_turn(ops.zentorch_woq_linear, sets)

        yield Peer("zentorch int4", _later(codes))


# -- what a product that rounds x gives, exactly -----------------------------------------------------
def _product(x: torch.Tensor, codes: torch.Tensor, scale: Any, weight: QuantizedTensor) -> torch.Tensor:
    wide = F.linear(codes.double(), weight.data.double()) * scale
    return (wide * weight.scale.reshape(1, -1).double()).to(x.dtype)


def _row_rounded(x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """Every row of x rounded to whole numbers up to 127."""
    scale = x.double().abs().amax(-1, keepdim=True) / 127.0
    return _product(x, (x.double() / scale).round(), scale, weight)


def _tensor_rounded(x: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """All of x rounded to 256 whole numbers between its least and its largest, nought being one of them."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255.0
    zero = min(255, max(0, round(-low / scale)))
    codes = ((x.double() / scale).round() + zero).clamp(0, 255) - zero
    return _product(x, codes, scale, weight)
