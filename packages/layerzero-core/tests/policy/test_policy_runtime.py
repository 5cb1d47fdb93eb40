"""Policy at run time: who wins, when a change takes effect, and what it costs an earlier choice."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.device.catalogue import named_device
from layerzero.errors import (
    ConfigurationError,
    LockedKernelError,
    NoKernelFoundError,
    PolicyValidationError,
    UnknownNameError,
)
from layerzero.model.config import Policy
from layerzero.model.context import Context, Strides
from layerzero.model.enums import Causal, Layout, MaskKind
from layerzero.runtime.policies import policies
from layerzero.runtime.state import state
from layerzero.selection.world import Measurements

X, W = torch.randn(3, 8), torch.ones(8)
OP = "rms_norm"
A, B, C, D, E = (f"p.rms_norm.{name}" for name in "abcde")
REFERENCE = "reference.rms_norm.plain"


@pytest.fixture
def five(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Five equals; without any policy the first by name wins."""
    for name in [key for key in os.environ if key.startswith("LAYERZERO_") and key != "LAYERZERO_PROVE"]:
        monkeypatch.delenv(name)
    lab.kernels = [lab.kernel(kernel_id) for kernel_id in (A, B, C, D, E)]
    lab.use(*lab.kernels)
    return lab


def winner(lab: Any, **kwargs: Any) -> str:
    """The kernel that really ran, which is also the one that is named."""
    _, ran = lab.run(lz.rms_norm, X, W, **kwargs)
    assert ran == [lz.which(OP, X, W, **kwargs)]
    return str(ran[0])


def write(path: Path, text: str) -> None:
    """Write a policy file so that the change is seen even on a coarse clock."""
    path.write_text(text, encoding="utf-8")
    stamp = time.time_ns() + len(text)
    os.utime(path, ns=(stamp, stamp))


# -- precedence -----------------------------------------------------------------------------------
@pytest.mark.req("R-POL-02", "R-POL-03", "R-POL-11", "R-API-12", "R-API-13")
def test_call_beats_scope_beats_code_beats_environment_beats_file(
    five: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert winner(five) == A
    file = tmp_path / "layerzero.yaml"
    write(file, f"locks: {{{OP}: {B}}}\n")
    lz.load_config(file)
    assert winner(five) == B
    monkeypatch.setenv("LAYERZERO_LOCK_RMS_NORM", C)
    lz.reset()
    lz.load_config(file)
    state.use(five.registry)
    assert winner(five) == C
    lz.lock(OP, D)
    assert winner(five) == D
    with lz.scoped(locks={OP: E}):
        assert winner(five) == E
        assert winner(five, backend=B) == B
        assert winner(five) == E
    assert winner(five) == D
    lz.unlock(OP)
    assert winner(five) == C


@pytest.mark.req("R-POL-11")
def test_a_calls_own_backend_beats_locks_and_allow_lists_but_not_deny(five: Any) -> None:
    lz.lock(OP, C)
    lz.configure(allow=[C])
    assert winner(five, backend="reference") == REFERENCE
    assert winner(five, backend=D) == D
    assert winner(five, backend="p") == C  # the lock stands inside the backend that is asked for
    with lz.scoped(deny=[D]), pytest.raises(NoKernelFoundError):
        lz.rms_norm(X, W, backend=D)


@pytest.mark.req("R-POL-02")
def test_settings_follow_the_same_order(five: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "layerzero.toml"
    write(file, "strict_mode = true\n")
    assert lz.load_config(file).strict_mode is True
    monkeypatch.setenv("LAYERZERO_STRICT", "0")
    lz.reset()
    assert lz.load_config(file).strict_mode is False
    assert lz.configure(strict_mode=True).strict_mode is True
    with lz.scoped(strict_mode=False):
        assert lz.get_config().strict_mode is False
    assert lz.get_config().strict_mode is True


# -- lists, locks, boosts -------------------------------------------------------------------------
@pytest.mark.req("R-API-13", "R-POL-03")
def test_lock_unlock_and_get_locks(five: Any) -> None:
    assert lz.get_locks() == {}
    lz.lock(OP, D)
    assert lz.get_locks() == {OP: D}
    assert winner(five) == D
    assert lz.explain(OP, X, W).decision.locked
    lz.lock(OP, E)
    assert winner(five) == E
    lz.unlock()
    assert lz.get_locks() == {}
    assert winner(five) == A


@pytest.mark.req("R-POL-03")
@pytest.mark.parametrize("on_fault", ["raise", "fallback"])
def test_a_lock_beats_every_score(five: Any, on_fault: str) -> None:
    """Whatever speaks for another kernel: its priority, a boost, a preference, a measured time."""
    five.use(five.kernel("p.rms_norm.poor", priority=-50.0), *five.kernels, on_fault=on_fault)
    times = {"p.rms_norm.poor": 900.0, A: 1.0}
    state.publish(measurements=Measurements(lambda kernel_id, ctx: times.get(kernel_id), "made up"))
    lz.configure(avoid=["p.rms_norm.poor"], prefer=[A], boosts={A: 500.0})
    assert winner(five) == A
    scores = {item.kernel_id: item.score for item in lz.explain(OP, X, W).candidates if item.accepted}
    assert min(scores, key=lambda name: scores[name] or 0.0) == "p.rms_norm.poor"
    lz.lock(OP, "p.rms_norm.poor")
    for _ in range(2):
        assert winner(five) == "p.rms_norm.poor"
    lz.unlock(OP)
    assert winner(five) == A


@pytest.mark.req("R-API-13")
def test_unlocking_one_op_leaves_the_locks_of_others(five: Any) -> None:
    other = "reference.layer_norm.plain"
    assert lz.which("layer_norm", X, W) != other
    lz.lock(OP, D)
    lz.lock("layer_norm", other)
    assert lz.get_locks() == {OP: D, "layer_norm": other}
    assert winner(five) == D and lz.which("layer_norm", X, W) == other
    lz.unlock(OP)
    assert lz.get_locks() == {"layer_norm": other}
    assert winner(five) == A and lz.which("layer_norm", X, W) == other
    lz.unlock(OP)  # nothing to lift is no error


@pytest.mark.req("R-API-13")
@pytest.mark.parametrize(
    ("op", "kernel_id", "code"),
    [
        ("rms_nrom", A, "OP_UNKNOWN"),
        (OP, "p.rms_norm.z", "KERNEL_UNKNOWN"),
        (OP, "reference.attention.plain", "KERNEL_UNKNOWN"),
    ],
)
def test_a_lock_on_what_does_not_exist_is_refused(five: Any, op: str, kernel_id: str, code: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        lz.lock(op, kernel_id)
    assert caught.value.code == code
    assert lz.get_locks() == {}
    assert winner(five) == A


@pytest.mark.req("R-API-10", "R-POL-04", "R-POL-05", "R-POL-12")
def test_allow_deny_prefer_avoid_and_boosts_take_effect_at_the_next_call(five: Any) -> None:
    assert winner(five) == A
    lz.configure(deny=[A])
    assert winner(five) == B
    lz.configure(deny=[], allow=["p.rms_norm.d", "p.rms_norm.e"])
    assert winner(five) == D
    lz.configure(allow=[])
    lz.configure(prefer=[C])
    assert winner(five) == C
    lz.configure(prefer=[], avoid=["p.*"])
    assert winner(five) == "torch.rms_norm.native"
    lz.configure(avoid=[], boosts={E: 5.0})
    assert winner(five) == E
    parts = dict(lz.explain(OP, X, W).decision.winner.score_parts)
    assert parts["policy"] == 5.0


@pytest.mark.req("R-API-14")
def test_prefer_puts_a_backend_first_inside_the_block_and_only_where_it_can_run(lab: Any) -> None:
    slow, half = lab.kernel("slow.rms_norm.x", priority=-50.0), frozenset({"float16"})
    lab.use(slow, lab.kernel("fast.rms_norm.x", priority=500.0), lab.kernel("half.rms_norm.x", dtypes=half))
    assert winner(lab) == "fast.rms_norm.x"
    with lz.prefer("slow"):
        assert winner(lab) == "slow.rms_norm.x"
        with lz.prefer("half"):  # it takes no float32: the wish is no command, and that of outside holds
            assert winner(lab) == "slow.rms_norm.x"
        with lz.prefer("fast", "reference"):
            assert winner(lab) == "fast.rms_norm.x"
        assert winner(lab) == "slow.rms_norm.x"
    with lz.prefer("half"):
        assert winner(lab) == "fast.rms_norm.x"


@pytest.mark.req("R-API-15")
@pytest.mark.parametrize("settings", [{"locks": {OP: D}}, {"allow": ["p"]}, {"prefer": [B], "boosts": {C: 900.0}}])
def test_disabled_runs_only_fallbacks_whatever_else_was_asked_for(five: Any, settings: dict[str, Any]) -> None:
    lz.configure(**settings)
    usual = winner(five)
    assert usual != REFERENCE
    with lz.disabled():
        for _ in range(2):  # the second time the call is hot
            assert winner(five) == REFERENCE
    with pytest.raises(KeyError), lz.disabled():
        raise KeyError
    assert winner(five) == usual


@pytest.mark.req("R-API-15")
def test_disabled_runs_only_fallbacks(five: Any) -> None:
    assert winner(five) == A
    with lz.disabled():
        assert winner(five) == REFERENCE
        with lz.prefer(B):
            assert winner(five) == REFERENCE
        assert lz.validate(A, X, W)[0].code == "POLICY_DISABLED"
    assert winner(five) == A


@pytest.mark.req("R-EXC-02")
def test_without_fallbacks_a_call_nobody_serves_is_refused(lab: Any) -> None:
    lab.use(lab.kernel("p.rms_norm.half", dtypes=frozenset({"float16"})), only=True, fallback_enabled=False)
    with pytest.raises(NoKernelFoundError) as caught:
        lz.rms_norm(X, W)
    assert caught.value.code == "NO_KERNEL"
    assert "DTYPE_UNSUPPORTED" in str(caught.value)


@pytest.mark.req("R-POL-06")
def test_rules_match_ops_by_wildcard_and_fields_by_comparison(five: Any, tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    write(
        file,
        f"""
rules:
  - match: {{op: "rms_*", when: {{rows: ">4"}}}}
    lock: {B}
  - match: {{op: "*norm", when: {{rows: "<3", dtype: float32}}}}
    lock: {C}
  - match: {{op: "{OP}", when: {{hidden: 16}}}}
    lock: {D}
""",
    )
    lz.load_config(file)
    for rows, width, expected in ((3, 8, A), (4, 8, A), (5, 8, B), (500, 8, B), (2, 8, C), (3, 16, D), (5, 16, B)):
        x, w = torch.randn(rows, width), torch.ones(width)
        _, ran = five.run(lz.rms_norm, x, w)
        assert ran == [expected], (rows, width)
    _, ran = five.run(lz.rms_norm, torch.randn(2, 8).double(), W.double())
    assert ran == [A]


# One call with something in every field that a rule may ask for.
EVERY = Context(
    op="attention", device=named_device("h100"), dtype="bfloat16", dtypes=("bfloat16",), layout=Layout.BSHD,
    dims=(("batch", 3), ("num_heads", 8), ("num_kv_heads", 2), ("seq_len_q", 33), ("seq_len_k", 70), ("head_dim", 64)),
    needs=frozenset({"gqa", "window"}), causal=Causal.BOTTOM_RIGHT, mask=MaskKind.BOOL, window=(5, 0), dropout=True,
    needs_grad=True, autocast="bfloat16", deterministic=True, batch_invariant=True, capturing=True, backend="sdpa",
    quant_format="int8", granularity="channel", weight_layout="tiles", kv_cache_dtype="float8_e4m3fn",
    kv_cache_layout=Layout.NHD, index_dtype="int32", tp_size=4, tp_rank=2, seq_relation="shorter",
    switched_off=frozenset({"sdp_flash"}), vetoed=frozenset({"sdpa.attention.cudnn"}), aligned_pointers=False,
    folded=True, strides=Strides(last=2, aligned=False, order="other"),
)  # fmt: skip
# Objects of several fields, which have names of their own below; and values, which no key holds.
NO_FIELD = {"op", "dims", "strides", "tokenizer", "notes", "scale", "dropout_p"}
MORE = ["stride_last_dim", "is_contiguous", "enable_gqa", "attn_mask_type", "gqa_ratio", "batch_heads", "needs_window"]
MORE += ["sm_version", "gpu_generation", "vendor", "platform", "tensor_core_generation", *dict(EVERY.dims)]


@pytest.mark.req("R-POL-06")
def test_a_rule_may_ask_for_any_field_of_the_context(lab: Any) -> None:
    lab.use()
    names = [item.name for item in fields(Context) if not item.name.startswith("_") and item.name not in NO_FIELD]

    def denied(name: str, wanted: Any) -> bool:
        rule = {"match": {"op": "attention", "when": {name: wanted}}, "deny": ["sdpa.attention.math"]}
        with lz.scoped(rules=[rule]):
            reasons = lz.explain("attention", EVERY).reasons["sdpa.attention.math"]
        return "POLICY_DENIED" in [why.code for why in reasons]

    for name in [*names, *MORE]:
        value = EVERY.get(name)
        first = min(value) if isinstance(value, (tuple, frozenset)) else value
        plain = isinstance(first, (bool, int))
        assert denied(name, first if plain else str(first)), name
        assert not denied(name, not first if isinstance(first, bool) else 4711 if plain else "another"), name


def test_a_rule_about_a_value_that_no_key_holds_never_matches(lab: Any, tmp_path: Path) -> None:
    lab.use(lab.kernel("p.attention.a"))
    file = tmp_path / "layerzero.yaml"
    write(file, 'rules: [{match: {op: attention, when: {dropout_p: ">0.2"}}, deny: ["p.*"]}]\n')
    lz.load_config(file)
    q = torch.randn(1, 1, 4, 8)
    for p in (0.1, 0.5, 0.1):
        _, ran = lab.run(lz.attention, q, q, q, dropout_p=p)
        assert ran == ["p.attention.a"]


# -- configure ------------------------------------------------------------------------------------
@pytest.mark.req("R-API-10", "R-API-11")
def test_configure_adds_to_what_was_configured_and_get_config_shows_it(five: Any) -> None:
    lz.configure(prefer=[B])
    lz.configure(strict_mode=True)
    seen = lz.get_config()
    assert seen.prefer == (B,)
    assert seen.strict_mode
    assert seen.policy_hash == lz.configure().policy_hash
    assert seen.to_json()["prefer"] == [B]


@pytest.mark.req("R-API-11")
def test_get_config_is_the_policy_of_file_environment_code_and_scope_together(
    five: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "layerzero.yaml"
    write(file, f"locks: {{{OP}: {B}}}\ncache: {{max_entries: 77}}\ndeterministic: false\n")
    monkeypatch.setenv("LAYERZERO_STRICT", "1")
    lz.reset()
    lz.load_config(file)
    state.use(five.registry)
    lz.configure(avoid=[C])
    outside = lz.get_config()
    assert (outside.locks, outside.cache.max_entries) == (((OP, B),), 77)  # of the file
    assert outside.strict_mode is True and outside.avoid == (C,)  # of the environment, of the code
    with lz.scoped(locks={OP: D}, strict_mode=False):
        inside = lz.get_config()
        assert (inside.locks[0], inside.strict_mode) == ((OP, D), False)  # the strongest comes first
        assert (inside.avoid, inside.cache.max_entries) == ((C,), 77)
        assert inside.policy_hash != outside.policy_hash
        assert winner(five) == D  # what it says is what holds
    assert lz.get_config() == outside
    assert winner(five) == B


@pytest.mark.req("R-API-10")
def test_a_refused_setting_changes_nothing_then_or_later(five: Any) -> None:
    lz.configure(prefer=[B])
    for wrong in ({"prefer": [3]}, {"strict_mode": "yes"}, {"colour": "blue"}, {"prefer": [C], "cache": {"size": 1}}):
        with pytest.raises(PolicyValidationError):
            lz.configure(**wrong)
        assert winner(five) == B
    lz.configure(deterministic=True)
    assert winner(five) == B


@pytest.mark.req("R-API-10", "R-POL-07", "R-CACHE-06")
def test_a_policy_change_drops_every_hot_choice(five: Any) -> None:
    for _ in range(3):
        assert winner(five) == A
    before = lz.get_config().policy_hash
    old = state.world
    assert old.hot
    lz.configure(prefer=[C])
    assert lz.get_config().policy_hash != before
    assert state.world is not old
    assert not state.world.hot
    for _ in range(3):
        assert winner(five) == C


@pytest.mark.req("R-POL-07")
def test_kept_selections_belong_to_the_hash_they_were_made_under(five: Any) -> None:
    """Another policy selects anew; the one of before, set again, finds what was kept under its hash."""
    first = lz.select(OP, X, W)
    state.counters.reset()
    assert lz.select(OP, X, W) is first and state.counters.selections == 0
    lz.configure(prefer=[C])
    second = lz.select(OP, X, W)
    assert second.chosen == C and state.counters.selections == 1
    assert [item.policy_hash for item in (first, second)] == [Policy().policy_hash, Policy(prefer=(C,)).policy_hash]
    assert first.fingerprint != second.fingerprint
    lz.configure(prefer=[])
    assert lz.select(OP, X, W) is first and state.counters.selections == 1


def test_a_change_that_changes_nothing_keeps_the_hot_choices(five: Any) -> None:
    lz.configure(prefer=[C])
    winner(five)
    old = state.world
    lz.configure(prefer=[C])
    assert state.world is old


# -- time boxes -----------------------------------------------------------------------------------
@pytest.mark.req("R-POL-11")
def test_a_timeboxed_setting_ends_by_the_clock(five: Any) -> None:
    lz.configure(prefer=[B], expires_in=0.2)
    end = time.monotonic() + 60  # no call asks for it: a timer swaps the World
    while state.world.policy.prefer != ():
        assert time.monotonic() < end, "the time box never ended"
        time.sleep(0.01)
    assert winner(five) == A


@pytest.mark.req("R-POL-11")
def test_a_timeboxed_setting_holds_until_its_end_and_not_longer(five: Any, hand_clock: Any) -> None:
    lz.configure(prefer=[B], expires_in=0.2)
    hand_clock.move(0.19)
    assert winner(five) == B
    hand_clock.move(0.02)
    assert state.world.policy.prefer == () and winner(five) == A


@pytest.mark.req("R-POL-11")
def test_each_of_several_time_boxes_ends_at_its_own_time(five: Any, hand_clock: Any) -> None:
    lz.configure(prefer=[B], expires_in=0.2)
    lz.configure(prefer=[C], expires_in=0.5)
    assert winner(five) in (B, C)
    hand_clock.move(0.3)
    assert winner(five) == C
    hand_clock.move(0.3)
    assert winner(five) == A
    assert len([name for name in policies._set if name.startswith("timeboxed")]) == 0


def test_a_time_box_ends_inside_a_scope_too(five: Any, hand_clock: Any) -> None:
    lz.configure(prefer=[B], expires_in=0.2)
    with lz.scoped(avoid=[E]):
        assert winner(five) == B
        hand_clock.move(0.3)
        assert winner(five) == A


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "soon", True])
def test_a_time_box_needs_a_positive_number(five: Any, seconds: Any) -> None:
    with pytest.raises(ConfigurationError):
        lz.configure(prefer=[B], expires_in=seconds)
    assert winner(five) == A


# -- hot reload -----------------------------------------------------------------------------------
@pytest.mark.req("R-POL-08", "R-POL-01")
def test_a_watched_file_is_reloaded_and_a_bad_one_keeps_the_old(five: Any, tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    write(file, f"prefer: [{B}]\n")
    lz.load_config(file, watch=True)
    assert winner(five) == B
    assert lz.reload_config() is False
    write(file, f"prefer: [{C}]   # changed\n")
    assert lz.reload_config() is True
    assert winner(five) == C
    write(file, "prefer: [unclosed\n")
    assert lz.reload_config() is False
    assert isinstance(policies.last_error, PolicyValidationError)
    assert winner(five) == C
    write(file, f"preffer: [{D}]\n")
    assert lz.reload_config() is False
    assert winner(five) == C
    write(file, f"prefer: [{D}]  # well again\n")
    assert lz.reload_config() is True
    assert policies.last_error is None
    assert winner(five) == D


@pytest.mark.req("R-API-12", "R-EXC-05", "R-EXC-07")
def test_a_bad_file_is_refused_and_changes_nothing(five: Any, tmp_path: Path) -> None:
    file = tmp_path / "layerzero.yaml"
    write(file, "prefer: {a: b}\n")
    with pytest.raises(PolicyValidationError):
        lz.load_config(file)
    with pytest.raises(ConfigurationError) as caught:
        lz.load_config(tmp_path / "absent.yaml")
    assert caught.value.code == "CONFIG_FILE_MISSING"
    assert winner(five) == A
    good = tmp_path / "good.yaml"
    write(good, f"prefer: [{B}]\n")
    assert lz.load_config(good).prefer == (B,)
    with pytest.raises(PolicyValidationError):
        lz.load_config(file)
    assert lz.get_config().prefer == (B,) and winner(five) == B


# -- adaptation -----------------------------------------------------------------------------------
@pytest.mark.req("R-POL-09")
@pytest.mark.parametrize("setting", [{"strict_mode": True}, {"allow_adaptation": False}])
def test_strict_mode_forbids_implicit_transforms(lab: Any, setting: dict[str, bool]) -> None:
    q = torch.randn(1, 5, 2, 8)
    report = lz.explain("attention", q, q, q, layout="BSHD")
    assert report.transform_cost_total > 0
    with lz.scoped(**setting):
        refused = lz.explain("attention", q, q, q, layout="BSHD")
        assert refused.chosen == ""
        codes = {item.kernel_id: [r.code for r in item.reasons] for item in refused.candidates}
        assert codes["sdpa.attention.flash_cpu"] == ["ADAPTATION_NOT_ALLOWED"]
        with pytest.raises(NoKernelFoundError):
            lz.attention(q, q, q, layout="BSHD")
        assert lab.run(lz.attention, q, q, q)[1] == ["sdpa.attention.flash_cpu"]  # nothing to adapt


def test_locks_of_absent_kernels_are_refused_when_used_not_when_read(five: Any) -> None:
    lz.configure(locks={OP: "vendor.rms_norm.fast"})
    with pytest.raises(LockedKernelError) as caught:
        lz.rms_norm(X, W)
    assert "not registered" in str(caught.value)


@pytest.mark.req("R-CACHE-04")
def test_cache_settings_reach_the_selection_cache(five: Any) -> None:
    lz.configure(cache={"max_entries": 7})
    for rows in range(1, 40):
        lz.explain(OP, torch.randn(rows, rows + 1), torch.ones(rows + 1))
    assert state.cache.max_entries == 7
    assert len(state.cache) <= 7


@pytest.mark.req("R-CACHE-04")
def test_the_time_to_live_of_the_policy_lets_selections_expire(five: Any) -> None:
    def misses() -> int:
        before = state.cache.stats().misses
        for _ in range(3):
            lz.select(OP, X, W)
        return state.cache.stats().misses - before

    assert misses() == 1
    lz.configure(cache={"ttl_s": 1e-9})  # over before the next call can ask
    assert misses() == 3
    lz.configure(cache={"ttl_s": 3600.0})
    assert misses() <= 1


@pytest.mark.req("R-POL-04", "R-POL-06")
def test_rules_from_code_are_written_as_in_the_file():
    x = torch.randn(3, 64)
    usual = lz.which("rms_norm", x)
    lz.configure(rules=[{"match": {"op": "rms_norm", "when": {"hidden": ">=64"}}, "deny": [usual]}])
    assert lz.which("rms_norm", x) != usual
    assert lz.which("rms_norm", torch.randn(3, 32)) == usual
    lz.configure(rules=[{"match": {"op": "rms_norm", "when": {"hidden": ">=64"}}, "allow": ["reference"]}])
    assert lz.which("rms_norm", x) == REFERENCE
    assert lz.which("rms_norm", torch.randn(3, 32)) == usual


@pytest.mark.parametrize("rules", [{"match": {}}, "deny", [1], [{"mtach": {}}], [{"lock": 5}], 3])
def test_rules_that_mean_nothing_are_one_clear_error(rules):
    with pytest.raises(ConfigurationError) as caught:
        lz.configure(rules=rules)
    assert "rules" in str(caught.value)
