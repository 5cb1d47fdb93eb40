"""`proofs.json` beside a backend's descriptor: what the conformance kit has shown of its kernels, version by version.

    {"schema_version": "1.0", "backend": "acme", "version": "1.2.0", "vendor": "libacme 3.1",
     "families": {"sm90": {"made": "…how, when and on what…", "kernels": [
         {"ids": ["acme.attention.fast"], "dtypes": ["float16"], "words": ["gqa", "causal_top_left"]}]}},
     "hash": "sha256 of everything else"}

It counts for this very version of package and vendor library and on the family of devices the kit ran on, nowhere else.
A file that is not understood completely, or whose hash does not fit, counts for nothing: the kernels are then checked
at their first use like any other. `lz plugin prove` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.errors import CapabilitiesError
from layerzero.model.proof import KitProof
from layerzero.registry.kinds import body, fail
from layerzero.registry.reading import decoded, digest, read

__all__ = ["SCHEMA_VERSION", "beside", "load_proofs", "sealed"]

SCHEMA_VERSION = "1.0"
_TOP = frozenset({"schema_version", "backend", "version", "vendor", "families", "hash"})
_ENTRY = frozenset({"ids", "dtypes", "words"})
_FAMILY = frozenset({"made", "kernels"})


def beside(capabilities: str | Path) -> Path:
    """Where the proofs of a backend lie: proofs.json beside its capabilities.json."""
    path = Path(capabilities)
    named = path.name.replace("capabilities", "proofs")
    return path.with_name(named if named != path.name else f"{path.stem}.proofs.json")


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the hash over everything else in it."""
    body_of = {name: value for name, value in document.items() if name != "hash"}
    return {**body_of, "hash": digest(body_of)}


def load_proofs(path: Path, backend: str, version: str, vendor: str, family: str) -> dict[str, KitProof]:
    """Kernel id → what is proven of it, for one backend in these versions on this family; {} where nothing is said.

    Raises CapabilitiesError for a file that is not wholly right.
    """
    try:
        document = decoded(read(path))
        families = _families(document)
        if sealed(document)["hash"] != document["hash"]:
            raise fail("hash", "does not fit the content: the file was changed after it was made", value="hash")
    except CapabilitiesError as error:
        raise CapabilitiesError(f"{path.name}: {body(error)}", key=error.key, code="PROOF_INVALID") from None
    if (document["backend"], document["version"], document["vendor"]) != (backend, version, vendor):
        return {}
    entry = families.get(family)
    if entry is None:
        return {}
    source = f"kit {version}{f' ({vendor})' if vendor else ''} on {family}"
    found: dict[str, KitProof] = {}
    for item in entry["kernels"]:
        proof = KitProof(frozenset(item["dtypes"]), frozenset(item["words"]), source)
        found.update(dict.fromkeys(item["ids"], proof))
    return found


def _families(document: Mapping[str, Any]) -> dict[str, Any]:
    """The families of a document whose every field is as it should be."""
    _keys(document, _TOP, "")
    if document["schema_version"] != SCHEMA_VERSION:
        raise fail("schema_version", f"{document['schema_version']!r} is not known", code="SCHEMA_VERSION_UNKNOWN")
    for name in ("backend", "version", "vendor", "hash"):
        _text(document[name], name)
    families = _mapping(document["families"], "families")
    for family, entry in families.items():
        where = f"families.{family}"
        _keys(_mapping(entry, where), _FAMILY, where)
        _text(entry["made"], f"{where}.made")
        if not isinstance(entry["kernels"], list):
            raise fail(f"{where}.kernels", "expected a list")
        for index, item in enumerate(entry["kernels"]):
            place = f"{where}.kernels[{index}]"
            _keys(_mapping(item, place), _ENTRY, place)
            for name in _ENTRY:
                if not isinstance(item[name], list) or not all(isinstance(word, str) for word in item[name]):
                    raise fail(f"{place}.{name}", "expected a list of words")
            strangers = [name for name in item["ids"] if not name.startswith(f"{document['backend']}.")]
            if strangers:
                raise fail(f"{place}.ids", f"{strangers[0]} is no kernel of {document['backend']}", value=strangers[0])
    return families


def _keys(found: Mapping[str, Any], wanted: frozenset[str], where: str) -> None:
    for name in sorted(found.keys() ^ wanted):
        place = f"{where}.{name}" if where else name
        code = "SCHEMA_FIELD_UNKNOWN" if name in found else "SCHEMA_FIELD_MISSING"
        raise fail(place, "unknown field" if name in found else "missing", code=code, value=name)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise fail(where, f"expected an object, got {type(value).__name__}")
    return value


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise fail(where, f"expected a text, got {type(value).__name__}")
