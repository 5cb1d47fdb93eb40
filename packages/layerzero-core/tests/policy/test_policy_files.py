"""Policy files: what they may say, where they are found, and how bad ones are refused."""

from __future__ import annotations

import json
import os

import pytest

from layerzero import env
from layerzero.errors import ConfigurationError, PolicyValidationError
from layerzero.policy.layers import merge
from layerzero.policy.load import discover, from_bytes, from_mapping, json_schema, load_discovered, load_file, mistakes
from layerzero.policy.parse import MAX_BYTES, MAX_DEPTH
from layerzero.policy.rules import evaluate

FLASH = "sdpa.attention.flash"
EVERYTHING = """\
version: 1
enabled: true
fallback_enabled: false
locks: {attention: sdpa.attention.flash, rms_norm: null}
allow: [sdpa, liger]
deny: [xformers*]
prefer: flashinfer
avoid: [sdpa.attention.math]
boosts: {sdpa: 5, "*.flash": -1.5}
rules:
  - match: {op: "attention*", when: {head_dim: ">=64, <256", device: cuda, dtype: [float16, bfloat16]}}
    prefer: [flashinfer]
  - match:
      op: rms_norm
    deny: liger
    lock: sdpa.rms_norm.plain
strict_mode: true
allow_adaptation: false
deterministic: true
graph_strict_mode: true
graph_whitelist: [sdpa.attention.*]
memory_headroom_mb: 1024
on_fault: fallback
isolation: {flashattn: subprocess}
plan_mode: true
breaker: {failures: 5, cooldown_s: 10, successes: 2}
cache: {max_entries: 100, ttl_s: 60}
perfdb: {enabled: true, path: /var/lz.db, auto_tune: true, tune_samples: 5}
distributed: {mode: independent, tp_invariant: true}
hub: {allow: [org/kernel], endpoints: [x]}
plugins: {allow: [mine], deny: [theirs]}
jit: block
dispatch_table: /var/table.json
batch_invariant: true
on_first_use: "off"
canary: {kernels: [liger*], fraction: 0.5}
"""


@pytest.mark.req("R-POL-01")
def test_a_yaml_file_sets_every_part_of_the_policy(tmp_path):
    path = tmp_path / "layerzero.yaml"
    path.write_text(EVERYTHING)
    assert {line.partition(":")[0] for line in EVERYTHING.splitlines() if line[0] != " "} == set(
        json_schema()["properties"]
    )
    policy = merge([load_file(path)])
    assert policy.locks_by_op() == {"attention": FLASH}
    assert (policy.allow, policy.deny) == (("sdpa", "liger"), ("xformers*",))
    assert (policy.prefer, policy.avoid) == (("flashinfer",), ("sdpa.attention.math",))
    assert dict(policy.boosts) == {"sdpa": 5.0, "*.flash": -1.5}
    assert [rule.source for rule in policy.rules] == [f"{path}:11", f"{path}:13"]
    assert [str(item) for item in policy.rules[0].when] == [
        "head_dim >= 64", "head_dim < 256", "device == cuda", "dtype in ('float16', 'bfloat16')",
    ]  # fmt: skip
    assert policy.rules[1].lock == "sdpa.rms_norm.plain"
    assert (policy.breaker.failures, policy.cache.max_entries, policy.memory_headroom_mb) == (5, 100, 1024)
    assert (policy.on_fault, policy.isolation_of("flashattn"), policy.fallback_enabled) == (
        "fallback",
        "subprocess",
        False,
    )
    assert policy.perfdb["tune_samples"] == 5 and policy.distributed["mode"] == "independent"
    assert policy.hub["allow"] == ("org/kernel",) and policy.plugins["deny"] == ("theirs",)
    assert policy.deterministic and policy.plan_mode and policy.batch_invariant
    assert policy.strict_mode and not policy.allow_adaptation and policy.enabled
    assert policy.graph_strict_mode and policy.graph_whitelist == ("sdpa.attention.*",)
    assert (policy.jit, policy.dispatch_table, policy.on_first_use) == ("block", "/var/table.json", "off")
    assert dict(policy.canary) == {"kernels": ("liger*",), "fraction": 0.5}
    assert (policy.breaker.cooldown_s, policy.breaker.successes, policy.cache.ttl_s) == (10, 2, 60)
    assert dict(policy.perfdb) == {"enabled": True, "path": "/var/lz.db", "auto_tune": True, "tune_samples": 5}
    assert policy.distributed["tp_invariant"] and policy.hub["endpoints"] == ("x",)
    assert policy.plugins["allow"] == ("mine",)


def test_the_flags_that_govern_transforms_and_graphs_come_from_the_file():
    policy = merge([from_bytes(b"strict_mode: true\nallow_adaptation: false\ngraph_strict_mode: true\n", "p.yaml")])
    assert policy.strict_mode and not policy.allow_adaptation and policy.graph_strict_mode
    silent = merge([from_bytes(b"", "p.yaml")])
    assert not silent.strict_mode and silent.allow_adaptation and not silent.graph_strict_mode


@pytest.mark.req("R-POL-13")
def test_the_graph_whitelist_is_configurable():
    policy = merge([from_bytes(b"graph_whitelist: [sdpa.attention.flash, reference.*]\n", "p.yaml")])
    assert policy.graph_whitelist == (FLASH, "reference.*")


def test_toml_and_pyproject_and_dict_say_the_same_as_yaml(tmp_path):
    yaml = "prefer: [sdpa]\ncache: {ttl_s: 2}\nrules:\n- match: {op: attention, when: {head_dim: '>64'}}\n  deny: [a]\n"
    body = (
        'prefer = ["sdpa"]\n[{0}cache]\nttl_s = 2\n[[{0}rules]]\ndeny = ["a"]\n'
        'match = {{op = "attention", when = {{head_dim = ">64"}}}}\n'
    )
    (tmp_path / "layerzero.yaml").write_text(yaml)
    (tmp_path / "layerzero.toml").write_text(body.format(""))
    project = "[project]\nname = 'x'\n[tool.layerzero]\n" + body.format("tool.layerzero.")
    (tmp_path / "pyproject.toml").write_text(project)
    names = ("layerzero.yaml", "layerzero.toml", "pyproject.toml")
    layers = {name: load_file(tmp_path / name) for name in names}
    given = {"prefer": ["sdpa"], "cache": {"ttl_s": 2}}
    rules = [{"match": {"op": "attention", "when": {"head_dim": ">64"}}, "deny": ["a"]}]
    layers["dict"] = from_mapping({**given, "rules": rules})
    assert len({merge([layer]).policy_hash for layer in layers.values()}) == 1
    assert layers["pyproject.toml"].rules[0].source.endswith("pyproject.toml:7")


def test_a_file_that_is_silent_about_a_key_lets_the_weaker_one_speak():
    user = from_bytes(b"strict_mode: true\ncache: {max_entries: 7}\nallow: [sdpa]\n", "user.yaml")
    project = from_bytes(b"cache: {ttl_s: 3}\n", "project.yaml")
    policy = merge([user, project])
    assert (policy.strict_mode, policy.cache.max_entries, policy.cache.ttl_s, policy.allow) == (True, 7, 3.0, ("sdpa",))


# -- bad files ------------------------------------------------------------------------------------------------------
BAD_YAML = {
    "deep brackets": (b"deny: [a]\nallow: " + b"[" * 200_000, 2, "allow", "nested"),
    "deep braces": (b"hub: " + b"{a: " * 100_000, 1, "hub", "nested"),
    "deep blocks": (b"".join(b" " * i + b"a:\n" for i in range(500)), MAX_DEPTH, "a", "nested"),
    "deep dashes": (b"hub:\n" + b"- " * 100_000, 2, "hub", "nested"),
    "too many values": (b"deny:\n- [" + b"a," * 100_000 + b"]", 2, "deny", "values"),
    "duplicate key": (b"prefer: [a]\nprefer: [b]\n", 2, "prefer", "duplicate key 'prefer', first given on line 1"),
    "duplicate inner key": (b"locks:\n  a: x.y.z\n  b: x.y.z\n  a: x.y.w\n", 4, "locks.a", "duplicate"),
    "duplicate in a rule": (b"rules:\n- match:\n    op: a\n    op: b\n", 4, "rules[0].match.op", "duplicate"),
    "anchor": (b"deny: [a]\nallow: &x [b]\n", 2, "allow", "anchor &x"),
    "alias": (b"deny: *x\n", 1, "deny", "alias *x"),
    "laughs": (b"a: &a [x,x]\nb: &b [*a,*a]\n", 1, "a", "anchor"),
    "merge key": (b"cache:\n  <<: {ttl_s: 1}\n", 2, "cache.<<", "no text key"),
    "tag": (b"deny: !!python/object/apply:os.system [x]\n", 1, "deny", "tag"),
    "2 MiB": (b"deny: [a]\n" + b"# padding\n" * 210_000, None, "deny", "longer than 1 MiB"),
    "tab": (b"cache:\n\tttl_s: 1\n", 2, "ttl_s", "'\\t'"),
    "latin-1": (b"deny: [a]\nprefer: [\xe9]\n", 2, "prefer", "byte 0xe9"),
    "binary": (b"\x7fELF\x02\x01\x01\x00", 1, None, "not a UTF-8 text file"),
    "NUL": (b"deny: [a]\nallow: ['\x00']\n", 2, "allow", "not a UTF-8 text file"),
    "no character": (b"version: 1\ndeny: ['\xef\xbf\xbf']\n", 2, "deny", "unacceptable character #xffff"),
    "half a character": (b'version: 1\n"0.1\\ud800s": 1\n', 2, "0.1\\ud800s", "half a character"),
    "half a value": (b'version: 1\ndeny: ["\\ud800"]\n', 2, "deny[0]", "half a character"),
    "unclosed": (b"deny: [a\n", 2, "deny", "expected ',' or ']'"),
    "two documents": (b"enabled: true\n---\nenabled: false\n", 2, "enabled", "another document"),
    "a list": (b"- a\n", 1, "", "expected a mapping"),
    "a scalar": (b"just words\n", 1, "", "expected a mapping"),
    "boolean key": (b"cache: {}\non: 3\n", 2, "on", "put it in quotes"),
    "number key": (b"locks:\n  1: a.b.c\n", 2, "locks.1", "put it in quotes"),
    "impossible date": (b"version: 1\ndeny: 2024-99-99\n", 2, "deny", "month must be"),
    "endless number": (b"memory_headroom_mb: " + b"9" * 5000, 1, "memory_headroom_mb", "digits"),
    "text for flag": (b"strict_mode: maybe\n", 1, "strict_mode", "expected a valid boolean, got 'maybe'"),
    "number in list": (b"deny:\n- a\n- 1\n", 3, "deny[1]", "expected a valid string, got 1"),
    "mapping for list": (b"rules: {}\n", 1, "rules", "expected a valid list"),
    "list for mapping": (b"version: 1\nlocks: [a]\n", 2, "locks", "expected a valid dict"),
    "null list": (b"deny:\n", 1, "deny", "expected a valid list"),
    "bad lock": (b"locks:\n  attention: flash\n", 2, "locks.attention", "expected a kernel id"),
    "nan boost": (b"boosts: {a: .nan}\n", 1, "boosts.a", "finite"),
    "zero entries": (b"cache:\n  max_entries: 0\n", 2, "cache.max_entries", "greater than or equal to 1"),
    "future version": (b"version: 2\n", 1, "version", "expected 1, got 2"),
    "unknown word": (b"on_fault: explode\n", 1, "on_fault", "expected 'raise' or 'fallback', got 'explode'"),
    "bad condition": (b"rules:\n- match:\n    op: a\n    when:\n      head_dim: '>=x'\n", 5,
                      "rules[0].match.when.head_dim", ">= needs a number, got 'x'"),
    "empty pattern": (b"deny: ['']\n", 1, "deny[0]", "glob"),
    "first of two": (b"version: 1\nstrict_mode: 3\ncache: 5\n", 2, "strict_mode", "boolean"),
}  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BAD_YAML)
def test_a_bad_yaml_file_is_refused_with_line_and_key(name):
    raw, line, key, text = BAD_YAML[name]
    with pytest.raises(PolicyValidationError) as caught:
        from_bytes(raw, "layerzero.yaml")
    error = caught.value
    assert text in str(error)
    assert error.key == key
    assert error.line == line or (line is None and error.line > 1)
    assert str(error).startswith(f"layerzero.yaml:{error.line}: ")
    assert len(str(error)) < 500


BAD_TOML = {
    "deep brackets": (b"enabled = true\nallow = " + b"[" * 200_000, 2, "allow", "nested"),
    "deep dots": (b"a" + b".a" * 100_000 + b" = 1", 1, None, "nested"),
    "deep header": (b"[a" + b".a" * 1_000 + b"]\n", 1, None, "nested"),
    "duplicate key": (b'prefer = ["a"]\nprefer = ["b"]\n', 2, "prefer", "Cannot overwrite"),
    "no value": (b"prefer =\n", 1, "prefer", "Invalid value"),
    "unterminated": (b'deny = ["a', 1, "deny", "Unterminated"),
    "latin-1": (b'deny = ["\xe9"]', 1, "deny", "byte 0xe9"),
    "2 MiB": (b"enabled = true\n" + b"#" * (2 << 20), 2, "enabled", "longer than"),
    "endless number": (b"memory_headroom_mb = " + b"9" * 5000, 1, "memory_headroom_mb", "not readable"),
    "wrong type": (b'enabled = true\nstrict_mode = "x"\n', 2, "strict_mode", "boolean"),
    "unknown key": (b"[cache]\nmax_entires = 3\n", 2, "cache.max_entires", "did you mean max_entries?"),
    "second rule": (b'[[rules]]\ndeny = ["a"]\n[[rules]]\nlok = "a.b.c"\n', 4, "rules[1].lok", "did you mean lock?"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", BAD_TOML)
def test_a_bad_toml_file_is_refused_with_line_and_key(name):
    raw, line, key, text = BAD_TOML[name]
    with pytest.raises(PolicyValidationError) as caught:
        from_bytes(raw, "layerzero.toml")
    assert text in str(caught.value)
    assert (caught.value.line, caught.value.key) == (line, key)


@pytest.mark.req("R-EXC-05")
@pytest.mark.parametrize(
    ("text", "line", "key", "nearest"),
    [
        ("prefer: [a]\nprefr: [b]\n", 2, "prefr", "prefer"),
        ("strict: true\n", 1, "strict", "strict_mode"),
        ("cache:\n  max_entires: 3\n", 2, "cache.max_entires", "max_entries"),
        ("breaker: {failure: 3}\n", 1, "breaker.failure", "failures"),
        ("rules:\n- math: {op: a}\n", 2, "rules[0].math", "match"),
        ("rules:\n- match: {op: a}\n- match: {ops: a}\n", 3, "rules[1].match.ops", "op"),
        ("plugins:\n  deny: [a]\n  denny: [b]\n", 3, "plugins.denny", "deny"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_one(text, line, key, nearest):
    with pytest.raises(PolicyValidationError) as caught:
        from_bytes(text.encode(), "p.yaml")
    assert (caught.value.line, caught.value.key, caught.value.code) == (line, key, "POLICY_UNKNOWN_KEY")
    assert caught.value.hint == f"did you mean {nearest}?"


def test_an_unknown_key_far_from_all_others_is_answered_with_the_list():
    with pytest.raises(PolicyValidationError, match=r"known: .*allow_adaptation.*strict_mode"):
        from_bytes(b"zzzzzz: 1\n", "p.yaml")


def test_an_unknown_context_field_is_refused_when_the_fields_are_known(tmp_path):
    text = b"rules:\n- match: {op: attention, when: {head_dims: 64}}\n"
    assert from_bytes(text, "p.yaml").rules[0].when[0].field == "head_dims"
    path = tmp_path / "p.yaml"
    path.write_bytes(text)
    [wrong] = mistakes(path, known_fields={"head_dim", "dtype"})
    assert isinstance(wrong, PolicyValidationError) and "did you mean head_dim" in str(wrong)
    assert (wrong.line, wrong.key) == (2, "rules[0].match.when.head_dims")


def test_a_mapping_is_refused_by_key_without_a_line():
    with pytest.raises(PolicyValidationError, match=r"configure: unknown key cache\.ttl") as caught:
        from_mapping({"cache": {"ttl": 3}})
    assert caught.value.line is None and caught.value.key == "cache.ttl"
    with pytest.raises(PolicyValidationError, match="expected a mapping"):
        from_mapping([("enabled", True)])


def test_a_file_of_exactly_one_mebibyte_is_read():
    raw = b"deny: [a]\n"
    assert from_bytes(raw + b"#" * (MAX_BYTES - len(raw)), "p.yaml").deny == ("a",)
    with pytest.raises(PolicyValidationError, match="CONFIG_FILE_TOO_LARGE"):
        from_bytes(raw + b"#" * (MAX_BYTES - len(raw) + 1), "p.yaml")


def test_a_byte_order_mark_is_no_error():
    assert from_bytes(b"\xef\xbb\xbfdeny: [a]\n", "p.yaml").deny == ("a",)


@pytest.mark.req("R-EXC-07")
def test_what_is_not_a_readable_regular_file_is_refused(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        load_file(tmp_path / "gone.yaml")
    assert caught.value.code == "CONFIG_FILE_MISSING" and "gone.yaml" in str(caught.value)
    with pytest.raises(ConfigurationError, match="not a regular file"):
        load_file(tmp_path)
    (tmp_path / "x.ini").write_text("a")
    with pytest.raises(ConfigurationError, match=r"\.yaml, \.yml or \.toml"):
        load_file(tmp_path / "x.ini")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
@pytest.mark.timeout(120)
def test_a_fifo_does_not_make_the_load_wait(tmp_path):
    os.mkfifo(tmp_path / "p.yaml")
    with pytest.raises(ConfigurationError, match="regular file"):
        load_file(tmp_path / "p.yaml")


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path):
    path = tmp_path / "p.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no space
    with pytest.raises(PolicyValidationError, match="CONFIG_FILE_TOO_LARGE"):
        load_file(path)


# -- discovery and trust --------------------------------------------------------------------------------------------
@pytest.fixture
def places(tmp_path):
    for name in ("user", "project"):
        (tmp_path / name).mkdir()
    return tmp_path / "user", tmp_path / "project"


def test_the_named_file_stands_alone(places):
    user, project = places
    for path in (user / "layerzero.yaml", project / "layerzero.yaml", user / "named.toml"):
        path.write_text("")
    seen = env.read({"LAYERZERO_CONFIG": str(user / "named.toml")})
    assert [(item.path.name, item.trusted) for item in discover(seen, cwd=project, user_dir=user)] == [
        ("named.toml", True)
    ]
    missing = env.read({"LAYERZERO_CONFIG": str(user / "gone.yaml")})
    with pytest.raises(ConfigurationError, match="CONFIG_FILE_MISSING"):
        load_discovered(missing, cwd=project, user_dir=user)


def test_the_project_file_speaks_over_the_users_file(places):
    user, project = places
    (user / "layerzero.toml").write_text('avoid = ["sdpa"]\nstrict_mode = true\n')
    (project / "layerzero.yaml").write_text("prefer: [sdpa]\n")
    layers = load_discovered(env.read({}), cwd=project, user_dir=user)
    policy = merge(layers)
    assert evaluate(policy, "attention", FLASH, "sdpa", {}.get).bonus == 20
    assert policy.strict_mode


def test_pyproject_counts_only_when_it_names_us_and_only_after_our_own_files(places):
    user, project = places
    (project / "pyproject.toml").write_text("this is = not [ toml")
    assert discover(env.read({}), cwd=project, user_dir=user) == ()
    (project / "pyproject.toml").write_text("[tool.layerzero]\nprefer = ['sdpa']\n")
    assert [item.path.name for item in discover(env.read({}), cwd=project, user_dir=user)] == ["pyproject.toml"]
    assert load_discovered(env.read({}), cwd=project, user_dir=user)[0].prefer == ("sdpa",)
    (project / "layerzero.yaml").write_text("")
    assert [item.path.name for item in discover(env.read({}), cwd=project, user_dir=user)] == ["layerzero.yaml"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("plugins:\n  allow: ['*']\n", "plugins.allow"),
        ("hub:\n  allow: [evil/kernel]\n", "hub.allow"),
        ("hub:\n  endpoints: [somewhere]\n", "hub.endpoints"),
        ("hub:\n  signing_keys: [k]\n", "hub.signing_keys"),
        ("hub:\n  require_trusted_publisher: false\n", "hub.require_trusted_publisher"),
        ("hub:\n  enabled: true\n", "hub.enabled"),
        ("perfdb:\n  path: ./poisoned.db\n", "perfdb.path"),
        ("\nisolation: {flashattn: in_process}\n", "isolation"),
        ("\nisolation: in_process\n", "isolation"),
    ],
)
def test_a_file_in_the_working_directory_cannot_widen_trust(places, text, key):
    user, project = places
    (project / "layerzero.yaml").write_text(text)
    with pytest.raises(PolicyValidationError, match="never widen") as caught:
        load_discovered(env.read({}), cwd=project, user_dir=user)
    assert (caught.value.key, caught.value.line) == (key, 2)
    named = env.read({"LAYERZERO_CONFIG": str(project / "layerzero.yaml")})
    assert load_discovered(named, cwd=project, user_dir=user)  # the same file, named on purpose, may


def test_a_file_in_the_working_directory_may_narrow_trust(places):
    user, project = places
    (user / "layerzero.yaml").write_text("plugins: {allow: [mine], deny: [a]}\nhub: {allow: [org/k], deny: [x]}\n")
    (project / "layerzero.yaml").write_text(
        "plugins: {deny: [b]}\nisolation: subprocess\n"
        "hub: {deny: [y], revoked: [r], enabled: false, offline: true, require_trusted_publisher: true}\n"
    )
    policy = merge(load_discovered(env.read({}), cwd=project, user_dir=user))
    assert dict(policy.plugins) == {"allow": ("mine",), "deny": ("b", "a")}
    assert (
        policy.hub["allow"] == ("org/k",) and set(policy.hub["deny"]) == {"x", "y"} and policy.hub["enabled"] is False
    )


# -- the schema, and what is not imported ---------------------------------------------------------------------------
def test_the_json_schema_describes_every_key_and_closes_the_door_to_others():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert {"locks", "rules", "deny", "isolation", "cache", "graph_whitelist"} <= set(schema["properties"])
    assert schema["properties"]["deny"]["anyOf"][0] == {"type": "string"}
    assert all(part["additionalProperties"] is False for part in schema["$defs"].values() if "properties" in part)
