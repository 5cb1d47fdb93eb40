"""Train a small decoder through LayerZero's ops: the gradients are torch's, and the loss goes down.

Every op below has a backward pass; a kernel without one is not chosen while gradients are wanted.
Run it: python examples/training_step.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerzero as lz

VOCAB, WIDTH, HEADS, KV_HEADS, LENGTH, LAYERS, STEPS = 32, 64, 4, 2, 48, 2, 30
HEAD_DIM = WIDTH // HEADS


class WithLayerZero:
    """The ops of a decoder, by the fastest kernel that has a gradient."""

    rms_norm = staticmethod(lz.rms_norm)
    silu_and_mul = staticmethod(lz.silu_and_mul)
    loss = staticmethod(lz.cross_entropy)

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal; GQA follows from the head counts."""
        return lz.attention(q, k, v, is_causal=True)

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k by position."""
        return lz.rope(q, k, cos, sin)


class WithTorch:
    """The same in plain torch, to compare with."""

    loss = staticmethod(F.cross_entropy)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        """x over its root mean square."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    @staticmethod
    def silu_and_mul(x: Tensor) -> Tensor:
        """SwiGLU's middle."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal, each key head for several query heads."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    @staticmethod
    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k by position."""

        def turn(x: Tensor) -> Tensor:
            one, other = x.chunk(2, -1)
            return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

        return turn(q), turn(k)


class Layer(nn.Module):
    """Norm, attention, norm, SwiGLU, with the ops handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, ops: type, cos: Tensor, sin: Tensor) -> Tensor:
        """One decoder layer."""
        heads = self.qkv(ops.rms_norm(x, self.norm1)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        q, k = ops.rope(q, k, cos, sin)
        x = x + self.out(ops.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(ops.silu_and_mul(self.up(ops.rms_norm(x, self.norm2))))


class Decoder(nn.Module):
    """Embedding, layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, ops: type, cos: Tensor, sin: Tensor) -> Tensor:
        """Loss of predicting each next token."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, ops, cos, sin)
        logits = self.head(ops.rms_norm(x, self.norm))
        return ops.loss(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model: Decoder, ops: type, *inputs: Tensor) -> list[Tensor]:
    """Of every weight."""
    model.zero_grad()
    model(inputs[0], ops, *inputs[1:]).backward()
    return [weight.grad.clone() for weight in model.parameters()]


def main() -> None:
    """Compare the gradients once, then train."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder().to(device)
    cos, sin = (table.to(device) for table in lz.rope_tables(HEAD_DIM, LENGTH))
    tokens = (torch.arange(LENGTH + 1) * 5 % VOCAB + torch.arange(4)[:, None]).remainder(VOCAB).to(device)

    ours, theirs = (gradients(model, ops, tokens, cos, sin) for ops in (WithLayerZero, WithTorch))
    worst = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    print(f"gradients of {len(ours)} weights: largest difference from torch's {worst:.1e}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens, WithLayerZero, cos, sin)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {STEPS} steps")
    assert losses[-1] < 0.5 * losses[0]
    x = torch.zeros(1, LENGTH, WIDTH, device=device)
    print("rms_norm with a gradient:", lz.which("rms_norm", x, model.norm))


if __name__ == "__main__":
    main()
