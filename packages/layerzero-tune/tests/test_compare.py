"""`lz.compare` and `lz compare`: before and after in one run, with what ran and how far the results are apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero_cli.root import cli
from tests import own_time

PROGRAM = """
import torch
import torch.nn.functional as F
import layerzero as lz

def plain():
    return (lambda x, w: F.rms_norm(x, (64,), w, 1e-6)), (torch.randn(8, 64), torch.ones(64))

def with_lz():
    return lambda x, w: lz.rms_norm(x, w)

def nothing():
    return 3
"""


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def test_two_functions_are_timed_in_turns_and_their_results_held_side_by_side() -> None:
    inputs = (torch.randn(8, 64), torch.randn(64))
    found = lz.compare(plain, inputs, lz.rms_norm, seconds=0.2)
    assert found.before.samples >= 12 and found.after.samples >= 12
    assert found.speedup == found.before.median_us / found.after.median_us
    assert found.difference is not None and found.difference < 1e-5
    (call,) = found.report.calls
    assert call.report.op == "rms_norm" and call.ran in str(found)
    apart = lz.compare(plain, inputs, lambda x, weight: plain(x, weight) + 1, seconds=0.1)
    assert apart.difference == pytest.approx(1.0) and apart.report.calls == ()
    assert lz.compare(plain, inputs, lambda x, weight: x.sum(), seconds=0.1).difference is None


@pytest.mark.req("R-TUNE-03")
def test_how_much_faster_the_second_is_stands_first_in_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    own_time.use_own_time(monkeypatch)
    inputs = (torch.randn(8, 64), torch.randn(64))
    slow, quick = own_time.taking(3e-3, plain), own_time.taking(1e-3, plain)
    for before, after, least, most in ((slow, quick, 2.5, 3.0), (quick, slow, 1 / 3, 1 / 2.5)):
        found = lz.compare(before, inputs, after, seconds=0.1)
        assert least <= found.speedup <= most
        assert found.speedup == found.before.median_us / found.after.median_us == found.to_json()["speedup"]
        assert str(found).startswith(f"{found.speedup:.2f}× on cpu, results differ by at most 0.0e+00")


def test_a_function_alone_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="needs to know what comes after"):
        lz.compare(plain, (torch.randn(2, 8), torch.ones(8)))


@pytest.mark.integration
@pytest.mark.needs_package("transformers")
def test_a_model_is_held_against_its_patched_copy_which_shares_its_weights() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    before = {name: item.data_ptr() for name, item in model.named_parameters()}
    found = lz.compare(model, {"input_ids": torch.randint(0, 100, (1, 16)), "use_cache": False}, seconds=0.3)
    assert found.difference is not None and found.difference < 1e-4
    assert {call.report.op for call in found.report.calls} >= {"attention"} and sum(found.report.kernels.values()) > 4
    assert lz.patched(model) is None, "the model itself stays as it was"
    assert {name: item.data_ptr() for name, item in model.named_parameters()} == before


def test_the_verb_prints_one_table_json_and_a_page(tmp_path: Path) -> None:
    program, page = tmp_path / "bench.py", tmp_path / "page.html"
    program.write_text(PROGRAM, encoding="utf-8")
    words = [f"{program}:plain", f"{program}:with_lz", "--seconds", "0.1"]
    shown = CliRunner().invoke(cli, ["compare", *words, "--html", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "before" in shown.output and "after" in shown.output and "rms_norm" in shown.output
    text = page.read_text(encoding="utf-8")
    assert "What ran after" in text and "default-src 'none'" in text
    data = json.loads(CliRunner().invoke(cli, ["compare", *words, "--json"]).stdout)
    assert data["speedup"] > 0 and data["difference"] < 1e-5 and sum(data["kernels"].values()) == 1
    for wrong, said in ((f"{program}:nothing", "returns int"), (f"{program}:none", "none"), ("x", "not FILE.py:NAME")):
        answer = CliRunner().invoke(cli, ["compare", wrong])
        assert answer.exit_code == 2 and said in answer.output
