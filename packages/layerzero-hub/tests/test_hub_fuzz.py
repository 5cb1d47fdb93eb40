"""Lockfile and policy meet whatever bytes there are: our exceptions only.

`make check` plays a few thousand; `make prove NAME=hub` plays 1 000 000 each.
"""

from __future__ import annotations

import json
import random

import pytest

from layerzero import env
from layerzero.errors import LayerZeroError
from layerzero_hub import lockfile
from layerzero_hub.metadata import parse as parse_metadata
from layerzero_hub.names import check_path, check_repo_id, etag_hash
from layerzero_hub.policy import from_mapping

COUNT = 1_000_000 if env.read().prove else 3_000
FILES = {"metadata.json": {"sha256": "0" * 64, "size": 3}, "__init__.py": {"sha256": "1" * 64, "size": 9}}
DIGEST = lockfile.digest_of({path: lockfile.LockedFile(**item) for path, item in FILES.items()})
VARIANT = {"digest": DIGEST, "id": "_x_1", "ops-namespaces": ["_x"], "kernel-depends": [], "files": FILES}
KERNEL = {"repo-id": "org/x", "version": 1, "commit": "a" * 40, "variants": {"torch-universal": VARIANT}}
HEAD = {"lock-version": 2, "lock-id": "c" * 32, "serial": 7, "expires": "2027-01-31T00:00:00Z"}
LOCK = {**HEAD, "endpoint": "https://hub.example", "kernels": [KERNEL]}
POLICY = {
    "enabled": True,
    "allow": ["a/b"],
    "deny": ["c/*"],
    "endpoints": ["https://hub.example"],
    "revoked": ["sha256:" + "0" * 64],
    "timeout": 3,
    "max_bytes": 10,
    "kernels": [{"repo": "a/b", "op": "rms_norm", "function": "f", "arguments": ["x"], "keywords": {"a": "eps"}}],
}
METADATA = {
    "id": "_x",
    "name": "x-norm",
    "version": 1,
    "license": "MIT",
    "python-depends": [],
    "backend": {"type": "cpu"},
}
ODD = [
    None,
    True,
    -1,
    0,
    1e308,
    float("nan"),
    "",
    "../..",
    "\u202e",
    "a" * 300,
    [],
    {},
    [[]],
    {"a": {}},
    2**70,
    "\ud800",
    b"x",
]


def mutate(value, chance: random.Random, depth: int = 0):
    """A copy with one thing changed somewhere."""
    if depth > 5 or chance.random() < 0.15:
        return chance.choice(ODD)
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        changed = dict(value)
        what = chance.random()
        if what < 0.15:
            del changed[key]
        elif what < 0.3:
            changed[chance.choice(["x", key + "y", "", "é", "files"])] = chance.choice(ODD)
        else:
            changed[key] = mutate(value[key], chance, depth + 1)
        return changed
    if isinstance(value, list) and value:
        index = chance.randrange(len(value))
        return [*value[:index], mutate(value[index], chance, depth + 1), *value[index + 1 :]]
    if isinstance(value, str) and value:
        place = chance.randrange(len(value))
        return value[:place] + chance.choice(["/", "..", "\\", "\0", "é", "x", "\n", '"']) + value[place + 1 :]
    return chance.choice(ODD)


def test_the_seeds_themselves_pass():
    assert lockfile.parse(json.dumps(LOCK).encode()).kernels[0].repo_id == "org/x"
    assert from_mapping(POLICY).allow == {"a/b"}
    assert parse_metadata(json.dumps(METADATA).encode(), "x").id == "_x"


@pytest.mark.timeout(3600)
def test_lockfiles():
    chance, refused = random.Random(1), 0
    base = json.dumps(LOCK).encode()
    for number in range(COUNT):
        if number % 3:
            raw = json.dumps(mutate(LOCK, chance), default=str).encode("utf-8", "surrogatepass")
        else:
            raw = bytearray(base)
            for _ in range(chance.randrange(1, 5)):
                raw[chance.randrange(len(raw))] = chance.randrange(256)
            raw = bytes(raw)
        try:
            lockfile.parse(raw)
        except LayerZeroError:
            refused += 1
    assert refused > COUNT * 0.6
    print(f"hub: lockfile fuzz {COUNT} iterations, {refused} refused, no other exception")


@pytest.mark.timeout(3600)
def test_policies():
    chance, refused = random.Random(2), 0
    for _ in range(COUNT):
        changed = mutate(POLICY, chance)
        if not isinstance(changed, dict):
            continue
        try:
            from_mapping(changed)
        except LayerZeroError:
            refused += 1
    assert refused > COUNT * 0.3
    print(f"hub: policy fuzz {COUNT} iterations, {refused} refused, no other exception")


def test_metadata_and_names():
    chance = random.Random(3)
    for _ in range(COUNT // 10):
        for call, value in (
            (
                lambda v: parse_metadata(json.dumps(v, default=str).encode("utf-8", "surrogatepass"), "x"),
                mutate(METADATA, chance),
            ),
            (check_path, mutate("sub/file.py", chance)),
            (check_repo_id, mutate("org/name", chance)),
            (etag_hash, mutate('"' + "a" * 40 + '"', chance)),
        ):
            try:
                call(value)
            except LayerZeroError:
                pass
