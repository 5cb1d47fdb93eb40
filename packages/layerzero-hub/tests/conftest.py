"""One loopback hub, one victim process with the bare library, and a bench to lock and load in."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from layerzero_hub import installing, loading, signing
from layerzero_hub.errors import HubError
from layerzero_hub.locking import lock_kernels, save
from layerzero_hub.policy import from_mapping
from layerzero_hub.probe import Prober
from layerzero_hub.remote import connect
from layerzero_hub.store import Store
from tools.pytest_fixtures import module_beside

_hub = module_beside(__file__, "loopback_hub")
Attack, LoopbackHub = _hub.Attack, _hub.LoopbackHub
_kernels = module_beside(__file__, "loopback_kernels")
compiled_kernel, universal_kernel = _kernels.compiled_kernel, _kernels.universal_kernel

_VICTIM = """
import json, sys
import torch, kernels
for line in sys.stdin:
    scope = {"kernels": kernels, "torch": torch}
    try:
        exec(json.loads(line), scope)
        answer = {"value": scope.get("value")}
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
    print("ANSWER " + json.dumps(answer), flush=True)
"""
_serial = itertools.count(1)


class Victim:
    """A process with `kernels` alone, pointed at the loopback hub: what happens to whoever calls it unprotected."""

    def __init__(self, endpoint: str, home: Path) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "KERNELS_"))}
        clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONPYCACHEPREFIX": ""}
        clean.pop("PYTHONDONTWRITEBYTECODE", None)
        self.home = home
        self.child = subprocess.Popen(
            [sys.executable, "-c", _VICTIM],
            env=clean,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, code: str):
        """`value` of the code, or the error as {"error": …}."""
        self.child.stdin.write(json.dumps(code) + "\n")
        self.child.stdin.flush()
        for line in self.child.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                return answer["value"] if "value" in answer else answer
        raise AssertionError("the victim died")


class Bench:
    """A hub, a policy and a store of one test; kernels with ids of their own."""

    def __init__(self, hub: LoopbackHub, folder: Path, prober: Prober) -> None:
        self.hub, self.folder, self.prober = hub, folder, prober
        self.mark = folder / "the-kernel-ran"
        self.settings = {
            "allow": [],
            "endpoints": [hub.endpoint],
            "lock": str(folder / "layerzero-hub.lock"),
            "store": str(folder / "store"),
            "timeout": 60,
        }

    def publish(
        self, name: str = "norm", *, version: int = 1, org: str | None = None, extra: str = "", metadata=None, **changes
    ):
        """Put a universal kernel in the hub and allow it; its import leaves a mark."""
        repo = f"{org or f'org{next(_serial)}'}/{name}"
        changes |= metadata or {}
        changes.setdefault("id", f"_lz_test_{os.getpid()}_{next(_serial)}")
        # Where it may not write, as in the probe or as another user, it leaves none.
        mark = f"with contextlib.suppress(OSError), open({str(self.mark)!r}, 'a') as _mark:\n    _mark.write('ran')\n"
        code = f"\nimport contextlib\n{mark}{extra}"
        self.put(repo, universal_kernel(extra=code, **changes), version=version)
        return repo

    def put(self, repo: str, files, *, version: int = 1, trusted: bool = True) -> str:
        if repo not in self.settings["allow"]:
            self.settings["allow"] = [*self.settings["allow"], repo]
        return self.hub.put(repo, version, files, trusted=trusted)

    @property
    def policy(self):
        return from_mapping(self.settings)

    @property
    def store(self):
        return Store(self.policy.store_path)

    def lock(self, *repos: str, version: int = 1, probe: bool = False, **options):
        """Lock and write; without a probe unless asked, so that most tests start no process."""
        known = signing.read_known(self.policy)
        found = lock_kernels(
            [(repo, version) for repo in repos],
            connect(self.policy, self.hub.endpoint),
            known=known,
            prober=self.prober if probe else None,
            **options,
        )
        save(found, self.policy)
        return found

    def read(self):
        return signing.read_lock(self.policy)

    def install(self, *, frozen: bool = False, allow_rollback: bool = False, **options):
        remote = None if frozen else (lambda: connect(self.policy, self.hub.endpoint))
        lock = signing.read_lock(self.policy, allow_rollback=allow_rollback)
        options |= {"allow_rollback": allow_rollback, "connect": remote}
        return installing.install(lock, self.policy, **options)

    def verify(self):
        return installing.verify(self.read(), self.policy)

    def load(self, repo: str, version: int | None = None):
        return loading.load(repo, version, policy=self.policy)

    def build(self, repo: str) -> Path:
        """The folder of the only build of a locked kernel."""
        (variant,) = self.read().find(repo).variants.values()
        return self.store.variant_path(variant)

    @contextmanager
    def refused(self, code: str):
        """The block raises HubError with this code, and no code of any kernel ran meanwhile."""
        self.mark.unlink(missing_ok=True)
        with pytest.raises(HubError) as caught:
            yield caught
        assert caught.value.code.value == code, str(caught.value)
        assert not self.mark.exists(), "the kernel's code ran"


@pytest.fixture(scope="session")
def served():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture(scope="session")
def prober(tmp_path_factory):
    """One process for all probes; it starts with the first. A folder that stands for a home has a secret in it."""
    home = tmp_path_factory.mktemp("home")
    (home / "secret").write_text("hf_secret")
    with Prober(hidden=(str(home),)) as found:
        yield found


@pytest.fixture
def bench(served, prober, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("layerzero_hub.store._harmful", {})  # what did harm in an earlier test
    served.attack = Attack()
    yield Bench(served, tmp_path, prober)
    served.attack = Attack()


@pytest.fixture(scope="session")
def victim(served, tmp_path_factory):
    found = Victim(served.endpoint, tmp_path_factory.mktemp("victim"))
    yield found
    found.child.kill()
    found.child.wait()
    found.child.stdin.close()
    found.child.stdout.close()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Files of a kernel compiled with g++ against torch's stable ABI; built once."""
    return compiled_kernel(tmp_path_factory.mktemp("compiled"))
