"""What verifying hub kernels costs: re-verify of 100 MiB, a cold load beside the bare import, a lock of two kernels.

    python benchmarks/hub.py --machine NAME [--json FILE]

Everything is real: a loopback hub, the store, the library `kernels`. Loads are cold: each in a process of its own, the
bare import and ours in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "layerzero-hub" / "tests"))
from loopback_hub import LoopbackHub
from loopback_kernels import build, universal_kernel
from timing import RESULTS, commit, machine, write_json

from layerzero_hub import installing, lockfile
from layerzero_hub.locking import lock_kernels
from layerzero_hub.policy import from_mapping
from layerzero_hub.probe import Prober
from layerzero_hub.remote import connect
from layerzero_hub.store import Store

LIMITS = {"reverify_100_mib_s": 0.3, "cold_load_over_bare_import_s": 0.3, "lock_two_kernels_s": 5.0}
LOAD = """
import sys, time
import torch, kernels.importer
from pathlib import Path
import layerzero_hub.loading, layerzero_hub.policy
policy = layerzero_hub.policy.discovered(sys.argv[2])
start = time.perf_counter()
if sys.argv[1] == "bare":
    kernels.importer._import_from_path(Path(sys.argv[3]), deps={})
else:
    layerzero_hub.loading.load("org/norm", policy=policy)
print(time.perf_counter() - start)
"""


def timed(call: Any) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, Any]:
    """All figures; medians where something is repeated."""
    folder = Path(tempfile.mkdtemp(prefix="layerzero-hub-bench-"))
    with LoopbackHub() as hub:
        settings = {
            "allow": ["org/norm", "org/other", "org/large"],
            "endpoints": [hub.endpoint],
            "lock": str(folder / "layerzero-hub.lock"),
            "store": str(folder / "store"),
        }
        policy = from_mapping(settings)
        store = Store(policy.store_path)
        hub.put("org/norm", 1, universal_kernel(id="_lz_bench_norm"))
        hub.put("org/other", 1, universal_kernel(id="_lz_bench_other"))
        large = {"__init__.py": b"", **{f"data/{n}.bin": os.urandom(25 * 2**20) for n in range(4)}}
        hub.put("org/large", 1, build(large, "torch-universal", id="_lz_bench_large"))

        def lock(*repos: str) -> lockfile.Lock:
            wanted = [(repo, 1) for repo in repos]
            with Prober() as prober:
                return lock_kernels(wanted, connect(policy, hub.endpoint), prober=prober)

        locking = timed(lambda: lock("org/norm", "org/other"))
        found = lock("org/norm", "org/large")
        lockfile.write(found, policy.lock_path)
        (variant,) = found.find("org/large").variants.values()
        verify = [timed(lambda: store.verify(variant)) for _ in range(rounds)]
        install = timed(lambda: installing.install(found, policy, connect=None))
    path = folder / "layerzero.yaml"
    path.write_text(json.dumps({"hub": settings}))
    (norm,) = found.find("org/norm").variants.values()
    # The bare import leaves compiled files behind, which the store would refuse: it gets a copy.
    copied = shutil.copytree(store.variant_path(norm), folder / "bare" / norm.name)
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(rounds):
        for way, sample in times.items():
            command = [sys.executable, "-c", LOAD, way, str(path), str(copied)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            sample.append(float(done.stdout.strip().splitlines()[-1]))
    bare, ours = (statistics.median(times[way]) for way in ("bare", "ours"))
    return {
        "reverify_100_mib_s": statistics.median(verify),
        "cold_load_over_bare_import_s": ours - bare,
        "cold_load_s": ours,
        "bare_import_s": bare,
        "lock_two_kernels_s": locking,
        "install_frozen_100_mib_s": install,
        "rounds": rounds,
    }


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    figures = measure(chosen.rounds)
    data = {"machine": machine(), "commit": commit(), "command": "python benchmarks/hub.py", "limits": LIMITS}
    data["figures"] = figures
    for name, limit in LIMITS.items():
        print(f"{name:32} {figures[name]:8.3f}   limit {limit}   {'ok' if figures[name] <= limit else 'OVER'}")
    write_json(chosen.json or RESULTS / chosen.machine / "hub.json", data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
