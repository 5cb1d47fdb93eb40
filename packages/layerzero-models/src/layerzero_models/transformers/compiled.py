"""The compiled decode step of `generate`: what belongs to the model is checked once a call, not before every token.

Before each run of a compiled function Dynamo checks everything it read while it traced. For a decode step that is, some
thousand times a layer, the model itself: its parts, their attributes, their weights. With kernels that take few
microseconds a step waits for these checks. `generate` asks the model for the compiled step once a call
(`get_compiled_call`), so here the state of the model is compared then, and the step it gets is compiled without the
guards on the model. Guards on inputs, caches, globals and the state of torch stay, before every token.

A model that is found changed gets a step of its own, compiled anew; one found as it was before gets the step it had
then. Where that happens oftener than Dynamo would recompile, transformers' own compiled step takes over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STATE = "_layerzero_steps"
# What `generate` and `lz.patch` themselves keep on a model, and no forward pass reads.
_BESIDE = {STATE, "_layerzero_patch", "_cache", "_compiled_call", "_last_compile_config", "generation_config"}
_BESIDE.add("_previous_max_cache_length")  # 5.17


class Steps:
    """The compiled steps of one model, each with the state of the model that it was compiled for."""

    def __init__(self) -> None:
        self.versions: list[tuple[State, Callable[..., Any]]] = []

    def __deepcopy__(self, memo: Any) -> Steps:
        return Steps()

    def of(self, model: Any, config: Any) -> Callable[..., Any]:
        own: Callable[..., Any] = type(model).get_compiled_call(model, config)
        how = vars(model)["_last_compile_config"].to_dict() if own != model.__call__ else None
        if how is None or (how.get("backend") != "inductor" and how.get("mode", "default") != "default"):
            return own  # transformers compiles no step of this model, or with words of another compiler's
        state = State(model, how)
        for kept, step in self.versions:
            if state.same(kept):
                return step
        if len(self.versions) >= torch._dynamo.config.recompile_limit:
            return own
        step = compiled(model, how)
        self.versions.append((state.keep(), step))
        return step


def get_compiled_call(self: Any, compile_config: Any) -> Callable[..., Any]:
    """`get_compiled_call` of a patched model."""
    steps: Steps = vars(self)[STATE]
    return steps.of(self, compile_config)


def compiled(model: Any, config: dict[str, Any]) -> Callable[..., Any]:
    """A model's forward, compiled as transformers is told to, without guards on the model."""
    own = model.__call__

    def step(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    # Dynamo keeps what it compiled with the code: with this one's the step of another model could be taken for it.
    step.__code__ = step.__code__.replace()
    options = dict(config.pop("options", None) or {})
    mode = config.pop("mode", "default")
    if config.get("backend") == "inductor":
        options = {**torch._inductor.list_mode_options(mode, config.get("dynamic")), **options}
    made: Callable[..., Any] = torch.compile(step, options={**options, "guard_filter_fn": _kept}, **config)
    return made


def _kept(guards: Sequence[Any]) -> list[bool]:
    return [_root(guard.orig_guard.originating_source) != "own" for guard in guards]


def _root(source: Any) -> str:
    """The local variable that what a guard looks at was reached from; "" for a global, or none."""
    while hasattr(source, "base"):
        source = source.base
    return getattr(source, "local_name", "")


# -- the state of a model ------------------------------------------------------------------------------
class State:
    """What the parts of a model hold, as far as a compiled forward may have read it.

    Objects are compared by identity, one level deep: attributes of parts, what lies in their dicts and lists (weights,
    buffers, hooks, parts), attributes of other objects (configs, a kernel's arguments). Weights also by what `.data`
    may change under them. Kept by weak references where an object allows it, so that no weight is kept alive.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        objects, self._facts = _read(model)
        self._facts.append(str(config))
        self._ids = [*map(id, objects)]
        self._refs: list[Any] = []
        self._objects = objects  # until `keep`: what is only compared is dropped with the call

    def keep(self) -> State:
        """This state as it may be kept: a weight, a part or a hook lives no longer for it."""
        self._objects = [_reference(item) for item in self._objects if _kinds.get(type(item)) not in ("dict", "list")]
        self._refs = [*{id(item): item for item in self._objects if type(item) is weakref.ref}.values()]
        return self

    def same(self, kept: State) -> bool:
        """Whether this is the state that was kept. An identity counts while its object lives."""
        if self._ids != kept._ids or self._facts != kept._facts:
            return False
        return all(ref() is not None for ref in kept._refs)


def _reference(item: Any) -> Any:
    try:
        return weakref.ref(item)
    except TypeError:
        return item


def _read(model: nn.Module) -> tuple[list[Any], list[Any]]:
    objects: list[Any] = []
    tensors: list[Any] = []
    read: set[int] = set()  # objects that several parts share
    for part in model.modules():
        held = vars(part)
        if part is model:
            held = {name: item for name, item in held.items() if name not in _BESIDE}
        objects += held.values()
        for item in held.values():
            kind = _kinds.get(type(item)) or _kind(type(item))
            if kind == "plain":
                continue
            if kind == "dict":
                if item:
                    objects += item.values()
            elif kind == "list":
                objects += item
            elif kind == "tensor":
                tensors.append(item)
            elif kind == "object" and id(item) not in read:
                read.add(id(item))
                objects += vars(item).values()
        tensors += part._parameters.values()
        tensors += part._buffers.values()
    return objects, [(x.dtype, x.device, x.shape, x.requires_grad) for x in tensors if x is not None]


_kinds: dict[type, str] = {}


def _kind(of: type) -> str:
    """How values of a type are read; looked up some twenty times a part."""
    known = (("dict", dict), ("list", (list, tuple)), ("tensor", Tensor), ("part", (nn.Module, type)))
    found = next((word for word, kinds in known if issubclass(of, kinds)), "")
    found = found or ("object" if of.__dictoffset__ else "plain")
    _kinds[of] = found
    return found
