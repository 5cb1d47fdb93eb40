"""A small serving loop: requests come and go, one paged KV cache, CUDA graphs for decoding where there is a GPU.

Each step decodes every running request at once, padded to the next batch size; on a GPU each of these sizes is one
CUDA graph, captured strictly (a dummy capture first), replayed afterwards. On a CPU the same function simply runs.
Run it: python examples/serving_loop.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import layerzero as lz

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, PAGE, PAGES, BLOCKS = 2, 8, 2, 64, 512, 300, 16, 64, 8
HIDDEN = HEADS * HEAD_DIM
SIZES = (1, 2, 4)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

torch.manual_seed(0)


def weight(rows: int, columns: int) -> torch.Tensor:
    """A random matrix that keeps the size of what it multiplies."""
    return (torch.randn(rows, columns) * columns**-0.5).to(device, dtype)


table = weight(VOCAB, HIDDEN) * 4
layers = [
    {
        "qkv": weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "out": weight(HIDDEN, HIDDEN),
        "gate_up": weight(2 * INNER, HIDDEN),
        "down": weight(HIDDEN, INNER),
        "gain": torch.ones(HIDDEN, device=device, dtype=dtype),
    }
    for _ in range(LAYERS)
]
angles = torch.arange(PAGE * BLOCKS, device=device)[:, None] * torch.logspace(0, -3, HEAD_DIM // 2, device=device)
cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
# Page 0 belongs to nobody: padding rows write there.
keys = torch.zeros(LAYERS, PAGES, PAGE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
values = torch.zeros_like(keys)
free_pages = list(range(1, PAGES))


def model(tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: Any) -> torch.Tensor:
    """The next token after each of `tokens`. With a paged batch each row is a sequence; without, one prompt."""
    x = lz.embedding(tokens, table)
    for number, w in enumerate(layers):
        mixed = lz.linear(lz.rms_norm(x, w["gain"]), w["qkv"]).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = mixed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        axis = 0 if batch is None else 1  # of the sequence: one prompt of many tokens, or many rows of one
        q, k = (t.unsqueeze(axis) for t in (q, k))
        q, k = lz.rope(q, k, cos, sin, layout="BSHD", position_ids=positions.unsqueeze(axis))
        q, k = q.squeeze(axis), k.squeeze(axis)
        keys[number].flatten(0, 1).index_copy_(0, slots, k)
        values[number].flatten(0, 1).index_copy_(0, slots, v.contiguous())
        if batch is None:
            one = (t.unsqueeze(0) for t in (q, k, v))
            attended = lz.attention(*one, is_causal=True, layout="BSHD").squeeze(0)
        else:
            attended = lz.paged_attention(q.contiguous(), keys[number], values[number], batch)
        normed, x = lz.add_rms_norm(lz.linear(attended.flatten(1), w["out"]), x, w["gain"])
        x = x + lz.linear(lz.silu_and_mul(lz.linear(normed, w["gate_up"])), w["down"])
    return lz.linear(lz.rms_norm(x), table).argmax(-1)


@dataclass
class Request:
    """A prompt, how many tokens are wanted, the pages it holds, and the tokens made so far."""

    prompt: list[int]
    wanted: int
    pages: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in the cache, the newest not counted."""
        return len(self.prompt) + len(self.made) - 1

    def slot(self, position: int) -> int:
        while len(self.pages) <= position // PAGE:
            self.pages.append(free_pages.pop())
        return self.pages[position // PAGE] * PAGE + position % PAGE


class Decoder:
    """Decoding of one batch size: a captured graph on a GPU, the plain function elsewhere."""

    def __init__(self, size: int) -> None:
        self.size = size
        tables = torch.zeros(size, BLOCKS, dtype=torch.int32, device=device)
        lens = torch.ones(size, dtype=torch.int32, device=device)
        self.batch = lz.paged_batch(tables, lens, capture=True)
        tokens, positions, slots = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3))

        def step(tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            return model(tokens, positions, slots, self.batch)

        self.step = lz.capture_graph(step, tokens, positions, slots, strict=True) if device.type == "cuda" else step

    def __call__(self, running: list[Request]) -> list[int]:
        rows = [(r.made[-1], r.length, r.slot(r.length), r.length + 1, r.pages) for r in running]
        rows += [(0, 0, 0, 0, [])] * (self.size - len(rows))  # a context of 0 is a padding row
        tokens, positions, slots, lens, pages = zip(*rows, strict=True)
        tables = torch.tensor([[*p, *[0] * (BLOCKS - len(p))] for p in pages], dtype=torch.int32, device=device)
        context = torch.tensor(lens, dtype=torch.int32, device=device)
        # Plans the batch again, into the buffers that the graph knows.
        self.batch.update(tables, context, host_lens=list(lens))
        given = (torch.tensor(item, device=device) for item in (tokens, positions, slots))
        return self.step(*given).tolist()[: len(running)]


def prefill(request: Request) -> None:
    """Run the prompt, fill the cache with it, and make the first token."""
    tokens = torch.tensor(request.prompt, device=device)
    positions = torch.arange(len(request.prompt), device=device)
    slots = torch.tensor([request.slot(i) for i in range(len(request.prompt))], device=device)
    request.made.append(int(model(tokens, positions, slots, None)[-1]))


def serve(requests: list[Request], most: int = SIZES[-1]) -> int:
    """Run all requests to their end; the number of decoding steps."""
    waiting, running, steps = list(requests), [], 0
    while waiting or running:
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
            prefill(running[-1])
        decoder = decoders[next(size for size in SIZES if size >= len(running))]
        for request, token in zip(running, decoder(running), strict=True):
            request.made.append(token)
        steps += 1
        for request in [r for r in running if len(r.made) >= r.wanted]:
            running.remove(request)
            free_pages.extend(request.pages)
    return steps


def requests() -> list[Request]:
    """Six requests of different lengths."""
    return [Request([(7 * i + j) % VOCAB for j in range(5 + 9 * i)], 8 + 5 * i) for i in range(6)]


with torch.no_grad():
    decoders = {size: Decoder(size) for size in SIZES}
    together = requests()
    steps = serve(together)
    print(
        f"{len(together)} requests, {sum(len(r.made) for r in together)} tokens in {steps} steps of up to {SIZES[-1]}"
    )
    if device.type == "cuda":
        for size, decoder in decoders.items():
            report = decoder.step.report
            print(f"batch {size}: memory {report.memory_delta:+d} bytes in the capture,", dict(report.kernels))
    else:
        print("no GPU here: the same steps, without graphs")
        alone = requests()
        for request in alone:
            serve([request], most=1)
        assert [r.made for r in alone] == [r.made for r in together], "a batch must not change what a request gets"
        print("every request got the tokens it gets alone")
