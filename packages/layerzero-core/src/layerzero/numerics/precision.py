"""The float32 rows of the tolerance table hold for float32 arithmetic: TF32 and its like are switched off for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_float32() -> Iterator[None]:
    """Inside the block float32 matrix products are computed in float32, on every device; then the settings return."""
    import torch

    # torch has an old and a new set of switches, and refuses to answer through the old ones once both were used.
    try:
        word = torch.get_float32_matmul_precision()
    except RuntimeError:
        switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
        before = [switch.fp32_precision for switch in switches]
        for switch in switches:
            switch.fp32_precision = "ieee"
        try:
            yield
        finally:
            for switch, old in zip(switches, before, strict=True):
                switch.fp32_precision = old
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(word)
