"""`lz.patch` on models of transformers: what it does, what it leaves alone and why, and who is not disturbed by it."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import re
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import layerzero as lz
from layerzero.errors import BackendNotAvailableError, InvalidInputError
from layerzero_models.transformers import parts, patching, quick
from layerzero_verify.thresholds import LOGITS

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.integration,
    pytest.mark.needs_package("transformers"),
]


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return (got - want).abs().max().item() < LOGITS / 10


# -- what it does ------------------------------------------------------------------------------------
def test_after_a_run_the_report_tells_which_kernels_run_its_ops() -> None:
    model = lz.patch(zoo.made("llama"))
    report = lz.patched(model)
    assert report is not None and report.kernels() == ()
    with torch.no_grad():
        model(**zoo.inputs(model))
    found = report.kernels()
    other = torch.randn(2, 3, 5, 48)  # a call of somebody else, with heads this model does not have
    lz.attention(other, other, other)
    lz.silu_and_mul(torch.randn(4, 2 * 333))
    assert report.kernels() == found
    assert {item.op for item in found} >= {"attention", "silu_and_mul"}
    ran = lz.explain(model, zoo.inputs(model)).kernels
    assert {item.kernel for item in found} <= {*ran}
    attention = next(item for item in found if item.op == "attention")
    assert attention.sizes["seq_len_q"] >= 12 and attention.why and attention.kernel in str(attention)


def test_the_report_counts_what_was_patched_and_says_why_the_rest_was_not() -> None:
    report = lz.patched(lz.patch(zoo.made("llama")))
    assert report is not None
    assert Counter(item.op for item in report.patched) == {
        "attention": 3,
        "rms_norm": 7,
        "rope": 3,
        "silu_and_mul": 3,
        "q_proj + k_proj + v_proj in one product": 3,
        "add_rms_norm": 3,
    }
    assert report.left == () and "LlamaRMSNorm: rms_norm" in str(report)
    bart = lz.patched(lz.patch(zoo.made("bart")))
    assert bart is not None
    assert {item.why for item in bart.left} == {
        "one product for q_proj, k_proj, v_proj: keys may come from key_value_states"
    }
    assert bart.to_json()["left"][0]["kind"] == "BartAttention"


def test_explain_names_the_kernel_of_every_patched_part() -> None:
    model = lz.patch(zoo.made("llama"))
    ids = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        model(ids)
    report = lz.explain(model, {"input_ids": ids})
    calls = {(call.report.op, call.part): call for call in report.calls}
    patched = lz.patched(model)
    assert patched is not None
    counted = Counter(item.op for item in patched.patched)
    for op in ("attention", "rope", "silu_and_mul"):
        (call,) = (call for (name, _), call in calls.items() if name == op)
        assert call.count == counted[op] and call.part.startswith("model.layers.*.") and call.ran in str(report)
        assert call.ran == call.report.chosen


def test_a_forward_pass_runs_on_our_kernels_and_sums_and_norms_are_one(lab: Any) -> None:
    model = lz.patch(zoo.made("llama"))
    lab.clear()
    zoo.logits(model, zoo.inputs(model))
    ran = Counter(kernel.split(".")[1] for kernel in lab.ran())
    # One norm at the start; every other one comes with the sum before it, the last layer's with the final norm.
    assert ran == {"attention": 3, "rms_norm": 1, "add_rms_norm": 6, "rope": 3, "silu_and_mul": 3}


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_without_layerzero_accel_the_keys_in_python_find_the_same_kernels(
    lab: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from layerzero.runtime.state import state

    model = lz.patch(zoo.made(name))
    want = zoo.logits(model, zoo.inputs(model))
    lab.clear()
    zoo.logits(model, zoo.inputs(model))
    ran = lab.ran()
    for word in ("_c_norm", "_c_add", "_c_layer", "_c_rope"):
        monkeypatch.setattr(quick, word, None)
    monkeypatch.setattr(quick, "_C", {})
    assert torch.equal(zoo.logits(model, zoo.inputs(model)), want)
    lab.clear()
    misses = state.counters.misses
    assert torch.equal(zoo.logits(model, zoo.inputs(model)), want)
    assert lab.ran() == ran and state.counters.misses == misses  # all of it hot
    keys = {key[0] for key in lz_hot()}
    assert keys >= (
        {"hft.layer_norm"} if name == "gpt2" else {"hft.rms_norm", "hft.add_rms_norm", "hft.rope", "hft.gated"}
    )
    # Another length, dtype or grad mode is another key.
    zoo.logits(model, {"input_ids": zoo.tokens(1, 5)})
    model(zoo.tokens()).logits.sum().backward()
    model.double()
    assert zoo.logits(model, zoo.inputs(model)).dtype == torch.float64
    assert state.counters.misses > misses


def lz_hot() -> Any:
    from layerzero.runtime.current import now

    return now.world.hot


def test_the_policy_in_force_decides_at_every_call(lab: Any) -> None:
    model = lz.patch(zoo.made("llama"))
    want = zoo.logits(model, zoo.inputs(model))
    with lz.scoped(locks={"add_rms_norm": "reference.add_rms_norm.plain", "rope": "reference.rope.plain"}):
        lab.clear()
        assert close(zoo.logits(model, zoo.inputs(model)), want)
        assert {"reference.add_rms_norm.plain", "reference.rope.plain"} <= set(lab.ran())
    lab.clear()
    zoo.logits(model, zoo.inputs(model))
    assert "reference.rope.plain" not in lab.ran()


def test_a_kernel_that_raises_in_a_patched_model_fails_over(lab: Any) -> None:
    model = lz.patch(zoo.made("llama"))
    want = zoo.logits(model, zoo.inputs(model))
    lab.clear()
    zoo.logits(model, zoo.inputs(model))
    lab.faults.update({kernel: RuntimeError("planted") for kernel in lab.ran() if ".rope." in kernel})
    assert lab.faults and close(zoo.logits(model, zoo.inputs(model)), want)


# Linear layers and embeddings are left alone under the built-in kernels: test_transformers_linear.py has them.
@pytest.mark.parametrize("kind", [kind for kind in patching.KINDS if kind not in ("linear", "embedding")])
def test_each_kind_of_part_can_be_left_out(kind: str) -> None:
    model = zoo.made("mixtral" if kind == "experts" else "llama")
    want = zoo.logits(model, zoo.inputs(model))
    full = lz.patched(lz.patch(copy.deepcopy(model)))
    report = lz.patched(lz.patch(model, skip=(kind,)))
    assert full is not None and report is not None and len(report.patched) < len(full.patched)
    assert close(zoo.logits(model, zoo.inputs(model)), want)


def test_the_callers_default_device_does_not_matter() -> None:
    model = zoo.made("llama")
    want = lz.patched(lz.patch(copy.deepcopy(model)))
    with torch.device("meta"):
        found = lz.patched(lz.patch(model))
    assert found is not None and want is not None and found.to_json() == want.to_json()


def test_patching_twice_and_unpatching_what_is_not_patched_change_nothing() -> None:
    model = zoo.made("llama")
    before = zoo.traces(model)
    lz.unpatch(model)
    assert zoo.traces(model) == before
    lz.patch(model)
    once = zoo.traces(model)
    lz.patch(model)
    assert zoo.traces(model) == once
    lz.unpatch(model)
    assert zoo.traces(model) == before


def test_weights_take_no_more_memory_and_keep_their_values() -> None:
    model = zoo.made("llama")
    values = {name: item.clone() for name, item in model.state_dict().items()}

    def memory() -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return sum(storages.values())

    before = memory()
    lz.patch(model)
    assert memory() == before
    assert all(torch.equal(item, values[name]) for name, item in model.state_dict().items())


# -- whom it does not disturb ------------------------------------------------------------------------
def test_another_model_of_the_same_class_stays_as_it_is(lab: Any) -> None:
    model, other = zoo.made("llama"), zoo.made("llama")
    want = zoo.logits(other, zoo.inputs(other))
    before = zoo.traces(other)
    lz.patch(model)
    lab.clear()
    assert torch.equal(zoo.logits(other, zoo.inputs(other)), want)
    assert lab.ran() == [] and zoo.traces(other) == before


def test_hooks_still_see_what_they_saw() -> None:
    model = zoo.made("llama")
    watched = ("layers.1.self_attn.q_proj", "layers.1.mlp.up_proj", "layers.1.input_layernorm",
               "layers.1.post_attention_layernorm", "layers.1", "norm")  # fmt: skip

    def seen() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        handles = [
            model.model.get_submodule(name).register_forward_hook(
                lambda _, __, out, name=name: found.update({name: out.clone()})
            )
            for name in watched
        ]
        zoo.logits(model, zoo.inputs(model))
        for handle in handles:
            handle.remove()
        return found

    want = seen()
    lz.patch(model)
    got = seen()
    assert got.keys() == want.keys() == set(watched)
    assert all(close(got[name], want[name]) for name in watched)


@pytest.mark.parametrize("inference", [False, True])
def test_a_write_into_the_residual_stream_between_layers_is_not_lost(inference: bool) -> None:
    """Steering by a hook that writes into a layer's result: the norm taken beforehand would be stale."""
    model = zoo.made("llama")
    direction = torch.linspace(-3, 3, 64)

    def steered(handle_of: Any) -> torch.Tensor:
        handle = handle_of()
        with torch.inference_mode() if inference else torch.no_grad():
            out: torch.Tensor = model(**zoo.inputs(model)).logits
        handle.remove()
        return out

    def before_the_next(_: Any, args: Any) -> None:
        args[0].add_(direction)

    def after(_: Any, __: Any, out: torch.Tensor) -> None:
        out.add_(direction)

    ways = [
        lambda: model.model.layers[0].register_forward_hook(after),
        lambda: model.model.layers[1].register_forward_pre_hook(before_the_next),
    ]
    plain = zoo.logits(model, zoo.inputs(model))
    want = [steered(way) for way in ways]
    lz.patch(model)
    for way, expected in zip(ways, want, strict=True):
        assert not close(expected, plain) and close(steered(way), expected)


def test_weights_that_are_moved_replaced_or_loaded_afterwards_count() -> None:
    model, fresh = zoo.made("llama"), zoo.made("llama")
    given = zoo.inputs(model)
    lz.patch(model)
    for change in (
        lambda m: m.model.layers[0].mlp.gate_proj.weight.data.mul_(0.5),
        lambda m: setattr(m.model.layers[1].self_attn.k_proj, "weight", nn.Parameter(torch.ones(32, 64) / 64)),
        lambda m: setattr(m.model.layers[1].mlp.up_proj.weight, "data", torch.full((112, 64), 0.01)),
        lambda m: m.load_state_dict({key: item * 1.1 for key, item in m.state_dict().items()}),
        lambda m: m.to(torch.float64),
    ):
        change(model)
        change(fresh)
        assert close(zoo.logits(model, given), zoo.logits(fresh, given))
    lz.unpatch(model)
    assert torch.equal(zoo.logits(model, given), zoo.logits(fresh, given))


def test_a_copy_of_a_patched_model_is_patched_by_itself() -> None:
    model = lz.patch(zoo.made("llama"))
    given = zoo.inputs(model)
    want = zoo.logits(model, given)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert close(zoo.logits(other, given), want) and not close(zoo.logits(model, given), want)
    lz.unpatch(other)
    assert lz.patched(model) is not None and close(zoo.logits(other, given), want)


def test_threads_that_share_a_patched_model_do_not_mix_their_inputs() -> None:
    model = lz.patch(zoo.made("llama"))
    prompts = [zoo.tokens(1, 6 + i, seed=i) for i in range(6)]
    want = [zoo.logits(model, {"input_ids": ids}) for ids in prompts]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            if not close(zoo.logits(model, {"input_ids": prompts[i]}), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nothing_is_kept_alive_after_a_forward_pass() -> None:
    model = lz.patch(zoo.made("llama"))
    zoo.logits(model, zoo.inputs(model))
    for module in model.modules():
        state = getattr(module, parts.STATE, None)
        assert not isinstance(state, parts.Rms) or state.ready is None
        assert not isinstance(state, parts.Projected) or state.all.stash is None


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_patched_model_is_one_graph_for_torch_compile(name: str) -> None:
    model = zoo.made(name, num_hidden_layers=1)
    given = {"input_ids": zoo.tokens(1, 6)}
    want = zoo.logits(model, given)
    lz.patch(model)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        got = compiled(**given, use_cache=False).logits
    assert close(got, want)


# -- parts that are not what they look like ----------------------------------------------------------
class Adapter(nn.Module):
    """A projection with something beside it, as LoRA has."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.low = base, nn.Linear(base.in_features, base.out_features, bias=False)
        self.in_features = base.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 0.1 * self.low(x)  # type: ignore[no-any-return]


def test_adapters_are_left_alone_and_still_count() -> None:
    model = zoo.made("llama")
    layer = model.model.layers[0]
    torch.manual_seed(3)
    layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    layer.mlp.gate_proj = Adapter(layer.mlp.gate_proj)
    want = zoo.logits(model, zoo.inputs(model))
    report = lz.patched(lz.patch(model))
    assert report is not None and close(zoo.logits(model, zoo.inputs(model)), want)
    assert {item.name: item.why for item in report.left} == {
        "model.layers.0.mlp": "Adapter is not a plain nn.Linear",
        "model.layers.0.self_attn": "one product for q_proj, k_proj, v_proj: Adapter is not a plain nn.Linear",
    }


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    model = zoo.made("llama")

    class OddRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 2  # type: ignore[no-any-return]

    model.model.norm.__class__ = OddRMSNorm
    want = zoo.logits(model, zoo.inputs(model))
    report = lz.patched(lz.patch(model))
    assert report is not None and close(zoo.logits(model, zoo.inputs(model)), want)
    assert [(item.name, item.why) for item in report.left] == [
        ("model.norm", "it computes something else than RMSNorm")
    ]


def test_a_forward_somebody_else_put_on_an_instance_is_left_alone() -> None:
    model = zoo.made("llama")
    norm = model.model.layers[1].input_layernorm
    norm.forward = lambda x: x * 0.5
    want = zoo.logits(model, zoo.inputs(model))
    report = lz.patched(lz.patch(model))
    assert report is not None and close(zoo.logits(model, zoo.inputs(model)), want)
    assert [item.why for item in report.left] == ["it has a forward of its own on the instance"]
    lz.unpatch(model)
    assert "forward" in vars(norm)


def test_a_patch_that_fails_in_the_middle_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.made("llama")
    before = zoo.traces(model)

    def broken(*args: Any) -> None:
        raise KeyError("in the middle")

    monkeypatch.setitem(patching._OWN_STEPS, "residual", broken)
    with pytest.raises(KeyError):
        lz.patch(model)
    assert zoo.traces(model) == before and lz.patched(model) is None


# -- refusals ----------------------------------------------------------------------------------------
def test_what_cannot_be_patched_is_refused_in_our_words() -> None:
    with pytest.raises(InvalidInputError, match="attention, experts, norm") as error:
        lz.patch(zoo.made("llama"), skip=("norms",))
    assert error.value.code == "VALUE_INVALID"
    with pytest.raises(InvalidInputError, match="is not a model lz"):
        lz.patch(nn.Linear(2, 2))
    with pytest.raises(InvalidInputError):
        lz.patch(zoo.made("llama").config)


@pytest.mark.req("R-HFT-01")
def test_an_old_or_missing_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    assert lz.enable_transformers() == transformers.__version__
    model = zoo.made("llama")
    before = zoo.traces(model)
    for version in ("4.57.1", "4.99"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        with pytest.raises(BackendNotAvailableError, match=re.escape(version)) as error:
            lz.patch(model)
        assert error.value.code == "BACKEND_VERSION_MISMATCH"
    monkeypatch.setattr("importlib.metadata.version", lambda _: "5.0.0")
    assert lz.enable_transformers() == "5.0.0", "the oldest that is taken"

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", absent)
    with pytest.raises(BackendNotAvailableError, match="transformers") as error:
        lz.patch(model)
    assert error.value.code == "BACKEND_NOT_INSTALLED" and zoo.traces(model) == before


# -- on load -----------------------------------------------------------------------------------------
@pytest.mark.req("R-HFT-04")
def test_models_can_be_patched_as_they_are_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedModel

    zoo.made("llama").save_pretrained(tmp_path)
    own = vars(PreTrainedModel)["from_pretrained"]
    lz.enable_transformers(auto_patch=True)
    try:
        lz.enable_transformers(auto_patch=True)
        lz.enable_transformers()  # leaves it as it is
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    finally:
        lz.enable_transformers(auto_patch=False)
    assert lz.patched(model) is not None and not info["missing_keys"]
    assert vars(PreTrainedModel)["from_pretrained"] is own
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert lz.patched(plain) is None
    assert close(zoo.logits(model, zoo.inputs(model)), zoo.logits(plain, zoo.inputs(plain)))


@pytest.mark.req("R-HFT-04")
def test_a_patched_model_is_saved_and_loaded_as_any_other(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = lz.patch(zoo.made("llama"))
    want = zoo.logits(model, zoo.inputs(model))
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa" and lz.patched(plain) is None
    assert close(zoo.logits(plain, zoo.inputs(plain)), want)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="layerzero")
    assert close(zoo.logits(ours, zoo.inputs(ours)), want)
