"""`lz.patch(model, graphs=True)`: decode steps of `generate` as captured CUDA graphs.

Methods of the model are replaced on the instance. `_prepare_cache_for_generation`, which `generate` asks for a
cache, gives it buffers that stay where they are (buffers.py); where the call, the model or the device rules graphs out,
transformers makes its own cache as ever and the reason is counted for `lz.patched`. `forward` takes the steps of one
token over such a cache: captured once for a batch size and a number of places, then replayed. All else is the model's
own forward over the same cache, and what `generate` does with the logits stays transformers' own. A greedy call without
processors or criteria of the caller's is asked whether to stop one step late, as transformers does on devices it knows
to gain by it: the host has the next step ready when the device needs it.

The first two steps of a capture run both ways: a model whose replayed logits are others than its own stays on the plain
path. Weights that were moved or replaced, and a change of what LayerZero would select, make captures anew at the next
call of `generate`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from layerzero import capture_graph
from layerzero.dispatch.late import current_world
from layerzero.errors import one_line
from layerzero_models.patching import GraphReport
from layerzero_models.transformers.attending import Note, with_note
from layerzero_models.transformers.buffers import BufferCache, Buffers, Lender, StepCache
from layerzero_models.transformers.enabling import NAME
from layerzero_models.transformers.parts import STATE

CHECKED = 2  # steps that run both ways
REST = ("use_cache", "logits_to_keep", "return_dict")  # what `generate` says besides tensors
_NEAR = {True: 0.01, False: 0.1}  # of the logits' standard deviation, in float32 and otherwise: gross errors only


def mask_kinds(text: Any) -> tuple[str, ...]:
    """The kind of mask of each layer, as transformers makes them in advance; one for all where it makes one."""
    found = getattr(text, "layer_types", None)
    if found is not None:
        return tuple(found)
    if getattr(text, "attention_chunk_size", None) is not None:
        return ("chunked_attention",)
    return ("full_attention" if getattr(text, "sliding_window", None) is None else "sliding_attention",)


class Step:
    """The decode step over some buffers: inputs with a fixed place, and the graph once it is captured.

    One token of each sequence, at a place that only the device knows. `checked` counts the steps that ran both ways and
    agreed; `why` says why there is no graph.
    """

    def __init__(self, model: Any, own: Any, buffers: Buffers, padded: bool, kwargs: Any) -> None:
        self.checked, self.memory, self.why = 0, 0, ""
        self.kind: Any = None
        self._model, self._own, self._buffers = weakref.ref(model), own, weakref.ref(buffers)
        self._rest = {name: item for name, item in kwargs.items() if name in REST}
        self._graph: Any = None
        self._got: Tensor | None = None
        text = model.config.get_text_config(decoder=True)
        self._kinds, self._apart = set(mask_kinds(text)), hasattr(text, "layer_types")
        self._window = getattr(text, "sliding_window", None)
        device = kwargs["input_ids"].device
        with torch.inference_mode(False):
            self._spots = torch.arange(buffers.places, device=device)
            self._inputs = [torch.zeros_like(kwargs[name]) for name in ("input_ids", "position_ids")]
            self._inputs.append(torch.zeros(1, dtype=torch.long, device=device))
            if padded:
                # True where no token is hidden; what lies behind the new one is hidden by its place.
                self._inputs.append(torch.ones((buffers.batch, buffers.places), dtype=torch.bool, device=device))

    def __call__(self, length: int, kwargs: Any) -> Tensor:
        """The logits of the token at place `length`."""
        ids, positions, place, *visible = self._inputs
        ids.copy_(kwargs["input_ids"])
        positions.copy_(kwargs["position_ids"])
        place.fill_(length)
        if visible:
            mask = kwargs["attention_mask"]
            visible[0][:, : mask.shape[1]].copy_(mask)
        out: Tensor = self._run(*self._inputs) if self._graph is None else self._graph.replay()
        return out

    def attempt(self, length: int, kwargs: Any, captured: bool) -> None:
        """Take the step, captured first if it is to be; `compare` says what became of it."""
        self._got = None
        try:
            with torch.inference_mode(False), torch.no_grad():
                if captured and self._graph is None:
                    self(length, kwargs)
                    buffers = self._buffers()
                    assert buffers is not None
                    self._graph = capture_graph(self._run, *self._inputs, pool=buffers.pool)
                    buffers.pool = self._graph.pool
                    self._inputs = self._graph.inputs.tensors
                    self.memory = self._graph.report.memory_delta
                self._got = self(length, kwargs).float()
        except Exception as error:  # whatever a model does that a graph cannot hold: its own forward goes on
            self.why, self._graph = f"its step cannot be captured: {one_line(error, 200)}", None

    def compare(self, out: Any) -> None:
        """Hold the step that was taken against what the model's own forward made of the same token."""
        got, self._got = self._got, None
        if got is None:
            return
        want, self.kind = out.logits.float(), type(out)
        limit = _NEAR[out.logits.dtype is torch.float32] * want.std().item()
        far = (got - want).square().mean().sqrt().item()
        if not far <= limit:
            self.why, self._graph = f"its replayed logits are {far:.3g} from its own (limit {limit:.3g})", None
        self.checked += 1

    def _run(self, ids: Tensor, positions: Tensor, place: Tensor, visible: Tensor | None = None) -> Tensor:
        model, buffers = self._model(), self._buffers()
        assert model is not None and buffers is not None  # both are held by whoever calls
        masks = {kind: self._mask(kind, place, visible) for kind in self._kinds}
        out = self._own(
            model,
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks if self._apart else next(iter(masks.values())),
            past_key_values=StepCache([buffers.layers[index] for index in sorted(buffers.layers)], place),
            **self._rest,
        )
        logits: Tensor = out.logits
        return logits

    def _mask(self, kind: str, place: Tensor, visible: Tensor | None) -> Tensor:
        """True for the places in use; with a note for kernels that read their number, unless padding hides some."""
        window = self._window if kind == "sliding_attention" else None
        seen = self._spots <= place
        if window is not None:
            seen = seen & (self._spots > place - window)
        if visible is not None:
            return (visible & seen)[:, None, None]
        note = Note(used=place + 1, window=None if window is None else (window - 1, 0))
        return with_note(seen.expand(self._inputs[0].shape[0], 1, 1, -1), note)


_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_CACHES = (None, "dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")  # those that buffers stand in for
# What a step may be given: more would not reach the graph. A tokenizer is for the stopping criteria.
_GIVEN = frozenset(("input_ids", "position_ids", "attention_mask", "past_key_values", "tokenizer", *REST))
_AHEAD = 256  # places that a cache has room for beyond the prompt; then it moves into the next bucket
_SEEING = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")
_OURS = "_layerzero_stops_late"
# Whether the call of `generate` that is under way is seen by nobody else; None outside of one.
_generating: ContextVar[bool | None] = ContextVar("layerzero_generating", default=None)
_compiling = torch.compiler.is_compiling


def unfit(model: Any) -> str:
    """Why the steps of a model cannot be captured, whatever it is asked; empty when they can."""
    from transformers import DynamicCache, GenerationMixin
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if not hasattr(model, "_prepare_cache_for_generation") or not model.can_generate():
        return "it has no generate"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if model.config._attn_implementation != NAME:
        return "its attention is not LayerZero's"
    if "forward" in vars(model):
        return "it has a forward of its own on the instance"
    own = type(model)._prepare_cache_for_generation is not GenerationMixin._prepare_cache_for_generation
    if own or getattr(model, "_is_stateful", False) or hasattr(model, "create_masks_for_generate"):
        return "it makes caches or masks of its own"
    text: Any = model.config.get_text_config(decoder=True)
    layers = {type(layer) for layer in DynamicCache(config=text).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    masks = set(mask_kinds(text)) - {"full_attention", "sliding_attention"}
    shared: Any = getattr(text, "num_kv_shared_layers", None)
    if layers or masks or shared or getattr(text, "is_causal", True) is False:
        return "its cache has more than layers of full and sliding attention"
    return ""


def prepare_cache(self: Any, generation_config: Any, model_kwargs: Any, generation_mode: Any, *rest: Any) -> Any:
    """`_prepare_cache_for_generation` of a model with graphs."""
    stepper: Stepper = vars(self)[STATE]
    why = stepper.refuses(self, generation_config, model_kwargs, generation_mode)
    if not why and model_kwargs.get("past_key_values") is None:
        cache = model_kwargs["past_key_values"] = stepper.cache(self, generation_config.max_length or 0)
        # One draw more than needed would be seen in what is drawn later.
        cache.stops_late = bool(_generating.get()) and not generation_config.do_sample
        return None
    if why:
        stepper.plain[why] += 1
    return type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, *rest)


def forward_of(kind: Any) -> Callable[..., Any]:
    """`forward` of a model with graphs, with the signature of its own: `generate` reads that."""
    own = kind.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if type(cache) is BufferCache and not _compiling():
            return vars(self)[STATE].forward(self, own, cache, args, kwargs)
        return own(self, *args, **kwargs)

    return forward


def generate_of(kind: Any) -> Callable[..., Any]:
    """`generate` of a model with graphs: it remembers whether the caller brings functions that see every step."""
    own = kind.generate

    @functools.wraps(own)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _generating.set(len(args) < 3 and not any(kwargs.get(name) for name in _SEEING))
        try:
            return own(self, *args, **kwargs)
        finally:
            _generating.reset(token)

    return generate


def stop_late() -> None:
    """Let transformers' check for the end of a text come one step late over caches of ours that ask for it.

    That is its `DeferredStopCheck`, which it has for another kind of device: one step too many is undone. Only the
    question whether to use it is put to us first, once for the process.
    """
    from transformers.generation import utils

    check: Any = getattr(utils, "DeferredStopCheck", None)
    own = getattr(check, "is_supported", None)
    if own is None or hasattr(own, _OURS):
        return

    @functools.wraps(own)
    def is_supported(device: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        if type(cache) is BufferCache and cache.stops_late and device.type == "cuda":
            return True
        return own(device, cache, *args, **kwargs)

    setattr(is_supported, _OURS, True)
    check.is_supported = staticmethod(is_supported)


class Stepper:
    """The buffers and captured steps of one model, and why calls of `generate` went without.

    `eager` runs the steps without capturing them, on any device: the same code over the same buffers.
    """

    def __init__(self, memory: int | None) -> None:
        self.eager = False
        self.plain: Counter[str] = Counter()
        self.steps = 0
        self._memory = memory
        self._lender = Lender()
        self._known: Any = None  # what captures depend on

    def __deepcopy__(self, memo: Any) -> Stepper:
        made = Stepper(self._memory)
        made.eager = self.eager
        return made

    # -- whether, and with what ------------------------------------------------------------------------
    def refuses(self, model: Any, config: Any, given: Any, mode: Any) -> str:
        """Why a call of `generate` takes the plain path; empty when its steps are captured."""
        word = str(getattr(mode, "value", mode))
        if word not in _MODES:
            return f"{word} takes other steps than one token at a time"
        held = given.get("past_key_values")
        if held is not None and type(held) is not BufferCache:
            return f"the caller's own cache ({type(held).__name__})"
        if held is None and config.cache_implementation not in _CACHES:
            return f"cache_implementation={config.cache_implementation!r}"
        if config.use_cache is False or config.is_assistant:
            return "as the assistant of another model" if config.is_assistant else "use_cache=False"
        if config.compile_config is not None:
            return "compile_config asks for torch.compile"
        if config.output_attentions or config.output_hidden_states:
            return "attentions or hidden states are asked for"
        return self._unready(model)

    def _unready(self, model: Any) -> str:
        if not self.eager and model.device.type != "cuda":
            return f"CUDA graphs need a CUDA device, the model is on {model.device.type}"
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1 or getattr(model, "_tp_size", None):
            return "the model is on several devices"
        if model.training or model.config._attn_implementation != NAME:
            return "the model is training" if model.training else "its attention is not LayerZero's any more"
        if torch._C._is_any_autocast_enabled():
            return "under autocast"
        for name, part in model.named_modules():
            for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values()):
                if name and not getattr(hook, "__module__", "").startswith("transformers."):
                    return f"{name} has a hook"
        return ""

    def cache(self, model: Any, longest: int) -> BufferCache:
        """A cache for one call of `generate`; captures that are out of date are dropped."""
        # Another address, or another object where it is no plain tensor: it was moved or replaced.
        held = (*model.parameters(), *model.buffers())
        weights = [item.data_ptr() if type(item.data) is Tensor else id(item) for item in held]
        known = (current_world().fingerprint, [id(part) for part in model.modules()], weights)
        if known != self._known:
            self._known = known
            for buffers in self._lender.kept:
                buffers.forget()
        text = model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token = 2 * text.num_hidden_layers * heads * dim * model.dtype.itemsize
        limit = self._limit(model.device)
        return BufferCache(text.num_hidden_layers, self._lender, self.plain, longest, token, limit)

    def _limit(self, device: torch.device) -> int:
        if self._memory is not None:
            return self._memory
        return int(torch.cuda.mem_get_info(device)[1]) // 4 if device.type == "cuda" else sys.maxsize

    def report(self, model: Any) -> GraphReport:
        held = [(b, step) for b in self._lender.kept for step in b.steps.values() if step.checked and not step.why]
        captured = sorted((b.batch, b.places) for b, _ in held)
        plain = dict(self.plain)
        if not plain and (why := self._unready(model)):
            plain[why] = 0
        limit = self._limit(model.device)
        return GraphReport(tuple(captured), self.steps, self._lender.memory, limit, plain)

    # -- a forward pass ----------------------------------------------------------------------------------
    def forward(self, model: Any, own: Any, cache: BufferCache, args: Any, kwargs: Any) -> Any:
        """One forward pass over a cache of ours: a captured step where it is one, else the model's own."""
        ids = kwargs.get("input_ids")
        if args or ids is None or _generating.get() is None:
            return own(model, *args, **kwargs)
        length, new = cache.length, ids.shape[1]
        cache.reserve(ids.shape[0], length + new, _AHEAD)
        if not length or new > 1:
            mask = kwargs.get("attention_mask")
            cache.padded = mask is not None and not bool(mask.all())
            return own(model, **kwargs)
        step = self._step(model, own, cache, kwargs)
        if step is None:
            return own(model, **kwargs)
        self.steps += 1
        if step.checked == CHECKED:
            for layer in cache.layers:
                layer.length = length + 1
            return step.kind(logits=step(length, kwargs).clone(), past_key_values=cache)
        step.attempt(length, kwargs, not self.eager)
        out = own(model, **kwargs)  # after the attempt: what that wrote into the cache is written again
        step.compare(out)
        return out

    def _step(self, model: Any, own: Any, cache: BufferCache, kwargs: Any) -> Step | None:
        """The step of this forward pass, captured or not yet; None on the plain path."""
        if cache.buffers is None:
            return None
        given = [name for name, item in kwargs.items() if item is not None and item is not False]
        odd = next((name for name in given if name not in _GIVEN), "")  # would not reach a graph
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if odd or positions is None:
            cache.leave(f"generate passes {odd}" if odd else "generate passes no positions")
            return None
        if cache.padded and (mask is None or mask.shape != (cache.buffers.batch, cache.length + 1)):
            cache.leave("its mask does not have a column for each token")
            return None
        key = (cache.padded, positions.shape)
        step: Step | None = cache.buffers.steps.get(key)
        if step is None:
            step = cache.buffers.steps[key] = Step(model, own, cache.buffers, cache.padded, kwargs)
        if step.why:
            cache.leave(step.why)
            return None
        return step
