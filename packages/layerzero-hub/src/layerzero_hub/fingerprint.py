"""What torch's dispatcher holds, so that a kernel which replaces an existing op is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["changed", "namespaces", "take"]


def take() -> Mapping[str, bytes]:
    """Op name → digest of everything registered for it. About 0.1 s for torch's 3 600 ops."""
    import torch

    dump = torch._C._dispatch_dump
    return {
        name: hashlib.blake2b(dump(name).encode(), digest_size=16).digest()
        for name in torch._C._dispatch_get_all_op_names()
    }


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> tuple[str, ...]:
    """Ops that were there before and are gone or different now."""
    return tuple(sorted(name for name, digest in before.items() if after.get(name) != digest))


def namespaces(names: Mapping[str, bytes] | frozenset[str] | None = None) -> frozenset[str]:
    """The ops namespaces among these names, or of this process now."""
    if names is None:
        import torch

        names = frozenset(torch._C._dispatch_get_all_op_names())
    return frozenset(name.split("::")[0] for name in names)
