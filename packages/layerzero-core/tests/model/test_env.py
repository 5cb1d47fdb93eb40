"""Every LAYERZERO_* variable: parsed, defaulted, or refused by name."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

from layerzero import env
from layerzero.errors import ConfigurationError
from layerzero.settings import VARIABLES

GOOD = {
    "LAYERZERO_DISABLED": ("1", "disabled", True),
    "LAYERZERO_CONFIG": ("/etc/lz.yaml", "config", "/etc/lz.yaml"),
    "LAYERZERO_PREFER": ("flashinfer, liger", "prefer", ("flashinfer", "liger")),
    "LAYERZERO_AVOID": ("sdpa.attention.math", "avoid", ("sdpa.attention.math",)),
    "LAYERZERO_ALLOW": ("sdpa reference", "allow", ("sdpa", "reference")),
    "LAYERZERO_DENY": ("xformers*,xformers*", "deny", ("xformers*",)),
    "LAYERZERO_STRICT": ("yes", "strict", True),
    "LAYERZERO_ALLOW_ADAPTATION": ("off", "allow_adaptation", False),
    "LAYERZERO_DETERMINISTIC": ("TRUE", "deterministic", True),
    "LAYERZERO_BATCH_INVARIANT": ("1", "batch_invariant", True),
    "LAYERZERO_GRAPH_STRICT_MODE": ("on", "graph_strict_mode", True),
    "LAYERZERO_FALLBACK": ("0", "fallback", False),
    "LAYERZERO_ON_FAULT": ("fallback", "on_fault", "fallback"),
    "LAYERZERO_ON_FIRST_USE": ("off", "on_first_use", "off"),
    "LAYERZERO_PLAN_MODE": ("1", "plan_mode", True),
    "LAYERZERO_ISOLATION": ("subprocess", "isolation", "subprocess"),
    "LAYERZERO_MEMORY_HEADROOM_MB": ("512.5", "memory_headroom_mb", 512.5),
    "LAYERZERO_CACHE_SIZE": ("7", "cache_size", 7),
    "LAYERZERO_CACHE_TTL": ("2.5", "cache_ttl", 2.5),
    "LAYERZERO_BREAKER_FAILURES": ("3", "breaker_failures", 3),
    "LAYERZERO_BREAKER_COOLDOWN": ("0", "breaker_cooldown", 0.0),
    "LAYERZERO_PLUGINS": ("mine,other", "plugins", ("mine", "other")),
    "LAYERZERO_PLUGINS_DENY": ("bad", "plugins_deny", ("bad",)),
    "LAYERZERO_PROBE_TIMEOUT": ("1.5", "probe_timeout", 1.5),
    "LAYERZERO_PERFDB": ("/var/times.db", "perfdb", "/var/times.db"),
    "LAYERZERO_PERFDB_SHIPPED": ("0", "perfdb_shipped", False),
    "LAYERZERO_QUARANTINE": ("/var/lz/quarantine.json", "quarantine", "/var/lz/quarantine.json"),
    "LAYERZERO_ACCEL": ("on", "accel", True),
    "LAYERZERO_RECORD": ("/tmp/traffic.json", "record", "/tmp/traffic.json"),
    "LAYERZERO_TABLE_KEY": ("/etc/key", "table_key", "/etc/key"),
    "LAYERZERO_DISPATCH_TABLE": ("/etc/table.json", "dispatch_table", "/etc/table.json"),
    "LAYERZERO_JIT": ("block", "jit", "block"),
    "LAYERZERO_JIT_WORKERS": ("3", "jit_workers", 3),
    "LAYERZERO_JIT_TIMEOUT": ("20", "jit_timeout", 20.0),
    "LAYERZERO_JIT_CACHE_DIR": ("/var/jit", "jit_cache_dir", "/var/jit"),
    "LAYERZERO_TRUSTED_DEFINITIONS": (f"/srv/a{os.pathsep} /srv/b ", "trusted_definitions", ("/srv/a", "/srv/b")),
    "LAYERZERO_DEBUG": ("1", "debug", True),
    "LAYERZERO_VERBOSE": ("1", "verbose", True),
    "LAYERZERO_LOG": ("json", "log", "json"),
    "LAYERZERO_REDACT": ("customer-[0-9]+ x{1,3}", "redact", ("customer-[0-9]+", "x{1,3}")),
    "LAYERZERO_METRICS": ("9464", "metrics", "9464"),
    "LAYERZERO_TRACE": ("/tmp/trace.json", "trace", "/tmp/trace.json"),
    "LAYERZERO_PROVE": ("1", "prove", True),
    "LAYERZERO_COMMIT": ("abc123", "commit", "abc123"),
    "LAYERZERO_REQUIRE": ("1", "require", True),
}


def test_an_empty_environment_gives_the_documented_defaults():
    assert env.read({}) == env.Env()
    assert env.read({"PATH": "/bin", "LAYERZEROX": "1"}) == env.Env()


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_variable_sets_its_field_and_nothing_else(name):
    text, attribute, value = GOOD[name]
    assert env.read({name: f" {text} "}) == dataclasses.replace(env.Env(), **{attribute: value})


def test_every_documented_variable_is_tried_above():
    documented = {env.PREFIX + name for name in VARIABLES}
    assert documented == set(GOOD) | {"LAYERZERO_LOCK_<NAME>", "LAYERZERO_BOOST_<NAME>"}
    assert all(item.doc for item in VARIABLES.values())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LAYERZERO_DISABLED", "maybe", "1, true"),
        ("LAYERZERO_CACHE_SIZE", "0", "1 or more"),
        ("LAYERZERO_CACHE_SIZE", "1e4", "whole number"),
        ("LAYERZERO_CACHE_SIZE", "9" * 5000, "whole number"),
        ("LAYERZERO_CACHE_TTL", "0", "above 0"),
        ("LAYERZERO_BREAKER_COOLDOWN", "-1", "0 or more"),
        ("LAYERZERO_PROBE_TIMEOUT", "nan", "seconds"),
        ("LAYERZERO_MEMORY_HEADROOM_MB", "inf", "MiB"),
        ("LAYERZERO_ON_FAULT", "explode", "raise or fallback"),
        ("LAYERZERO_ISOLATION", "thread", "in_process or subprocess"),
        ("LAYERZERO_TRUSTED_DEFINITIONS", "here/below", "absolute paths"),
        ("LAYERZERO_LOCK_ATTENTION", "flash", "kernel id"),
        ("LAYERZERO_LOCK_ATTENTION", "sdpa.attention.*", "kernel id"),
        ("LAYERZERO_BOOST_SDPA", "much", "score points"),
        ("LAYERZERO_BOOST_SDPA", "-inf", "score points"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_expected(name, value, expected):
    with pytest.raises(ConfigurationError, match=re.escape(expected)) as caught:
        env.read({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert caught.value.code == "CONFIG_INVALID"


def test_an_empty_value_counts_as_not_set():
    assert env.read(dict.fromkeys(GOOD, "  ") | {"LAYERZERO_PLUGINS": "x"}).prefer == ()
    assert env.read({"LAYERZERO_LOCK_ATTENTION": "", "LAYERZERO_CACHE_SIZE": ""}) == env.Env()


def test_an_empty_plugin_allowlist_lets_no_plugin_in():
    assert env.read({}).plugins is None
    assert env.read({"LAYERZERO_PLUGINS": ""}).plugins == ()


def test_locks_and_boosts_carry_their_name_in_the_variable():
    seen = env.read(
        {
            "LAYERZERO_LOCK_RMS_NORM": "liger.rms_norm.triton",
            "LAYERZERO_LOCK_attention": "sdpa.attention.flash",
            "LAYERZERO_BOOST_SDPA__ATTENTION__FLASH": "15",
            "LAYERZERO_BOOST_XFORMERS": "-3.5",
        }
    )
    assert seen.locks == (("attention", "sdpa.attention.flash"), ("rms_norm", "liger.rms_norm.triton"))
    assert seen.boosts == (("sdpa.attention.flash", 15.0), ("xformers", -3.5))


def test_two_spellings_of_one_lock_are_refused():
    kernel = "sdpa.attention.flash"
    with pytest.raises(ConfigurationError, match="attention"):
        env.read({"LAYERZERO_LOCK_ATTENTION": kernel, "LAYERZERO_LOCK_attention": kernel})


def test_an_unknown_variable_is_kept_with_the_nearest_known_one():
    seen = env.read({"LAYERZERO_PREFFER": "x", "LAYERZERO_ZZZZZZ": "1"})
    assert seen.unknown == (("LAYERZERO_PREFFER", "LAYERZERO_PREFER"), ("LAYERZERO_ZZZZZZ", None))
    assert seen.prefer == ()


def test_read_looks_at_the_process_environment_by_default(monkeypatch):
    monkeypatch.setenv("LAYERZERO_CACHE_SIZE", "123")
    assert env.read().cache_size == 123
