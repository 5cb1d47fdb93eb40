"""`lz.plan`: a call bound once, then made without any lookup."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

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
    build: Callable[..., Any] = _BUILDERS.get(op, _general)
    planned = build(public, bound, canonical, layout, backend)
    if check or os.environ.get("LAYERZERO_DEBUG", "") not in ("", "0", "false"):
        planned = _checked(planned, public, canonical, layout, backend)
    planned.kernel_id = bound.kernel_id
    planned.transforms = tuple(bound.plan.transforms)
    planned.decision = bound.decision
    return planned  # type: ignore[no-any-return]


def _attention(
    public: PublicOp, bound: Any, canonical: tuple[Any, ...], layout: str | None, backend: str | None
) -> Any:
    run, spec = bound.run, public.spec
    _, _, _, _, p, causal, fixed_scale, window, cap, slopes, lse = canonical

    def planned_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = p,
        is_causal: Any = causal,
        scale: Any = fixed_scale,
        **_same: Any,
    ) -> Any:
        try:
            return run(query, key, value, attn_mask, dropout_p, causal, scale, window, cap, slopes, lse)
        except Exception as error:
            args = (query, key, value, attn_mask, dropout_p, causal, scale, window, cap, slopes, lse)
            return recover(spec, current_world(), None, bound, args, layout, backend, error)

    return planned_attention


def _rms_norm(public: PublicOp, bound: Any, canonical: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    run, spec = bound.run, public.spec
    fixed_eps = canonical[2]

    def planned_rms_norm(x: Any, weight: Any = None, eps: float = fixed_eps) -> Any:
        try:
            return run(x, weight, eps)
        except Exception as error:
            return recover(spec, current_world(), None, bound, (x, weight, eps), layout, backend, error)

    return planned_rms_norm


def _general(public: PublicOp, bound: Any, canonical: tuple[Any, ...], layout: str | None, backend: str | None) -> Any:
    run, spec = bound.run, public.spec

    def planned(*args: Any, **kwargs: Any) -> Any:
        values, _, _ = public.normalize(args, kwargs)
        try:
            return run(*values)
        except Exception as error:
            return recover(spec, current_world(), None, bound, values, layout, backend, error)

    return planned


_BUILDERS: dict[str, Callable[..., Any]] = {"attention": _attention, "rms_norm": _rms_norm}


def _checked(
    planned: Callable[..., Any], public: PublicOp, canonical: tuple[Any, ...], layout: str | None, backend: str | None
) -> Any:
    wanted = generic_key(public.spec.op_id, canonical, layout, backend)

    def checked(*args: Any, **kwargs: Any) -> Any:
        values, given_layout, _ = public.normalize(args, kwargs)
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
