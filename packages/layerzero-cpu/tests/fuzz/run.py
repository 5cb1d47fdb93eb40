"""Calls of every kernel with drawn shapes, strides, dtypes and values; stops at the first wrong result.

    python run.py --count N [--seed S] [--library FILE] [--isa NAME …] [--only rows]

`--library` names another build of the kernels, such as one with sanitizers. Every calls_*.py beside this file takes
part: a case draws its call from the generator, checks the result, and returns how many calls it made.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import random
import sys
import time
from pathlib import Path


def use(path: str) -> None:
    """Let that file be `layerzero_cpu._native`."""
    loader = importlib.machinery.ExtensionFileLoader("layerzero_cpu._native", path)
    spec = importlib.util.spec_from_file_location("layerzero_cpu._native", path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    import layerzero_cpu

    layerzero_cpu._native = sys.modules["layerzero_cpu._native"] = module


def main() -> int:
    """Run the cases in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library")
    parser.add_argument("--isa", nargs="*", help="only these instruction sets")
    parser.add_argument("--only", default="*", help="the cases of calls_ONLY.py alone")
    given = parser.parse_args()
    if given.library:
        use(given.library)
    import torch

    from layerzero_cpu.library import native

    sys.path.insert(0, str(Path(__file__).parent))
    cases = {}
    for file in sorted(Path(__file__).parent.glob(f"calls_{given.only}.py")):
        cases |= importlib.import_module(file.stem).CASES
    names = sorted(cases)
    done, begin, made = 0, time.monotonic(), dict.fromkeys(names, 0)
    number = 0
    while done < given.count:
        number += 1
        name = names[number % len(names)]
        dice = random.Random(f"{given.seed}/{number}")
        torch.manual_seed(given.seed * 1_000_003 + number)
        native.set_isa(dice.choice(given.isa or native.isas_here()))
        torch.set_num_threads(dice.choice((1, 1, 2, 3)))
        try:
            count = cases[name](dice)
        except BaseException:
            print(f"case {name}, seed {given.seed}, number {number}, {native.isa()}", file=sys.stderr)
            raise
        done += count
        made[name] += count
    seconds = time.monotonic() - begin
    print(f"{done} calls, none wrong, {seconds:.0f} s:", ", ".join(f"{name} {count}" for name, count in made.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
