"""What an op is: its name, its arguments in canonical order, and how a call is described.

An op has one public function (`lz.rms_norm`), one canonical argument tuple that every kernel takes
positionally, and a `describe` function that turns a call into the op's half of a `Context`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from layerzero.errors import ConfigurationError
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.enums import OpKind

__all__ = ["Call", "OperationSpec"]

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
    elastic       names of dims that change from call to call and are bucketed in hot keys
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
    elastic: tuple[str, ...] = ()
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
            raise ConfigurationError(
                f"op {self.op_id}: {len(self.arguments)} arguments but {len(self.input_kinds)} input kinds",
                value=self.op_id,
            )
        if self.output_kind not in _OUTPUTS[self.op_kind]:
            raise ConfigurationError(
                f"op {self.op_id}: a {self.op_kind.value} op cannot give {self.output_kind!r}",
                value=self.output_kind,
                limit=sorted(_OUTPUTS[self.op_kind]),
            )
        if self.has_fallback and not callable(self.fallback_impl):
            raise ConfigurationError(
                f"op {self.op_id}: has_fallback is true but fallback_impl is not callable", value=self.fallback_impl
            )

    def to_json(self) -> dict[str, Any]:
        """The declarative part, JSON-compatible."""
        return {
            "op_id": self.op_id,
            "op_kind": self.op_kind.value,
            "arguments": list(self.arguments),
            "input_kinds": list(self.input_kinds),
            "output_kind": self.output_kind,
            "has_fallback": self.has_fallback,
            "fallback_id": self.fallback_id,
            "elastic": list(self.elastic),
        }
