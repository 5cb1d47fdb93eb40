"""Positions and norms against transformers: its own tables, its norms, and a real (tiny) Llama and Gemma."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import layerzero as lz
from layerzero.numerics import Tolerance, assert_close, compare, tolerance

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = 16  # pairs of a head of 32
ENTRIES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn attention": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6,
        "attention_factor": 1.25,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128, "rope_theta": 500000.0,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        "short_factor": [1.0 + i / HALF for i in range(HALF)], "long_factor": [1.0 + i for i in range(HALF)],
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    """transformers remarks on unusual settings; some of ours are unusual on purpose."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def llama(**more):
    from transformers.models.llama import modeling_llama

    given = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 256,
    }  # fmt: skip
    return modeling_llama, transformers.LlamaConfig(**{**given, **more})


# -- tables --------------------------------------------------------------------------------------
@pytest.mark.parametrize("seq_len", [50, 300])
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.req("R-POS-02")
def test_float32_tables_are_those_of_transformers_bit_for_bit(name, seq_len):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    modeling, config = llama(rope_parameters=dict(ENTRIES[name]))
    make = ROPE_INIT_FUNCTIONS.get(
        ENTRIES[name]["rope_type"], modeling.LlamaRotaryEmbedding.compute_default_rope_parameters
    )
    frequencies, factor = make(config, seq_len=seq_len)
    positions = torch.arange(4000)
    angles = positions[:, None].float() * frequencies
    cos, sin = lz.rope_tables(
        32,
        4000,
        scaling=config.rope_parameters,
        seq_len=seq_len,
        max_position_embeddings=config.max_position_embeddings,
    )
    assert torch.equal(cos, angles.cos() * factor) and torch.equal(sin, angles.sin() * factor)


@pytest.mark.req("R-POS-02")
def test_every_scaling_of_transformers_is_known_here():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from layerzero_models.rope_tables import ROPE_TYPES

    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPE_TYPES)
    assert set(ROPE_INIT_FUNCTIONS) <= {entry["rope_type"] for entry in ENTRIES.values()}


# -- a whole model -------------------------------------------------------------------------------
def with_weights(model, heads=1.0, seed=0):
    """Random weights; `heads` scales the projections of q and k: large, attention looks at single tokens and positions
    matter, while the usual initialisation attends to all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                scale = heads if "q_proj" in name or "k_proj" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale / weight.shape[1] ** 0.5)
    return model.eval()


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
@pytest.mark.req("R-POS-01", "R-POS-04")
def test_a_llama_needs_rotate_half_and_breaks_with_interleaved_pairs(monkeypatch, name):
    modeling, config = llama(rope_parameters=dict(ENTRIES[name]))
    model = with_weights(modeling.LlamaForCausalLM(config), heads=4.0).double()
    exact = tolerance("attention", "float64")
    ids = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids).logits

    def logits(interleaved):
        cos, sin = lz.rope_tables(32, 24, scaling=config.rope_parameters, max_position_embeddings=256)
        turned = []

        def rope(q, k, *_, **__):
            turned.append(q.shape)
            return lz.rope(q, k, cos, sin, interleaved=interleaved)

        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rope)
        with torch.no_grad():
            out = model(ids).logits
        assert len(turned) == config.num_hidden_layers, "the model did not come through lz.rope"
        return out

    assert_close(logits(interleaved=False), want, exact)
    broken = logits(interleaved=True)
    assert_close(broken[:, 0], want[:, 0], exact)  # at position 0 nothing turns: a test of one token sees no fault
    for position in range(3, 24):
        report = compare(broken[:, position], want[:, position], Tolerance(1e-2, 1e-2))
        assert not report.ok, f"interleaved pairs went unnoticed at position {position}"


@pytest.mark.req("R-POS-04")
def test_both_conventions_pass_a_kernel_test_of_their_own():
    """Which is why only a model can tell them apart."""
    cos, sin = lz.rope_tables(8, 6, dtype=torch.float64)
    x = torch.randn(1, 2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    turn = torch.complex(cos, sin)
    halves = torch.complex(x[..., :4], x[..., 4:]) * turn
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn
    exact = tolerance("rope", "float64")
    assert_close(lz.rope(x, None, cos, sin)[0], torch.cat((halves.real, halves.imag), -1), exact)
    assert_close(lz.rope(x, None, cos, sin, interleaved=True)[0], torch.view_as_real(pairs).flatten(-2), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-POS-01", "R-TOL-04")
def test_rope_with_batched_tables_equals_the_models_own_function(dtype):
    modeling, config = llama()
    x = torch.randn(2, 2, 9, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    k = torch.randn(2, 1, 9, 32, generator=torch.Generator().manual_seed(4)).to(dtype)
    ids = torch.stack((torch.arange(9), torch.arange(9) + 5))
    cos, sin = modeling.LlamaRotaryEmbedding(config)(x.float(), ids)
    want = modeling.apply_rotary_pos_emb(x.double(), k.double(), cos.double(), sin.double())
    assert_close(lz.rope(x, k, cos, sin), want, tolerance("rope", dtype))


# -- norms ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_gemma_norm_equals_transformers_bit_for_bit(dtype, weight_dtype):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    norm = GemmaRMSNorm(80, eps=1e-5).to(weight_dtype or dtype)
    norm.weight.data = torch.randn(80, generator=torch.Generator().manual_seed(5)).to(norm.weight.dtype) * 0.3
    x = (torch.randn(3, 7, 80, generator=torch.Generator().manual_seed(6)) * 4).to(dtype).requires_grad_()
    want = norm(x)
    got = lz.gemma_rms_norm(x, norm.weight, 1e-5, backend="reference")
    assert got.dtype == dtype and torch.equal(got, want)
    assert_close(lz.gemma_rms_norm(x, norm.weight, 1e-5), want, tolerance("gemma_rms_norm", dtype))
    cotangent = torch.randn(3, 7, 80, generator=torch.Generator().manual_seed(7)).to(dtype)
    grads = [torch.autograd.grad(out, (x, norm.weight), cotangent, retain_graph=True) for out in (got, want)]
    assert_close(grads[0], grads[1], tolerance("gradient", dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.req("R-OP-14", "R-TOL-02")
def test_rms_norm_agrees_with_llama_up_to_its_second_rounding(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(96, generator=torch.Generator().manual_seed(8)).to(dtype)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(9)).to(dtype)
    assert_close(lz.rms_norm(x, norm.weight, 1e-6), norm(x), tolerance("rms_norm", dtype))


@pytest.mark.req("R-OP-14")
def test_a_gemma_runs_on_our_norms(monkeypatch):
    from transformers.models.gemma import modeling_gemma as modeling

    config = transformers.GemmaConfig(
        hidden_size=48, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=24,
        num_hidden_layers=2, vocab_size=53, max_position_embeddings=64,
    )  # fmt: skip
    model = with_weights(modeling.GemmaForCausalLM(config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(10)) * 0.5)
    ids = torch.randint(53, (1, 12), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        want = model(ids).logits
    calls = []

    def forward(self, x):
        calls.append(x.shape)
        return lz.gemma_rms_norm(x, self.weight, self.eps)

    monkeypatch.setattr(modeling.GemmaRMSNorm, "forward", forward)
    with torch.no_grad():
        assert_close(model(ids).logits, want, tolerance("logits", "float32"))
        assert len(calls) == 5
        monkeypatch.setattr(modeling.GemmaRMSNorm, "forward", lambda self, x: lz.rms_norm(x, self.weight, self.eps))
        assert not compare(model(ids).logits, want, Tolerance(1e-2, 1e-2)).ok  # without the offset it is another model
