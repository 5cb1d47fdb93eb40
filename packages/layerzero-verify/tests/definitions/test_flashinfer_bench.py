"""The real flashinfer-bench reads what we write, and we read what it writes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from layerzero.errors import ConfigurationError
from layerzero.numerics import HitMode, Tolerance, compare
from layerzero_cli.root import cli
from layerzero_verify.definitions import Options, check, open_dataset, read_traces, write_traces
from layerzero_verify.definitions.inputs import make_inputs
from layerzero_verify.definitions.reference import Trust, compile_reference
from layerzero_verify.definitions.run import check_definition, traces_of
from layerzero_verify.definitions.schema import DTYPES, load_definition, parse_definition
from layerzero_verify.definitions.sizes import workloads_for
from layerzero_verify.definitions.trace import Evaluation, InputSource, Status, Trace, Workload, append_traces

pytestmark = pytest.mark.needs_package("flashinfer_bench", "safetensors")


@pytest.fixture
def fib() -> Any:
    """The package's data classes; its own GPU libraries are not needed for them."""
    from flashinfer_bench import data

    return data


def test_our_names_are_the_formats_names(fib: Any) -> None:
    from flashinfer_bench.data.definition import DType

    assert {member.value for member in DType} == set(DTYPES)
    assert {member.value for member in fib.EvaluationStatus} == set(Status)


# -- definitions -------------------------------------------------------------------------------------------
def test_it_reads_every_definition_we_write(fib: Any, sets: Any, tmp_path: Path) -> None:
    for item in (*sets.samples().values(), sets.template()):
        ours = parse_definition(item)
        theirs = fib.Definition.model_validate_json(json.dumps(ours.to_json()))
        assert theirs.const_axes == ours.const_axes and tuple(theirs.var_axes) == ours.var_axes
        assert list(theirs.inputs) == list(ours.inputs) and list(theirs.outputs) == list(ours.outputs)
        assert theirs.reference == ours.reference and tuple(theirs.constraints) == ours.constraints
        sizes = dict(workloads_for(ours, ["small"])[-1].axes)
        shapes = [None if shape is None else tuple(shape) for shape in theirs.get_input_shapes(sizes)]
        assert shapes == [ours.shape(spec, sizes) for spec in ours.inputs.values()]


@pytest.mark.req("R-DEF-02")
def test_we_read_every_definition_it_writes(fib: Any, tmp_path: Path) -> None:
    made = fib.Definition(
        name="norm_of_theirs",
        op_type="rmsnorm",
        axes={"n": fib.AxisVar(description="rows"), "h": fib.AxisConst(value=8)},
        inputs={
            "hidden_states": fib.TensorSpec(shape=["n", "h"], dtype="float32"),
            "weight": fib.TensorSpec(shape=["h"], dtype="float32"),
            "eps": fib.TensorSpec(shape=None, dtype="float32"),
        },
        outputs={"output": fib.TensorSpec(shape=["n", "h"], dtype="float32", description="normed")},
        reference="import torch\ndef run(hidden_states, weight, eps):\n"
        "    return torch.nn.functional.rms_norm(hidden_states, (8,), weight, eps)\n",
        tags=["status:draft"],
        description="written by the other side",
        constraints=["n >= 1"],
    )
    path = tmp_path / "definitions" / "rmsnorm" / "norm_of_theirs.json"
    fib.save_json_file(made, path)
    ours = load_definition(path)
    assert ours.var_axes == ("n",) and ours.const_axes == {"h": 8} and ours.inputs["eps"].shape is None
    assert (ours.tags, ours.description, ours.constraints) == (
        ("status:draft",), "written by the other side", ("n >= 1",),
    )  # fmt: skip
    assert fib.Definition.model_validate(ours.to_json()) == made, "and back again it is the same"
    (path.parent / "full.json").write_text(made.model_dump_json().replace("norm_of_theirs", "full"), encoding="utf-8")
    assert load_definition(path.parent / "full.json").op_type == "rmsnorm", "also with every optional field written out"
    dataset = open_dataset(tmp_path)
    options = Options(trust=(str(tmp_path),), repeats=1)
    report = check(dataset, dataset.select(["norm_of_theirs"]), options, sizes=["small"])
    assert report.ok and any(outcome.passed for outcome in report.outcomes if outcome.solution.endswith(".plain"))


@pytest.mark.req("R-FUZZ-03")
@pytest.mark.parametrize(
    "change",
    [
        lambda item: item.pop("name"),
        lambda item: item.pop("outputs"),
        lambda item: item["axes"].pop("N"),
        lambda item: item["inputs"]["A"].pop("dtype"),
        lambda item: item["inputs"]["A"].update(dtype="float5"),
        lambda item: item["inputs"].update(C=item["inputs"]["A"]),
        lambda item: item.update(reference="x = 1"),
        lambda item: item.update(reference="def run(:"),
        lambda item: item.update(constraints=["1 +"]),
        lambda item: item["axes"]["N"].update(value=-3),
        lambda item: item.update(name=""),
    ],
)
def test_both_refuse_the_same_mistakes(fib: Any, sets: Any, change: Any) -> None:
    from pydantic import ValidationError

    item = sets.samples()["gemm_n24_k64"]
    change(item)
    with pytest.raises(ValidationError):
        fib.Definition.model_validate(item)
    with pytest.raises(ConfigurationError):
        parse_definition(item)


def test_both_build_the_same_function_from_a_reference(fib: Any, sets: Any) -> None:
    from flashinfer_bench.compile import BuilderRegistry

    for name in ("gemm_n24_k64", "rmsnorm_h32", "gqa_paged_decode_h4_kv2_d16_ps1"):
        path = next(sets.only(name).rglob(f"{name}.json"))
        ours = load_definition(path)
        text = path.read_text(encoding="utf-8").replace('"reference": "', '"reference": "import math, torch\\n', 1)
        theirs = BuilderRegistry.get_instance().build_reference(fib.Definition.model_validate_json(text))
        inputs = make_inputs(ours, workloads_for(ours, ["small"])[-1], "cpu")
        got = compile_reference(ours, Trust.of([path]))(**inputs)
        other = theirs(*inputs.values())
        pairs = zip(got, other, strict=True) if isinstance(got, tuple) else [(got, other)]
        assert all(torch.equal(one, two) for one, two in pairs)


# -- workloads ----------------------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-15")
def test_we_read_the_workloads_and_tensors_it_stores(fib: Any, sets: Any) -> None:
    root = sets.only("gqa_paged_decode_h4_kv2_d16_ps1")
    theirs = fib.TraceSet.from_path(str(root))
    name = "gqa_paged_decode_h4_kv2_d16_ps1"
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    pages = torch.tensor([7, 0, 3, 1, 6], dtype=torch.int32)
    blob = theirs.add_workload_blob_tensor(name, "w1", {"kv_indptr": offsets, "kv_indices": pages})
    stored = {key: fib.SafetensorsInput(path=blob, tensor_key=key) for key in ("kv_indptr", "kv_indices")}
    stored |= {key: fib.RandomInput() for key in ("q", "k_cache", "v_cache")}
    stored["sm_scale"] = fib.ScalarInput(value=0.25)
    axes = {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 5, "num_pages": 8}
    work = fib.Workload(axes=axes, inputs=stored, uuid="w1")
    theirs.add_workload_traces([fib.Trace(definition=name, workload=work)])

    dataset = open_dataset(root)
    found, problems = dataset.workloads(dataset.definitions[name])
    assert not problems and len(found) == 1 and found[0].axes == axes
    made = make_inputs(dataset.definitions[name], found[0], "cpu", root=root)
    assert torch.equal(made["kv_indptr"], offsets) and torch.equal(made["kv_indices"], pages)
    assert made["sm_scale"] == 0.25
    options = Options(trust=(str(root),), repeats=1)
    report = check(dataset, dataset.select(everything=True), options, sizes=())
    assert report.ok and any(outcome.passed for outcome in report.outcomes if outcome.solution.endswith(".plain"))


@pytest.fixture
def example(fib: Any, tmp_path: Path) -> Path:
    """A dataset laid out as the library's own example is: no folders by op_type, files named after a definition."""
    root = tmp_path / "Example-FlashInfer-Trace"
    axes = {"M": fib.AxisVar(), "N": fib.AxisConst(value=24), "K": fib.AxisConst(value=64)}
    product = fib.Definition(
        name="gemm_n24_k64",
        op_type="gemm",
        axes=axes,
        inputs={name: fib.TensorSpec(shape=[rows, "K"], dtype="float16") for name, rows in (("A", "M"), ("B", "N"))},
        outputs={"C": fib.TensorSpec(shape=["M", "N"], dtype="float16")},
        reference="import torch\n\ndef run(A, B):\n    return torch.matmul(A, B.T)",
        tags=["status:verified"],
    )
    fib.save_json_file(product, root / "definitions" / "gemm_n24_k64.json")
    random = {"A": fib.RandomInput(), "B": fib.RandomInput()}
    work = [fib.Workload(axes={"M": size}, inputs=random, uuid=f"w{size}") for size in (16, 8)]
    traces = [fib.Trace(definition="gemm_n24_k64", workload=item) for item in work]
    fib.save_jsonl_file(traces, root / "workloads" / "gemm_n24_k64.jsonl")
    return root


@pytest.mark.fault(30)
@pytest.mark.req("R-DEF-15")
def test_workloads_and_traces_are_found_wherever_the_library_finds_them(fib: Any, example: Path) -> None:
    dataset = open_dataset(example)
    assert [work.uuid for work in dataset.workloads(dataset.definitions["gemm_n24_k64"])[0]] == ["w16", "w8"]
    options = Options(trust=(str(example),), repeats=1, backends=("reference",))
    report = check(dataset, dataset.select(everything=True), options, sizes=())
    assert report.ok and {outcome.workload.uuid for outcome in report.outcomes} == {"w16", "w8"} and not report.notes
    # Other folders, several files, and definitions mixed in one: the lines say whose they are.
    where = fib.Environment(hardware="cpu", libs={})
    late = fib.Evaluation(status="TIMEOUT", environment=where, timestamp="t", log="")
    random = {"A": fib.RandomInput(), "B": fib.RandomInput()}
    for place, name, uuid in (
        ("by_model/llama/o_proj.jsonl", "gemm_n24_k64", "deep"),
        ("mixed.jsonl", "another", "foreign"),
        ("gemm/gemm_n24_k64.jsonl", "gemm_n24_k64", "usual"),
    ):
        work = fib.Workload(axes={"M": 1}, inputs=random, uuid=uuid)
        fib.append_jsonl_file([fib.Trace(definition=name, workload=work)], example / "workloads" / place)
        done = fib.Trace(definition=name, workload=work, solution="s", evaluation=late)
        fib.append_jsonl_file([done], example / "traces" / place)
    theirs = fib.TraceSet.from_path(str(example))
    dataset = open_dataset(example)
    definition = dataset.definitions["gemm_n24_k64"]
    workloads, traces = dataset.workloads(definition), dataset.traces(definition)
    assert [work.uuid for work in workloads[0]] == [item.workload.uuid for item in theirs.workloads[definition.name]]
    assert [item.workload.uuid for item in traces[0]] == [item.workload.uuid for item in theirs.traces[definition.name]]
    assert len(workloads[0]) == 4 and len(traces[0]) == 2 and not workloads[1] and not traces[1]
    assert dataset.tested(definition) == "traces/by_model/llama/o_proj.jsonl"
    assert dataset.strays() == (["another"], [])


@pytest.mark.fault(30)
def test_what_is_missing_is_said(fib: Any, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, code: int = 0) -> tuple[str, Any]:
        text = CliRunner().invoke(cli, ["definitions", *map(str, args), "--root", str(example)])
        found = CliRunner().invoke(cli, ["definitions", *map(str, args), "--root", str(example), "--json"])
        assert text.exit_code == found.exit_code == code, text.output
        return text.output, json.loads(found.stdout)

    text, found = run("list")
    assert [(row["workloads"], row["traces"]) for row in found["definitions"]] == [(2, 0)]
    assert len(found["notes"]) == 1 and "no traces in" in found["notes"][0] and "no traces in" in text
    (example / "workloads" / "gemm_n24_k64.jsonl").unlink()
    text, found = run("list")
    assert [note.split(" in ")[0] for note in found["notes"]] == ["no workloads", "no traces"]
    assert "no workloads in" in text
    text, found = run("check", "--all", "--sizes", "none", "--backend", "reference", code=1)
    assert "gemm_n24_k64: no workload of it in" in text and "not checked" in found["notes"][0]
    (example / "definitions" / "gemm_n24_k64.json").unlink()
    text, found = run("list")
    assert found["definitions"] == [] and "no definitions in" in text
    text, found = run("check", "--all", code=1)
    assert "no definition of those asked for" in text
    (example / "definitions" / "bad.json").write_text("{")
    assert "bad.json" in run("check", "--all", code=1)[1]["problems"][0]
    (example / "workloads" / "nobodys.jsonl").write_text("{")
    assert "nobodys.jsonl" in "".join(run("list", code=1)[1]["problems"])


@pytest.mark.fault(30)
def test_without_a_root_the_librarys_own_folder_is_read(
    fib: Any, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer_bench.env import get_fib_dataset_path

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FIB_DATASET_PATH", raising=False)
    shutil.copytree(example, get_fib_dataset_path())
    assert list(open_dataset().definitions) == ["gemm_n24_k64"]


def test_it_reads_the_workloads_we_write(fib: Any, sets: Any) -> None:
    root = sets.put(sets.root, *sets.samples().values())
    for definition in open_dataset(root).definitions.values():
        file = root / "workloads" / definition.op_type / f"{definition.name}.jsonl"
        append_traces(file, [Trace(definition.name, work) for work in workloads_for(definition, ["small"])])
    theirs = fib.TraceSet.from_path(str(root))
    assert set(theirs.workloads) == set(sets.samples())
    assert all(trace.is_workload_trace() for traces in theirs.workloads.values() for trace in traces)


# -- traces -------------------------------------------------------------------------------------------------
def test_it_reads_the_traces_of_a_whole_check(fib: Any, sets: Any) -> None:
    root = sets.put(sets.root, *(sets.samples()[name] for name in ("rmsnorm_h32", "gemm_n24_k64")))
    dataset = open_dataset(root)
    options = Options(trust=(str(root),), repeats=1)
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    for definition in dataset.definitions.values():
        mine = [outcome for outcome in report.outcomes if outcome.definition == definition.name]
        append_traces(dataset.root / "traces" / definition.op_type / f"{definition.name}.jsonl", traces_of(mine, "cpu"))
    theirs = fib.TraceSet.from_path(str(root))
    assert set(theirs.traces) == set(dataset.definitions)
    tried = [outcome for outcome in report.outcomes if not outcome.skipped]
    assert theirs.summary()["total"] == theirs.summary()["passed"] == len(tried)
    best = theirs.get_best_trace("rmsnorm_h32")
    assert best is not None and best.evaluation.performance.speedup_factor > 0
    assert theirs.filter_traces("gemm_n24_k64", atol=1e-3, rtol=1e9)


@pytest.mark.parametrize("status", sorted(Status))
def test_it_reads_a_trace_of_every_status(fib: Any, tmp_path: Path, status: str) -> None:
    numbers = (math.inf, math.nan) if status == "INCORRECT_NUMERICAL" else (1e-3, 2e-3)
    made = Evaluation(Status(status), "cpu", {"torch": "2"}, "2026-01-01", "log", *numbers, {"n": 1.5}, 2.0, 6.0)
    workload = Workload("u", {"M": 3}, {"A": InputSource(), "s": InputSource("scalar", 0.5)})
    file = tmp_path / "traces.jsonl"
    append_traces(file, [Trace("d", workload, "some.kernel.id", made)])
    theirs = fib.load_jsonl_file(fib.Trace, file)[0]
    assert theirs.evaluation.status.value == status and theirs.solution == "some.kernel.id"
    assert (theirs.evaluation.correctness is not None) is (status in ("PASSED", "INCORRECT_NUMERICAL"))
    assert (theirs.evaluation.performance is not None) is (status == "PASSED")
    if status == "INCORRECT_NUMERICAL":
        assert theirs.evaluation.correctness.max_relative_error == math.inf
        assert math.isnan(theirs.evaluation.correctness.max_absolute_error)
    if status == "PASSED":
        assert theirs.evaluation.performance.speedup_factor == 3.0


def test_we_read_the_traces_it_writes(fib: Any, tmp_path: Path) -> None:
    where = fib.Environment(hardware="NVIDIA H200", libs={"torch": "2.11"})
    bad = fib.Correctness(max_relative_error=math.inf, max_absolute_error=2.0, extra={"tvd": 0.3})
    good = {
        "correctness": fib.Correctness(max_relative_error=1e-3, max_absolute_error=1e-4),
        "performance": fib.Performance(latency_ms=0.5, reference_latency_ms=2.0, speedup_factor=4.0),
    }
    work = fib.Workload(axes={"M": 2}, inputs={"A": fib.RandomInput()}, uuid="w")
    made = [
        fib.Trace(definition="d", workload=work),
        fib.Trace(definition="d", workload=work, solution="s", evaluation=fib.Evaluation(
            status="PASSED", environment=where, timestamp="t", **good)),
        fib.Trace(definition="d", workload=work, solution="s", evaluation=fib.Evaluation(
            status="INCORRECT_NUMERICAL", environment=where, timestamp="t", correctness=bad)),
        fib.Trace(definition="d", workload=work, solution="s", evaluation=fib.Evaluation(
            status="TIMEOUT", environment=where, timestamp="t", log="too slow")),
    ]  # fmt: skip
    fib.save_jsonl_file(made, tmp_path / "t.jsonl")
    found, problems = read_traces(tmp_path / "t.jsonl")
    assert not problems and [trace.evaluation and trace.evaluation.status for trace in found] == [
        None, Status.PASSED, Status.INCORRECT_NUMERICAL, Status.TIMEOUT,
    ]  # fmt: skip
    assert found[1].evaluation is not None and found[1].evaluation.speedup_factor == 4.0
    assert found[2].evaluation is not None and found[2].evaluation.max_relative_error == math.inf
    assert found[3].evaluation is not None and found[3].evaluation.log == "too slow"
    append_traces(tmp_path / "back.jsonl", found)
    assert [trace.evaluation for trace in fib.load_jsonl_file(fib.Trace, tmp_path / "back.jsonl")][3] == made[
        3
    ].evaluation


def test_a_failing_kernel_becomes_a_trace_it_understands(fib: Any, sets: Any, lab: Any, tmp_path: Path) -> None:
    wrong = lab.kernel("faulty.rms_norm.x", lambda x, weight, eps: x * math.nan)
    lab.use(wrong)
    dataset = open_dataset(sets.only("rmsnorm_h32"))
    options = Options(trust=(str(dataset.root),), repeats=1, backends=("faulty",))
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    write_traces(report, tmp_path / "out.jsonl")
    theirs = fib.load_jsonl_file(fib.Trace, tmp_path / "out.jsonl")
    mine = [trace for trace in theirs if trace.solution == "faulty.rms_norm.x"]
    assert mine and all(trace.evaluation.status.value == "INCORRECT_NUMERICAL" for trace in mine)
    assert not any(trace.is_successful() for trace in mine)


# -- numbers ------------------------------------------------------------------------------------------------
@pytest.mark.req("R-DEF-09")
def test_its_own_way_of_counting_hits_is_our_other_mode(fib: Any) -> None:
    from flashinfer_bench.bench.config import BenchmarkConfig
    from flashinfer_bench.bench.utils import compute_error_stats

    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(200, generator=generator)
    actual = expected + 0.02 * torch.randn(200, generator=generator)
    config = BenchmarkConfig(rtol=1e-2, atol=1e-2, required_matched_ratio=0.85)
    max_abs, max_rel, _, ratio = compute_error_stats(actual, expected, config)
    ours = compare(actual, expected, Tolerance(1e-2, 1e-2, 0.85, HitMode.EITHER))
    assert ours.hit_ratio == pytest.approx(ratio)
    assert ours.max_abs == pytest.approx(max_abs, rel=1e-5) and ours.max_rel == pytest.approx(max_rel, rel=1e-4)


def test_its_own_inputs_pass_our_check_where_random_numbers_are_valid(fib: Any, sets: Any) -> None:
    from flashinfer_bench.bench.utils import gen_inputs

    root = sets.only("gemm_n24_k64")
    ours = open_dataset(root).definitions["gemm_n24_k64"]
    theirs = fib.Definition.model_validate(ours.to_json())
    work = fib.Workload(axes={"M": 5}, inputs={"A": fib.RandomInput(), "B": fib.RandomInput()}, uuid="x")
    shapes = [tuple(tensor.shape) for tensor in gen_inputs(theirs, work, "cpu")]
    made = make_inputs(ours, Workload("x", {"M": 5}), "cpu")
    assert shapes == [tuple(tensor.shape) for tensor in made.values()]
    found = check_definition(ours, [Workload("x", {"M": 5})], Options(trust=(str(root),), repeats=1))
    assert not [outcome for outcome in found if outcome.failed]
