"""The fields of capabilities.json, schema 1.0, as one declarative table.

`DOCUMENT` is the whole file, `KERNEL` one entry under `ops`. The validator walks these tables and the
JSON Schema is printed from them; to add a field, add a row here and say in `capabilities.kernel_spec` which
`KernelSpec` field it fills.
"""

from __future__ import annotations

import re
from functools import lru_cache

from layerzero.model.context import KEYABLE
from layerzero.model.device import canonical_cpu_feature
from layerzero.model.enums import Causal, GPUGeneration, InstructionFamily, Layout, Platform, QuantFormat
from layerzero.registry.kinds import (
    EXPRESSION,
    FLAG,
    Field,
    Record,
    choice,
    either,
    list_of,
    map_of,
    nearest,
    number,
    text,
    tuple_of,
    whole,
)

SCHEMA_VERSION = "1.0"
DEFAULT_API = ">=2,<3"

DTYPES = frozenset({
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "text",
})  # fmt: skip

# Features that have a true/false field of their own.
FLAG_FEATURES = ("gqa", "dropout", "window", "softcap", "alibi", "lse", "varlen", "backward")

FEATURES = frozenset({
    *FLAG_FEATURES, "mask_bool", "mask_float", "paged", "causal_top_left", "causal_bottom_right", "autocast", "inplace",
    "interleaved", "rotate_half", "position_ids", "partial_rotary", "no_weight", "bias", "activation", "padding_idx",
    "generator", "tensor_params", "nested", "block_mask", "chunk_mask", "head_dim_v", "tp_invariant", "mask_grad",
    "mixed_weight",
    "gelu_none", "gelu_tanh", "activation_gelu", "activation_gelu_tanh", "activation_silu", "activation_relu",
    "activation_swigluoai", "expert_bias", "clamped",
    "sample_top_k", "sample_top_p", "sample_min_p", "greedy", "no_draft_probs", "paged_prefill", "batched_tables",
    "no_key", "mixed_tables", "double_backward", "sinks", "sinks_grad",
    "kv_scales", "non_causal",
    "causal_square", "lse_backward", "gated", "split_gate", "ungated", "scoring_softmax", "scoring_sigmoid",
    "choice_bias", "expert_groups", "zero_point", "unquantized", "weight_only", "act_dynamic", "quant_native",
    "text_batch", "live_tokenizer", "offsets", "plain_special",
    "label_smoothing", "z_loss", "saturate", "float_to_integer", "to_e4m3", "one_rounding", "from_float8",
})  # fmt: skip


_VERSION = r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?"
_CLAUSE = rf"(?:(?:[<>]=?|[=!]=){_VERSION}|~=\d+(?:\.\d+)+)"
_PLAIN_SPECIFIER = rf"{_CLAUSE}(?:,{_CLAUSE})*\Z"


def _specifier(given: str) -> None:
    if given in ("", DEFAULT_API) or re.match(_PLAIN_SPECIFIER, given):  # packaging takes 13 ms to import
        return
    from packaging.specifiers import SpecifierSet

    try:
        SpecifierSet(given)
    except Exception as error:  # packaging's own error class is a ValueError only in newer releases
        raise ValueError(str(error)) from None


@lru_cache(maxsize=256)  # comparing one word with all the others takes a third of a millisecond
def _refuse_misspelt(word: str, known: frozenset[str]) -> None:
    near = nearest(word, known, cutoff=0.85)
    if near is not None:
        raise ValueError(f"did you mean {near!r}?")


def _feature(word: str) -> None:
    # A word nobody knows may be a third party's own; one that almost is a known word is a misspelling,
    # and would quietly switch the feature off.
    if word not in FEATURES and not word.startswith("kv_"):
        _refuse_misspelt(word, FEATURES)


def _generation(word: str) -> None:
    if word.upper() not in GPUGeneration.__members__:
        raise ValueError(f"{word!r} is none of {', '.join(GPUGeneration.__members__)}")


def _jit_field(word: str) -> None:
    # Ops may have sizes of their own, so an unknown word is no error; a misspelt one would merge artifacts that differ.
    if word not in KEYABLE and word.removeprefix("needs_") not in FEATURES:
        _refuse_misspelt(word, KEYABLE)


def _spelt(words: list[str]) -> frozenset[str]:
    return frozenset(map(canonical_cpu_feature, words))


def _values(members: list[QuantFormat]) -> frozenset[str]:
    return frozenset(item.value for item in members)


def _layouts(words: list[str]) -> frozenset[Layout]:
    return frozenset(map(Layout, words))


_NAME = text(r"^[a-z0-9][a-z0-9_\-]{0,63}\Z", "a lowercase name such as 'flashattn'")
_WORD = text(r"^[a-z][a-z0-9_]{0,63}\Z", "a lowercase word")
_OP = text(r"^[a-z][a-z0-9_.]{0,63}\Z", "the name of an op such as 'rms_norm'")
_SPECIFIER = text("", "a version specifier such as '>=2.8,<3'", _specifier, empty=True)
_FUNCTION = text(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z", "an adapter written 'module:name'")
_FEATURE = text(r"^[a-z][a-z0-9_]{0,63}\Z", "a feature word", _feature)
_TRACEABLE = text(r"^(itself|plain|[A-Za-z_][\w.]*:[A-Za-z_]\w*)\Z", "'itself', 'plain' or 'module:name'")
_JIT_FIELD = text(r"^[a-z][a-z0-9_]{0,63}\Z", "a field or size of a call's context", _jit_field)
_DTYPE = choice(DTYPES)
_SM = whole(50, 999)

_LIMIT_FIELDS = (
    Field("min", whole(), "smallest allowed value"),
    Field("max", whole(), "largest allowed value"),
    Field("multiple_of", whole(1), "the value must be a multiple of this"),
    Field("one_of", list_of(whole(), 1), "the only allowed values"),
)
LIMIT = Record("limit", *_LIMIT_FIELDS)
HEAD_DIM = Record(
    "head_dim",
    *_LIMIT_FIELDS,
    Field("pairs", list_of(tuple_of(whole(1), 2), 1), "allowed (query/key, value) head dims that differ"),
)
PAGED = Record(
    "paged",
    Field("page_sizes", list_of(whole(1), 1), "allowed tokens per page; any when left out"),
    Field("layouts", list_of(choice(frozenset({"NHD", "HND"})), 1, to=_layouts), "allowed cache layouts"),
    Field("index_dtypes", list_of(choice(frozenset({"int32", "int64"})), 1), "allowed block table dtypes"),
)

BELOW = Record(
    "priority below",
    Field("size", whole(2), "smaller ones", required=True),
    Field("priority", number(), "points in place of priority, where they are less", required=True),
)

KERNEL = Record(
    "kernel",
    Field("kernel_id", text("", "backend.op.variant"), "unique id, backend.op.variant", required=True),
    Field("function", _FUNCTION, "the adapter as 'module:name', imported when the kernel is bound", required=True),
    Field("dtypes", list_of(_DTYPE, 1), "torch dtype names it computes in", required=True),
    Field("platforms", list_of(choice(Platform), 1), "device kinds; the file's platforms when left out"),
    Field("priority", number(), "score prior in points before anything was measured", default=0.0),
    Field("priority_below", map_of(BELOW, _WORD), "sizes below which less is expected of it", default={}),
    Field("doc", text(empty=True), "one line for people", default=""),
    # hardware
    Field("min_sm", _SM, "oldest SM, 80 for SM 8.0"),
    Field("max_sm", _SM, "newest SM it may run on"),
    Field("generations", list_of(choice(GPUGeneration, by_name=True), 1), "GPU generations it is made for"),
    Field("instruction_families", list_of(choice(InstructionFamily), 1), "needs at least one of these"),
    Field("cpu_features", list_of(_WORD, 1, to=_spelt), "needs all of these, in torch.cpu.get_capabilities() words"),
    # sizes
    Field("head_dim", HEAD_DIM, "limits on head_dim"),
    Field("max_seq_len", whole(1), "short for limits on seq_len_q and seq_len_k"),
    Field("limits", map_of(LIMIT, _WORD), "limits on any other named size", default={}),
    Field("square", FLAG, "only equal query and key lengths", default=False),
    # features; what is not declared is not supported
    *(Field(name, FLAG, f"supports {name}", default=False) for name in FLAG_FEATURES),
    Field("attn_mask", list_of(choice(frozenset({"bool", "float"}))), "kinds of attn_mask it takes"),
    Field("causal", list_of(choice(frozenset(c.value for c in Causal if c is not Causal.NONE))), "alignments"),
    Field("paged", either(lambda value: isinstance(value, bool), FLAG, PAGED), "reads a paged KV cache", default=False),
    Field("features", list_of(_FEATURE), "any other feature words"),
    Field("quant_formats", list_of(choice(QuantFormat), 1, to=_values), "quantized formats"),
    Field("granularities", list_of(_WORD, 1), "scale granularities"),
    Field("weight_layout", _WORD, "takes only weights that its packer, or one of the same layout, has packed"),
    Field("packer", _FUNCTION, "function (QuantizedTensor) -> tuple of tensors in weight_layout"),
    Field("mixed_dtypes", FLAG, "takes inputs of different dtypes", default=False),
    # memory order
    Field("layouts", list_of(choice(Layout), 1), "layouts it takes without a copy"),
    Field("stride_last_dim", whole(1), "required stride of the last axis"),
    Field("contiguous", FLAG, "inputs must be contiguous", default=False),
    Field("aligned_strides", FLAG, "strides must be multiples of 16 bytes", default=False),
    Field("pointer_alignment", whole(1, 4096), "required alignment of data pointers, in bytes"),
    Field("adapt", list_of(_WORD), "transforms LayerZero may apply to make inputs fit"),
    # behaviour
    Field("graph_safe", FLAG, "safe inside CUDA graph capture", default=False),
    Field("traceable", _TRACEABLE, "what torch.compile traces: itself, plain, or a function", default=""),
    Field("deterministic", FLAG, "bit-identical results for identical inputs", default=False),
    Field("batch_invariant", FLAG, "a row's bits depend on nothing else in the call", default=False),
    Field("tp_invariant", FLAG, "result does not depend on the tensor-parallel size", default=False),
    Field("jit", FLAG, "compiles at first use", default=False),
    Field(
        "jit_key", list_of(_JIT_FIELD, 1, to=tuple), "context fields: one compiled artifact for each of their values"
    ),
    Field(
        "compiler",
        either(lambda value: value == "device", choice(frozenset({"device"})), _FUNCTION),
        "function (CompileOrder) that compiles without the device, or 'device': only there, left to lz warmup",
    ),
    Field("fuses", list_of(_OP, to=tuple), "ops it computes in one go"),
    Field("guards", list_of(_WORD), "facts to check at each hot call"),
    Field("workspace", EXPRESSION, "bytes of scratch memory"),
    Field(
        "grid",
        either(lambda value: isinstance(value, str), choice(frozenset({"library"})), tuple_of(EXPRESSION, 3)),
        "CUDA grid as three formulas, or 'library' when the vendor computes its launch",
    ),
    Field("error_bounds", map_of(number(0.0), _WORD), "largest error against the reference, by dtype or format"),
    Field("predicate", _FUNCTION, "function (Context) -> list of Reason for what data cannot say"),
    sparse=True,  # a kernel says a tenth of it, and a first call builds hundreds of kernels
)

_DIST = text(r"^[A-Za-z0-9][A-Za-z0-9._\-]*\Z", "a distribution name")
_MODULE = text(r"^[A-Za-z_][\w.]*\Z", "a module name")
_FILE = text(r"^[\w.\-]+(/[\w.\-]+)*\Z", "a JSON file of the vendor")
_KEYS = text(r"^\w+(\.\w+)*\Z", "keys with dots between")
BUILD = Record(
    "build",
    Field("file", _FILE, "relative to the folder it is installed in", required=True),
    Field("cuda", _KEYS, "where the CUDA version stands in it", required=True),
)
VENDOR = Record(
    "vendor",
    Field("dist", _DIST, "its name", required=True),
    Field("import", _MODULE, "module to import"),
    Field("version", _SPECIFIER, "versions the adapters work with", default=""),
    Field("extra", _NAME, "extra of the backend's package that pulls the vendor in"),
    Field("install", text(), "exact command when 'pip install' of dist or extra is not enough"),
    Field("build", BUILD, "where the installed vendor says what it was built for"),
)
CONFLICT = Record(
    "conflict",
    Field("dist", _DIST, "a distribution that breaks the vendor in one process", required=True),
    Field("unless", _DIST, "no conflict when this distribution is there as well"),
    Field("module", _MODULE, "the module they quarrel about; hidden, there is no conflict", required=True),
    Field("why", text(), "what happens", required=True),
)
_VARIABLE = text(r"^[A-Za-z_]\w*\Z", "a variable")
ISOLATION = Record(
    "isolation",
    Field("hide", list_of(_MODULE, to=tuple), "modules its own process must not see"),
    Field("env", map_of(text(empty=True), _VARIABLE), "variables of its own process", default={}),
)

_SCHEMA_VERSION = choice(frozenset({SCHEMA_VERSION}))
_GENERATION_KEY = text(r"^\s*\d{2,4}\s*(\+|-\s*\d{2,4})?\s*\Z", "an SM range such as '89', '75-79' or '130+'")
_GENERATION = Record(
    "generation",
    Field("generation", text("", "a GPU generation", _generation), "its name, as 'hopper' or 'HOPPER'"),
    Field("tensor_core_generation", whole(0, 5), "of its tensor cores; 0 for none"),
    Field("instruction_families", list_of(choice(InstructionFamily), unique=False), "matrix instructions it has"),
    sparse=True,
)

DOCUMENT = Record(
    "capabilities.json",
    Field("schema_version", _SCHEMA_VERSION, f"version of this format: {SCHEMA_VERSION}", required=True),
    Field("backend", _NAME, "name of the backend; kernel ids begin with it", required=True),
    Field("ops", map_of(list_of(KERNEL, to=list, unique=False), _OP), "op name to list of kernels", required=True),
    Field("platforms", list_of(choice(Platform), 1), "platforms of kernels that do not name their own"),
    Field("backend_version", _SPECIFIER, "versions of the vendor library this file is right for", default=""),
    Field("api", _SPECIFIER, "plugin API versions it is written for", default=DEFAULT_API),
    Field("vendor", VENDOR, "the library the adapters call; none when the backend is self-contained"),
    Field("conflicts", list_of(CONFLICT, to=list, unique=False), "distributions it cannot share a process with"),
    Field("isolation", ISOLATION, "what its own process needs, where policy gives it one"),
    Field("generation_map", map_of(_GENERATION, _GENERATION_KEY), "what newer SM versions are", default={}),
    Field("doc", text(empty=True), "one line for people", default=""),
)
