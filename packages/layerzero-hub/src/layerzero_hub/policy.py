"""`[hub]` of the policy: what is allowed, denied, revoked, and where lock and store lie. The default denies everything.

Files that are named (LAYERZERO_CONFIG, `--policy`) or lie at user level may allow; one that merely lies in the working
directory may only deny, revoke and switch off (the core refuses anything else in it). Refusals of all files add up.
"""

from __future__ import annotations

import fnmatch
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from layerzero import env
from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LOCK_NAME
from layerzero_hub.mapping import KernelMapping, parse_mappings
from layerzero_hub.metadata import WORKFLOW
from layerzero_hub.names import check_repo_id, reader

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
# What a manylinux_2_28 build may ask for without being asked about: libc's own parts, libstdc++, and what torch brings.
SYSTEM_LIBS: Final = (
    "libc.so.6 libm.so.6 libdl.so.2 librt.so.1 libpthread.so.0 libgcc_s.so.1 libstdc++.so.6 ld-linux-x86-64.so.2 "
    "ld-linux-aarch64.so.1 libgomp.so.1 libtorch.so libtorch_cpu.so libtorch_cuda.so libtorch_python.so libc10.so "
    "libc10_cuda.so libcudart.so.12 libcudart.so.13 libcuda.so.1"
).split()


@dataclass(frozen=True, slots=True)
class HubPolicy:
    """What the files said, taken together. `lock` is empty unless a trusted file names it."""

    enabled: bool = True
    offline: bool = False
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    endpoints: tuple[str, ...] = (DEFAULT_ENDPOINT,)
    require_trusted_publisher: bool = True
    needed_libs: frozenset[str] = frozenset()
    signing_keys: tuple[str, ...] = ()
    revoked: frozenset[str] = frozenset()
    publishers: tuple[str, ...] = ()
    token_endpoint: str = DEFAULT_ENDPOINT
    lock: str = ""
    store: str = ""
    max_bytes: int = 4 * 2**30
    timeout: float = 30.0
    kernels: tuple[KernelMapping, ...] = field(default=())

    def check_allowed(self, repo_id: str, *, wanted_by: str = "") -> None:
        """Raise unless the id is allowed by name and denied by nothing. Deny is looked at first, and beats allow."""
        if not self.enabled:
            raise refuse("HUB_DISABLED")
        check_repo_id(repo_id)
        for pattern in sorted(self.deny):
            if fnmatch.fnmatchcase(repo_id.lower(), pattern.lower()):
                raise refuse("HUB_DENIED", repo_id, pattern)
        if repo_id not in self.allow:
            if wanted_by:
                raise refuse("HUB_DEPENDENCY_NOT_ALLOWED", repo_id, wanted_by)
            raise refuse("HUB_NOT_ALLOWED", repo_id)

    def check_endpoint(self, endpoint: str) -> str:
        plain = endpoint.rstrip("/")
        if plain not in {one.rstrip("/") for one in self.endpoints}:
            raise refuse("HUB_ENDPOINT_REFUSED", plain, ", ".join(self.endpoints))
        return plain

    def check_digest(self, digest: str) -> None:
        if digest in self.revoked:
            raise refuse("HUB_REVOKED", digest)

    @property
    def lock_path(self) -> Path:
        """Where the lock lies: where the policy says, else in the working directory."""
        return Path(self.lock or LOCK_NAME).expanduser()

    @property
    def store_path(self) -> Path:
        """Where verified kernels lie: `hub.store`, LAYERZERO_HUB_STORE, or the user's data directory."""
        chosen = self.store or os.environ.get("LAYERZERO_HUB_STORE", "")
        if chosen:
            return Path(chosen).expanduser()
        import platformdirs

        return Path(platformdirs.user_data_dir("layerzero", appauthor=False)) / "hub"


def discovered(path: str | os.PathLike[str] | None = None, *, cwd: Path | None = None) -> HubPolicy:
    """The hub policy of the named file, or of the files the core finds."""
    from layerzero.policy.load import discover, load_file

    if path is not None:
        found: Iterable[tuple[str, bool]] = [(os.fspath(path), True)]
    else:
        found = [(os.fspath(one.path), one.trusted) for one in discover(env.read(os.environ), cwd=cwd)]
    policy = HubPolicy()
    for name, trusted in found:
        spoken = load_file(name, trusted=trusted).settings.get("hub")
        if isinstance(spoken, Mapping):
            policy = _over(policy, from_mapping(spoken, base=Path(name).parent), set(spoken))
    return policy


def _over(weak: HubPolicy, strong: HubPolicy, said: set[str]) -> HubPolicy:
    """The stronger file's words over the weaker's; what refuses adds up, so that no file lifts another's refusal."""
    changes: dict[str, Any] = {name: getattr(strong, name) for name in said}
    changes["deny"] = weak.deny | strong.deny
    changes["revoked"] = weak.revoked | strong.revoked
    if "allow" in said and weak.allow:
        changes["allow"] = weak.allow | strong.allow
    if not weak.enabled:
        changes["enabled"] = False
    return replace(weak, **changes)


def from_mapping(data: Mapping[str, Any], *, base: Path | None = None) -> HubPolicy:
    """A policy from the plain values of `[hub]`; only HubError is raised. Relative paths are seen from `base`."""
    known = {item.name for item in fields(HubPolicy)}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            near = ", ".join(sorted(known))
            raise refuse("HUB_POLICY_INVALID", str(key), f"unknown key; known: {near}")
        values[key] = _READ[key](key, value)
    root = base or Path()
    for key in ("lock", "store"):
        if values.get(key):
            values[key] = str(root / Path(values[key]).expanduser())
    if "signing_keys" in values:
        values["signing_keys"] = tuple(str(root / Path(one).expanduser()) for one in values["signing_keys"])
    for repo_id in values.get("allow", ()):
        if "*" in repo_id or "?" in repo_id or "[" in repo_id:
            raise refuse("HUB_POLICY_INVALID", "allow", f"{repo_id}: exact ids only, no patterns")
        check_repo_id(repo_id)
    return HubPolicy(**values)


_bool = reader(bool, "true or false")
_text = reader(str, "a text", lambda text: text and "\0" not in text and len(text) <= 4096)
_list = reader((list, tuple), "a list of texts")
_bytes = reader(int, "a number of bytes above 0", lambda count: 0 < count < 2**48)
_seconds = reader((int, float), "seconds above 0", lambda count: 0 < count <= 86400)


def _texts(key: str, value: object) -> tuple[str, ...]:
    return tuple(_text(key, item) for item in _list(key, value))


def _set(key: str, value: object) -> frozenset[str]:
    return frozenset(_texts(key, value))


def _digests(key: str, value: object) -> frozenset[str]:
    """Digests as people write them; what is none would revoke nothing, and is an error."""
    found = set()
    for text in _texts(key, value):
        match = re.fullmatch(r"(?:sha256[:-])?([0-9a-f]{64})", text.strip().lower())
        if match is None:
            raise refuse("HUB_POLICY_INVALID", key, f"{text}: a digest, sha256: and 64 hexadecimal digits")
        found.add(f"sha256:{match.group(1)}")
    return frozenset(found)


def _endpoints(key: str, value: object) -> tuple[str, ...]:
    found = _texts(key, value)
    if not found:
        raise refuse("HUB_POLICY_INVALID", key, "at least one address")
    for one in found:
        _endpoint(key, one)
    return found


def _endpoint(key: str, value: object) -> str:
    """`https://host[:port][/path]`, or http to this machine. A user name is refused: it makes one host look another."""
    text: str = _text(key, value)
    try:
        split = urllib.parse.urlsplit(text)
        host, _ = split.hostname, split.port
    except ValueError:
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: no address") from None
    plain = text.isascii() and text.isprintable() and not set(text) & set(" \\")
    if not host or "@" in split.netloc or split.query or split.fragment or not plain:
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: scheme, host, port and path, nothing else")
    if split.scheme != "https" and not (split.scheme == "http" and host in _LOOPBACK):
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: https only, but for loopback")
    return text


def _publishers(key: str, value: object) -> tuple[str, ...]:
    found = _texts(key, value)
    for one in found:
        if not WORKFLOW.match(one):
            shape = "https://github.com/OWNER/REPO/.github/workflows/FILE@refs/heads/BRANCH"
            raise refuse("HUB_POLICY_INVALID", key, f"{one}: the workflow that signs, as {shape}")
    return found


def _token_endpoint(key: str, value: object) -> str:
    text = _endpoint(key, value)
    if not text.startswith("https://"):
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: a token goes over https only")
    return text


_READ: Final[Mapping[str, Any]] = {
    "enabled": _bool,
    "offline": _bool,
    "allow": _set,
    "deny": _set,
    "endpoints": _endpoints,
    "require_trusted_publisher": _bool,
    "needed_libs": _set,
    "signing_keys": _texts,
    "revoked": _digests,
    "publishers": _publishers,
    "token_endpoint": _token_endpoint,
    "lock": _text,
    "store": _text,
    "max_bytes": _bytes,
    "timeout": _seconds,
    "kernels": lambda key, value: parse_mappings(value),
}
