"""`lz.plan`: a call bound once, then made without any lookup."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.dispatch import modes
from layerzero.dispatch.hot import generic_key
from layerzero.dispatch.run import current_world, describe, ready, recover
from layerzero.errors import PlanMismatchError
from layerzero.ops.signature import PublicOp, public_op

__all__ = ["plan"]


def plan(op: str, *args: Any, check: bool = False, **kwargs: Any) -> Callable[..., Any]:
    """Bind a call once; the returned function takes the same arguments and costs next to nothing more than the kernel.

    Unchecked by contract: call it only with tensors of the same shapes, dtypes, strides, device and modes, and
    the same options. `check=True` (or LAYERZERO_DEBUG) verifies that at each call and raises PlanMismatchError.
    The plan keeps its kernel even when policy changes; a kernel that raises still fails over. Attributes:
    `kernel_id`, `transforms`, `decision`.
    """
    public = public_op(op)
    canonical, layout, backend = public.normalize(args, kwargs)
    world = current_world()
    ctx = describe(public.spec, canonical, layout, backend, world)
    bound = ready(public.spec, ctx, world, canonical)
    given = public.signature.bind(*args, **kwargs).arguments
    options = {name: item for name, item in given.items() if not modes.tensors_of((item,))}
    build: Callable[..., Any] = _BUILDERS.get(op, _general)
    if op == "attention" and given.get("attn_mask") is not None and not isinstance(canonical[3], Tensor):
        build = _general  # a CausalBias or a mask value: it has to be read at each call
    planned = build(public, bound, canonical, layout, backend, options)
    if check or os.environ.get("LAYERZERO_DEBUG", "") not in ("", "0", "false"):
        planned = _checked(planned, public, canonical, layout, backend, options)
    planned.kernel_id = bound.kernel_id
    planned.transforms = tuple(bound.plan.transforms)
    planned.decision = bound.decision
    return planned  # type: ignore[no-any-return]


def _complete(
    public: PublicOp, options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], str | None, str | None]:
    """Canonical arguments of a planned call: options that it leaves out are those the plan was made with."""
    placed = set(list(public.signature.parameters)[: len(args)])
    kept = {name: item for name, item in options.items() if name not in placed}
    return public.normalize(args, {**kept, **kwargs})


def _attention(
    public: PublicOp,
    bound: Any,
    canonical: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    options: dict[str, Any],
) -> Any:
    run, spec, planned_layout, planned_backend = bound.run, public.spec, layout, backend
    _, _, _, _, p, causal, fixed_scale, sides, cap, slopes, lse = canonical

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
        layout: Any = None,
        window: Any = None,
        enable_gqa: Any = None,
        softcap: Any = None,
        return_lse: Any = None,
        backend: Any = None,
    ) -> Any:
        # The options are those of the plan; they are named here so that the same call is accepted.
        try:
            return run(query, key, value, attn_mask, dropout_p, causal, scale, sides, cap, alibi_slopes, lse)
        except Exception as error:
            args = (query, key, value, attn_mask, dropout_p, causal, scale, sides, cap, alibi_slopes, lse)
            return recover(spec, current_world(), None, bound, args, planned_layout, planned_backend, error)

    return planned_attention


def _rms_norm(
    public: PublicOp,
    bound: Any,
    canonical: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    options: dict[str, Any],
) -> Any:
    run, spec, planned_backend = bound.run, public.spec, backend
    fixed_eps = canonical[2]

    def planned_rms_norm(x: Any, weight: Any = None, eps: float = fixed_eps, *, backend: Any = None) -> Any:
        try:
            return run(x, weight, eps)
        except Exception as error:
            return recover(spec, current_world(), None, bound, (x, weight, eps), layout, planned_backend, error)

    return planned_rms_norm


def _general(
    public: PublicOp,
    bound: Any,
    canonical: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    options: dict[str, Any],
) -> Any:
    run, spec = bound.run, public.spec
    order = list(public.signature.parameters)
    named = public.canonical is None and order[: len(spec.arguments)] == list(spec.arguments)

    def planned(*args: Any, **kwargs: Any) -> Any:
        if named and not kwargs and args:
            # The usual call: tensors in place, options as planned.
            values = args + canonical[len(args) :]
        else:
            values, _, _ = _complete(public, options, args, kwargs)
        try:
            return run(*values)
        except Exception as error:
            return recover(spec, current_world(), None, bound, values, layout, backend, error)

    return planned


_BUILDERS: dict[str, Callable[..., Any]] = {"attention": _attention, "rms_norm": _rms_norm}


def _checked(
    planned: Callable[..., Any],
    public: PublicOp,
    canonical: tuple[Any, ...],
    layout: str | None,
    backend: str | None,
    options: dict[str, Any],
) -> Any:
    wanted = generic_key(public.spec.op_id, canonical, layout, backend)

    def checked(*args: Any, **kwargs: Any) -> Any:
        values, given_layout, _ = _complete(public, options, args, kwargs)
        found = generic_key(public.spec.op_id, values, given_layout, backend)
        if found != wanted or not modes.plain(modes.tensors_of(values)):
            raise PlanMismatchError(
                f"plan for {public.spec.op_id}",
                code="PLAN_ARGUMENTS_CHANGED",
                value=_words(found),
                limit=_words(wanted),
            )
        return planned(*args, **kwargs)

    return checked


def _words(key: Any) -> str:
    return ", ".join(str(part[1:]) if isinstance(part, tuple) else str(part) for part in key or ())
