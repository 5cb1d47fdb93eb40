"""On a GPU: every kernel of the ops by selection, our Triton kernels and fla-core's, against the oracle; models too."""

from __future__ import annotations

import pytest
import torch
from linear_attention_calls import BY_NAME, NAMES, NEEDS, example

import layerzero as lz

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_that_is_here_is_right(name, needs, dtype):
    for sizes in ({"batch": 3, "seq_len": 200}, {"batch": 3, "seq_len": 1}):
        wide = {key: 64 for key in ("key_dim", "value_dim", "head_dim", "state_size") if key in BY_NAME[name].sizes}
        args = example(name, *needs, dtype=dtype, device="cuda", **sizes, **wide)
        truth = [
            item.double() if isinstance(item, torch.Tensor) and item.is_floating_point() else item for item in args
        ]
        wanted = BY_NAME[name].function(*truth)
        ids = [item.kernel_id for item in lz.explain(name, *args).decision.candidates if item.accepted]
        for kernel in ids:
            for found, expected in zip(getattr(lz.ops, name)(*args, backend=kernel), wanted, strict=True):
                bound = 2e-2 if dtype == "bfloat16" else 1e-3
                torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound, msg=kernel)
