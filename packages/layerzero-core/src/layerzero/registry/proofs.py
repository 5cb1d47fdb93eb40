"""`proofs.json` beside a backend's descriptor: what the conformance kit has shown of its kernels.

    {"schema_version": "1.0", "backend": "acme", "version": "1.2.0", "vendor": "libacme 3.1", "sources": "sha256",
     "families": {"sm90": {"made": "…how, when and on what…", "kernels": [
         {"ids": ["acme.attention.fast"], "dtypes": ["float16"], "words": ["gqa", "causal_top_left"]}]}},
     "hash": "sha256 of everything else"}

It counts for these very sources of the package (one that names none: this very version), this version of the vendor
library and the family of devices the kit ran on, nowhere else. A release that leaves the sources alone keeps it.
A file that is not understood completely, or whose hash does not fit, counts for nothing: the kernels are then checked
at their first use like any other. `lz plugin prove` writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerzero.errors import CapabilitiesError
from layerzero.model.situation import KitProof
from layerzero.registry.kinds import Field, Record, choice, decoded, digest, fail, list_of, map_of, read, text

SCHEMA_VERSION = "1.0"

_TEXT = text(empty=True)
_WORDS = list_of(_TEXT, to=list, unique=False)
_PROVEN = Record(
    "proven",
    Field("ids", _WORDS, "the kernels", required=True),
    Field("dtypes", _WORDS, "torch dtype names they were tried in", required=True),
    Field("words", _WORDS, "what else was asked of them", required=True),
)
_FAMILY = Record(
    "family",
    Field("made", text(empty=True), "how, when and on what", required=True),
    Field("kernels", list_of(_PROVEN, to=list, unique=False), "what was shown of which kernels", required=True),
)
_DOCUMENT = Record(
    "proofs.json",
    Field("schema_version", choice(frozenset({SCHEMA_VERSION})), "version of this format", required=True),
    Field("backend", text(empty=True), "the backend whose kernels they are", required=True),
    Field("version", text(empty=True), "version of its package", required=True),
    Field("vendor", text(empty=True), "the library behind it, with its version", required=True),
    Field("families", map_of(_FAMILY, _TEXT), "family of devices to what was shown there", required=True),
    Field("sources", text(), "over the sources of the package; without it the version counts"),
    Field("hash", text(empty=True), "over everything else", required=True),
)

_NATIVE = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".metal", ".rs"})
_COMPILED = frozenset({".so", ".pyd", ".dylib", ".dll", ".cubin", ".ptx"})


def beside(capabilities: str | Path, what: str = "proofs") -> Path:
    """Where the proofs (or the measurements) of a backend lie: proofs.json beside its capabilities.json."""
    path = Path(capabilities)
    named = path.name.replace("capabilities", what)
    return path.with_name(named if named != path.name else f"{path.stem}.{what}.json")


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the hash over everything else in it."""
    body_of = {name: value for name, value in document.items() if name != "hash"}
    return {**body_of, "hash": digest(body_of)}


def sources(proofs: Path) -> str | None:
    """The sha256 over all code and descriptors of the package a proofs.json belongs to.

    A version number in its metadata, compiled files, proofs and measurements do not enter. None for a package that
    brings compiled files without their sources: its code does not tell what its kernels do.
    """
    top = proofs.parent
    while (top.parent / "__init__.py").exists():
        top = top.parent
    files = [file for file in sorted(top.rglob("*")) if file.is_file()]
    native = {file.suffix for file in files}
    if native & _COMPILED and not native & _NATIVE:
        return None
    found = hashlib.sha256()
    for file in files:
        made = file.name.endswith(("proofs.json", "measurements.json"))
        if file.suffix in _NATIVE | {".py", ".json"} and not made:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            found.update(f"{file.relative_to(top).as_posix()} {content}\n".encode())
    return found.hexdigest()


def load_proofs(path: Path, backend: str, version: str, vendor: str, family: str) -> dict[str, KitProof]:
    """Kernel id → what is proven of it, for one backend as it is here on this family; {} where nothing is said.

    Raises CapabilitiesError for a file that is not wholly right.
    """
    try:
        written = decoded(read(path))
        document = _DOCUMENT.parse(written, "")
        owner = document["backend"]
        for name, entry in document["families"].items():
            for stranger in (i for item in entry["kernels"] for i in item["ids"] if not i.startswith(f"{owner}.")):
                raise fail(f"families.{name}", f"{stranger} is no kernel of {owner}", value=stranger)
        if sealed(written)["hash"] != document["hash"]:
            raise fail("hash", "does not fit the content: the file was changed after it was made", value="hash")
    except CapabilitiesError as error:
        raise CapabilitiesError(f"{path.name}: {error.body}", key=error.key, code="PROOF_INVALID") from None
    of = document["sources"]
    here = document["version"] == version if of is None else of == sources(path)
    if (document["backend"], document["vendor"]) != (backend, vendor) or not here:
        return {}
    source = f"kit {document['version']}{f' ({vendor})' if vendor else ''} on {family}"
    found: dict[str, KitProof] = {}
    for item in document["families"].get(family, {"kernels": ()})["kernels"]:
        proof = KitProof(frozenset(item["dtypes"]), frozenset(item["words"]), source)
        found.update(dict.fromkeys(item["ids"], proof))
    return found
