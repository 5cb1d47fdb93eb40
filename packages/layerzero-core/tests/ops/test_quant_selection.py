"""Hardware, formats and scales of quantized weights as rules of selection."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.model.context import Context
from layerzero.model.enums import QuantFormat
from layerzero.model.quant import FORMATS, QuantScheme, native_reason
from layerzero_cli.root import cli
from tools.pytest_fixtures import module_beside

made = module_beside(__file__, "quant_lab")
NEON, draw, weight_of = made.NEON, made.draw, made.weight_of

FIRST = {"int8": "a100", "int4": "a100", "fp8_e4m3": "l4", "fp8_e5m2": "l4", "mxfp4": "b200", "nvfp4": "b200"}
AGES = ("v100", "t4", "a100", "a10", "l4", "h100", "h200", "b200", "b300", "thor", "rtx5090", "gb10")


@pytest.mark.req("R-QUANT-02")
@pytest.mark.parametrize("device", AGES)
@pytest.mark.parametrize("fmt", FIRST)
def test_formats_begin_with_the_generation_that_computes_in_them(fmt, device):
    """INT8 from Ampere, FP8 from SM89 (Ada; attention kernels ask for Hopper themselves), FP4 from Blackwell."""
    spec = named_device(device)
    why = native_reason(fmt, spec)
    assert (why is None) == (spec.sm_version >= named_device(FIRST[fmt]).sm_version)
    if why is not None:
        assert why.code == ("FP8_UNSUPPORTED" if fmt.startswith("fp8") else "SM_TOO_OLD")
        assert (why.value, why.limit) == (spec.sm_version, FORMATS[QuantFormat(fmt)].min_sm)


def test_no_gpu_computes_in_nf4_and_other_machines_are_not_judged():
    assert native_reason("nf4", named_device("b200")).code == "GENERATION_UNSUPPORTED"
    for device in ("mi300x", "zen4", "apple-m3", "neoverse-n1"):
        assert native_reason("mxfp4", named_device(device)) is None


def context(device, fmt, act=True, **fields):
    needs = frozenset({"act_dynamic" if act else "weight_only"})
    dims = {"rows": 64, "n": 128, "k": 128, **fields.pop("dims", {})}
    given = {"dtype": "bfloat16", "quant_format": fmt, "granularity": "channel", **fields}
    return Context(op="linear", device=named_device(device), dims=tuple(dims.items()), needs=needs, rank=2, **given)


@pytest.mark.req("R-QUANT-02", "R-QUANT-03")
@pytest.mark.parametrize(
    ("device", "fmt", "chosen"),
    [
        ("t4", "int8", "torch.linear.dequantized"),
        ("a100", "int8", "torch.linear.int8_dynamic"),
        ("a100", "fp8_e4m3", "torch.linear.dequantized"),
        ("l4", "fp8_e4m3", "torch.linear.fp8_scaled"),
        ("h100", "fp8_e4m3", "torch.linear.fp8_rowwise"),
        ("h200", "int8", "torch.linear.int8_dynamic"),
        ("b200", "fp8_e4m3", "torch.linear.fp8_rowwise"),
        ("h100", "mxfp4", "torch.linear.dequantized"),
        ("zen4", "int8", "torch.linear.int8_dynamic_cpu"),
        ("neoverse-n1", "int8", "torch.linear.dequantized"),
    ],
)
def test_the_kernel_is_chosen_by_format_and_device(lab, device, fmt, chosen):
    granularity = "block" if fmt == "mxfp4" else "channel"
    dtype = "float32" if device == "t4" else "bfloat16"
    dims = {"block": 32} if fmt == "mxfp4" else {}
    assert lz.select("linear", context(device, fmt, granularity=granularity, dtype=dtype, dims=dims)).chosen == chosen


@pytest.mark.req("R-QUANT-02", "R-QUANT-03", "R-QUANT-04", "R-QUANT-05")
def test_a_kernel_is_refused_with_the_reason_that_fits(lab):
    lab.use(
        lab.kernel(
            "fp.linear.four", dtypes=frozenset({"bfloat16"}), platforms=frozenset({"cuda"}), grid_layout="library",
            quant_formats=frozenset({"mxfp4", "nvfp4", "fp8_e4m3"}), granularities=frozenset({"block"}),
            features=frozenset({"act_dynamic", "quant_native"}),
        ),
    )  # fmt: skip

    def reasons(ctx):
        return {item.code.value for item in lz.validate("fp.linear.four", ctx)}

    assert reasons(context("b200", "mxfp4", granularity="block")) == set()
    assert reasons(context("h100", "mxfp4", granularity="block")) == {"SM_TOO_OLD"}
    assert reasons(context("a100", "fp8_e4m3", granularity="block")) == {"FP8_UNSUPPORTED"}
    assert reasons(context("h100", "fp8_e4m3", granularity="block")) == set()
    assert reasons(context("b200", "int8", granularity="block")) == {"QUANT_FORMAT_UNSUPPORTED"}
    assert reasons(context("b200", "nvfp4", granularity="channel")) == {"QUANT_GRANULARITY_UNSUPPORTED"}
    assert reasons(context("b200", "nvfp4", act=False, granularity="block")) == {"FEATURE_UNSUPPORTED"}
    dense = Context(op="linear", device=named_device("b200"), dtype="bfloat16", dims=(("rows", 4),), rank=2)
    assert reasons(dense) == {"QUANT_FORMAT_UNSUPPORTED"}


@pytest.mark.req("R-QUANT-04")
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_every_op_on_codes_has_their_granularity_in_its_context(granularity):
    options = {"granularity": granularity, **({"block_size": 32} if granularity == "block" else {})}
    x, weight = draw(2, 64), draw(64, 64, seed=1)
    experts = [lz.quantize(draw(3, n, 64, seed=n), "int8", **options) for n in (128, 64)]
    routed = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    qt = lz.quantize(weight, "int8", **options)
    calls = {
        "quantize": ((weight, "int8"), options),
        "dequantize": ((qt,), {}),
        "linear": ((x, qt), {}),
        "moe": ((x, *experts, *routed), {}),
    }
    for op, (args, words) in calls.items():
        ctx = lz.explain(op, *args, **words).context
        assert (ctx.quant_format, ctx.granularity, ctx.dim("block")) == ("int8", granularity, options.get("block_size"))


@pytest.mark.req("R-QUANT-04")
@pytest.mark.parametrize(("first", "then"), [("channel", "tensor"), ("tensor", "channel"), ("channel", "block")])
def test_a_hot_call_with_scales_of_one_granularity_does_not_serve_those_of_another(lab, first, then):
    lab.use(lab.kernel("picky.linear.k", priority=99, quant_formats=frozenset({"int8"}),
                       granularities=frozenset({first}), features=frozenset({"weight_only"})))  # fmt: skip
    x, weight = draw(3, 128), draw(16, 128, seed=1)
    kept = {name: lz.quantize(weight, "int8", granularity=name) for name in (first, then)}
    for _ in range(3):
        assert lab.run(lz.linear, x, kept[first])[1] == ["picky.linear.k"]
        assert "picky.linear.k" not in lab.run(lz.linear, x, kept[then])[1]


@pytest.mark.req("R-QUANT-03", "R-QUANT-04", "R-QUANT-05", "R-CTX-13")
def test_format_granularity_and_packing_stand_in_the_context_and_in_the_reasons():
    qt = weight_of("int4", block_size=16, symmetric=False)
    x = draw(1, 64)
    ctx = lz.explain("linear", x, qt).context
    assert (ctx.quant_format, ctx.granularity, ctx.weight_layout) == ("int4", "block", None)
    assert ctx.dim("block") == 16 and {"weight_only", "zero_point"} <= ctx.needs
    assert '"int4"' in str(lz.explain("linear", x, qt).to_json()).replace("'", '"')
    why = {item.code.value: item for item in lz.validate("torch.linear.int4_tiles", x, qt)}
    if NEON:
        assert why["QUANT_SCALE_LAYOUT"].value == "block=16" and why["QUANT_SCALE_LAYOUT"].limit == "32, 64, 128, 256"
        assert why["WEIGHT_NOT_PACKED"].limit == "int4_tiles" and "pack_weight" in why["WEIGHT_NOT_PACKED"].hint
    else:  # hardware comes first, and nothing else is said then
        assert set(why) == {"CPU_FEATURE_MISSING"} and "neon" in str(why["CPU_FEATURE_MISSING"])
    assert {i.code.value for i in lz.validate("torch.linear.native", x, qt)} >= {"QUANT_FORMAT_UNSUPPORTED"}
    scheme = QuantScheme("int4", "block", 16, False)
    assert (
        lz.explain("quantize", draw(2, 64), "int4", granularity="block", block_size=16, symmetric=False).context.dim(
            "block"
        )
        == scheme.block_size
    )


@pytest.mark.usefixtures("built_in")
def test_the_command_line_asks_about_quantized_weights_on_any_device():
    def chosen(*words):
        result = CliRunner().invoke(cli, ["which", "linear", "--weight", "64,128", "--dtype", "bf16", *words])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    few, many = ("--shape", "2,128"), ("--shape", "64,128")
    assert chosen(*few, "--format", "int8", "--device", "zen4") == "torch.linear.int8_rows"
    assert chosen(*many, "--format", "int8", "--device", "zen4") == "torch.linear.dequantized"
    assert chosen(*many, "--format", "nvfp4", "--device", "h100") == "torch.linear.dequantized"
    assert chosen(*many, "--device", "h100") == "torch.linear.native"


@pytest.mark.usefixtures("built_in")
def test_plain_weights_never_meet_a_kernel_for_codes():
    accepted = [c.kernel_id for c in lz.explain("linear", draw(1, 64), draw(16, 64)).decision.candidates if c.accepted]
    assert set(accepted) == {"torch.linear.native", "reference.linear.plain"}
