"""The values everything is built from: reasons, errors, enums, kernel and op specs, contexts, decisions."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero import errors, model
from layerzero.errors import ConfigurationError, InvalidInputError, LayerZeroError
from layerzero.model.config import Condition, Policy, Rule
from layerzero.model.context import Context, SelectionContext, Strides, TokenizerIdentity
from layerzero.model.decision import SHIPPED, Bucket, Candidate, Decision, ExecutionPlan, Expectation, Transform
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import (
    Causal,
    GPUGeneration,
    InstructionFamily,
    Layout,
    MaskKind,
    OpKind,
    Platform,
)
from layerzero.model.formula import Formula
from layerzero.model.kernel import BackendSpec, KernelSpec, Limit
from layerzero.model.op import Op, OperationSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.reasons import Reason, ReasonCategory, ReasonCode, reason
from layerzero.runtime.current import builtin_ops
from layerzero_verify.testing.fakes import cpu, gpu


def kernel(**given: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "kernel_id": "b.attention.k", "op": "attention", "backend": "b", "function": "m:f",
        "platforms": frozenset({Platform.CPU, Platform.CUDA}), "dtypes": frozenset({"float16", "float32"}),
        "grid_layout": "library",
    }  # fmt: skip
    return KernelSpec(**(fields | given))


def context(**given: Any) -> Context:
    fields: dict[str, Any] = {
        "op": "attention", "dtype": "float16", "device": gpu(90),
        "dims": (
            ("batch", 2), ("num_heads", 8), ("num_kv_heads", 8), ("seq_len_q", 64), ("seq_len_k", 64),
            ("head_dim", 128),
        ),
    }  # fmt: skip
    return Context(**(fields | given))


def codes(found: list[Reason]) -> set[str]:
    return {item.code.value for item in found}


# -- reasons ---------------------------------------------------------------------------------------
@pytest.mark.req("R-CORE-01")
def test_there_are_at_least_eighty_codes_whose_value_is_their_name() -> None:
    values = [code.value for code in ReasonCode]
    assert len(values) >= 80 and len(set(values)) == len(values)
    assert all(code.name == code.value for code in ReasonCode)


@pytest.mark.req("R-CORE-01")
def test_no_code_that_was_ever_written_to_a_file_changes_its_name() -> None:
    """Lock files, logs and tables of earlier versions hold these words: new ones are added to the list, none leaves."""
    kept = (Path(__file__).parent / "reason_codes.txt").read_text(encoding="utf-8").split()
    assert sorted(kept) == sorted(code.value for code in ReasonCode)
    for word in kept:
        assert Reason.from_json({"code": word, "message": "m"}).to_json()["code"] == word


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)


@pytest.mark.req("R-CORE-02")
@given(st.sampled_from(ReasonCode), st.text(max_size=40), plain, plain, st.text(max_size=20))
def test_a_reason_survives_json(code: ReasonCode, message: str, value: Any, limit: Any, hint: str) -> None:
    item = Reason(code, message, value, limit, hint)
    again = Reason.from_json(json.loads(json.dumps(item.to_json())))
    assert again == item and repr(again) == repr(item), "1, 1.0 and True are equal, but not the same value"


@pytest.mark.req("R-CORE-02")
@pytest.mark.parametrize(
    "given",
    [(1, 2), ["a", None], frozenset({"a"}), {3}, Layout.NHD, ReasonCode.NO_KERNEL, torch.float16, {"a": 1}, b"x",
     ValueError("bad"), float("inf"), True, 1, 1.0],
    ids=repr,
)  # fmt: skip
def test_a_reason_made_of_anything_that_meets_a_limit_survives_json(given: Any) -> None:
    """JSON knows no tuples, sets, enums or dtypes: a reason must not hold one."""
    item = reason("DTYPE_UNSUPPORTED", given, given, detail="so it is")
    again = Reason.from_json(json.loads(json.dumps(item.to_json())))
    assert again == item and (again.value, again.limit, again.hint) == (item.value, item.limit, item.hint)
    assert [type(x) for x in (again.code, again.value, again.limit)] == [
        type(x) for x in (item.code, item.value, item.limit)
    ]
    assert again.category is item.category and str(again) == str(item)


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match="NO_SUCH_CODE"):
        Reason.from_json({"code": "NO_SUCH_CODE", "message": ""})


@pytest.mark.req("R-CORE-03")
def test_every_category_has_a_code() -> None:
    used = {reason(code, "v", "l").category for code in ReasonCode}
    assert used == set(ReasonCategory)
    wanted = {
        "stride": "STRIDE_LAST_DIM", "mask": "MASK_UNSUPPORTED", "gqa": "GQA_UNSUPPORTED",
        "head_dim": "HEAD_DIM_TOO_LARGE", "tokenizer": "TOKENIZER_HASH_MISMATCH", "backend": "BACKEND_IMPORT_FAILED",
        "hardware": "SM_TOO_OLD", "dtype": "DTYPE_UNSUPPORTED", "shape": "SHAPE_INVALID",
    }  # fmt: skip
    assert {reason(code, "v", "l").category.value: code for code in wanted.values()} == wanted


@pytest.mark.req("R-CORE-04")
@pytest.mark.parametrize("code", list(ReasonCode))
def test_every_code_speaks_to_a_person(code: ReasonCode) -> None:
    item = reason(code, "the value", "the limit")
    assert len(item.message) > 8 and "{" not in item.message + item.hint
    assert str(item) == f"{code.value}: {item.message}"


@pytest.mark.req("R-CORE-05", "R-CORE-06")
def test_the_named_codes_exist() -> None:
    named = {
        "PLATFORM_MISMATCH", "SM_TOO_OLD", "DTYPE_UNSUPPORTED", "HEAD_DIM_INVALID", "CUDA_GRAPH_UNSAFE",
        "CUDA_BLOCK_LIMIT_EXCEEDED", "TP_INVARIANCE_REQUIRED", "HEAD_DIM_TOO_LARGE", "MEMORY_HEADROOM_EXCEEDED",
        "PLAN_BUCKET_MISS",
    }  # fmt: skip
    assert named <= {code.value for code in ReasonCode}


def test_a_reason_shows_collections_in_a_stable_order() -> None:
    assert reason("DTYPE_UNSUPPORTED", "int8", frozenset({"b", "a"})).limit == "a, b"
    assert reason("LAYOUT_UNSUPPORTED", Layout.NHD, [Layout.BHSD]).message == "layout NHD is not among BHSD"


# -- enums -----------------------------------------------------------------------------------------
@pytest.mark.req("R-CORE-07")
def test_generations_are_ordered_by_age() -> None:
    order = [GPUGeneration[name] for name in ("TURING", "AMPERE", "ADA_LOVELACE", "HOPPER", "BLACKWELL")]
    assert order == sorted(order) and GPUGeneration.UNKNOWN < order[0]


@pytest.mark.req("R-CORE-08", "R-CORE-09", "R-CORE-10")
def test_the_words_of_the_field() -> None:
    assert [kind.value for kind in OpKind] == ["tensor", "tokenization", "sampling"]
    assert [layout.value for layout in Layout] == ["BHSD", "BSHD", "NHD", "HND"]
    assert [mask.value for mask in MaskKind] == ["none", "bool", "float"]
    assert {"cpu", "cuda", "rocm", "mps", "xpu", "hpu"} <= {platform.value for platform in Platform}
    assert {"mma", "wgmma", "tcgen05", "amx"} <= {family.value for family in InstructionFamily}


# -- errors ----------------------------------------------------------------------------------------
TREE = {
    "R-EXC-02": errors.NoKernelFoundError,
    "R-EXC-03": errors.CudaGraphUnsafeError,
    "R-EXC-04": errors.KernelExecutionError,
    "R-EXC-05": errors.PolicyValidationError,
    "R-EXC-06": errors.BackendNotAvailableError,
    "R-EXC-07": errors.ConfigurationError,
    "R-EXC-08": errors.SelectionTimeoutError,
    "R-EXC-09": errors.CacheCorruptionError,
}


@pytest.mark.req("R-EXC-01", *TREE)
def test_every_error_is_ours_and_carries_a_code() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        raised = kind("something happened")
        if issubclass(kind, Warning):
            continue
        assert isinstance(raised, LayerZeroError) and isinstance(raised.code, ReasonCode)
        assert raised.reasons[0].code is raised.code
        assert f"[{raised.code.value}]" in str(raised) and "something happened" in str(raised)
    assert set(TREE.values()) <= {getattr(errors, name) for name in errors.__all__}


def test_errors_are_what_callers_already_catch() -> None:
    assert issubclass(errors.InvalidInputError, ValueError)
    assert issubclass(errors.UnknownNameError, LookupError)
    assert issubclass(errors.SelectionTimeoutError, TimeoutError)
    assert issubclass(errors.PolicyValidationError, errors.ConfigurationError)
    assert issubclass(errors.LockedKernelError, errors.NoKernelFoundError)


def test_an_error_takes_its_code_from_its_reasons() -> None:
    found = (reason("SM_TOO_OLD", 75, 80), reason("DTYPE_UNSUPPORTED", "int8", "float16"))
    raised = errors.NoKernelFoundError(reasons=found)
    assert raised.code == "SM_TOO_OLD" and raised.reasons == found and "use a newer GPU" in str(raised)


def test_a_policy_error_points_at_line_and_key() -> None:
    raised = errors.PolicyValidationError("wrong", line=7, key="locks.attention")
    assert (raised.line, raised.key) == (7, "locks.attention")


# -- ops -------------------------------------------------------------------------------------------
def op(**given: Any) -> OperationSpec:
    fields: dict[str, Any] = {
        "op_id": "my_op", "op_kind": OpKind.TENSOR, "arguments": ("x",), "input_kinds": ("tensor",),
        "output_kind": "tensor", "fallback_impl": lambda x: x,
    }  # fmt: skip
    return OperationSpec(**(fields | given))


@pytest.mark.req("R-CORE-11", "R-CORE-12", "R-CORE-24")
@pytest.mark.parametrize(
    "given",
    [
        {"op_id": ""},
        {"op_id": "rm -rf"},
        {"input_kinds": ()},
        {"input_kinds": (), "arguments": ()},
        {"output_kind": ""},
        {"input_kinds": ("tensor", "tensor")},
        {"output_kind": "ids"},
        {"op_kind": OpKind.SAMPLING},
        {"op_kind": OpKind.TOKENIZATION, "output_kind": "tensor"},
        {"fallback_impl": None},
        {"fallback_impl": "not callable"},
    ],
)
def test_an_op_that_contradicts_itself_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        op(**given)


@pytest.mark.req("R-CORE-11", "R-CORE-12")
def test_an_op_may_do_without_a_fallback_only_when_it_says_so() -> None:
    assert op(has_fallback=False, fallback_impl=None).to_json()["has_fallback"] is False
    for missing in ("op_id", "op_kind", "input_kinds", "output_kind"):
        given = {
            "op_id": "a",
            "op_kind": OpKind.TENSOR,
            "arguments": ("x",),
            "input_kinds": ("tensor",),
            "output_kind": "tensor",
        }
        del given[missing]
        with pytest.raises(TypeError):
            OperationSpec(**given)  # type: ignore[arg-type]


# -- kernels ---------------------------------------------------------------------------------------
@pytest.mark.req("R-CORE-13")
def test_a_kernel_spec_is_a_frozen_value() -> None:
    spec = kernel()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.priority = 5.0  # type: ignore[misc]
    assert spec == kernel() and hash(spec) == hash(kernel()) and spec != kernel(priority=1.0)


@pytest.mark.req("R-CORE-24", "R-CORE-16")
@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"kernel_id": "attention"}, "KERNEL_ID_INVALID"),
        ({"kernel_id": "b.rms_norm.k"}, "KERNEL_ID_INVALID"),
        ({"kernel_id": "b.attention.K!"}, "KERNEL_ID_INVALID"),
        ({"platforms": frozenset()}, "SCHEMA_FIELD_MISSING"),
        ({"dtypes": frozenset()}, "SCHEMA_FIELD_MISSING"),
        ({"function": "m"}, "SCHEMA_INVALID"),
        ({"grid_layout": None}, "SCHEMA_FIELD_MISSING"),
    ],
)
def test_a_kernel_without_what_it_needs_is_refused(given: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kernel(**given)
    assert caught.value.code == code


@pytest.mark.req("R-CORE-16")
def test_only_cuda_kernels_need_a_grid() -> None:
    assert kernel(platforms=frozenset({Platform.CPU}), grid_layout=None).grid_layout is None


@pytest.mark.req("R-CORE-14")
def test_workspace_is_computed_from_the_context() -> None:
    spec = kernel(workspace=Formula("batch * num_heads * ceil(seq_len_q / 100) * 4"))
    assert spec.workspace_bytes(context()) == 2 * 8 * 1 * 4
    whole = {"seq_len_q / 3": 22, "head_dim * 0.51": 66, "2.0": 2, "0 - batch": 0, "1 / (batch - 2)": 0}
    for text, wanted in whole.items():
        found = kernel(workspace=Formula(text)).workspace_bytes(context())
        assert (type(found), found) == (int, wanted), text
    assert kernel().workspace_bytes(context()) == 0


@pytest.mark.req("R-CORE-15")
@pytest.mark.parametrize(
    ("spec", "ctx", "expected"),
    [
        ({}, {}, set()),
        ({}, {"device": DeviceSpec(Platform.MPS, "mps")}, {"PLATFORM_MISMATCH"}),
        ({"min_sm": 100}, {}, {"SM_TOO_OLD"}),
        ({"max_sm": 89}, {}, {"SM_TOO_NEW"}),
        ({"min_sm": 80}, {"device": DeviceSpec(Platform.CUDA, "cuda", name="?")}, {"SM_UNKNOWN"}),
        ({"instruction_families": frozenset({InstructionFamily.TCGEN05})}, {}, {"INSTRUCTION_FAMILY_MISSING"}),
        ({"cpu_features": frozenset({"amx_tile"})}, {"device": cpu("avx2")}, {"CPU_FEATURE_MISSING"}),
        ({}, {"dtype": "bfloat16"}, {"DTYPE_UNSUPPORTED"}),
        ({"dtypes": frozenset({"bfloat16"})}, {"dtype": "bfloat16", "device": gpu(75)}, {"BF16_UNSUPPORTED"}),
        ({}, {"dtypes": ("float16", "float32")}, {"DTYPE_MIXED"}),
        ({"limits": (("head_dim", Limit(max=64)),)}, {}, {"HEAD_DIM_TOO_LARGE"}),
        ({"limits": (("head_dim", Limit(min=256)),)}, {}, {"HEAD_DIM_TOO_SMALL"}),
        ({"limits": (("head_dim", Limit(multiple_of=96)),)}, {}, {"HEAD_DIM_NOT_MULTIPLE"}),
        ({"limits": (("head_dim", Limit(one_of=frozenset({64})),),)}, {}, {"HEAD_DIM_INVALID"}),
        ({"limits": (("seq_len_k", Limit(max=32)),)}, {}, {"SEQ_LEN_TOO_LONG"}),
        ({"limits": (("batch_heads", Limit(max=15)),)}, {}, {"CUDA_BLOCK_LIMIT_EXCEEDED"}),
        ({"grid_layout": (Formula("1"), Formula("batch * 99999"), Formula("1"))}, {}, {"CUDA_BLOCK_LIMIT_EXCEEDED"}),
        ({}, {"needs": frozenset({"gqa"})}, {"GQA_UNSUPPORTED"}),
        ({"features": frozenset({"gqa"})}, {"needs": frozenset({"gqa"})}, set()),
        ({}, {"needs": frozenset({"mask_bool", "backward"})}, {"MASK_UNSUPPORTED", "BACKWARD_UNSUPPORTED"}),
        ({}, {"needs": frozenset({"a_third_partys_own"})}, {"FEATURE_UNSUPPORTED"}),
        ({"layouts": frozenset({Layout.BSHD})}, {"layout": Layout.BHSD}, {"LAYOUT_UNSUPPORTED"}),
        ({"stride_last_dim": 1}, {"strides": Strides(last=2)}, {"STRIDE_LAST_DIM"}),
        ({"contiguous": True}, {"strides": Strides(order="other")}, {"NOT_CONTIGUOUS"}),
        ({"aligned_strides": True}, {"strides": Strides(aligned=False)}, {"STRIDE_UNALIGNED"}),
        ({}, {"capturing": True}, {"CUDA_GRAPH_UNSAFE"}),
        ({"graph_safe": True}, {"capturing": True}, set()),
        ({}, {"deterministic": True}, {"NOT_DETERMINISTIC"}),
        ({}, {"quant_format": "int8"}, {"QUANT_FORMAT_UNSUPPORTED"}),
        ({"square": True}, {"seq_relation": "longer_k"}, {"SEQ_LEN_MISMATCH"}),
    ],
)  # fmt: skip
def test_check_lists_every_reason(spec: dict[str, Any], ctx: dict[str, Any], expected: set[str]) -> None:
    found = kernel(**spec).check(context(**ctx))
    assert isinstance(found, list) and codes(found) == expected


@pytest.mark.req("R-CORE-15")
def test_check_gives_all_reasons_not_just_the_first() -> None:
    spec = kernel(limits=(("head_dim", Limit(max=64)),), stride_last_dim=1)
    ctx = context(dtype="int8", needs=frozenset({"dropout"}), strides=Strides(last=3))
    assert codes(spec.check(ctx)) == {
        "DTYPE_UNSUPPORTED",
        "HEAD_DIM_TOO_LARGE",
        "DROPOUT_UNSUPPORTED",
        "STRIDE_LAST_DIM",
    }


@pytest.mark.req("R-CORE-17")
def test_a_launch_is_compared_with_the_devices_limits() -> None:
    spec = kernel()
    assert spec.validate_launch_config(gpu(90), (1, 65535, 65535), (1024, 1, 1)) == []
    assert codes(spec.validate_launch_config(gpu(90), (1, 65536, 1))) == {"CUDA_BLOCK_LIMIT_EXCEEDED"}
    assert codes(spec.validate_launch_config(gpu(90), (1, 1, 1), (32, 64, 1))) == {"LAUNCH_CONFIG_INVALID"}
    assert codes(spec.validate_launch_config(gpu(90), (0, 1, 1))) == {"LAUNCH_CONFIG_INVALID"}


@pytest.mark.req("R-CORE-17")
@pytest.mark.parametrize(
    ("grid", "block", "code", "limit"),
    [
        ((2**31 - 1, 65535, 65535), (1024,), None, None),
        ((2**31, 1, 1), (1,), "CUDA_BLOCK_LIMIT_EXCEEDED", 2**31 - 1),
        ((1, 65536, 1), (1,), "CUDA_BLOCK_LIMIT_EXCEEDED", 65535),
        ((1, 1, 65536), (1,), "CUDA_BLOCK_LIMIT_EXCEEDED", 65535),
        ((1, 0, 1), (1,), "LAUNCH_CONFIG_INVALID", "at least 1 in every axis"),
        ((1, 1, 1), (8, 0, 1), "LAUNCH_CONFIG_INVALID", "at least 1 in every axis"),
        ((1, 1, 1), (1025,), "LAUNCH_CONFIG_INVALID", 1024),
        ((1, 1, 1), (1, 1024, 1), None, None),
        ((1, 1, 1), (16, 1, 64), None, None),
        ((1, 1, 1), (1, 1, 65), "LAUNCH_CONFIG_INVALID", 64),
    ],
)
def test_each_axis_of_a_launch_has_the_limit_that_cuda_gives_it(
    grid: tuple[int, ...], block: tuple[int, ...], code: str | None, limit: Any
) -> None:
    found = kernel().validate_launch_config(gpu(90), grid, block)
    assert [(item.code.value, item.limit) for item in found] == ([] if code is None else [(code, limit)])


@pytest.mark.req("R-CORE-18")
def test_a_kernel_names_its_generations() -> None:
    assert get_type_hints(KernelSpec)["supported_generations"] == frozenset[GPUGeneration]
    assert kernel().supported_generations == frozenset(), "one that names none runs on all"
    assert all(kernel().check(context(device=gpu(sm))) == [] for sm in (75, 80, 89, 90, 100))
    spec = kernel(supported_generations=frozenset({GPUGeneration.HOPPER}))
    assert spec.check(context(device=gpu(90))) == []
    assert codes(spec.check(context(device=gpu(100)))) == {"GENERATION_UNSUPPORTED"}


@pytest.mark.req("R-CORE-19")
def test_a_backend_spec_needs_a_name() -> None:
    assert BackendSpec("b", version="1", vendor_version="2").to_json()["vendor_version"] == "2"
    with pytest.raises(ConfigurationError):
        BackendSpec("")


def test_a_limit_that_allows_nothing_is_refused() -> None:
    for bounds in ({"min": 3, "max": 2}, {"multiple_of": 0}):
        with pytest.raises(ConfigurationError):
            Limit(**bounds)


@pytest.mark.parametrize(
    "text", ["", "a.b", "x()", "__import__('os')", "a if b else c", "'x'", "True", "[1]", "1;2", "x" * 500, "(" * 300]
)
def test_a_formula_is_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises(errors.CapabilitiesError):
        Formula(text)


def test_a_formula_rounds_up_and_survives_a_zero_divisor() -> None:
    assert Formula("7 / 2")(lambda _: 0) == 4
    assert Formula("1 / batch")(lambda _: 0) == 0
    assert Formula("min(a, 3) + max(b, 1)").names() == {"a", "b"}


# -- contexts --------------------------------------------------------------------------------------
@pytest.mark.req("R-CORE-22")
def test_a_context_is_made_from_tensors() -> None:
    assert SelectionContext is Context
    q, k = torch.zeros(2, 8, 16, 64, dtype=torch.float16), torch.zeros(2, 2, 32, 64, dtype=torch.float16)
    ctx = Context.from_tensors(q, k, k, layout="BHSD", tp_size=4, quant_format="int8")
    assert (ctx.dtype, ctx.layout, ctx.quant_format, ctx.tp_size) == ("float16", Layout.BHSD, "int8", 4)
    assert (ctx.batch, ctx.num_heads, ctx.num_kv_heads, ctx.seq_len_q, ctx.seq_len_k, ctx.head_dim) == (
        2,
        8,
        2,
        16,
        32,
        64,
    )
    assert ctx.gqa_ratio == 4 and ctx.enable_gqa


@pytest.mark.req("R-CORE-25")
def test_what_an_op_cannot_do_without_is_asked_for() -> None:
    with pytest.raises(InvalidInputError) as caught:
        Context(op="attention")
    assert caught.value.code == "CONTEXT_FIELD_MISSING" and "head_dim" in str(caught.value)
    with pytest.raises(InvalidInputError) as caught:
        Context(op="tokenize", kind=OpKind.TOKENIZATION)
    assert caught.value.code == "VOCAB_HASH_MISSING"
    with pytest.raises(InvalidInputError) as caught:
        TokenizerIdentity("bpe", "")
    assert caught.value.code == "VOCAB_HASH_MISSING"
    with pytest.raises(InvalidInputError) as caught:
        TokenizerIdentity("", "abc")
    assert caught.value.code == "TOKENIZER_ID_MISSING"


@pytest.mark.req("R-CORE-25")
@pytest.mark.parametrize("name", sorted(name for name in builtin_ops if name.endswith("attention")))
def test_no_attention_op_goes_without_its_head_dims(name: str) -> None:
    own = ("head_dim_ckv", "head_dim_kpe") if name.startswith("mla") else ("head_dim",)
    sizes = dict.fromkeys((*own, "batch", "num_heads", "seq_len_k"), 16)
    assert Context(op=name, dims=tuple(sizes.items())).dim(own[0]) == 16
    for missing in own:
        with pytest.raises(InvalidInputError) as caught:
            Context(op=name, dims=tuple((key, size) for key, size in sizes.items() if key != missing))
        assert caught.value.code == "CONTEXT_FIELD_MISSING" and missing in str(caught.value)


def test_values_that_decide_nothing_are_not_compared() -> None:
    assert context(scale=0.5) == context(scale=0.25) and hash(context(scale=0.5)) == hash(context())
    assert context() != context(causal=Causal.TOP_LEFT)


# -- decisions and json ----------------------------------------------------------------------------
def decision() -> Decision:
    chosen = Candidate("b.attention.k", "b", True, 7.0, 12.5, (), (Transform("layout", 3.0), Transform("cast", 1.5)))
    other = Candidate("c.attention.k", "c", False, reasons=(reason("SM_TOO_OLD", 75, 80),))
    steps = ((chosen.kernel_id, chosen.transforms),)
    return Decision(
        "attention", context(), chosen.kernel_id, (chosen, other), steps, buckets=(Bucket("seq_len_k", 1, 64),)
    )


@pytest.mark.req("R-CORE-23")
def test_an_execution_plan_names_kernel_transforms_and_the_decision_behind_it() -> None:
    made = decision()
    plan = ExecutionPlan.of(made)
    assert (plan.kernel_id, plan.transforms, plan.debug_info) == ("b.attention.k", ["layout", "cast"], made)
    assert made.transform_cost_total == 4.5 and made.ranking == ("b.attention.k",)
    assert made.winner.accepted and made.candidate("c.attention.k").reasons[0].code == "SM_TOO_OLD"


def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


def values() -> set[type]:
    """Every class of values under `layerzero.model` that has a JSON form."""
    modules = [
        importlib.import_module(item.name) for item in pkgutil.iter_modules(model.__path__, f"{model.__name__}.")
    ]
    made = (item for module in modules for item in vars(module).values() if isinstance(item, type))
    return {item for item in made if item.__module__.startswith(model.__name__) and hasattr(item, "to_json")}


def parts(item: Any) -> Iterator[Any]:
    """A value, and the values in its fields."""
    yield item
    inside = item
    if dataclasses.is_dataclass(item):
        inside = [getattr(item, one.name, None) for one in dataclasses.fields(item)]
    for part in inside if isinstance(inside, (list, tuple, frozenset)) else ():
        yield from parts(part)


# What is code, follows from the rest, or is an object of its own beside the value.
UNSHOWN: dict[type, set[str]] = {
    OperationSpec: {"describe", "fallback_impl", "random", "mutates", "autocast", "stands_for"},
    Decision: {"steps"},
    Candidate: {"preferred"},
    BackendSpec: {"generations"},
    Policy: {"levels"},
}


@pytest.mark.req("R-CORE-24")
def test_every_model_dumps_to_json() -> None:
    full = kernel(
        limits=(("head_dim", Limit(min=8, max=64, multiple_of=8, one_of=frozenset({8, 64}))),),
        workspace=Formula("batch"),
        supported_generations=frozenset({GPUGeneration.HOPPER}),
        head_dim_pairs=frozenset({(192, 128)}),
    )
    stub = reason("BACKEND_STUB")
    shipped = Expectation(0.5, 12.0, SHIPPED, "a GPU", "0123abcd", "2.13", (("batch", 2),), 0.5, 0.02)
    deny = Rule("attention", (Condition("head_dim", ">=", 64),), deny=("b.*",), boosts=(("c", 2.0),))
    models: list[Any] = [
        replace(decision(), notes=(stub,), refusal=stub),
        ExecutionPlan.of(decision()),
        context(tokenizer=TokenizerIdentity("bpe", "1f")),
        full,
        op(),
        BackendSpec("b", reasons=(stub,)),
        BackendStatus("b", False, reasons=(stub,)),
        HealthReport("b", True, "fine", 0.0),
        gpu(90),
        stub,
        replace(decision().candidates[0], expected=shipped),
        Policy(rules=(deny,), locks=(("attention", "b.attention.k"),)),
        Op(function=squared, describe=lambda call: context()),
    ]
    assert all(hasattr(item, "to_json") for item in models)
    found = [part for item in models for part in parts(item) if hasattr(part, "to_json")]
    for item in found:
        shown = item.to_json()
        assert json.loads(json.dumps(shown, allow_nan=False)) == shown, "lists, text and numbers, as JSON has them"
        kind = OperationSpec if isinstance(item, Op) else type(item)  # what an op adds to its contract is code
        public = {one.name for one in dataclasses.fields(kind) if not one.name.startswith("_")}
        assert public - UNSHOWN.get(kind, set()) <= set(shown), kind.__name__
    missing = values() - {type(item) for item in found}
    assert not missing, sorted(kind.__name__ for kind in missing)


def test_reasons_and_contexts_travel_between_processes() -> None:
    for value in (reason("SM_TOO_OLD", 75, 80), context(), decision().candidates):
        assert pickle.loads(pickle.dumps(value)) == value


def test_a_broken_limit_says_which_size_it_is() -> None:
    few = Limit(min=2).problems("batch", 1)[0]
    assert (few.code.value, few.message) == ("DIM_OUT_OF_RANGE", "batch=1 is outside >= 2")
    odd = Limit(multiple_of=16).problems("seq_len_q", 17)[0]
    assert (odd.code.value, odd.message) == ("DIM_NOT_MULTIPLE", "seq_len_q=17 is not a multiple of 16")
    long = Limit(max=16).problems("seq_len_q", 512)[0]
    assert (long.value, long.limit, long.message) == (512, 16, "sequence length 512 exceeds 16")
