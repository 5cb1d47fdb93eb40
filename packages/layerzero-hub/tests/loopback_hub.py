"""The loopback hub: the endpoints that `kernels`, `huggingface_hub` and this package ask, over real sockets.

    with LoopbackHub() as hub:
        hub.put("org/name", 1, {"build/torch-universal/__init__.py": b"..."})
        ...HF_ENDPOINT=hub.endpoint...

It binds to 127.0.0.1 alone. `hub.attack` holds switches; each makes the hub lie in one way.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self
from urllib.parse import unquote, urlsplit

__all__ = ["Attack", "LoopbackHub", "Repository"]

_LFS_FROM: Final = 64 * 1024  # the real hub moves large and binary files to LFS


@dataclass
class Attack:
    """How the hub lies. All off by default."""

    body: Callable[[str, bytes], bytes] | None = None
    """path, honest body → what is sent; Content-Length and ETag stay honest."""
    etag: str | None = None
    commit: str | None = None
    redirect: dict[str, str] = field(default_factory=dict)
    """repository → the one it is redirected to, as the hub does for renamed ones."""
    identity: dict[str, str] = field(default_factory=dict)
    """repository → the id that the revision endpoint claims."""
    tree: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    truncate: bool = False
    endless: bool = False
    hang: bool = False
    drip: bool = False
    size: int | None = None


@dataclass
class Repository:
    """A kernel repository: branches with their histories, tags, and the files of each commit."""

    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    history: dict[str, list[str]] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)


class LoopbackHub:
    """A hub that serves what was put in it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.trusted: dict[str, bool] = {}
        self.attack = Attack()
        self.asked: list[str] = []
        self.tokens: list[str] = []
        self._stop = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def endpoint(self) -> str:
        """The address to give as HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def put(self, repo_id: str, version: int, files: Mapping[str, bytes], *, trusted: bool = True) -> str:
        """Commit files and point branch `v<version>` at them; returns the commit."""
        repository = self.repositories.setdefault(repo_id, Repository())
        commit = self.propose(repo_id, files)
        for branch in (f"v{version}", "main"):
            repository.branches[branch] = commit
            repository.history.setdefault(branch, []).insert(0, commit)
        self.trusted.setdefault(repo_id.split("/")[0], trusted)
        return commit

    def propose(self, repo_id: str, files: Mapping[str, bytes]) -> str:
        """A commit that is on no branch, as anybody's pull request is; the hub serves it like any other."""
        repository = self.repositories.setdefault(repo_id, Repository())
        text = json.dumps({path: hashlib.sha256(data).hexdigest() for path, data in files.items()}, sort_keys=True)
        stamp = f"{repo_id} {len(repository.commits)} {text}"
        commit = hashlib.sha1(stamp.encode(), usedforsecurity=False).hexdigest()
        repository.commits[commit] = dict(files)
        return commit

    def close(self) -> None:
        """Stop serving; a hub that is closed is a hub that is down."""
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answers ----------------------------------------------------------------------------------------------------
    def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        query = urlsplit(request.path).query
        self.asked.append(f"{request.command} {path}")
        if request.headers.get("Authorization"):
            self.tokens.append(request.headers["Authorization"])
        if self.attack.hang:
            self._stop.wait(60)
            return
        for moved, target in self.attack.redirect.items():
            if moved in path:
                return _send(request, 307, b"", {"Location": request.path.replace(moved, target)})
        for pattern, answer in self._routes():
            match = re.fullmatch(pattern, path)
            if match:
                return answer(request, *match.groups(), query, body)
        _error(request, "RepoNotFound")

    def _routes(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        repo = r"([^/]+/[^/]+)"
        return (
            (r"/api/organizations/([^/]+)/overview", self._organization),
            (rf"/api/kernels/{repo}/refs", self._refs),
            (rf"/api/kernels/{repo}/commits/([^/]+)", self._commits),
            (rf"/api/kernels/{repo}(?:/revision/([^/]+))?", self._revision),
            (rf"/api/kernels/{repo}/tree/([^/]+)(/.*)?", self._tree),
            (rf"/kernels/{repo}/resolve/([^/]+)/(.+)", self._resolve),
        )

    def _organization(self, request: Any, name: str, query: str, body: bool) -> None:
        if name not in self.trusted:
            return _error(request, "RepoNotFound")
        fields = {"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": self.trusted[name]}
        _json(request, fields)

    def _refs(self, request: Any, repo_id: str, query: str, body: bool) -> None:
        repository = self.repositories.get(repo_id)
        if repository is None:
            return _error(request, "RepoNotFound")
        branches, tags = (
            [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": commit} for n, commit in refs.items()]
            for kind, refs in (("heads", repository.branches), ("tags", repository.tags))
        )
        _json(request, {"branches": branches, "converts": [], "tags": tags})

    def _commits(self, request: Any, repo_id: str, revision: str, query: str, body: bool) -> None:
        repository = self.repositories.get(repo_id)
        if repository is None or revision not in {**repository.branches, **repository.tags}:
            return _error(request, "RevisionNotFound")
        listed = repository.history.get(revision) or [repository.tags[revision]]
        _json(request, [{"id": commit, "title": "", "message": "", "authors": []} for commit in listed])

    def _revision(self, request: Any, repo_id: str, revision: str | None, query: str, body: bool) -> None:
        commit = self._commit(repo_id, revision or "main")
        if commit is None:
            return _error(request, "RevisionNotFound")
        said = self.attack.identity.get(repo_id, repo_id)
        files = [{"rfilename": path} for path in self.repositories[repo_id].commits[commit]]
        fields = {"id": said, "_id": commit[:24], "sha": commit, "author": repo_id.split("/")[0], "private": False}
        _json(request, {**fields, "downloads": 0, "likes": 0, "tags": [], "siblings": files})

    def _tree(self, request: Any, repo_id: str, revision: str, below: str | None, query: str, body: bool) -> None:
        commit = self._commit(repo_id, revision)
        if commit is None:
            return _error(request, "RevisionNotFound")
        files = self.repositories[repo_id].commits[commit]
        if "recursive=true" in query.lower():
            listed = [_entry(path, data) for path, data in files.items()]
            if self.attack.tree:
                listed = self.attack.tree(listed)
            return _json(request, listed)
        prefix = (below or "").strip("/")
        start = f"{prefix}/" if prefix else ""
        names = {path.removeprefix(start).split("/")[0] for path in files if path.startswith(start)}
        folders = [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": start + name}
            for name in sorted(names)
            if start + name not in files
        ]
        plain = [_entry(start + name, files[start + name]) for name in sorted(names) if start + name in files]
        _json(request, [*folders, *plain])

    def _resolve(self, request: Any, repo_id: str, revision: str, path: str, query: str, body: bool) -> None:
        commit = self._commit(repo_id, revision)
        if commit is None:
            return _error(request, "RevisionNotFound")
        data = self.repositories[repo_id].commits[commit].get(path)
        if data is None:
            return _error(request, "EntryNotFound", commit)
        entry = _entry(path, data)
        headers = {"X-Repo-Commit": self.attack.commit or commit, "ETag": f'"{entry["oid"]}"'}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(len(data))}
        if self.attack.etag is not None:
            headers |= {"ETag": self.attack.etag}
            headers.pop("X-Linked-Etag", None)
        sent = self.attack.body(path, data) if self.attack.body else data
        length = len(data) if self.attack.size is None else self.attack.size
        if not body:
            return _send(request, 200, b"", {**headers, "Content-Length": str(length)})
        if self.attack.endless:
            return self._endless(request, headers)
        if self.attack.truncate:
            sent = sent[: len(sent) // 2]
            request.close_connection = True
        if self.attack.drip:
            return self._drip(request, headers, sent)
        _send(request, 200, sent, {**headers, "Content-Length": str(length if not self.attack.truncate else len(data))})

    def _endless(self, request: Any, headers: Mapping[str, str]) -> None:
        _head(request, 200, {**headers, "Connection": "close"})
        request.close_connection = True
        while not self._stop.is_set():
            try:
                request.wfile.write(b"#" * 65536)
            except OSError:
                return

    def _drip(self, request: Any, headers: Mapping[str, str], data: bytes) -> None:
        _head(request, 200, {**headers, "Content-Length": str(len(data))})
        for byte in data:
            if self._stop.wait(0.2):
                return
            try:
                request.wfile.write(bytes([byte]))
                request.wfile.flush()
            except OSError:
                return

    def _commit(self, repo_id: str, revision: str) -> str | None:
        repository = self.repositories.get(repo_id)
        if repository is None:
            return None
        commit = repository.branches.get(revision, revision)
        return commit if commit in repository.commits else None


def _entry(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "oid": oid, "size": len(data), "path": path}
    if len(data) >= _LFS_FROM or path.endswith(".so"):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _json(request: Any, data: Any) -> None:
    _send(request, 200, json.dumps(data).encode(), {"Content-Type": "application/json"})


def _error(request: Any, code: str, commit: str = "") -> None:
    headers = {"X-Error-Code": code, "X-Error-Message": code}
    if commit:
        headers["X-Repo-Commit"] = commit
    _send(request, 404, json.dumps({"error": code}).encode(), headers)


def _send(request: Any, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    try:
        _head(request, status, {"Content-Length": str(len(body)), **headers})
        if body and request.command != "HEAD":
            request.wfile.write(body)
    except OSError:
        time.sleep(0)  # the client went away, as a client that refuses does


def _head(request: Any, status: int, headers: Mapping[str, str]) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
