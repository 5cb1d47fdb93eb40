"""The public face is pinned: a name that comes or goes is a decision, written down here and in the changelog."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerzero as lz
from layerzero import errors
from layerzero.plugin import spec

ROOT = Path(__file__).resolve().parents[2]

FRONT = {
    "attention", "paged_attention", "varlen_attention", "rms_norm", "add_rms_norm", "layer_norm", "rope",
    "silu_and_mul", "linear", "sample", "quantize",
    "explain", "which", "list_kernels", "doctor",
    "configure", "scoped", "lock", "plan", "tune", "patch",
    "distributed", "graphs", "ops", "__version__",
}  # fmt: skip

SURFACE = {
    # ops
    "add_rms_norm", "alibi_slopes", "attention", "dequantize", "embedding", "gelu_and_mul", "layer_norm", "linear",
    "paged_attention", "paged_batch", "quantize", "relu_and_mul", "rms_norm", "rope", "sample", "sample_topk",
    "sample_topp", "silu_and_mul",
    "grouped_attention", "grouped_batch", "mla_paged_attention",
    "cast", "cross_entropy", "gemma_add_rms_norm", "gemma_rms_norm", "rope_tables", "xpos",
    "varlen_attention", "block_mask", "chunk_mask", "relative_bias",
    "sample_speculative", "sample_tree", "sampling_probs", "tree_mask", "tree_positions",
    "kv_cache", "pack_weight",
    "detokenize", "tokenize",
    "column_linear", "grouped_gemm", "mlp", "moe", "row_linear", "shard_weight", "topk_gate",
    # control
    "configure", "disabled", "get_config", "get_locks", "load_config", "lock", "prefer", "reload_config", "reset",
    "scoped", "unlock", "use_table",
    # inspection
    "Context", "DeviceSpec", "doctor", "dry_run", "explain", "list_kernels", "list_ops", "readiness_check", "select",
    "validate", "verify", "which",
    "capture_graph", "is_graph_safe", "validate_graph_capture",
    # being seen
    "metrics", "observe", "structured_logs",
    # many ranks
    "agree",
    # planning
    "plan", "plan_block", "warmup", "__version__",
    # inside other libraries
    "enable_transformers", "patch", "patched", "unpatch",
    # measuring and fixing choices
    "compile", "record", "solve", "tune",
}  # fmt: skip

SIGNATURES = {
    "attention": "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *, layout='BHSD', "
    "window=None, enable_gqa=False, softcap=None, alibi_slopes=None, sinks=None, return_lse=False, backend=None)",
    "paged_attention": "(query, key_cache, value_cache, batch, context_lens=None, *, scale=None, layout='NHD', "
    "window=None, softcap=None, alibi_slopes=None, sinks=None, is_causal=True, k_scale=None, v_scale=None, "
    "return_lse=False, backend=None)",
    "paged_batch": "(block_tables, context_lens, *, query_lens=None, host_lens=None, capture=False, cross=False)",
    "varlen_attention": "(query, key, value, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, "
    "is_causal=False, scale=None, window=None, softcap=None, alibi_slopes=None, sinks=None, return_lse=False, "
    "backend=None)",
    "block_mask": "(blocks, block_size)",
    "chunk_mask": "(size)",
    "relative_bias": "(table, q_len, k_len, *, buckets='t5', bidirectional=True, max_distance=128, q_offset=None)",
    "grouped_attention": "(query, key, value, batch, cu_seqlens_k=None, kv_lens=None, *, causal=True, scale=None, "
    "return_lse=False, backend=None)",
    "grouped_batch": "(cu_seqlens_q, cu_seqlens_k, kv_lens, *, host_lens=None)",
    "mla_paged_attention": "(q_nope, q_pe, ckv_cache, kpe_cache, batch, *, scale, return_lse=False, backend=None)",
    "rms_norm": "(x, weight=None, eps=1e-06, *, backend=None)",
    "add_rms_norm": "(x, residual, weight=None, eps=1e-06, *, backend=None)",
    "layer_norm": "(x, weight=None, bias=None, eps=1e-05, *, backend=None)",
    "rope": "(q, k, cos, sin, *, interleaved=False, layout='BHSD', position_ids=None, inplace=False, backend=None)",
    "rope_tables": "(rotary_dim, length, *, base=None, scaling=None, max_position_embeddings=None, seq_len=None, "
    "dtype=None, device=None)",
    "xpos": "(q, k, cos, sin, *, interleaved=False, layout='BHSD', position_ids=None, scale_base=512.0, gamma=0.4, "
    "origin=0.0, backend=None)",
    "gemma_rms_norm": "(x, weight, eps=1e-06, *, backend=None)",
    "gemma_add_rms_norm": "(x, residual, weight, eps=1e-06, *, backend=None)",
    "cross_entropy": "(logits, labels, *, ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, "
    "reduction='mean', return_lse=False, backend=None)",
    "cast": "(x, dtype, *, saturate=False, backend=None)",
    "sample_topk": "(logits, k, *, temperature=1.0, generator=None, backend=None)",
    "sample_topp": "(logits, p, *, temperature=1.0, generator=None, backend=None)",
    "sampling_probs": "(logits, *, top_k=None, top_p=None, min_p=None, temperature=1.0, backend=None)",
    "sample_speculative": "(draft_ids, draft_probs, target_probs, *, greedy=False, generator=None, backend=None)",
    "sample_tree": "(draft_ids, draft_probs, target_probs, parents, *, greedy=False, generator=None, backend=None)",
    "tokenize": "(text, tokenizer, *, add_special_tokens=True, return_offsets=False, parse_special=True, "
    "max_length=None, truncation_side='right', padding=None, padding_side='right', pad_id=None, backend=None)",
    "detokenize": "(ids, tokenizer, *, skip_special_tokens=False, backend=None)",
    "tree_mask": "(parents, prefix_len=0, *, capacity=None, device=None)",
    "tree_positions": "(parents, prefix_len=0, *, device=None)",
    "quantize": "(x, fmt, *, granularity='tensor', block_size=None, symmetric=True, backend=None)",
    "linear": "(x, weight, bias=None, activation=None, *, backend=None)",
    "pack_weight": "(weight, *, rows=1, dtype=None, act=None, layout=None, on_change='refuse', backend=None)",
    "mlp": "(x, up_weight, down_weight, gate_weight=None, activation='silu', *, up_bias=None, gate_bias=None, "
    "down_bias=None, backend=None)",
    "topk_gate": "(router_logits, k, *, scoring='softmax', renormalize=True, bias=None, num_groups=1, top_groups=1, "
    "scale=1.0, backend=None)",
    "grouped_gemm": "(x, weights, group_sizes, *, backend=None)",
    "moe": "(x, gate_up, down, topk_weights, topk_ids, *, activation='silu', expert_offset=0, gate_up_bias=None, "
    "down_bias=None, alpha=1.702, limit=None, interleaved=False, backend=None)",
    "column_linear": "(x, weight, bias=None, activation=None, *, group=None, gather_output=False, out_features=None, "
    "backend=None)",
    "row_linear": "(x, weight, bias=None, *, group=None, split_input=False, reduce_dtype=None, backend=None)",
    "shard_weight": "(weight, dim, rank, world, *, parts=1)",
    "agree": "(group=None, *, training=False, timeout=30.0, tp_invariant=None, store=None)",
    "observe": "(*, counters=True, metrics=None, interval=2.0, trace=False, spans=False, registry=None)",
    "structured_logs": "(target=None, *, level='INFO', json=True, redact=False)",
    "readiness_check": "(config=None, *, production=False)",
    "lock": "(op, kernel_id)",
    "unlock": "(op=None)",
    "use_table": "(path)",
    "plan": "(op, *args, check=False, **kwargs)",
    "plan_block": "(block, tensors, *, measure=None, check=False)",
    "warmup": "(source, *, config=None, kernels=(), timeout=None, workers=None, background=True, retry=False, "
    "progress=None)",
    "record": "(path=None)",
    "tune": "(source, *, database=None, budget=None, seconds=None, seed=0, device=None, check=False, fresh=False, "
    "compile=True, compile_seconds=None, thorough=False, graphs=False, progress=None)",
    "solve": "(source, path=None, *, database=None, device=None, model_id='', key=None)",
    "compile": "(model, *example_inputs, budget=None, model_id='', path=None, device=None, **example_options)",
    "explain": "(op, *args, compiled=False, **kwargs)",
    "which": "(op, *args, compiled=False, **kwargs)",
    "verify": "(*, lane='quick', op=None, kernel=None, backend=None, level=None, config=None, dtype=None, device=None, "
    "model=None, seed=0, progress=None)",
}


def test_the_public_names_are_these():
    assert set(lz.__all__) == FRONT
    assert FRONT - {"distributed", "graphs", "ops"} <= SURFACE
    assert {name for name, module in homes().items() if module.startswith(("layerzero.", "layerzero_"))} == SURFACE
    for name in FRONT | SURFACE:
        assert name in dir(lz)
        assert getattr(lz, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_these(name):
    signature = inspect.signature(getattr(lz, name))
    bare = signature.replace(
        parameters=[p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == SIGNATURES[name]


def test_every_public_thing_says_what_it_is():
    silent = [name for name in SURFACE if name != "__version__" and not inspect.getdoc(getattr(lz, name))]
    assert silent == []


def test_no_module_bears_the_name_of_a_public_function():
    """Importing such a module would replace the function."""
    modules = {module.name for module in pkgutil.iter_modules(lz.__path__)}
    assert modules & SURFACE == set()


def test_every_hook_is_documented_and_in_the_authors_manual():
    hooks = [name for name in vars(spec) if name.startswith("layerzero_")]
    assert set(hooks) == {
        "layerzero_capabilities", "layerzero_decided", "layerzero_health", "layerzero_register", "layerzero_warmup",
    }  # fmt: skip
    for name in hooks:
        text = inspect.getdoc(getattr(spec, name)) or ""
        assert "ires" in text, f"{name} does not say when it fires"
    manual = (ROOT / "docs" / "plugins.md").read_text()
    assert [name for name in hooks if f"`{name}`" not in manual] == []


@pytest.mark.req("R-CORE-04")
def test_every_exception_carries_a_code_and_every_code_a_message():
    from layerzero.reasons import ReasonCode, reason

    for name in errors.__all__:
        kind = getattr(errors, name)
        if issubclass(kind, errors.LayerZeroError):
            assert kind().code in ReasonCode
    for code in ReasonCode:
        assert reason(code, "V", "L").message


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = errors.__doc__ or ""
    missing = [name for name in errors.__all__ if issubclass(getattr(errors, name), Exception) and name not in drawn]
    assert [name for name in missing if name != "LayerZeroWarning"] == []


def test_lazy_names_resolve_in_a_fresh_interpreter():
    module = importlib.import_module("layerzero")
    for name, place in module._LAZY.items():
        assert hasattr(importlib.import_module(place), name)


# -- what a type checker sees --------------------------------------------------------------------------------------
SOURCES = ROOT / "packages" / "layerzero-core" / "src"


def definitions(name: str, module: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Every definition of a public name in its module: the overloads and the function, or the class."""
    package, *path = module.split(".")
    file = next(ROOT.glob(f"packages/*/src/{package}")).joinpath(*path)
    tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any((item.asname or item.name) == name for item in node.names):
            yield from definitions(name, str(node.module))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and ast.unparse(node.targets[0]) == name:
            yield from definitions(node.value.id, module)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            yield node


def homes() -> dict[str, str]:
    """Where each public name is defined, as `layerzero/__init__.py` tells a type checker."""
    found: dict[str, str] = {}
    body = ast.parse((SOURCES / "layerzero" / "__init__.py").read_text(encoding="utf-8")).body
    for node in body + [inner for item in body if isinstance(item, ast.If) for inner in item.body]:
        if isinstance(node, ast.ImportFrom):
            found |= {item.name: str(node.module) for item in node.names if item.asname in (None, item.name)}
    return found


@pytest.mark.fault(32)
@pytest.mark.parametrize("name", sorted(SURFACE - {"__version__"}))
def test_a_public_function_has_one_result_type(name: str) -> None:
    found = list(definitions(name, homes()[name]))
    assert found, f"{name} is not imported under TYPE_CHECKING"
    if isinstance(found[0], ast.ClassDef):
        return
    overloads = [node for node in found if any(ast.unparse(item) == "overload" for item in node.decorator_list)]
    results = [ast.unparse(node.returns) if node.returns else "nothing" for node in overloads or found]
    assert not {"nothing", "Any", "Callable[..., Any]"} & set(results)
    # A result that depends on an argument is told by it: the first of the overloads is the usual call.
    assert not re.fullmatch(r"Tensor \| tuple\[.*|tuple\[Tensor, Tensor \| None\]", results[0]), results


CALLS = {
    "lz.rms_norm(t)": "Tensor",
    "lz.attention(t, t, t)": "Tensor",
    "lz.attention(t, t, t, return_lse=True)": "tuple[Tensor, Tensor]",
    "lz.attention(t, t, t, return_lse=flag)": "Tensor | tuple[Tensor, Tensor]",
    "lz.paged_attention(t, t, t, t, t)": "Tensor",
    "lz.varlen_attention(t, t, t, t, t)": "Tensor",
    "lz.varlen_attention(t, t, t, t, t, return_lse=True)": "tuple[Tensor, Tensor]",
    "lz.grouped_attention(t, t, t, t, t, t)": "Tensor",
    "lz.mla_paged_attention(t, t, t, t, lz.paged_batch(t, t), scale=1.0)": "Tensor",
    "lz.cross_entropy(t, t)": "Tensor",
    "lz.rope(t, t, t, t)": "tuple[Tensor, Tensor]",
    "lz.rope(t, None, t, t)": "tuple[Tensor, None]",
    "lz.xpos(t, t, t, t)": "tuple[Tensor, Tensor]",
    "lz.tokenize('a', 'b')": "list[int]",
    "lz.tokenize(['a'], 'b')": "list[list[int]]",
    "lz.tokenize(['a'], 'b', padding='longest')": "TokenBatch",
    "lz.tokenize('a', 'b', return_offsets=True).ids": "list[int]",
    "lz.detokenize([1], 'b')": "str",
    "lz.detokenize([[1]], 'b')": "list[str]",
    "lz.plan('rms_norm', t).kernel_id": "str",
    "lz.compile(torch.nn.Linear(2, 2), t)": "FrozenModule",
    "lz.compile(torch.tanh, t)(t)": "Tensor",
}


@pytest.mark.slow
@pytest.mark.fault(32)
@pytest.mark.needs_package("mypy")
def test_mypy_sees_the_result_of_every_public_function(tmp_path: Path) -> None:
    """From outside, under --strict: no result is Any, and those that depend on an argument are told by it."""
    names = sorted(SURFACE - {"__version__"})
    lines = ["import torch", "import layerzero as lz", "t, flag = torch.ones(2), bool(torch.ones(1))"]
    lines += [f"reveal_type(lz.{name})" for name in names] + [f"reveal_type({call})" for call in CALLS]
    program = tmp_path / "program.py"
    program.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", "build/mypy", "--no-error-summary", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [
        re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text) for text in re.findall(r'Revealed type is "(.*)"', done.stdout)
    ]
    assert len(seen) == len(names) + len(CALLS)
    untyped = [name for name, text in zip(names, seen, strict=False) if re.search(r"-> (Any|def \(\*Any.*)$", text)]
    assert untyped == []
    found = dict(zip(CALLS, seen[len(names) :], strict=True))
    assert {call: text for call, text in found.items() if text != CALLS[call]} == {}
