"""`lz.patch` for models of transformers: which parts, with what, and the way back."""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from torch import Tensor, nn

from layerzero import get_config
from layerzero.errors import invalid
from layerzero_models.patching import Changes, PatchReport, Record, apply, record_of, report_of, restore
from layerzero_models.transformers import attending, enabling, parts, probes, quick, rewriting
from layerzero_models.transformers.enabling import NAME, choose, enable_transformers
from layerzero_models.transformers.parts import Linears, Neighbours, few_rows, unfit

_log = logging.getLogger("layerzero.transformers")

# The entry points by which packages bring such steps.
STEPS = "layerzero.transformers"
_GATES = (("gate_proj", "up_proj", "down_proj", "act_fn"), ("wi_0", "wi_1", "wo", "act"))
_QKV = ("q_proj", "k_proj", "v_proj")


class _Record(Record):
    """What was patched, and how: every product, and products of several layers in one."""

    def __init__(self, everything: bool, joined: bool) -> None:
        super().__init__()
        self.everything, self.joined = everything, joined
        self.neighbours: list[tuple[str, Any, Neighbours]] = []  # with the part they are of, and its name

    def undo(self) -> None:
        for _, _, neighbours in self.neighbours:
            neighbours.part()
        super().undo()


def patch(
    model: Any,
    *,
    skip: Collection[str] = (),
    everything: bool = False,
    joined: bool = True,
    graphs: bool = False,
    graph_memory: int | None = None,
) -> PatchReport:
    """Let a model (or pipeline) of transformers compute with LayerZero's ops.

    skip        kinds of parts that are left alone, see KINDS
    everything  also linear layers and embeddings that selection would give to torch anyway; where `batch_invariant` is
                set always
    joined      False: one op a part; no products of several layers in one, no sum together with its norm
    graphs      decode steps of `generate` are captured as CUDA graphs; a patched model may be given to add them
    graph_memory  bytes that caches and graphs may keep between calls, by default a quarter of the device's memory
    """
    # Steps of other packages, `step(model, record)`: parts that call ops of theirs.
    brought = {entry.name: entry for entry in entry_points(group=STEPS)}
    kinds = (*KINDS, *brought)
    wrong = set(skip) - set(kinds) if not isinstance(skip, str) else {skip}
    if wrong:
        message = f"skip={sorted(wrong)}, expected some of {', '.join(kinds)}"
        raise invalid("VALUE_INVALID", f"skip={skip}", ", ".join(kinds), message)
    model = _model_of(model)
    known = record_of(model)
    if known is not None and known.report is not None:
        if graphs:
            _graphs(model, known, graph_memory)
            known.report = replace(known.report, left=tuple(known.left))
        return known.report
    version = enable_transformers()
    steps = _OWN_STEPS | {kind: entry.load() for kind, entry in brought.items() if kind not in skip}
    left_out = {*skip, *(() if joined else ("projections", "residual"))}
    chosen = [step for kind, step in steps.items() if kind not in left_out]
    chosen.append(_compiled)
    if graphs:
        chosen.append(partial(_graphs, memory=graph_memory))
    everything = everything or get_config().batch_invariant  # torch's own products promise nothing
    report = apply(model, _Record(everything, joined), "transformers", version, *chosen)
    if not report.patched:
        _log.warning("lz.patch found nothing to patch in %s: %s", type(model).__name__, report)
    return report


def unpatch(model: Any) -> PatchReport | None:
    """Undo `patch`; returns what had been patched, None for a model that was not."""
    return restore(_model_of(model))


def patched(model: Any) -> PatchReport | None:
    """What `patch` did to this model; None for one that is not patched."""
    model = _model_of(model)
    report, stepper = report_of(model), vars(model).get(parts.STATE)
    return report if report is None or stepper is None else replace(report, graphs=stepper.report(model))


def _model_of(given: Any) -> Any:
    """The model itself, or that of a pipeline."""
    model = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    if not isinstance(model, nn.Module):
        raise invalid("TYPE_INVALID", type(given).__name__, "a model or a pipeline of transformers")
    return model


def _forward(record: _Record, name: str, module: Any, op: str, function: Callable[..., Any], state: Any = None) -> None:
    """Give a part another forward, with what that needs to know, and write down the op it calls now; "" for none."""
    if state is not None:
        record.changes.set(module, parts.STATE, state)
    record.changes.set(module, "forward", types.MethodType(function, module))
    if op:
        record.did(name, module, op)


def _free(record: _Record, name: str, module: Any) -> bool:
    """A forward on the instance is somebody else's (accelerate, another patch), or ours from an earlier step."""
    if "forward" not in vars(module):
        return True
    if not hasattr(module, parts.STATE):
        record.leave(name, module, "it has a forward of its own on the instance")
    return False


# -- attention and experts: transformers' own interfaces ---------------------------------------------
def _attention(model: Any, record: _Record) -> None:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation is None or not hasattr(model, "set_attn_implementation"):
        record.leave("", model, "it has no attention implementation to choose")
        return
    if not model._can_set_attn_implementation():
        record.leave("", model, "its attention does not go through AttentionInterface")
        return
    choose(model, "attn", record.changes)
    for name, module in model.named_modules():
        if hasattr(module, "config") and any(map(_asks_interface, type(module).__mro__)):
            if module.config._attn_implementation == NAME:
                record.did(name, module, "attention")
            else:
                record.leave(name, module, f"transformers keeps its {module.config._attn_implementation} attention")


def _asks_interface(kind: type) -> bool:
    code = getattr(inspect.unwrap(vars(kind).get("forward", abs)), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _experts(model: Any, record: _Record) -> None:
    fit = False
    for name, module in model.named_modules():
        if not hasattr(type(module), "_apply_gate") or not hasattr(module, "config"):
            continue
        options = enabling.options_of(module)
        if isinstance(options, str):
            record.leave(name, module, options)
            continue
        fit = True
        record.changes.set(module, enabling.OPTIONS, options)
        record.did(name, module, "moe")
    if fit:
        choose(model, "experts", record.changes)


# -- norms -------------------------------------------------------------------------------------------
def _norms(model: Any, record: _Record) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if type(module).forward is nn.LayerNorm.forward and isinstance(module, nn.LayerNorm):
            if len(module.normalized_shape) != 1:
                record.leave(name, module, "it normalises over several axes")
            elif _free(record, name, module):
                _forward(record, name, module, "layer_norm", parts.layer_norm, quick.Facts(module._parameters))
        elif kind.endswith(("RMSNorm", "RmsNorm")) or kind == "T5LayerNorm":
            if [*module._parameters] == ["weight"] and _free(record, name, module):
                _rms(name, module, record)


def _rms(name: str, module: Any, record: _Record) -> None:
    eps = next((vars(module)[word] for word in ("variance_epsilon", "eps") if word in vars(module)), None)
    weight = module.weight
    if eps is None or weight is None or weight.ndim != 1:
        record.leave(name, module, "it has no epsilon or no weight")
    elif weight.device.type == "meta":
        record.leave(name, module, "the weights are on the meta device")
    elif (found := probes.norm_of(module, eps)) is None:
        record.leave(name, module, "it computes something else than RMSNorm")
    else:
        op, rules = found
        state = parts.Rms(module, op == "gemma_rms_norm", eps, rules)
        alike = {(dtype, dtype) for dtype in probes.DTYPES} <= state.same
        record.changes.set(module, parts.GEMMA, state.gemma if alike else None)
        record.changes.set(module, parts.EPS, eps)
        _forward(record, name, module, op, parts.rms_norm, state)


# -- rotary positions --------------------------------------------------------------------------------
def _rope(model: Any, record: _Record) -> None:
    word = "apply_rotary_pos_emb"
    known: dict[Any, Any] = {}  # their function -> ours in its place, None where it turns otherwise
    made: dict[Any, Any] = {}  # one function for all layers: each has globals of its own, which Dynamo guards
    for name, module in model.named_modules():
        forward = type(module).forward
        code = getattr(forward, "__code__", None)
        if code is None or word not in code.co_names or not _free(record, name, module):
            continue
        own = forward.__globals__.get(word)
        device = next((p.device for p in module.parameters()), None)
        if device is None or device.type == "meta":
            record.leave(name, module, "the weights are on the meta device")
            continue
        if own not in known:
            rules = {} if own is None else probes.rotates_halves(own, device)
            known[own] = quick.rotation(own, frozenset(rules)) if rules else None
        if known[own] is None:
            record.leave(name, module, "it turns its heads otherwise than by halves")
            continue
        try:
            if forward not in made:
                made[forward] = rewriting.renamed(forward, **{word: known[own]})
        except rewriting.NotRewritable as why:
            record.leave(name, module, f"rope: {why}")
            continue
        _forward(record, name, module, "rope", made[forward])


# -- projections of one input ------------------------------------------------------------------------
def _mlps(model: Any, record: _Record) -> None:
    for name, module in model.named_modules():
        names = next((n for n in _GATES if all(hasattr(module, part) for part in n)), None)
        if names is None or not all(isinstance(getattr(module, part), nn.Module) for part in names[:3]):
            continue
        if _free(record, name, module):
            _gated(name, module, names, record)


def _gated(name: str, module: Any, names: tuple[str, str, str, str], record: _Record) -> None:
    gate, up, down = (getattr(module, part) for part in names[:3])
    why = unfit((gate, up))
    found = None if why else probes.activation_of(getattr(module, names[3]), gate.weight)
    if not why and found is None:
        why = f"no op has its activation {type(getattr(module, names[3])).__name__}"
    if not why:
        why = probes.gated_mlp(module, gate, up, down, getattr(module, names[3]))
    if why or found is None:
        record.leave(name, module, why)
        return
    op, rest, _ = found
    if not record.joined:
        _forward(record, name, module, op, parts.gated_apart, parts.Apart(names[:3], op, rest))
        return
    casts = gate.weight.dtype is not down.weight.dtype
    both = Neighbours((gate, up))
    record.neighbours.append((name, module, both))
    # Under `batch_invariant` a few rows take the way that many take: rounded otherwise, they were other bits.
    few = 0 if get_config().batch_invariant else few_rows("mlp", both.weight)
    state = parts.Gated(both, names[2], *found, casts, few)
    _forward(record, name, module, op, parts.gated, state)


def _projections(model: Any, record: _Record) -> None:
    for name, module in model.named_modules():
        if not all(hasattr(module, part) for part in _QKV):
            continue
        found = [getattr(module, part) for part in _QKV]
        why = unfit(found) or rewriting.other_inputs(type(module))
        if why:
            record.leave(name, module, f"one product for {', '.join(_QKV)}: {why}")
            continue
        neighbours = Neighbours(found)
        record.neighbours.append((name, module, neighbours))
        for place, part in enumerate(found):
            forward = parts.second if place else parts.first
            _forward(record, name, part, "", forward, parts.Projected(neighbours, place))
        record.did(name, module, " + ".join(_QKV) + " in one product")


# -- products: last, since it asks what was joined ----------------------------------------------------
def _linears(model: Any, record: _Record) -> None:
    found = Linears(record.everything)
    for name, module, neighbours in record.neighbours:
        if found.worth(neighbours.weight, neighbours.bias):
            neighbours.product = quick.product
            record.did(name, module, "linear")
    for name, module in found.single(model, [neighbours for _, _, neighbours in record.neighbours]):
        if _free(record, name, module):
            _forward(record, name, module, "linear", parts.linear, parts.SINGLE)
    if record.everything:
        for name, module in model.named_modules():
            if type(module).__name__ == "Conv1D" and _free(record, name, module):
                _forward(record, name, module, "linear", parts.conv1d, parts.SINGLE)


def _embeddings(model: Any, record: _Record) -> None:
    for name, module in model.named_modules() if record.everything else ():
        if type(module) is nn.Embedding and module.max_norm is None and _free(record, name, module):
            _forward(record, name, module, "embedding", parts.embedding, parts.SINGLE)


# -- the residual stream -----------------------------------------------------------------------------
def _residual(model: Any, record: _Record) -> None:
    made: dict[Any, Any] = {}  # as in `_rope`
    for stack, after in rewriting.stacks(model):
        for i, layer in enumerate(stack):
            name = next(n for n, m in model.named_modules() if m is layer)
            found = rewriting.residual_norms(type(layer).forward)
            norms = [word for word in found if rewriting.is_rms(getattr(layer, word, None))]
            if not norms or not _free(record, name, layer):
                continue
            following = rewriting.first_norm(stack[i + 1]) if i + 1 < len(stack) else after
            case = (type(layer).forward, tuple(norms))
            try:
                if case not in made:
                    made[case] = rewriting.with_residuals(*case, parts.add_norm, parts.end)
            except rewriting.NotRewritable as why:
                record.leave(name, layer, f"sum and norm in one: {why}")
                continue
            _forward(record, name, layer, "add_rms_norm", made[case], parts.Following(following))


_OWN_STEPS: dict[str, Callable[[Any, _Record], None]] = {
    "attention": _attention, "experts": _experts, "norm": _norms, "rope": _rope, "mlp": _mlps,
    "projections": _projections, "residual": _residual, "linear": _linears, "embedding": _embeddings,
}  # fmt: skip
# What can be left out with `skip=`; also what other packages bring, by the names of their steps.
KINDS = tuple(_OWN_STEPS)


# -- compiled steps ------------------------------------------------------------------------------------
def _compiled(model: Any, record: Record) -> None:
    from transformers import PreTrainedModel

    from layerzero_models.transformers import compiled

    own: Any = getattr(PreTrainedModel, "get_compiled_call", None)
    if own is not None and getattr(type(model), "get_compiled_call", None) is own:
        record.changes.set(model, compiled.STATE, compiled.Steps())
        record.changes.set(model, "get_compiled_call", types.MethodType(compiled.get_compiled_call, model))


# -- captured steps ------------------------------------------------------------------------------------
def _graphs(model: Any, record: Record, memory: int | None) -> None:
    from layerzero_models.transformers import graphs  # with its caches, which are classes of transformers

    if parts.STATE in vars(model):
        return
    why = graphs.unfit(model)
    if why:
        record.leave("", model, f"graphs: {why}")
        return
    record.changes.set(model, parts.STATE, graphs.Stepper(memory))
    graphs.stop_late()
    record.changes.set(model, "forward", types.MethodType(graphs.forward_of(type(model)), model))
    record.changes.set(model, "generate", types.MethodType(graphs.generate_of(type(model)), model))
    record.changes.set(model, "_prepare_cache_for_generation", types.MethodType(graphs.prepare_cache, model))


@contextmanager
def redirected(call: Callable[..., Any]) -> Iterator[None]:
    """Within the block models that are patched inside it call an op as `call(op, *args, **kwargs)`.

    `lz verify` names and watches every kernel so.
    """

    def norm(gemma: bool, x: Tensor, weight: Tensor, eps: float, facts: Any) -> Any:
        return call("gemma_rms_norm" if gemma else "rms_norm", x, weight, eps)

    def add_norm(gemma: bool, x: Tensor, residual: Tensor, weight: Tensor, eps: float, facts: Any) -> Any:
        return call("gemma_add_rms_norm" if gemma else "add_rms_norm", x, residual, weight, eps)

    def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, facts: Any) -> Any:
        return call("layer_norm", x, weight, bias, eps)

    def activate(op: str, x: Tensor, rest: tuple[str, ...]) -> Any:
        return call(op, x, *rest)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return call("rope", q, k, cos, sin, layout="BHSD" if unsqueeze_dim == 1 else "BSHD")

    changes = Changes()
    try:
        for function in (norm, add_norm, layer, activate, rotate):
            changes.set(quick, function.__name__, function)
        changes.set(quick, "product", partial(call, "linear"))
        changes.set(quick, "public", call)
        changes.set(attending, "attention", partial(call, "attention"))
        changes.set(enabling, "moe", partial(call, "moe"))
        changes.set(attending, "paged_attention", partial(call, "paged_attention"))
        yield
    finally:
        changes.undo()
