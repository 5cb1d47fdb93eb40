"""What an op is, declared once: its function, its reference, and everything that is derived from the two.

An op has one public function (`lz.ops.rms_norm`), one canonical argument tuple that every kernel takes
positionally, and a `describe` function that turns a call into the op's half of a `Context`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any

from layerzero.errors import ConfigurationError, invalid
from layerzero.json_form import plain
from layerzero.model.context import Context
from layerzero.model.cost import Cost
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import OpKind

_OUTPUTS = {
    OpKind.TENSOR: {"tensor", "tensors", "quantized"},
    OpKind.SAMPLING: {"ids"},
    OpKind.TOKENIZATION: {"ids", "text"},
}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op: canonical arguments, and what stands beside them."""

    args: tuple[Any, ...]
    device: DeviceSpec
    layout: str | None = None
    backend: str | None = None
    needs_grad: bool = False


@dataclass(frozen=True, slots=True)
class OperationSpec:
    """An operation and its contract.

    op_id         the public name, for example "attention"
    op_kind       tensor, sampling or tokenization
    arguments     canonical argument names, in the order in which every kernel takes them
    input_kinds   one word per argument: tensor, tensor?, number, flag, text, object
    output_kind   tensor, tensors, quantized, ids or text
    describe      (Call) -> Context; raises InvalidInputError for a call that means nothing
    fallback_impl the plain implementation, canonical arguments; None only when has_fallback is False
    fallback_id   kernel id under which the fallback is registered
    growing       names of dims that change from call to call and are bucketed in hot keys
    random        draws random numbers (its RNG state is restored before a retry)
    mutates       says for canonical args whether the call writes into its inputs
    autocast      under autocast the floating inputs are cast to the autocast dtype first (matmul-like ops)
    stands_for    for a plugin's own op: the built-in op whose canonical arguments it takes and whose place it can take
                  in a model; `lz verify` checks it there
    """

    op_id: str
    op_kind: OpKind
    arguments: tuple[str, ...]
    input_kinds: tuple[str, ...]
    output_kind: str
    describe: Callable[[Call], Context] | None = field(default=None, compare=False)
    has_fallback: bool = True
    fallback_impl: Callable[..., Any] | None = field(default=None, compare=False)
    fallback_id: str = ""
    growing: tuple[str, ...] = ()
    random: Callable[[tuple[Any, ...]], bool] | None = field(default=None, compare=False)
    mutates: Callable[[tuple[Any, ...]], bool] | None = field(default=None, compare=False)
    autocast: bool = False
    stands_for: str = ""

    def __post_init__(self) -> None:
        if not self.op_id or not self.op_id.replace("_", "").replace(".", "").isalnum():
            raise ConfigurationError(f"op id {self.op_id!r} must be a plain name", code="OP_UNKNOWN", value=self.op_id)
        if not self.input_kinds or not self.output_kind:
            raise ConfigurationError(f"op {self.op_id}: input_kinds and output_kind are required", value=self.op_id)
        if len(self.input_kinds) != len(self.arguments):
            text = f"op {self.op_id}: {len(self.arguments)} arguments but {len(self.input_kinds)} input kinds"
            raise ConfigurationError(text, value=self.op_id)
        if self.output_kind not in _OUTPUTS[self.op_kind]:
            text = f"op {self.op_id}: a {self.op_kind.value} op cannot give {self.output_kind!r}"
            raise ConfigurationError(text, value=self.output_kind, limit=sorted(_OUTPUTS[self.op_kind]))
        if self.has_fallback and not callable(self.fallback_impl):
            text = f"op {self.op_id}: has_fallback is true but fallback_impl is not callable"
            raise ConfigurationError(text, value=self.fallback_impl)

    def to_json(self) -> dict[str, Any]:
        shown = (item.name for item in fields(OperationSpec) if item.compare)
        return {name: plain(getattr(self, name)) for name in shown if name not in ("autocast", "stands_for")}


@dataclass(frozen=True, slots=True)
class Op(OperationSpec):
    """An op, declared once. `registrar.op(Op(function=..., describe=..., example=..., fake=...))` makes it callable.

    The fields of OperationSpec that are not given follow from the function: `op_id` is its name, `arguments` are its
    parameters without `backend`, `input_kinds` follow from their annotations. A field that is absent switches off what
    is derived from it, nothing else.

    function    the op as users call it. One without a `backend` parameter is the formula itself, in plain torch; the
                public function is generated around it
    reference   plain torch on canonical arguments, on any device, differentiable; a function or "module:name".
                Default: the function
    canonical   public arguments by name -> canonical ones, where these are not simply the parameters in order
    features    every word that `describe` may put among a call's needs; the reference has them all
    sizes       names of the op's sizes, each with some that are worth a try; `--shape` on the command line gives them
    shapes      the sizes that `--shape`, `--q`, `--k`, `--v` and `--weight` give on the command line ("*rows,hidden":
                all axes but the last are rows), then formulas of those that follow; default: `sizes`, in order
    options     the other options of a call that the op has there
    keywords    canonical arguments -> those of the public function by name, where `canonical` changes more than order
    example     (Draw) -> canonical arguments of a call like `draw.ctx`; tuning, verification, the conformance kit,
                warm-up, `lz explain --shape` and `lz bench` make their calls with it; a function or "module:name"
    cost        (Context) -> bytes moved and operations made: a `Roofline`, or any such function
    workspace   bytes of scratch memory of the reference: a formula of the op's sizes
    baseline_workspace  the same of the baseline
    tp_invariant  the reference's result does not depend on the tensor-parallel size
    fake        the function's arguments in order -> empty tensors like the result's (`model.shapes`): torch.compile and
                torch.export follow from it. A batch that only the device knows is None there
    plain       what is traced where a gradient is needed, on canonical arguments. Default: the reference
    lowered     parameters that stand in torch schemas in another way than their annotation says (`torch_ops.lowering`):
                "may be absent" for a tensor without which there is one result less, "absent for 0" for a number,
                "negated" for a flag, "left out" for what no schema carries: other values than its default run `plain`
    lowering    module whose `CALL` is an overload `call` of the op's own, and MODULE_traced whose `traced` is traced in
                place of what would be derived; `plain` then takes the layout behind the canonical arguments
    torch_names further names of its opaque op
    keeps_order each result has the memory order of the argument in its place; else results are contiguous
    truth       float64 formula on canonical arguments, where the reference in float64 will not do; a function or
                "module:name"
    tolerance   row of the tolerance table: attention, norm, gemm, positional; "" for that of the dtype, "exact"
    baseline    what a torch user writes today, on canonical arguments; itself a kernel of the op on every device
    row_wise    places of the arguments whose rows make the rows of the result: a large call is checked by some of them
    keyed       how each parameter enters the key of layerzero-accel, one letter each (`layerzero_accel.functions`),
                where that does not follow from its kind
    fusable     moves memory more than it computes: a compiler had better see its formula than one launch
    defaults    of the `trailing` ones
    trailing    how many of the last arguments came to the op after kernels of it had been written: a call in which
                they have their defaults leaves them out (`shorten`), so that those kernels need not take them
    """

    op_id: str = ""
    op_kind: OpKind = OpKind.TENSOR
    arguments: tuple[str, ...] = ()
    input_kinds: tuple[str, ...] = ()
    output_kind: str = "tensor"
    function: Callable[..., Any] = field(default=NotImplemented, compare=False)
    reference: Callable[..., Any] | str | None = field(default=None, compare=False)
    canonical: Callable[[dict[str, Any]], tuple[Any, ...]] | None = field(default=None, compare=False)
    features: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    shapes: Mapping[str, str] = field(default_factory=dict, compare=False)
    options: tuple[str, ...] = ()
    keywords: Callable[[tuple[Any, ...]], dict[str, Any]] | None = field(default=None, compare=False)
    example: Callable[[Any], tuple[Any, ...]] | str | None = field(default=None, compare=False)
    cost: Callable[[Context], Cost] | None = field(default=None, compare=False)
    workspace: str = ""
    baseline_workspace: str = ""
    tp_invariant: bool = False
    fake: Callable[..., Any] | None = field(default=None, compare=False)
    plain: Callable[..., Any] | str | None = field(default=None, compare=False)
    lowered: Mapping[str, str] = field(default_factory=dict, compare=False)
    lowering: str = ""
    torch_names: tuple[str, ...] = ()
    keeps_order: bool = False
    truth: Callable[..., Any] | str | None = field(default=None, compare=False)
    tolerance: str = ""
    baseline: Callable[..., Any] | str | None = field(default=None, compare=False)
    row_wise: tuple[int, ...] = ()
    keyed: str = ""
    fusable: bool = False
    trailing: int = 0
    signature: inspect.Signature = field(init=False, compare=False, repr=False)
    defaults: tuple[Any, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = parameters(self.function)
        given: dict[str, Any] = {"op_id": self.op_id or self.function.__name__}
        given["signature"] = inspect.signature(self.function)
        given["arguments"] = self.arguments or tuple(name for name in names if name != "backend")
        last = given["arguments"][len(given["arguments"]) - self.trailing :]
        given["defaults"] = tuple(given["signature"].parameters[name].default for name in last)
        kinds = (kind_of_argument(names.get(name, "")) for name in given["arguments"])
        given["input_kinds"] = self.input_kinds or tuple(kinds)
        given["reference"] = self.reference or self.function
        given["example"], given["truth"] = _lazily(self.example), _lazily(self.truth)
        given["fallback_id"] = self.fallback_id or f"reference.{given['op_id']}.plain"
        given["fallback_impl"] = self.fallback_impl or _lazily(given["reference"])
        for name, value in given.items():
            object.__setattr__(self, name, value)
        OperationSpec.__post_init__(self)

    def parameters_written(self) -> tuple[str, dict[str, Any]]:
        """The public function's parameters as source, `backend` last and by name, and the values of DEFAULTS in it."""
        given: list[str] = []
        defaults: dict[str, Any] = {}
        for p in self.signature.parameters.values():
            if p.kind is p.KEYWORD_ONLY and "*" not in given:
                given.append("*")
            if p.default is not p.empty:
                defaults[p.name] = p.default
            if p.name != "backend":
                given.append(f"{p.name}=DEFAULTS[{p.name!r}]" if p.name in defaults else p.name)
        return ", ".join((*given, *(() if "*" in given else "*"), "backend=None")), defaults

    def normalize(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], str | None, str | None]:
        """Canonical arguments, layout and backend of a public call."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise invalid("TYPE_INVALID", str(error), str(self.signature), f"{self.op_id}: {error}") from None
        bound.apply_defaults()
        given = bound.arguments
        canonical = self.canonical(given) if self.canonical else tuple(given[name] for name in self.arguments)
        return self.shorten(canonical), given.get("layout"), given.get("backend")

    def shorten(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Canonical arguments without the last ones that may be left out, where they have their defaults."""
        kept, least = len(args), len(self.arguments) - self.trailing
        while kept > least and args[kept - 1] is self.defaults[kept - 1 - least]:
            kept -= 1
        return args[:kept]

    def lengthen(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All canonical arguments, with the defaults of those that were left out."""
        return args + self.defaults[len(args) - len(self.arguments) + self.trailing :]


def parameters(function: Callable[..., Any]) -> dict[str, str]:
    """The parameters of a function in order, each with the text of its annotation. Cheap: nothing is evaluated."""
    code = getattr(function, "__code__", None)
    if code is None:
        text = "an op's function must be a plain function"
        raise ConfigurationError(text, value=repr(function), limit="def NAME(...)")
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = function.__annotations__
    return {name: annotation_text(found.get(name, "")) for name in names}


def annotation_text(annotation: Any) -> str:
    """An annotation as written, whether it was evaluated or not."""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("torch.", "")


_KINDS = {"Tensor": "tensor", "float": "number", "int": "number", "Number": "number", "bool": "flag", "str": "text"}


def kind_of_argument(annotation: str) -> str:
    """The kind of an argument, from the first word of its annotation: tensor, tensor?, number, flag, text, object."""
    if "Sequence" in annotation:
        return "object"
    found = _KINDS.get(re.split(r"[^\w.]", annotation.strip(), maxsplit=1)[0].rpartition(".")[2], "object")
    return "tensor?" if found == "tensor" and re.search(r"\bNone\b", annotation) else found


def _lazily(reference: Callable[..., Any] | str | None) -> Any:
    """The function; one that is named is imported at its first use."""
    if not isinstance(reference, str):
        return reference

    load = functools.lru_cache(maxsize=1)(resolve_name)

    def call(*args: Any) -> Any:
        return load(reference)(*args)

    call.__qualname__ = reference
    return call
