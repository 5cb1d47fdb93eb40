"""Which kernel runs eleven typical calls of attention on this machine, and why not each of the others.

    python benchmarks/explain.py --out benchmarks/results/NAME/explain.txt [--device cuda:0]

Each call is a command line of `lz explain`, and the page holds what it printed: prefill from 512 to 16 384, decode of
one to 64 sequences, head_dim 64, 128 and 256, grouped and plain heads, a window, a mask. Nothing is run on the device.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from click.testing import CliRunner

from layerzero_cli.root import cli

CALLS = (
    "--q 1,32,512,128 --k 1,8,512,128 --causal top_left",
    "--q 1,32,2048,128 --k 1,8,2048,128 --causal top_left",
    "--q 1,32,8192,128 --k 1,8,8192,128 --causal top_left",
    "--q 1,32,16384,128 --k 1,8,16384,128 --causal top_left",
    "--q 1,32,1,128 --k 1,8,4096,128",
    "--q 16,32,1,128 --k 16,8,4096,128",
    "--q 64,32,1,128 --k 64,8,4096,128",
    "--shape 4,16,1024,64",
    "--shape 1,8,4096,256 --causal top_left",
    "--q 1,32,4096,128 --k 1,8,4096,128 --causal top_left --window 1024,0",
    "--shape 2,8,512,64 --mask bool",
)


def explained(call: str, device: str) -> tuple[str, int]:
    """What `lz explain` prints for one call, under its command line, and its exit code."""
    words = ["explain", "attention", *call.split(), "--device", device, "--all"]
    done = CliRunner().invoke(cli, words)
    return f"$ lz {' '.join(words)}\n{done.output.rstrip()}\n", done.exit_code


def main() -> int:
    """One page; exit code 1 when a call has no kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda:0, or a name such as h100")
    parser.add_argument("--out", type=Path, help="the page; without it, the terminal")
    given = parser.parse_args()
    pages = [explained(call, given.device) for call in CALLS]
    text = "\n".join(page for page, _ in pages)
    if given.out is None:
        print(text, end="")
    else:
        given.out.write_text(text)
    return max(code for _, code in pages)


if __name__ == "__main__":
    raise SystemExit(main())
