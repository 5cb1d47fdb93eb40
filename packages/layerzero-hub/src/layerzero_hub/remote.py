"""The hub as it answers: publisher, refs, tree, heads, bodies. Each answer is checked against the others."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LockedFile
from layerzero_hub.names import check_commit, check_repo_id, etag_hash
from layerzero_hub.policy import HubPolicy
from layerzero_hub.web import Answer, Sink, Web

_PAGES: Final = 50
_HISTORY_PAGES: Final = 20
_FILES: Final = 20_000


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the tree: path in the repository, size, git object id, and the SHA-256 of an LFS file."""

    path: str
    size: int
    oid: str
    lfs: str | None = None


class _Hashing:
    """Passes bytes on and hashes them on the way: SHA-256 for the lock, git's SHA-1 for the tree's word."""

    def __init__(self, sink: Sink, size: int, progress: Callable[[int], None] | None) -> None:
        self._sink, self._progress = sink, progress
        self.sha256 = hashlib.sha256()
        self.git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def write(self, data: bytes, /) -> None:
        self.sha256.update(data)
        self.git.update(data)
        self._sink.write(data)
        if self._progress is not None:
            self._progress(len(data))


class Remote:
    """One hub endpoint under one policy."""

    def __init__(self, web: Web, policy: HubPolicy) -> None:
        self.web = web
        self.policy = policy

    def check_publisher(self, repo_id: str) -> None:
        """Raise unless the owner is a trusted publisher, where policy asks for one."""
        if not self.policy.require_trusted_publisher:
            return
        owner = repo_id.split("/")[0]
        data, _ = self.web.json(f"/api/organizations/{owner}/overview")
        name = data.get("name") if isinstance(data, dict) else None
        if name != owner or data.get("trustedKernelPublisher") is not True:
            raise refuse("HUB_PUBLISHER_UNTRUSTED", owner)

    def branch(self, repo_id: str, version: int) -> str:
        """The commit branch `v<version>` points at now."""
        found = self.versions(repo_id).get(version)
        if found is None:
            raise refuse("HUB_REVISION_MISSING", f"version {version}", repo_id)
        return found

    def versions(self, repo_id: str) -> dict[int, str]:
        found = self._refs(repo_id, ("branches",))
        numbered = {name[1:]: commit for name, commit in found.items() if re.fullmatch(r"v(0|[1-9][0-9]{0,8})", name)}
        return {int(number): check_commit(numbered[number]) for number in sorted(numbered, key=int)}

    def check_reachable(self, repo_id: str, version: int, commit: str) -> None:
        """Raise HUB_COMMIT_UNREACHABLE unless a branch or tag points at the commit or has it in its history.

        The hub also serves commits that are on none, pull requests among them: anybody can make one.
        """
        refs = self._refs(repo_id, ("branches", "tags"))
        if commit in refs.values():
            return
        for name in sorted(refs, key=lambda one: (one != f"v{version}", one != "main", one))[:_HISTORY_PAGES]:
            path = f"/api/kernels/{repo_id}/commits/{urllib.parse.quote(name, safe='')}"
            for data in islice(self._pages(path), _HISTORY_PAGES):
                listed = data if isinstance(data, list) else ()
                if any(isinstance(entry, dict) and entry.get("id") == commit for entry in listed):
                    return
        raise refuse("HUB_COMMIT_UNREACHABLE", commit, repo_id)

    def _refs(self, repo_id: str, kinds: tuple[str, ...]) -> dict[str, str]:
        check_repo_id(repo_id)
        data, _ = self.web.json(f"/api/kernels/{repo_id}/refs")
        found: dict[str, str] = {}
        for kind in kinds:
            listed = data.get(kind) if isinstance(data, dict) else None
            for entry in listed if isinstance(listed, list) else ():
                name, target = (entry.get("name"), entry.get("targetCommit")) if isinstance(entry, dict) else ("", "")
                if isinstance(name, str) and isinstance(target, str):
                    found.setdefault(name, target)
        return found

    def check_identity(self, repo_id: str, commit: str) -> None:
        """Raise when the hub answers for another repository (renamed or redirected) or another commit."""
        data, _ = self.web.json(f"/api/kernels/{repo_id}/revision/{commit}")
        said = data.get("id") if isinstance(data, dict) else None
        if said != repo_id:
            raise refuse("HUB_REPO_REDIRECTED", repo_id, said if isinstance(said, str) else "nothing")
        if data.get("sha") != commit:
            raise refuse("HUB_COMMIT_MISMATCH", str(data.get("sha")), commit)

    def tree(self, repo_id: str, commit: str) -> tuple[RemoteFile, ...]:
        """Every file of a commit, as the hub lists it; paths are not yet judged."""
        path = f"/api/kernels/{repo_id}/tree/{commit}?recursive=true&expand=false"
        found: list[RemoteFile] = []
        for number, data in enumerate(self._pages(path)):
            if number == _PAGES:
                raise refuse("HUB_TOO_LARGE", f"more than {_PAGES} pages of files", f"{_PAGES} pages")
            if not isinstance(data, list):
                raise refuse("HUB_UNREACHABLE", "the tree is no list")
            found += [_file(entry) for entry in data if isinstance(entry, dict) and entry.get("type") == "file"]
            if len(found) > _FILES:
                raise refuse("HUB_TOO_LARGE", f"{len(found)} files", f"{_FILES} files")
        return tuple(found)

    def fetch(
        self, repo_id: str, commit: str, file: RemoteFile, sink: Sink, progress: Callable[[int], None] | None = None
    ) -> LockedFile:
        """Download one file of a commit into `sink`; HEAD and body must both agree with the tree."""
        if file.size > self.policy.max_bytes:
            raise refuse("HUB_TOO_LARGE", file.size, self.policy.max_bytes, detail=file.path)
        path = f"/kernels/{repo_id}/resolve/{commit}/{urllib.parse.quote(file.path)}"
        self._check_head(self.web.head(path), repo_id, commit, file)
        hashing = _Hashing(sink, file.size, progress)
        # A megabyte a second is the slowest transfer that is not called hung.
        self.web.download(path, hashing, file.size, self.policy.timeout + file.size / 2**20)
        sha256 = hashing.sha256.hexdigest()
        if file.lfs is not None and sha256 != file.lfs:
            raise refuse("HUB_HASH_MISMATCH", file.path, file.lfs)
        if file.lfs is None and hashing.git.hexdigest() != file.oid:
            raise refuse("HUB_HASH_MISMATCH", file.path, file.oid)
        return LockedFile(sha256, file.size)

    # -- details ----------------------------------------------------------------------------------------------------
    def _check_head(self, head: Answer, repo_id: str, commit: str, file: RemoteFile) -> None:
        location = head.get("location")
        if 300 <= head.status < 400 and (location is None or location.startswith("/")):
            raise refuse("HUB_REPO_REDIRECTED", repo_id, location or "nowhere")
        if head.status not in (200, 302, 307):
            raise refuse("HUB_UNREACHABLE", f"{file.path}: status {head.status}")
        said = head.get("x-repo-commit")
        if said != commit:
            raise refuse("HUB_COMMIT_MISMATCH", said or "none", commit)
        etag = etag_hash(head.get("x-linked-etag") or head.get("etag"))
        if etag != (file.lfs or file.oid):
            raise refuse("HUB_HASH_MISMATCH", file.path, file.lfs or file.oid)
        size = head.get("x-linked-size") or (head.get("content-length") if head.status == 200 else None)
        if size is not None and size != str(file.size):
            raise refuse("HUB_SIZE_MISMATCH", size, file.size, detail=file.path)

    def _pages(self, path: str) -> Iterator[Any]:
        """The answers of a path, page after page; each is asked for when it is wanted."""
        while True:
            data, answer = self.web.json(path)
            yield data
            link = answer.get("link") or ""
            if 'rel="next"' not in link:
                return
            target = link.split(";")[0].strip().strip("<>")
            if not target.startswith(self.web.endpoint + "/"):
                raise refuse("HUB_ENDPOINT_REFUSED", target, self.web.endpoint)
            path = target.removeprefix(self.web.endpoint)


def _file(entry: dict[str, Any]) -> RemoteFile:
    path, size, oid, lfs = entry.get("path"), entry.get("size"), entry.get("oid"), entry.get("lfs")
    if not isinstance(path, str) or isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise refuse("HUB_UNREACHABLE", "the tree holds a file without path or size")
    large = etag_hash(lfs.get("oid")) if isinstance(lfs, dict) else None
    if large is not None and len(large) != 64:
        raise refuse("HUB_ETAG_INVALID", large)
    return RemoteFile(path, size, etag_hash(oid), large)


def connect(policy: HubPolicy, endpoint: str | None = None) -> Remote:
    """A Remote for the endpoint in force (HF_ENDPOINT, else the policy's first), refused unless the policy knows it."""
    if policy.offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise refuse("HUB_UNREACHABLE", "offline mode is on")
    chosen = endpoint or os.environ.get("HF_ENDPOINT") or policy.endpoints[0]
    plain = policy.check_endpoint(chosen)
    # An empty user agent breaks the hub's own client when telemetry is off; ours says only who we are.
    headers = {"User-Agent": f"layerzero-hub/{importlib.metadata.version('layerzero-hub')}"}
    # A token belongs to one endpoint, and is never sent where the network could read it.
    if plain == policy.token_endpoint.rstrip("/") and plain.startswith("https://"):
        token = _token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
    return Remote(Web(plain, timeout=policy.timeout, headers=headers), policy)


def _token() -> str | None:
    try:
        from huggingface_hub import get_token
    except ImportError:
        return None
    return get_token()
