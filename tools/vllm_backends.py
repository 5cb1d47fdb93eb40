"""vLLM's own test of attention backends, with ours in its lists. Run it with the Python that has vLLM 0.26, on a GPU.

    python -m tools.vllm_backends SOURCES [--backend FLASH_ATTN …] [--json FILE] [-k EXPRESSION]

SOURCES is a checkout of vLLM at the release that is installed, of which tests/v1/attention/test_attention_backends.py
is run. Nothing of it is changed but the lists of backends; ours is CUSTOM, pinned for every step, since a test has no
layers to choose for. The models it names are folders with a config of their heads, so that nothing
is downloaded. What vLLM's conftest.py would do is done here: the current config, and a group of one rank.
--backend leaves out all but the named ones and ours. The report says which tests ran our kernels, and how often.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEST = "tests/v1/attention/test_attention_backends.py"
LISTS = ("BACKENDS_TO_TEST", "SLIDING_WINDOW_BACKENDS_TO_TEST", "NON_CAUSAL_BACKENDS_TO_TEST")
# What the tests read of the models they name: heads, their size, the window. A dense class stands for the one with
# experts, which no test touches.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "meta-llama/Meta-Llama-3-8B": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    ),
    "microsoft/Phi-tiny-MoE-instruct": (
        "MistralConfig",
        "MistralForCausalLM",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
        | {"sliding_window": 2047, "max_position_embeddings": 4096},
    ),
    "google/embeddinggemma-300m": (
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {"hidden_size": 768, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256}
        | {"sliding_window": 512, "use_bidirectional_attention": True, "max_position_embeddings": 2048},
    ),
}


def make_models(folder: Path) -> None:
    """Folders of the names that the tests use."""
    import torch
    import transformers

    for name, (config, architecture, sizes) in MODELS.items():
        made = getattr(transformers, config)(**sizes, dtype=torch.bfloat16)
        made.architectures = [architecture]
        made.save_pretrained(folder / name)


def look_at_classes_here() -> None:
    """vLLM asks a model's class what it is in a process of its own, to keep CUDA out of this one: not needed here."""
    from vllm.model_executor.models import registry

    def looked_at(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = looked_at


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """The groups that a worker of one GPU has."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        where = f"file://{folder}/store"
        parallel_state.init_distributed_environment(1, 0, distributed_init_method=where, local_rank=0, backend="nccl")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.cleanup_dist_env_and_memory()


class Extended:
    """The plugin of the run: lists, fixtures, and what ran."""

    def __init__(self, kept: list[str] | None, said: dict[str, Any] | None = None, path: Path | None = None) -> None:
        self.kept, self.path, self.said = kept, path, said or {}
        self.lists: dict[str, list[str]] = {}
        self.kernels: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []

    def pin(self) -> None:
        """Ours in every step that it may serve, counted by kernel."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        import layerzero as lz
        from layerzero_vllm import attend, cuda, plugin
        from layerzero_vllm.choice import OURS

        plugin.register()
        assert AttentionBackendEnum.CUSTOM.get_class() is cuda.CudaBackend

        class Planning(cuda.CudaBuilder):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.single, self.several = [OURS] * len(self.single), OURS

        cuda.CudaBackend.get_builder_cls = staticmethod(lambda: Planning)
        real = attend.attend

        def counted(query: Any, caches: Any, batch: Any, settings: Any, causal: bool, kernel: str | None) -> Any:
            found = real(query, caches, batch, settings, causal, kernel)
            which = kernel or lz.which("paged_attention", query, *caches, batch, layout="HND", **settings.options)
            self.kernels[which] += 1
            return found

        attend.attend = counted

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Ours in every list; the others as they were, or those that were asked for."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        module = items[0].module  # type: ignore[attr-defined]
        for name in LISTS:
            found = getattr(module, name)
            kept = [one for one in found if self.kept is None or getattr(one, "name", one) in self.kept]
            found[:] = [AttentionBackendEnum.CUSTOM, *kept]
            self.lists[name] = [getattr(one, "name", one) for one in found]
        if self.kept is not None and "FLEX_ATTENTION" not in self.kept:
            # the tests add it by themselves, with larger blocks, where torch is new enough; it compiles for minutes
            module.is_torch_equal_or_newer = lambda version: False

    @pytest.fixture
    def default_vllm_config(self) -> Iterator[Any]:
        """The fixture of this name in vLLM's conftest.py."""
        from vllm.config import VllmConfig, set_current_vllm_config

        config = VllmConfig()
        with set_current_vllm_config(config):
            yield config

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Every test counts for itself."""
        self.kernels.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One row a test."""
        if report.when == "call" or report.outcome != "passed":
            said = {"test": report.nodeid.rpartition("::")[2], "outcome": report.outcome}
            said |= {"ours": dict(self.kernels), "seconds": round(report.duration, 2)}
            self.rows.append(said | ({"why": str(report.longrepr)[-600:]} if report.outcome != "passed" else {}))
            self.write()  # each time: a run that is ended keeps what it has

    def write(self) -> None:
        """The report so far."""
        outcomes = Counter(row["outcome"] for row in self.rows)
        self.said |= {"lists": self.lists, "outcomes": dict(outcomes)}
        self.said |= {"with_our_kernels": sum(bool(row["ours"]) for row in self.rows)}
        self.said["figures"] = {"tests that failed": {"value": outcomes["failed"], "at_most": 0}}
        if self.path:
            self.path.write_text(json.dumps({**self.said, "tests": self.rows}, indent=1) + "\n")


def head(selected: str) -> dict[str, Any]:
    """What was run, where."""
    import torch
    from vllm.version import __version__

    import layerzero as lz

    versions = {"vllm": __version__, "layerzero": lz.__version__, "torch": torch.__version__}
    said = {"commit": os.environ.get("LAYERZERO_COMMIT", ""), "versions": versions, "selected": selected}
    said |= {"command": " ".join(["python -m tools.vllm_backends", *sys.argv[1:]])}
    return {**said, "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"}


def main() -> int:
    """Run, say, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="a checkout of vLLM")
    parser.add_argument("--backend", nargs="+", help="of vLLM's backends only these")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("-k", default="", help="only tests of this name, as pytest takes it")
    given = parser.parse_args()
    sources, json_file = given.sources.resolve(), given.json and given.json.resolve()
    if not (sources / TEST).is_file():
        parser.error(f"{given.sources} has no {TEST}; give a checkout of vLLM 0.26")
    os.environ.setdefault("LAYERZERO_VLLM", "on")
    sys.path.insert(0, str(sources))
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("LAYERZERO_VLLM_REPORTS", folder)
        make_models(Path(folder))
        os.chdir(folder)  # the names of models are paths from here
        look_at_classes_here()
        run = Extended(given.backend, head(given.k), json_file)
        with one_rank():
            run.pin()
            words = [
                str(sources / TEST),
                "--noconftest",
                "-c",
                os.devnull,
                "--rootdir",
                str(sources),
                "-q",
                "--tb=short",
            ]
            words += ["-p", "no:cacheprovider", "-k", given.k]
            code = int(pytest.main(words, plugins=[run]))
        os.chdir(sources)
    ours = run.said.get("with_our_kernels", 0)
    print(f"{run.said.get('outcomes')} in {time.time() - began:.0f} s; {ours} tests ran our kernels", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
