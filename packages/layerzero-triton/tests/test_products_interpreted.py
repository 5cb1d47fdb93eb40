"""Our Triton kernels that multiply (paged attention, linears, experts), run by Triton's interpreter; no GPU is needed.

`interpreted_lab.py` says how: the cases run in a child process, which is this file as a script.
"""

from __future__ import annotations

import pytest
import torch

from tools.pytest_fixtures import module_beside

pytest.importorskip("triton")

lab = module_beside(__file__, "interpreted_lab")
cases = lab.Cases()
case, differs = cases.add, lab.differs
F32, F16 = torch.float32, torch.float16


def paged_case(
    name, *, dtype=F32, page=4, layout="NHD", heads=4, kv_heads=2, dim=16, splits=2, index=torch.int32, window=None,
    softcap=None, slopes=None, scale=None, last=(),
):  # fmt: skip
    @case(f"paged {name}")
    def run():
        from layerzero.backends.reference.varlen import paged_attention as truth
        from layerzero.model.kv_cache import make_paged_batch
        from layerzero_triton import config, paged

        lengths = (5, 0, 37)
        blocks = -(-max(lengths) // page)
        shape = (3 * blocks, page, kv_heads, dim) if layout == "NHD" else (3 * blocks, kv_heads, page, dim)
        k, v, q = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(3, heads, dim).to(dtype)
        table = torch.randperm(3 * blocks).view(3, blocks).to(index)
        batch = make_paged_batch(table, torch.tensor(lengths, dtype=index))
        rest = (scale, window, softcap, slopes, True, layout, *last)
        got = paged.paged_attention(q, k, v, batch, *rest, config=config.PagedConfig(16, 16, splits))
        return differs("attention", got, truth(q, k, v, batch, *rest), dtype)


paged_case("split")
paged_case("whole, other layout", splits=1, layout="HND", page=1, index=torch.int64)
paged_case("window and cap", window=(6, 0), softcap=5.0, page=8)
paged_case("slopes, negative scale", slopes=torch.rand(3, 4), scale=-0.7, heads=4, kv_heads=1)
paged_case("float16, odd head", dtype=F16, dim=24, splits=3)
paged_case("sinks", last=(torch.tensor([-3.0, 0.0, 2.0, 6.0]),))
paged_case("sinks, whole", splits=1, last=(torch.tensor([-3.0, -torch.inf, 2.0, 6.0]),))
paged_case("scales", last=(None, True, 0.5, torch.tensor([0.25, 3.0])))


def latent_case(name, *, dtype=F32, page=4, heads=4, dims=(32, 16), splits=2, index=torch.int32):
    @case(f"latent {name}")
    def run():
        from layerzero.backends.reference.varlen import mla_paged_attention as truth
        from layerzero.model.kv_cache import make_paged_batch
        from layerzero_triton import config, mla

        lengths = (5, 0, 37)
        blocks = -(-max(lengths) // page)
        queries = [torch.randn(3, heads, dim).to(dtype) for dim in dims]
        caches = [torch.randn(3 * blocks, page, dim).to(dtype) for dim in dims]
        table = torch.randperm(3 * blocks).view(3, blocks).to(index)
        batch = make_paged_batch(table, torch.tensor(lengths, dtype=index))
        rest = (*queries, *caches, batch, 0.3, True)
        got = mla.mla_paged_attention(*rest, config=config.PagedConfig(16, 16, splits))
        return differs("attention", got, truth(*rest), dtype)


latent_case("split")
latent_case("whole, more heads than a tile", splits=1, heads=20, index=torch.int64)
latent_case("float16, odd widths", dtype=F16, dims=(40, 24), splits=3, page=8)


def linear_case(name, fmt, granularity, *, splits=1, activation=None, bias=True, **options):
    @case(f"linear {name}")
    def run():
        import layerzero as lz
        from layerzero.backends.reference.feed_forward import linear as truth
        from layerzero_triton import config, linear

        weight = lz.quantize(torch.randn(20, 64), fmt, granularity=granularity, **options)
        x, b = torch.randn(3, 64).half(), torch.randn(20).half() if bias else None
        got = linear.dequantized(x, weight, b, activation, config.LinearConfig(16, 16, 32, splits))
        return differs("linear", got, truth(x.double(), weight, None if b is None else b.double(), activation), F16)


linear_case("int8 tensor", "int8", "tensor", bias=False)
linear_case("int8 channel, zero point, split", "int8", "channel", splits=2, symmetric=False, activation="silu")
linear_case("int8 block, zero point", "int8", "block", block_size=32, symmetric=False, activation="gelu_tanh")
linear_case("e4m3 channel", "fp8_e4m3", "channel", activation="gelu")
linear_case("int4 block, zero point", "int4", "block", block_size=32, symmetric=False, activation="silu")
linear_case("int4 channel, split", "int4", "channel", splits=2)
linear_case("mxfp4", "mxfp4", "block", activation="relu")


@case("rows in FP8")
def rows_in_codes():
    """Their scales; the interpreter rounds to FP8 wrongly, so the codes themselves are tested on the GPU."""
    import layerzero as lz
    from layerzero_triton.linear import _encode

    x = torch.randn(5, 96).half() * torch.logspace(-4, 4, 5)[:, None].half()
    x[3] = 0.0
    want = lz.quantize(x, "fp8_e4m3", granularity="channel", backend="reference")
    codes, scales = torch.empty(5, 96, dtype=torch.float8_e4m3fn), torch.empty(3, 5)
    _encode((5, 1, 1), (x, codes, scales), (6, 6, 5, 3), (128, 4, 16), 4)
    if not torch.equal(scales, want.scale.view(1, 5).expand(3, 5)):
        return f"scales {scales.tolist()} instead of {want.scale.view(-1).tolist()}"
    return None if codes[3].float().eq(0.0).all() else "codes of a row of zeros"


@case("mxfp4 written out")
def written_out():
    """In float32: the interpreter multiplies bfloat16 wrongly."""
    import layerzero as lz
    from layerzero_triton.linear import _widen

    weight, wide = lz.quantize(torch.randn(20, 96), "mxfp4"), torch.empty(20, 96)
    _widen((3, 1, 1), (weight.data, weight.scale.view(torch.uint8), wide), (20, 3), (8, 512, False), 4)
    return None if torch.equal(wide, lz.dequantize(weight)) else "other numbers"


def few_rows_case(rows, n, k, bias=False, activation=None):
    @case(f"few rows {rows} x {n} x {k} {activation}")
    def run():
        from layerzero.backends.reference import feed_forward
        from layerzero_triton import few_rows

        x, weight = torch.randn(rows, k).half(), (torch.randn(n, k) * k**-0.5).half()
        b = torch.randn(n).half() if bias else None
        apart = (torch.randn(n, 2 * k) * k**-0.5).half()[:, :k]  # rows that are further apart than they are long
        wrong = None
        for given in (weight, apart, (torch.randn(k, n) * k**-0.5).half().t()):
            got = few_rows.linear(x[:1], given, b, activation)
            wrong = wrong or differs("linear", got, feed_forward.linear(x[:1], given, b, activation), F16)
        back = (torch.randn(k, n // 2) * n**-0.5).half()
        rest = (None, activation or "silu", None, None, None)
        made = few_rows.mlp(x[None], weight, back, *rest)
        return wrong or differs("mlp", made, feed_forward.mlp(x[None], weight, back, *rest), F16)


@case("one row of four-bit codes")
def four_bit_row():
    import layerzero as lz
    from layerzero.backends.reference.feed_forward import linear as truth
    from layerzero_triton import few_rows

    x, bias = torch.randn(1, 2048).half(), torch.randn(12).half()
    for fmt, options in (("int4", {"granularity": "block"}), ("mxfp4", {})):
        weight = lz.quantize(torch.randn(12, 2048) * 0.02, fmt, **options)
        for last in ((None, None), (bias, "silu")):
            wrong = differs("linear", few_rows.linear(x, weight, *last), truth(x, weight, *last), F16)
            if wrong:
                return f"{fmt}: {wrong}"
    return None


few_rows_case(1, 40, 1024)
few_rows_case(1, 20, 40, bias=True, activation="gelu")
few_rows_case(3, 40, 512, activation="gelu_tanh")
few_rows_case(17, 20, 40, bias=True, activation="relu")


def experts_case(name, tokens=7, experts=6, hidden=40, inner=24, dtype=F32, gated=True, activation="silu", **given):
    @case(f"experts {name}")
    def run():
        from layerzero.backends.reference.moe import moe as truth
        from layerzero_triton.config import ExpertsConfig
        from layerzero_triton.experts import moe

        x = torch.randn(tokens, hidden).to(dtype)
        first, second = torch.randn(experts, 2 * inner if gated else inner, hidden), torch.randn(experts, hidden, inner)
        first, second = ((t * given.get("size", 0.2)).to(dtype) for t in (first, second))
        if given.get("transposed"):
            first, second = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (first, second))
        if "fmt" in given:
            import layerzero as lz

            first, second = (lz.quantize(t, given["fmt"], **given["scales"]) for t in (first, second))
        biases = (None, None)
        if given.get("bias"):
            biases = (torch.randn(experts, first.shape[1]).to(dtype), torch.randn(experts, hidden).to(dtype))
        offset = experts if given.get("foreign") else 0
        ids = torch.rand(tokens, 3 * experts if offset else experts).topk(3, -1).indices
        ids[:1] = -1 if offset else 2  # a token of no expert, or one that names an expert three times
        limit, interleaved = given.get("limit"), given.get("interleaved", False)
        args = (x, first, second, torch.rand(tokens, 3), ids, activation, offset, *biases, 1.702, limit, interleaved)
        tiles = (32, 32, 4, 1), (16, 32 if "fmt" in given else 16, 4, 1)
        got = moe(*args, config=ExpertsConfig(given.get("height", 16), *tiles))
        return differs("moe", got, truth(*args), dtype)


experts_case("gated")
experts_case("ungated, of other ranks", gated=False, activation="relu", foreign=True, dtype=F16)
experts_case("of gpt-oss", activation="swigluoai", bias=True, limit=0.5, interleaved=True, transposed=True)
experts_case("of many tokens", tokens=100, experts=5, hidden=32, inner=16, foreign=True)
experts_case("of high tiles, some at most half full", tokens=200, experts=4, hidden=32, height=128, interleaved=True)
experts_case("without tokens", tokens=0)
experts_case("in MXFP4", hidden=96, inner=64, fmt="mxfp4", scales={}, size=0.05)
of_gpt_oss = {"activation": "swigluoai", "bias": True, "limit": 0.5, "interleaved": True}
experts_case("of gpt-oss in MXFP4", hidden=96, inner=32, fmt="mxfp4", scales={}, size=0.05, **of_gpt_oss)
experts_case("in INT8", fmt="int8", scales={"granularity": "channel"}, dtype=F16)
blocks = {"granularity": "block", "block_size": 32}
experts_case("in FP8 blocks", hidden=64, inner=64, fmt="fp8_e4m3", scales=blocks, size=0.05)
linear_case("e5m2 block, split", "fp8_e5m2", "block", block_size=32, splits=2, activation="relu")


@case("a feed-forward block of such layers")
def fixed_mlp():
    from layerzero.backends.reference.feed_forward import mlp as truth
    from layerzero_triton.experts import fixed_mlp

    up, gate, down = torch.randn(24, 32) * 0.2, torch.randn(24, 32) * 0.2, torch.randn(32, 24) * 0.2
    x, bias = torch.randn(3, 32), torch.randn(24)
    calls = [(up, down, gate, "silu", None, bias, None), (up, down, None, "relu", bias, None, None)]
    calls += [(torch.cat([gate, up]), down, None, "gelu_tanh", None, None, None)]
    return next((bad for args in calls if (bad := differs("mlp", fixed_mlp(x, *args), truth(x, *args)))), None)


@case("attention of queries that are sequences of their own")
def fixed_attention():
    from layerzero.backends.reference.attention import attention as truth
    from layerzero_triton.paged import fixed_attention

    q, k, v = torch.randn(2, 4, 4, 32), torch.randn(2, 5, 2, 32), torch.randn(2, 5, 2, 32)
    for causal in ("bottom_right", True, False):
        rest = (None, 0.0, causal, None, None, None, None, True)
        few = q[:, :3]
        (got, lse), want = fixed_attention(few, k, v, *rest), truth(*(x.transpose(1, 2) for x in (few, k, v)), *rest)
        wrong = differs("attention", (got.transpose(1, 2), lse), want)
        if wrong:
            return wrong
    rest = (None, 0.0, "bottom_right", None, None, None, None, False)
    whole = fixed_attention(q, k[:, :4], v[:, :4], *rest)
    piece = fixed_attention(q[1:, 1:3], k[1:, :3], v[1:, :3], *rest)
    return None if torch.equal(whole[1:, 1:3], piece) else "a piece of a prompt has other bits than the whole"


@case("a linear layer as one expert")
def fixed_linear():
    from layerzero.backends.reference.feed_forward import linear as truth
    from layerzero_triton.experts import fixed_linear

    weight, bias = torch.randn(40, 48) * 0.2, torch.randn(40)
    for rows, activation in ((1, None), (3, "silu"), (70, "gelu_tanh")):
        x = torch.randn(2, rows, 48)
        got, alone = (fixed_linear(given, weight, bias, activation) for given in (x, x[1:, -1]))
        wrong = differs("linear", got, truth(x, weight, bias, activation))
        if wrong or not torch.equal(got[1:, -1], alone):
            return wrong or "the last row has other bits than alone"
    return None


@case("plans are kept for a shape, not for what the tensors hold")
def planned():
    import layerzero as lz
    from layerzero.backends.reference import norm as true_norm
    from layerzero.backends.reference import positional as true_rope
    from layerzero.backends.reference.feed_forward import linear as true_linear
    from layerzero.backends.reference.varlen import paged_attention as true_paged
    from layerzero.model.kv_cache import make_paged_batch
    from layerzero_triton import config, layer_norm, linear, paged, rope

    wrong = []
    for turn in range(3):  # the third one asks for something else in the same shapes
        last = turn == 2
        k, v, q = torch.randn(8, 4, 2, 16), torch.randn(8, 4, 2, 16), torch.randn(2, 4, 16)
        batch = make_paged_batch(torch.randperm(8).view(2, 4).int(), torch.tensor((15, 3 + turn)).int())
        rest = (0.5 if last else None, (4, 0) if last else None, None, None, last, "NHD")
        got = paged.paged_attention(q, k, v, batch, *rest, config=config.PagedConfig(16, 16, 1 if last else 2))
        wrong.append(differs("attention", got, true_paged(q, k, v, batch, *rest)))
        x, y, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(5, 4), torch.randn(5, 4)
        rest = (last, "BHSD", torch.tensor([turn, 1, 2]) if turn else None, False)
        want = true_rope.rope(x, y, cos, sin, *rest)
        wrong.append(differs("rope", rope.rope(x, None if last else y, cos, sin, *rest)[:1], want[:1]))
        kept = x.clone()
        rope.rope(kept, None, cos, sin, *rest[:3], True)
        wrong.append(differs("rope", kept, want[0]))
        weight = lz.quantize(torch.randn(20, 64), "int8", granularity="channel")
        given, bias = torch.randn(3, 64), None if last else torch.randn(20)
        made = linear.dequantized(given, weight, bias, "silu" if last else None)
        wrong.append(
            differs(
                "linear",
                made,
                true_linear(given.double(), weight, None if last else bias.double(), "silu" if last else None),
                F16,
            )
        )
        rows, w, b = torch.randn(3, 20) + turn, torch.randn(20), None if last else torch.randn(20)
        eps = 1e-2 if turn else 1e-5
        wrong.append(
            differs("layer_norm", layer_norm.layer_norm(rows, w, b, eps), true_norm.layer_norm(rows, w, b, eps))
        )
    return next((item for item in wrong if item), None)


@pytest.fixture(scope="module")
def found():
    return lab.answers(__file__)


@pytest.mark.parametrize("name", cases)
@pytest.mark.req("R-BK-TR-01")
def test_the_kernel_gives_what_the_reference_gives(found, name):
    assert found[name] is None


if __name__ == "__main__":
    cases.tell()
