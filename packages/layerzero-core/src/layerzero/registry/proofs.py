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
from layerzero.registry.containers import Field, Record, list_of, map_of
from layerzero.registry.kinds import body, choice, fail, text
from layerzero.registry.reading import decoded, digest, read

SCHEMA_VERSION = "1.0"

_WORDS = list_of(text(empty=True), to=list, unique=False)
_PROVEN = Record(
    "proven",
    (
        Field("ids", _WORDS, "the kernels", required=True),
        Field("dtypes", _WORDS, "torch dtype names they were tried in", required=True),
        Field("words", _WORDS, "what else was asked of them", required=True),
    ),
)
_FAMILY = Record(
    "family",
    (
        Field("made", text(empty=True), "how, when and on what", required=True),
        Field("kernels", list_of(_PROVEN, to=list, unique=False), "what was shown of which kernels", required=True),
    ),
)
_DOCUMENT = Record(
    "proofs.json",
    (
        Field("schema_version", choice(frozenset({SCHEMA_VERSION})), "version of this format", required=True),
        Field("backend", text(empty=True), "the backend whose kernels they are", required=True),
        Field("version", text(empty=True), "version of its package", required=True),
        Field("vendor", text(empty=True), "the library behind it, with its version", required=True),
        Field(
            "families", map_of(_FAMILY, text(empty=True)), "family of devices to what was shown there", required=True
        ),
        Field("hash", text(empty=True), "over everything else", required=True),
    ),
)


def beside(capabilities: str | Path, what: str = "proofs") -> Path:
    """Where the proofs (or the measurements) of a backend lie: proofs.json beside its capabilities.json."""
    path = Path(capabilities)
    named = path.name.replace("capabilities", what)
    return path.with_name(named if named != path.name else f"{path.stem}.{what}.json")


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the hash over everything else in it."""
    body_of = {name: value for name, value in document.items() if name != "hash"}
    return {**body_of, "hash": digest(body_of)}


def load_proofs(path: Path, backend: str, version: str, vendor: str, family: str) -> dict[str, KitProof]:
    """Kernel id → what is proven of it, for one backend in these versions on this family; {} where nothing is said.

    Raises CapabilitiesError for a file that is not wholly right.
    """
    try:
        document = _DOCUMENT.parse(decoded(read(path)), "")
        owner = document["backend"]
        for name, entry in document["families"].items():
            for stranger in (i for item in entry["kernels"] for i in item["ids"] if not i.startswith(f"{owner}.")):
                raise fail(f"families.{name}", f"{stranger} is no kernel of {owner}", value=stranger)
        if sealed(document)["hash"] != document["hash"]:
            raise fail("hash", "does not fit the content: the file was changed after it was made", value="hash")
    except CapabilitiesError as error:
        raise CapabilitiesError(f"{path.name}: {body(error)}", key=error.key, code="PROOF_INVALID") from None
    if (document["backend"], document["version"], document["vendor"]) != (backend, version, vendor):
        return {}
    source = f"kit {version}{f' ({vendor})' if vendor else ''} on {family}"
    found: dict[str, KitProof] = {}
    for item in document["families"].get(family, {"kernels": ()})["kernels"]:
        proof = KitProof(frozenset(item["dtypes"]), frozenset(item["words"]), source)
        found.update(dict.fromkeys(item["ids"], proof))
    return found
