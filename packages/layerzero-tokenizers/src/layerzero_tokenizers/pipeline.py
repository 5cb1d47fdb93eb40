"""Text in, text out: tokenize, a small transformer made of LayerZero ops, sampling, and text as the tokens come.

The weights are random, drawn from a seed: the point is the path, every step of which is selected, explained and
subject to policy, and whose output is the same at every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero_tokenizers.sources import resolve


@dataclass(frozen=True, slots=True)
class Generation:
    """What a prompt became: `pieces` are the streamed parts of `text`."""

    prompt_ids: list[int]
    ids: list[int]
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class TinyTransformer:
    """A Llama-shaped decoder: RMSNorm, GQA with RoPE, SwiGLU; one KV cache per call of `run`."""

    def __init__(
        self, vocab: int, *, layers: int = 2, hidden: int = 64, heads: int = 4, kv_heads: int = 2, length: int = 512,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.head_dim, self.length = heads, kv_heads, hidden // heads, length
        draw = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw) / shape[-1] ** 0.5

        self.embed = torch.randn((vocab, hidden), generator=draw)
        self.layers = [
            {
                "norm": torch.ones(hidden), "norm_mlp": torch.ones(hidden),
                "qkv": weight((heads + 2 * kv_heads) * self.head_dim, hidden), "out": weight(hidden, hidden),
                "gate_up": weight(4 * hidden, hidden), "down": weight(hidden, 2 * hidden),
            }
            for _ in range(layers)
        ]  # fmt: skip
        self.norm = torch.ones(hidden)
        self.head = weight(vocab, hidden)
        rates = 10000.0 ** (torch.arange(0, self.head_dim, 2) / -self.head_dim)
        angles = torch.arange(length)[:, None] * rates
        self.cos, self.sin = angles.cos(), angles.sin()

    def start(self) -> list[tuple[Tensor, Tensor]]:
        empty = torch.zeros(1, self.kv_heads, 0, self.head_dim)
        return [(empty, empty) for _ in self.layers]

    def run(self, ids: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [1, vocab] after ids [1, S], which are appended to the cache."""
        past, tokens = cache[0][0].shape[2], ids.shape[1]
        stream = lz.embedding(ids, self.embed)
        positions = torch.arange(past, past + tokens)
        for index, layer in enumerate(self.layers):
            hidden = lz.rms_norm(stream, layer["norm"])
            mixed = lz.linear(hidden, layer["qkv"]).view(1, tokens, -1, self.head_dim).transpose(1, 2)
            query, key, value = mixed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            query, turned = lz.rope(query, key, self.cos, self.sin, position_ids=positions)
            assert turned is not None
            keys = torch.cat((cache[index][0], turned), dim=2)
            values = torch.cat((cache[index][1], value), dim=2)
            cache[index] = (keys, values)
            attended = lz.attention(query, keys, values, is_causal=tokens > 1)
            out = lz.linear(attended.transpose(1, 2).reshape(1, tokens, -1), layer["out"])
            hidden, stream = lz.add_rms_norm(out, stream, layer["norm_mlp"])
            hidden = lz.silu_and_mul(lz.linear(hidden, layer["gate_up"]))
            stream = stream + lz.linear(hidden, layer["down"])
        return lz.linear(lz.rms_norm(stream[:, -1], self.norm), self.head)


def stream(
    prompt: str,
    tokenizer: Any,
    model: TinyTransformer,
    *,
    max_new_tokens: int = 32,
    top_k: int = 20,
    temperature: float = 1.0,
    seed: int = 0,
) -> Iterator[tuple[int, str]]:
    """(token, text it completes), one after the other; ends at the tokenizer's EOS or after `max_new_tokens`.

    The last pair may be (-1, text): what was still waiting for a character to become whole.
    """
    handle = resolve(tokenizer)
    ids = lz.tokenize(prompt, handle)
    text, cache, draw = TextStream(handle), model.start(), torch.Generator().manual_seed(seed)
    step = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(min(max_new_tokens, model.length - len(ids))):
            logits = model.run(step, cache)
            token = int(lz.sample_topk(logits, top_k, temperature=temperature, generator=draw))
            if token == handle.eos_id:
                break
            yield token, text.push(token)
            step = torch.tensor([[token]])
    rest = text.flush()
    if rest:
        yield -1, rest


def generate(prompt: str, tokenizer: Any, model: TinyTransformer, **options: Any) -> Generation:
    """The whole of `stream` at once, with the same options."""
    pairs = list(stream(prompt, tokenizer, model, **options))
    ids = [token for token, _ in pairs if token >= 0]
    return Generation(lz.tokenize(prompt, tokenizer), ids, tuple(piece for _, piece in pairs if piece))


_HOLE = "\ufffd"
_HOLD = 8  # a character takes four tokens at most; what is still no text after this many is none


class TextStream:
    """`push` a token, get the text that is certain now; `flush` gives the rest.

    The pieces put together are `lz.detokenize` of all tokens. A token may hold a part of a character: the text waits
    until the character is whole. Earlier tokens are decoded along, because some decoders look at what precedes.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = resolve(tokenizer)
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # first token decoded along
        self._read = 0  # first token whose text is not given out yet

    def push(self, token: int) -> str:
        """The text that this token completes; often empty."""
        self._ids.append(int(token))
        given, whole = self._text(self._start, self._read), self._text(self._start, len(self._ids))
        if not whole.endswith(_HOLE):
            return self._give(whole, given, len(self._ids))
        if len(self._ids) - self._read <= _HOLD:
            return ""
        end = len(self._ids) - 3
        return self._give(self._text(self._start, end), given, end)

    def flush(self) -> str:
        """What is left, broken characters as U+FFFD; the stream can be used again from the start."""
        given, whole = self._text(self._start, self._read), self._text(self._start, len(self._ids))
        self._ids, self._start, self._read = [], 0, 0
        return whole[len(given) :]

    def _give(self, whole: str, given: str, end: int) -> str:
        if len(whole) <= len(given):
            return ""  # a special token that is skipped, or white space that waits for the next word
        self._start, self._read = self._read, end
        return whole[len(given) :]

    def _text(self, start: int, end: int) -> str:
        if start == end:
            return ""
        text = lz.detokenize(self._ids[start:end], self._tokenizer, skip_special_tokens=self._skip)
        assert isinstance(text, str)
        return text
