"""`[hub]` of the policy: what is allowed, denied, revoked, where lock and store lie, what is a kernel of which op.

The default denies everything. Files that are named (LAYERZERO_CONFIG, `--policy`) or lie at user level may allow; one
that merely lies in the working directory may only deny, revoke and switch off (the core refuses anything else in it).
Refusals of all files add up.

A kernel may bring the entries of `kernels` in `layerzero.json` beside its code (without `repo`); the policy's win. One
entry there that is wrong takes one kernel away, not its neighbours.
"""

from __future__ import annotations

import fnmatch
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import platformdirs

from layerzero import env
from layerzero.reasons import Reason, reason
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.lockfile import LOCK_NAME
from layerzero_hub.metadata import WORKFLOW
from layerzero_hub.names import check_repo_id

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


# -- values, each by its key -------------------------------------------------------------------------------------------
Reader = Callable[[str, object], Any]
"""Takes a key and its value, and gives the value as it is kept, or raises HUB_POLICY_INVALID."""


def reader(kind: Any, words: str, fits: Callable[[Any], Any] = lambda value: True) -> Reader:
    """What takes a key and its value, and gives the value back or says in these words what it has to be."""

    def read(key: str, value: object) -> Any:
        wrong_bool = isinstance(value, bool) and kind is not bool
        if wrong_bool or not isinstance(value, kind) or not fits(value):
            raise refuse("HUB_POLICY_INVALID", key, words)
        return value

    return read


def said(read: Reader, default: Any = MISSING) -> Any:
    """A field that is said in a file under its own name; what reads its value stands with it."""
    return field(default=default, metadata={"read": read})


def read_keys(kind: type[Any], data: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Each value as the reader of its field gives it; `at` goes before a key that is refused. Unknown keys are."""
    readers: dict[str, Reader] = {one.name: one.metadata["read"] for one in fields(kind)}
    found: dict[str, Any] = {}
    for key, value in data.items():
        if key not in readers:
            raise refuse("HUB_POLICY_INVALID", f"{at}{key}", f"unknown key; known: {', '.join(sorted(readers))}")
        found[key] = readers[key](f"{at}{key}", value)
    return found


_bool = reader(bool, "true or false")
_text = reader(str, "a text", lambda text: text and "\0" not in text and len(text) <= 4096)
_list = reader((list, tuple), "a list of texts")


def _each(read: Reader) -> Reader:
    return lambda key, value: tuple(read(key, item) for item in _list(key, value))


def _set(read: Reader) -> Reader:
    return lambda key, value: frozenset(_each(read)(key, value))


def _exact_id(key: str, value: object) -> str:
    text = _text(key, value)
    if set(text) & set("*?["):
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: exact ids only, no patterns")
    return check_repo_id(text)


def _digest(key: str, value: object) -> str:
    """A digest as people write it; what is none would revoke nothing, and is an error."""
    text = _text(key, value)
    match = re.fullmatch(r"(?:sha256[:-])?([0-9a-f]{64})", text.strip().lower())
    if match is None:
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: a digest, sha256: and 64 hexadecimal digits")
    return f"sha256:{match.group(1)}"


def _endpoints(key: str, value: object) -> tuple[str, ...]:
    found: tuple[str, ...] = _each(_endpoint)(key, value)
    if not found:
        raise refuse("HUB_POLICY_INVALID", key, "at least one address")
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


def _publisher(key: str, value: object) -> str:
    text: str = _text(key, value)
    if not WORKFLOW.match(text):
        shape = "https://github.com/OWNER/REPO/.github/workflows/FILE@refs/heads/BRANCH"
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: the workflow that signs, as {shape}")
    return text


def _token_endpoint(key: str, value: object) -> str:
    text = _endpoint(key, value)
    if not text.startswith("https://"):
        raise refuse("HUB_POLICY_INVALID", key, f"{text}: a token goes over https only")
    return text


# -- entries of `kernels` ----------------------------------------------------------------------------------------------
# What follows from an entry, and is not said in its capabilities.
_OURS: Final = ("kernel_id", "function", "predicate", "traceable")

_table = reader(Mapping, "a table")
_function = reader(
    str,
    "a function of the kernel",
    re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*){0,4}\Z").match,
)
_names = reader(
    (list, tuple),
    "a list of argument names",
    lambda names: all(isinstance(one, str) and one.isidentifier() for one in names),
)
_named = reader(Mapping, "a table: the function's keyword = the op's argument")
_claims = reader(Mapping, "a table as in capabilities.json")


def _keywords(key: str, value: object) -> tuple[tuple[str, str], ...]:
    keywords = _named(key, value)
    _names(key, [*keywords, *keywords.values()])
    return tuple(sorted(keywords.items()))


def _capabilities(key: str, value: object) -> dict[str, Any]:
    found = dict(_claims(key, value))
    for name in _OURS:
        if name in found:
            raise refuse("HUB_POLICY_INVALID", f"{key}.{name}", "follows from the entry, and is not said")
    return found


@dataclass(frozen=True, slots=True)
class KernelMapping:
    """One function of one locked kernel, as a kernel of an op.

    `arguments` names the op's canonical arguments in the order the function takes them (empty: all, as they are);
    `keywords` are passed by name; `out` True means the function takes an output like the first tensor as its first
    argument, and returns nothing.
    """

    repo: str = said(lambda key, value: check_repo_id(value))
    op: str = said(reader(str, "the name of an op", re.compile(r"[a-z][a-z0-9_]{0,63}\Z").match))
    function: str = said(_function)
    version: int | None = said(reader((int, type(None)), "a number"), None)
    variant: str = said(reader(str, "lower-case letters, digits and _", re.compile(r"[a-z0-9_]{0,40}\Z").match), "")
    arguments: tuple[str, ...] = said(lambda key, value: tuple(_names(key, value)), ())
    keywords: tuple[tuple[str, str], ...] = said(_keywords, ())
    out: bool = said(_bool, False)
    capabilities: Mapping[str, Any] = field(default_factory=dict, metadata={"read": _capabilities})


def parse_mappings(value: object) -> tuple[KernelMapping, ...]:
    """The entries of `[[hub.kernels]]`; only HubError is raised."""
    if not isinstance(value, (list, tuple)) or len(value) > 1000:
        raise refuse("HUB_POLICY_INVALID", "kernels", "a list of at most 1000 tables")
    return tuple(_entry(item, f"kernels[{index}]", None) for index, item in enumerate(value))


def parse_descriptor(data: object, repo: str) -> tuple[tuple[KernelMapping, ...], tuple[Reason, ...]]:
    """The entries a kernel brings itself in `layerzero.json` (`{"kernels": [...]}` without `repo`), and what is wrong
    with those that are left out.
    """
    if not isinstance(data, Mapping) or set(data) != {"kernels"} or not isinstance(data["kernels"], list):
        raise refuse("HUB_DESCRIPTOR_INVALID", repo, '{"kernels": [...]} and nothing else')
    found, wrong = [], []
    for index, item in enumerate(data["kernels"][:1000]):
        try:
            entry = _entry(item, f"kernels[{index}]", repo)
            if entry.capabilities.get("packer") is not None:
                _function(f"kernels[{index}].capabilities.packer", entry.capabilities["packer"])
            found.append(entry)
        except HubError as error:
            cause = error.reasons[0]
            wrong.append(reason("HUB_DESCRIPTOR_INVALID", repo, f"{cause.value}: {cause.limit}"))
    return tuple(found), tuple(wrong)


def _entry(value: object, where: str, repo: str | None) -> KernelMapping:
    given = _table(where, value)
    if repo is not None and "repo" in given:
        raise refuse("HUB_POLICY_INVALID", f"{where}.repo", "unknown key: a descriptor speaks of its own kernel")
    data = {"repo": repo, "op": None, "function": None, **given}
    return KernelMapping(**read_keys(KernelMapping, data, f"{where}."))


# -- the policy as a whole ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class HubPolicy:
    """What the files said, taken together. `lock` is empty unless a trusted file names it."""

    enabled: bool = said(_bool, True)
    offline: bool = said(_bool, False)
    allow: frozenset[str] = said(_set(_exact_id), frozenset())
    deny: frozenset[str] = said(_set(_text), frozenset())
    endpoints: tuple[str, ...] = said(_endpoints, (DEFAULT_ENDPOINT,))
    require_trusted_publisher: bool = said(_bool, True)
    needed_libs: frozenset[str] = said(_set(_text), frozenset())
    signing_keys: tuple[str, ...] = said(_each(_text), ())
    revoked: frozenset[str] = said(_set(_digest), frozenset())
    publishers: tuple[str, ...] = said(_each(_publisher), ())
    token_endpoint: str = said(_token_endpoint, DEFAULT_ENDPOINT)
    lock: str = said(_text, "")
    store: str = said(_text, "")
    max_bytes: int = said(reader(int, "a number of bytes above 0", lambda count: 0 < count < 2**48), 4 * 2**30)
    timeout: float = said(reader((int, float), "seconds above 0", lambda count: 0 < count <= 86400), 30.0)
    kernels: tuple[KernelMapping, ...] = said(lambda key, value: parse_mappings(value), ())

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
    values, root = read_keys(HubPolicy, data, ""), base or Path()
    for key in ("lock", "store"):
        if values.get(key):
            values[key] = str(root / Path(values[key]).expanduser())
    if "signing_keys" in values:
        values["signing_keys"] = tuple(str(root / Path(one).expanduser()) for one in values["signing_keys"])
    return HubPolicy(**values)
