"""The one table of settings: everything that names settings agrees with it, and every setting has a reader."""

from __future__ import annotations

import dataclasses
import json

import pytest

from layerzero.model.config import BreakerSettings, CacheSettings, Policy
from layerzero.policy.layers import PolicyLayer, merge
from layerzero.policy.load import from_mapping, json_schema
from layerzero.settings import GROUPS, POLICY, SETTINGS, VARIABLES, default

KEYED = [item for item in SETTINGS if item.key]


def test_keys_and_variables_are_named_once():
    assert len({item.key for item in KEYED}) == len(KEYED)
    assert len(VARIABLES) == len([item for item in SETTINGS if item.variable])
    assert all(item.key or item.variable for item in SETTINGS)
    assert {item.key.partition(".")[0] for item in KEYED if "." in item.key} == set(GROUPS)


@pytest.mark.parametrize("item", KEYED, ids=lambda item: item.key)
def test_the_default_of_a_key_is_right_by_its_own_kind_and_is_the_policys(item):
    assert list(item.kind.problems(list(item.default) if item.default == () else item.default)) == []
    group, _, name = item.key.partition(".")
    if name:
        held = {"breaker": BreakerSettings(), "cache": CacheSettings()}.get(group)
        assert default(item.key) == (Policy().setting(item.key) if held is None else getattr(held, name))
    elif item.default != {}:
        assert getattr(Policy(), item.key) == item.default


def test_a_policy_has_a_field_for_every_key_and_its_settings_no_other():
    derived = {
        "rules",
        "levels",
        "expires_at",
        "backend_isolation",
    }  # rules are no setting; the others come from merging
    assert {item.name for item in dataclasses.fields(Policy)} - derived == set(POLICY)
    for group, kind in (("breaker", BreakerSettings), ("cache", CacheSettings)):
        inside = {item.key.partition(".")[2] for item in KEYED if item.key.startswith(f"{group}.")}
        assert inside == {item.name for item in dataclasses.fields(kind)}


def test_file_and_code_take_the_same_keys_and_the_schema_names_them_all():
    properties = json_schema()["properties"]
    assert set(properties) == {*POLICY, "version", "rules"}
    assert json.loads(json.dumps(json_schema()))["$defs"].keys() == {*GROUPS, "rule"}
    said = {"cache": {"ttl_s": 2.0}, "on_fault": "fallback", "canary": {"calls": 7}}
    assert merge([from_mapping(said)]) == merge([PolicyLayer.of(**said)])


def test_a_group_answers_with_what_was_set_and_else_with_the_default():
    policy = merge([PolicyLayer.of(canary={"calls": 7})])
    assert (policy.setting("canary.calls"), policy.setting("canary.fraction")) == (7, 0.05)
