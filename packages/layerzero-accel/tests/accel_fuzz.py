"""Run by the sanitizer and leak tests in a process of its own: many calls of every kind, good and bad, then a count.

    python accel_fuzz.py LIBRARY CALLS

makes CALLS different calls, then one of them 100 000 times over, and prints one JSON line. A wrong answer or a leak
ends it with an error.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import resource
import sys
from typing import Any


def main(library: str, calls: int) -> None:
    spec = importlib.util.spec_from_file_location("layerzero_accel._hot", library)
    assert spec is not None and spec.loader is not None
    native: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["layerzero_accel._hot"] = native  # before core looks for the installed one
    import torch

    import layerzero as lz
    from layerzero._ops.signature import PUBLIC
    from layerzero.dispatch.accel import accelerator
    from layerzero.runtime.state import state

    assert accelerator.native is native
    torch.set_num_threads(1)
    rng = random.Random(5)
    w = torch.ones(8)
    q = torch.randn(1, 2, 1, 8)

    def one(n: int) -> None:
        rows = rng.randrange(0, 6)
        x = torch.randn(rows, 8)
        k = torch.randn(1, 2, rng.randrange(1, 40), 8)
        kind = n % 8
        if kind == 0:
            lz.rms_norm(x, w, rng.choice((1e-6, 1, 1e-5)))
        elif kind == 1:
            lz.attention(q, k, k, None, 0.0, rng.choice((False, "".join(("bottom", "_right")))), scale=0.5)
        elif kind == 2:
            lz.attention(query=q, key=k, value=k, layout="BHSD", attn_mask=torch.ones(1, k.shape[2], dtype=torch.bool))
        elif kind == 3:
            lz.layer_norm(x[:, ::1], None, None)
        elif kind == 4:
            lz.silu_and_mul(x.t().contiguous().t() if rows else x)
        elif kind == 5:
            for wrong in (lambda: lz.rms_norm(x, torch.ones(7)), lambda: lz.attention(q, k), lambda: lz.rms_norm(None)):
                try:
                    wrong()
                except Exception:
                    pass
                else:
                    raise AssertionError("a wrong call passed")
        elif kind == 6:
            lz.rms_norm(x.requires_grad_(), w)
            torch.vmap(lambda t: lz.rms_norm(t, w))(torch.randn(2, 3, 8))
        else:
            lz.gelu_and_mul(x, rng.choice(("tanh", "none")), backend=rng.choice((None, "reference")))
        if n % 997 == 0:
            lz.lock("rms_norm", "reference.rms_norm.plain")
            lz.rms_norm(x, w)
            lz.unlock("rms_norm")
        if n % 1499 == 0:
            state.world.hot.clear()

    for n in range(calls):
        one(n)
    x = torch.randn(3, 8)
    assert torch.equal(lz.rms_norm(x, w), PUBLIC["rms_norm"].function(x, w))
    met = native.counts()
    print(json.dumps({"met": met, **flat(lz, native, 100_000)}))


def flat(lz: Any, native: Any, calls: int) -> dict[str, Any]:
    """Reference counts of everything one hot call touches, and the memory, before and after many such calls."""
    import torch

    from layerzero.runtime.state import state

    q, k, name = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), "bottom_right"
    for _ in range(2000):
        lz.attention(q, k, k, is_causal=name)
    bound = next(b for b in state.world.hot.values() if b.decision.op == "attention")
    bound.run = lambda *args: args[0]  # the kernel's own work is not what is looked at
    watched = (q, k, name, bound, bound.run, state.world, None, True, False, lz.attention)
    gc.collect()
    before = [sys.getrefcount(item) for item in watched], len(gc.get_objects())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exact = native.counts()["exact"]
    for _ in range(calls):
        lz.attention(q, k, k, is_causal=name)
    gc.collect()
    after = [sys.getrefcount(item) for item in watched], len(gc.get_objects())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert native.counts()["exact"] - exact == calls
    # None, True and False are everybody's: others may hold a few more or fewer.
    drift = [abs(one - other) for one, other in zip(before[0], after[0], strict=True)]
    assert all(item <= (50 if i in (6, 7, 8) else 1) for i, item in enumerate(drift)), drift
    assert abs(after[1] - before[1]) <= 50, (before[1], after[1])
    return {"calls": calls, "drift": drift, "grown_kb": grown}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
