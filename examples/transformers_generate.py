"""A model of transformers on LayerZero's kernels: patch, generate, see what was patched and which kernels ran, unpatch.

The model is a small Llama with random weights, made on the spot, so the tokens mean nothing; the path is that of any
model from the hub: `model = lz.patch(AutoModelForCausalLM.from_pretrained(name))`.
Run it: python examples/transformers_generate.py   (needs transformers 5)
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerzero as lz

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(device).eval()
prompt = torch.randint(3, 1000, (2, 24), device=device)
mask = torch.ones_like(prompt)
mask[1, :7] = 0  # the second prompt is shorter, padded on the left
options = {"attention_mask": mask, "max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


def timed(label: str) -> torch.Tensor:
    """Tokens of a generation, and how long it took."""
    model.generate(prompt, **options)  # the first one selects kernels
    start = time.perf_counter()
    out = model.generate(prompt, **options)
    print(f"{label}: 24 tokens in {(time.perf_counter() - start) * 1e3:.0f} ms")
    return out


before = timed("as it comes")
lz.patch(model)
print(lz.patched(model))
after = timed("patched")
print("the same tokens:", torch.equal(before, after))

beams = model.generate(prompt, **{**options, "num_beams": 3})
print("beam search:", tuple(beams.shape))
x, weight = torch.randn(2, 1, 256, device=device), model.model.norm.weight
print("a norm of a decode step runs on", lz.select("rms_norm", x, weight).chosen)

lz.unpatch(model)
print("unpatched:", lz.patched(model), model.config._attn_implementation)
