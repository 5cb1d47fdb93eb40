"""Inputs that are made up are valid: offsets add up, pages exist, tables are cosines; a seed means the same numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.env import read
from layerzero.errors import BackendNotAvailableError, ConfigurationError, InvalidInputError
from layerzero_verify.definitions import Options, check, open_dataset
from layerzero_verify.definitions.inputs import make_inputs, split
from layerzero_verify.definitions.schema import parse_definition
from layerzero_verify.definitions.sizes import RUNNER, SIZES, axes_for, violated, workload_of, workloads_for
from layerzero_verify.definitions.trace import InputSource, Workload

LONG = read().prove


def lengths(indptr: torch.Tensor) -> torch.Tensor:
    assert indptr[0] == 0
    return indptr.diff()


def valid(definition: Any, axes: dict[str, int], made: dict[str, Any]) -> None:
    """What every kernel may rely on."""
    assert violated(definition.constraints, {**definition.const_axes, **axes, **made}) == ([], [])
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            assert isinstance(made[name], (bool, int, float)), name
            continue
        assert tuple(made[name].shape) == definition.shape(spec, axes), name
        assert str(made[name].dtype) == f"torch.{spec.dtype}", name
        if spec.floating:
            assert made[name].float().isfinite().all(), name
    if "kv_indptr" in made:
        keys = lengths(made["kv_indptr"])
        assert (keys >= 0).all()
        if "kv_indices" in made:
            page = definition.const_axes["page_size"]
            assert ((made["kv_indices"] >= 0) & (made["kv_indices"] < axes["num_pages"])).all()
            assert len(set(made["kv_indices"].tolist())) == len(made["kv_indices"]), "no page belongs to two sequences"
            last = made.get("kv_last_page_len", torch.full_like(keys, page))
            assert ((last >= 1) & (last <= page)).all()
            keys = (keys - 1) * page + last
        if "qo_indptr" in made:
            queries = lengths(made["qo_indptr"])
            assert ((queries >= 0) & (queries <= keys)).all(), "a query without its key cannot be causal"


@pytest.mark.req("R-DEF-06")
def test_the_sizes_are_the_agreed_ones(sets: Any) -> None:
    assert (SIZES["small"].batch, SIZES["small"].seq, SIZES["small"].pages) == ((1, 2), (1, 16), (1, 4))
    assert (SIZES["medium"].batch, SIZES["medium"].seq, SIZES["medium"].pages) == (
        (4, 8, 16), (64, 128, 256), (16, 32, 64),
    )  # fmt: skip
    assert min(SIZES["large"].seq) > max(SIZES["medium"].seq)
    norm = parse_definition(sets.samples()["rmsnorm_h32"])
    assert [work.axes for work in workloads_for(norm)] == [{"batch_size": size} for size in (1, 2, 4, 8, 16)]
    decode = parse_definition(sets.samples()["gqa_paged_decode_h4_kv2_d16_ps1"])
    tried = {(work.axes["batch_size"], work.axes["num_kv_indices"]) for work in workloads_for(decode, ["small"])}
    assert tried == {(1, 1), (1, 4), (2, 2), (2, 8)}, "every batch with every number of pages"
    assert len(workloads_for(decode)) == 4 + 9
    gemm = parse_definition(sets.samples()["gemm_n24_k64"])
    assert [work.axes["M"] for work in workloads_for(gemm)] == [1, 16, 64, 128, 256]
    with pytest.raises(InvalidInputError, match="huge"):
        workloads_for(gemm, ["huge"])


@pytest.mark.req("R-DEF-06")
def test_a_check_that_names_no_sizes_tries_the_small_and_the_medium_ones(sets: Any) -> None:
    dataset = open_dataset(sets.only("gemm_n24_k64"))
    report = check(dataset, dataset.select(everything=True), Options(backends=("reference",), repeats=1))
    assert {outcome.workload.axes["M"] for outcome in report.outcomes} == {1, 16, 64, 128, 256}


@pytest.mark.req("R-DEF-14")
@pytest.mark.parametrize(
    ("gpu", "named", "expected"), [(True, None, "cuda"), (True, "cpu", "cpu"), (False, None, "cpu")]
)
def test_a_check_makes_its_inputs_on_the_gpu_unless_there_is_none_or_another_device_is_named(
    sets: Any, monkeypatch: pytest.MonkeyPatch, gpu: bool, named: str | None, expected: str
) -> None:
    """Where the inputs lie the kernels run; no GPU is needed to see which device is asked for."""
    seen: set[str] = set()

    def noted(definition: Any, workload: Workload, device: torch.device, **options: Any) -> Any:
        seen.add(str(device))
        return make_inputs(definition, workload, "cpu", **options)

    monkeypatch.setattr(sys.modules["layerzero_verify.definitions.check"], "make_inputs", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    dataset = open_dataset(sets.only("gemm_n24_k64"))
    options = Options(backends=("reference",), device=named, repeats=1)
    report = check(dataset, dataset.select(everything=True), options, sizes=["small"])
    assert seen == {expected} and report.device == expected


@pytest.mark.req("R-DEF-17")
def test_the_runner_tries_the_four_agreed_pairs(sets: Any) -> None:
    assert RUNNER == ((1, 16), (4, 32), (8, 64), (16, 128))
    for name in ("gqa_paged_prefill_causal_h4_kv2_d16_ps4", "gqa_ragged_prefill_causal_h4_kv2_d16"):
        definition = parse_definition(sets.samples()[name])
        works = workloads_for(definition, ["runner"])
        assert [(w.axes["len_indptr"] - 1, w.axes["total_q"]) for w in works] == [(b, b * s) for b, s in RUNNER]
        for work in works:
            valid(definition, dict(work.axes), make_inputs(definition, work, "cpu"))


@pytest.mark.parametrize("size", ["small", pytest.param("medium"), pytest.param("large", marks=pytest.mark.slow)])
@pytest.mark.req("R-DEF-06")
def test_every_sample_gets_valid_inputs_at_every_size(sets: Any, size: str) -> None:
    for item in sets.samples().values():
        definition = parse_definition(item)
        for work in workloads_for(definition, [size])[:: 1 if size == "small" else 4]:
            valid(definition, dict(work.axes), make_inputs(definition, work, "cpu"))


@settings(max_examples=3000 if LONG else 60, deadline=None)
@given(
    batch=st.integers(1, 9), pages=st.integers(1, 9), page=st.integers(1, 5), seq=st.integers(1, 40),
    last=st.booleans(), seed=st.integers(0, 2**30),
)  # fmt: skip
def test_any_paged_prefill_adds_up(batch: int, pages: int, page: int, seq: int, last: bool, seed: int) -> None:
    def t(dtype: str, *shape: str) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": dtype}

    var = {"type": "var"}
    definition = parse_definition({
        "name": "gqa_paged_prefill", "op_type": "gqa_paged", "reference": "def run(): pass",
        "axes": {
            "page_size": {"type": "const", "value": page}, "h": {"type": "const", "value": 1},
            **dict.fromkeys(("total_q", "num_pages", "num_kv_indices", "len_indptr", "batch_size"), var),
        },
        "constraints": ["total_q == qo_indptr[-1].item()", "num_kv_indices == kv_indptr[-1].item()"],
        "inputs": {
            "q": t("float32", "total_q", "h", "h"), "k_cache": t("float32", "num_pages", "page_size", "h", "h"),
            "qo_indptr": t("int32", "len_indptr"), "kv_indptr": t("int32", "len_indptr"),
            "kv_indices": t("int32", "num_kv_indices"),
            **({"kv_last_page_len": t("int32", "batch_size")} if last else {}),
        },
        "outputs": {"o": t("float32", "total_q")},
    })  # fmt: skip
    axes = axes_for(definition, batch, seq, pages)
    made = make_inputs(definition, workload_of(definition, axes, seed=seed), "cpu")
    valid(definition, axes, made)
    assert axes["total_q"] == batch * min(seq, pages * page)


@settings(max_examples=3000 if LONG else 80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=8), st.integers(0, 80), st.integers(0, 99))
def test_parts_keep_their_bounds_and_their_sum(bounds: list[tuple[int, int]], total: int, seed: int) -> None:
    lows, highs = [low for low, _ in bounds], [low + more for low, more in bounds]
    generator = torch.Generator().manual_seed(seed)
    if not sum(lows) <= total <= sum(highs):
        with pytest.raises(InvalidInputError):
            split(total, lows, highs, generator)
        return
    parts = split(total, lows, highs, generator)
    assert sum(parts) == total
    assert all(low <= part <= high for low, part, high in zip(lows, parts, highs, strict=True))


def test_the_same_workload_means_the_same_numbers_and_another_seed_others(sets: Any) -> None:
    for item in sets.samples().values():
        definition = parse_definition(item)
        work = workloads_for(definition, ["small"])[-1]
        first, second = (make_inputs(definition, work, "cpu") for _ in range(2))
        other = make_inputs(definition, workload_of(definition, work.axes, seed=1), "cpu")
        for name, value in first.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second[name])), name
        main = next(name for name in first if definition.inputs[name].floating and name not in ("sm_scale",))
        assert not torch.equal(first[main].float(), other[main].float())


def test_another_input_does_not_shift_the_numbers_of_the_rest(sets: Any) -> None:
    item = sets.samples()["gemm_n24_k64"]
    plain = make_inputs(parse_definition(item), Workload("u", {"M": 3}), "cpu")
    item["inputs"] = {"first": {"shape": ["M"], "dtype": "float32"}, **item["inputs"]}
    more = make_inputs(parse_definition(item), Workload("u", {"M": 3}), "cpu")
    assert torch.equal(plain["A"], more["A"]) and torch.equal(plain["B"], more["B"])


def test_what_each_kind_of_input_has_to_be(sets: Any) -> None:
    def made(name: str) -> dict[str, Any]:
        definition = parse_definition(sets.samples()[name])
        return make_inputs(definition, workloads_for(definition, ["small"])[-1], "cpu")

    sampling = made("top_k_top_p_sampling_from_probs_v48")
    assert sampling["probs"].sum(-1) == pytest.approx(1.0) and (sampling["probs"] > 0).all()
    assert ((sampling["top_k"] >= 1) & (sampling["top_k"] <= 48)).all()
    assert ((sampling["top_p"] > 0) & (sampling["top_p"] < 1)).all()
    experts = made("moe_fp16_topk2_e6_h16_i24")
    assert all(len(set(row)) == 2 and 0 <= min(row) and max(row) < 6 for row in experts["topk_ids"].tolist())
    assert experts["topk_weights"].sum(-1) == pytest.approx(1.0)
    quantized = made("moe_fp8_block_scale_ds_routing_topk2_ng2_kg1_e4_h32_i16")
    assert all((value > 0).all() for name, value in quantized.items() if name.endswith("_scale"))
    assert 0 <= quantized["local_expert_offset"] <= 4
    rope = made("rope_with_cos_sin_cache_neox_style_d16_rd8")
    cos, sin = rope["cos_sin_cache"].chunk(2, -1)
    assert (cos**2 + sin**2) == pytest.approx(1.0, abs=1e-5)
    assert ((rope["positions"] >= 0) & (rope["positions"] < len(cos))).all()
    assert made("gqa_paged_decode_h4_kv2_d16_ps1")["sm_scale"] == pytest.approx(0.25)
    assert made("mla_paged_decode_h4_ckv32_kpe8_ps1")["sm_scale"] == pytest.approx((128 + 8) ** -0.5)


def test_an_integer_nobody_knows_is_not_made_up(sets: Any) -> None:
    item = sets.samples()["gemm_n24_k64"]
    item["inputs"]["table"] = {"shape": ["M"], "dtype": "int32"}
    with pytest.raises(InvalidInputError, match="table") as refused:
        make_inputs(parse_definition(item), Workload("u", {"M": 2}), "cpu")
    assert "safetensors" in refused.value.hint


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Workload("u", {}), "axis M"),
        (Workload("u", {"M": 2, "K": 3}), "constant axis K"),
        (Workload("u", {"M": 2}, {"Z": InputSource()}), "Z"),
        (Workload("u", {"M": 2}, {"A": InputSource("scalar", 1.0)}), "number for the tensor A"),
    ],
)
def test_a_workload_that_contradicts_its_definition_is_refused(sets: Any, workload: Workload, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        make_inputs(parse_definition(sets.samples()["gemm_n24_k64"]), workload, "cpu")


def test_axes_that_break_a_constraint_are_refused(sets: Any) -> None:
    definition = parse_definition(sets.samples()["gqa_paged_prefill_causal_h4_kv2_d16_ps4"])
    good = axes_for(definition, 2, 4, 2)
    with pytest.raises(InvalidInputError, match="len_indptr == batch_size"):
        make_inputs(definition, Workload("u", {**good, "batch_size": 2, "len_indptr": 4}), "cpu")
    with pytest.raises(InvalidInputError, match="contradict"):
        make_inputs(definition, Workload("u", {**good, "total_q": 10_000}), "cpu")


# -- data from files -----------------------------------------------------------------------------
def stored(root: Path, tensors: dict[str, torch.Tensor]) -> str:
    save = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    (root / "blob").mkdir(parents=True, exist_ok=True)
    save(tensors, str(root / "blob" / "data.safetensors"))
    return "blob/data.safetensors"


@pytest.mark.req("R-DEF-15")
def test_tensors_come_from_the_files_a_workload_names(sets: Any) -> None:
    definition = parse_definition(sets.samples()["gqa_paged_prefill_causal_h4_kv2_d16_ps4"])
    axes = axes_for(definition, 3, 4, 2)
    given = torch.tensor([0, 1, 5, 6], dtype=torch.int32)
    path = stored(sets.root, {"offsets": given})
    sources = {"kv_indptr": InputSource("safetensors", None, path, "offsets"), "sm_scale": InputSource("scalar", 0.5)}
    made = make_inputs(definition, Workload("u", axes, sources), "cpu", root=sets.root)
    assert torch.equal(made["kv_indptr"], given) and made["sm_scale"] == 0.5
    valid(definition, axes, made)


@pytest.mark.parametrize("path", ["../secret.safetensors", "/etc/passwd", "blob/../../x.safetensors"])
def test_a_path_out_of_the_dataset_is_refused(sets: Any, path: str) -> None:
    definition = parse_definition(sets.samples()["gemm_n24_k64"])
    work = Workload("u", {"M": 2}, {"A": InputSource("safetensors", None, path, "A")})
    with pytest.raises(ConfigurationError, match="outside"):
        make_inputs(definition, work, "cpu", root=sets.root)
    with pytest.raises(ConfigurationError, match="dataset"):
        make_inputs(definition, work, "cpu")


def test_a_missing_file_a_missing_key_and_a_wrong_shape_are_named(sets: Any) -> None:
    definition = parse_definition(sets.samples()["gemm_n24_k64"])
    path = stored(sets.root, {"A": torch.zeros(3, 64, dtype=torch.float16)})

    def make(where: str, key: str) -> dict[str, Any]:
        work = Workload("u", {"M": 2}, {"A": InputSource("safetensors", None, where, key)})
        return make_inputs(definition, work, "cpu", root=sets.root)

    with pytest.raises(ConfigurationError, match=r"none\.safetensors"):
        make("blob/none.safetensors", "A")
    with pytest.raises(ConfigurationError, match="other"):
        make(path, "other")
    with pytest.raises(InvalidInputError, match="does not fit"):
        make(path, "A")


def test_without_the_library_for_the_files_the_reason_names_it(sets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = parse_definition(sets.samples()["gemm_n24_k64"])
    (sets.root / "a.safetensors").write_bytes(json.dumps({}).encode())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    work = Workload("u", {"M": 2}, {"A": InputSource("safetensors", None, "a.safetensors", "A")})
    with pytest.raises(BackendNotAvailableError, match="safetensors"):
        make_inputs(definition, work, "cpu", root=sets.root)
