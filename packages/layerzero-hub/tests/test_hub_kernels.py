"""A locked kernel is a kernel like any other: selected by measurement, explained, revoked, side by side, offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from layerzero_hub import LockedLayer, bound
from layerzero_hub.cli import dependencies
from layerzero_hub.policy import from_mapping
from tools.pytest_fixtures import module_beside

_kernels = module_beside(__file__, "loopback_kernels")
build, universal_kernel = _kernels.build, _kernels.universal_kernel

MAPPING = {"op": "rms_norm", "function": "rms_norm", "arguments": ["x", "weight", "eps"]}
CHOOSE = """
import json, sys, torch, layerzero as lz
x, w = torch.randn(4, 64), torch.rand(64)
def chosen():
    report = lz.explain("rms_norm", x, w)
    rejected = {c.kernel_id: [r.code.value for r in c.reasons] for c in report.candidates if c.reasons}
    return {"chosen": report.chosen, "rejected": rejected}
before = "layerzero_hub" in sys.modules
with lz.record() as recording:
    lz.rms_norm(x, w)
tuned = lz.tune(recording.traffic, seconds=0.3) if "--tune" in sys.argv else None
got = lz.rms_norm(x, w)
wide = x.double()
want = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w).float()
answer = chosen()
answer |= {"loaded_early": before, "error": (got - want).abs().max().item()}
answer["ran"] = lz.which("rms_norm", x, w)
print(json.dumps(answer))
"""


def settings(bench, *kernels, **more) -> dict[str, str]:
    """A policy file of this bench, and the environment that names it."""
    path = bench.folder / "layerzero.yaml"
    hub = {**bench.settings, "kernels": list(kernels)}
    path.write_text(json.dumps({"hub": hub, **more}))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "LAYERZERO_"))}
    return {**clean, "LAYERZERO_CONFIG": str(path), "LAYERZERO_PERFDB": str(bench.folder / "perf.db")}


def ask(code: str, environment, *arguments: str):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.req("R-BK-HF-04", "R-BK-HF-01")
def test_a_compiled_kernel_is_chosen_when_it_measures_fastest_and_revoking_removes_it(bench, compiled):
    repo = "org/compiled-norm"
    bench.put(repo, compiled)
    bench.lock(repo, probe=True)
    # Beside the reference it is the only one, and the call is short: several ops of torch take longer than one plain
    # loop on any processor. Which one measures faster is not a matter of luck.
    environment = settings(bench, {"repo": repo, **MAPPING}, deny=["torch.*", "cpu.*", "inductor.*", "triton.*"])
    found = ask(CHOOSE, environment, "--tune")
    kernel_id = "hub.rms_norm.org-compiled-norm-v1"
    assert (found["chosen"], found["loaded_early"]) == (kernel_id, False), found
    assert found["error"] < 1e-5
    (variant,) = bench.read().find(repo).variants.values()
    bench.settings["revoked"] = [variant.digest]
    environment = settings(bench, {"repo": repo, **MAPPING}, deny=["torch.*", "cpu.*", "inductor.*", "triton.*"])
    gone = ask(CHOOSE, environment)
    assert gone["chosen"] != kernel_id and gone["rejected"][kernel_id] == ["HUB_REVOKED"]
    assert gone["error"] < 1e-5


def test_a_kernel_that_was_tampered_with_is_left_for_the_next_candidate(bench):
    repo = bench.publish("tampered")
    bench.lock(repo)
    environment = settings(bench, {"repo": repo, **MAPPING}, prefer=["hub.*"], deny=["cpu.*"])
    kernel_id = f"hub.rms_norm.{repo.replace('/', '-')}-v1"
    assert ask(CHOOSE, environment)["chosen"] == kernel_id
    source = bench.build(repo) / "detail.py"
    source.write_bytes(source.read_bytes().replace(b"mean", b"MEAN"))
    hurt = ask(CHOOSE, environment)
    assert hurt["error"] < 1e-5 and hurt["ran"] != kernel_id


@pytest.mark.req("R-REG-07", "R-BK-HF-01", "R-HUB-06")
def test_two_versions_side_by_side(bench):
    repo = bench.publish("versions", id="_lz_v1", extra="NUMBER = 1")
    bench.put(repo, universal_kernel(id="_lz_v2", version=2, extra="NUMBER = 2"), version=2)
    bench.lock(repo)
    bench.lock(repo, version=2)
    assert (bench.load(repo, 1).NUMBER, bench.load(repo, 2).NUMBER) == (1, 2)
    bench.settings["kernels"] = [{"repo": repo, **MAPPING}]
    assert sorted(bound.survey(bench.policy)[0]) == [f"hub.rms_norm.{repo.replace('/', '-')}-v{n}" for n in (1, 2)]
    with bench.refused("HUB_LOCK_INVALID"):
        bench.load(repo)  # which one must be said


@pytest.mark.req("R-HUB-01")
def test_a_kernel_that_is_allowed_no_more_is_registered_with_the_reason_against_it(bench):
    repo = bench.publish("gone")
    bench.lock(repo)
    bench.settings["kernels"] = [{"repo": repo, **MAPPING}]
    (kernel,) = bound.survey(bench.policy)[0].values()
    assert kernel.refused == ()
    for change, code in (({"allow": []}, "HUB_NOT_ALLOWED"), ({"deny": [repo]}, "HUB_DENIED")):
        (kernel,) = bound.survey(from_mapping(bench.settings | change))[0].values()
        assert [why.code.value for why in kernel.refused] == [code] and repo in str(kernel.refused[0])


@pytest.mark.req("R-BK-HF-01", "R-HUB-02")
def test_everything_but_the_lock_works_with_the_hub_down(bench, compiled, monkeypatch):
    repo = bench.publish("offline", extra="DOWN = True")
    bench.lock(repo)
    bench.hub.attack.hang = True
    asked = len(bench.hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [finding.state for finding in bench.install(frozen=True)] == ["present"]
    assert bench.load(repo).DOWN
    assert len(bench.hub.asked) == asked


def test_frozen_says_what_is_missing(bench):
    import shutil

    repo = bench.publish("frozen")
    bench.lock(repo)
    shutil.rmtree(bench.store.root)
    with bench.refused("HUB_NOT_INSTALLED"):
        bench.install(frozen=True)


def test_without_telemetry(bench, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    repo = bench.publish("quiet", extra="QUIET = True")
    bench.lock(repo)
    assert bench.load(repo).QUIET


def test_a_dependency_is_locked_verified_and_handed_over(bench):
    base = bench.publish("base", extra="BASE = 40")
    code = f"from kernels import get_kernel_dep\nTOTAL = get_kernel_dep({base!r}).BASE + 2"
    repo = bench.publish("top", extra=code, metadata={"kernel-depends": [{"repo-id": base, "version": 1}]})
    bench.lock(repo, probe=True)
    assert {kernel.repo_id for kernel in bench.read().kernels} == {base, repo}
    assert bench.load(repo).TOTAL == 42
    bench.settings["allow"].remove(base)
    with bench.refused("HUB_DEPENDENCY_NOT_ALLOWED"):
        bench.load(repo)


ISOLATED = """
import json, os, sys, torch, layerzero as lz
x, w = torch.randn(4, 64), torch.rand(64)
for _ in range(3):
    got = lz.rms_norm(x, w)
wide = x.double()
want = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * w).float()
found = {"ran": lz.which("rms_norm", x, w), "error": (got - want).abs().max().item()}
print(json.dumps({**found, "loaded_here": "_lz_isolated" in sys.modules, "pid": os.getpid()}))
"""


@pytest.mark.fault(24)
@pytest.mark.slow
def test_a_hub_kernel_runs_in_a_process_of_its_own(bench):
    """It is verified and loaded there, and nothing of it comes into the caller's process."""
    mark = bench.folder / "pid"
    code = f"import os\nwith open({str(mark)!r}, 'w') as _file:\n    _file.write(str(os.getpid()))\n"
    repo = bench.publish("isolated", id="_lz_isolated", extra=code)
    bench.lock(repo)
    mapped = {"repo": repo, **MAPPING}
    found = ask(ISOLATED, settings(bench, mapped, prefer=["hub.*"], deny=["cpu.*"], isolation={"hub": "subprocess"}))
    assert found["ran"] == f"hub.rms_norm.{repo.replace('/', '-')}-v1" and found["error"] < 1e-5, found
    assert found["loaded_here"] is False and int(mark.read_text()) != found["pid"]


@pytest.mark.fault(24)
@pytest.mark.slow
def test_a_chain_of_dependencies_is_probed_and_loaded(bench):
    """The middle one needs its own dependency while it is imported for the top one."""
    space = "import torch\n_lib = torch.library.Library({0!r}, 'DEF')\n_lib.define('f(Tensor x) -> Tensor')\n"
    names = [bench.publish("first", id="_lz_chain_0", extra=space.format("_lz_chain_0") + "TOTAL = 1\n")]
    for number in (1, 2):
        code = f"from kernels import get_kernel_dep\nTOTAL = get_kernel_dep({names[-1]!r}).TOTAL + 1\n"
        needs = {"kernel-depends": [{"repo-id": names[-1], "version": 1}]}
        name = f"_lz_chain_{number}"
        names.append(bench.publish(f"chain-{number}", id=name, extra=space.format(name) + code, metadata=needs))
    bench.lock(names[-1], probe=True)
    spaces = [variant.ops_namespaces for _, variant in bench.read().variants()]
    assert sorted(spaces) == [("_lz_chain_0",), ("_lz_chain_1",), ("_lz_chain_2",)]
    assert bench.load(names[-1]).TOTAL == 3


def test_a_descriptor_in_the_kernel_maps_it(bench):
    described = json.dumps({"kernels": [{**MAPPING, "capabilities": {"dtypes": ["float32", "float64"]}}]}).encode()
    files = {"__init__.py": b"def rms_norm(x, weight, eps):\n    return x\n", "layerzero.json": described}
    bench.put("org/described", build(files, "torch-universal", id="_lz_described"))
    bench.lock("org/described")
    document = bound.capabilities(bound.survey(bench.policy)[0], {"schema_version": "1.0", "backend": "hub"})
    (entry,) = document["ops"]["rms_norm"]
    assert entry["dtypes"] == ["float32", "float64"] and entry["function"].startswith("layerzero_hub.bound:k_")


def test_a_function_with_an_output_argument_and_keywords(bench):
    import torch

    from layerzero_hub import bound

    code = b"def scaled(out, x, *, by):\n    out.copy_(x * (by + 1))\n"
    bench.put("org/out", build({"__init__.py": code}, "torch-universal", id="_lz_out"))
    bench.lock("org/out")
    mapping = {"repo": "org/out", "op": "rms_norm", "function": "scaled", "arguments": ["x"], "out": True}
    bench.settings["kernels"] = [{**mapping, "keywords": {"by": "eps"}}]
    bound.remember(bound.survey(bench.policy)[0], bench.policy)
    kernel = bound.k_hub_rms_norm_org_out_v1
    assert torch.equal(kernel(torch.ones(3), None, 1.0), torch.full((3,), 2.0))
    assert not hasattr(bound, "k_nothing")


def test_kernelize_takes_a_layer_from_the_verified_store(bench):
    import torch
    from kernels import Mode, kernelize, register_kernel_mapping, use_kernel_forward_from_hub

    layers = b"import torch\nclass Doubled(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    files = {"__init__.py": b"from . import layers\n", "layers.py": layers}
    bench.put("org/layers", build(files, "torch-universal", id="_lz_layers"))
    bench.lock("org/layers")

    @use_kernel_forward_from_hub("LzDoubled")
    class Plain(torch.nn.Module):
        def forward(self, x):
            return x * 3

    locked = LockedLayer("org/layers", "Doubled", policy=bench.policy)
    register_kernel_mapping({"LzDoubled": {"cpu": {Mode.INFERENCE: locked}}})
    model = kernelize(Plain(), mode=Mode.INFERENCE, device="cpu")
    assert model(torch.ones(1)).item() == 2.0


def test_dependencies_of_a_project_are_read(bench, tmp_path):
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.kernels.dependencies]\n"org/a" = 1\n"org/b" = "2"\n')
    assert dependencies(project) == [("org/a", 1), ("org/b", 2)]
    project.write_text('[tool.kernels.dependencies]\n"org/a" = "main"\n')
    with bench.refused("HUB_POLICY_INVALID"):
        dependencies(project)


def test_kernels_lock_is_what_the_library_reads(bench, victim):
    from layerzero_hub.locking import write_kernels_lock

    repo = bench.publish("compat", extra="COMPAT = 1")
    lock = bench.lock(repo)
    write_kernels_lock(lock, bench.folder / "kernels.lock")
    place = f"pathlib.Path({str(bench.folder / 'kernels.lock')!r})"
    code = f"import pathlib\nvalue = kernels.get_locked_kernel({repo!r}, lockfile={place}).COMPAT"
    assert victim.run(code) == 1


# -- 20: what a build says of itself --------------------------------------------------------------------------------
def described(bench, name: str, *entries, code: str = "import torch\n") -> str:
    """A locked kernel that brings a layerzero.json of these entries."""
    body = code + "def rms_norm(x, weight, eps):\n    return x\n\ndef pack(weight):\n    return (weight,)\n"
    files = {"__init__.py": body.encode(), "layerzero.json": json.dumps({"kernels": list(entries)}).encode()}
    bench.put(f"org/{name}", build(files, "torch-universal", id=f"_lz_{name}_1"))
    bench.lock(f"org/{name}")
    return f"org/{name}"


def document(bench):
    return bound.capabilities(bound.survey(bench.policy)[0], {"schema_version": "1.0", "backend": "hub"})


@pytest.mark.fault(20)
def test_a_descriptor_that_was_changed_in_the_store_says_nothing(bench):
    repo = described(bench, "rewritten", MAPPING)
    assert document(bench)["ops"]["rms_norm"]
    other = json.dumps({"kernels": [{**MAPPING, "capabilities": {"priority": 99, "dtypes": ["float64"]}}]})
    (bench.build(repo) / "layerzero.json").write_text(other)
    kernels, problems = bound.survey(bench.policy)
    assert kernels == {} and [item.code.value for item in problems] == ["HUB_STORE_TAMPERED"]


@pytest.mark.fault(20)
def test_one_bad_descriptor_takes_one_kernel_away(bench):
    from layerzero.registry.capabilities import load_capabilities

    described(bench, "good", MAPPING)
    wrong = {**MAPPING, "variant": "wrong", "capabilities": {"dtypes": ["float7"]}}
    described(bench, "half", MAPPING, wrong, {**MAPPING, "variant": "third", "function": "a b"}, MAPPING)
    files = {"__init__.py": b"", "layerzero.json": b'{"kernels": 7}'}
    bench.put("org/bad", build(files, "torch-universal", id="_lz_bad_1"))
    bench.lock("org/bad")
    kernels, problems = bound.survey(bench.policy)
    assert [item.code.value for item in problems] == [
        "HUB_DESCRIPTOR_INVALID", "HUB_DESCRIPTOR_INVALID", "HUB_POLICY_INVALID"
    ]  # fmt: skip
    refused = {name: [item.code.value for item in one.refused] for name, one in kernels.items()}
    assert refused == {
        "hub.rms_norm.org-good-v1": [],
        "hub.rms_norm.org-half-v1": [],
        "hub.rms_norm.org-half-v1-wrong": ["HUB_DESCRIPTOR_INVALID"],
    }
    good = load_capabilities(document(bench)).kernels
    assert {kernel.kernel_id for kernel in good} == {"hub.rms_norm.org-good-v1", "hub.rms_norm.org-half-v1"}


@pytest.mark.fault(20)
@pytest.mark.parametrize("key", ["packer", "function", "predicate", "kernel_id", "traceable"])
def test_a_descriptor_names_no_code_outside_its_build(bench, key):
    described(bench, f"reaching_{key}", {**MAPPING, "capabilities": {key: "os:system"}})
    kernels, problems = bound.survey(bench.policy)
    assert kernels == {} and [item.code.value for item in problems] == ["HUB_DESCRIPTOR_INVALID"]


@pytest.mark.fault(20)
def test_names_are_looked_up_in_the_build_alone(bench):
    from layerzero_hub import bound

    capabilities = {"packer": "pack", "weight_layout": "mine"}
    described(bench, "inside", {**MAPPING, "capabilities": capabilities})
    described(bench, "outside", {"op": "rms_norm", "function": "torch.os.system"})
    bound.remember(bound.survey(bench.policy)[0], bench.policy)
    (entry,) = [one for one in document(bench)["ops"]["rms_norm"] if "inside" in one["kernel_id"]]
    assert entry["packer"] == "layerzero_hub.bound:w_hub_rms_norm_org_inside_v1"
    assert bound.w_hub_rms_norm_org_inside_v1(1) == (1,)
    with bench.refused("HUB_DESCRIPTOR_INVALID") as caught:
        bound.k_hub_rms_norm_org_outside_v1  # noqa: B018 - the attribute binds when it is asked for
    assert "leads out of the kernel" in str(caught.value)


@pytest.mark.fault(20)
def test_what_was_registered_for_one_build_is_not_used_for_another(bench):
    from layerzero_hub import bound

    described(bench, "renewed", MAPPING)
    bound.remember(bound.survey(bench.policy)[0], bench.policy)
    described(bench, "renewed", MAPPING, code=f"open({str(bench.mark)!r}, 'w').close()\n")
    with bench.refused("HUB_LOCK_INVALID"):
        bound.k_hub_rms_norm_org_renewed_v1  # noqa: B018 - the attribute binds when it is asked for


def test_a_kernel_for_gpus_has_an_entry_that_the_core_reads(bench):
    from layerzero.registry.capabilities import load_capabilities

    described(bench, "gpu", {**MAPPING, "capabilities": {"platforms": ["cuda"], "min_sm": 80}})
    assert [kernel.kernel_id for kernel in load_capabilities(document(bench)).kernels] == ["hub.rms_norm.org-gpu-v1"]
