"""What may be a repository id, a path inside a kernel, a commit, a hash. All else is refused before it is used."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from layerzero.files import decode_strictly
from layerzero_hub.errors import refuse

_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9])?\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_VARIANT = re.compile(r"(?:torch|tvm)[a-z0-9_.-]{0,80}\Z")
_SEGMENT = re.compile(r"[A-Za-z0-9_+=@ .-]{1,128}\Z")
_BYTECODE = (".pyc", ".pyo", ".pyd", ".pth", ".egg-link")
# `_<name>_<backend>_<hash>` is what kernel-builder writes; two words behind an underscore is what we hold it to.
_MODULE_ID = re.compile(r"_{1,2}[A-Za-z0-9]+(?:_+[A-Za-z0-9]+)+\Z")
# Top-level modules of that form that packages bring, whether they are installed here or not.
_KNOWN_MODULES = frozenset(
    {"_cffi_backend", "_distutils_hack", "_argon2_cffi_bindings", "_black_version", "_ruamel_yaml"}
)
# Names that Windows gives to devices, whatever stands behind the dot.
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))})


def check_repo_id(repo_id: object) -> str:
    """`owner/name` in plain ASCII. Traversal, homoglyphs, control characters and odd shapes raise HUB_ID_INVALID."""
    if not isinstance(repo_id, str):
        raise refuse("HUB_ID_INVALID", type(repo_id).__name__)
    parts = repo_id.split("/")
    if len(parts) != 2 or not all(_PART.match(part) and ".." not in part and "--" not in part for part in parts):
        raise refuse("HUB_ID_INVALID", repo_id)
    return repo_id


def check_commit(commit: object) -> str:
    """A whole git commit, 40 lower-case hex digits: a branch or a short hash names something else tomorrow."""
    if not isinstance(commit, str) or not _COMMIT.match(commit):
        raise refuse("HUB_LOCK_INVALID", "commit", f"40 hex digits, not {commit!r}"[:120])
    return commit


def check_module_id(identity: str) -> str:
    """The name a kernel takes in sys.modules: of a form that no other module has or will have."""
    if not _MODULE_ID.match(identity) or identity in _KNOWN_MODULES:
        raise refuse("HUB_ID_TAKEN", identity, "a module that exists or could: ids look like _name_backend_hash")
    return identity


def check_variant(name: str) -> str:
    """The name of a build variant, which becomes the name of a directory."""
    if not _VARIANT.match(name) or ".." in name:
        raise refuse("HUB_PATH_UNSAFE", name, "no build variant")
    return name


def check_path(path: object) -> str:
    """A relative path of plain segments. Says what is wrong: `..`, absolute, backslash, direction marks, bytecode."""
    if not isinstance(path, str):
        raise refuse("HUB_PATH_UNSAFE", type(path).__name__, "a path is text")
    why = _unsafe(path)
    if why:
        raise refuse("HUB_PATH_UNSAFE", path, why)
    if path.lower().endswith(_BYTECODE):
        raise refuse("HUB_FILE_KIND_REFUSED", path)
    return path


def _unsafe(path: str) -> str:
    if not path or len(path) > 512:
        return "empty or longer than 512 characters"
    if any(
        unicodedata.bidirectional(c) in ("RLE", "LRE", "RLO", "LRO", "PDF", "RLI", "LRI", "FSI", "PDI") for c in path
    ):
        return "it holds direction marks"
    if not path.isascii() or not path.isprintable():
        return "it holds characters outside printable ASCII"
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "it is absolute"
    if "\\" in path:
        return "it holds a backslash"
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            return f"it holds the segment {segment!r}"
        if segment.lower() == "__pycache__":
            return "it lies in __pycache__"
        if not _SEGMENT.match(segment) or segment.endswith((" ", ".")) or segment.startswith(" "):
            return f"segment {segment!r} is not plain"
        if segment.split(".")[0].lower() in _DEVICES:
            return f"segment {segment!r} is a device on some machines"
    return ""


def check_paths(paths: Iterable[str]) -> tuple[str, ...]:
    """All paths of one kernel: each safe, no two equal on a file system that ignores case, none also a folder."""
    seen: dict[str, str] = {}
    listed = tuple(check_path(path) for path in paths)
    for path in listed:
        folded = path.casefold()
        if folded in seen:
            raise refuse("HUB_PATH_COLLISION", path, seen[folded])
        seen[folded] = path
    for path in listed:
        parts = path.casefold().split("/")
        for cut in range(1, len(parts)):
            # `A/x` and `a/y` also collide: the folders would be one.
            folder = "/".join(parts[:cut])
            if folder in seen:
                raise refuse("HUB_PATH_COLLISION", path, seen[folder])
            spelled = "/".join(path.split("/")[:cut])
            known = seen.setdefault(f"{folder}/", spelled)
            if known != spelled:
                raise refuse("HUB_PATH_COLLISION", spelled, known)
    return listed


def etag_hash(etag: object) -> str:
    """The hash inside an ETag: 40 (git) or 64 (LFS) hex digits in quotes, weak or not. Anything else is refused."""
    text = etag if isinstance(etag, str) else ""
    text = text.removeprefix("W/").strip('"')
    if not (_COMMIT.match(text) or SHA256.match(text)):
        raise refuse("HUB_ETAG_INVALID", etag if isinstance(etag, str) else type(etag).__name__)
    return text


def strict_json(raw: bytes, code: str, where: str, most: int) -> Any:
    """JSON that somebody else wrote: of bounded size, no key twice, no NaN. Only HubError is raised, with this code."""
    if len(raw) > most:
        raise refuse(code, where, f"larger than {most} bytes")
    try:
        return decode_strictly(
            raw.decode("utf-8"),
            lambda key: refuse(code, key, "the key stands twice"),
            lambda word: refuse(code, where, f"{word} is no JSON"),
        )
    except (ValueError, RecursionError) as error:
        raise refuse(code, where, f"no JSON: {type(error).__name__}") from None


def fitting(repo_id: str, builds: Mapping[str, object]) -> str:
    """The name of the build that fits this machine best, by the rules of `kernels`."""
    from kernels.variants import parse_variant, resolve_variant

    parsed = []
    for name in builds:
        try:
            parsed.append(parse_variant(name))
        except ValueError:
            continue
    best, _ = resolve_variant(parsed)
    if best is None:
        raise refuse("HUB_VARIANT_MISSING", repo_id, ", ".join(sorted(builds)) or "it has no builds")
    return str(best.variant_str)
