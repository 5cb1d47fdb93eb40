"""Every package of the workspace is whole, and the pins and files say nothing they should not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import check_docs, installed_only, prove
from tools.workspace import ROOT, Package, dev_requirements, group, packages, project_name, run_requirements

PACKAGES = packages()
WITH_CODE = [package for package in PACKAGES if package.has_code]


def files() -> list[Path]:
    """What belongs to the repository: tracked, or not ignored; every file where there is no git."""
    asked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    skipped = {".venv", ".git", ".tox", "build", "dist", "__pycache__"}
    found = [ROOT / line for line in asked.stdout.splitlines()] if asked.returncode == 0 else list(ROOT.rglob("*"))
    return [f for f in found if f.is_file() and not skipped.intersection(f.relative_to(ROOT).parts)]


def test_only_the_metapackage_has_no_code():
    assert [package.name for package in PACKAGES if not package.has_code] == ["layerzero-kernels"]


def test_core_comes_first():
    assert PACKAGES[0].name == "layerzero-core"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_package_is_whole(package: Package):
    assert package.path.name == package.name
    assert (package.path / "README.md").read_text(encoding="utf-8").startswith(f"# {package.name}")
    assert list((package.path / "tests").rglob("test_*.py"))
    if package.has_code:
        assert [d.name for d in (package.path / "src").iterdir() if (d / "py.typed").exists()]
    assert not list((package.path / "tests").rglob("__init__.py"))
    project = package.data["project"]
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert project["version"] == PACKAGES[0].data["project"]["version"]


@pytest.mark.parametrize("package", WITH_CODE, ids=lambda p: p.name)
def test_a_package_enters_by_a_door_of_the_core(package: Package):
    """Kernels and ops as a plugin, public names and verbs as entry points of their own groups; by no other way."""
    groups = package.data["project"]["entry-points"]
    doors = ("layerzero.backends", "layerzero.names", "layerzero.commands")
    entries = [target for door in doors for target in groups.get(door, {}).values()]
    assert entries
    for target in entries:
        module = Path(*target.partition(":")[0].split("."))
        candidates = [package.path / "src" / module.with_suffix(".py"), package.path / "src" / module / "__init__.py"]
        assert any(c.exists() for c in candidates), f"{target} names no module of {package.name}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_vendors_are_extras_only(package: Package):
    named = [canonicalize_name(Requirement(line).name) for line in package.dependencies]
    assert [name for name in named if installed_only.VENDORS.match(name)] == []


# spelt in pieces, so that this file passes its own test
REGISTRIES = re.compile(
    "|".join(
        ["py" + r"pi\.org", "python" + r"hosted\.org", "download\\.py" + r"torch\.org", "conda\\.ana" + r"conda\.org"]
    )
    + "|"
    + r"--(?:extra-)?index-"
    + r"url[ =]\S*:"
    + "//"
)
MACHINES = re.compile(
    r"(?<![\w.])/(?:" + "|".join(["ho" + "me", "ro" + "ot", "wo" + "rk", "opt/whe" + "els"]) + r")(?:/\w|\b(?=/))"
)


def test_no_file_names_a_registry_or_a_path_of_a_machine():
    wrong = []
    for file in files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{file.relative_to(ROOT)}: {m[0]}" for p in (REGISTRIES, MACHINES) for m in p.finditer(text)]
    assert wrong == []


def pins(text: str) -> dict[tuple[str, str], str]:
    found = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", " ")):
            pin = Requirement(line.removesuffix("\\").strip())
            (spec,) = pin.specifier
            assert spec.operator == "==", line
            found[canonicalize_name(pin.name), str(pin.marker or "")] = spec.version
    return found


CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")


def test_pins_hold_versions_only_no_address_and_no_option():
    for text in (CONSTRAINTS, LOCK):
        assert "://" not in text
        assert not re.search(r"^-", text, flags=re.MULTILINE)


def test_constraints_and_lock_agree_and_only_torch_is_without_hash():
    constraints, lock = pins(CONSTRAINTS), pins(LOCK)
    assert constraints.pop(("torch", "")) == "2.13.0"
    assert lock.items() <= constraints.items()
    # beyond the lock there is only what the tools bring, which nobody needs to build, test or run
    more = {name for (name, _), _ in constraints.items() - lock.items()}
    assert more and not more & {project_name(line) for line in (*run_requirements(), *dev_requirements())}
    assert {project_name(line) for line in group("tools")} <= {name for name, _ in constraints}
    for block in re.split(r"\n(?=[a-z])", LOCK.partition("\nannotated-types")[2]):
        assert "--hash=sha256:" in block, block


def test_the_runtime_lock_is_what_our_packages_need_and_no_tool():
    text = (ROOT / "requirements-runtime.lock").read_text(encoding="utf-8")
    found, development = pins(text), {project_name(line) for line in group("dev")}
    assert found.items() <= pins(LOCK).items() and "://" not in text
    needed = {project_name(line) for package in PACKAGES for line in package.dependencies} - {"torch"}
    assert needed <= {name for name, _ in found}
    assert not {name for name, _ in found} & {"pytest", "mypy", "ruff", "hypothesis", "uv", "transformers", "hatchling"}
    assert development - {name for name, _ in found} >= {"pytest", "ruff", "tox"}
    assert all("--hash=sha256:" in block for block in re.split(r"\n(?=[a-z])", text.partition("\nclick")[2]))


def test_importlib_metadata_stays_before_the_release_that_patches_import():
    assert pins(CONSTRAINTS)["importlib-metadata", ""] == "8.9.0"


def test_every_declared_requirement_is_pinned_within_its_range():
    pinned: dict[str, list[str]] = {}
    for (name, _), version in pins(CONSTRAINTS).items():
        pinned.setdefault(name, []).append(version)
    for line in (*run_requirements(), *dev_requirements()):
        wanted = Requirement(line)
        versions = pinned.get(canonicalize_name(wanted.name), [])
        assert versions, f"{line} is not in constraints.txt: run `make lock`"
        assert all(wanted.specifier.contains(v, prereleases=True) for v in versions), line


def test_core_depends_on_nothing_it_does_not_need():
    names = {canonicalize_name(Requirement(line).name) for line in PACKAGES[0].dependencies}
    allowed = "torch pluggy importlib-metadata packaging pyyaml click rich platformdirs"
    assert names == set(allowed.split())


# The distribution that brings a module, where its name is another.
DISTS = {
    "yaml": "pyyaml",
    "elftools": "pyelftools",
    "opentelemetry": "opentelemetry-api",
    "fla": "fla-core",
    "flashinfer": "flashinfer-python",
    "flash_attn": "flash-attn",
    "cutlass": "nvidia-cutlass-dsl",
    "OpenSSL": "pyopenssl",
}
# Modules that need not be declared, and why.
THROUGH = {
    "torch": "of the core, which names its range in one place for all",
    "sympy": "of torch: the sizes of a traced graph are expressions of it",
}
FOUND_ONLY = {  # used where they happen to be installed, and in no extra since no test environment should get them
    # our hot path; types of names of entry points; Triton's compiler, asked by backends whose kernels are Triton's
    "layerzero-core": {
        "layerzero_accel",
        "layerzero_models",
        "layerzero_tokenizers",
        "layerzero_tune",
        "layerzero_verify",
        "triton",
    },
    "layerzero-verify": {"flashinfer", "sglang"},  # other truths for definitions
    "layerzero-cpu": {"zentorch"},  # AMD's kernels
    "layerzero-flashattn": {"flash_attn_interface"},  # FlashAttention 3 is on no index
    "layerzero-vllm": {"vllm"},  # which loads this package, not the other way round
}


def imported(package: Package) -> dict[str, set[str]]:
    """Modules from elsewhere that a package imports, anywhere in its code or by a written name, with where."""
    found: dict[str, set[str]] = {}
    own = {folder.name for one in (package, PACKAGES[0]) for folder in (one.path / "src").iterdir()}
    for file in sorted((package.path / "src").rglob("*.py")):
        if "template" in file.parts:  # of the package that `lz plugin new` writes
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                names = [node.args[0].value] if called in ("import_module", "__import__") else []
            for name in (name.partition(".")[0] for name in names):
                if name not in sys.stdlib_module_names and name not in own and not name.startswith("_"):
                    found.setdefault(name, set()).add(str(file.relative_to(package.path)))
    return found


@pytest.mark.fault(32)
@pytest.mark.parametrize("package", WITH_CODE, ids=lambda p: p.name)
def test_a_package_declares_what_it_imports_and_nothing_else(package: Package):
    extras = [line for lines in package.extras.values() for line in lines]
    needed = package.data["project"].get("dependencies", ())  # our own packages among them
    declared = {canonicalize_name(Requirement(line).name) for line in (*needed, *extras)}
    found = imported(package)
    names = {module: DISTS.get(module, canonicalize_name(module)) for module in found}
    free = {*THROUGH, *FOUND_ONLY.get(package.name, ())}
    missing = {module: found[module] for module, dist in names.items() if dist not in declared and module not in free}
    assert missing == {}
    always = {canonicalize_name(Requirement(line).name) for line in package.dependencies}
    assert always - set(names.values()) == set(), "declared and imported nowhere"
    assert FOUND_ONLY.get(package.name, set()) <= set(found)


@pytest.mark.fault(32)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_the_metadata_says_where_the_project_is_and_whom_to_write_to(package: Package):
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["workspace"]["metadata"]
    project = package.data["project"]
    assert project["authors"] == ours["authors"] and "@" in project["authors"][0]["email"]
    assert set(project["urls"]) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith(ours["home"]) for url in project["urls"].values())


def test_installed_only_finds_strangers_vendors_and_absentees():
    requires = {
        "layerzero-core": ("torch>=2.10", 'pytest; extra == "testing"'),
        "torch": ("filelock", 'nvidia-cublas; sys_platform == "none"'),
        "filelock": (),
        "pip": (),
    }
    assert installed_only.check(["layerzero-core"], requires) == []
    assert "pytest is installed" in installed_only.check(["layerzero-core"], requires | {"pytest": ()})[0]
    assert installed_only.check(["layerzero-x"], requires)[0] == "layerzero-x is not installed"
    vendor = requires | {"layerzero-core": ("torch", "xformers"), "xformers": ()}
    assert installed_only.check(["layerzero-core"], vendor) == [
        "xformers is a vendor library; it belongs into an extra"
    ]


def test_documentation_links_lead_somewhere():
    pages = check_docs.markdown_files()
    assert ROOT / "README.md" in pages
    assert [problem for page in pages for problem in check_docs.check_file(page)] == []


def test_a_broken_link_a_missing_anchor_and_a_machine_path_are_found(tmp_path):
    page = tmp_path / "p.md"
    page.write_text("# One thing\n[a](none.md) [b](#one-thing) [c](#other) /ho" + "me/someone\n", encoding="utf-8")
    found = "\n".join(check_docs.check_file(page, tmp_path))
    assert "none.md leads nowhere" in found
    assert "#other has no such heading" in found
    assert "#one-thing" not in found
    assert "names a path" in found


def test_every_make_target_the_pages_name_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    for page in check_docs.markdown_files():
        named = set(
            re.findall(r"(?:^|`)make ([a-z][a-z-]*[a-z])", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        )
        assert named <= targets, page.name


def test_every_long_lane_that_is_named_exists_and_its_files_do():
    known = prove.lanes()
    for lane in known.values():
        assert all(command for command in lane.commands({"PATH": ""}))
    kinds = ("*.md", "*.py", "*.toml")
    files = (
        file
        for folder in ("docs", "packages", "tests", "tools")
        for kind in kinds
        for file in (ROOT / folder).rglob(kind)
    )
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files):
        named = set(re.findall(r"make prove NAME=([a-z]+)", file.read_text(encoding="utf-8")))
        assert named <= set(known), file.name


def test_at_most_ten_make_targets_are_documented():
    shown = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(shown) == sorted("demo test check lint format docs wheels lock prove clean".split())


def test_declared_markers_cover_the_lanes():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    names = {re.split(r"[(:]", marker)[0] for marker in config["markers"]}
    lanes = {
        "gpu",
        "multigpu",
        "stress",
        "correctness",
        "distributed",
        "integration",
        "benchmark",
        "memray",
        "slow",
        "req",
    }
    assert lanes <= names
    assert config["filterwarnings"][0] == "error"
