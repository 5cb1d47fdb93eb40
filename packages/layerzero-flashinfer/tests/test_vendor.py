"""The compile cache, what is compiled for which shapes, and limits that are refused before FlashInfer sees them."""

from __future__ import annotations

import os
import stat
import sys

import pytest
import torch

from layerzero.errors import BackendNotAvailableError
from layerzero.model.op import Call
from layerzero.registry.capabilities import load_capabilities
from layerzero_flashinfer import modules, plugin
from layerzero_flashinfer.options import Options, options
from layerzero_flashinfer.vendor import cache_base, lib, prepare, starts_with
from layerzero_verify.testing import fakes
from layerzero_verify.testing.kit import import_string, operation
from tools.pretended_vendors import pretend

KERNELS = {spec.kernel_id: spec for spec in load_capabilities(plugin.CAPABILITIES).kernels}


@pytest.mark.req("R-BK-FI-05")
def test_compiled_kernels_are_kept_below_our_cache_which_is_ours_alone(tmp_path):
    env = {"LAYERZERO_JIT_CACHE_DIR": str(tmp_path / "jit")}
    base = prepare(env)
    assert base == tmp_path / "jit" / "flashinfer" and env["FLASHINFER_WORKSPACE_BASE"] == str(base)
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert prepare(env) == base
    assert cache_base({"XDG_CACHE_HOME": "/somewhere"}).parts[-3:] == ("layerzero", "jit", "flashinfer")


@pytest.mark.req("R-BK-FI-05")
@pytest.mark.parametrize("named", [False, True], ids=["ours", "the user's"])
def test_flashinfer_is_told_where_to_keep_what_it_compiles_before_it_is_imported(tmp_path, monkeypatch, named):
    """A module in its place reads the variable as it does: once, while it is imported."""
    code = "import os\nFOLDER = os.environ['FLASHINFER_WORKSPACE_BASE']\n"
    (tmp_path / "flashinfer.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setenv("LAYERZERO_JIT_CACHE_DIR", str(tmp_path / "jit"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "theirs") if named else "")
    lib.cache_clear()
    try:
        found = lib().FOLDER
    finally:
        lib.cache_clear()
        sys.modules.pop("flashinfer", None)
    assert found == str(tmp_path / "theirs" if named else tmp_path / "jit" / "flashinfer")
    assert (tmp_path / "jit" / "flashinfer").is_dir() is not named


def test_a_cache_the_user_names_is_left_alone(tmp_path):
    env = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "theirs"), "LAYERZERO_JIT_CACHE_DIR": str(tmp_path / "ours")}
    assert prepare(env) == tmp_path / "theirs"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["writable", "link"])
def test_a_cache_that_others_could_fill_is_refused(tmp_path, kind):
    ours = tmp_path / "flashinfer"
    if kind == "writable":
        ours.mkdir(mode=0o700)
        os.chmod(ours, 0o777)
    else:
        (tmp_path / "elsewhere").mkdir()
        ours.symlink_to(tmp_path / "elsewhere")
    env = {"LAYERZERO_JIT_CACHE_DIR": str(tmp_path)}
    with pytest.raises(BackendNotAvailableError) as caught:
        prepare(env)
    assert str(ours) in str(caught.value) and "FLASHINFER_WORKSPACE_BASE" not in env


def test_a_missing_library_of_the_cute_compiler_is_named_with_its_package():
    with pretend(
        {"flashinfer-python": "0.6.6", "flashinfer-cubin": None, "flashinfer-jit-cache": "0.6.6"},
        {"flashinfer": RuntimeError("No CTK flavor installed")},
    ):
        status = plugin.layerzero_capabilities(fakes.gpu(90))
    assert (status.available, status.reasons[0].code.value) == (False, "BACKEND_IMPORT_FAILED")
    assert status.fix.startswith("pip install 'nvidia-cutlass-dsl[cu13]'")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ((False, None, None, None), Options(False, -1, 0.0, 0.125, 1.0)),
        (("bottom_right", (7, 0), 30.0, 0.5), Options(True, 7, 30.0, 0.5, 1.0)),
        ((False, (7, 0), None, -0.5), Options(True, 7, 0.0, 0.5, -1.0)),
        ((True, (-1, -1), None, 0.0), Options(True, -1, 0.0, 1.0, 0.0)),
    ],
)
def test_options_in_flashinfers_words(asked, wanted):
    assert options(*asked, 64) == wanted


def context(op, args, layout=None):
    return operation(op).describe(Call(args, fakes.gpu(90), layout, None, False))


def attention(head_dim=128, heads=8, kv_heads=2, rows=16, **options):
    q, k, v = (torch.empty(1, h, rows, head_dim, dtype=torch.bfloat16) for h in (heads, kv_heads, kv_heads))
    args = (q, k, v, None, 0.0, options.get("causal", False), None, options.get("window"), None, None, False)
    return context("attention", args, "BHSD")


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 192, 512])
def test_widths_it_was_not_written_for_are_refused_by_name(head_dim):
    """head_dim 16 has crashed a whole process."""
    for name, spec in KERNELS.items():
        if spec.op == "attention":
            assert "HEAD_DIM_INVALID" in [r.code.value for r in spec.check(attention(head_dim))], name


@pytest.mark.req("R-SEL-15")
@pytest.mark.parametrize("kernel_id", [name for name, spec in KERNELS.items() if spec.op == "attention"])
def test_every_kernel_of_attention_takes_the_widths_64_128_and_256_and_neither_84_nor_320(kernel_id):
    """FlashInfer's widths are a list, so that one beyond the largest is no member of it rather than too large."""

    def said(head_dim):
        found = [why for why in KERNELS[kernel_id].check(attention(head_dim)) if why.code.value.startswith("HEAD_DIM")]
        return {why.code.value for why in found if why.value == head_dim}

    assert [said(head_dim) for head_dim in (64, 128, 256)] == [set()] * 3
    for head_dim in (84, 320):
        assert said(head_dim) & {"HEAD_DIM_INVALID", "HEAD_DIM_TOO_LARGE"}


def test_group_sizes_without_a_kernel_are_refused_on_cuda_cores_alone():
    ctx = attention(heads=10, kv_heads=2, rows=1)
    (why,) = [r for r in KERNELS["flashinfer.attention.single_decode"].check_call(ctx) if "gqa" in str(r)]
    assert why.code.value == "DIM_OUT_OF_RANGE"
    assert not [r for r in KERNELS["flashinfer.attention.single_decode_tc"].check_call(ctx) if "gqa" in str(r)]


def test_one_query_is_not_offered_the_same_kernel_twice():
    """Of one query `single_fa2` and `single_decode_tc` are one and the same: a race of the two is won by chance."""

    def refused(name: str, rows: int) -> bool:
        kernel = KERNELS[f"flashinfer.attention.{name}"]
        return "SEQ_LEN_TOO_SHORT" in [r.code.value for r in kernel.check(attention(rows=rows))]

    assert refused("single_fa2", 1) and not refused("single_fa2", 2) and not refused("single_decode_tc", 1)


def test_a_window_ahead_is_refused_by_the_predicate():
    predicate = import_string(KERNELS["flashinfer.attention.single_fa2"].predicate)
    assert predicate(attention(window=(5, 3)))[0].code == "WINDOW_UNSUPPORTED"
    for window, causal in (((5, 0), False), ((5, -1), False), (None, False), ((5, 3), True)):
        assert predicate(attention(window=window, causal=causal)) == []


@pytest.mark.req("R-BK-FI-05")
def test_artifacts_differ_exactly_where_the_compiled_module_does(recorded):
    from layerzero.model.artifact import artifact_of

    spec = KERNELS["flashinfer.attention.single_fa2"]
    plain = artifact_of(spec, attention(), "here")
    assert artifact_of(spec, attention(rows=99, heads=4, causal=True), "here") == plain
    assert artifact_of(spec, attention(window=(5, 0)), "here") == artifact_of(spec, attention(window=(9, 0)), "here")
    assert (
        len({plain, artifact_of(spec, attention(64), "here"), artifact_of(spec, attention(window=(5, 0)), "here")}) == 3
    )
    assert all(spec.jit for spec in KERNELS.values())


class Spec:
    def __init__(self, name, compiled=False):
        self.name, self.is_compiled = name, compiled


@pytest.mark.req("R-BK-FI-05", "R-WARM-04")
def test_warm_up_compiles_what_is_missing_all_at_once(vendor, monkeypatch):
    built = []
    vendor.module("flashinfer.jit").build_jit_specs = lambda specs, verbose: built.append([s.name for s in specs])

    def generator(module, name):
        return lambda *args: Spec(f"{name}:{'-'.join(str(a) for a in args)}", compiled=name == "gen_norm_module")

    monkeypatch.setattr(modules, "_generator", generator)
    shapes = [
        {"op": "rms_norm"},
        {"op": "attention", "dtype": "bfloat16", "dims": {"head_dim": 128, "batch": 1, "seq_len_q": 512}},
        {"op": "attention", "dtype": "bfloat16", "dims": {"head_dim": 128, "batch": 1, "seq_len_q": 64}},
        {"op": "paged_attention", "dtype": "float16", "dims": {"head_dim": 64, "seq_len_q": 1}, "window": [7, 0]},
        {"op": "silu_and_mul"},
        {"op": "something_else"},
    ]
    with pretend({"flashinfer-python": "0.6.6"}):
        plugin.layerzero_warmup(shapes)
    (names,) = built
    assert len(names) == len(set(names)) == 4
    kinds = sorted(name.partition(":")[0] for name in names)
    assert kinds == [
        "gen_act_and_mul_module",
        "gen_batch_decode_module",
        "gen_batch_prefill_module",
        "gen_single_prefill_module",
    ]
    (decode,) = (name for name in names if name.startswith("gen_batch_decode_module"))
    assert "-64-64-0-True-False" in decode  # the sizes and features of the call
    plugin.layerzero_warmup([{"op": "rms_norm"}])
    assert len(built) == 1


def test_warm_up_without_the_vendor_does_nothing():
    with pretend({"flashinfer-python": None}):
        assert plugin.layerzero_warmup([{"op": "rms_norm"}]) is None


def test_an_inner_call_that_has_changed_is_left_for_the_public_one(vendor, monkeypatch):
    from types import SimpleNamespace

    from layerzero_flashinfer import single

    def changed(query, key, value):
        raise AssertionError("called although its parameters are others")

    monkeypatch.setattr(
        vendor.module("flashinfer.prefill"), "get_single_prefill_module", lambda *_: SimpleNamespace(run=changed)
    )
    seen = {}

    def public(q, k, v, **options):
        vendor.bind("flashinfer.single_prefill_with_kv_cache", q, k, v, **options)
        seen.update(options)
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    vendor.module("flashinfer").single_prefill_with_kv_cache = public
    q = torch.randn(1, 5, 4, 64).half()
    out, lse = single.prefill_fa2(q, q, q, None, 0.0, True, None, (3, 0), None, None, True)
    assert (out.shape, lse.shape) == ((1, 5, 4, 64), (1, 4, 5))
    assert (seen["backend"], seen["causal"], seen["window_left"]) == ("fa2", True, 3)
    assert starts_with(lambda q, k, v=None, *rest: None, ("q", "k")) and not starts_with(lambda a: None, ("q",))
