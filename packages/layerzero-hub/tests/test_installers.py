"""Six installers at once, killed at random points: only whole, verified folders remain.

`make check` plays a few rounds; `make prove NAME=hub` plays 200 and counts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from layerzero import env
from layerzero_hub import lockfile
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build = _kernels.build

ROUNDS = 200 if env.read().prove else 6
INSTALLERS = 6
FORGE = """
import json, os, sys
from layerzero_hub import installing, lockfile
from layerzero_hub.policy import discovered
from layerzero_hub.remote import connect
policy = discovered(sys.argv[1])
for line in sys.stdin:
    children = []
    for _ in range(int(line)):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                lock = lockfile.read(policy.lock_path)
                asked = lambda: connect(policy, lock.endpoint)
                installing.install(lock, policy, connect=asked)
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    print(json.dumps(children), flush=True)
    print(json.dumps([os.waitpid(pid, 0)[1] for pid in children]), flush=True)
"""


class Forge:
    """A process that has imported everything and forks installers when told to."""

    def __init__(self, policy_path):
        self.child = subprocess.Popen(
            [sys.executable, "-c", FORGE, str(policy_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, count: int) -> list[int]:
        self.child.stdin.write(f"{count}\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def wait(self) -> list[int]:
        return json.loads(self.child.stdout.readline())

    def close(self) -> None:
        self.child.stdin.close()
        self.child.wait()
        self.child.stdout.close()


@pytest.mark.timeout(3600)
def test_only_whole_builds_remain(bench, tmp_path):
    files = {"__init__.py": b"X = 1\n"} | {f"data/{n}.bin": os.urandom(200_000) for n in range(12)}
    bench.put("org/many", build(files, "torch-universal", id="_lz_many"))
    bench.lock("org/many")
    policy_path = tmp_path / "layerzero.yaml"
    policy_path.write_text(json.dumps({"hub": bench.settings}))
    (variant,) = bench.read().find("org/many").variants.values()
    chance, killed, whole, forge = random.Random(20261115), 0, 0, Forge(policy_path)
    for _ in range(ROUNDS):
        shutil.rmtree(bench.store.root)
        children = forge.start(INSTALLERS)
        for pid in chance.sample(children, chance.randrange(1, INSTALLERS)):
            time.sleep(chance.uniform(0, 0.12))
            os.kill(pid, signal.SIGKILL)  # waited for below, so that the number still means this child
        endings = forge.wait()
        killed += endings.count(signal.SIGKILL)
        survivors = endings.count(0)
        assert set(endings) <= {0, signal.SIGKILL}, endings
        # Whatever is under its final name is whole; what a killed one left is collected by the next.
        for entry in bench.store.root.iterdir():
            if entry.name.startswith("sha256-"):
                bench.store.verify(variant)
                whole += 1
        if survivors:
            bench.store.verify(variant)
        with bench.store.staging():
            pass
        left = [entry.name for entry in bench.store.root.iterdir() if entry.name.startswith(("staging-", "damaged-"))]
        assert left == []
    forge.close()
    assert killed > 0 and whole > 0
    print(f"hub: {ROUNDS} rounds, {INSTALLERS} installers each, {killed} killed, {whole} whole builds, 0 partial")


def test_installed_builds_of_another_process_are_used_as_they_are(bench):
    repo = bench.publish("shared")
    bench.lock(repo)
    place = bench.build(repo)
    before = os.stat(place / "detail.py").st_mtime_ns
    bench.install()
    assert os.stat(place / "detail.py").st_mtime_ns == before
    assert lockfile.read(bench.policy.lock_path).find(repo)
