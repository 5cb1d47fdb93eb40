"""Text in, text out: tokenize, a tiny transformer through LayerZero ops, sample, and text as the tokens come.

The tokenizer is trained here on a few sentences and the weights are random, so the text is nonsense; the path is real.
Run it: python examples/text_generation.py   (needs layerzero-tokenizers[hf]; with [tiktoken] two libraries compete)
"""

from __future__ import annotations

import layerzero as lz
from layerzero_tokenizers import CACHE, TinyTransformer, load, small, verdicts
from layerzero_tokenizers.pipeline import stream

SYSTEM = "You are a helpful assistant. Answer the question of the user as well as you can, step by step. " * 10

# A model folder, a file, a tiktoken name or an object would do; this one is made on the spot.
tokenizer = load(small.gpt2())
print(tokenizer)
for backend, verdict in verdicts(tokenizer).items():
    state = "the same ids" if verdict.ids is None else str(verdict.ids)
    print(f"  {backend} on {verdict.texts} probe texts: {state}")
print(lz.explain("tokenize", "Hello, world", tokenizer))

model = TinyTransformer(tokenizer.vocab_size, length=1024)
for question in ("Who are you?", "What is 6 times 7?", "Say it in Japanese: 日本語?"):
    print(f"\n{question}\n  ", end="")
    for _, piece in stream(SYSTEM + question, tokenizer, model, max_new_tokens=16):
        print(piece.replace("\n", " "), end="", flush=True)
print("\n")

stats = CACHE.stats()
print(f"system prompt: {stats.hits} hits, {stats.misses} misses, {stats.bytes} bytes of {stats.max_bytes}")
