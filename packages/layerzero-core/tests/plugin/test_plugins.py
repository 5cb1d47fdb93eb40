from __future__ import annotations

import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import importlib_metadata
import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.errors import PluginError
from layerzero.model.enums import OpKind, Platform
from layerzero.model.kernel import KernelSpec
from layerzero.model.op import Op, OperationSpec
from layerzero.numerics import tolerance
from layerzero.plugin import hookimpl, spec, vendor_status
from layerzero.plugin.discovery import BUILTINS, discover
from layerzero.plugin.manager import Loaded, PluginRecord, call_hook, load_plugins
from layerzero.plugin.registrar import Registrar
from layerzero.runtime.current import builtin_ops
from layerzero_verify.testing import fakes
from layerzero_verify.testing.fakes import FakeDist, FakeEntryPoint, capabilities, plugin
from tools import faulty_plugins as faults


def load(*entries: Any, env: dict[str, str] | None = None) -> Loaded:
    return load_plugins(entries, env or {})


def entry(name: str, *descriptors: Any, dist: str | None = None, **given: Any) -> FakeEntryPoint:
    found = descriptors or (capabilities(name),)
    return FakeEntryPoint(name, plugin(*found, **given), FakeDist(dist or f"layerzero-{name}"))


def record(loaded: Loaded, name: str) -> PluginRecord:
    found = loaded.record(name)
    assert found is not None
    return found


# -- the good way ----------------------------------------------------------------------------------
@pytest.mark.req("R-REG-05", "R-REG-01")
def test_a_third_party_plugin_registers_its_kernels() -> None:
    loaded = load(entry("mine"))
    found = record(loaded, "mine")
    assert (found.state, found.kernels, found.dist, found.dist_version) == (
        "ok", ("mine.rms_norm.plain",), "layerzero-mine", "1.0",
    )  # fmt: skip
    assert loaded.registry.get("mine.rms_norm.plain").version == "1.0"
    assert loaded.registry.backends["mine"].capabilities_hash == loaded.capabilities["mine"].hash
    assert loaded.pm.has_plugin("mine")
    assert found.to_json()["reasons"] == []


@pytest.mark.req("R-REG-05")
@pytest.mark.usefixtures("clean")
def test_an_installed_backend_serves_the_next_call_whose_code_does_not_know_of_it(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(3, 8), torch.rand(8)
    described = {"function": "layerzero.backends.reference.norm:rms_norm", "priority": 99}
    faults.install(site, "healthy", "own", descriptor=capabilities("own", described))
    monkeypatch.setenv("LAYERZERO_PLUGINS", "own")
    monkeypatch.setenv("LAYERZERO_ON_FIRST_USE", "off")  # or the first call is the reference's, beside which it is seen
    lz.reset()  # as a new process
    torch.testing.assert_close(lz.rms_norm(x, weight), torch.rms_norm(x, (8,), weight, 1e-6))
    report = lz.explain("rms_norm", x, weight)
    assert report.chosen == report.ran == lz.which("rms_norm", x, weight) == "own.rms_norm.plain"


def test_the_built_ins_come_in_by_the_same_door_first() -> None:
    loaded = load(entry("aaa"))
    assert [item.name for item in loaded.records] == [*BUILTINS, "aaa"]
    assert all(item.state == "ok" and item.builtin for item in loaded.records[: len(BUILTINS)])
    assert loaded.registry.get("reference.attention.plain").backend == "reference"


def test_the_installed_entry_points_and_the_built_in_list_agree() -> None:
    declared = {item.name: item.value for item in importlib_metadata.entry_points(group=spec.ENTRY_POINT_GROUP)}
    assert {name: value for name, value in declared.items() if value.startswith("layerzero.backends.")} == BUILTINS
    assert len([item for item in discover() if item.builtin]) == len(BUILTINS)


def test_the_core_declares_its_built_in_backends_as_a_third_party_would() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][spec.ENTRY_POINT_GROUP] == BUILTINS


def formula(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def by_name(x: Tensor, *, scale: float = 1.0) -> Tensor:
    return x * scale


def many(x: Tensor, *others: Tensor) -> Tensor:
    return x


def any_word(x: Tensor, **others: float) -> Tensor:
    return x


def by_place(x: Tensor, /, scale: float = 1.0) -> Tensor:
    return x * scale


def hidden(x: Tensor, _world: float = 1.0) -> Tensor:
    return x * _world


def described(call: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        *(
            ({"op_id": name}, "a name of lowercase")
            for name in ("my.op", "Mine", "lambda", "1a", "é", "_mine", "x" * 65)
        ),
        ({"describe": None}, "a function `describe`"),
        *(({"function": item}, "parameters that go") for item in (many, any_word, by_place, by_name, hidden)),
    ],
    ids=lambda item: getattr(item.get("function"), "__name__", str(item)) if isinstance(item, dict) else item,
)
def test_an_op_that_no_public_function_can_be_written_for_is_refused_in_words(
    given: dict[str, Any], needed: str
) -> None:
    op = Op(**{"function": formula, "describe": described, **given})
    found = record(load(FakeEntryPoint("mine", plugin(ops=[op]))), "mine")
    assert found.state == "failed" and found.reasons[0].code == "VALUE_INVALID"
    assert f"op {op.op_id!r}, {op.signature}: it needs {needed}" in found.reasons[0].message
    assert found.reasons[0].hint.startswith("give it ")


def test_parameters_that_go_by_name_need_a_reference_that_takes_them_by_place() -> None:
    op = Op(function=by_name, describe=described, reference=formula)
    assert record(load(FakeEntryPoint("mine", plugin(ops=[op]))), "mine").state == "ok"


@pytest.mark.parametrize("name", ["attention_lse", "rms_norm_backward", "linear_quantized"])
def test_an_op_named_like_an_opaque_op_of_another_is_refused(name: str) -> None:
    op = Op(function=formula, op_id=name, describe=described)
    loaded = load_plugins([FakeEntryPoint("mine", plugin(ops=[op]))], {}, builtin_ops)
    (why,) = record(loaded, "mine").reasons
    assert why.code == "PLUGIN_DUPLICATE" and f"torch.ops.layerzero.{name}" in why.message
    first, second = (Op(function=formula, op_id=word, describe=described) for word in ("mine_backward", "mine"))
    loaded = load(FakeEntryPoint("a", plugin(ops=[first])), FakeEntryPoint("b", plugin(ops=[second])))
    assert "torch.ops.layerzero.mine_backward" in record(loaded, "b").reasons[0].message


def test_a_plugin_that_is_refused_leaves_no_tolerance_behind() -> None:
    before = tolerance("rms_norm", "float32")
    op = Op(function=formula, op_id="rms_norm", describe=described, tolerance="exact")
    loaded = load_plugins([FakeEntryPoint("mine", plugin(ops=[op]))], {}, builtin_ops)
    assert record(loaded, "mine").state == "failed" and tolerance("rms_norm", "float32") == before
    loose = Op(function=formula, op_id="mine", describe=described, tolerance="loose")
    (why,) = record(load(FakeEntryPoint("mine", plugin(ops=[loose]))), "mine").reasons
    assert "no row 'loose' in the tolerance table" in why.message


def test_a_plugin_may_bring_an_op_of_its_own() -> None:
    op = OperationSpec("my_op", OpKind.TENSOR, ("x",), ("tensor",), "tensor", fallback_impl=lambda x: x)
    loaded = load(FakeEntryPoint("mine", plugin(ops=[op])))
    assert loaded.ops["my_op"] is op and record(loaded, "mine").ops == ("my_op",)
    taken = load(FakeEntryPoint("a", plugin(ops=[op])), FakeEntryPoint("b", plugin(ops=[op])))
    assert record(taken, "b").reasons[0].code == "PLUGIN_DUPLICATE"


@pytest.mark.parametrize("name", ["silu_and_mul", "moe", "varlen_attention"])
def test_a_plugins_op_named_like_one_of_the_core_is_refused_by_name(name: str) -> None:
    op = OperationSpec(name, OpKind.TENSOR, ("x",), ("tensor",), "tensor", fallback_impl=lambda x: x)
    loaded = load_plugins([FakeEntryPoint("mine", plugin(ops=[op]))], {}, builtin_ops)
    (why,) = record(loaded, "mine").reasons
    assert record(loaded, "mine").state == "failed" and name not in loaded.ops
    assert why.code == "PLUGIN_DUPLICATE" and name in why.message and why.limit == "layerzero-core"


def test_a_plugin_that_only_observes_is_fine() -> None:
    only = SimpleNamespace(layerzero_decided=hookimpl(lambda decision: None))
    assert record(load(FakeEntryPoint("observer", only)), "observer").state == "ok"


def test_a_plugin_may_bring_several_backends() -> None:
    loaded = load(FakeEntryPoint("flash", plugin(capabilities("fa2"), capabilities("fa3"))))
    assert record(loaded, "flash").backends == ("fa2", "fa3")
    assert record(loaded, "fa3").name == "flash"


# -- the bad ways: each costs only itself ------------------------------------------------------------
@pytest.mark.req("R-REG-04")
@pytest.mark.parametrize("kind", sorted(faults.EXPECTED))
def test_a_broken_plugin_costs_only_itself(kind: str) -> None:
    loaded = load(entry("before"), faults.entry_point(kind), entry("zz_after"))
    broken = record(loaded, kind)
    assert broken.state == "failed" and broken.reasons[0].code == faults.EXPECTED[kind]
    assert broken.kernels == () and not loaded.registry.by_backend(kind), "nothing of it stays behind"
    assert broken.fix and kind in broken.fix
    assert record(loaded, "before").state == record(loaded, "zz_after").state == "ok"


@pytest.mark.req("R-CAP-01")
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"schema_version": "2.0"}, "SCHEMA_VERSION_UNKNOWN"),
        ({"schema_version": None}, "SCHEMA_VERSION_UNKNOWN"),
        ({"strict": False}, "SCHEMA_FIELD_UNKNOWN"),
        ({"variant": "odd", "dtypes": ["float17"]}, "SCHEMA_INVALID"),
        ({"variant": "odd", "head_dim": {"min": 9, "max": 8}}, "SCHEMA_INVALID"),
    ],
)
def test_of_a_descriptor_that_is_not_wholly_right_no_kernel_is_offered(wrong: dict[str, Any], code: str) -> None:
    """Not even those that are described well, whether the wrong place is in another kernel or above them all."""
    kernels, above = ([wrong], {}) if "variant" in wrong else ([], wrong)
    assert record(load(entry("mine", capabilities("mine", {"variant": "good"}))), "mine").kernels
    loaded = load(entry("mine", {**capabilities("mine", {"variant": "good"}, *kernels), **above}), entry("other"))
    found = record(loaded, "mine")
    assert (found.state, found.reasons[0].code, found.kernels) == ("failed", code, ())
    assert not loaded.registry.by_backend("mine") and "mine" not in loaded.registry.backends
    assert loaded.registry.by_backend("other")


@pytest.mark.req("R-REG-04")
def test_all_broken_plugins_together_leave_the_built_ins_working() -> None:
    loaded = load(*(faults.entry_point(kind) for kind in faults.SOURCES))
    assert [item.name for item in loaded.records if item.state == "failed"] == sorted(faults.EXPECTED)
    assert all(record(loaded, name).state == "ok" for name in BUILTINS)


@pytest.mark.parametrize("moment", ["import", "register"])
def test_ctrl_c_is_not_swallowed(moment: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    target: Any = fakes.loader(interrupt)
    if moment == "register":
        target = SimpleNamespace(layerzero_register=hookimpl(lambda registrar: interrupt()))
    with pytest.raises(KeyboardInterrupt):
        load(FakeEntryPoint("mine", target))


def test_a_hook_that_forgot_its_marker_is_told_so() -> None:
    loaded = load(FakeEntryPoint("mine", SimpleNamespace(layerzero_register=lambda registrar: None)))
    assert "is not marked" in record(loaded, "mine").reasons[0].message
    assert "@hookimpl" in record(loaded, "mine").reasons[0].hint


def test_a_class_is_not_a_plugin() -> None:
    class Plugin:
        @hookimpl
        def layerzero_register(self, registrar: Any) -> None: ...

    assert record(load(FakeEntryPoint("mine", Plugin)), "mine").state == "failed"
    assert record(load(FakeEntryPoint("mine", Plugin())), "mine").state == "ok"


@pytest.mark.req("R-REG-07")
def test_a_taken_backend_name_costs_the_newcomer() -> None:
    loaded = load(entry("aa", capabilities("same")), entry("bb", capabilities("same")))
    assert (record(loaded, "aa").state, record(loaded, "bb").state) == ("ok", "failed")
    assert record(loaded, "bb").reasons[0].code in ("PLUGIN_DUPLICATE", "KERNEL_DUPLICATE")
    assert len(loaded.registry.by_backend("same")) == 1


def test_nobody_takes_the_name_of_a_built_in() -> None:
    loaded = load(entry("sdpa", capabilities("sdpa", {"variant": "better", "priority": 99}), dist="evil"))
    assert [item.state for item in loaded.records if item.name == "sdpa"] == ["ok", "failed"]
    assert "sdpa.rms_norm.better" not in loaded.registry


def test_two_distributions_with_one_entry_point_name_do_not_mix() -> None:
    loaded = load(entry("x", capabilities("one"), dist="a"), entry("x", capabilities("two"), dist="b"))
    mine = loaded.records[len(BUILTINS) :]
    assert [(item.dist, item.state) for item in mine] == [("a", "ok"), ("b", "failed")]
    assert mine[1].reasons[0].code == "PLUGIN_DUPLICATE"


def test_a_registrar_is_closed_after_the_hook() -> None:
    kept: list[Registrar] = []
    target = SimpleNamespace(layerzero_register=hookimpl(lambda registrar: kept.append(registrar)))
    load(FakeEntryPoint("mine", target))
    with pytest.raises(PluginError, match="after layerzero_register"):
        kept[0].backend(capabilities("late"))


def test_a_kernel_built_in_code_stays_inside_its_plugin() -> None:
    def spec_of(kernel_id: str) -> KernelSpec:
        return KernelSpec(
            kernel_id, "rms_norm", kernel_id.split(".")[0], "a:b", platforms=frozenset({Platform.CPU}),
            dtypes=frozenset({"float32"}),
        )  # fmt: skip

    def registering(kernel_id: str) -> FakeEntryPoint:
        hook = hookimpl(lambda registrar: registrar.kernel(spec_of(kernel_id)))
        return FakeEntryPoint("mine", SimpleNamespace(layerzero_register=hook))

    assert record(load(registering("mine.rms_norm.a")), "mine").kernels == ("mine.rms_norm.a",)
    assert record(load(registering("sdpa.rms_norm.a")), "mine").reasons[0].code == "KERNEL_ID_INVALID"


@pytest.mark.req("R-REG-04")
def test_damaged_metadata_of_one_package_hides_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("damaged", "unrelated", "whole"):
        faults.install(tmp_path, "healthy", name)
    (tmp_path / "layerzero_damaged-1.0.dist-info/entry_points.txt").write_text("[layerzero.backends]\nno equals sign\n")
    (tmp_path / "layerzero_unrelated-1.0.dist-info/entry_points.txt").write_text("[other.group]\nno equals sign\n")
    (tmp_path / "layerzero_whole-1.0.dist-info/METADATA").write_bytes(b"\xff\xfe not text")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_plugins(env={})
    broken = record(loaded, "layerzero-damaged")
    assert broken.state == "failed" and broken.reasons[0].code == "PLUGIN_IMPORT_FAILED"
    assert "entry_points.txt cannot be parsed" in broken.reasons[0].message
    assert record(loaded, "whole").state == "ok" and record(loaded, "whole").dist_version == ""


# -- who may come in -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("env", "denied"),
    [
        ({}, set()),
        ({"LAYERZERO_PLUGINS": "mine"}, {"other"}),
        ({"LAYERZERO_PLUGINS": ""}, {"mine", "other"}),
        ({"LAYERZERO_PLUGINS": "layerzero-m*"}, {"other"}),
        ({"LAYERZERO_PLUGINS_DENY": "mine"}, {"mine"}),
        ({"LAYERZERO_PLUGINS_DENY": "*"}, {"mine", "other"}),
        ({"LAYERZERO_PLUGINS_DENY": "Layerzero_Other"}, {"other"}),
        ({"LAYERZERO_PLUGINS": "mine", "LAYERZERO_PLUGINS_DENY": "mine"}, {"mine", "other"}),
        ({"LAYERZERO_PLUGINS_DENY": "sdpa"}, {"sdpa"}),
    ],
)
def test_the_environment_keeps_plugins_out(env: dict[str, str], denied: set[str]) -> None:
    entries = [entry("mine"), entry("other")]
    loaded = load(*entries, env=env)
    assert {item.name for item in loaded.records if item.state == "denied"} == denied
    for item in loaded.records:
        if item.name in denied:
            assert item.reasons[0].code == "PLUGIN_DENIED" and "LAYERZERO_PLUGINS" in item.fix
    assert all(item.loads == (item.name not in denied) for item in entries), "a denied plugin is not even imported"


# -- vendors ---------------------------------------------------------------------------------------
@pytest.mark.req("R-REG-04")
def test_an_absent_vendor_keeps_its_kernels_listed_but_unusable() -> None:
    vendor = {"dist": "sgl-kernel", "import": "no_such_vendor", "version": ">=99"}
    loaded = load(entry("mine", capabilities("mine", vendor=vendor)))
    found = record(loaded, "mine")
    assert found.state == "unavailable" and found.reasons[0].code == "BACKEND_NOT_INSTALLED"
    assert found.fix == "pip install 'sgl-kernel>=99'" == found.reasons[0].hint
    assert "mine.rms_norm.plain" in loaded.registry and not loaded.registry.available("mine")


@pytest.mark.req("R-REG-04", "R-REG-06")
def test_a_vendor_of_a_wrong_version_is_refused_with_both_versions() -> None:
    installed = importlib_metadata.version("pluggy")
    loaded = load(entry("mine", capabilities("mine", vendor={"dist": "pluggy", "version": ">=99"})))
    why = record(loaded, "mine").reasons[0]
    assert (why.code, why.value, why.limit) == ("BACKEND_VERSION_MISMATCH", f"pluggy {installed}", ">=99")
    assert record(loaded, "mine").state == "unavailable" and not loaded.registry.available("mine")
    right = load(entry("mine", capabilities("mine", vendor={"dist": "pluggy", "version": ">=1"})))
    assert record(right, "mine").state == "ok"
    assert right.registry.backends["mine"].vendor_version == installed
    assert right.registry.get("mine.rms_norm.plain").version == installed


@pytest.mark.parametrize(
    ("vendor", "fix"),
    [
        ({"dist": "sgl-kernel"}, "pip install sgl-kernel"),
        ({"dist": "sgl-kernel", "extra": "fast"}, "pip install sgl-kernel"),  # nobody publishes layerzero-mine
        ({"dist": "sgl-kernel", "install": "pip install ./sgl-kernel"}, "pip install ./sgl-kernel"),
    ],
)
def test_the_fix_is_an_exact_command(vendor: dict[str, str], fix: str) -> None:
    assert record(load(entry("mine", capabilities("mine", vendor=vendor))), "mine").fix == fix


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    "vendor",
    [{"dist": "nope"}, {"dist": "nope", "version": ">=2"}, {"dist": "nope", "extra": "nope"}],
    ids=["bare", "version", "extra"],
)
def test_no_command_installs_a_distribution_that_we_do_not_know(vendor: dict[str, str]) -> None:
    found = record(load(entry("mine", capabilities("mine", vendor=vendor))), "mine")
    assert "pip install" not in found.fix and "mine asks for nope" in found.fix and found.fix == found.reasons[0].hint
    written = {**vendor, "install": "pip install nope --no-build-isolation"}
    found = record(load(entry("mine", capabilities("mine", vendor=written))), "mine")
    assert found.fix.startswith("mine says: pip install nope --no-build-isolation; LayerZero does not know nope")


def test_no_vendor_is_imported_by_discovery() -> None:
    before = set(sys.modules)
    load(entry("mine", capabilities("mine", vendor={"dist": "trove-classifiers", "import": "trove_classifiers"})))
    assert "trove_classifiers" not in set(sys.modules) - before


def test_vendor_status_names_the_kernels_usable_on_a_device() -> None:
    both = capabilities(
        "mine",
        {"variant": "cpu"},
        {"variant": "hopper", "platforms": ["cuda"], "min_sm": 90, "grid": "library"},
    )
    on_cpu, on_ampere = vendor_status(both, fakes.cpu()), vendor_status(both, fakes.gpu(80))
    assert (on_cpu.available, on_cpu.kernels) == (True, ("mine.rms_norm.cpu",))
    assert not on_ampere.available
    assert {item.code for item in on_ampere.reasons} == {"PLATFORM_MISMATCH", "SM_TOO_OLD"}
    assert vendor_status(both, fakes.gpu(90)).kernels == ("mine.rms_norm.hopper",)
    stub = {"schema_version": "1.0", "backend": "stub", "ops": {}}
    assert vendor_status(stub, fakes.cpu()).reasons[0].code == "BACKEND_STUB"


# -- versions come and go --------------------------------------------------------------------------
@pytest.mark.req("R-REG-06", "R-REG-05")
def test_an_upgrade_a_downgrade_and_a_removal_are_seen_at_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes = set()
    for version, priority in (("1.0", 1), ("2.0", 2), ("1.0", 1)):
        faults.install(tmp_path, "healthy", "moving", version, capabilities("moving", {"priority": priority}))
        _forget_paths()
        loaded = load_plugins(env={})
        found = record(loaded, "moving")
        assert (found.state, found.dist_version) == ("ok", version)
        assert loaded.registry.get("moving.rms_norm.plain").priority == priority
        hashes.add(loaded.registry.capabilities_hash)
    assert len(hashes) == 2, "the same version gives the same hash again"
    for info in tmp_path.glob("*.dist-info"):
        info.rename(tmp_path / "gone")
    _forget_paths()
    assert load_plugins(env={}).record("moving") is None


@pytest.mark.req("R-REG-06")
@pytest.mark.parametrize("api", [">=7", "<1"], ids=["made for a later core", "made for an earlier core"])
def test_an_upgrade_that_this_core_cannot_take_is_refused_until_the_old_version_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    hashes: list[str] = []
    fits = f"=={spec.API_VERSION}"
    for version, wanted in (("1.0", fits), ("2.0", api), ("1.0", fits)):
        faults.install(tmp_path, "healthy", "moving", version, {**capabilities("moving"), "api": wanted})
        _forget_paths()
        loaded = load_plugins(env={})
        found = record(loaded, "moving")
        hashes.append(loaded.registry.capabilities_hash)
        assert found.dist_version == version
        if version == "1.0":
            assert found.state == "ok" and loaded.registry.available("moving")
            continue
        assert found.state == "failed" and found.reasons[0].code == "PLUGIN_API_MISMATCH"
        assert (found.reasons[0].value, found.reasons[0].limit) == (spec.API_VERSION, api)
        assert not loaded.registry.by_backend("moving") and "moving" not in loaded.registry.backends
    assert hashes[0] == hashes[2] != hashes[1]


def _forget_paths() -> None:
    importlib_metadata.MetadataPathFinder.invalidate_caches()


@pytest.mark.req("R-REG-07")
def test_one_backend_in_two_versions_lives_under_two_names() -> None:
    loaded = load(
        entry("fa", capabilities("fa2"), capabilities("fa3")),
        entry("fa_next", capabilities("fa4"), dist="layerzero-fa-next"),
    )
    ids = [kernel.kernel_id for kernel in loaded.registry.by_op("rms_norm") if kernel.backend.startswith("fa")]
    assert ids == ["fa2.rms_norm.plain", "fa3.rms_norm.plain", "fa4.rms_norm.plain"]


def test_one_distribution_seen_twice_on_the_path_loads_once() -> None:
    twice = [entry("mine"), entry("mine")]
    loaded = load(*twice)
    assert [item.name for item in loaded.records].count("mine") == 1


# -- hooks -----------------------------------------------------------------------------------------
def test_a_hook_may_live_under_another_name() -> None:
    target = SimpleNamespace(
        my_register=hookimpl(specname="layerzero_register")(lambda registrar: registrar.backend(capabilities("x")))
    )
    assert record(load(FakeEntryPoint("x", target)), "x").backends == ("x",)


def test_an_implementation_may_take_fewer_arguments() -> None:
    target = SimpleNamespace(layerzero_health=hookimpl(lambda: "well"))
    assert call_hook(target, "layerzero_health", backend="x") == "well"
    assert call_hook(target, "layerzero_capabilities", device=None) is None


def test_every_hook_is_documented_and_says_when_it_fires() -> None:
    for name in (item for item in vars(spec) if item.startswith("layerzero_")):
        text = getattr(spec, name).__doc__
        assert text and "Fires" in text, name


@pytest.mark.benchmark
def test_discovery_is_quick() -> None:
    load_plugins(env={})
    times = []
    for _ in range(7):
        start = time.process_time()  # what others do on the machine does not count
        load_plugins(env={})
        times.append(time.process_time() - start)
    assert min(times) < 0.025, f"{len(list(importlib_metadata.distributions()))} distributions"
