"""How a function of a hub kernel becomes a kernel of an op: the entries of `[[hub.kernels]]`.

    [[hub.kernels]]
    repo = "org/fast-norm"          # a locked repository
    op = "rms_norm"                 # an op of LayerZero
    function = "rms_norm"           # what to call in the kernel, dots for submodules
    arguments = ["x", "weight", "eps"]   # canonical arguments of the op, in the function's order
    capabilities = { dtypes = ["float32"], platforms = ["cpu"] }    # as in capabilities.json

A kernel may bring the same entries in `layerzero.json` beside its code (without `repo`); the policy's entry wins. All
names of functions are looked up in the kernel's own modules: a descriptor says what to call in the build, and nothing
else can be reached through it. One entry that is wrong takes one kernel away, not its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

from layerzero.reasons import Reason, reason
from layerzero_hub.errors import HubError, refuse
from layerzero_hub.names import check_repo_id, reader

_FUNCTION: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*){0,4}\Z")
_OP: Final = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_KEYS: Final = frozenset(
    {"repo", "version", "op", "function", "variant", "arguments", "keywords", "out", "capabilities"}
)

_OURS: Final = ("kernel_id", "function", "predicate", "traceable")

_table = reader(Mapping, "a table")
_op = reader(str, "the name of an op", _OP.match)
_function = reader(str, "a function of the kernel", _FUNCTION.match)
_version = reader(int, "a number")
_variant = reader(str, "lower-case letters, digits and _", re.compile(r"[a-z0-9_]{0,40}\Z").match)
_capabilities = reader(Mapping, "a table as in capabilities.json")
_out = reader(bool, "true or false")
_named = reader(Mapping, "a table: the function's keyword = the op's argument")
_names = reader(
    (list, tuple),
    "a list of argument names",
    lambda names: all(isinstance(one, str) and one.isidentifier() for one in names),
)


@dataclass(frozen=True, slots=True)
class KernelMapping:
    """One function of one locked kernel, as a kernel of an op.

    `arguments` names the op's canonical arguments in the order the function takes them (empty: all, as they are);
    `keywords` are passed by name; `out` True means the function takes an output like the first tensor as its first
    argument, and returns nothing.
    """

    repo: str
    op: str
    function: str
    version: int | None = None
    variant: str = ""
    arguments: tuple[str, ...] = ()
    keywords: tuple[tuple[str, str], ...] = ()
    out: bool = False
    capabilities: Mapping[str, Any] = field(default_factory=dict)


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


def resolve(module: ModuleType, name: str) -> Any:
    """What `name` (dots between) is in a kernel's module; only modules and classes of the kernel are walked through.

    A kernel imports torch, and through torch everything can be reached: `torch.os.system` is no function of the kernel.
    """
    found: Any = module
    for part in name.split("."):
        if not _is_inside(found, module.__name__):
            raise refuse("HUB_DESCRIPTOR_INVALID", module.__name__, f"{name} leads out of the kernel")
        found = getattr(found, part, None)
    return found


def _is_inside(value: object, identity: str) -> bool:
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, type):
        name = value.__module__
    else:
        return False
    return name in (identity, f"torch.ops.{identity}") or name.startswith(f"{identity}.")


def _entry(value: object, where: str, repo: str | None) -> KernelMapping:
    data: Mapping[str, Any] = _table(where, value)
    for key in data:
        if key not in _KEYS or (key == "repo" and repo is not None):
            raise refuse("HUB_POLICY_INVALID", f"{where}.{key}", f"unknown key; known: {', '.join(sorted(_KEYS))}")
    capabilities = _capabilities(f"{where}.capabilities", data.get("capabilities", {}))
    for key in _OURS:
        if key in capabilities:
            raise refuse("HUB_POLICY_INVALID", f"{where}.capabilities.{key}", "follows from the entry, and is not said")
    keywords = _named(f"{where}.keywords", data.get("keywords", {}))
    for names in (list(keywords), list(keywords.values())):
        _names(f"{where}.keywords", names)
    version = data.get("version")
    return KernelMapping(
        repo=check_repo_id(repo if repo is not None else data.get("repo")),
        op=_op(f"{where}.op", data.get("op")),
        function=_function(f"{where}.function", data.get("function")),
        version=None if version is None else _version(f"{where}.version", version),
        variant=_variant(f"{where}.variant", data.get("variant", "")),
        arguments=tuple(_names(f"{where}.arguments", data.get("arguments", ()))),
        keywords=tuple(sorted(keywords.items())),
        out=_out(f"{where}.out", data.get("out", False)),
        capabilities=dict(capabilities),
    )
