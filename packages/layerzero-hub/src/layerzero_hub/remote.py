"""The hub as it answers: publisher, refs, tree, heads, bodies. Each answer is checked against the others.

HTTP with nothing taken on trust: no redirect is followed unasked, every answer has a size and a deadline. The standard
library is used, and not the hub's own client, because that client follows redirects between repositories, waits for a
silent server, and writes to names the server chooses. Tokens come from huggingface_hub.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message
from itertools import islice
from typing import IO, Any, Final

from layerzero_hub.errors import refuse
from layerzero_hub.lockfile import LockedFile
from layerzero_hub.names import check_commit, check_repo_id, etag_hash
from layerzero_hub.policy import HubPolicy

_JSON_BYTES: Final = 32 * 2**20
_CHUNK: Final = 2**20
_HOPS: Final = 3
_PAGES: Final = 50
_HISTORY_PAGES: Final = 20
_FILES: Final = 20_000


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Message, newurl: str) -> None:
        return None


class Web:
    """A client for one endpoint."""

    def __init__(self, endpoint: str, *, timeout: float, headers: Mapping[str, str] | None = None) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.timeout = timeout
        self.headers = dict(headers or {})
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._origin = urllib.parse.urlsplit(self.endpoint)[:2]  # scheme and host: http is not https of the same name

    def head(self, path: str) -> tuple[int, Message]:
        """Status and headers of a path below the endpoint; a redirect is an answer, not followed."""
        with self._open("HEAD", self.endpoint + path, time.monotonic() + self.timeout) as response:
            return response.status, response.headers

    def json(self, path: str) -> tuple[Any, Message]:
        """A JSON answer and its headers. A redirect, as for a renamed repository, raises HUB_REPO_REDIRECTED."""
        deadline = time.monotonic() + self.timeout
        with self._open("GET", self.endpoint + path, deadline) as response:
            if 300 <= response.status < 400:
                raise refuse("HUB_REPO_REDIRECTED", path, response.headers.get("location") or "elsewhere")
            _raise_for(response, path)
            body = bytearray()
            for chunk in self._chunks(response, deadline, path):
                body += chunk
                if len(body) > _JSON_BYTES:
                    raise refuse("HUB_TOO_LARGE", len(body), _JSON_BYTES, detail=path)
        try:
            return json.loads(body), response.headers
        except (ValueError, RecursionError):
            raise refuse("HUB_UNREACHABLE", f"{path}: the answer is no JSON") from None

    def download(self, path: str, size: int, deadline_s: float) -> Iterator[bytes]:
        """The body of a path, exactly `size` bytes; a file host may be redirected to, tokenless."""
        url, deadline = self.endpoint + path, time.monotonic() + deadline_s
        for _ in range(_HOPS):
            with self._open("GET", url, deadline) as response:
                if 300 <= response.status < 400:
                    url = self._next(url, response.headers.get("location"))
                    continue
                _raise_for(response, path)
                came = 0
                for chunk in self._chunks(response, deadline, path):
                    came += len(chunk)
                    if came > size:
                        raise refuse("HUB_TOO_LARGE", f"more than {size}", size, detail=path)
                    yield chunk
                if came != size:
                    raise refuse("HUB_SIZE_MISMATCH", came, size, detail=path)
                return
        raise refuse("HUB_UNREACHABLE", f"{path}: redirected more than {_HOPS} times")

    # -- plumbing ---------------------------------------------------------------------------------------------------
    def _next(self, url: str, location: str | None) -> str:
        target = urllib.parse.urljoin(url, location or "")
        split = urllib.parse.urlsplit(target)
        if split.scheme != "https" and split[:2] != self._origin:
            raise refuse("HUB_REPO_REDIRECTED", url, target)
        return target

    @contextmanager
    def _open(self, method: str, url: str, deadline: float) -> Iterator[Any]:
        split = urllib.parse.urlsplit(url)
        # A token never leaves for another host, nor over http.
        own = split[:2] == self._origin and split.scheme == "https"
        headers = {k: v for k, v in self.headers.items() if own or k.lower() != "authorization"}
        request = urllib.request.Request(url, method=method, headers={**headers, "Accept-Encoding": "identity"})
        response = _within(lambda: self._ask(request, deadline), deadline, self.timeout, url)
        try:
            yield response
        finally:
            response.close()

    def _ask(self, request: urllib.request.Request, deadline: float) -> Any:
        left = max(0.05, min(self.timeout, deadline - time.monotonic()))
        try:
            return self._opener.open(request, timeout=left)
        except urllib.error.HTTPError as error:  # an answer like any other: it has a status and headers
            return error

    def _chunks(self, response: Any, deadline: float, path: str) -> Iterator[bytes]:
        while True:
            if time.monotonic() > deadline:
                raise refuse("HUB_TIMEOUT", path, self.timeout)
            try:
                chunk = response.read1(_CHUNK)
            except TimeoutError:
                raise refuse("HUB_TIMEOUT", path, self.timeout) from None
            except OSError as error:
                raise refuse("HUB_UNREACHABLE", f"{path}: {error}") from None
            except Exception as error:  # http.client has exceptions of its own for bodies that lie about themselves
                raise refuse("HUB_UNREACHABLE", f"{path}: {type(error).__name__}") from None
            if not chunk:
                return
            yield chunk


def _within(ask: Callable[[], Any], deadline: float, limit: float, url: str) -> Any:
    """Run `ask` beside this thread: a server that sends one header byte a minute would hold a socket timeout open."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="layerzero-hub-ask").start()
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except Exception as error:
        if isinstance(error, TimeoutError) or (isinstance(error, urllib.error.URLError) and "timed out" in str(error)):
            raise refuse("HUB_TIMEOUT", url, limit) from None
        raise refuse("HUB_UNREACHABLE", f"{url}: {error}") from None


def _raise_for(response: Any, path: str) -> None:
    status, code = response.status, response.headers.get("x-error-code") or ""
    if status == 200:
        return
    if status == 404 and code in ("RevisionNotFound", "EntryNotFound", "RepoNotFound"):
        raise refuse("HUB_REVISION_MISSING", code, path)
    more = "; a token is sent only to hub.token_endpoint" if status in (401, 403) else ""
    raise refuse("HUB_UNREACHABLE", f"{path}: status {status} {code}".strip() + more)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the tree: path in the repository, size, git object id, and the SHA-256 of an LFS file."""

    path: str
    size: int
    oid: str
    lfs: str | None = None

    @property
    def hash(self) -> str:
        """What its bytes must have: SHA-256 where it is an LFS file, else git's SHA-1."""
        return self.lfs or self.oid


@dataclass(frozen=True, slots=True)
class Remote:
    """One hub endpoint under one policy."""

    web: Web
    policy: HubPolicy

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
        self, repo_id: str, commit: str, file: RemoteFile, sink: IO[bytes], progress: Callable[[int], None]
    ) -> LockedFile:
        """Download one file of a commit into `sink`; HEAD and body must both agree with the tree."""
        if file.size > self.policy.max_bytes:
            raise refuse("HUB_TOO_LARGE", file.size, self.policy.max_bytes, detail=file.path)
        path = f"/kernels/{repo_id}/resolve/{commit}/{urllib.parse.quote(file.path)}"
        self._check_head(path, repo_id, commit, file)
        sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        # A megabyte a second is the slowest transfer that is not called hung.
        for chunk in self.web.download(path, file.size, self.policy.timeout + file.size / 2**20):
            sha256.update(chunk)
            git.update(chunk)
            sink.write(chunk)
            progress(len(chunk))
        if (git.hexdigest() if file.lfs is None else sha256.hexdigest()) != file.hash:
            raise refuse("HUB_HASH_MISMATCH", file.path, file.hash)
        return LockedFile(sha256.hexdigest(), file.size)

    # -- details ----------------------------------------------------------------------------------------------------
    def _check_head(self, path: str, repo_id: str, commit: str, file: RemoteFile) -> None:
        status, head = self.web.head(path)
        location = head.get("location")
        if 300 <= status < 400 and (location is None or location.startswith("/")):
            raise refuse("HUB_REPO_REDIRECTED", repo_id, location or "nowhere")
        if status not in (200, 302, 307):
            raise refuse("HUB_UNREACHABLE", f"{file.path}: status {status}")
        said = head.get("x-repo-commit")
        if said != commit:
            raise refuse("HUB_COMMIT_MISMATCH", said or "none", commit)
        etag = etag_hash(head.get("x-linked-etag") or head.get("etag"))
        if etag != file.hash:
            raise refuse("HUB_HASH_MISMATCH", file.path, file.hash)
        size = head.get("x-linked-size") or (head.get("content-length") if status == 200 else None)
        if size is not None and size != str(file.size):
            raise refuse("HUB_SIZE_MISMATCH", size, file.size, detail=file.path)

    def _pages(self, path: str) -> Iterator[Any]:
        """The answers of a path, page after page; each is asked for when it is wanted."""
        while True:
            data, headers = self.web.json(path)
            yield data
            link = headers.get("link") or ""
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
        with suppress(ImportError):
            from huggingface_hub import get_token

            token = get_token()
            if token:
                headers["Authorization"] = f"Bearer {token}"
    return Remote(Web(plain, timeout=policy.timeout, headers=headers), policy)
