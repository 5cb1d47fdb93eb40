"""Triton kernels run by Triton's interpreter against the reference: what files of such cases share.

The interpreter has to be chosen before Triton is imported, so the cases of a file run in one child process, which is
the file as a script: it prints what each case found wrong. (The interpreter rounds to bfloat16 by cutting off, and
multiplies bfloat16 matrices wrongly: products in bfloat16 are tested on the GPU.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch


class Cases(dict):
    """The cases of a file by name: functions that return what was wrong, or None."""

    def add(self, name):
        def keep(function):
            self[name] = function
            return function

        return keep

    def tell(self):
        """Run all of them, in the child, and print what each found."""
        warnings.simplefilter("ignore")  # NumPy's, about NaN and infinity inside the interpreter
        found = {}
        for name, check in self.items():
            torch.manual_seed(0)
            try:
                found[name] = check()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        print(json.dumps(found))


def answers(file):
    """What each case of a file found, from a child process."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def differs(op, got, want, dtype=torch.float32):
    """The worst place where a result leaves the bounds of the table; None when there is none."""
    from layerzero.numerics import compare, tolerance

    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for a, b in pairs:
        if a is None or b is None:
            if a is not b:
                return "one is None"
            continue
        report = compare(a, b, tolerance(op, dtype))
        if not report.ok:
            return str(report)
    return None


def gradients(function, *tensors):
    """The gradients of a drawn sum of what a function returns, by its tensors."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    made = function(*(t * 1 for t in leaves))
    made = made if isinstance(made, tuple) else (made,)
    gen = torch.Generator().manual_seed(1)
    sum((t * torch.randn(t.shape, generator=gen)).sum() for t in made if t is not None).backward()
    return tuple(t.grad for t in leaves)
