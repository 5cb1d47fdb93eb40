"""`lz.rope_tables`: every scaling against its formula in plain Python, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.numerics import Tolerance, assert_close, tolerance
from layerzero_models.rope_tables import ROPE_TYPES, RopeScaling

FINE = Tolerance(1e-11, 1e-11)  # float64 with angles up to a few thousand
DIM = 32
SHORT, LONG = [1.0 + i / 16 for i in range(DIM // 2)], [1.0 + i / 2 for i in range(DIM // 2)]

ENTRIES = {
    "none": None,
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn fractional": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 90, "truncate": False, "beta_fast": 16,
        "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256, "rope_theta": 500000.0,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
}  # fmt: skip


def expected(entry, dim, length):
    """(frequency of each pair, factor on cos and sin), pair by pair, from the papers."""
    entry = entry or {}
    kind, base, s = entry.get("rope_type", "default"), entry.get("rope_theta", 10000.0), entry.get("factor", 1.0)
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "linear":
        return [f / s for f in plain], 1.0
    if kind == "ntk":
        return [(base * s ** (dim / (dim - 2))) ** (-2 * i / dim) for i in range(dim // 2)], 1.0
    if kind == "dynamic":
        longest = entry["max_position_embeddings"]
        s = s * max(length, longest) / longest - (s - 1)
        return [(base * s ** (dim / (dim - 2))) ** (-2 * i / dim) for i in range(dim // 2)], 1.0
    if kind == "yarn":
        context = entry["original_max_position_embeddings"]
        # pair i turns context * base ** (-2i / dim) / 2 pi times; solved for i
        edges = [
            dim / 2 * math.log(context / (2 * math.pi * turns), base)
            for turns in (entry.get("beta_fast", 32), entry.get("beta_slow", 1))
        ]
        if entry.get("truncate", True):
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        low, high = max(edges[0], 0), min(edges[1], dim - 1)
        mixed = []
        for i, f in enumerate(plain):
            slow = min(max((i - low) / (high - low), 0.0), 1.0)
            mixed.append(slow * f / s + (1 - slow) * f)
        grown = [0.1 * entry.get(name, 1.0) * math.log(s) + 1 for name in ("mscale", "mscale_all_dim")]
        return mixed, grown[0] / grown[1] if "mscale" in entry else grown[0]
    if kind == "llama3":
        context, low, high = (
            entry[n] for n in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        mixed = []
        for f in plain:
            wave = 2 * math.pi / f
            if wave < context / high:
                mixed.append(f)
            elif wave > context / low:
                mixed.append(f / s)
            else:
                smooth = (context / wave - low) / (high - low)
                mixed.append((1 - smooth) * f / s + smooth * f)
        return mixed, 1.0
    if kind == "longrope":
        context = entry["original_max_position_embeddings"]
        divisors = entry["long_factor"] if length > context else entry["short_factor"]
        return [f / d for f, d in zip(plain, divisors, strict=True)], math.sqrt(1 + math.log(s) / math.log(context))
    if kind == "proportional":
        turning = int(entry["partial_rotary_factor"] * dim) // 2
        return [f / s if i < turning else 0.0 for i, f in enumerate(plain)], 1.0
    return plain, 1.0


@pytest.mark.parametrize("length", [48, 300])
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.req("R-POS-02")
def test_float64_tables_follow_the_formula(name, length):
    cos, sin = lz.rope_tables(DIM, length, scaling=ENTRIES[name], dtype=torch.float64)
    frequencies, factor = expected(ENTRIES[name], DIM, length)
    want = [[(factor * math.cos(p * f), factor * math.sin(p * f)) for f in frequencies] for p in range(length)]
    want = torch.tensor(want, dtype=torch.float64)
    assert cos.shape == sin.shape == (length, DIM // 2)
    assert_close((cos, sin), (want[..., 0], want[..., 1]), FINE)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.req("R-POS-02", "R-TOL-04")
def test_float32_tables_are_near_and_narrower_ones_are_those_rounded(name):
    exact = lz.rope_tables(DIM, 8, scaling=ENTRIES[name], dtype=torch.float64)
    single = lz.rope_tables(DIM, 8, scaling=ENTRIES[name])
    assert {table.dtype for table in single} == {torch.float32}
    assert_close(single, exact, tolerance("rope", "float32"))
    for dtype in (torch.bfloat16, torch.float16):
        narrow = lz.rope_tables(DIM, 8, scaling=ENTRIES[name], dtype=dtype)
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(narrow, single, strict=True))


def frequencies_of(**options):
    """Angles at position 1, which are the frequencies (all below pi)."""
    cos, sin = lz.rope_tables(DIM, 2, dtype=torch.float64, **options)
    return torch.atan2(sin[1], cos[1])


@pytest.mark.req("R-POS-02")
def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest_by_the_factor():
    plain, scaled = frequencies_of(), frequencies_of(scaling=ENTRIES["ntk"])
    assert scaled[0].item() == pytest.approx(plain[0].item(), rel=1e-12)
    assert scaled[-1].item() == pytest.approx(plain[-1].item() / 4.0, rel=1e-12)
    assert (scaled[1:-1] < plain[1:-1]).all() and (scaled[1:-1] > plain[1:-1] / 4.0).all()


@pytest.mark.req("R-POS-02")
def test_yarn_leaves_fast_pairs_alone_divides_slow_ones_and_scales_attention():
    entry = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5}
    plain, scaled = frequencies_of(), frequencies_of(scaling=entry)
    turns = 4096 * plain / (2 * math.pi)
    assert torch.allclose(scaled[turns > 64], plain[turns > 64], rtol=1e-12)
    assert torch.allclose(scaled[turns < 0.5], plain[turns < 0.5] / 8.0, rtol=1e-12)
    cos, sin = lz.rope_tables(DIM, 3, scaling=entry, dtype=torch.float64)
    assert torch.allclose(cos.square() + sin.square(), torch.full_like(cos, 2.25))


@pytest.mark.req("R-POS-02")
def test_dynamic_is_plain_up_to_the_models_context_and_follows_the_present_length_beyond():
    entry = {"rope_type": "dynamic", "factor": 2.0}
    for seq_len in (1, 64):
        same = frequencies_of(scaling=entry, max_position_embeddings=64, seq_len=seq_len)
        assert torch.allclose(same, frequencies_of(), rtol=1e-12)
    beyond = [frequencies_of(scaling=entry, max_position_embeddings=64, seq_len=n)[-1].item() for n in (65, 128, 512)]
    assert beyond[0] > beyond[1] > beyond[2]
    # the same as static NTK with the factor the length asks for: 2 * 128 / 64 - 1
    static = frequencies_of(scaling={"rope_type": "ntk", "factor": 3.0})
    assert beyond[1] == pytest.approx(static[-1].item(), rel=1e-12)


@pytest.mark.req("R-POS-02")
def test_longrope_changes_its_divisors_past_the_original_context():
    plain = frequencies_of()
    for seq_len, divisors in ((64, SHORT), (65, LONG)):
        cos, sin = lz.rope_tables(DIM, 2, scaling=ENTRIES["longrope"], seq_len=seq_len, dtype=torch.float64)
        divisor = torch.tensor(divisors, dtype=torch.float64)
        assert torch.allclose(torch.atan2(sin[1], cos[1]) * divisor, plain, rtol=1e-12)


@pytest.mark.req("R-POS-02")
def test_spellings_of_older_configurations_and_the_value_mean_the_same():
    new = lz.rope_tables(DIM, 9, scaling=ENTRIES["longrope"])
    old = {**ENTRIES["longrope"], "type": "su", "finetuned": True, "attention_factor": None}
    del old["rope_type"]
    value = RopeScaling.parse(ENTRIES["longrope"])
    assert hash(value) == hash(RopeScaling.parse(old))
    for scaling in (old, value):
        assert all(torch.equal(a, b) for a, b in zip(lz.rope_tables(DIM, 9, scaling=scaling), new, strict=True))
    with_factor = lz.rope_tables(DIM, 9, scaling=ENTRIES["yarn"])
    without = {k: v for k, v in ENTRIES["yarn"].items() if k != "factor"}
    derived = lz.rope_tables(DIM, 9, scaling=without, max_position_embeddings=512)
    assert all(torch.equal(a, b) for a, b in zip(with_factor, derived, strict=True))


@pytest.mark.req("R-POS-02")
def test_an_unknown_variant_is_refused_with_the_names_of_the_known_ones():
    for word in ("mrope", "YARN", "", 7, ["yarn"]):
        with pytest.raises(InvalidInputError) as caught:
            lz.rope_tables(DIM, 4, scaling={"rope_type": word})
        assert caught.value.code == "VALUE_INVALID"
        assert all(name in str(caught.value) for name in ROPE_TYPES)


BAD = {
    "no factor": ({"rope_type": "linear"}, "SCHEMA_FIELD_MISSING", "factor"),
    "no divisors": ({"rope_type": "longrope", "factor": 2.0}, "SCHEMA_FIELD_MISSING", "short_factor"),
    "no ramp": ({"rope_type": "llama3", "factor": 2.0}, "SCHEMA_FIELD_MISSING", "low_freq_factor"),
    "no context": ({"rope_type": "dynamic", "factor": 2.0}, "SCHEMA_FIELD_MISSING", "max_position_embeddings"),
    "no original context": ({"rope_type": "yarn", "factor": 2.0}, "SCHEMA_FIELD_MISSING", "original_max"),
    "yarn without factor": (
        {"rope_type": "yarn", "original_max_position_embeddings": 64}, "SCHEMA_FIELD_MISSING", "factor"),
    "misspelt": ({"rope_type": "linear", "facto": 2.0}, "SCHEMA_FIELD_UNKNOWN", "factor"),
    "sections": ({"rope_type": "default", "mrope_section": [8, 4, 4]}, "SCHEMA_FIELD_UNKNOWN", "mrope_section"),
    "by layer type": ({"full_attention": {"rope_type": "default"}}, "TYPE_INVALID", "full_attention"),
    "negative factor": ({"rope_type": "linear", "factor": -2.0}, "VALUE_INVALID", "-2.0"),
    "infinite factor": ({"rope_type": "linear", "factor": math.inf}, "VALUE_INVALID", "inf"),
    "text factor": ({"rope_type": "linear", "factor": "2"}, "VALUE_INVALID", "'2'"),
    "short list": ({**ENTRIES["longrope"], "short_factor": [1.0]}, "SHAPE_INVALID", "16 numbers"),
    "negative divisor": ({**ENTRIES["longrope"], "long_factor": [-1.0] * 16}, "VALUE_INVALID", "long_factor"),
    "no list": ({**ENTRIES["longrope"], "long_factor": 2.0}, "VALUE_INVALID", "long_factor"),
    "ramp upside down": ({**ENTRIES["llama3"], "high_freq_factor": 0.5}, "VALUE_INVALID", "high_freq_factor"),
    "no entry": ("yarn", "TYPE_INVALID", "str"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.req("R-POS-02")
def test_an_entry_that_means_nothing_is_refused_with_its_field(name):
    entry, code, word = BAD[name]
    with pytest.raises(InvalidInputError) as caught:
        lz.rope_tables(DIM, 4, scaling=entry)
    assert caught.value.code == code and word in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rotary_dim": 31}, {"rotary_dim": 0}, {"rotary_dim": 8.0}, {"rotary_dim": True}, {"length": 0}, {"length": -1},
        {"seq_len": 0}, {"max_position_embeddings": 0}, {"base": 1.0}, {"base": math.nan}, {"base": "10000"},
        {"base": 500.0, "scaling": {"rope_theta": 501.0}}, {"dtype": torch.int32}, {"dtype": "float32"},
        {"rotary_dim": 2, "scaling": {"rope_type": "ntk", "factor": 2.0}},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(InvalidInputError) as caught:
        lz.rope_tables(**{"rotary_dim": 32, "length": 4, **arguments})
    assert caught.value.code in ("VALUE_INVALID", "DTYPE_UNSUPPORTED")


def test_base_comes_from_the_call_or_the_entry():
    a = lz.rope_tables(DIM, 5, base=500.0)
    b = lz.rope_tables(DIM, 5, scaling={"rope_theta": 500.0, "partial_rotary_factor": 0.5})
    c = lz.rope_tables(DIM, 5, base=500.0, scaling={"rope_theta": 500.0})
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(a, b, c, strict=True))
    assert not torch.equal(a[0], lz.rope_tables(DIM, 5)[0])


def test_tables_can_be_made_inside_a_compiled_function():
    def turn(x):
        cos, sin = lz.rope_tables(8, 4, scaling={"rope_type": "yarn", "factor": 2.0, "max_position_embeddings": 16})
        return x * cos + sin

    x = torch.ones(4, 4)
    assert torch.equal(torch.compile(turn, backend="eager", fullgraph=True)(x), turn(x))


# -- properties ----------------------------------------------------------------------------------
numbers = st.floats(1.0, 64.0)
entries = st.one_of(
    st.just({}),
    st.builds(lambda f, t: {"rope_type": t, "factor": f}, numbers, st.sampled_from(["linear", "ntk", "dynamic"])),
    st.builds(
        lambda f, n, b: {"rope_type": "yarn", "factor": f, "original_max_position_embeddings": n, "truncate": b},
        numbers, st.integers(2, 10_000), st.booleans(),
    ),
    st.builds(
        lambda f, n, w: {"rope_type": "llama3", "factor": f, "original_max_position_embeddings": n,
                         "low_freq_factor": 1.0, "high_freq_factor": 1.0 + w},
        numbers, st.integers(2, 10_000), st.floats(0.5, 8.0),
    ),
)  # fmt: skip


@given(entries, st.integers(2, 24).map(lambda n: 2 * n), st.integers(1, 40), st.floats(2.0, 1e6))
@settings(max_examples=60, deadline=None)
@pytest.mark.req("R-POS-02")
def test_every_scaling_slows_the_rotation_and_keeps_the_length_of_a_pair(entry, dim, length, base):
    cos, sin = lz.rope_tables(
        dim, max(length, 2), base=base, scaling=entry, max_position_embeddings=16, dtype=torch.float64
    )
    radius = cos.square() + sin.square()
    assert torch.allclose(radius, radius[0, 0].expand_as(radius), rtol=1e-12)
    assert radius[0, 0] >= 1.0 - 1e-12  # attention factors never shrink scores
    assert torch.equal(cos[0], cos[0, 0].expand_as(cos[0])) and torch.count_nonzero(sin[0]) == 0
    angle = torch.atan2(sin[1], cos[1])
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    factor = entry.get("factor", 1.0)
    if entry.get("rope_type") == "dynamic":
        factor = max(1.0, factor * max(length, 2) / 16 - (factor - 1))
    assert (angle <= plain * (1 + 1e-9)).all() and (angle >= plain / factor * (1 - 1e-9)).all()


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=4), st.just([]), st.just({})
)
keys = st.sampled_from([
    "rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "short_factor",
    "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "other",
])  # fmt: skip


@given(st.dictionaries(keys, junk | st.sampled_from(ROPE_TYPES), max_size=5))
@settings(max_examples=150, deadline=None)
def test_any_mapping_gives_tables_or_one_clear_refusal(entry):
    try:
        cos, sin = lz.rope_tables(8, 3, scaling=entry)
    except InvalidInputError:
        return
    assert cos.shape == sin.shape == (3, 4)
    assert cos.isfinite().all() and sin.isfinite().all()
