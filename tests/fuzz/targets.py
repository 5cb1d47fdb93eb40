"""What reads bytes from outside, one target each: see `tools.fuzz`."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from layerzero.errors import LayerZeroError
from layerzero.isolation import wire
from layerzero.isolation.wire import Malformed, unpack
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.plugin.manager import load_plugins
from layerzero.policy.layers import merge
from layerzero.policy.load import from_bytes
from layerzero.policy.rules import evaluate
from layerzero.registry.capabilities import load_capabilities
from layerzero.registry.kinds import decoded
from layerzero.runtime.current import builtin_ops
from layerzero.selection.engine import select
from layerzero.selection.world import World
from layerzero.tables.file import load_table, table_json
from tools.fuzz import Target

__all__ = ["TARGETS"]


@cache
def world() -> World:
    """The built-in kernels, whatever else is installed."""
    import layerzero.ops  # noqa: F401  registers the ops

    return World(registry=load_plugins(entry_points=()).registry, ops=builtin_ops)


def code(error: LayerZeroError) -> str:
    assert error.reasons and error.code == error.reasons[0].code and str(error)
    return str(error.code.value)


# -- policy ------------------------------------------------------------------------------------------------------
def policy(data: bytes) -> str:
    """A policy file, YAML or TOML by its first byte; a policy that is accepted is evaluated."""
    name = "layerzero.toml" if data[:1] == b"T" else "layerzero.yaml"
    body = data[1:] if data[:1] in (b"T", b"Y") else data
    try:
        made = merge([from_bytes(body, name, trusted=len(body) % 2 == 0)])
        evaluate(made, "attention", "sdpa.attention.flash", "sdpa", {"head_dim": 64, "dtype": "float16"}.get)
        if len(body) % 8 == 0:
            assert made.policy_hash == merge([from_bytes(body, name)]).policy_hash
    except LayerZeroError as error:
        return code(error)
    return "ok"


# -- context -----------------------------------------------------------------------------------------------------
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "bool", "complex64", "float8_e4m3fn")
_OPTIONS = frozenset(
    ("layout", "dropout_p", "is_causal", "scale", "window", "softcap", "return_lse", "backend", "requires_grad")
)


def _tensor(given: Any) -> Any:
    """A tensor without memory where a shape is given; anything else is passed on as it is."""
    if not isinstance(given, dict) or not isinstance(given.get("shape"), list):
        return given
    shape = [size if type(size) is int and 0 <= size < 2**20 else 1 for size in given["shape"][:6]]
    dtype = given.get("dtype")
    word = dtype if isinstance(dtype, str) and dtype in _DTYPES else "float32"
    made = torch.empty(shape, dtype=getattr(torch, word), device="meta")
    return made.mT if given.get("turned") and made.ndim > 1 else made


def context(data: bytes) -> str:
    """A call of attention as JSON: tensors by shape, options by name; one that is described is selected for."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(given, dict):
        return "no JSON"
    options = {name: given[name] for name in _OPTIONS & given.keys()}
    if "attn_mask" in given:
        options["attn_mask"] = _tensor(given["attn_mask"])
    if "alibi_slopes" in given:
        options["alibi_slopes"] = _tensor(given["alibi_slopes"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ctx = Context.from_tensors(
                _tensor(given.get("query")), _tensor(given.get("key")), _tensor(given.get("value")),
                device=_cpu(), **options,
            )  # fmt: skip
        assert hash(ctx) == hash(ctx) and ctx == ctx
        json.dumps(ctx.to_json())
        decision = select(ctx, world())
        assert decision.chosen in (*decision.ranking, "")
    except LayerZeroError as error:
        return code(error)
    return "ok"


@cache
def _cpu() -> DeviceSpec:
    return DeviceSpec.detect("cpu")


# -- kernel spec and capabilities --------------------------------------------------------------------------------
@cache
def _calls() -> list[Context]:
    q = torch.empty(2, 4, 16, 64, device="meta")
    return [
        Context.from_tensors(q, layout="BHSD", device=_cpu()),
        Context.from_tensors(q.half(), layout="BHSD", is_causal=True, window=3, device=_cpu()),
    ]


def kernel_spec(data: bytes) -> str:
    """One kernel's entry in an otherwise valid descriptor; a kernel that is accepted is checked against calls."""
    try:
        entry = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    document = {"schema_version": "1.0", "backend": "fuzz", "platforms": ["cpu", "cuda"], "ops": {"attention": [entry]}}
    try:
        (kernel,) = load_capabilities(document).kernels
        for ctx in _calls():
            for why in kernel.check(ctx):
                assert why.message
            kernel.workspace_bytes(ctx)
        json.dumps(kernel.to_json())
    except LayerZeroError as error:
        return code(error)
    return "ok"


def capabilities(data: bytes) -> str:
    """A whole descriptor."""
    try:
        made = load_capabilities(decoded(data))
        assert len({kernel.kernel_id for kernel in made.kernels}) == len(made.kernels)
    except LayerZeroError as error:
        return code(error)
    return "ok"


# -- dispatch table ----------------------------------------------------------------------------------------------
@cache
def _scratch() -> Path:
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return Path(tempfile.mkdtemp(prefix="layerzero-fuzz-", dir=shared)) / "table.json"


def dispatch_table(data: bytes) -> str:
    """A table file; one that is accepted is written out again the same."""
    path = _scratch()
    path.write_bytes(data)
    try:
        table = load_table(path)
        assert table_json(table)["content_hash"] == table.content_hash
    except LayerZeroError as error:
        return code(error)
    return "ok"


def _rehashed(data: bytes) -> bytes:
    try:
        tree = json.loads(data)
        content = {key: value for key, value in tree.items() if key not in ("content_hash", "signature")}
        text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        return json.dumps({**tree, "content_hash": hashlib.sha256(text).hexdigest()}).encode()
    except (ValueError, AttributeError, RecursionError):
        return data


# -- lockfile ----------------------------------------------------------------------------------------------------
def lockfile(data: bytes) -> str:
    """The hub's lock; one that is accepted is written out again the same."""
    from layerzero_hub import lockfile as hub

    try:
        lock = hub.parse(data)
        again = json.dumps(lock.to_json()).encode()
        assert hub.parse(again).to_json() == lock.to_json()  # written in an order of its own
    except LayerZeroError as error:
        return code(error)
    return "ok"


def _redigested(data: bytes) -> bytes:
    try:
        tree = json.loads(data)
        for kernel in tree["kernels"]:
            for variant in kernel["variants"].values():
                text = json.dumps(variant["files"], sort_keys=True, separators=(",", ":")).encode()
                variant["digest"] = f"sha256:{hashlib.sha256(text).hexdigest()}"
        return json.dumps(tree).encode()
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return data


# -- messages of isolated backends -------------------------------------------------------------------------------
def ipc(data: bytes) -> str:
    """A frame of the channel to an isolated backend, and the values in it; a bare JSON object is framed first."""
    if data[:1] == b"{":
        data = _framed(data)
    try:
        frame = wire.decode(wire.head(data[: wire.HEADER_BYTES]), data[wire.HEADER_BYTES :])
    except wire.WireError:
        return "no frame"
    buffer = torch.zeros(256, dtype=torch.uint8)

    def find(placed: Any) -> Any:
        if placed.offset + placed.nbytes > buffer.numel():
            raise Malformed("outside")
        return buffer

    found = "frame"
    for value in frame.body.values():
        for item in value if isinstance(value, list) else [value]:
            try:
                unpack(item, find)
                found = "values"
            except Malformed:
                found = "malformed values"
    return found


def _framed(body: bytes) -> bytes:
    """These bytes under a header that fits them, as a child that lies would send them."""
    kind = list(wire.Kind)[len(body) % len(wire.Kind)]
    fields = wire.encode(kind, 7, {})[: wire.HEADER_BYTES]
    start = wire._FIELDS.unpack_from(fields)
    fields = wire._FIELDS.pack(*start[:-1], len(body))
    return b"".join((fields, wire._CRC.pack(zlib.crc32(body, zlib.crc32(fields))), body))


_POLICY_WORDS = (
    b"locks:", b"rules:", b"match:", b"when:", b"attention*", b"deny", b"prefer", b"isolation", b"breaker",
    b"cooldown_s", b"distributed", b"tp_invariant", b"version: 1", b"- ", b"  ", b"\n", b"null", b">=64",
)  # fmt: skip
_SPEC_WORDS = (
    b"kernel_id", b"function", b"dtypes", b"head_dim", b"multiple_of", b"workspace", b"batch*head_dim", b"layouts",
    b"min_sm", b"priority", b"features", b"1e308", b"**", b"graph_safe", b"platforms",
)  # fmt: skip

TARGETS = (
    Target("policy", policy, ("layerzero.policy",), _POLICY_WORDS),
    Target("context", context, ("layerzero.model.describe", "layerzero.model.context", "layerzero.selection")),
    Target(
        "kernel_spec",
        kernel_spec,
        ("layerzero.registry", "layerzero.model.kernel", "layerzero.model.formula"),
        _SPEC_WORDS,
    ),
    Target("capabilities", capabilities, ("layerzero.registry",), _SPEC_WORDS),
    Target("dispatch_table", dispatch_table, ("layerzero.tables",), (b"plans", b"bucket", b"sizes"), _rehashed),
    Target("lockfile", lockfile, ("layerzero_hub",), (b"variants", b"digest", b"files"), _redigested),
    Target("ipc", ipc, ("layerzero.isolation",), (b'{"f":"0x1p+0"}', b'{"t":[]}', b'{"u":[]}', b'{"l":[]}')),
)
