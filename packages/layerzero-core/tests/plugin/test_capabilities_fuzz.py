from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.errors import CapabilitiesError
from layerzero.registry.capabilities import json_schema, load_capabilities
from layerzero.registry.fields import DOCUMENT, KERNEL

BASE: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "fuzz",
    "platforms": ["cpu"],
    "ops": {"rms_norm": [{"kernel_id": "fuzz.rms_norm.a", "function": "fuzz.k:a", "dtypes": ["float32"]}]},
}
VALIDATOR = jsonschema.Draft202012Validator(json_schema())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def outcome(document: Any) -> str:
    """ "ok", or the code of the refusal. Anything but a CapabilitiesError fails the test."""
    try:
        load_capabilities(document)
    except CapabilitiesError as error:
        return error.reasons[0].code.value
    return "ok"


@pytest.mark.req("R-CAP-05", "R-FUZZ-03")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_missing_or_extra_field_is_refused_or_harmless(data: st.DataObject) -> None:
    document = copy.deepcopy(BASE)
    kernel = document["ops"]["rms_norm"][0]
    places = [(document, DOCUMENT), (kernel, KERNEL)]
    place, record = data.draw(st.sampled_from(places))
    known = {field.name: field for field in record.fields}
    for name in data.draw(st.lists(st.sampled_from(sorted(place)), unique=True, max_size=2)):
        del place[name]
    extra = data.draw(st.dictionaries(st.text(max_size=10) | st.sampled_from(sorted(known)), json_values, max_size=2))
    place.update(extra)
    missing = any(field.required and field.name not in place for field in record.fields)
    unknown = any(name not in known for name in place)
    result = outcome(document)
    if missing or unknown:
        assert result != "ok"
    if result == "ok":
        assert VALIDATOR.is_valid(json.loads(json.dumps(document))), "the schema refuses what the validator took"


@pytest.mark.req("R-FUZZ-03")
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([field.name for field in KERNEL.fields]), json_values, max_size=4))
def test_any_value_in_any_kernel_field_never_crashes(values: dict[str, Any]) -> None:
    document = copy.deepcopy(BASE)
    document["ops"]["rms_norm"][0].update(values)
    outcome(document)


@pytest.mark.req("R-FUZZ-03")
@settings(max_examples=100, deadline=None)
@given(json_values)
def test_any_json_document_never_crashes(document: Any) -> None:
    assert outcome(document if isinstance(document, dict) else {"schema_version": document}) != "ok"


@pytest.mark.req("R-FUZZ-03")
@settings(max_examples=80, deadline=None)
@given(content=st.binary(max_size=300), cut=st.integers(0, 200), flip=st.integers(0, 255))
def test_any_bytes_in_the_file_never_crash(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int, flip: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.json"
    good = json.dumps(BASE).encode()
    for data in (content, good[:cut] + content, good[:cut] + bytes([flip]) + good[cut + 1 :]):
        Path(file).write_bytes(data)
        outcome(file)
