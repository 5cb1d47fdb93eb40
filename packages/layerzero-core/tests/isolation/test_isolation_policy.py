"""Who says where a backend runs: the policy's entry, the backend's declaration, and who may not."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from layerzero import env
from layerzero.errors import CapabilitiesError, PolicyValidationError
from layerzero.isolation.process import Settings
from layerzero.model.config import FrozenMap, Policy
from layerzero.model.enums import Platform
from layerzero.model.kernel import BackendSpec, KernelSpec
from layerzero.plugin.enclosure import Enclosure, _Without
from layerzero.policy.layers import Level, PolicyLayer, from_env, merge
from layerzero.policy.load import from_bytes, from_mapping, load_discovered
from layerzero.reasons import reason
from layerzero.registry.capabilities import load_capabilities
from layerzero.runtime.isolated_backends import enclosed
from layerzero.selection.transforms import apart

ENTRY = {"mode": "subprocess", "path": ["/srv/xf"], "env": {"A": "b"}, "hide": ["flash_attn"], "deadline_s": 5.0}


# -- what a policy says ------------------------------------------------------------------------------
@pytest.mark.req("R-ENV-10")
def test_an_entry_says_where_and_how() -> None:
    policy = merge([from_mapping({"isolation": {"xformers": ENTRY, "b": "in_process"}})])
    assert (policy.isolation_of("xformers"), policy.isolation_of("b"), policy.isolation_of("c")) == (
        "subprocess", "in_process", "in_process",
    )  # fmt: skip
    assert policy.isolation_entry("xformers") == {
        "path": ("/srv/xf",), "env": FrozenMap({"A": "b"}), "hide": ("flash_attn",), "deadline_s": 5.0,
    }  # fmt: skip
    assert policy.isolation_entry("c") == {}
    assert merge([from_mapping({"isolation": {"a": {"path": ["/srv"]}}})]).isolation_of("a") == "subprocess"
    assert policy.policy_hash != merge([from_mapping({"isolation": {"xformers": "subprocess"}})]).policy_hash
    assert policy.to_json()["isolation"]["xformers"]["path"] == ["/srv/xf"]


def test_a_stronger_layer_says_where_and_leaves_how_to_the_weaker() -> None:
    file = PolicyLayer.of(Level.FILE, isolation={"xformers": ENTRY})
    for word in ("auto", "in_process", "subprocess"):
        policy = merge([file, from_env(env.read({"LAYERZERO_ISOLATION": word}))])
        assert policy.isolation_of("xformers") == policy.isolation_of("other") == word
        assert policy.isolation_entry("xformers")["path"] == ("/srv/xf",)
    own = merge([file, PolicyLayer.of(isolation={"xformers": {"hide": ["triton"]}})])
    assert own.isolation_entry("xformers") == {
        **own.isolation_entry("xformers"),
        "hide": ("triton",),
        "deadline_s": 5.0,
    }
    everywhere = PolicyLayer.of(isolation={"*": {"mode": "auto", "deadline_s": 1.0}, "a": {"deadline_s": 2.0}})
    assert merge([everywhere]).isolation_entry("a")["deadline_s"] == 2.0
    assert merge([everywhere]).isolation_entry("b")["deadline_s"] == 1.0


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"mode": "thread"}, "isolation"),
        ({"path": "/srv"}, "path"),
        ({"path": ["relative"]}, "absolute"),
        ({"env": {"A": 1}}, "env"),
        ({"env": ["A=b"]}, "env"),
        ({"hide": [1]}, "hide"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"hied": ["flash_attn"]}, "hi"),
    ],
)
def test_a_wrong_entry_is_one_clear_error_from_file_and_code_alike(entry: Any, words: str) -> None:
    for make in (
        lambda: from_mapping({"isolation": {"x": entry}}),
        lambda: PolicyLayer.of(isolation={"x": entry}),
    ):
        with pytest.raises(PolicyValidationError, match=words):
            make()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("isolation: {x: {path: [/srv/evil]}}", "isolation.x.path"),
        ("isolation: {x: {env: {LD_PRELOAD: /srv/evil.so}}}", "isolation.x.env"),
        ("isolation: {x: {hide: [checker]}}", "isolation.x.hide"),
        ("isolation: {x: {memory_mb: 1048576}}", "isolation.x.memory_mb"),
        ("isolation: {x: {mode: in_process}}", "isolation"),
        ("isolation: auto", "isolation"),
    ],
)
def test_a_file_that_merely_lies_there_decides_no_code(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "layerzero.yaml").write_text(text)
    with pytest.raises(PolicyValidationError, match="never widen") as caught:
        load_discovered(env.read({}), cwd=tmp_path, user_dir=tmp_path / "user")
    assert caught.value.key == key
    assert from_bytes(text.encode(), "layerzero.yaml", trusted=True)
    harmless = b"isolation: {x: {mode: subprocess, deadline_s: 3}}"
    assert from_bytes(harmless, "layerzero.yaml", trusted=False).settings["isolation"]["x"]["deadline_s"] == 3


# -- what a backend says -----------------------------------------------------------------------------
DOCUMENT: dict[str, Any] = {
    "schema_version": "1.0",
    "backend": "x",
    "platforms": ["cpu"],
    "ops": {},
    "vendor": {"dist": "x", "build": {"file": "x/build.json", "cuda": "version.cuda"}},
    "conflicts": [{"dist": "y", "module": "y", "why": "same name", "unless": "z"}],
    "isolation": {"hide": ["y"], "env": {"X_HOME": ""}},
}


def test_conflicts_build_and_surroundings_are_data_of_the_descriptor() -> None:
    known = load_capabilities(DOCUMENT)
    assert [(item.dist, item.module, item.unless) for item in known.conflicts] == [("y", "y", "z")]
    assert known.isolation == FrozenMap({"hide": ("y",), "env": {"X_HOME": ""}})
    assert known.vendor is not None and (known.vendor.build_file, known.vendor.build_cuda) == (
        "x/build.json", "version.cuda",
    )  # fmt: skip
    assert load_capabilities({**DOCUMENT, "conflicts": [], "isolation": {}}).isolation == FrozenMap()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conflicts", [{"dist": "y"}]),
        ("isolation", {"path": ["/srv"]}),  # a package may not choose where its vendor comes from
        ("isolation", {"env": {"A=B": "c"}}),
        ("vendor", {"dist": "x", "build": {"file": "../../etc/passwd", "cuda": ""}}),
    ],
)
def test_a_descriptor_that_says_it_wrongly_is_refused(key: str, value: Any) -> None:
    with pytest.raises(CapabilitiesError):
        load_capabilities({**DOCUMENT, key: value})


def test_policy_and_declaration_together_make_the_settings() -> None:
    spec = BackendSpec("x", isolation=FrozenMap({"hide": ("y",), "env": {"A": "declared", "B": "declared"}}))
    entry = {"env": {"A": "policy"}, "hide": ("w",), "path": ("/srv/x",), "deadline_s": 3.0}
    made = Settings.of("x", entry, spec)
    assert made.env == (("A", "policy"), ("B", "declared")) and made.hide == ("w", "y")
    assert (made.path, made.deadline_s, made.start_s) == (("/srv/x",), 3.0, 120.0)
    environ = made.environ({"PATH": "p", "PYTHONPATH": "/srv/mine", "A": "outer"})
    assert (environ["A"], environ["PATH"], environ["LAYERZERO_ISOLATION"]) == ("policy", "p", "in_process")
    places = environ["PYTHONPATH"].split(os.pathsep)
    assert places[:2] == ["/srv/x", "/srv/mine"] and "" not in places
    assert set(place for place in sys.path if os.path.isabs(place) and not place.endswith(".zip")) <= set(places)


# -- who runs apart ----------------------------------------------------------------------------------
def test_built_in_backends_always_stay() -> None:
    policy = Policy(backend_isolation=(("*", "subprocess"),))
    specs = {"sdpa": BackendSpec("sdpa", builtin=True), "toy": BackendSpec("toy")}
    kernels = {"reference.attention.plain": "reference", "toy.attention.plain": "toy", "lab.attention.plain": "lab"}
    assert set(enclosed(policy, specs, kernels, {})) == {"toy", "lab"}


@pytest.mark.req("R-ISO-02")
@pytest.mark.parametrize(
    ("reasons", "failed", "path", "expected"),
    [
        ((), None, (), False),
        ((reason("BACKEND_CONFLICT", "y 4"),), None, (), True),
        ((reason("CUDA_VERSION_MISMATCH", "13.0", "12.8"),), None, (), True),
        ((), reason("BACKEND_IMPORT_FAILED", "undefined symbol"), (), True),
        ((), reason("ISOLATION_IMPORT_FAILED", "still broken"), (), True),
        ((reason("BACKEND_NOT_INSTALLED", "x", "x"),), None, (), False),
        ((reason("BACKEND_NOT_INSTALLED", "x", "x"),), None, ("/srv/x",), True),
        ((reason("BACKEND_STUB"),), None, ("/srv/x",), False),
    ],
)
def test_auto_moves_out_what_clashes_and_nothing_else(reasons: Any, failed: Any, path: Any, expected: bool) -> None:
    policy = Policy(backend_isolation=(("toy", "auto"),), isolation=FrozenMap({"toy": {"path": path}} if path else {}))
    specs = {"toy": BackendSpec("toy", available=not reasons, reasons=reasons)}
    unbindable = MappingProxyType({} if failed is None else {"toy.attention.plain": failed})
    found = enclosed(policy, specs, {"toy.attention.plain": "toy"}, unbindable)
    assert ("toy" in found) is expected
    assert not expected or found["toy"].available  # in a process of its own nothing stands against it


def test_a_kernel_apart_promises_less() -> None:
    kernel = KernelSpec(
        "toy.attention.plain", "attention", "toy", "toy:run", platforms=frozenset({Platform.CPU}),
        dtypes=frozenset({"float32"}), features=frozenset({"backward", "gqa", "dropout", "lse", "chunk_mask"}),
        graph_safe=True,
    )  # fmt: skip
    assert apart(kernel).features == {"gqa", "lse"} and not apart(kernel).graph_safe
    assert apart(kernel).kernel_id == kernel.kernel_id


# -- a module made invisible -------------------------------------------------------------------------
def test_a_hidden_module_is_absent_and_the_others_are_not() -> None:
    finder = _Without(importlib.machinery.PathFinder, ("json", "email.mime"))
    assert finder.find_spec("json") is None and finder.find_spec("json.decoder") is None
    assert finder.find_spec("jsonschema_not_there") is None
    assert finder.find_spec("csv") is not None and finder.find_spec("email") is not None
    assert finder.find_spec("email.mime.text", ["anywhere"]) is None
    assert finder.invalidate_caches == importlib.machinery.PathFinder.invalidate_caches  # otherwise it is the finder


def test_an_enclosure_travels_as_json() -> None:
    made = Enclosure(("/srv/a",), ("b",))
    assert Enclosure.from_json(made.to_json()) == made
