"""Reading definitions, workloads and traces: what is taken, what is refused and how it is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.env import read
from layerzero.errors import ConfigurationError, InvalidInputError, UnknownNameError
from layerzero_verify.definitions import open_dataset, read_traces
from layerzero_verify.definitions.schema import DTYPES, load_definition, parse_definition
from layerzero_verify.definitions.sizes import derive, violated
from layerzero_verify.definitions.trace import (
    Evaluation,
    InputSource,
    Status,
    Trace,
    Workload,
    append_traces,
    parse_trace,
)

LONG = read().prove


@pytest.mark.req("R-DEF-02")
def test_axes_inputs_outputs_shapes_dtypes_and_code_are_read(sets: Any) -> None:
    definition = parse_definition(sets.samples()["gqa_paged_prefill_causal_h4_kv2_d16_ps4"])
    assert definition.const_axes == {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    assert set(definition.var_axes) == {"len_indptr", "num_pages", "num_kv_indices", "total_q", "batch_size"}
    assert definition.inputs["k_cache"].shape == ("num_pages", "page_size", "num_kv_heads", "head_dim")
    assert definition.inputs["sm_scale"].shape is None, "a Python number"
    assert {spec.dtype for spec in definition.outputs.values()} == {"bfloat16", "float32"}
    sizes = {"num_pages": 7, "total_q": 3, "batch_size": 1, "len_indptr": 2, "num_kv_indices": 5}
    assert definition.shape(definition.inputs["k_cache"], sizes) == (7, 4, 2, 16)
    assert definition.shape(definition.inputs["sm_scale"], sizes) is None
    assert "def run(" in definition.reference and definition.stage == "prefill"
    assert parse_definition(definition.to_json()) == definition, "written and read again it is the same"


def test_types_that_are_left_out_follow_from_the_other_fields(sets: Any) -> None:
    item = sets.samples()["gemm_n24_k64"]
    for axis in item["axes"].values():
        del axis["type"]
    assert parse_definition(item) == parse_definition(sets.samples()["gemm_n24_k64"])
    inputs = {"a": {}, "b": {"value": 2}, "c": {"path": "p", "tensor_key": "k"}}
    found = parse_trace({"definition": "d", "workload": {"uuid": "u", "axes": {}, "inputs": inputs}}).workload.inputs
    assert [source.kind for source in found.values()] == ["random", "scalar", "safetensors"]


def test_numbers_are_found_in_the_code_without_running_it(sets: Any) -> None:
    item = sets.samples()["rmsnorm_h32"]
    assert parse_definition(item).constant("eps") == 1e-5
    assert parse_definition(item).constant("HIDDEN_SIZE") == 32, "a constant axis"
    assert parse_definition(item).constant("other") is None
    item["reference"] = "EPS = 1e-5\ndef run(hidden_states, weight):\n    eps = 1e-6\n"
    assert parse_definition(item).constant("eps") is None, "two numbers: nobody knows which"


def _without(path: str) -> Any:
    def change(item: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for step in way:
            item = item[step]
        del item[last]

    return change


def _with(path: str, value: Any) -> Any:
    def change(item: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for step in way:
            item = item[step]
        item[last] = value

    return change


@pytest.mark.req("R-DEF-13", "R-DEF-02")
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_without("name"), "SCHEMA_FIELD_MISSING", "name"),
        (_without("axes"), "SCHEMA_FIELD_MISSING", "axes"),
        (_without("reference"), "SCHEMA_FIELD_MISSING", "reference"),
        (_without("inputs.A.shape"), "SCHEMA_FIELD_MISSING", "inputs.A"),
        (_without("axes.N.value"), "SCHEMA_FIELD_MISSING", "axes.N"),
        (_with("name", "../out"), "SCHEMA_INVALID", "file name"),
        (_with("op_type", ".hidden"), "SCHEMA_INVALID", "file name"),
        (_with("name", 3), "SCHEMA_INVALID", "str"),
        (_with("axes.N.value", -1), "SCHEMA_INVALID", "negative"),
        (_with("axes.N.value", True), "SCHEMA_INVALID", "bool"),
        (_with("axes.N.type", "dynamic"), "SCHEMA_INVALID", "const or var"),
        (_with("inputs.A.dtype", "float63"), "SCHEMA_INVALID", "float63"),
        (_with("inputs.A.shape", ["M", "Z"]), "SCHEMA_INVALID", "'Z'"),
        (_with("outputs", {}), "SCHEMA_INVALID", "empty"),
        (_with("outputs.A", {"shape": ["M"], "dtype": "float32"}), "SCHEMA_INVALID", "both an input and an output"),
        (_with("reference", "def run(:"), "SCHEMA_INVALID", "not Python"),
        (_with("reference", "def other(): pass"), "SCHEMA_INVALID", "function run"),
        (_with("reference", "class A:\n    def run(self): pass"), "SCHEMA_INVALID", "function run"),
        (_with("constraints", ["M =="]), "SCHEMA_INVALID", "M =="),
        (_with("tags", [""]), "SCHEMA_INVALID", "tags"),
    ],
)
def test_a_bad_definition_is_refused_with_the_place(sets: Any, change: Any, code: str, words: str) -> None:
    item = sets.samples()["gemm_n24_k64"]
    change(item)
    with pytest.raises(ConfigurationError) as refused:
        parse_definition(item)
    assert refused.value.code == code and words in str(refused.value)


@pytest.mark.req("R-FUZZ-03")
@settings(max_examples=2000 if LONG else 60, deadline=None)
@given(st.data())
def test_missing_extra_and_odd_fields_are_refused_or_harmless(data: st.DataObject) -> None:
    base = {
        "name": "n", "op_type": "gemm", "axes": {"M": {"type": "var"}, "K": {"type": "const", "value": 2}},
        "inputs": {"A": {"shape": ["M", "K"], "dtype": "float32"}},
        "outputs": {"C": {"shape": ["M"], "dtype": "float32"}}, "reference": "def run(A): pass",
    }  # fmt: skip
    places = [base, base["axes"], base["axes"]["K"], base["inputs"], base["inputs"]["A"]]
    place = data.draw(st.sampled_from(places))
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=4) | st.just("float32"),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_leaves=4,
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(place)), unique=True, max_size=2)):
        del place[name]
    names = st.sampled_from(["name", "axes", "inputs", "shape", "dtype", "value", "type", "tags", "constraints", "M"])
    place.update(data.draw(st.dictionaries(names | st.text(max_size=4), values, max_size=2)))
    try:
        found = parse_definition(base)
    except ConfigurationError:
        return
    assert parse_definition(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.req("R-DEF-13")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b'{"name": "a", "name": "b"}', "duplicate key 'name'"),
        (b'{"name": NaN}', "NaN"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "expected an object"),
    ],
)
def test_a_file_that_is_no_definition_is_reported_and_the_others_are_read(
    sets: Any, content: bytes, words: str
) -> None:
    root = sets.only("gemm_n24_k64")
    bad = root / "definitions" / "gemm" / "bad.json"
    bad.write_bytes(content)
    dataset = open_dataset(root)
    assert list(dataset.definitions) == ["gemm_n24_k64"]
    assert [problem.path for problem in dataset.problems] == [bad] and words in str(dataset.problems[0])
    with pytest.raises(ConfigurationError, match=words):
        load_definition(bad)


def test_a_name_defined_twice_counts_once_and_is_reported(sets: Any) -> None:
    root = sets.only("gemm_n24_k64")
    first = root / "definitions" / "gemm" / "gemm_n24_k64.json"
    second = root / "definitions" / "gemm" / "later.json"
    second.write_bytes(first.read_bytes())
    dataset = open_dataset(root)
    assert dataset.definitions["gemm_n24_k64"].source == first
    assert [problem.path for problem in dataset.problems] == [second]


@pytest.mark.req("R-DEF-01")
def test_definitions_are_chosen_by_name_by_op_type_or_all(sets: Any) -> None:
    dataset = open_dataset(sets.put(sets.root, *sets.samples().values()))
    names = [item.name for item in dataset.select(["rmsnorm_h32"])]
    assert names == ["rmsnorm_h32"]
    assert dataset.definitions["rmsnorm_h32"].source == sets.root / "definitions" / "rmsnorm" / "rmsnorm_h32.json"
    assert {item.op_type for item in dataset.select(op_types=["gqa_paged"])} == {"gqa_paged"}
    assert len(dataset.select(op_types=["gqa_paged"])) == 2
    assert [item.name for item in dataset.select(everything=True)] == sorted(sets.samples())
    with pytest.raises(InvalidInputError):
        dataset.select()
    with pytest.raises(UnknownNameError, match="rmsnorm_h32"):
        dataset.select(["rmsnorm_h33"])
    with pytest.raises(UnknownNameError, match="sampling"):
        dataset.select(op_types=["samplin"])


def test_the_root_comes_from_the_caller_or_the_other_projects_variable(
    sets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="FIB_DATASET_PATH"):
        open_dataset()
    with pytest.raises(ConfigurationError, match="no dataset"):
        open_dataset(sets.root / "nowhere")
    monkeypatch.setenv("FIB_DATASET_PATH", str(sets.only("gemm_n24_k64")))
    assert list(open_dataset().definitions) == ["gemm_n24_k64"]


@pytest.mark.req("R-DEF-01")
def test_a_definition_with_a_test_or_with_traces_is_known_as_tested(sets: Any) -> None:
    dataset = open_dataset(sets.put(sets.root, *sets.samples().values()))
    one, other = dataset.definitions["rmsnorm_h32"], dataset.definitions["gemm_n24_k64"]
    tests = sets.root / "tests" / "references"
    tests.mkdir(parents=True)
    (tests / "test_norm.py").write_text('NAME = "fused_add_rmsnorm_h32"\n', encoding="utf-8")
    assert dataset.tested(one) is None, "another name that holds this one is another name"
    (tests / "test_norm.py").write_text('NAME = "rmsnorm_h32"\n', encoding="utf-8")
    assert dataset.tested(one) == "tests/references/test_norm.py"
    assert dataset.tested(other) is None
    made = Evaluation(Status.PASSED, "cpu", {}, "now")
    append_traces(
        dataset.root / "traces" / other.op_type / f"{other.name}.jsonl",
        [Trace(other.name, Workload("u", {"M": 1}), "some.kernel.id", made)],
    )
    assert dataset.tested(other) == "traces/gemm/gemm_n24_k64.jsonl"


@pytest.mark.req("R-DEF-15", "R-DEF-13")
def test_workloads_come_from_their_file_and_bad_lines_are_reported(sets: Any) -> None:
    root = sets.only("gemm_n24_k64")
    dataset = open_dataset(root)
    definition = dataset.definitions["gemm_n24_k64"]
    assert dataset.workloads(definition) == ([], [])
    file = root / "workloads" / "gemm" / "gemm_n24_k64.jsonl"
    file.parent.mkdir(parents=True)
    sources = {"A": {"type": "random"}, "B": {"type": "safetensors", "path": "blob/x.safetensors", "tensor_key": "B"}}
    good = {"definition": "gemm_n24_k64", "workload": {"uuid": "one", "axes": {"M": 3}, "inputs": sources}}
    number = {"uuid": "two", "axes": {"M": 4}, "inputs": {"A": {"type": "scalar", "value": 2.5}}}
    scalar = {"definition": "gemm_n24_k64", "solution": None, "evaluation": None, "workload": number}
    bad = [
        {"definition": "gemm_n24_k64"},
        {**good, "workload": {"uuid": "x", "axes": {"M": -1}, "inputs": {}}},
        {**good, "workload": {"uuid": "x", "axes": {"M": 1}, "inputs": {"A": {"type": "magic"}}}},
        {**good, "solution": "half a trace"},
    ]
    lines = [json.dumps(item) for item in (good, *bad, {**good, "definition": "another"}, scalar)]
    file.write_text("\n".join([*lines[:2], "", "{", *lines[2:]]), encoding="utf-8")
    found, problems = dataset.workloads(definition)
    assert found == [
        Workload(
            "one", {"M": 3}, {"A": InputSource(), "B": InputSource("safetensors", None, "blob/x.safetensors", "B")}
        ),
        Workload("two", {"M": 4}, {"A": InputSource("scalar", 2.5)}),
    ]
    assert len(problems) == len(bad) + 1
    assert "line 4" in str(problems[1]) and "not JSON" in str(problems[1])


def test_traces_are_appended_whole_and_read_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "traces.jsonl"
    workload = Workload("u", {"M": 1}, {"A": InputSource("scalar", 1.5), "B": InputSource()})
    passed = Evaluation(Status.PASSED, "cpu", {"torch": "2"}, "t", "fine", 1e-3, 2e-4, {"n": 1}, 2.0, 5.0)
    wrong = Evaluation(Status.INCORRECT_NUMERICAL, "cpu", {}, "t", "off", math.inf, math.nan)
    crash = Evaluation(Status.RUNTIME_ERROR, "cpu", {}, "t", "boom")
    traces = [Trace("d", workload), *(Trace("d", workload, "k", item) for item in (passed, wrong, crash))]
    assert append_traces(file, traces[:2]) == 2 and append_traces(file, []) == 0
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert append_traces(file, traces[2:]) == 2
    found, bad = read_traces(file)
    assert bad == [] and len(found) == 4
    assert found[:2] == traces[:2] and found[3] == traces[3]
    errors = found[2].evaluation
    assert errors is not None and errors.max_relative_error == math.inf and math.isnan(errors.max_absolute_error)
    assert passed.speedup_factor == 2.5
    assert traces[1].to_json()["evaluation"]["performance"]["speedup_factor"] == 2.5
    for trace, keys in ((traces[2], ("correctness",)), (traces[3], ())):
        evaluation = trace.to_json()["evaluation"]
        assert {name for name in ("correctness", "performance") if evaluation[name] is not None} == set(keys)


@settings(max_examples=1000 if LONG else 60, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["definition", "workload", "uuid", "axes", "inputs", "solution", "evaluation", "status"]),
        inner, max_size=5,
    ),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_a_trace_or_a_refusal(data: Any) -> None:
    try:
        assert parse_trace(data).definition is not None
    except ConfigurationError:
        pass


# -- constraints ---------------------------------------------------------------------------------
def test_constraints_are_worked_out_over_axes_shapes_and_elements() -> None:
    import torch

    values = {"n": 4, "m": 8, "indptr": torch.tensor([0, 3, 9]), "w": torch.zeros(8, 2)}
    hold = [
        "m == 2 * n", "n + 1 <= m", "indptr[-1].item() == 9", "w.shape[0] == m and n != m", "len(w.shape) == 2",
        "indptr.max() == 9", "0 <= n < m", "not n > m", "m // n == 2 or n == 0", "max(n, m) == 8", "m % 3 == -(-2)",
    ]  # fmt: skip
    assert violated(hold, values) == ([], [])
    broken = ["m == n", "indptr[-1] == 8", "w.shape[1] == 3"]
    assert violated(broken, values) == (broken, [])


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true') == 0", "w.__class__", "open('x')", "[x for x in w]", "(lambda: 1)()",
        "w.tolist()",
        "unknown == 1", "'a' * 10", "w[9999999]", "n ** 99999999", "f'{n}'", "n if n else 1", "n / 0 == 1", "n << 60",
    ],
)  # fmt: skip
def test_what_a_constraint_may_not_do_is_reported_as_not_checked(text: str) -> None:
    import torch

    broken, unread = violated([text], {"n": 4, "w": torch.zeros(2)})
    assert broken == [] and len(unread) == 1


def test_axes_follow_from_equations() -> None:
    found = derive(["b == a + 1", "2 * b == c", "d == c - b", "e == x.item()"], {"a": 3}, ["a", "b", "c", "d", "e"])
    assert found == {"b": 4, "c": 8, "d": 4}


@pytest.mark.req("R-DEF-02")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_of_the_format_is_one_of_torchs(name: str) -> None:
    import torch

    from layerzero_verify.definitions.schema import torch_dtype

    assert isinstance(torch_dtype(name), torch.dtype)
