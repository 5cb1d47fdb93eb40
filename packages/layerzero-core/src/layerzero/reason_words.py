"""The words of every reason code: category, message template, hint. See `layerzero.reasons`.

New codes are appended; codes are never renamed or reused.
"""

from __future__ import annotations

import enum

__all__ = ["TABLE", "ReasonCategory"]


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
    HUB = "hub"


_C = ReasonCategory

# code -> (category, message template, hint). Templates may use {value} and {limit}.
TABLE: dict[str, tuple[ReasonCategory, str, str]] = {
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
    "GRAPH_NO_DEVICE": (_C.GRAPH, "there is nothing to capture on: {value}", "CUDA graphs need a CUDA device and tensors on it; run the function as it is elsewhere"),
    "GRAPH_MEMORY_GROWS": (_C.GRAPH, "keeps {value} bytes more of device memory with every call (allowed: {limit})", "allocate workspaces once, before the capture, or capture with another kernel"),
    "GRAPH_RESULT_DIFFERS": (_C.GRAPH, "a replay differs from the function itself: {value}", "the function depends on something that is not an input of the graph: pass it as an argument or write it into a tensor"),
    "GRAPH_INPUT_CHANGED": (_C.GRAPH, "the graph was captured for {limit}, given is {value}", "pad to the captured shape, or capture a graph for this one"),
    "NOT_DETERMINISTIC": (_C.DETERMINISM, "is not deterministic and deterministic results are required", "drop the requirement or use another kernel"),
    "TP_INVARIANCE_REQUIRED": (_C.DISTRIBUTED, "result depends on the tensor-parallel size ({value})", "use a kernel that declares tp_invariant"),
    "RANK_DISAGREEMENT": (_C.DISTRIBUTED, "ranks chose differently: {value}", "use rank0_broadcast selection"),
    "VERSION_DISAGREEMENT": (_C.DISTRIBUTED, "ranks run different versions: {value}", "install the same versions on every rank"),
    "TABLE_DISAGREEMENT": (_C.DISTRIBUTED, "ranks have other dispatch tables than rank {value}", "give every rank the same LAYERZERO_DISPATCH_TABLE"),
    "RANK_LOST": (_C.DISTRIBUTED, "rank {value} did not answer within {limit} s", "look at its log; go on with the others by agreement.without(error.ranks), or start anew"),
    "RANK_CHOICE": (_C.DISTRIBUTED, "{value} was chosen by rank {limit} for all", ""),
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
    "POLICY_LOCKED_OUT": (_C.POLICY, "the op is locked to {limit}", "lz.unlock the op, or lift the lock where it was set"),
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
    "ACCEL_NOT_BUILT": (_C.BACKEND, "layerzero-accel is installed without its compiled library", "python -m layerzero_accel.build, with gcc or clang on the PATH"),
    "ACCEL_UNFIT": (_C.BACKEND, "layerzero-accel cannot be used here: {value}", "install layerzero-accel and layerzero-core of the same release, and torch 2.10 or newer"),
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
    "FUSED_IN_GRAPH": (_C.SELECTION, "{value} is written into a compiled graph, which fuses it; {limit} would be one opaque op", "lock or prefer {limit}, or name its backend, to have it in graphs too"),
    "OPAQUE_IN_GRAPH": (_C.SELECTION, "{value} is one opaque op in a compiled graph", "torch's own kernels are written out; lock or prefer one to have it so"),
    "BATCH_NOT_PLANNED": (_C.GRAPH, "cannot plan inside a capture: {value}", "make the batch with lz.paged_batch(…, capture=True) and call the op once before the capture"),
    "ISOLATION_START_FAILED": (_C.HEALTH, "its own process could not be started: {value}", "see the last line it wrote; lz doctor probes it in the same surroundings"),
    "ISOLATION_CRASHED": (_C.HEALTH, "its process ended during the call: {value}", "the next candidate was used; a new process is started for a later call"),
    "ISOLATION_TIMEOUT": (_C.HEALTH, "its process gave no answer within {limit} s: {value}", "it was ended; raise isolation.<backend>.deadline_s if the kernel is that slow"),
    "ISOLATION_GARBAGE": (_C.HEALTH, "its process answered what is no message: {value}", "it was ended; report it to the backend's author"),
    "ISOLATION_TRUNCATED": (_C.HEALTH, "its process broke off in the middle of an answer: {value}", "the next candidate was used; a new process is started for a later call"),
    "ISOLATION_BACKOFF": (_C.HEALTH, "its process failed {value} times in a row", "it is started again in {limit} s"),
    "ISOLATION_IMPORT_FAILED": (_C.BACKEND, "cannot be imported in its own process: {value}", "run lz doctor, which probes it there; correct isolation.<backend>: path, env or hide"),
    "ISOLATION_UNSUPPORTED": (_C.BACKEND, "{value} cannot be sent to another process", "run the backend in process, or pass {limit}"),
    "ISOLATION_NO_ROOM": (_C.MEMORY, "the tensors of the call take {value} bytes of shared memory, allowed {limit}", "raise isolation.<backend>.memory_mb"),
    "ISOLATED": (_C.SELECTION, "isolated: runs in a process of its own ({value})", ""),
    "JIT_TOOLCHAIN_MISSING": (_C.JIT, "cannot compile its kernels: {value} not found", "install {value}"),
    "JIT_TIMEOUT": (_C.JIT, "did not compile within {limit} s", "raise LAYERZERO_JIT_TIMEOUT or run lz.warmup beforehand"),
    "PLAN_SIGNATURE_INVALID": (_C.PLAN, "the dispatch table is not signed by the trusted key: {value}", "solve and sign it again, or correct LAYERZERO_TABLE_KEY"),
    "PERF_NOT_BELIEVED": (_C.CACHE, "{value} measured times of this call do not count here: {limit}", "run lz tune on this machine"),
    "PERF_RANKED_BY": (_C.CACHE, "ranked by times of another {limit}, {value}", "run lz tune here for times of this device"),
    "PERF_DRIFTED": (_C.CACHE, "{value} us now, {limit} us when it was measured", "it was measured again; look for heat, other loads or a new driver"),
    "TUNING_IMPOSSIBLE": (_C.INPUT, "{value} cannot be measured: {limit}", "leave it out, or measure it from Python with its own inputs"),
    "HUB_DISABLED": (_C.HUB, "the hub is switched off by policy", "set hub.enabled, or remove the kernel from the mapping"),
    "HUB_NOT_ALLOWED": (_C.HUB, "{value} is not on the allowlist", "add the exact id to hub.allow in a user-level or named policy file"),
    "HUB_DENIED": (_C.HUB, "{value} is denied by {limit}", "deny beats allow: remove the deny entry if the kernel is wanted"),
    "HUB_ID_INVALID": (_C.HUB, "{value} is no repository id", "use owner/name in plain ASCII letters, digits, '.', '_' and '-'"),
    "HUB_ENDPOINT_REFUSED": (_C.HUB, "endpoint {value} is not one of {limit}", "add it to hub.endpoints if it is yours"),
    "HUB_PUBLISHER_UNTRUSTED": (_C.HUB, "publisher {value} is not a trusted kernel publisher", "ask the publisher, or set hub.require_trusted_publisher to false"),
    "HUB_DEPENDENCY_NOT_ALLOWED": (_C.HUB, "dependency {value} of {limit} is not on the allowlist", "every kernel a kernel depends on is allowed by name, or none of them loads"),
    "HUB_REPO_REDIRECTED": (_C.HUB, "the hub answers for {value} with {limit}", "lock the repository under its new name after looking at it"),
    "HUB_PATH_UNSAFE": (_C.HUB, "path {value} is refused: {limit}", "the publisher must rename the file"),
    "HUB_PATH_COLLISION": (_C.HUB, "paths {value} and {limit} are one file on some machines", "the publisher must rename one of them"),
    "HUB_FILE_KIND_REFUSED": (_C.HUB, "{value} is refused: compiled bytecode and path files are never kernels", "the publisher must remove it"),
    "HUB_DIGEST_INCOMPLETE": (_C.HUB, "{value} is not covered by the digest of its metadata", "the publisher must build the kernel again"),
    "HUB_HASH_MISMATCH": (_C.HUB, "{value} does not have the hash that was announced ({limit})", "the file was changed on the way or at the hub: do not use it"),
    "HUB_SIZE_MISMATCH": (_C.HUB, "{value} bytes came, {limit} were announced", "the transfer was cut or lied: try again"),
    "HUB_TOO_LARGE": (_C.HUB, "{value} bytes are more than the limit of {limit}", "raise hub.max_bytes if the kernel is really that large"),
    "HUB_TIMEOUT": (_C.HUB, "the hub did not answer within {limit} s ({value})", "try again, or install from the store with --frozen"),
    "HUB_UNREACHABLE": (_C.HUB, "the hub cannot be reached: {value}", "install from the store with --frozen, or check the endpoint"),
    "HUB_ETAG_INVALID": (_C.HUB, "the ETag {value} is no hash", "the server is not a kernel hub, or lies: do not use it"),
    "HUB_COMMIT_MISMATCH": (_C.HUB, "the server answered for commit {value}, asked was {limit}", "the server lies about what it sends: do not use it"),
    "HUB_BRANCH_MOVED": (_C.HUB, "branch {value} now points elsewhere than the lock ({limit})", "look at the change, then lock again"),
    "HUB_REVISION_MISSING": (_C.HUB, "there is no {value} in {limit}", "choose a version that exists: `lz hub list` shows the locked ones"),
    "HUB_VARIANT_MISSING": (_C.HUB, "no build of {value} fits this machine ({limit})", "ask the publisher for a build, or use another kernel"),
    "HUB_METADATA_INVALID": (_C.HUB, "metadata.json of {value} is wrong: {limit}", "the publisher must build the kernel again"),
    "HUB_ID_TAKEN": (_C.HUB, "the kernel calls itself {value}, a name that is taken by {limit}", "the publisher must choose an id of its own"),
    "HUB_NAMESPACE_FOREIGN": (_C.HUB, "the kernel registers ops in {value}, which is not its own ({limit})", "the publisher must use a namespace named after the kernel's id"),
    "HUB_NAMESPACE_DUPLICATE": (_C.HUB, "ops namespace {value} is used by {limit}", "two kernels with one namespace cannot live in one process: lock only one"),
    "HUB_DISPATCHER_CHANGED": (_C.HUB, "loading the kernel changed the existing op {value}", "a kernel may add ops, never replace them: do not use it"),
    "HUB_FUNCTION_REPLACED": (_C.HUB, "loading the kernel replaced {value}", "a kernel may bring functions, never put them in the place of others: do not use it"),
    "HUB_MODE_LEFT_ON": (_C.HUB, "loading the kernel left a setting of torch changed: {value}", "the publisher must set such things inside the kernel's functions, and back"),
    "HUB_DECOMPOSITION_CHANGED": (_C.HUB, "loading the kernel changed how torch traces or decomposes {value}", "a kernel may do that for its own ops only: do not use it"),
    "HUB_ABI_GLIBC": (_C.HUB, "{value} is newer than {limit}", "the kernel must be built for manylinux_2_28"),
    "HUB_ABI_SYMBOL": (_C.HUB, "symbol {value} is not in Python's stable ABI", "the kernel must be built with the limited API"),
    "HUB_ELF_INVALID": (_C.HUB, "{value} is no readable shared object: {limit}", "the publisher must build the kernel again"),
    "HUB_RUNPATH": (_C.HUB, "{value} carries the search path {limit}", "the publisher must link without RPATH and RUNPATH"),
    "HUB_NEEDED_REFUSED": (_C.HUB, "{value} asks for the library {limit}", "add it to hub.needed_libs if it may be loaded"),
    "HUB_PROBE_FAILED": (_C.HUB, "loading the kernel in a process of its own failed: {value}", "the kernel does not work here"),
    "HUB_STORE_TAMPERED": (_C.HUB, "{value} in the store is not what was locked: {limit}", "run `lz hub install` again; find out who writes to the store"),
    "HUB_STORE_EXTRA_FILE": (_C.HUB, "{value} lies in the store and is not locked", "run `lz hub install` again; find out who writes to the store"),
    "HUB_STORE_MISSING_FILE": (_C.HUB, "{value} is missing from the store", "run `lz hub install` again"),
    "HUB_STORE_LINK": (_C.HUB, "{value} in the store is a link", "run `lz hub install` again; find out who writes to the store"),
    "HUB_STORE_KIND": (_C.HUB, "{value} in the store is {limit}", "run `lz hub install` again; find out who writes to the store"),
    "HUB_STORE_MODE": (_C.HUB, "{value} can be written by others (mode {limit})", "chmod go-w, and find out who changed it"),
    "HUB_STORE_OWNER": (_C.HUB, "{value} belongs to uid {limit}", "the store must belong to the user who loads from it, or to root"),
    "HUB_STORE_PARENT": (_C.HUB, "{value} lies above the store, and others could put another store in its place: {limit}", "chmod go-w and chown it, or move the store: hub.store"),
    "HUB_STORE_UNREADABLE": (_C.HUB, "{value} cannot be read: {limit}", "restore it, or look at what it says and remove it; what was quarantined is not forgotten by accident"),
    "HUB_LOCAL_OVERRIDE": (_C.HUB, "LOCAL_KERNELS is set and would replace locked kernels", "unset LOCAL_KERNELS"),
    "HUB_LOCK_INVALID": (_C.HUB, "the lock is wrong at {value}: {limit}", "restore the lock from version control, or lock again"),
    "HUB_LOCK_MISSING": (_C.HUB, "there is no lock at {value}", "run `lz hub lock`, or name the lock in hub.lock"),
    "HUB_LOCK_STALE": (_C.HUB, "the digest of {value} is not that of its files", "the lock was edited: restore it from version control"),
    "HUB_NOT_LOCKED": (_C.HUB, "{value} is not in the lock", "run `lz hub lock {value}`"),
    "HUB_NOT_INSTALLED": (_C.HUB, "{value} is locked and not in the store", "run `lz hub install`"),
    "HUB_ROLLBACK": (_C.HUB, "{value} is older than {limit}, which was locked before", "lock the newer build, or pass --allow-rollback"),
    "HUB_REVOKED": (_C.HUB, "digest {value} is revoked", "lock another build"),
    "HUB_SIGNATURE_MISSING": (_C.HUB, "{value} has no signature and policy asks for one", "run `lz hub sign` with a key the policy knows"),
    "HUB_SIGNATURE_BAD": (_C.HUB, "the signature of {value} does not hold: {limit}", "the file was changed after signing: restore it"),
    "HUB_SIGNATURE_FOREIGN": (_C.HUB, "{value} is signed by a key the policy does not know", "add the public key to hub.signing_keys if it is yours"),
    "HUB_POLICY_INVALID": (_C.HUB, "hub.{value}: {limit}", "see docs/hub.md for the keys of [hub]"),
    "DEVICE_POISONED": (_C.HARDWARE, "this process can compute nothing more on {limit}: {value}", "restart the process; the kernel is in quarantine and skipped at the next start, see lz quarantine list"),
    "KERNEL_CRASHED": (_C.HEALTH, "a process died while it ran: {value}", "fix the cause, then lift it with lz quarantine clear"),
    "CANARY_SHADOW": (_C.SELECTION, "a canary: runs in shadow until {limit} comparisons with the kernel in charge were good", "it is promoted when all were good; take it out of canary.kernels to use it now"),
    "CANARY_FAILED": (_C.HEALTH, "a canary that did not hold: {value}", "look into it, then take it out of canary.kernels or deny it"),
    "NATIVE_KERNELS_MISSING": (_C.BACKEND, "the package was installed without its compiled kernels: {value}", "install g++ or clang++, then run: python -m layerzero_cpu.build"),
    "PERF_FILE_FOREIGN": (_C.CACHE, "{value} was written by something else and stays as it is", "name another file in LAYERZERO_PERFDB or perfdb.path"),
    "PLAN_KEY_PUBLIC": (_C.PLAN, "the key {value} is or may be a public key, and no shared secret: {limit}", "name an ed25519 key in PEM form, or a secret of 16 bytes or more that only its owner can read (chmod 600)"),
    "HUB_LOCK_EXPIRED": (_C.HUB, "the lock expired on {value}", "look at the kernels, then renew it: `lz hub lock`, and `lz hub sign` where it is signed"),
    "HUB_LOCK_UNNAMED": (_C.HUB, "the unsigned lock {value} merely lies in the working directory", "name it in hub.lock of a user-level or explicitly named policy file, or sign it with a key of hub.signing_keys"),
    "HUB_LOCK_INCOMPLETE": (_C.HUB, "the lock holds {value} and not {limit}, which it depends on", "lock it again: `lz hub lock {value}`"),
    "HUB_COMMIT_UNREACHABLE": (_C.HUB, "commit {value} is on no branch or tag of {limit}", "lock the kernel yourself or use a signed lock: such a commit may be anybody's pull request"),
    "HUB_ID_MISMATCH": (_C.HUB, "the lock says {value}, the build's metadata says {limit}", "the lock was edited: restore it from version control, or lock again"),
    "HUB_KEY_INVALID": (_C.HUB, "key {value} cannot be used: {limit}", "give an EC key in PEM form: a private one to sign, its public one in hub.signing_keys"),
    "HUB_WRITE_FAILED": (_C.HUB, "{value} could not be written: {limit}", "free space or change the permissions, then try again; what was there before still stands"),
    "HUB_DESCRIPTOR_INVALID": (_C.HUB, "layerzero.json of {value} is wrong: {limit}", "the publisher must mend it; an entry of hub.kernels takes its place"),
    "HUB_PUBLISHER_SIGNATURE": (_C.HUB, "the publisher's signature of {value} does not hold: {limit}", "do not use it; if the signer is the publisher's, add its identity to hub.publishers"),
    "HUB_STILL_NEEDED": (_C.HUB, "{value} is needed by {limit}", "remove that one as well"),
    "TRANSFORM_UNSUPPORTED": (_C.FEATURE, "{value} knows nothing of vmap, forward-mode AD and the like, and {limit} may not run here", "leave out backend= or the lock for this call, or allow {limit}"),
}
