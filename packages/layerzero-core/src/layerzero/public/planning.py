"""`lz.plan`: a call bound once, then made without any lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd import forward_ad

from layerzero._ops.signature import public_op
from layerzero.dispatch import modes
from layerzero.dispatch.hot import generic_key
from layerzero.dispatch.run import bypass, current_world, describe, ready, recover
from layerzero.env import read_one
from layerzero.errors import InvalidInputError, PlanMismatchError
from layerzero.model.decision import Decision
from layerzero.model.describe import parse_window
from layerzero.model.op import Op


class Plan(Protocol):
    """A bound call, as `lz.plan` gives it."""

    kernel_id: str
    transforms: tuple[Any, ...]
    decision: Decision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: with the arguments of the op it was made for."""


def plan(op: str, *args: Any, check: bool = False, **kwargs: Any) -> Plan:
    """Select and bind a kernel once; the returned function takes the same arguments, with next to no call overhead.

    Arguments are not checked: call it only with tensors of the same shapes, dtypes, strides, device and modes.
    `check=True` (or LAYERZERO_DEBUG) verifies that at each call and raises PlanMismatchError. Options may be left out
    or repeated; other values than it was bound with raise PlanMismatchError, except for scale and eps.
    The plan keeps its kernel even when policy changes; a kernel that raises still fails over. A dual tensor of
    forward-mode AD keeps its tangent: that call takes the plain formula. Dispatch modes, tracers and profilers do not
    see a planned call. Attributes: `kernel_id`, `transforms`, `decision`.
    """
    public = public_op(op)
    canonical, layout, backend = public.normalize(args, kwargs)
    world = current_world()
    ctx = describe(public, canonical, layout, backend, world)
    bound = ready(public, ctx, world, canonical)
    given = public.signature.bind(*args, **kwargs).arguments
    kept = public.arguments[len(public.arguments) - public.trailing :]  # these are said once, tensors or not
    options = {name: item for name, item in given.items() if name in kept or not modes.tensors_of((item,))}
    build = _BUILDERS.get(op, _general)
    if op == "attention" and given.get("attn_mask") is not None and not isinstance(canonical[3], Tensor):
        build = _general  # a CausalBias or a mask value: it has to be read at each call
    call = _Call(public, bound, canonical, layout, backend, options)
    planned = build(call)
    if check or read_one("debug"):
        planned = _checked(planned, call)
    planned.kernel_id = bound.kernel_id
    planned.transforms = tuple(bound.plan.transforms)
    planned.decision = bound.decision
    return planned  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """The call a plan is made for: its op, the bound kernel, canonical arguments, and the options that were given."""

    public: Op
    bound: Any
    canonical: tuple[Any, ...]
    layout: str | None
    backend: str | None
    options: dict[str, Any]


# Numbers that every kernel takes as they come: a plan obeys them.
_OBEYED = frozenset({"scale", "eps", "temperature"})


def _fixed(public: Op, options: dict[str, Any]) -> dict[str, Any]:
    """The options a plan was bound with, defaults included.

    Not among them: what has no default (a text, a batch: the data of the call), what a plan obeys, and tensors.
    """
    defaults = {name: p.default for name, p in public.signature.parameters.items() if p.default is not p.empty}
    tensors = {"attn_mask", "alibi_slopes", "weight", "bias", "generator", "position_ids"}
    chosen = {name: options.get(name, default) for name, default in defaults.items()}
    found = {name: item for name, item in chosen.items() if not modes.tensors_of((item,))}
    return {name: item for name, item in found.items() if name not in _OBEYED and (name not in tensors or item)}


def _same_options(op: str, fixed: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse options that were passed and are not those of the plan: its kernel was chosen for those."""
    for name, value in given.items():
        if name not in fixed or name == "enable_gqa":  # GQA follows from the head counts
            continue
        wanted = fixed[name]
        if isinstance(value, Tensor) or isinstance(wanted, Tensor) or value is None or wanted is None:
            alike = (value is None) is (wanted is None)
        elif name == "dropout_p":
            alike = (value > 0) is (wanted > 0)
        elif name == "window":
            alike = parse_window(value) == parse_window(wanted)
        else:
            alike = value is wanted or (type(value) is type(wanted) and bool(value == wanted))
        if not alike:
            shown = [f"a {type(item).__name__}" if isinstance(item, Tensor) else item for item in (value, wanted)]
            raise PlanMismatchError(
                f"plan for {op}: {name} is {shown[0]!r}, it was bound with {shown[1]!r}",
                value=f"{name}={shown[0]!r}",
                limit=f"{name}={shown[1]!r}",
            )


def _complete(
    public: Op, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], str | None, str | None]:
    """Canonical arguments of a planned call: options that it leaves out are those the plan was made with."""
    placed = set(list(public.signature.parameters)[: len(args)])
    kept = {name: item for name, item in options.items() if name not in placed}
    return public.normalize(args, {**kept, **kwargs})


def _attention(call: _Call) -> Any:
    if len(call.canonical) > 11:
        return _general(call)
    spec, bound, canonical, planned_layout, planned_backend, options = call
    run, parameters = bound.run, spec.signature.parameters
    _, _, _, mask, p, causal, fixed_scale, sides, cap, slopes, lse = canonical
    maskless = mask is None
    fixed = _fixed(spec, options) | {"dropout_p": p, "is_causal": causal, "attn_mask": mask}

    def planned_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = p,
        is_causal: Any = causal,
        scale: Any = fixed_scale,
        *,
        alibi_slopes: Any = slopes,
        **given: Any,
    ) -> Any:
        # The scale is obeyed; all other options are those of the plan, and may be said again.
        if given or dropout_p is not p or is_causal is not causal or (attn_mask is None) is not maskless:
            unknown = sorted(given.keys() - parameters.keys())
            if unknown:
                raise InvalidInputError(code="TYPE_INVALID", value=unknown[0], limit=str(spec.signature))
            given |= {"dropout_p": dropout_p, "is_causal": is_causal, "attn_mask": attn_mask}
            _same_options(spec.op_id, fixed, given)
        if forward_ad._current_level >= 0 and not modes.plain(
            modes.tensors_of((query, key, value, attn_mask, alibi_slopes))
        ):
            args = (query, key, value, attn_mask, dropout_p, causal, scale, sides, cap, alibi_slopes, lse)
            return bypass(spec, args, planned_layout, planned_backend)
        try:
            return run(query, key, value, attn_mask, dropout_p, causal, scale, sides, cap, alibi_slopes, lse)
        except Exception as error:
            args = (query, key, value, attn_mask, dropout_p, causal, scale, sides, cap, alibi_slopes, lse)
            return recover(spec, current_world(), bound, args, planned_layout, planned_backend, error)

    return planned_attention


def _rms_norm(call: _Call) -> Any:
    spec, bound, canonical, layout, planned_backend, _ = call
    run, fixed_eps = bound.run, canonical[2]
    weightless = canonical[1] is None

    def planned_rms_norm(x: Any, weight: Any = None, eps: float = fixed_eps, *, backend: Any = planned_backend) -> Any:
        if backend is not planned_backend or (weight is None) is not weightless:
            _same_options(spec.op_id, {"backend": planned_backend, "weight": canonical[1]}, locals())
        if forward_ad._current_level >= 0 and not modes.plain(modes.tensors_of((x, weight))):
            return bypass(spec, (x, weight, eps), layout, planned_backend)
        try:
            return run(x, weight, eps)
        except Exception as error:
            return recover(spec, current_world(), bound, (x, weight, eps), layout, planned_backend, error)

    return planned_rms_norm


def _general(call: _Call) -> Any:
    spec, bound, canonical, layout, backend, options = call
    run, order = bound.run, list(spec.signature.parameters)
    named = spec.canonical is None and order[: len(spec.arguments)] == list(spec.arguments)
    fixed = _fixed(spec, options)
    leading = next((i for i, name in enumerate(order) if name in fixed), len(order))  # tensors before any option

    def planned(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) > leading:
            _same_options(spec.op_id, fixed, dict(zip(order, args, strict=False)) | kwargs)
        if named and not kwargs and args:
            # The usual call: tensors in place, options as planned.
            values = args + canonical[len(args) :]
        else:
            values, _, _ = _complete(spec, options, args, kwargs)
        if forward_ad._current_level >= 0 and not modes.plain(modes.tensors_of(values)):
            return bypass(spec, values, layout, backend)
        try:
            return run(*values)
        except Exception as error:
            return recover(spec, current_world(), bound, values, layout, backend, error)

    return planned


_BUILDERS: dict[str, Callable[[_Call], Any]] = {"attention": _attention, "rms_norm": _rms_norm}


def _checked(planned: Callable[..., Any], call: _Call) -> Any:
    public, _, canonical, layout, backend, options = call
    wanted = generic_key(public.op_id, canonical, layout, backend)

    def checked(*args: Any, **kwargs: Any) -> Any:
        values, given_layout, _ = _complete(public, options, args, kwargs)
        found = generic_key(public.op_id, values, given_layout, backend)
        if found != wanted or not modes.plain(modes.tensors_of(values)):
            bound, here = (
                _words([part for part in one or () if part not in (other or ())]) or "plain tensors"
                for one, other in ((wanted, found), (found, wanted))
            )
            told = f"the plan for {public.op_id} was bound for {bound}, called with {here}"
            raise PlanMismatchError(told, value=_words(found), limit=_words(wanted))
        return planned(*args, **kwargs)

    return checked


def _words(key: Any) -> str:
    return ", ".join(str(part[1:]) if isinstance(part, tuple) else str(part) for part in key or ())
