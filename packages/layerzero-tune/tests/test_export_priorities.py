"""A solved table in another stack's words: the value its cases speak for, what it costs, and names that exist."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import layerzero as lz
from layerzero.errors import UnknownNameError
from layerzero.model.dispatch_table import DispatchTable, Hardware, PlanEntry
from layerzero.perfdb.store import PerfDB
from layerzero.runtime.state import state
from layerzero.tables.file import make_table, save_table
from layerzero_cli.root import cli
from layerzero_tune.cli.export_priorities import STACKS
from layerzero_tune.tables.priorities import Export, _stacks, export_priorities, stack_of
from layerzero_tune.tables.solver import times_of
from layerzero_tune.trial import trial

PACKAGES = Path(__file__).resolve().parents[2]

# What the stacks that are not installed here take, read off their sources in the version that stacks.json names:
# vllm/v1/attention/backends/registry.py and vllm/config/{attention,kernel}.py, sglang/srt/arg_groups/choices.py.
SGLANG = {
    "triton", "torch_native", "flex_attention", "fa3", "fa4", "flashinfer", "flashmla", "trtllm_mla", "trtllm_mha",
    "aiter", "wave", "intel_amx", "ascend", "intel_xpu",
}  # fmt: skip
TAKEN: dict[str, dict[str, set[str]]] = {
    "vllm 0.32.0": {
        "--attention-backend": {
            "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "TRITON_ATTN", "TRITON_FLASH_ATTN", "ROCM_ATTN", "FLASHINFER",
            "TRITON_FLASHINFER", "FLASHINFER_MLA", "TRITON_MLA", "CUTLASS_MLA", "FLASHMLA", "FLASH_ATTN_MLA",
            "FLEX_ATTENTION", "CPU_ATTN", "TORCH_SDPA",
        },
        "--attention-config.flash_attn_version": {"2", "3", "4"},
        "--ir-op-priority.rms_norm": {"native", "vllm_c", "aiter", "oink"},
        "--ir-op-priority.fused_add_rms_norm": {"native", "vllm_c", "aiter", "oink"},
        "VLLM_USE_FLASHINFER_SAMPLER": {"0", "1"},
    },
    "sglang 0.5.23": {
        "--attention-backend": SGLANG,
        "--prefill-attention-backend": SGLANG,
        "--decode-attention-backend": SGLANG,
        "--sampling-backend": {"flashinfer", "pytorch", "ascend", "intel_xpu"},
    },
}  # fmt: skip


def case(op: str, kernel_id: str, us: float | None, q: int = 1, k: int = 1024, **when: Any) -> PlanEntry:
    sizes = (("head_dim", 128), ("seq_len_k", k), ("seq_len_q", q))
    return PlanEntry(op, tuple(sorted(when.items())), sizes, kernel_id, us, None if us is None else 1e-3)


def table(*entries: PlanEntry) -> DispatchTable:
    kernels = {entry.kernel_id: "1.0" for entry in entries}
    edges = {"seq_len_k": (1024, 4096), "seq_len_q": (1, 4096)}
    buckets = {entry.op: edges for entry in entries}
    return make_table(Hardware("0123456789abcdef", "H200", torch="2.11"), "p" * 64, kernels, buckets, entries)


def texts(found: Export) -> list[str]:
    return [item.text for item in found.settings]


MIXED = (
    case("paged_attention", "flashinfer.paged_attention.decode", 30.0),
    case("paged_attention", "flashinfer.paged_attention.decode_tc", 50.0, k=4096),
    case("paged_attention", "flashattn3.paged_attention.sm90_prefill", 400.0, q=4096, k=4096),
    case("rms_norm", "triton.rms_norm.rows", 5.0),
    case("add_rms_norm", "torch.add_rms_norm.native", 6.0),
    case("sample_topk", "flashinfer.sample_topk.radix", 20.0),
    case("silu_and_mul", "triton.silu_and_mul.blocks", 7.0),
)


def test_vllm_gets_one_backend_the_version_under_it_and_a_warning_about_the_rest() -> None:
    found = export_priorities(table(*MIXED), "vllm")
    assert texts(found) == [
        "--attention-backend FLASHINFER",
        "--ir-op-priority.fused_add_rms_norm native",
        "VLLM_USE_FLASHINFER_SAMPLER=1",
    ]
    assert found.command == (
        "VLLM_USE_FLASHINFER_SAMPLER=1 vllm serve MODEL --attention-backend FLASHINFER "
        "--ir-op-priority.fused_add_rms_norm native"
    )
    attention = found.settings[0]
    assert [item.median_us for item in attention.backed] == [30.0, 50.0]
    assert [(item.kernel_id, item.median_us) for item in attention.lost] == [
        ("flashattn3.paged_attention.sm90_prefill", 400.0)
    ]
    assert attention.why == "best in 2 of 3 cases, with 80 of 480 µs"
    words = " | ".join(found.warnings)
    assert "one value cannot say what the table says: 1 of 3 cases are faster with another value; by how much" in words
    assert "rms_norm: vLLM has no name for triton.rms_norm.rows" in words
    assert found.ignored == (("silu_and_mul", 1),)
    flash = case("paged_attention", "flashattn3.paged_attention.sm90_decode", 60.0, k=4096)
    found = export_priorities(table(MIXED[2], flash), "vllm")
    assert texts(found) == ["--attention-backend FLASH_ATTN", "--attention-config.flash_attn_version 3"]


def test_what_a_server_really_runs_outweighs_what_only_looks_like_it() -> None:
    """Decoding over a paged cache decides; attention over a contiguous one stands in where nothing else is known."""
    dense = [case("attention", "sdpa.attention.cudnn", 500.0, k=size) for size in (1024, 4096)]
    prefill = case("attention", "flashattn4.attention.sm90", 700.0, q=4096)
    found = export_priorities(table(*dense, prefill, MIXED[0]), "sglang")
    assert texts(found) == ["--prefill-attention-backend fa4", "--decode-attention-backend flashinfer"]
    assert "decode attention: 2 cases of attention gave way to those of paged_attention" in found.warnings
    assert texts(export_priorities(table(*dense), "sglang")) == ["--decode-attention-backend torch_native"]
    # One setting for both phases: each phase speaks with the best cases it has.
    both = export_priorities(table(*dense, prefill, MIXED[0]), "vllm")
    assert {item.op for item in (*both.settings[0].backed, *both.settings[0].lost)} == {"attention", "paged_attention"}
    assert len(both.settings[0].backed) + len(both.settings[0].lost) == 2


def test_a_value_that_was_not_measured_everywhere_does_not_win_on_a_smaller_sum() -> None:
    decode, long = MIXED[0], MIXED[2]
    found = export_priorities(
        table(decode, long), "vllm", lambda entry: {"flashattn3.x.y": 95.0} if entry == decode else {}
    )
    assert found.settings[0].value == "FLASH_ATTN"
    assert "FLASHINFER not measured in 1, FLASH_ATTN 495 µs" in found.settings[0].why


def test_sglang_takes_prefill_and_decode_apart_and_together_where_they_agree() -> None:
    found = export_priorities(table(*MIXED), "sglang")
    assert texts(found)[:2] == ["--prefill-attention-backend fa3", "--decode-attention-backend flashinfer"]
    assert not any("cannot say" in text for text in found.warnings)  # two settings say it all
    agreed = table(MIXED[0], case("paged_attention", "flashinfer.paged_attention.prefill_fa3", 90.0, q=4096))
    found = export_priorities(agreed, "sglang")
    assert texts(found) == ["--attention-backend flashinfer"]
    assert len(found.settings[0].backed) == 2
    decode_only = export_priorities(table(MIXED[0]), "sglang")
    assert texts(decode_only) == ["--decode-attention-backend flashinfer"]  # nothing is known about prefill


def test_python_settings_are_written_as_arguments_of_the_call() -> None:
    entries = (
        case("attention", "flashattn4.attention.sm90", 40.0, q=4096, k=4096),
        case("attention", "sdpa.attention.flash", 4.0),
        case("attention", "flashinfer.attention.single_decode", 3.0, k=4096),
    )
    found = export_priorities(table(*entries), "transformers")
    assert found.command == 'AutoModel.from_pretrained(MODEL, attn_implementation="flash_attention_4")'
    assert [item.kernel_id for item in found.settings[0].nameless] == ["flashinfer.attention.single_decode"]
    assert any("no name for flashinfer.attention.single_decode (1 cases)" in text for text in found.warnings)
    assert "layerzero" in found.stack.instead
    found = export_priorities(table(*entries), "diffusers")
    assert found.command == "DIFFUSERS_ATTN_BACKEND=flash_4_hub python your_script.py"


def test_with_all_times_known_the_cheapest_value_wins_and_the_loss_is_a_number() -> None:
    decode, long = MIXED[0], MIXED[2]
    other = {
        decode: {"flashattn3.paged_attention.sm90_decode": 33.0},
        long: {"flashinfer.paged_attention.prefill_fa3": 900.0, "flashinfer.paged_attention.prefill_fa2": 1000.0},
    }
    found = export_priorities(table(decode, long), "vllm", lambda entry: other[entry])
    assert found.settings[0].value == "FLASH_ATTN"
    assert "FLASHINFER 930 µs, FLASH_ATTN 433 µs" in found.settings[0].why
    assert [item.instead_us for item in found.settings[0].lost] == [33.0]
    assert any("at worst 1.10× slower" in text for text in found.warnings)
    # The other way round: the value with less of its own time is the cheaper one.
    other = {decode: {"flashattn3.paged_attention.sm90_decode": 900.0}, long: {"flashinfer.x.y": 410.0}}
    found = export_priorities(table(decode, long), "vllm", lambda entry: other[entry])
    assert found.settings[0].value == "FLASHINFER" and [i.instead_us for i in found.settings[0].lost] == [410.0]


def test_cases_that_train_are_no_case_for_a_server() -> None:
    trained = case("attention", "flashattn2.attention.sm80", 500.0, q=4096, needs_grad=True)
    served = case("attention", "triton.paged_attention.split", None)
    found = export_priorities(table(trained, served), "vllm")
    assert texts(found) == ["--attention-backend TRITON_ATTN"]
    assert any("1 cases need a gradient" in text for text in found.warnings)
    assert any("1 of 1 cases behind it were never measured" in text for text in found.warnings)
    assert texts(export_priorities(table(trained), "transformers")) == ['attn_implementation="flash_attention_2"']


def test_other_times_come_from_the_database_the_table_was_solved_with(lab: Any, tmp_path: Path) -> None:
    q = torch.randn(1, 2, 8, 16)
    with torch.no_grad():
        ctx = lz.select("attention", q, q, q).context
    rows = {row.kernel_id: row for row in trial(ctx, seconds=0.02, jit="off").rows}
    fast, slow = "sdpa.attention.flash_cpu", "reference.attention.plain"
    db = PerfDB(tmp_path / "a.db")
    db.put([replace(rows[fast], median_us=10.0, variance=0.0), replace(rows[slow], median_us=30.0, variance=0.0)])
    solved = lz.solve([ctx], tmp_path / "t.json", database=db.path, device="cpu")
    (entry,) = solved.entries
    assert times_of(entry, state.world, db) == {fast: 10.0, slow: 30.0}
    # On a platform where the table's kernel was never measured, nothing is compared.
    assert times_of(replace(entry, median_us=11.0), state.world, db) == {}
    result = run(str(tmp_path / "t.json"), "--for", "transformers", "--database", str(db.path))
    assert 'attn_implementation="sdpa"' in result.stdout and "10 µs" in result.stdout


# -- names -------------------------------------------------------------------------------------------------------
def test_every_stack_has_its_names_and_the_verb_offers_them_all() -> None:
    assert tuple(_stacks()) == STACKS
    with pytest.raises(UnknownNameError, match="tgi"):
        stack_of("tgi")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_recorded_names_are_what_the_stack_takes(name: str) -> None:
    stack = stack_of(name)
    taken = TAKEN[f"{name} {stack.version}"]
    for knob in stack.knobs:
        for template in filter(None, (knob.template, knob.together)):
            assert {value for _, value in knob.values} <= taken[template[0]], knob.name


@pytest.mark.needs_package("transformers")
def test_names_for_transformers_are_in_its_registry() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    (knob,) = stack_of("transformers").knobs
    assert {value for _, value in knob.values} <= {*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager"}


@pytest.mark.needs_package("diffusers")
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_names_for_diffusers_are_in_its_registry() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.utils import constants

    (knob,) = stack_of("diffusers").knobs
    assert hasattr(constants, knob.template[0])
    for _, value in knob.values:
        assert AttentionBackendName(value) in _AttentionBackendRegistry._backends


def test_every_pattern_names_a_kernel_that_some_backend_brings() -> None:
    known: dict[str, set[str]] = {}
    for file in PACKAGES.glob("*/src/**/capabilities.json"):
        for op, kernels in json.loads(file.read_text(encoding="utf-8"))["ops"].items():
            known.setdefault(op, set()).update(item["kernel_id"] for item in kernels)
    for name in STACKS:
        for knob in stack_of(name).knobs:
            ids = {kernel_id for op in (*knob.ops, *knob.otherwise) for kernel_id in known[op]}
            for pattern, _ in knob.values:
                assert any(fnmatchcase(kernel_id, pattern) for kernel_id in ids), (name, knob.name, pattern)


# -- the verb ----------------------------------------------------------------------------------------------------
def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["export-priorities", *args])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.mark.usefixtures("clean")
def test_the_verb_prints_the_line_to_copy_the_cases_and_the_doubts(tmp_path: Path) -> None:
    save_table(table(*MIXED), tmp_path / "h200.json")
    text = run(str(tmp_path / "h200.json"), "--for", "vllm").stdout
    assert "vllm serve MODEL --attention-backend FLASHINFER" in text and "vLLM 0.32.0" in text
    assert "400 µs" in text and "against" in text and "cannot say what the table says" in text
    data = json.loads(run(str(tmp_path / "h200.json"), "--for", "sglang", "--json").stdout)
    assert data["for"] == "sglang" and data["settings"][0]["backed"][0]["median_us"] == 400.0


@pytest.mark.usefixtures("clean")
def test_the_verb_refuses_what_it_cannot_read_and_says_when_there_is_nothing_to_say(tmp_path: Path) -> None:
    save_table(table(case("embedding", "torch.embedding.native", 1.0)), tmp_path / "t.json")
    assert "nothing in the table" in run(str(tmp_path / "t.json"), "--for", "vllm", code=1).stdout
    run(str(tmp_path / "t.json"), "--for", "tgi", code=2)
    run(str(tmp_path / "t.json"), code=2)
    run(str(tmp_path / "t.json"), "--for", "vllm", "--database", str(tmp_path / "none.db"), code=2)
    broken = (tmp_path / "t.json").read_text().replace("torch.embedding.native", "triton.embedding.x")
    (tmp_path / "t.json").write_text(broken)
    data = json.loads(run(str(tmp_path / "t.json"), "--for", "vllm", "--json", code=1).stdout)
    assert data["error"]["code"] == "PLAN_FILE_INVALID"
