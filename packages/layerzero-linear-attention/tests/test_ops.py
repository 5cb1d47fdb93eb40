"""The ops against an oracle in numpy, their gradients, and what a state and packed sequences have to mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from linear_attention_calls import BY_NAME, NAMES, NEEDS, ORACLES, STATE, along_tokens, example

import layerzero as lz
from layerzero.errors import InvalidInputError
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.plugin import load_capabilities
from layerzero_linear_attention import chunks, fla_plugin, flashinfer_plugin

WAYS = ("reference", "baseline")


def computed(name, way, args):
    """A result of the reference, or of the baseline."""
    return BY_NAME[name].function(*args) if way == "reference" else getattr(chunks, name)(*args)


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS.keys())
@pytest.mark.parametrize("name", NAMES)
def test_reference_and_baseline_are_the_oracle_in_float64(name, needs):
    args = example(name, *needs, batch=3, seq_len=70)
    expected = ORACLES[name](*args)
    for way in WAYS:
        for found, wanted in zip(computed(name, way, args), expected, strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_pieces_is_the_prompt_in_one(name, way):
    args = example(name, "initial_state", seq_len=70)
    whole, last = computed(name, way, args)
    pieces, state = [], args[STATE[name]]
    for begin, end in ((0, 1), (1, 3), (3, 67), (67, 70)):
        part = along_tokens(name, args, begin, end)
        part[STATE[name]] = state
        out, state = computed(name, way, part)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 2 if name == "causal_conv1d" else 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences_are_each_alone_also_empty_ones(name, way):
    args = list(example(name, "initial_state", "varlen", batch=4, seq_len=40))
    place = STATE[name]
    args[place + 1] = offsets = torch.tensor([0, 7, 7, 39, 40])
    out, last = computed(name, way, args)
    for n, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        alone = along_tokens(name, args, begin, end)
        alone[place], alone[place + 1] = args[place][n : n + 1], None
        found, state = computed(name, way, alone)
        torch.testing.assert_close(found, out.narrow(2 if name == "causal_conv1d" else 1, begin, end - begin))
        torch.testing.assert_close(state, last[n : n + 1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_small_differences(name, way):
    sizes = {key: 2 for key in ("key_heads", "heads", "key_dim", "value_dim", "groups", "head_dim", "state_size")}
    sizes |= {"channels": 3, "batch": 2, "seq_len": 5}
    known = {key: size for key, size in sizes.items() if key in BY_NAME[name].sizes}
    args = example(name, *NEEDS["everything"], grad=True, **known)
    places = [i for i, item in enumerate(args) if isinstance(item, torch.Tensor) and item.requires_grad]

    def function(*leaves):
        given = list(args)
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf
        return computed(name, way, given)

    assert len(places) >= 4
    assert torch.autograd.gradcheck(function, [args[place] for place in places])


@pytest.mark.parametrize("name", ["gated_delta_rule", "kimi_delta_attention"])
def test_strong_decays_give_no_nan_in_chunks(name):
    args = list(example(name, dtype="float32"))
    args[3] = args[3] - 60
    for found, wanted in zip(computed(name, "baseline", args), ORACLES[name](*args), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_describing_an_example_gives_its_context(name):
    from layerzero.tuning.inputs import build

    args = example(name, *NEEDS["everything"], batch=3, seq_len=33)
    first = lz.explain(name, *args).decision.context
    again = lz.explain(name, *build(first).args).decision.context
    assert (again.dims, again.needs, again.dtypes) == (first.dims, first.needs, first.dtypes)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_called_by_name_in_eager_and_in_one_graph(name):
    args = example(name, *NEEDS["everything"], dtype="float32", seq_len=9)
    expected = ORACLES[name](*args)
    compiled = torch.compile(lambda *given: getattr(lz.ops, name)(*given), fullgraph=True, backend="aot_eager")
    for function in (getattr(lz.ops, name), compiled):
        for found, wanted in zip(function(*args), expected, strict=True):
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gated_delta_rule", "causal_conv1d"])
def test_a_compiled_gradient_is_the_eager_one(name):
    args = example(name, "initial_state", dtype="float32", grad=True, seq_len=9)
    leaves = [item for item in args if isinstance(item, torch.Tensor) and item.requires_grad]

    def loss(*given):
        out, state = getattr(lz.ops, name)(*given)
        return out.square().sum() + state.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted, found = torch.autograd.grad(loss(*args), leaves), torch.autograd.grad(compiled(*args), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_level_of_verify_passes(name):
    report = lz.verify(op=name, level=1)
    assert report.ok, [str(item) for item in report.failures]
    assert {f"reference.{name}.plain", f"torch.{name}.baseline"} <= set(report.kernels)


def test_no_file_of_the_core_names_these_ops():
    files = [path for path in Path(lz.__file__).parent.rglob("*") if path.suffix in {".py", ".json", ".toml", ".c"}]
    assert len(files) > 100
    assert not [path for path in files if any(name in path.read_text(encoding="utf-8") for name in NAMES)]


def test_wrong_calls_are_refused_in_words():
    query, key, value, g, beta, *rest = example("gated_delta_rule")
    for args, words in (
        ((query, key[:, 1:], value, g, beta, *rest), "key"),
        ((query, key, value[:, :, :3], g, beta, *rest), "multiple"),
        ((query, key, value, g[..., None], beta, *rest), "g has shape"),
        ((query, key, value, g, beta, None, torch.tensor([0, 3]), None, False), "one row"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            lz.ops.gated_delta_rule(*args)
    x, weight, *_ = example("causal_conv1d")
    with pytest.raises(InvalidInputError, match="activation"):
        lz.ops.causal_conv1d(x, weight, activation="gelu")


@pytest.mark.parametrize(("name", "dist"), [("fla", "fla-core"), ("flashinfer_linear", "flashinfer-python")])
def test_without_its_vendor_a_backend_says_how_to_get_it(name, dist):
    from layerzero.plugin.manager import load_plugins
    from tools.pretended_vendors import pretend

    with pretend({dist: None}):
        record = load_plugins(env={}).record(name)
    assert record.state == "unavailable"
    assert f"pip install 'layerzero-linear-attention[{name.removesuffix('_linear')}]'" in record.fix


def test_the_plugins_keep_the_contract_and_register_without_importing_a_vendor():
    from layerzero_verify.testing.kit import Kit
    from tools.pretended_vendors import pretend

    vendors = {"fla-core": "0.6.0", "flashinfer-python": "0.6.6"}
    with pretend(vendors, dict.fromkeys(("fla", "flashinfer", "triton"), ImportError("too early"))) as imported:
        kits = [Kit.open(name) for name in ("fla", "flashinfer_linear", "linear_attention")]
    for kit in kits:
        assert (kit.load_error, kit.hook_error, kit.register_error) == (None, None, None)
    assert [len(kit.kernels) for kit in kits[:2]] == [2, 2]
    assert imported == []


def test_a_package_made_without_a_compiler_keeps_its_kernels_for_gpus(monkeypatch, tmp_path):
    from layerzero.plugin import Registrar
    from layerzero_linear_attention import plugin

    monkeypatch.setattr(plugin, "LIBRARY", tmp_path / "none.so")
    registrar = Registrar("linear_attention")
    plugin.layerzero_register(registrar)
    kernels = registrar.backends["linear_attention"].kernels
    assert {item.op for item in kernels} == set(NAMES)
    assert all("triton" in item.kernel_id for item in kernels)


@pytest.mark.parametrize(
    ("triton", "tilelang", "changes", "refused"),
    [
        ("3.6.0", None, {}, True),
        ("3.4.0", None, {}, True),
        ("3.7.1", None, {}, False),
        ("3.6.0", "0.1.6", {}, False),
        ("3.6.0", None, {"needs_grad": False}, False),
        ("3.6.0", None, {"device": DeviceSpec.for_sm(80)}, False),
        (None, None, {}, False),
    ],
)
def test_a_backward_that_raises_on_hopper_is_refused_beforehand(monkeypatch, triton, tilelang, changes, refused):
    installed = {"triton": triton, "tilelang": tilelang}
    monkeypatch.setattr(fla_plugin, "dist_version", installed.get)
    context = Context("gated_delta_rule", **{"device": DeviceSpec.for_sm(90), "needs_grad": True, **changes})
    codes = [item.code.value for item in fla_plugin.hopper_backward(context)]
    assert codes == ["BACKWARD_UNSUPPORTED"] * refused


def test_untuned_prompts_go_to_flashinfer_where_there_are_heads_enough():
    kernels = [
        next(kernel for kernel in load_capabilities(plugin.CAPABILITIES).kernels if kernel.op == "gated_delta_rule")
        for plugin in (flashinfer_plugin, fla_plugin)
    ]
    for heads, first in ((16, 0), (32, 0), (8, 1)):
        dims = (("seq_len", 8192), ("heads", heads))
        expected = [kernel.prior(Context("gated_delta_rule", dims=dims)) for kernel in kernels]
        assert expected.index(max(expected)) == first, heads
