"""What a capture, or the proof that one would work, has to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layerzero.json_form import Plain
from layerzero.reasons import Reason


@dataclass(frozen=True)
class CaptureReport(Plain):
    """The result of `lz.validate_graph_capture`, and the `report` of a captured call.

    kernels       (op, kernel id) of each LayerZero call in the graph, in order
    refused       kernels that were tried and may not stand in a graph, with the reason
    reasons       why there is no graph; empty when `ok`
    warmups       how often the function ran on the capture's stream beforehand
    initialised   libraries that were made ready on that stream
    memory_delta  bytes by which the device's reserved memory grew during the last capture
    dummy         whether a dummy capture came first
    replays       replays whose results were compared with the function itself
    """

    ok: bool
    kernels: tuple[tuple[str, str], ...] = ()
    refused: Mapping[str, Reason] = field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    warmups: int = 0
    initialised: tuple[str, ...] = ()
    memory_delta: int = 0
    dummy: bool = False
    replays: int = 0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [f"graph capture: {'ok' if self.ok else 'refused'}"]
        lines += [f"  {item}" for item in self.reasons]
        lines += [f"  {op}: {kernel_id}" for op, kernel_id in self.kernels]
        lines += [f"  refused {kernel_id}: {why}" for kernel_id, why in self.refused.items()]
        ready = ", ".join(self.initialised) or "nothing"
        lines.append(
            f"  {self.warmups} warm-up runs, {ready} initialised, {'a' if self.dummy else 'no'} dummy capture, "
            f"memory {self.memory_delta:+d} bytes, {self.replays} replays compared"
        )
        return "\n".join(lines)
