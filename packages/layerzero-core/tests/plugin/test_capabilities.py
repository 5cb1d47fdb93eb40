from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import layerzero as lz
from layerzero.errors import CapabilitiesError
from layerzero.model.context import Context
from layerzero.model.enums import GPUGeneration, InstructionFamily, Layout, Platform
from layerzero.registry.capabilities import json_schema, load_capabilities, migrate
from layerzero.registry.fields import KERNEL
from layerzero.registry.kinds import MAX_BYTES

# Those of the core, and where the whole workspace is here those of every package.
DESCRIPTORS = sorted(Path(__file__).parents[3].glob("*/src/**/capabilities.json"))

FULL: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "mine",
    "backend_version": ">=2.1",
    "api": ">=1,<2",
    "platforms": ["cuda"],
    "doc": "a backend",
    "vendor": {"dist": "libmine", "import": "libmine.ops", "version": "<3", "extra": "libmine"},
    "generation_map": {"130+": {"generation": "BLACKWELL", "instruction_families": ["tcgen05"]}},
    "ops": {
        "attention": [
            {
                "kernel_id": "mine.attention.fast",
                "function": "mine.kernels:attention",
                "dtypes": ["float16", "bfloat16"],
                "min_sm": 80,
                "max_sm": 129,
                "generations": ["HOPPER", "BLACKWELL"],
                "instruction_families": ["wgmma", "tcgen05"],
                "head_dim": {"min": 8, "max": 256, "multiple_of": 8, "pairs": [[192, 128]]},
                "max_seq_len": 65536,
                "limits": {"batch_heads": {"max": 65535}},
                "gqa": True,
                "attn_mask": ["bool"],
                "causal": ["bottom_right"],
                "window": True,
                "lse": True,
                "backward": True,
                "features": ["autocast", "kv_float8_e4m3fn"],
                "layouts": ["BSHD"],
                "stride_last_dim": 1,
                "graph_safe": True,
                "adapt": ["layout"],
                "guards": ["capture"],
                "workspace": "batch * num_heads * seq_len_q * 4",
                "grid": ["batch", "num_heads", "ceil(seq_len_q / 128)"],
                "error_bounds": {"float16": 0.001},
                "priority": 70,
                "jit": True,
                "fuses": ["rope", "attention"],
                "pointer_alignment": 16,
                "predicate": "mine.kernels:fits",
                "doc": "fast",
            }
        ],
        "paged_attention": [
            {
                "kernel_id": "mine.paged_attention.decode",
                "function": "mine.kernels:paged",
                "dtypes": ["float16"],
                "platforms": ["cpu"],
                "cpu_features": ["avx512f", "amx_tile"],
                "paged": {"page_sizes": [16, 32], "layouts": ["NHD"], "index_dtypes": ["int32"]},
            }
        ],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """FULL with one place replaced (or, for `...`, removed)."""
    document = copy.deepcopy(FULL)
    *parents, last = path.split("/")
    place: Any = document
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.req("R-CAP-01")
def test_a_full_descriptor_becomes_kernel_specs() -> None:
    loaded = load_capabilities(FULL)
    fast, paged = loaded.kernels
    assert (loaded.backend, loaded.api, loaded.schema_version) == ("mine", ">=1,<2", "1.0")
    assert loaded.vendor is not None and loaded.vendor.version == "<3,>=2.1"
    assert loaded.generations.lookup(140).families == {InstructionFamily.TCGEN05}
    assert loaded.platforms == {Platform.CUDA, Platform.CPU}
    assert fast.platforms == {Platform.CUDA} and paged.platforms == {Platform.CPU}
    assert fast.supported_generations == {GPUGeneration.HOPPER, GPUGeneration.BLACKWELL}
    assert fast.features == {
        "gqa", "mask_bool", "causal_bottom_right", "window", "lse", "backward", "autocast", "kv_float8_e4m3fn",
    }  # fmt: skip
    limits = dict(fast.limits)
    assert limits["seq_len_q"].max == limits["seq_len_k"].max == 65536
    assert limits["head_dim"].multiple_of == 8 and fast.head_dim_pairs == {(192, 128)}
    assert fast.layouts == {Layout.BSHD} and fast.stride_last_dim == 1 and fast.pointer_alignment == 16
    assert isinstance(fast.grid_layout, tuple) and fast.grid_layout[2].text == "ceil(seq_len_q / 128)"
    assert fast.error_bounds == (("float16", 0.001),) and fast.fuses == ("rope", "attention")
    assert fast.priority == 70.0 and fast.jit and fast.graph_safe and fast.predicate == "mine.kernels:fits"
    assert paged.cpu_features == {"avx512_f", "amx_tile"}
    assert dict(paged.limits)["page_size"].one_of == {16, 32}
    assert paged.kv_cache_layouts == {Layout.NHD} and paged.index_dtypes == {"int32"} and "paged" in paged.features


@pytest.mark.req("R-CAP-01")
@pytest.mark.parametrize(
    ("path", "value", "key", "code"),
    [
        ("schema_version", "2.0", "schema_version", "SCHEMA_VERSION_UNKNOWN"),
        ("schema_version", 1.0, "schema_version", "SCHEMA_VERSION_UNKNOWN"),
        ("schema_version", ..., "schema_version", "SCHEMA_FIELD_MISSING"),
        ("backend", ..., "backend", "SCHEMA_FIELD_MISSING"),
        ("backend", "My Backend", "backend", "SCHEMA_INVALID"),
        ("ops", ..., "ops", "SCHEMA_FIELD_MISSING"),
        ("ops", [], "ops", "SCHEMA_INVALID"),
        ("platfroms", ["cpu"], "platfroms", "SCHEMA_FIELD_UNKNOWN"),
        ("platforms", ["gpu"], "platforms[0]", "SCHEMA_INVALID"),
        ("platforms", ["cuda", "cuda"], "platforms[1]", "SCHEMA_INVALID"),
        ("api", "newest", "api", "SCHEMA_INVALID"),
        ("vendor/dist", ..., "vendor.dist", "SCHEMA_FIELD_MISSING"),
        ("vendor/version", ">>1", "vendor.version", "SCHEMA_INVALID"),
        ("vendor/command", "x", "vendor.command", "SCHEMA_FIELD_UNKNOWN"),
        ("generation_map", {"ninety": {}}, "generation_map", "SCHEMA_INVALID"),
        ("generation_map", {"90": {"generation": "MAXWELL"}}, "generation_map.90.generation", "SCHEMA_INVALID"),
        ("ops/attention/0/dtypes", ..., "ops.attention[0].dtypes", "SCHEMA_FIELD_MISSING"),
        ("ops/attention/0/dtypes", [], "ops.attention[0].dtypes", "SCHEMA_INVALID"),
        ("ops/attention/0/dtypes", ["fp16"], "ops.attention[0].dtypes[0]", "SCHEMA_INVALID"),
        ("ops/attention/0/function", "mine.kernels", "ops.attention[0].function", "SCHEMA_INVALID"),
        ("ops/attention/0/function", "os;system:x", "ops.attention[0].function", "SCHEMA_INVALID"),
        ("ops/attention/0/kernel_id", "other.attention.x", "ops.attention[0].kernel_id", "KERNEL_ID_INVALID"),
        ("ops/attention/0/kernel_id", "mine.rms_norm.x", "ops.attention[0].kernel_id", "KERNEL_ID_INVALID"),
        ("ops/attention/0/kernel_id", "mine.attention", "ops.attention[0].kernel_id", "KERNEL_ID_INVALID"),
        ("ops/attention/0/min_sm", 9, "ops.attention[0].min_sm", "SCHEMA_INVALID"),
        ("ops/attention/0/min_sm", 130, "ops.attention[0].min_sm", "SCHEMA_INVALID"),
        ("ops/attention/0/gqa", "yes", "ops.attention[0].gqa", "SCHEMA_INVALID"),
        ("ops/attention/0/gqa", 1, "ops.attention[0].gqa", "SCHEMA_INVALID"),
        ("ops/attention/0/gqqa", True, "ops.attention[0].gqqa", "SCHEMA_FIELD_UNKNOWN"),
        ("ops/attention/0/features", ["mask_bol"], "ops.attention[0].features[0]", "SCHEMA_INVALID"),
        ("ops/attention/0/head_dim", {"min": 300, "max": 8}, "ops.attention[0].head_dim", "SCHEMA_INVALID"),
        ("ops/attention/0/head_dim", {"multiple_of": 0}, "ops.attention[0].head_dim.multiple_of", "SCHEMA_INVALID"),
        ("ops/attention/0/head_dim", 128, "ops.attention[0].head_dim", "SCHEMA_INVALID"),
        ("ops/attention/0/limits", {"seq_len_q": {"max": 4}}, "ops.attention[0].max_seq_len", "SCHEMA_INVALID"),
        ("ops/attention/0/max_seq_len", 10**400, "ops.attention[0].max_seq_len", "SCHEMA_INVALID"),
        ("ops/attention/0/priority", float("nan"), "ops.attention[0].priority", "SCHEMA_INVALID"),
        ("ops/attention/0/priority", True, "ops.attention[0].priority", "SCHEMA_INVALID"),
        ("ops/attention/0/priority_below", {"rows": 128}, "ops.attention[0].priority_below.rows", "SCHEMA_INVALID"),
        ("ops/attention/0/priority_below", {"rows": {"size": 1, "priority": 4}},
         "ops.attention[0].priority_below.rows.size", "SCHEMA_INVALID"),
        ("ops/attention/0/priority_below", {"rows": {"size": 8}},
         "ops.attention[0].priority_below.rows.priority", "SCHEMA_FIELD_MISSING"),
        ("ops/attention/0/workspace", "__import__('os')", "ops.attention[0].workspace", "SCHEMA_INVALID"),
        ("ops/attention/0/workspace", "batch ** 9", "ops.attention[0].workspace", "SCHEMA_INVALID"),
        ("ops/attention/0/grid", ..., "ops.attention[0].grid", "SCHEMA_FIELD_MISSING"),
        ("ops/attention/0/grid", ["batch"], "ops.attention[0].grid", "SCHEMA_INVALID"),
        ("ops/attention/0/grid", "vendor", "ops.attention[0].grid", "SCHEMA_INVALID"),
        ("ops/attention/0/error_bounds", {"float16": -1}, "ops.attention[0].error_bounds.float16", "SCHEMA_INVALID"),
        ("ops/attention", ["fast"], "ops.attention[0]", "SCHEMA_INVALID"),
        ("ops/paged_attention/0/paged", {"layouts": []}, "ops.paged_attention[0].paged.layouts", "SCHEMA_INVALID"),
    ],
)  # fmt: skip
def test_a_wrong_place_is_refused_and_named(path: str, value: Any, key: str, code: str) -> None:
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities(changed(path, value))
    assert (caught.value.key, caught.value.code) == (key, code)
    assert key in str(caught.value)


def test_an_unknown_field_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(CapabilitiesError, match="did you mean deterministic"):
        load_capabilities(changed("ops/attention/0/determinstic", True))


def test_a_kernel_without_platforms_anywhere_is_refused() -> None:
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities(changed("platforms", ...))
    assert caught.value.key == "ops.attention[0].platforms"


def test_an_id_used_twice_in_one_file_is_refused() -> None:
    document = copy.deepcopy(FULL)
    document["ops"]["attention"].append(copy.deepcopy(document["ops"]["attention"][0]))
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities(document)
    assert caught.value.code == "KERNEL_DUPLICATE"


@pytest.mark.req("R-CAP-01")
def test_a_wrong_kernel_costs_the_whole_file() -> None:
    document = changed("ops/paged_attention/0/dtypes", ["float17"])
    with pytest.raises(CapabilitiesError):
        load_capabilities(document)


@pytest.mark.req("R-CAP-02")
def test_the_hash_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    first = load_capabilities(FULL).hash
    file = tmp_path / "capabilities.json"
    file.write_text(json.dumps(dict(reversed(FULL.items())), indent=4), encoding="utf-8")
    assert load_capabilities(file).hash == first, "order and white space do not count"
    assert load_capabilities(changed("ops/attention/0/priority", 71)).hash != first
    assert len(first) == 64
    for part, other in {
        "platforms": ["cpu"],
        "vendor": {"dist": "another"},
        "isolation": {},
        "generation_map": {},
    }.items():
        assert FULL.get(part) != other
        assert load_capabilities({**FULL, part: other}).hash != first, part


@pytest.mark.req("R-CAP-03", "R-REG-06")
def test_constraints_change_with_the_descriptor_alone() -> None:
    ctx = Context(op="attention", dims=(("head_dim", 256),), dtype="float32")
    document = {
        "schema_version": "1.0", "backend": "b", "platforms": ["cpu"],
        "ops": {"attention": [{"kernel_id": "b.attention.x", "function": "b:x", "dtypes": ["float32"],
                               "head_dim": {"max": 128}}]},
    }  # fmt: skip
    (before,) = load_capabilities(document).kernels
    assert [item.code for item in before.check(ctx)] == ["HEAD_DIM_TOO_LARGE"]
    document["ops"]["attention"][0]["head_dim"]["max"] = 256  # type: ignore[index]
    (after,) = load_capabilities(document).kernels
    assert after.check(ctx) == []


@pytest.mark.req("R-CAP-04")
def test_a_quantized_kernel_declares_its_error_bound() -> None:
    document = {
        "schema_version": "1.0", "backend": "q", "platforms": ["cpu"],
        "ops": {"quantize": [{"kernel_id": "q.quantize.int8", "function": "q:f", "dtypes": ["float32"],
                              "quant_formats": ["int8", "nvfp4"], "granularities": ["tensor"],
                              "error_bounds": {"int8": 0.004, "nvfp4": 0.17}}]},
    }  # fmt: skip
    (kernel,) = load_capabilities(document).kernels
    assert dict(kernel.error_bounds) == {"int8": 0.004, "nvfp4": 0.17}
    assert kernel.quant_formats == {"int8", "nvfp4"}


@pytest.mark.req("R-CAP-04")
def test_every_kernel_that_quantizes_declares_the_error_of_each_of_its_formats() -> None:
    """Of the largest magnitude: half the widest step between codes; MXFP4's scale, a power of two, may cut off more."""
    widest = {
        "int8": 0.5 / 127, "int4": 0.5 / 7, "fp8_e4m3": 16 / 448, "fp8_e5m2": 4096 / 57344, "nf4": (1 - 0.6961928) / 2,
        "mxfp4": (8 - 6) / 8, "nvfp4": 1 / (6 / (1 + 2**-4)),
    }  # fmt: skip
    kernels = lz.list_kernels("quantize")
    assert {kernel.backend for kernel in kernels} >= {"reference", "torch"}
    for kernel in kernels:
        declared = dict(kernel.error_bounds)
        assert set(declared) == set(kernel.quant_formats), kernel.kernel_id
        for fmt, bound in declared.items():
            assert widest[fmt] <= bound <= 1.01 * widest[fmt], (kernel.kernel_id, fmt)


@pytest.mark.req("R-CAP-05")
def test_the_draft_version_is_migrated() -> None:
    draft = {
        "schema_version": "0.9", "backend": "old", "platforms": ["cpu"], "requires": ">=1",
        "vendor": {"dist": "libold"},
        "kernels": [
            {"op": "rms_norm", "id": "old.rms_norm.a", "function": "old:a", "dtypes": ["float32"]},
            {"op": "rms_norm", "kernel_id": "old.rms_norm.b", "function": "old:b", "dtypes": ["float32"]},
        ],
    }  # fmt: skip
    loaded = load_capabilities(draft)
    assert [kernel.kernel_id for kernel in loaded.kernels] == ["old.rms_norm.a", "old.rms_norm.b"]
    assert loaded.vendor is not None and loaded.vendor.version == ">=1"
    assert migrate(draft)["schema_version"] == "1.0"
    assert draft["schema_version"] == "0.9" and "kernels" in draft, "the input is left alone"
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities(draft | {"kernels": [{"id": "old.rms_norm.a"}]})
    assert caught.value.key == "kernels[0].op"


# -- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "SCHEMA_INVALID"),
        (b"{", "SCHEMA_INVALID"),
        (b"[]", "SCHEMA_INVALID"),
        (b"null", "SCHEMA_INVALID"),
        (b"\xff\xfe{}", "SCHEMA_INVALID"),
        (b'{"schema_version": "1.0", "schema_version": "1.0"}', "SCHEMA_INVALID"),
        (b'{"schema_version": "1.0", "x": NaN}', "SCHEMA_INVALID"),
        (b'{"schema_version": "1.0", "x": ' + b"9" * 5000 + b"}", "SCHEMA_INVALID"),
        (b'{"schema_version": "1.0", "x": ' + b"[" * 40 + b"]" * 40 + b"}", "SCHEMA_INVALID"),
        (b"[" * 200_000, "SCHEMA_INVALID"),
        (b'{"schema_version": "1.0"}' + b" " * MAX_BYTES, "CONFIG_FILE_TOO_LARGE"),
    ],
    ids=["empty", "cut", "array", "null", "utf16", "twice", "nan", "digits", "deep", "bottomless", "large"],
)
def test_a_hostile_file_is_refused_never_a_crash(tmp_path: Path, content: bytes, code: str) -> None:
    file = tmp_path / "capabilities.json"
    file.write_bytes(content)
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities(file)
    assert caught.value.code == code
    assert "capabilities.json" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CapabilitiesError) as caught:
        load_capabilities(tmp_path / "nowhere.json")
    assert caught.value.code == "CONFIG_FILE_MISSING"


def test_not_json_points_at_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "capabilities.json"
    file.write_text('{\n  "schema_version": "1.0",\n  oops\n}', encoding="utf-8")
    with pytest.raises(CapabilitiesError, match="line 3, column 3"):
        load_capabilities(file)


def test_a_mapping_with_values_json_has_no_word_for_is_refused() -> None:
    with pytest.raises(CapabilitiesError):
        load_capabilities(FULL | {"doc": object()})
    with pytest.raises(CapabilitiesError):
        load_capabilities({**FULL, 7: "seven"})  # type: ignore[dict-item]


# -- schema export ---------------------------------------------------------------------------------
@pytest.mark.req("R-GATE-04")
def test_the_exported_schema_is_valid_and_says_what_the_validator_says() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(FULL)) == []
    for path, value in (
        ("backend", ...),
        ("platfroms", []),
        ("ops/attention/0/gqa", 1),
        ("ops/attention/0/dtypes", []),
    ):
        assert list(validator.iter_errors(changed(path, value))), path


def test_every_field_is_documented_in_the_schema() -> None:
    properties = json_schema()["properties"]["ops"]["additionalProperties"]["items"]["properties"]
    assert set(properties) == {field.name for field in KERNEL.fields}
    assert all(len(item["description"]) > 5 for item in properties.values())


@pytest.mark.req("R-GATE-04")
@pytest.mark.parametrize("file", DESCRIPTORS, ids=lambda file: file.parent.name)
def test_every_descriptor_that_ships_fits_the_schema(file: Path) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(file.read_text(encoding="utf-8")))
    assert len(DESCRIPTORS) >= 4 and load_capabilities(file).backend


# -- read again ------------------------------------------------------------------------------------
@pytest.mark.req("R-CAP-03")
def test_a_file_that_changed_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "capabilities.json"
    path.write_text(json.dumps(FULL))
    first = load_capabilities(path)
    assert load_capabilities(path) == first
    path.write_text(json.dumps(changed("ops/attention/0/priority", 7)))
    second = load_capabilities(path)
    assert (second.kernels[0].priority, second.hash != first.hash) == (7.0, True)
    path.write_text(json.dumps(changed("ops/attention/0/min_sm", 999)))
    with pytest.raises(CapabilitiesError):
        load_capabilities(path)
    path.write_text(json.dumps(FULL))
    assert load_capabilities(path) == first


def test_kernels_have_the_version_of_today_however_often_the_file_was_read(tmp_path: Path) -> None:
    path = tmp_path / "capabilities.json"
    path.write_text(json.dumps(FULL))
    for version in ("2.1", "2.2", "2.2", "2.1"):
        loaded = load_capabilities(path, version=lambda vendor, v=version: f"{vendor.dist} {v}")  # type: ignore[misc]
        assert {kernel.version for kernel in loaded.kernels} == {f"libmine {version}"}
    assert {kernel.version for kernel in load_capabilities(path).kernels} == {"0"}


def test_of_two_wrong_fields_the_first_of_the_table_is_reported_whatever_their_order() -> None:
    kernel = FULL["ops"]["attention"][0]
    for order in (list(kernel), list(reversed(kernel))):
        twice = {name: kernel[name] for name in order} | {"dtypes": "float16", "priority": "high"}
        with pytest.raises(CapabilitiesError) as caught:
            load_capabilities(FULL | {"ops": {"attention": [{name: twice[name] for name in order}]}})
        assert caught.value.key == "ops.attention[0].dtypes"


def test_equal_lists_of_wrong_things_are_wrong_each_time() -> None:
    for value in (["float16", 1], ["float16", ["bfloat16"]], ["float16", "float16"], ["float61"]):
        for _ in range(2):
            with pytest.raises(CapabilitiesError) as caught:
                load_capabilities(changed("ops/attention/0/dtypes", value))
            assert str(caught.value.key).startswith("ops.attention[0].dtypes[")


@pytest.mark.parametrize("inside", [1, [], {"a": 1}])
def test_depth_is_counted_also_where_another_part_checks_the_content(inside: Any) -> None:
    def nested(levels: int) -> Any:
        value = inside
        for _ in range(levels):
            value = {"generation": value}
        return value

    with pytest.raises(CapabilitiesError, match="nested deeper"):
        load_capabilities(FULL | {"generation_map": {"130+": nested(20)}})
    for place in ("unknown", "schema_version", "backend"):
        for levels in (20, 5_000):
            with pytest.raises(CapabilitiesError, match="nested deeper"):
                load_capabilities(FULL | {place: nested(levels)})
