"""Every precision of the checklist is exercised: found in the cases that verification and the kit make and judge.

TF32 is not a dtype but a way to compute float32 products. On a CPU its rounding is made by hand; a GPU does it itself.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.dispatch.bind import resolve
from layerzero.dispatch.run import current_world
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.model.packed import PackedWeight
from layerzero.model.quant import FORMATS, QuantizedTensor, QuantScheme
from layerzero.numerics import compare, full_float32
from layerzero.numerics.tolerances import tolerance
from layerzero.plugin.manager import load_plugins
from layerzero.runtime.state import state
from layerzero_verify.kernels import Bench, flat
from layerzero_verify.ladder import verify
from layerzero_verify.lineup import resolve as under_test
from layerzero_verify.testing import cases_rows
from layerzero_verify.testing.cases import Case, cases_of, load_cases
from layerzero_verify.thresholds import kernel as bound_of

CPU = torch.device("cpu")
DTYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
FP4 = {"mxfp4", "nvfp4", "nf4"}
WANTED = {*DTYPES.values(), "INT8", "FP8 E4M3", "FP8 E5M2", *(name.upper() for name in FP4)}
QUANTIZED_OPS = ("linear", "quantize", "dequantize")
_numbers = itertools.count()


@pytest.fixture
def fresh() -> Iterator[None]:
    lz.reset()
    yield
    lz.reset()


def formats_in(args: tuple[Any, ...]) -> set[str]:
    """Storage formats of the quantized arguments of a call."""
    found = set()
    for item in args:
        source = item.source if isinstance(item, PackedWeight) else item
        if isinstance(source, QuantizedTensor | QuantScheme):
            found.add(source.fmt.value)
    return found


def exercised(backends: tuple[str, ...] = ("reference", "torch")) -> dict[str, list[Case]]:
    """Precision -> the cases that level 1 makes in it, for the kernels of these backends that run here."""
    found: dict[str, list[Case]] = {}
    kernels = [item for item in under_test(device="cpu", compiles=False).kernels if item.backend in backends]
    for group in itertools.chain.from_iterable(load_cases().values()):
        for spec in kernels:
            if spec.op != group.op or not group.requires <= spec.features:
                continue
            for case in cases_of(group, spec):
                if spec.op not in QUANTIZED_OPS or "quantized" not in group.name:
                    names = {DTYPES.get(case.dtype, "")}
                else:
                    names = {name.upper().replace("_", " ") for name in formats_in(case.arguments(CPU))}
                for name in names:
                    found.setdefault(name, []).append(case)
    return found


def not_computed(cases: dict[str, list[Case]]) -> set[str]:
    """Precisions in which no matrix product is among the cases: being converted from and to is not enough."""
    return WANTED - {name for name, found in cases.items() if any(case.spec.op == "linear" for case in found)}


@pytest.mark.req("R-ENV-11")
def test_every_precision_of_the_checklist_has_cases_and_they_pass(fresh: None) -> None:
    cases = exercised()
    assert not_computed(cases) == set()
    for dtype in ("FP32", "FP16", "BF16"):
        ops = {case.spec.op for case in cases[dtype]}
        assert {"attention", "rms_norm", "rope", "linear", "silu_and_mul"} <= ops
    for name in WANTED - set(DTYPES.values()):
        assert {"linear", "dequantize"} <= {case.spec.op for case in cases[name]}
    for name in sorted(WANTED):
        # one of them through dispatch, against the truth: that it runs at all, and is judged
        case = next(case for case in cases[name] if case.spec.op == "linear" and case.spec.backend == "torch")
        bench = Bench(case.spec, CPU)
        with torch.no_grad(), full_float32(), bench.locked():
            args = bench.arguments(case)
            got, want = flat(bench.call(args))[0], flat(bench.truth(bench.arguments(case)))[0]
        bound = bound_of("linear", case.dtype, k=args[0].shape[-1], declared=bench.loss(case))
        assert compare(got, want, bound).ok, (name, case.id)


@pytest.mark.req("R-ENV-11")
@pytest.mark.parametrize("dropped", ["int8", "nvfp4"])
def test_a_precision_that_is_dropped_is_missed(fresh: None, dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cases_rows.schemes_of
    monkeypatch.setattr(cases_rows, "schemes_of", lambda *a, **k: [s for s in whole(*a, **k) if s.fmt.value != dropped])
    assert not_computed(exercised(("torch",))) == {dropped.upper().replace("_", " ")}


def test_the_list_of_fp4_variants_is_that_of_the_formats() -> None:
    assert {str(name) for name in FORMATS if "f4" in str(name) or "fp4" in str(name)} == FP4


# -- TF32 --------------------------------------------------------------------------------------------------
def tf32(value: Tensor) -> Tensor:
    """The nearest number with ten bits of mantissa: what a tensor core makes of its float32 operands."""
    bits = value.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def error_bound(x: Tensor, weight: Tensor) -> Tensor:
    """How far a product of TF32 operands may lie from the exact one: two roundings of 2^-11, and a float32 sum."""
    share = 2.0**-10 + 2.0**-22 + x.shape[-1] * 2.0**-24
    return share * (x.double().abs() @ weight.double().abs().T)


@contextmanager
def tf32_switch(on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def add_tf32_kernel(name: str, **fields: Any) -> KernelSpec:
    """A kernel of `linear` that computes in TF32, before all others."""
    module = sys.modules.setdefault("layerzero_tf32_kernels", ModuleType("layerzero_tf32_kernels"))
    native = current_world().registry.kernels["torch.linear.native"]
    right: Callable[..., Any] = resolve(native)
    path = f"kernel_{next(_numbers)}"

    def kernel(x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return right(tf32(x), tf32(weight), *rest)

    setattr(module, path, kernel)
    spec = replace(
        native, kernel_id=name, backend="toy", function=f"layerzero_tf32_kernels:{path}", priority=99.0,
        dtypes=frozenset({"float32"}), **fields,
    )  # fmt: skip
    state.use(current_world().registry.add([spec]))
    return spec


def operands(device: str = "cpu") -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=draw) for shape in ((64, 512), (96, 512)))
    return x.to(device), weight.to(device)


@pytest.mark.req("R-ENV-11")
def test_tf32_rounds_as_it_should_and_its_bound_is_not_float32s() -> None:
    one = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -3.0, 0.0])
    assert tf32(one).tolist() == [1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -3.0, 0.0]
    x, weight = operands()
    exact, got = x.double() @ weight.double().T, (tf32(x) @ tf32(weight).T).double()
    assert ((got - exact).abs() <= error_bound(x, weight)).all()
    strict = tolerance("linear", "float32", k=512)
    assert not compare(got, exact, strict).ok, "float32's row must tell TF32 from float32"
    with tf32_switch(True):
        assert tolerance("linear", "float32", k=512) == strict, "the switch loosens no bound"


@pytest.mark.req("R-ENV-11")
def test_a_kernel_that_computes_in_tf32_is_found_by_verification_even_with_the_switch_on(fresh: None) -> None:
    spec = add_tf32_kernel("toy.linear.quietly_tf32")
    with tf32_switch(True):
        report = verify(kernel=spec.kernel_id, level=1, device="cpu")
        assert torch.get_float32_matmul_precision() == "high", "the user's setting came back"
    assert not report.ok and report.verdict.kernel == spec.kernel_id


@pytest.mark.req("R-ENV-11")
def test_a_kernel_that_declares_tf32_serves_only_while_the_program_allows_it(fresh: None) -> None:
    spec = add_tf32_kernel("toy.linear.tf32", guards=frozenset({"tf32"}))
    x, weight = operands()
    exact = x.double() @ weight.double().T
    for on in (False, True, False):
        with tf32_switch(on), torch.no_grad():
            got = lz.linear(x, weight)
            report = lz.explain("linear", x, weight)
        assert (report.chosen == spec.kernel_id) is on
        assert compare(got, exact, tolerance("linear", "float32", k=512)).ok is not on
        assert ((got.double() - exact).abs() <= error_bound(x, weight)).all()
        if not on:
            refused = next(item for item in report.candidates if item.kernel_id == spec.kernel_id)
            assert [reason.code for reason in refused.reasons] == ["SWITCHED_OFF"]


@pytest.mark.req("R-DEV-07")
def test_fp8_numbers_begin_with_ada_and_fp8_attention_with_hopper() -> None:
    """Of the kernels of every backend, whatever is installed: those that compute in FP8, by the GPUs they take."""
    kernels = load_plugins(env={}).registry.kernels.values()

    def takes(spec: KernelSpec) -> list[int]:
        return [sm for sm in (75, 80, 86, 89, 90, 100, 120) if not spec.check_device(DeviceSpec.for_sm(sm))]

    attention = [k for k in kernels if "attention" in k.op and any(word.startswith("float8") for word in k.dtypes)]
    assert attention
    for spec in attention:
        assert takes(spec) and min(takes(spec)) >= 90, spec.kernel_id
    products = [
        k for k in kernels if k.op == "linear" and "quant_native" in k.features and "fp8_e4m3" in k.quant_formats
    ]
    assert min(min(takes(spec)) for spec in products) == 89
    anywhere = replace(attention[0], min_sm=None, instruction_families=frozenset())
    sizes = dict.fromkeys(("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_k"), 8)
    dims = tuple({**sizes, "head_dim": 128, "head_dim_v": 128}.items())
    for sm, begins in ((86, False), (89, True), (90, True)):
        ctx = Context("attention", DeviceSpec.for_sm(sm), "float8_e4m3fn", dims, dtypes=("float8_e4m3fn",))
        found = [(why.code.value, why.limit) for why in anywhere.check(ctx)]
        assert (("FP8_UNSUPPORTED", 89) in found) is not begins, sm


@pytest.mark.gpu
@pytest.mark.req("R-ENV-11")
def test_tf32_on_a_gpu_is_used_when_allowed_and_never_while_verifying(fresh: None) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("tensor cores compute TF32 from SM 8.0")
    x, weight = operands("cuda")
    exact = x.double() @ weight.double().T
    for on in (False, True):
        with tf32_switch(on), torch.no_grad():
            got = lz.linear(x, weight, backend="torch.linear.native").double()
        assert ((got - exact).abs() <= error_bound(x, weight)).all()
        assert compare(got, exact, tolerance("linear", "float32", k=512)).ok is not on
    with tf32_switch(True):
        report = verify(kernel="torch.linear.native", level=1, device="cuda")
        assert report.ok, "\n".join(map(str, report.failures))
        assert torch.get_float32_matmul_precision() == "high"
