"""A patched model under torch.compile: no more kernels, and no more asked before a run, than of the unpatched one."""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz

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
FILLED, PLACES = 12, 64


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Any) -> dict[str, Any]:
    """One decode step over a static cache, as `generate` makes it: with the mask made before the forward."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=PLACES)
    ids = zoo.tokens(1, FILLED)
    model(ids, past_key_values=cache, use_cache=True)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        torch.cat((ids, ids[:, :1]), 1), next_sequence_length=1, past_key_values=cache, use_cache=True,
        attention_mask=torch.ones(1, FILLED + 1, dtype=torch.long), position_ids=torch.full((1, 1), FILLED),
    )  # fmt: skip
    return inputs


class Stop(Exception):
    """In place of compiling what was generated."""


def generated(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """How many loops Inductor generates for a decode step, and what it calls beside them."""
    from torch._inductor import config, metrics
    from torch._inductor.graph import GraphLowering

    found: list[Any] = []

    def stop(graph: Any) -> None:
        metrics.reset()
        code, _ = graph.codegen()
        found.append((metrics.generated_kernel_count, code.value))
        raise Stop

    monkeypatch.setattr(GraphLowering, "compile_to_module", stop)
    with torch.no_grad(), config.patch(fx_graph_cache=False), pytest.raises(Exception, match="Stop"):
        torch.compile(model, fullgraph=True, dynamic=False)(**step(model))
    ((loops, code),) = found
    calls = [line.strip() for line in code.splitlines() if "extern_kernels." in line or "torch.ops." in line]
    return loops, [line for line in calls if not line.startswith("#") and "=torch.ops" not in line]


@pytest.mark.slow  # Inductor lowers four graphs
@pytest.mark.req("R-PT-02")
@pytest.mark.filterwarnings("ignore:Reliance on distutils")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_compiled_step_has_no_more_kernels_than_that_of_the_unpatched_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = zoo.made(name, num_hidden_layers=2)
    loops, calls = generated(stock, monkeypatch)
    torch._dynamo.reset()
    own_loops, own_calls = generated(lz.patch(stock), monkeypatch)
    assert loops > 0 and calls
    assert own_loops <= loops and len(own_calls) <= len(calls)
    assert not [line for line in own_calls if "layerzero" in line]


def asked(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The guards of a decode step that Dynamo asks in Python before every run, and parts that it cannot skip."""
    from torch._dynamo.guards import CheckFunctionManager

    found: list[str] = []
    real = CheckFunctionManager.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        told = str(self.guard_manager).splitlines()
        found.extend(line for line in told if "LAMBDA_GUARD" in line or "tag_safe=(False" in line)

    monkeypatch.setattr(CheckFunctionManager, "__init__", watched)
    with torch.no_grad(), torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        torch.compile(model, fullgraph=True, dynamic=False, backend="eager")(**step(model))
    return found


def test_no_layer_of_a_patched_model_adds_guards_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a walk from the model down to a part, before every token."""
    counts = []
    for patched in (False, True):
        for layers in (2, 3):  # what all layers share is asked once, for the first of them
            model = zoo.made("qwen3", num_hidden_layers=layers)
            torch._dynamo.reset()
            counts.append(len(asked(lz.patch(model) if patched else model, monkeypatch)))
            monkeypatch.undo()
    assert counts[3] - counts[2] <= counts[1] - counts[0]


def test_a_compiled_training_step_reads_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is given one computes what it hides too: twice the work of a causal one.

    transformers 5.17 always makes one while it compiles, newer ones do where torch is old.
    """
    monkeypatch.setattr("transformers.masking_utils._ignore_causal_mask_sdpa", lambda *args, **words: False)
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    attended: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        attended.extend(node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        return make_boxed_func(graph.forward)

    stock = zoo.made("llama", num_hidden_layers=2).train()
    ids = zoo.tokens(2, FILLED)
    want = stock(input_ids=ids, labels=ids).loss
    grads = torch.autograd.grad(want, list(stock.parameters()))
    model = lz.patch(stock)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    loss = torch.compile(lambda given: model(input_ids=given, labels=given).loss, fullgraph=True, backend=backend)(ids)
    torch.testing.assert_close(loss, want)
    for found, wanted in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    forward = [node for node in attended if "backward" not in str(node.target)]
    assert len(forward) == 2, [str(node.target) for node in attended]
    for node in forward:
        words = [item.name for item in node.target._schema.arguments]
        given = {**dict(zip(words, node.args, strict=False)), **node.kwargs}
        assert given["is_causal"] is True, given
        assert given.get("attn_mask") is None and given.get("attn_bias") is None, given


def derived(model: Any, ids: torch.Tensor) -> tuple[list[str], list[str]]:
    """The ops of the forward and of the backward of a compiled training step, as a compiler gets them."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    torch.compile(lambda given: model(input_ids=given, labels=given).loss, fullgraph=True, backend=backend)(
        ids
    ).backward()
    forward, backward = graphs
    return forward, backward


def test_a_compiled_training_step_turns_heads_as_the_model_does_by_tables_computed_once() -> None:
    """Halves turned apart are put together in tensors of their own, which are copied around attention; and Inductor
    takes cosines and sines anew in every loop that reads them, in each layer, forward and backward."""
    layers = 2
    model = zoo.made("llama", num_hidden_layers=layers).train()
    ids = zoo.tokens(2, FILLED)
    _, stock = derived(model, ids)
    model.zero_grad()
    forward, backward = derived(lz.patch(model), ids)
    assert forward.count("layerzero_models.computed.default") == 2
    assert not {"aten.cos.default", "aten.sin.default"} & set(backward) and "aten.sin.default" in stock
    for op in ("aten.cat.default", "aten.clone.default", "aten.slice_backward.default"):
        assert backward.count(op) <= stock.count(op), (op, backward.count(op), stock.count(op))
    assert backward.count("aten.slice_backward.default") == 4 * layers + stock.count("aten.slice_backward.default") % 4


# -- the compiled step of `generate` -------------------------------------------------------------------
WEIGHT = "_modules['layers']._modules['0']._modules['input_layernorm']"


def generate(model: Any, new: int = 6, **options: Any) -> torch.Tensor:
    """Tokens of `generate` with a static cache and compiled steps; on a CPU transformers compiles only when told."""
    from transformers import CompileConfig

    how = CompileConfig(**{"backend": "eager", "mode": "default", "fullgraph": True, **options})
    how._compile_all_devices = True
    out: torch.Tensor = model.generate(
        zoo.tokens(1, FILLED), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        cache_implementation="static", compile_config=how,
    )  # fmt: skip
    return out


def uncompiled(model: Any, new: int = 6) -> torch.Tensor:
    out: torch.Tensor = model.generate(zoo.tokens(1, FILLED), max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return out


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Dynamo guards, of each function that it traces from here on."""
    from torch._dynamo.guards import CheckFunctionManager

    found: list[list[str]] = []
    real = CheckFunctionManager.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        found.append(str(self.guard_manager).splitlines())

    monkeypatch.setattr(CheckFunctionManager, "__init__", watched)
    return found


def test_before_a_token_the_model_itself_is_not_checked(traced: list[list[str]]) -> None:
    want = uncompiled(lz.patch(zoo.made("qwen3", num_hidden_layers=2)))
    counts = {}
    for patched in (False, True):
        for layers in (2, 3):
            torch._dynamo.reset()
            traced.clear()
            model = zoo.made("qwen3", num_hidden_layers=layers)
            got = generate(lz.patch(model) if patched else model)
            (guards,) = traced
            counts[patched, layers] = len(guards)
            if layers == 2:
                assert torch.equal(got, want)
    assert not [line for line in guards if WEIGHT in line]
    assert [line for line in guards if "past_key_values" in line]  # what it is given is
    # What is left of a layer is its place in the cache.
    assert counts[True, 3] - counts[True, 2] < (counts[False, 3] - counts[False, 2]) / 4


def other_eps(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def other_weight(model: Any) -> None:
    old = model.model.layers[1].mlp.down_proj.weight
    model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(old.detach().flip(0))


def other_precision(model: Any) -> None:
    model.to(torch.bfloat16)


def a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda part, given, out: out * 1.5)


def other_part(model: Any) -> None:
    first, second = model.model.layers
    first.mlp, second.mlp = second.mlp, first.mlp


def other_setting(model: Any) -> None:
    model.set_attn_implementation("eager")


# One after the other; the last one is the one that would blur what the others do.
CHANGES = (other_eps, other_weight, other_part, other_setting, a_hook, other_precision)


def test_a_model_that_was_changed_gets_another_step(traced: list[list[str]]) -> None:
    model = lz.patch(zoo.made("llama", num_hidden_layers=2))
    for steps, change in enumerate((None, *CHANGES), 1):
        if change is not None:
            change(model)
        want = uncompiled(model)
        assert torch.equal(generate(model), want), change
        assert torch.equal(generate(model), want), change
        assert len(traced) == steps, change  # the second call took the first one's step


def test_what_generate_notes_on_the_model_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    model = lz.patch(zoo.made("llama", num_hidden_layers=2))
    ask = model.get_compiled_call
    monkeypatch.setattr(model, "get_compiled_call", lambda config: (steps.append(ask(config)), steps[-1])[1])
    model._previous_max_cache_length = 1000  # transformers 5.17 keeps it there
    for new in (3, 9, 4):
        assert torch.equal(generate(model, new), uncompiled(model, new))
        model._previous_max_cache_length += new
    assert len(steps) == 3 and len(set(steps)) == 1


def test_weights_written_in_place_need_no_other_step(traced: list[list[str]]) -> None:
    model = lz.patch(zoo.made("llama", num_hidden_layers=2))
    before = generate(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(0))
    assert torch.equal(generate(model), uncompiled(model)) and not torch.equal(generate(model), before)
    assert len(traced) == 1


def test_a_model_that_changes_back_gets_its_step_of_before(traced: list[list[str]]) -> None:
    model = lz.patch(zoo.made("llama", num_hidden_layers=2))
    generate(model)
    for _ in range(3):
        handle = model.model.layers[0].register_forward_hook(lambda part, given, out: out * 1.5)
        assert torch.equal(generate(model), uncompiled(model))
        handle.remove()
        assert torch.equal(generate(model), uncompiled(model))
    assert len(traced) == 4  # each hook is another function


def test_one_that_changes_all_the_time_is_guarded_by_torch(traced: list[list[str]]) -> None:
    model = lz.patch(zoo.made("llama", num_hidden_layers=2))
    with torch._dynamo.config.patch(recompile_limit=2):
        for part in range(3):
            model.marker = 1000.5 + part
            assert torch.equal(generate(model), uncompiled(model))
    *ours, last = traced
    assert len(ours) == 2 and not [line for guards in ours for line in guards if WEIGHT in line]
    assert [line for line in last if WEIGHT in line]


def test_models_of_one_class_and_copies_have_steps_of_their_own() -> None:
    first = lz.patch(zoo.made("llama", num_hidden_layers=2))
    second = lz.patch(zoo.made("llama", num_hidden_layers=2))
    with torch.no_grad():
        for weight in second.parameters():
            weight.copy_(weight.flip(0))
    assert torch.equal(generate(first), uncompiled(first))
    assert torch.equal(generate(second), uncompiled(second))
    copied = copy.deepcopy(first)
    with torch.no_grad():
        copied.lm_head.weight.copy_(copied.lm_head.weight.flip(0))
    assert torch.equal(generate(copied), uncompiled(copied))
    assert not torch.equal(generate(copied), generate(first))


def test_a_step_keeps_no_weight_alive_and_goes_with_the_patch() -> None:
    model = lz.patch(zoo.made("llama", num_hidden_layers=2), joined=False)
    generate(model)
    gone = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros_like(gone()))
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    lz.unpatch(model)
    assert not [name for name in vars(model) if "layerzero" in name or name == "get_compiled_call"]
    assert torch.equal(generate(model), uncompiled(model))


def test_what_the_caller_says_of_compiling_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda given, **words: (said.append(words), real(given, **words))[1])
    model = lz.patch(zoo.made("llama", num_hidden_layers=2))
    from transformers import CompileConfig

    model.get_compiled_call(CompileConfig(mode="max-autotune-no-cudagraphs", options=None, dynamic=False))
    theirs, ours = said
    want = torch._inductor.list_mode_options("max-autotune-no-cudagraphs", False)
    assert theirs["mode"] == "max-autotune-no-cudagraphs" and want.items() <= ours["options"].items()
    assert {**theirs, "mode": None, "options": None} == {"mode": None, **ours, "options": None}
    said.clear()
    model.get_compiled_call(CompileConfig(backend="eager", mode="reduce-overhead"))
    assert len(said) == 1  # words for a compiler we do not know: as transformers does
