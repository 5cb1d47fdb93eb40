"""The decode step that `lz.patch(model, graphs=True)` captures."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from layerzero import capture_graph
from layerzero.errors import one_line
from layerzero_models.transformers.buffers import Buffers, StepCache
from layerzero_models.transformers.masking import Note, with_note

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
