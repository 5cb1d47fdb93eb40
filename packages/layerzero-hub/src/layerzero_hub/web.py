"""HTTP with nothing taken on trust: no redirect is followed unasked, every answer has a size and a deadline.

The standard library is used, and not the hub's own client, because that client follows redirects between repositories,
waits for a silent server, and writes to names the server chooses. Tokens and user agent come from huggingface_hub.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any, Final, Protocol

from layerzero_hub.errors import refuse

_JSON_BYTES: Final = 32 * 2**20
_CHUNK: Final = 2**20
_HOPS: Final = 3


class Sink(Protocol):
    """Where the bytes of a download go."""

    def write(self, data: bytes, /) -> object:
        """Take some bytes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers; header names in lower case."""

    status: int
    headers: Mapping[str, str]

    def get(self, name: str) -> str | None:
        return self.headers.get(name)


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

    def head(self, path: str) -> Answer:
        """Headers of a path below the endpoint; a redirect is an answer, not followed."""
        with self._open("HEAD", self.endpoint + path, time.monotonic() + self.timeout) as response:
            return _answer(response)

    def json(self, path: str) -> tuple[Any, Answer]:
        """A JSON answer. A redirect raises HUB_REPO_REDIRECTED: the hub sends one for a renamed repository."""
        deadline = time.monotonic() + self.timeout
        with self._open("GET", self.endpoint + path, deadline) as response:
            answer = _answer(response)
            if 300 <= answer.status < 400:
                raise refuse("HUB_REPO_REDIRECTED", path, answer.get("location") or "elsewhere")
            _raise_for(answer, path)
            body = bytearray()
            for chunk in self._chunks(response, deadline, path):
                body += chunk
                if len(body) > _JSON_BYTES:
                    raise refuse("HUB_TOO_LARGE", len(body), _JSON_BYTES, detail=path)
        try:
            return json.loads(bytes(body)), answer
        except (ValueError, RecursionError):
            raise refuse("HUB_UNREACHABLE", f"{path}: the answer is no JSON") from None

    def download(self, path: str, sink: Sink, size: int, deadline_s: float) -> None:
        """The body of a path into `sink`, exactly `size` bytes; a file host may be redirected to, tokenless."""
        url, deadline = self.endpoint + path, time.monotonic() + deadline_s
        for _ in range(_HOPS):
            with self._open("GET", url, deadline) as response:
                answer = _answer(response)
                if 300 <= answer.status < 400:
                    url = self._next(url, answer.get("location"))
                    continue
                _raise_for(answer, path)
                came = 0
                for chunk in self._chunks(response, deadline, path):
                    came += len(chunk)
                    if came > size:
                        raise refuse("HUB_TOO_LARGE", f"more than {size}", size, detail=path)
                    sink.write(chunk)
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
                chunk = response.read1(_CHUNK) if hasattr(response, "read1") else response.read(_CHUNK)
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
    box: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            box.append((True, ask()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run, daemon=True, name="layerzero-hub-ask")
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not box:
        raise refuse("HUB_TIMEOUT", url, limit)
    well, found = box[0]
    if well:
        return found
    if isinstance(found, (TimeoutError, urllib.error.URLError)) and "timed out" in str(found):
        raise refuse("HUB_TIMEOUT", url, limit)
    if isinstance(found, Exception):
        raise refuse("HUB_UNREACHABLE", f"{url}: {found}")
    raise found


def _answer(response: Any) -> Answer:
    status: int = getattr(response, "status", None) or getattr(response, "code", None) or 0
    return Answer(status, {key.lower(): value for key, value in response.headers.items()})


def _raise_for(answer: Answer, path: str) -> None:
    if answer.status == 200:
        return
    code = answer.get("x-error-code") or ""
    if answer.status == 404 and code in ("RevisionNotFound", "EntryNotFound", "RepoNotFound"):
        raise refuse("HUB_REVISION_MISSING", code, path)
    more = "; a token is sent only to hub.token_endpoint" if answer.status in (401, 403) else ""
    raise refuse("HUB_UNREACHABLE", f"{path}: status {answer.status} {code}".strip() + more)
