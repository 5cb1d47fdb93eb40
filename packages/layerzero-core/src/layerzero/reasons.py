"""Typed reason codes: why a kernel, a plugin, a file or an input was accepted, adapted or refused.

A code is a stable string (it goes into JSON, logs and lock files) with a category, a message
template and a hint. A `Reason` is one occurrence: the code plus the offending value and the limit.
New codes are appended to `_TABLE`; codes are never renamed or reused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Reason", "ReasonCategory", "ReasonCode", "reason"]


class ReasonCategory(enum.StrEnum):
    """What part of the world a reason speaks about."""

    HARDWARE = "hardware"
    DTYPE = "dtype"
    SHAPE = "shape"
    HEAD_DIM = "head_dim"
    GQA = "gqa"
    MASK = "mask"
    STRIDE = "stride"
    FEATURE = "feature"
    LAYOUT = "layout"
    GRAPH = "graph"
    DETERMINISM = "determinism"
    DISTRIBUTED = "distributed"
    MEMORY = "memory"
    KV_CACHE = "kv_cache"
    QUANT = "quant"
    TOKENIZER = "tokenizer"
    POLICY = "policy"
    BACKEND = "backend"
    PLUGIN = "plugin"
    HEALTH = "health"
    JIT = "jit"
    PLAN = "plan"
    SCHEMA = "schema"
    CONFIG = "config"
    CACHE = "cache"
    INPUT = "input"
    SELECTION = "selection"


_C = ReasonCategory

# code -> (category, message template, hint). Templates may use {value} and {limit}.
_TABLE: dict[str, tuple[ReasonCategory, str, str]] = {
    # hardware
    "PLATFORM_MISMATCH": (_C.HARDWARE, "runs on {limit}, the device is {value}", "move the tensors or install a backend for this device"),
    "SM_TOO_OLD": (_C.HARDWARE, "needs SM {limit} or newer, the device is SM {value}", "use a newer GPU or another backend"),
    "SM_TOO_NEW": (_C.HARDWARE, "supports up to SM {limit}, the device is SM {value}", "install a newer version of the backend"),
    "SM_UNKNOWN": (_C.HARDWARE, "the device reports no known SM version ({value})", "extend the generation map of the capabilities descriptor"),
    "GENERATION_UNSUPPORTED": (_C.HARDWARE, "made for {limit}, the device is {value}", "use a kernel for this GPU generation"),
    "INSTRUCTION_FAMILY_MISSING": (_C.HARDWARE, "needs the instruction family {limit}, the device has {value}", "use a kernel for this instruction family"),
    "CPU_FEATURE_MISSING": (_C.HARDWARE, "needs the CPU features {limit}, this CPU lacks {value}", "use a portable kernel"),
    "DRIVER_TOO_OLD": (_C.HARDWARE, "needs driver {limit}, found {value}", "upgrade the GPU driver"),
    "CUDA_VERSION_MISMATCH": (_C.HARDWARE, "built for CUDA {limit}, this process has CUDA {value}", "install a build for the CUDA version of torch"),
    "ROCM_VERSION_MISMATCH": (_C.HARDWARE, "built for ROCm {limit}, this process has ROCm {value}", "install a build for the ROCm version of torch"),
    "CUDA_BLOCK_LIMIT_EXCEEDED": (_C.HARDWARE, "grid of {value} blocks exceeds the launch limit {limit}", "split the batch or use another kernel"),
    "LAUNCH_CONFIG_INVALID": (_C.HARDWARE, "launch configuration {value} is outside the device limit {limit}", "correct the grid or block size of the kernel"),
    "DEVICE_NOT_PRESENT": (_C.HARDWARE, "device {value} is not on this machine", "choose one of: {limit}"),
    "DEVICE_LOST": (_C.HARDWARE, "device {value} stopped answering", "restart the process; the kernel is quarantined"),
    # dtype
    "DTYPE_UNSUPPORTED": (_C.DTYPE, "dtype {value} is not among {limit}", "cast the inputs or use another kernel"),
    "DTYPE_MIXED": (_C.DTYPE, "mixed dtypes {value}", "cast the inputs to one dtype"),
    "BF16_UNSUPPORTED": (_C.DTYPE, "bfloat16 needs SM {limit}, the device is {value}", "use float16"),
    "FP8_UNSUPPORTED": (_C.DTYPE, "fp8 needs SM {limit}, the device is {value}", "use float16 or bfloat16"),
    # shapes
    "SHAPE_INVALID": (_C.SHAPE, "shape {value} does not fit {limit}", "correct the shapes"),
    "RANK_INVALID": (_C.SHAPE, "rank {value}, expected {limit}", "reshape the input"),
    "BATCH_MISMATCH": (_C.SHAPE, "batch sizes differ: {value}", "use one batch size for all inputs"),
    "BATCH_TOO_LARGE": (_C.SHAPE, "batch {value} exceeds {limit}", "split the batch"),
    "SEQ_LEN_TOO_LONG": (_C.SHAPE, "sequence length {value} exceeds {limit}", "split the sequence or use another kernel"),
    "SEQ_LEN_TOO_SHORT": (_C.SHAPE, "sequence length {value} is below {limit}", "use another kernel for short sequences"),
    "SEQ_LEN_MISMATCH": (_C.SHAPE, "sequence lengths differ: {value}, expected {limit}", "use equal lengths"),
    "DIM_OUT_OF_RANGE": (_C.SHAPE, "{value} is outside {limit}", "use another kernel for this size"),
    "DIM_NOT_MULTIPLE": (_C.SHAPE, "{value} is not a multiple of {limit}", "pad the axis or use another kernel"),
    "EMPTY_SEQUENCE": (_C.SHAPE, "the key/value sequence is empty: {value}", "give at least one key per query, or skip the call"),
    "EMPTY_INPUT": (_C.SHAPE, "there is nothing to compute: {value}", "none needed: the reference gives the empty result"),
    "RAGGED_UNSUPPORTED": (_C.SHAPE, "nested or ragged input {value} is not supported here", "use lz.varlen_attention, nested tensors of layout torch.jagged in lz.attention, or pad"),
    # head_dim
    "HEAD_DIM_INVALID": (_C.HEAD_DIM, "head_dim {value} is not allowed ({limit})", "pad head_dim or use another kernel"),
    "HEAD_DIM_TOO_LARGE": (_C.HEAD_DIM, "head_dim {value} exceeds {limit}", "use a kernel without this limit"),
    "HEAD_DIM_TOO_SMALL": (_C.HEAD_DIM, "head_dim {value} is below {limit}", "use a kernel without this limit"),
    "HEAD_DIM_NOT_MULTIPLE": (_C.HEAD_DIM, "head_dim {value} is not a multiple of {limit}", "pad head_dim"),
    "HEAD_DIM_MISMATCH": (_C.HEAD_DIM, "head dims differ: {value}, expected {limit}", "make query and key head_dim equal"),
    # gqa
    "GQA_UNSUPPORTED": (_C.GQA, "{value} query heads per KV head; this kernel needs equal head counts", "use another kernel, or allow the KV heads to be expanded"),
    "GQA_RATIO_INVALID": (_C.GQA, "{value} query heads is not a multiple of {limit} KV heads", "correct the head counts"),
    # mask
    "MASK_UNSUPPORTED": (_C.MASK, "attn_mask of kind {value} is not supported", "drop the mask or use a kernel that takes one"),
    "MASK_WITH_CAUSAL": (_C.MASK, "attn_mask and is_causal={value} were both given", "fold the causal part into the mask, or drop one"),
    "MASK_NOT_BROADCASTABLE": (_C.MASK, "mask of shape {value} does not broadcast to {limit}", "reshape the mask to [B|1, H|1, Sq|1, Sk|1]"),
    "MASK_DTYPE_INVALID": (_C.MASK, "mask dtype {value} is neither bool nor {limit}", "use bool, or the dtype of query"),
    "CAUSAL_ALIGNMENT_UNSUPPORTED": (_C.MASK, "computes causal alignment {limit}, the call asks for {value}", "use is_causal with the other alignment, or another kernel"),
    "BLOCK_MASK_UNSUPPORTED": (_C.MASK, "block-sparse mask {value} is not supported", "use a dense mask"),
    "CHUNK_MASK_UNSUPPORTED": (_C.MASK, "chunked attention (size {value}) is not supported", "use a dense mask"),
    "MASK_WITH_WINDOW": (_C.MASK, "{value} and window={limit} were both given", "drop one, or fold both into a boolean mask"),
    # stride, layout
    "STRIDE_LAST_DIM": (_C.STRIDE, "stride of the last axis is {value}, expected {limit}", "call .contiguous() on the input"),
    "STRIDE_UNALIGNED": (_C.STRIDE, "strides {value} are not multiples of {limit} bytes", "pad the rows or call .contiguous()"),
    "POINTER_UNALIGNED": (_C.STRIDE, "data pointer is not aligned to {limit} bytes", "clone the tensor"),
    "NOT_CONTIGUOUS": (_C.STRIDE, "input {value} is not contiguous", "call .contiguous() on the input"),
    "LAYOUT_UNSUPPORTED": (_C.LAYOUT, "layout {value} is not among {limit}", "allow adaptation, or pass a supported layout"),
    "LAYOUT_AMBIGUOUS": (_C.LAYOUT, "cannot tell BSHD from BHSD for shape {value}", "pass layout='BHSD' or layout='BSHD'"),
    "LAYOUT_INFERRED": (_C.LAYOUT, "layout {value} was inferred from the shape", "pass layout explicitly"),
    "LAYOUT_UNKNOWN": (_C.LAYOUT, "unknown layout {value}", "use one of: {limit}"),
    # features
    "FEATURE_UNSUPPORTED": (_C.FEATURE, "does not support {value}", "use a kernel that declares this feature"),
    "DROPOUT_UNSUPPORTED": (_C.FEATURE, "dropout is not supported", "set dropout_p=0 or use another kernel"),
    "WINDOW_UNSUPPORTED": (_C.FEATURE, "sliding window {value} is not supported", "use a kernel that declares window"),
    "SOFTCAP_UNSUPPORTED": (_C.FEATURE, "softcap is not supported", "use a kernel that declares softcap"),
    "ALIBI_UNSUPPORTED": (_C.FEATURE, "ALiBi slopes are not supported", "use a kernel that declares alibi"),
    "LSE_UNSUPPORTED": (_C.FEATURE, "cannot return the log-sum-exp", "use a kernel that declares lse"),
    "VARLEN_UNSUPPORTED": (_C.FEATURE, "variable-length batches are not supported", "use a kernel that declares varlen"),
    "BACKWARD_UNSUPPORTED": (_C.FEATURE, "has no backward and a gradient is needed", "wrap the call in torch.no_grad() or use another kernel"),
    "AUTOCAST_UNSUPPORTED": (_C.FEATURE, "does not follow autocast to {value}", "cast the inputs"),
    "INPLACE_UNSUPPORTED": (_C.FEATURE, "cannot write in place", "set inplace=False"),
    # graph, determinism, distributed, memory
    "CUDA_GRAPH_UNSAFE": (_C.GRAPH, "is not safe inside CUDA graph capture", "capture with a graph-safe kernel"),
    "GRAPH_NOT_WHITELISTED": (_C.GRAPH, "is not on the graph whitelist", "add it to graph_whitelist after a dummy capture"),
    "GRAPH_CAPTURE_FAILED": (_C.GRAPH, "capture failed: {value}", "warm the kernel up outside the capture first"),
    "NOT_DETERMINISTIC": (_C.DETERMINISM, "is not deterministic and deterministic results are required", "drop the requirement or use another kernel"),
    "TP_INVARIANCE_REQUIRED": (_C.DISTRIBUTED, "result depends on the tensor-parallel size ({value})", "use a kernel that declares tp_invariant"),
    "RANK_DISAGREEMENT": (_C.DISTRIBUTED, "ranks chose differently: {value}", "use rank0_broadcast selection"),
    "VERSION_DISAGREEMENT": (_C.DISTRIBUTED, "ranks run different versions: {value}", "install the same versions on every rank"),
    "MEMORY_HEADROOM_EXCEEDED": (_C.MEMORY, "needs {value} bytes of workspace, headroom is {limit}", "lower memory_headroom_mb or use a smaller batch"),
    "OUT_OF_MEMORY": (_C.MEMORY, "ran out of memory: {value}", "reduce the batch or use a kernel with less workspace"),
    # kv cache, quant, tokenizer
    "KV_CACHE_DTYPE_MISMATCH": (_C.KV_CACHE, "KV cache dtype {value} does not match {limit}", "convert the cache or allow adaptation"),
    "KV_CACHE_LAYOUT_MISMATCH": (_C.KV_CACHE, "KV cache layout {value} is not among {limit}", "convert the cache layout"),
    "PAGE_SIZE_UNSUPPORTED": (_C.KV_CACHE, "page size {value} is not among {limit}", "use a supported page size"),
    "BLOCK_TABLE_DTYPE": (_C.KV_CACHE, "block table dtype {value}, expected {limit}", "use int32 or int64 block tables"),
    "BLOCK_TABLE_INVALID": (_C.KV_CACHE, "block table {value} does not fit {limit}", "correct block_tables and context_lens"),
    "KV_CACHE_FULL": (_C.KV_CACHE, "{value} do not fit the {limit} that are left", "free or truncate a sequence, or make a larger cache"),
    "QUANT_FORMAT_UNSUPPORTED": (_C.QUANT, "quantization format {value} is not among {limit}", "use a supported format"),
    "QUANT_GRANULARITY_UNSUPPORTED": (_C.QUANT, "scale granularity {value} is not among {limit}", "use a supported granularity"),
    "QUANT_SCALE_LAYOUT": (_C.QUANT, "scale layout {value} does not match {limit}", "recompute the scales for this layout"),
    "WEIGHT_NOT_PACKED": (_C.QUANT, "needs a weight packed as {limit}, this one is {value}", "lz.pack_weight(weight) packs it once, for all calls"),
    "WEIGHT_PACK_STALE": (_C.QUANT, "the weight was written to {value} after it was packed as {limit}", "call lz.pack_weight again, or pack with on_change='repack'"),
    "TOKENIZER_HASH_MISMATCH": (_C.TOKENIZER, "tokenizer hash {value} does not match {limit}", "rebuild the cache for this tokenizer"),
    "TOKENIZER_ID_MISSING": (_C.TOKENIZER, "tokenization needs a tokenizer_id", "pass the tokenizer"),
    "TOKENIZER_UNKNOWN": (_C.TOKENIZER, "no tokenizer found: {value}", "expected {limit}"),
    "TOKENIZER_NOT_PROVEN": (_C.TOKENIZER, "{value} is not proven to tokenize as {limit} does", "layerzero_tokenizers.load(source) tries to prove it"),
    "TOKENIZER_DIFFERS": (_C.TOKENIZER, "differs from the tokenizer's own library on {value}", "use {limit}, the tokenizer's own library"),
    "TOKENIZER_NOT_CONVERTIBLE": (_C.TOKENIZER, "cannot serve this tokenizer: {value}", "use {limit}, the tokenizer's own library"),
    "TOKENIZER_LIVE": (_C.TOKENIZER, "the tokenizer object may still change, so only {limit} serves it", "freeze it with layerzero_tokenizers.load(object)"),
    "TOKEN_ID_INVALID": (_C.TOKENIZER, "token id {value} is not in the vocabulary of {limit}", "pass ids that this tokenizer gave"),
    "TEXT_INVALID": (_C.TOKENIZER, "lone surrogate {value} at {limit}: not Unicode text", "decode with errors='replace', or remove it"),
    "VOCAB_HASH_MISSING": (_C.TOKENIZER, "tokenization needs a vocab_hash", "pass the tokenizer, or its hash"),
    # policy
    "POLICY_DENIED": (_C.POLICY, "denied by rule {value}", "remove the deny rule"),
    "POLICY_NOT_ALLOWED": (_C.POLICY, "not on the allow list {limit}", "add it to allow"),
    "POLICY_LOCKED_OUT": (_C.POLICY, "the op is locked to {limit}", "lz.unlock the op"),
    "POLICY_DISABLED": (_C.POLICY, "LayerZero is disabled here; only fallbacks run", "leave lz.disabled() or unset LAYERZERO_DISABLED"),
    "POLICY_INVALID": (_C.POLICY, "invalid policy: {value}", "run lz policy check on the file"),
    "POLICY_UNKNOWN_KEY": (_C.POLICY, "unknown key {value}", "did you mean {limit}?"),
    "POLICY_EXPIRED": (_C.POLICY, "the timeboxed policy expired", "renew it"),
    "LOCKED_KERNEL_UNAVAILABLE": (_C.POLICY, "the op is locked to {value}, which cannot run here", "unlock, or set on_fault: fallback"),
    "BACKEND_NOT_REQUESTED": (_C.POLICY, "the call asked for backend {limit}", "drop backend=..."),
    "SWITCHED_OFF": (_C.POLICY, "the process-wide switch {value} is off", "turn it on, or leave the context that turned it off"),
    "ADAPTATION_NOT_ALLOWED": (_C.POLICY, "needs the transforms {value}, and strict_mode or allow_adaptation=false forbids them", "convert the inputs yourself or allow adaptation"),
    # backend, plugin
    "BACKEND_NOT_INSTALLED": (_C.BACKEND, "the package {value} is not installed", "pip install {limit}"),
    "BACKEND_IMPORT_FAILED": (_C.BACKEND, "importing the vendor failed: {value}", "run lz doctor for the full error"),
    "BACKEND_VERSION_MISMATCH": (_C.BACKEND, "version {value} is outside {limit}", "install a version in that range"),
    "BACKEND_CONFLICT": (_C.BACKEND, "conflicts with {value} in one process", "isolate one of them in a subprocess"),
    "BACKEND_PROBE_TIMEOUT": (_C.BACKEND, "the probe did not answer within {limit} s", "run the vendor's own self test"),
    "BACKEND_PROBE_CRASHED": (_C.BACKEND, "the probe process died: {value}", "reinstall the vendor library"),
    "VENDOR_REFUSED": (_C.BACKEND, "the vendor's own check says it cannot be used here ({value})", "see the vendor's requirements for these shapes"),
    "AVAILABILITY_MISMATCH": (_C.BACKEND, "package metadata says {limit}, the probe found {value}", "reinstall the backend and its vendor library, or deny the plugin"),
    "BACKEND_STUB": (_C.BACKEND, "the package holds discovery only, no kernels yet", "use another backend for now"),
    "PLUGIN_IMPORT_FAILED": (_C.PLUGIN, "the plugin raised at import: {value}", "upgrade or uninstall the plugin, or deny it"),
    "PLUGIN_REGISTER_FAILED": (_C.PLUGIN, "the plugin raised in layerzero_register: {value}", "upgrade or uninstall the plugin, or deny it"),
    "PLUGIN_HOOK_UNKNOWN": (_C.PLUGIN, "the plugin declares an unknown hook {value}", "known hooks: {limit}"),
    "PLUGIN_HOOK_TIMEOUT": (_C.PLUGIN, "the hook did not return within {limit} s", "report it to the plugin's author, or deny the plugin"),
    "PLUGIN_API_MISMATCH": (_C.PLUGIN, "the plugin wants API {limit}, this core has {value}", "install matching versions of plugin and core"),
    "PLUGIN_DENIED": (_C.PLUGIN, "kept out by LAYERZERO_PLUGINS or LAYERZERO_PLUGINS_DENY", "change the variable"),
    "PLUGIN_DUPLICATE": (_C.PLUGIN, "the backend name {value} is taken by {limit}", "uninstall one of the two"),
    "KERNEL_DUPLICATE": (_C.PLUGIN, "kernel id {value} is already registered by {limit}", "choose another kernel id"),
    "KERNEL_ID_INVALID": (_C.PLUGIN, "kernel id {value} does not read backend.op.variant", "rename it to {limit}"),
    "KERNEL_FUNCTION_MISSING": (_C.PLUGIN, "adapter {value} cannot be imported", "correct the module:name in capabilities.json"),
    # health, jit, plan
    "CIRCUIT_OPEN": (_C.HEALTH, "its breaker is open after: {value}", "it is tried again after {limit} s"),
    "QUARANTINED": (_C.HEALTH, "quarantined: {value}", "remove the quarantine after fixing the cause"),
    "KERNEL_RAISED": (_C.HEALTH, "raised at run time: {value}", "run lz doctor; the next candidate was used"),
    "HEALTH_CHECK_FAILED": (_C.HEALTH, "the known-answer self test failed: {value}", "reinstall the backend"),
    "NUMERICS_MISMATCH": (_C.HEALTH, "differs from the reference by {value}, allowed {limit}", "do not use this kernel; report it"),
    "KERNEL_TIMEOUT": (_C.HEALTH, "did not finish within {limit} s", "the next candidate was used"),
    "JIT_NOT_READY": (_C.JIT, "has no compiled artifact yet", "run lz.warmup, or pass jit='block'"),
    "JIT_FAILED": (_C.JIT, "compilation failed: {value}", "see the compile log"),
    "PLAN_BUCKET_MISS": (_C.PLAN, "no baked plan for the bucket of {value}", "add the shape and solve again"),
    "PLAN_HARDWARE_MISMATCH": (_C.PLAN, "the plan was made for {limit}, this is {value}", "solve again on this machine"),
    "PLAN_FOLLOWED": (_C.PLAN, "the dispatch table {value} names it", "solve again to change it"),
    "PLAN_POLICY_MISMATCH": (_C.PLAN, "the table was solved under policy {limit}, this is {value}", "solve again under this policy"),
    "PLAN_KERNEL_CHANGED": (_C.PLAN, "the table was solved with version {limit}, here is {value}", "solve again with these backends"),
    "PLAN_KERNEL_REFUSED": (_C.PLAN, "the table names {value}, which may not run here", "solve again; selection ran meanwhile"),
    "PLAN_FILE_INVALID": (_C.PLAN, "not a dispatch table: {value}", "write it with lz solve; do not edit it by hand"),
    "PLAN_ARGUMENTS_CHANGED": (_C.PLAN, "the plan was bound for {limit}, called with {value}", "make a new plan for these arguments"),
    # schema, config, cache
    "SCHEMA_VERSION_UNKNOWN": (_C.SCHEMA, "schema version {value}, known: {limit}", "upgrade layerzero-core"),
    "SCHEMA_INVALID": (_C.SCHEMA, "invalid file: {value}", "correct the named key"),
    "SCHEMA_FIELD_MISSING": (_C.SCHEMA, "missing field {value}", "add it"),
    "SCHEMA_FIELD_UNKNOWN": (_C.SCHEMA, "unknown field {value}", "did you mean {limit}?"),
    "CONFIG_INVALID": (_C.CONFIG, "invalid setting {value}", "expected {limit}"),
    "CONFIG_FILE_MISSING": (_C.CONFIG, "no such file: {value}", "correct the path"),
    "CONFIG_FILE_TOO_LARGE": (_C.CONFIG, "{value} exceeds the limit {limit}", "split or shorten the file"),
    "PATH_NOT_TRUSTED": (_C.CONFIG, "{value} is not in a trusted place ({limit})", "read the code, then name its folder with --trust or LAYERZERO_TRUSTED_DEFINITIONS"),
    "CACHE_CORRUPT": (_C.CACHE, "the cache entry is corrupt: {value}", "it was set aside and is rebuilt"),
    # input
    "DEVICE_MIXED": (_C.INPUT, "inputs are on different devices: {value}", "move them to one device"),
    "OP_UNKNOWN": (_C.INPUT, "unknown op {value}", "did you mean {limit}?"),
    "BACKEND_UNKNOWN": (_C.INPUT, "no backend or kernel is called {value}", "use one of: {limit}"),
    "KERNEL_UNKNOWN": (_C.INPUT, "unknown kernel id {value}", "did you mean {limit}?"),
    "VALUE_INVALID": (_C.INPUT, "{value} is not {limit}", "correct the argument"),
    "SCALE_INVALID": (_C.INPUT, "scale {value} is not a finite number", "pass a finite scale or None"),
    "WINDOW_INVALID": (_C.INPUT, "window {value} must not be negative", "pass a size >= 0, a (left, right) pair with -1 for unlimited, or None"),
    "TYPE_INVALID": (_C.INPUT, "got {value}, expected {limit}", "pass the expected type"),
    "CONTEXT_FIELD_MISSING": (_C.INPUT, "the context lacks {value}", "give it; {limit} needs it"),
    # selection
    "SELECTED": (_C.SELECTION, "highest score {value}", ""),
    "FALLBACK_USED": (_C.SELECTION, "no other kernel fits; the reference runs", "see the reasons of the other candidates"),
    "NO_KERNEL": (_C.SELECTION, "no kernel can run {value}", "see the reasons of each candidate"),
    "SELECTION_TIMEOUT": (_C.SELECTION, "selection took longer than {limit} s", "report the contexts that are slow"),
    "OUTSCORED": (_C.SELECTION, "scored {value}, the winner {limit}", "lock or prefer it to use it anyway"),
    "ADAPTED": (_C.SELECTION, "runs after {value}", "pass inputs in the kernel's own layout and dtype to save this"),
}

class ReasonCode(enum.StrEnum):
    """Every reason code; the value equals the name and is stable."""

    PLATFORM_MISMATCH = "PLATFORM_MISMATCH"
    SM_TOO_OLD = "SM_TOO_OLD"
    SM_TOO_NEW = "SM_TOO_NEW"
    SM_UNKNOWN = "SM_UNKNOWN"
    GENERATION_UNSUPPORTED = "GENERATION_UNSUPPORTED"
    INSTRUCTION_FAMILY_MISSING = "INSTRUCTION_FAMILY_MISSING"
    CPU_FEATURE_MISSING = "CPU_FEATURE_MISSING"
    DRIVER_TOO_OLD = "DRIVER_TOO_OLD"
    CUDA_VERSION_MISMATCH = "CUDA_VERSION_MISMATCH"
    ROCM_VERSION_MISMATCH = "ROCM_VERSION_MISMATCH"
    CUDA_BLOCK_LIMIT_EXCEEDED = "CUDA_BLOCK_LIMIT_EXCEEDED"
    LAUNCH_CONFIG_INVALID = "LAUNCH_CONFIG_INVALID"
    DEVICE_NOT_PRESENT = "DEVICE_NOT_PRESENT"
    DEVICE_LOST = "DEVICE_LOST"
    DTYPE_UNSUPPORTED = "DTYPE_UNSUPPORTED"
    DTYPE_MIXED = "DTYPE_MIXED"
    BF16_UNSUPPORTED = "BF16_UNSUPPORTED"
    FP8_UNSUPPORTED = "FP8_UNSUPPORTED"
    SHAPE_INVALID = "SHAPE_INVALID"
    RANK_INVALID = "RANK_INVALID"
    BATCH_MISMATCH = "BATCH_MISMATCH"
    BATCH_TOO_LARGE = "BATCH_TOO_LARGE"
    SEQ_LEN_TOO_LONG = "SEQ_LEN_TOO_LONG"
    SEQ_LEN_TOO_SHORT = "SEQ_LEN_TOO_SHORT"
    SEQ_LEN_MISMATCH = "SEQ_LEN_MISMATCH"
    DIM_OUT_OF_RANGE = "DIM_OUT_OF_RANGE"
    DIM_NOT_MULTIPLE = "DIM_NOT_MULTIPLE"
    EMPTY_SEQUENCE = "EMPTY_SEQUENCE"
    EMPTY_INPUT = "EMPTY_INPUT"
    RAGGED_UNSUPPORTED = "RAGGED_UNSUPPORTED"
    HEAD_DIM_INVALID = "HEAD_DIM_INVALID"
    HEAD_DIM_TOO_LARGE = "HEAD_DIM_TOO_LARGE"
    HEAD_DIM_TOO_SMALL = "HEAD_DIM_TOO_SMALL"
    HEAD_DIM_NOT_MULTIPLE = "HEAD_DIM_NOT_MULTIPLE"
    HEAD_DIM_MISMATCH = "HEAD_DIM_MISMATCH"
    GQA_UNSUPPORTED = "GQA_UNSUPPORTED"
    GQA_RATIO_INVALID = "GQA_RATIO_INVALID"
    MASK_UNSUPPORTED = "MASK_UNSUPPORTED"
    MASK_WITH_CAUSAL = "MASK_WITH_CAUSAL"
    MASK_NOT_BROADCASTABLE = "MASK_NOT_BROADCASTABLE"
    MASK_DTYPE_INVALID = "MASK_DTYPE_INVALID"
    CAUSAL_ALIGNMENT_UNSUPPORTED = "CAUSAL_ALIGNMENT_UNSUPPORTED"
    BLOCK_MASK_UNSUPPORTED = "BLOCK_MASK_UNSUPPORTED"
    CHUNK_MASK_UNSUPPORTED = "CHUNK_MASK_UNSUPPORTED"
    MASK_WITH_WINDOW = "MASK_WITH_WINDOW"
    STRIDE_LAST_DIM = "STRIDE_LAST_DIM"
    STRIDE_UNALIGNED = "STRIDE_UNALIGNED"
    POINTER_UNALIGNED = "POINTER_UNALIGNED"
    NOT_CONTIGUOUS = "NOT_CONTIGUOUS"
    LAYOUT_UNSUPPORTED = "LAYOUT_UNSUPPORTED"
    LAYOUT_AMBIGUOUS = "LAYOUT_AMBIGUOUS"
    LAYOUT_INFERRED = "LAYOUT_INFERRED"
    LAYOUT_UNKNOWN = "LAYOUT_UNKNOWN"
    FEATURE_UNSUPPORTED = "FEATURE_UNSUPPORTED"
    DROPOUT_UNSUPPORTED = "DROPOUT_UNSUPPORTED"
    WINDOW_UNSUPPORTED = "WINDOW_UNSUPPORTED"
    SOFTCAP_UNSUPPORTED = "SOFTCAP_UNSUPPORTED"
    ALIBI_UNSUPPORTED = "ALIBI_UNSUPPORTED"
    LSE_UNSUPPORTED = "LSE_UNSUPPORTED"
    VARLEN_UNSUPPORTED = "VARLEN_UNSUPPORTED"
    BACKWARD_UNSUPPORTED = "BACKWARD_UNSUPPORTED"
    AUTOCAST_UNSUPPORTED = "AUTOCAST_UNSUPPORTED"
    INPLACE_UNSUPPORTED = "INPLACE_UNSUPPORTED"
    CUDA_GRAPH_UNSAFE = "CUDA_GRAPH_UNSAFE"
    GRAPH_NOT_WHITELISTED = "GRAPH_NOT_WHITELISTED"
    GRAPH_CAPTURE_FAILED = "GRAPH_CAPTURE_FAILED"
    NOT_DETERMINISTIC = "NOT_DETERMINISTIC"
    TP_INVARIANCE_REQUIRED = "TP_INVARIANCE_REQUIRED"
    RANK_DISAGREEMENT = "RANK_DISAGREEMENT"
    VERSION_DISAGREEMENT = "VERSION_DISAGREEMENT"
    MEMORY_HEADROOM_EXCEEDED = "MEMORY_HEADROOM_EXCEEDED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    KV_CACHE_DTYPE_MISMATCH = "KV_CACHE_DTYPE_MISMATCH"
    KV_CACHE_LAYOUT_MISMATCH = "KV_CACHE_LAYOUT_MISMATCH"
    PAGE_SIZE_UNSUPPORTED = "PAGE_SIZE_UNSUPPORTED"
    BLOCK_TABLE_DTYPE = "BLOCK_TABLE_DTYPE"
    BLOCK_TABLE_INVALID = "BLOCK_TABLE_INVALID"
    KV_CACHE_FULL = "KV_CACHE_FULL"
    QUANT_FORMAT_UNSUPPORTED = "QUANT_FORMAT_UNSUPPORTED"
    QUANT_GRANULARITY_UNSUPPORTED = "QUANT_GRANULARITY_UNSUPPORTED"
    QUANT_SCALE_LAYOUT = "QUANT_SCALE_LAYOUT"
    WEIGHT_NOT_PACKED = "WEIGHT_NOT_PACKED"
    WEIGHT_PACK_STALE = "WEIGHT_PACK_STALE"
    TOKENIZER_HASH_MISMATCH = "TOKENIZER_HASH_MISMATCH"
    TOKENIZER_ID_MISSING = "TOKENIZER_ID_MISSING"
    TOKENIZER_UNKNOWN = "TOKENIZER_UNKNOWN"
    TOKENIZER_NOT_PROVEN = "TOKENIZER_NOT_PROVEN"
    TOKENIZER_DIFFERS = "TOKENIZER_DIFFERS"
    TOKENIZER_NOT_CONVERTIBLE = "TOKENIZER_NOT_CONVERTIBLE"
    TOKENIZER_LIVE = "TOKENIZER_LIVE"
    TOKEN_ID_INVALID = "TOKEN_ID_INVALID"
    TEXT_INVALID = "TEXT_INVALID"
    VOCAB_HASH_MISSING = "VOCAB_HASH_MISSING"
    POLICY_DENIED = "POLICY_DENIED"
    POLICY_NOT_ALLOWED = "POLICY_NOT_ALLOWED"
    POLICY_LOCKED_OUT = "POLICY_LOCKED_OUT"
    POLICY_DISABLED = "POLICY_DISABLED"
    POLICY_INVALID = "POLICY_INVALID"
    POLICY_UNKNOWN_KEY = "POLICY_UNKNOWN_KEY"
    POLICY_EXPIRED = "POLICY_EXPIRED"
    LOCKED_KERNEL_UNAVAILABLE = "LOCKED_KERNEL_UNAVAILABLE"
    BACKEND_NOT_REQUESTED = "BACKEND_NOT_REQUESTED"
    SWITCHED_OFF = "SWITCHED_OFF"
    ADAPTATION_NOT_ALLOWED = "ADAPTATION_NOT_ALLOWED"
    BACKEND_NOT_INSTALLED = "BACKEND_NOT_INSTALLED"
    BACKEND_IMPORT_FAILED = "BACKEND_IMPORT_FAILED"
    BACKEND_VERSION_MISMATCH = "BACKEND_VERSION_MISMATCH"
    BACKEND_CONFLICT = "BACKEND_CONFLICT"
    BACKEND_PROBE_TIMEOUT = "BACKEND_PROBE_TIMEOUT"
    BACKEND_PROBE_CRASHED = "BACKEND_PROBE_CRASHED"
    VENDOR_REFUSED = "VENDOR_REFUSED"
    AVAILABILITY_MISMATCH = "AVAILABILITY_MISMATCH"
    BACKEND_STUB = "BACKEND_STUB"
    PLUGIN_IMPORT_FAILED = "PLUGIN_IMPORT_FAILED"
    PLUGIN_REGISTER_FAILED = "PLUGIN_REGISTER_FAILED"
    PLUGIN_HOOK_UNKNOWN = "PLUGIN_HOOK_UNKNOWN"
    PLUGIN_HOOK_TIMEOUT = "PLUGIN_HOOK_TIMEOUT"
    PLUGIN_API_MISMATCH = "PLUGIN_API_MISMATCH"
    PLUGIN_DENIED = "PLUGIN_DENIED"
    PLUGIN_DUPLICATE = "PLUGIN_DUPLICATE"
    KERNEL_DUPLICATE = "KERNEL_DUPLICATE"
    KERNEL_ID_INVALID = "KERNEL_ID_INVALID"
    KERNEL_FUNCTION_MISSING = "KERNEL_FUNCTION_MISSING"
    CIRCUIT_OPEN = "CIRCUIT_OPEN"
    QUARANTINED = "QUARANTINED"
    KERNEL_RAISED = "KERNEL_RAISED"
    HEALTH_CHECK_FAILED = "HEALTH_CHECK_FAILED"
    NUMERICS_MISMATCH = "NUMERICS_MISMATCH"
    KERNEL_TIMEOUT = "KERNEL_TIMEOUT"
    JIT_NOT_READY = "JIT_NOT_READY"
    JIT_FAILED = "JIT_FAILED"
    PLAN_BUCKET_MISS = "PLAN_BUCKET_MISS"
    PLAN_HARDWARE_MISMATCH = "PLAN_HARDWARE_MISMATCH"
    PLAN_FOLLOWED = "PLAN_FOLLOWED"
    PLAN_POLICY_MISMATCH = "PLAN_POLICY_MISMATCH"
    PLAN_KERNEL_CHANGED = "PLAN_KERNEL_CHANGED"
    PLAN_KERNEL_REFUSED = "PLAN_KERNEL_REFUSED"
    PLAN_FILE_INVALID = "PLAN_FILE_INVALID"
    PLAN_ARGUMENTS_CHANGED = "PLAN_ARGUMENTS_CHANGED"
    SCHEMA_VERSION_UNKNOWN = "SCHEMA_VERSION_UNKNOWN"
    SCHEMA_INVALID = "SCHEMA_INVALID"
    SCHEMA_FIELD_MISSING = "SCHEMA_FIELD_MISSING"
    SCHEMA_FIELD_UNKNOWN = "SCHEMA_FIELD_UNKNOWN"
    CONFIG_INVALID = "CONFIG_INVALID"
    CONFIG_FILE_MISSING = "CONFIG_FILE_MISSING"
    CONFIG_FILE_TOO_LARGE = "CONFIG_FILE_TOO_LARGE"
    PATH_NOT_TRUSTED = "PATH_NOT_TRUSTED"
    CACHE_CORRUPT = "CACHE_CORRUPT"
    DEVICE_MIXED = "DEVICE_MIXED"
    OP_UNKNOWN = "OP_UNKNOWN"
    BACKEND_UNKNOWN = "BACKEND_UNKNOWN"
    KERNEL_UNKNOWN = "KERNEL_UNKNOWN"
    VALUE_INVALID = "VALUE_INVALID"
    SCALE_INVALID = "SCALE_INVALID"
    WINDOW_INVALID = "WINDOW_INVALID"
    TYPE_INVALID = "TYPE_INVALID"
    CONTEXT_FIELD_MISSING = "CONTEXT_FIELD_MISSING"
    SELECTED = "SELECTED"
    FALLBACK_USED = "FALLBACK_USED"
    NO_KERNEL = "NO_KERNEL"
    SELECTION_TIMEOUT = "SELECTION_TIMEOUT"
    OUTSCORED = "OUTSCORED"
    ADAPTED = "ADAPTED"


@dataclass(frozen=True, slots=True)
class Reason:
    """One occurrence of a reason code, with the value that caused it and the limit it met."""

    code: ReasonCode
    message: str
    value: str | int | float | bool | None = None
    limit: str | int | float | bool | None = None
    hint: str = ""

    @property
    def category(self) -> ReasonCategory:
        """The category of the code."""
        return _TABLE[self.code.value][0]

    def to_json(self) -> dict[str, Any]:
        """A JSON-compatible dict; `from_json` gives back an equal Reason."""
        return {
            "code": self.code.value,
            "message": self.message,
            "value": self.value,
            "limit": self.limit,
            "hint": self.hint,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Reason:
        """The inverse of `to_json`. Raises ValueError for an unknown code."""
        return Reason(
            ReasonCode(data["code"]), data["message"], data.get("value"), data.get("limit"), data.get("hint", "")
        )

    def __str__(self) -> str:
        return f"{self.code.value}: {self.message}"


def _plain(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, (str, int, float, bool)):
        return str(value) if isinstance(value, enum.Enum) else value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return ", ".join(str(item) for item in items)
    return str(value)


def reason(code: ReasonCode | str, value: object = None, limit: object = None, *, detail: str = "") -> Reason:
    """Build a Reason; message and hint come from the table, `detail` is appended to the message."""
    return _built(ReasonCode(code), _plain(value), _plain(limit), detail)


@lru_cache(maxsize=4096, typed=True)  # typed: 1 and True are not the same value of a reason
def _built(code: ReasonCode, value: Any, limit: Any, detail: str) -> Reason:
    # The same few reasons come again in every selection, and formatting is most of their price.
    _, message, hint = _TABLE[code.value]
    fill = {"value": value, "limit": limit}
    text = message.format(**fill)
    return Reason(code, f"{text} ({detail})" if detail else text, value, limit, hint.format(**fill))
