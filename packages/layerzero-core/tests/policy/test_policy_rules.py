"""What a policy says about one kernel for one call."""

from __future__ import annotations

import dataclasses
import enum
import pickle

import pytest

from layerzero.model.config import AVOID_BONUS, PREFER_BONUS, Condition, FrozenMap, Policy, Rule
from layerzero.policy.rules import (
    evaluate,
    has_exact,
    holds,
    judge,
    parse_conditions,
    thresholds,
)

FLASH, MATH = "sdpa.attention.flash", "sdpa.attention.math"


def ask(policy, kernel=FLASH, op="attention", **fields):
    return evaluate(policy, op, kernel, kernel.split(".")[0], fields.get)


def when(**wanted):
    return tuple(item for name, value in wanted.items() for item in parse_conditions(name, value))


def test_an_empty_policy_says_nothing():
    verdict = ask(Policy())
    assert verdict.allowed and verdict.denied_by is None and verdict.locked_to is None
    assert (verdict.bonus, verdict.avoided, verdict.allow_list) == (0.0, False, ())


@pytest.mark.req("R-POL-04")
@pytest.mark.parametrize("pattern", [FLASH, "sdpa", "sdpa.*", "*.flash", "*"])
def test_deny_matches_kernel_id_or_backend_by_glob(pattern):
    assert ask(Policy(deny=(pattern,))).denied_by == pattern
    assert ask(Policy(deny=(pattern,)), "xla.attention.plain").denied_by == ("*" if pattern == "*" else None)


@pytest.mark.req("R-POL-04")
def test_an_allow_list_keeps_everything_else_out():
    policy = Policy(allow=("sdpa.attention.*", "reference"))
    assert ask(policy).allowed
    assert ask(policy, "reference.attention.plain").allowed
    outside = ask(policy, "xformers.attention.cutlass")
    assert not outside.allowed
    assert outside.allow_list == ("sdpa.attention.*", "reference")


def test_deny_beats_allow_prefer_and_lock():
    policy = Policy(allow=(FLASH,), prefer=(FLASH,), locks=(("attention", FLASH),), deny=("sdpa",))
    assert ask(policy).denied_by == "sdpa"


@pytest.mark.req("R-POL-05")
def test_prefer_avoid_and_boosts_are_points():
    assert ask(Policy(prefer=("sdpa",))).bonus == PREFER_BONUS == 20.0
    shunned = ask(Policy(avoid=("sdpa",)))
    assert (shunned.bonus, shunned.avoided) == (AVOID_BONUS, True) == (-50.0, True)
    boosted = Policy(prefer=("sdpa",), boosts=(("sdpa", 5.0), ("*.flash", -1.5), ("other", 99.0)))
    assert ask(boosted).bonus == 23.5
    assert ask(Policy(boosts={"sdpa": 2.0})).bonus == 2.0  # a mapping is accepted too


def test_boosts_in_any_order_give_the_same_bits():
    values = [("sdpa", 0.1), ("sdpa.*", 0.2), ("*.flash", 0.3), ("*", 1e16), ("s*", -1e16)]
    assert ask(Policy(boosts=tuple(values))).bonus == ask(Policy(boosts=tuple(reversed(values)))).bonus


@pytest.mark.req("R-POL-05")
def test_of_prefer_and_avoid_in_one_place_the_more_specific_decides():
    assert ask(Policy(prefer=("sdpa.*",), avoid=(FLASH,))).avoided
    assert ask(Policy(prefer=(FLASH,), avoid=("sdpa.*",))).bonus == PREFER_BONUS
    assert ask(Policy(prefer=(FLASH,), avoid=(FLASH,))).avoided  # a draw goes to caution


def test_the_most_specific_lock_wins_whatever_the_order():
    locks = (("*", "a.x.y"), ("att*", "b.x.y"), ("attention", "c.x.y"), ("attention*", "d.x.y"))
    for order in (locks, locks[::-1]):
        policy = Policy(locks=order)
        assert judge(policy, "attention", {}.get).locked_to == "c.x.y"
        assert judge(policy, "attention_x", {}.get).locked_to == "d.x.y"
        assert judge(policy, "attic", {}.get).locked_to == "b.x.y"
        assert judge(policy, "rope", {}.get).locked_to == "a.x.y"
        assert policy.policy_hash == Policy(locks=locks).policy_hash


def test_a_lock_is_told_for_every_kernel_of_the_op():
    policy = Policy(locks=(("attention", FLASH),), prefer=("xformers",))
    assert ask(policy, "xformers.attention.cutlass").locked_to == FLASH
    assert ask(policy, op="rms_norm").locked_to is None


@pytest.mark.req("R-POL-06")
@pytest.mark.parametrize(
    ("glob", "op", "hit"),
    [
        ("attention*", "attention", True),
        ("*_norm", "rms_norm", True),
        ("attention", "paged_attention", False),
        ("Att*", "attention", False),
    ],
)
def test_rules_name_ops_by_wildcard(glob, op, hit):
    policy = Policy(rules=(Rule(match_op=glob, deny=("sdpa",), source="p.yaml:3"),))
    assert ask(policy, op=op).denied_by == ("sdpa (p.yaml:3)" if hit else None)


class Mask(enum.StrEnum):
    NONE = "none"
    BOOL = "bool"


class Dtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.req("R-POL-06")
@pytest.mark.parametrize(
    ("wanted", "value", "expected"),
    [
        (">=64", 64, True), (">=64", 63, False), (">64", 64, False), ("<64", 63, True), ("<=64", 65, False),
        (">=64, <256", 128, True), (">=64, <256", 256, False), ("!=64", 64, False), ("== 64", 64, True),
        (">0.5", 0.75, True), (64, 64, True), (64, 64.0, True), (64, 65, False), ([64, 128], 128, True),
        ([64, 128], 96, False), ("cuda", "cuda", True), ("!=cuda", "cpu", True), ("float*", "float16", True),
        ("float*", "bfloat16", False), ("bfloat16", Dtype(), True), ("b*16", Dtype(), True), ("bool", Mask.BOOL, True),
        (["none", "bool"], Mask.NONE, True), (True, True, True), (True, 1, False), (1, True, False),
        ("==true", True, True), ("true", True, True), ("64", 64, True),
        (">0", True, False), (">0", "5", False), ("dropout", frozenset({"lse", "dropout"}), True),
        ("!=dropout", frozenset({"lse", "dropout"}), False), ("!=dropout", frozenset({"lse"}), True),
        (">=64", None, False), ("!=64", None, False), ("*", None, False), (["a"], None, False),
    ],
)  # fmt: skip
def test_a_condition_compares_any_field(wanted, value, expected):
    assert all(holds(item, value) for item in parse_conditions("field", wanted)) is expected


@pytest.mark.parametrize(
    "wanted", [">=x", ">=", ">", ">=64,", ">=64, 65", "<true", [], {"a": 1}, None, ">nan", "<inf", float("nan")]
)
def test_a_condition_that_means_nothing_is_refused(wanted):
    with pytest.raises(ValueError):
        parse_conditions("head_dim", wanted)


@pytest.mark.req("R-POL-06")
def test_every_condition_of_a_rule_must_hold():
    policy = Policy(rules=(Rule("attention", when(head_dim=">64", device="cuda"), deny=("sdpa",)),))
    assert ask(policy, head_dim=128, device="cuda").denied_by
    assert not ask(policy, head_dim=64, device="cuda").denied_by
    assert not ask(policy, head_dim=128, device="cpu").denied_by
    assert not ask(policy, head_dim=128).denied_by


@pytest.mark.req("R-POL-04", "R-POL-06")
def test_rules_are_read_in_order_and_the_first_to_speak_decides():
    narrow = Rule("attention", when(head_dim=">128"), allow=("reference",), prefer=("sdpa",), lock="a.attention.x")
    broad = Rule("*", (), allow=("sdpa",), avoid=("sdpa",), lock="b.attention.x")
    first, second = Policy(rules=(narrow, broad)), Policy(rules=(broad, narrow))
    big = ask(first, head_dim=256)
    assert (big.allowed, big.bonus, big.locked_to) == (False, 20.0, "a.attention.x")
    small = ask(first, head_dim=64)
    assert (small.allowed, small.bonus, small.locked_to) == (True, -50.0, "b.attention.x")
    assert ask(second, head_dim=256) == ask(second, head_dim=64)
    assert first.policy_hash != second.policy_hash


def test_every_deny_and_every_boost_of_the_rules_counts():
    rules = (Rule(boosts=(("sdpa", 1.0),)), Rule(boosts=(("sdpa", 2.0),), deny=("other",)), Rule(deny=("sdpa",)))
    verdict = ask(Policy(rules=rules, boosts=(("*", 4.0),)))
    assert (verdict.bonus, verdict.denied_by) == (7.0, "sdpa")


def test_a_rule_speaks_before_the_lists_of_its_level():
    policy = Policy(prefer=("sdpa",), rules=(Rule("attention", when(device="cpu"), avoid=("sdpa",)),))
    assert ask(policy, device="cpu").avoided
    assert ask(policy, device="cuda").bonus == PREFER_BONUS


def test_a_judge_checks_conditions_once_for_many_kernels():
    asked = []
    policy = Policy(rules=(Rule("attention", when(head_dim=">1"), boosts=(("sdpa", 1.0),)),))
    verdict_on = judge(policy, "attention", lambda name: asked.append(name) or 64)
    assert [verdict_on(kernel, "sdpa").bonus for kernel in (FLASH, MATH)] == [1.0, 1.0]
    assert asked == ["head_dim"]


def test_what_a_policy_remembers_is_bounded_and_no_part_of_its_value():
    rules = tuple(Rule("attention", when(head_dim=n), boosts=(("sdpa", float(n)),)) for n in range(600))
    policy = Policy(rules=rules)
    assert [ask(policy, head_dim=n).bonus for n in range(600)] == [float(n) for n in range(600)]
    assert len(policy.memo) <= 257
    assert policy == Policy(rules=rules) and policy.policy_hash == Policy(rules=rules).policy_hash
    assert pickle.loads(pickle.dumps(policy)).memo == {}


def test_thresholds_are_the_last_values_of_the_lower_sides():
    def cuts(wanted):
        return thresholds(Policy(rules=(Rule("attention", when(seq_len_k=wanted)),)), "attention", "seq_len_k")

    assert cuts(">=1024") == [1023]
    assert cuts(">1024") == [1024]
    assert cuts("<1024") == [1023]
    assert cuts("<=1024") == [1024]
    assert cuts("==7") == cuts(7) == cuts("!=7") == [6, 7]
    assert cuts([7, 8, 100]) == [6, 7, 8, 99, 100]
    assert cuts(">=10.5") == [10] and cuts("<=10.5") == [10] and cuts("==10.5") == []
    assert cuts("word") == cuts(True) == cuts("w*") == []


def test_thresholds_come_from_every_rule_that_may_name_the_op():
    rules = (
        Rule("attention", when(seq_len_k=">=1024")),
        Rule("*", when(seq_len_k="<64")),
        Rule("rope", when(seq_len_k=5)),
    )
    policy = Policy(rules=rules)
    assert thresholds(policy, "attention", "seq_len_k") == [63, 1023]
    assert thresholds(policy, "attention", "head_dim") == []
    assert thresholds(policy, "rope", "seq_len_k") == [4, 5, 63]


def test_a_glob_on_a_number_asks_for_the_exact_value():
    policy = Policy(rules=(Rule("attention", when(seq_len_k="1*", head_dim=64)),))
    assert has_exact(policy, "attention", "seq_len_k")
    assert not has_exact(policy, "attention", "head_dim")
    assert not has_exact(policy, "rope", "seq_len_k")


@pytest.mark.parametrize(
    ("operator", "operand"),
    [
        ("~", 1),
        (">", "1"),
        (">", True),
        ("in", 3),
        ("==", (1, 2)),
        ("glob", 3),
        ("<", float("nan")),
        ("in", (float("inf"),)),
    ],
)
def test_a_condition_that_cannot_be_evaluated_cannot_be_built(operator, operand):
    with pytest.raises(ValueError):
        Condition("head_dim", operator, operand)


def test_the_defaults_of_a_policy():
    policy = Policy()
    assert policy.enabled and policy.allow_adaptation and policy.fallback_enabled
    assert not (policy.strict_mode or policy.deterministic or policy.graph_strict_mode or policy.plan_mode)
    assert (policy.on_fault, policy.memory_headroom_mb, policy.graph_whitelist) == ("raise", None, ())
    assert (policy.breaker.failures, policy.breaker.cooldown_s, policy.breaker.successes) == (1, 30.0, 1)
    assert (policy.cache.max_entries, policy.cache.ttl_s) == (10_000, None)
    assert policy.isolation_of("any") == "in_process"


def test_a_policy_is_frozen_down_to_its_sub_mappings():
    policy = Policy(hub=FrozenMap({"allow": ["a/b"], "nested": {"x": [1]}}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.strict_mode = True
    with pytest.raises(TypeError):
        policy.hub["allow"] = ()
    with pytest.raises(AttributeError):
        policy.hub._data = {}
    assert policy.hub["allow"] == ("a/b",) and policy.hub["nested"]["x"] == (1,)
    with pytest.raises(ValueError, match="on_fault"):
        Policy(on_fault="explode")
