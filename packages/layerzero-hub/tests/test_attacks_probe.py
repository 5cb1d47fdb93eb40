"""Code that knows it is being probed: it looks for tokens, homes and other processes, and forges the answer."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import layerzero_hub
from layerzero_cli.root import cli
from layerzero_hub.errors import HubError
from layerzero_hub.lockfile import LockedFile, LockedVariant, digest_of
from layerzero_hub.probe import Prober
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build = _kernels.build

CURIOUS = """
import glob, os, socket
got = []
if any("TOKEN" in name or "secret" in value for name, value in os.environ.items()):
    got.append("environment")
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        with open(path, "rb") as file:
            if b"hf_very_secret" in file.read():
                got.append("token of another process")
    except OSError:
        pass
for path in {places!r}:
    if os.path.exists(path):
        got.append(path)
try:
    socket.create_connection(("127.0.0.1", {port}), 2)
    got.append("network")
except OSError:
    pass
try:
    open({target!r}, "w")
    got.append("files")
except OSError:
    pass
os.setuid(os.getuid())
raise RuntimeError("got " + repr(got))
"""


@pytest.mark.fault(19)
def test_the_probe_finds_no_token_no_network_no_home_and_no_parent(bench, prober):
    """Where this kernel of Linux refuses namespaces, the report must say so."""
    written = Path(layerzero_hub.__file__).with_name("written-by-a-kernel")
    owner = subprocess.Popen(["sleep", "100"], env={"HF_TOKEN": "hf_very_secret"})
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = CURIOUS.format(
            places=[f"{prober.hidden[0]}/secret", f"/proc/{os.getpid()}/environ", os.path.expanduser("~/.cache")],
            port=server.getsockname()[1],
            target=str(written),
        )
        try:
            with pytest.raises(HubError) as caught:
                bench.lock(bench.publish("curious", extra=code), probe=True)
        finally:
            owner.kill()
            owner.wait()
    assert caught.value.code.value == "HUB_PROBE_FAILED"
    if any(note.startswith("no namespaces") for note in prober.notes):
        assert "in reach" in prober.notes[0]
    else:
        assert "got []" in str(caught.value), str(caught.value)
        assert prober.notes == () and not written.exists()


OVERRIDE = """
import torch, warnings
warnings.simplefilter("ignore")
_lib = torch.library.Library("aten", "IMPL")
_lib.impl("relu6", lambda x: x * 0, "CPU")
"""
FORGED = """
import json, os, signal, sys
answer = {"namespaces": [], "changed": [], "findings": [], "others": [], "notes": []}
"""
PATCHED = """
import json
from layerzero_hub import fingerprint
fingerprint.take = fingerprint.compare = lambda *a, **k: ()
fingerprint.namespaces = lambda *a: frozenset()
torch._C._dispatch_dump = lambda name: ""
"""
EVERY_DESCRIPTOR = """
for handle in range(3, 256):
    try:
        os.write(handle, (json.dumps(answer) + "\\n").encode())
    except OSError:
        pass
os._exit(0)
"""
WITH_THE_TOKEN = """
frame = sys._getframe()
while frame is not None:
    if "token" in frame.f_locals and "words" in frame.f_locals:
        answer["token"] = frame.f_locals["token"]
        os.write(frame.f_locals["words"], (json.dumps(answer) + "\\n").encode())
        while True:
            signal.pause()
    frame = frame.f_back
"""


@pytest.mark.fault(19)
@pytest.mark.parametrize(
    ("how", "code"),
    [
        (PATCHED, "HUB_DISPATCHER_CHANGED"),
        (FORGED + EVERY_DESCRIPTOR, "HUB_PROBE_FAILED"),
        (FORGED + WITH_THE_TOKEN, "HUB_DISPATCHER_CHANGED"),
    ],
    ids=["functions", "descriptors", "stack"],
)
def test_the_answer_is_not_the_kernels_to_give(bench, how, code):
    with pytest.raises(HubError) as caught:
        bench.lock(bench.publish("forger", extra=OVERRIDE + how), probe=True)
    assert caught.value.code.value == code, str(caught.value)


def _running(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def _wait_until_gone(word: str) -> None:
    deadline = time.monotonic() + 60
    while _running(word) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _running(word)


LEAVES_ONE = """
import subprocess
subprocess.Popen(["sleep", "{seconds}"], start_new_session=True)
"""


@pytest.mark.fault(19)
def test_what_the_code_started_ends_with_the_probe(bench):
    bench.lock(bench.publish("daemon", extra=LEAVES_ONE.format(seconds="98765.25")), probe=True)
    _wait_until_gone("98765.25")


def _refusing() -> tuple[str, ...]:
    """A way to start the helper where no more namespaces are given; none is needed where none ever are."""
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        return ()
    script = 'for one in user mnt pid net ipc uts; do echo 0 > /proc/sys/user/max_${one}_namespaces; done; exec "$@"'
    return ("unshare", "-Ur", "sh", "-c", script, "sh")


@pytest.mark.needs_tool("unshare")
@pytest.mark.fault(19)
@pytest.mark.slow
def test_what_the_kernel_of_linux_refuses_is_said(bench, monkeypatch):
    """And what the code started is ended all the same, without a namespace that ends with it."""
    monkeypatch.setattr(Prober, "launcher", _refusing())
    repo = bench.publish("bare", extra=LEAVES_ONE.format(seconds="98765.75"))
    path = bench.folder / "layerzero.yaml"
    path.write_text(json.dumps({"hub": bench.settings}))
    monkeypatch.setenv("LAYERZERO_CONFIG", str(path))
    monkeypatch.setenv("HF_ENDPOINT", bench.hub.endpoint)
    done = CliRunner(env={"NO_COLOR": "1"}).invoke(cli, ["hub", "lock", f"{repo}@1"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "no namespaces" in said and "in reach" in said
    _wait_until_gone("98765.75")


def test_an_import_that_hangs(bench, prober, monkeypatch):
    folder = bench.folder / "torch-universal"
    folder.mkdir()
    files = {}
    for path, data in build({"__init__.py": b"import time; time.sleep(100)"}, "x", id="_lz_hang").items():
        name = path.split("/")[-1]
        (folder / name).write_bytes(data)
        files[name] = LockedFile(hashlib.sha256(data).hexdigest(), len(data))
    variant = LockedVariant("torch-universal", digest_of(files), "_lz_hang", (), (), files)
    monkeypatch.setattr(prober, "timeout", 1.0)
    with pytest.raises(HubError) as caught:
        prober.run(folder, variant)
    assert "no end after 1 s" in str(caught.value)
