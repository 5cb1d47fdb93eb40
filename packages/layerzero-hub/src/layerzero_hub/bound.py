"""Where the adapters of hub kernels live: attributes that exist once a kernel is asked for.

`k_<kernel>` is the callable that binding imports: the kernel is verified and loaded at that moment. `p_<kernel>` is its
predicate: the reasons against it, empty when it may load. `w_<kernel>` is its packer of weights, where it has one. All
follow the policy as it was when plugins registered; in the process of an isolated backend, where none did, the one that
is found there by the same rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from layerzero_hub.errors import refuse
from layerzero_hub.loading import load
from layerzero_hub.mapping import resolve
from layerzero_hub.policy import HubPolicy, discovered
from layerzero_hub.specs import HubKernel, table

_kernels: dict[str, HubKernel] = {}
_policy: list[HubPolicy] = []


def remember(kernels: dict[str, HubKernel], policy: HubPolicy) -> None:
    """Called at registration: what the attributes stand for from now on."""
    _kernels.clear()
    _kernels.update({kernel.attribute[2:]: kernel for kernel in kernels.values()})
    _policy[:] = [policy]
    for name in [name for name in globals() if name.startswith(("k_", "p_", "w_"))]:
        del globals()[name]


def __getattr__(name: str) -> Any:
    if not _policy and name[:2] in ("k_", "p_", "w_"):
        policy = discovered()
        remember(table(policy), policy)
    kernel = _kernels.get(name[2:])
    if kernel is None or name[:2] not in ("k_", "p_", "w_"):
        raise AttributeError(f"layerzero_hub.bound has no {name!r}: the kernel is not locked and mapped")
    if name.startswith("p_"):
        return lambda ctx: list(kernel.refused)
    if name.startswith("w_"):
        return _function(kernel.mapping.capabilities["packer"], kernel)
    return _adapted(_function(kernel.mapping.function, kernel), kernel)


def _function(name: str, kernel: HubKernel) -> Callable[..., Any]:
    """A function of the kernel, which is verified and loaded now."""
    function = resolve(load(kernel.repo_id, kernel.version, policy=_policy[0], digest=kernel.digest), name)
    if not callable(function):
        raise refuse("HUB_METADATA_INVALID", kernel.repo_id, f"no function {name}")
    return cast("Callable[..., Any]", function)


def _adapted(function: Callable[..., Any], kernel: HubKernel) -> Callable[..., Any]:
    mapping = kernel.mapping
    if not mapping.arguments and not mapping.keywords and not mapping.out:
        return function
    canonical = _canonical(mapping.op)
    try:
        order = [canonical.index(name) for name in mapping.arguments]
        named = [(theirs, canonical.index(ours)) for theirs, ours in mapping.keywords]
    except ValueError as error:
        raise refuse("HUB_POLICY_INVALID", "kernels", f"{error}; {mapping.op} has {', '.join(canonical)}") from None

    def call(*arguments: Any) -> Any:
        given = [arguments[index] for index in order]
        keywords = {theirs: arguments[index] for theirs, index in named}
        if not mapping.out:
            return function(*given, **keywords)
        out = arguments[0].new_empty(arguments[0].shape)
        function(out, *given, **keywords)
        return out

    call.__name__ = mapping.function.rsplit(".", maxsplit=1)[-1]
    call.__doc__ = inspect.getdoc(function)
    return call


def _canonical(op: str) -> tuple[str, ...]:
    from layerzero import list_ops

    for spec in list_ops():
        if spec.op_id == op:
            return tuple(spec.arguments)
    raise refuse("HUB_POLICY_INVALID", "kernels", f"there is no op {op}")
