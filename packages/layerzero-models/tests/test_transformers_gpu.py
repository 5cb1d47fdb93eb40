"""Patched models of transformers on a GPU: right in float32 and bf16, in a captured graph, under torch.compile."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import layerzero as lz

pytestmark = [pytest.mark.gpu, pytest.mark.integration, pytest.mark.needs_package("transformers")]


def _zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_zoo", Path(__file__).with_name("transformers_zoo.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo = _zoo()


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Kernels are compiled when a test first needs them, so that the fast ones are what is tested."""
    lz.reset()
    lz.configure(jit="block")
    yield
    lz.reset()


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return zoo.made(name, **changes).to("cuda", dtype)


def moved(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: item.cuda() for name, item in given.items()}


@pytest.mark.req("R-HFT-01", "R-HFT-05")
@pytest.mark.parametrize("name", zoo.ALL)
def test_float32_logits_and_greedy_tokens_are_those_of_the_unpatched_model(name: str) -> None:
    model = on_gpu(name)
    given = moved(zoo.inputs(model, None if name == "vit" else "left"))
    want = zoo.logits(model, given)
    greedy = None if name == "vit" else zoo.generated(model, given)
    lz.patch(model)
    assert (zoo.logits(model, given) - want).abs().max().item() < 1e-3
    if greedy is not None:
        assert torch.equal(zoo.generated(model, given), greedy)


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen3", "mixtral"])
def test_bf16_is_as_near_to_the_truth_as_the_unpatched_model(name: str) -> None:
    truth = zoo.made(name)
    given = zoo.inputs(truth, "left")
    exact = zoo.logits(truth, given)
    model = on_gpu(name, torch.bfloat16)
    own = (zoo.logits(model, moved(given)).float().cpu() - exact).abs()
    lz.patch(model)
    error = (zoo.logits(model, moved(given)).float().cpu() - exact).abs()
    assert error.mean().item() <= 1.5 * own.mean().item() + 1e-3
    assert error.max().item() <= 3.0 * own.max().item() + 1e-2


@pytest.mark.parametrize("batch", [1, 3])
def test_a_captured_decode_step_over_a_static_cache_generates_what_eager_does(batch: int) -> None:
    from transformers import StaticCache

    model = on_gpu("llama")
    ids = zoo.tokens(batch, 12).cuda()
    want = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    lz.patch(model)
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=64)
        out = model(ids, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        first = token.clone()
        place = torch.full((batch, 1), 12, device="cuda")

        def step() -> None:
            made = model(token, past_key_values=cache, position_ids=place, use_cache=True)
            token.copy_(made.logits[:, -1:].argmax(-1))
            place.add_(1)

        def rewind() -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(12)
            token.copy_(first)
            place.fill_(12)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        rewind()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(2):  # twice from the start: the graph holds nothing of a run
            rewind()
            got = [first.clone()]
            for _ in range(19):
                graph.replay()
                got.append(token.clone())
            assert torch.equal(torch.cat(got, 1), want[:, 12:])


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice; these logits are compared in full
def test_a_compiled_step_over_a_static_cache_gives_the_logits_of_the_eager_one() -> None:
    from transformers import StaticCache

    model = lz.patch(on_gpu("llama"))
    ids = zoo.tokens(2, 12).cuda()

    def last(forward: Any) -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=64)
        model(ids, past_key_values=cache, use_cache=True)
        place = torch.full((2, 1), 12, device="cuda")
        found: torch.Tensor = forward(ids[:, -1:], past_key_values=cache, position_ids=place, use_cache=True).logits
        return found

    with torch.no_grad():
        want = last(model)
        got = last(torch.compile(model, fullgraph=True, dynamic=False))
    assert (got - want).abs().max().item() < 1e-3


def test_a_model_moved_after_patching_stays_right() -> None:
    model = zoo.made("llama")
    given = zoo.inputs(model)
    want = zoo.logits(model, given)
    lz.patch(model)
    model.to("cuda")
    assert (zoo.logits(model, moved(given)).cpu() - want).abs().max().item() < 1e-3
    other = copy.deepcopy(model)
    assert (zoo.logits(other, moved(given)).cpu() - want).abs().max().item() < 1e-3


@pytest.mark.timeout(300)
def test_continuous_batching_runs_with_everything_but_attention_patched() -> None:
    """It accepts only the attention implementations it knows by name."""
    from transformers import GenerationConfig

    model = on_gpu("llama")
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [zoo.tokens(1, length, seed=length)[0].tolist() for length in (6, 9, 13)]

    def batch() -> list[list[int]]:
        found = model.generate_batch(inputs=prompts, generation_config=settings)
        return sorted(item.generated_tokens for item in found.values())

    want = batch()
    lz.patch(model, skip=("attention",))
    assert batch() == want and all(want)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "gpt2"])
@pytest.mark.parametrize("side", [None, "left"])
def test_captured_steps_give_the_tokens_of_the_unpatched_model(name: str, side: str | None) -> None:
    model = on_gpu(name)
    given = moved(zoo.inputs(model, side))
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"max_new_tokens": 24, "min_new_tokens": 24},
        "an end of text": {"max_new_tokens": 24, "min_new_tokens": 0, "eos_token_id": list(range(40))},
        "a static cache": {"cache_implementation": "static", "disable_compile": True},
        "beams": {"num_beams": 3},
    }
    want = {way: zoo.generated(model, given, **options) for way, options in ways.items()}
    lz.patch(model, graphs=True)
    steps = 0
    for way, options in ways.items():
        assert torch.equal(zoo.generated(model, given, **options), want[way]), way
        found = lz.patched(model)
        assert found is not None and found.graphs is not None and not found.graphs.plain, (way, found)
        taken, steps = found.graphs.steps - steps, found.graphs.steps
        # One for each token after the first; the end of a text is noticed one step late.
        needed = want[way].shape[1] - given["input_ids"].shape[1] - 1
        assert taken - needed in ((0, 1) if way == "an end of text" else (0,)), (way, taken, needed)
    assert found.graphs.captured and 0 < found.graphs.memory < found.graphs.limit, found.graphs


def test_a_text_that_ends_is_streamed_and_returned_to_its_last_token_and_draws_no_more() -> None:
    model = on_gpu("llama")
    given = {"input_ids": zoo.tokens(1).cuda()}
    plain = zoo.generated(model, given, max_new_tokens=20, min_new_tokens=20)
    options = {"eos_token_id": int(plain[0, 20]), "min_new_tokens": 0, "max_new_tokens": 20}

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    def everything() -> Any:
        streamer = Streamer()
        torch.manual_seed(3)
        greedy = zoo.generated(model, given, streamer=streamer, return_dict_in_generate=True, **options)
        drawn = [zoo.generated(model, given, do_sample=True, **options).tolist() for _ in range(3)]
        return greedy.sequences.tolist(), greedy.past_key_values.get_seq_length(), streamer.seen, drawn

    want = everything()
    lz.patch(model, graphs=True)
    assert everything() == want and len(want[0][0]) < 32


def test_two_threads_generate_with_one_graphed_model() -> None:
    model = on_gpu("llama")
    prompts = [{"input_ids": zoo.tokens(2, 12, seed).cuda()} for seed in (1, 2)]
    want = [zoo.generated(model, given) for given in prompts]
    lz.patch(model, graphs=True)
    zoo.generated(model, prompts[0])
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda given: [zoo.generated(model, given) for _ in range(5)], prompts))
    assert all(torch.equal(text, want[i]) for i in (0, 1) for text in got[i])


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's advice; tokens are compared
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # Inductor captures an empty one first, to have a pool
def test_captured_steps_stay_right_beside_graphs_of_torch_compile() -> None:
    """torch.compile frees the workspaces of cuBLAS before it captures: ours must not lie in them."""
    stock = on_gpu("llama")
    model = lz.patch(copy.deepcopy(stock), graphs=True)
    given = {"input_ids": zoo.tokens(2).cuda()}
    want = zoo.generated(stock, given)
    for _ in range(3):
        assert torch.equal(zoo.generated(model, given), want)
        zoo.generated(stock, given, cache_implementation="static")
        torch.cuda.empty_cache()
    found = lz.patched(model)
    assert found is not None and found.graphs is not None and found.graphs.steps == 27


def test_generate_batch_in_graphs_gives_the_tokens_of_sdpa() -> None:
    """64 prompts of mixed lengths in float32: packed prompts and paged steps, both in transformers' CUDA graphs."""
    import transformers

    spec = importlib.util.spec_from_file_location("batching", Path(__file__).with_name("test_transformers_batching.py"))
    assert spec is not None and spec.loader is not None
    shared: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    model, given = on_gpu("llama"), shared.prompts(64, 40)
    want = shared.batched(model, given, 8, num_blocks=72)
    lz.patch(model)
    assert shared.batched(model, given, 8, num_blocks=72) == want, transformers.__version__
    assert shared.batched(model, given, 8, num_blocks=72, use_cuda_graph=False) == want
