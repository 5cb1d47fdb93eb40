"""The files of a release: every wheel and sdist, checked, with a bill of materials and a signed manifest.

    python -m tools.release build --into dist          `make release`; the same tree gives the same bytes
    python -m tools.release join ONE TWO --into dist   `make release FROM="ONE TWO"`: what machines of two kinds built
    python -m tools.release verify dist --key FILE     hold the files of a folder against its manifest and signature
    python -m tools.release version 0.2.0              write a version, and the ranges that follow from it, everywhere

Wheels are built from the sdists, so what is published as source is enough to build. Times in the archives are those of
the commit (SOURCE_DATE_EPOCH names another). twine, check-wheel-contents and abi3audit (the group `release`) look at
them; one that is missing is named, and is an error with LAYERZERO_REQUIRE=1. The manifest SHA256SUMS is signed with the
key that LAYERZERO_RELEASE_KEY names (an ed25519 private key in PEM form): SHA256SUMS.sig.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import Any

from tools.workspace import ROOT, Package, is_ours, packages, project_name

MANIFEST, SIGNATURE, PARTS = "SHA256SUMS", "SHA256SUMS.sig", "sbom.cdx.json"
LICENCE = "Apache-2.0"
# the programs that look at what was built, and which files each is given
PROGRAMS = {
    "twine": (["check", "--strict"], ("*.whl", "*.tar.gz")),
    # the metapackage is empty, the core brings two modules
    "check-wheel-contents": (["--ignore", "W007,W008,W009"], ("*.whl",)),
    "abi3audit": (["--strict", "--assume-minimum-abi3", "3.11"], ("*abi3*.whl",)),
}


def epoch() -> str:
    """Seconds since 1970 that every archive bears: those of the commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    ask = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def build(package: Package, into: Path) -> None:
    """The sdist of a package, and its wheel from that sdist."""
    fixed = {"SOURCE_DATE_EPOCH": epoch(), "PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    native = {f"LAYERZERO_{name}_REQUIRE_NATIVE": "1" for name in ("ACCEL", "CPU")}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(package.path)]
    done = subprocess.run(command, env={**os.environ, **fixed, **native}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{package.name} could not be built:\n{(done.stdout + done.stderr)[-4000:]}")


def metadata(wheel: Path) -> Message:
    """What a wheel says of itself."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [item for item in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item)]
        return email.message_from_bytes(opened.read(name))


def _wheels(folder: Path) -> dict[str, list[Path]]:
    """The wheels of each package: one, or one for each kind of machine."""
    found: dict[str, list[Path]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        found.setdefault(project_name(metadata(wheel)["Name"]), []).append(wheel)
    return found


def problems(folder: Path, version: str) -> Iterator[str]:
    """What is wrong with the files of a folder, found without other programs."""
    low, high = _range(version)
    found = _wheels(folder)
    for package in packages():
        if package.name not in found:
            yield f"{package.name}: no wheel"
        if not (folder / f"{package.name.replace('-', '_')}-{version}.tar.gz").exists():
            yield f"{package.name}: no sdist of {version}"
    for name, wheel in ((name, wheel) for name, wheels in found.items() for wheel in wheels):
        said = metadata(wheel)
        if said["Version"] != version:
            yield f"{wheel.name}: version {said['Version']}, not {version}"
        if said["License-Expression"] != LICENCE or not said.get_all("License-File"):
            yield f"{wheel.name}: licence {said['License-Expression']}, files {said.get_all('License-File')}"
        for line in said.get_all("Requires-Dist") or ():
            if is_ours(line) and not (f">={low}" in line and f"<{high}" in line):
                yield f"{wheel.name}: asks for {line}, not for >={low},<{high}"
        with zipfile.ZipFile(wheel) as opened:
            for item in opened.namelist():
                if "__pycache__" in item or item.endswith(".pyc") or item.startswith(("tests/", "/")):
                    yield f"{wheel.name}: {item} does not belong in it"
        native = next((p for p in packages() if p.name == name and "hooks" in _wheel_target(p)), None)
        if native is not None and wheel.name.endswith("-none-any.whl"):
            yield f"{wheel.name}: built without its native part"


def _wheel_target(package: Package) -> dict[str, Any]:
    found: dict[str, Any] = package.data.get("tool", {}).get("hatch", {}).get("build", {}).get("targets", {})
    return dict(found.get("wheel", {}))


def examined(folder: Path) -> Iterator[str]:
    """What the programs find, and which of them are missing."""
    places = os.pathsep.join([str(ROOT / "build" / "venv-release" / "bin"), os.environ.get("PATH", "")])
    for name, (options, patterns) in PROGRAMS.items():
        program = shutil.which(name, path=places)
        if program is None:
            if os.environ.get("LAYERZERO_REQUIRE") == "1":
                yield f"missing tool: {name}"
            else:
                print(f"missing tool: {name}; not looked at with it")
            continue
        files = sorted(str(file) for pattern in patterns for file in folder.glob(pattern))
        done = subprocess.run([program, *options, *files], capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{name}: {(done.stdout + done.stderr).strip()[-2000:]}"
        else:
            print(f"{name}: {len(files)} files are well")


def parts(folder: Path, version: str) -> dict[str, Any]:
    """The bill of materials (CycloneDX): our packages, what they ask for, and under which licence they stand."""
    wheels = _wheels(folder)
    asked: dict[str, set[str]] = {
        name: {project_name(line) for line in metadata(first).get_all("Requires-Dist") or () if "extra ==" not in line}
        for name, (first, *_) in wheels.items()
    }
    others = sorted(set().union(*asked.values()) - {*wheels})
    reference = {name: f"pkg:pypi/{name}@{version}" for name in wheels} | {name: f"pkg:pypi/{name}" for name in others}
    ours = [
        {
            "type": "library", "name": name, "version": version, "bom-ref": reference[name], "purl": reference[name],
            "licenses": [{"license": {"id": LICENCE}}],
            "hashes": [{"alg": "SHA-256", "content": _digest(wheel)} for wheel in files],
        }
        for name, files in wheels.items()
    ]  # fmt: skip
    named = "".join(_digest(wheel) for files in wheels.values() for wheel in files)
    needed = [{"type": "library", "name": name, "bom-ref": reference[name], "purl": reference[name]} for name in others]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, named)}",
        "metadata": {
            "timestamp": datetime.fromtimestamp(int(epoch()), UTC).isoformat(),
            "component": {"type": "application", "name": "layerzero", "version": version, "bom-ref": "layerzero"},
        },
        "components": [*ours, *needed],
        "dependencies": [
            {"ref": reference[name], "dependsOn": sorted(reference[item] for item in wanted)}
            for name, wanted in asked.items()
        ],
    }  # fmt: skip


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def manifest(folder: Path) -> str:
    """One line for each file, as `sha256sum -c` reads it."""
    files = sorted(file for file in folder.iterdir() if file.name not in (MANIFEST, SIGNATURE))
    return "".join(f"{_digest(file)}  {file.name}\n" for file in files)


def unproven() -> Iterator[str]:
    """Backends whose proofs are of other sources than those here: their kernels are checked at their first use."""
    from layerzero.registry.proofs import sources

    for file in sorted(ROOT.glob("packages/*/src/**/proofs.json")):
        said = json.loads(file.read_text(encoding="utf-8"))
        if said.get("sources") != sources(file):
            yield f"{said['backend']}: {', '.join(said['families'])} are proven of other sources; lz plugin prove there"


def release(into: Path) -> int:
    """Build, look at, list and sign; 1 when something is wrong."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for package in packages():
        build(package, into)
        print(f"built {package.name}", flush=True)
    return seal(into)


def join(folders: Sequence[Path], into: Path) -> Iterator[str]:
    """Copy what several machines built into one folder; what is not as its manifest says, or not the same in all."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for folder in folders:
        if verify(folder, None):
            yield f"{folder}: not as in its {MANIFEST}"
        for file in sorted(file for file in folder.iterdir() if file.name not in (MANIFEST, SIGNATURE, PARTS)):
            if not (into / file.name).exists():
                shutil.copy2(file, into)
            elif _digest(into / file.name) != _digest(file):
                yield f"{file.name}: {folder} has other bytes than the folders before it"


def seal(into: Path) -> int:
    """Look at the files of a folder, list and sign them; 1 when something is wrong."""
    from layerzero.tables.signing import sign

    version = packages()[0].data["project"]["version"]
    wrong = [*problems(into, version), *examined(into)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    for line in unproven():
        print(line)
    (into / PARTS).write_text(json.dumps(parts(into, version), indent=1) + "\n", encoding="utf-8")
    text = manifest(into)
    (into / MANIFEST).write_text(text, encoding="utf-8")
    key = os.environ.get("LAYERZERO_RELEASE_KEY")
    if key:
        signature = sign(hashlib.sha256(text.encode()).hexdigest(), key, "release")
        (into / SIGNATURE).write_text(f"{signature}\n", encoding="utf-8")
    print(
        f"{len(text.splitlines())} files in {into.name}, {'signed' if key else 'not signed: no LAYERZERO_RELEASE_KEY'}"
    )
    return 0


def verify(folder: Path, key: Path | None) -> int:
    """Hold a folder against its manifest, and that against its signature; 1 when they differ."""
    from layerzero.errors import DispatchTableError
    from layerzero.tables.signing import verify as hold

    if not (folder / MANIFEST).exists():
        print(f"{folder}: no {MANIFEST}", file=sys.stderr)
        return 1
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    if key is not None:
        signature = folder / SIGNATURE
        said = signature.read_text(encoding="utf-8").strip() if signature.exists() else None
        try:
            hold(hashlib.sha256(text.encode()).hexdigest(), said, key, "release")
        except DispatchTableError as error:
            print(f"{folder / MANIFEST}: {error}", file=sys.stderr)
            return 1
    now = dict(line.split("  ")[::-1] for line in manifest(folder).splitlines())
    then = dict(line.split("  ")[::-1] for line in text.splitlines())
    differing = sorted(name for name in {*now, *then} if now.get(name) != then.get(name))
    print(
        "\n".join(f"{name}: not as in {MANIFEST}" for name in differing) or f"{len(then)} files are those of {MANIFEST}"
    )
    return int(bool(differing))


def _range(version: str) -> tuple[str, str]:
    """The range of a release among our packages: 0.2.1 gives 0.2 and 0.3."""
    major, minor = version.split(".")[:2]
    return f"{major}.{minor}", f"{major}.{int(minor) + 1}"


def set_version(version: str, root: Path = ROOT) -> list[Path]:
    """Write a version into every package, the core's own module and uv.lock; the files that changed."""
    low, high = _range(version)
    core = root / "packages" / "layerzero-core" / "src" / "layerzero" / "version.py"
    files = [root / "pyproject.toml", core, root / "uv.lock", *(p.path / "pyproject.toml" for p in packages(root))]
    changed = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.name == "uv.lock":
            new = re.sub(r'(name = "layerzero-[a-z-]*"\nversion = ")[^"]*', rf"\g<1>{version}", text)
        else:
            new = re.sub(r'^((?:__)?version(?:__)? = ")[^"]*', rf"\g<1>{version}", text, count=1, flags=re.MULTILINE)
        new = re.sub(r"(layerzero-[a-z-]+(?:\[[a-z]+\])?)>=[0-9.]+,<[0-9.]+", rf"\g<1>>={low},<{high}", new)
        if new != text:
            file.write_text(new, encoding="utf-8")
            changed.append(file)
    return changed


def main(argv: Sequence[str]) -> int:
    """The four commands."""
    parser = argparse.ArgumentParser(prog="python -m tools.release")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build").add_argument("--into", type=Path, default=ROOT / "dist")
    joining = verbs.add_parser("join")
    joining.add_argument("folders", type=Path, nargs="+")
    joining.add_argument("--into", type=Path, default=ROOT / "dist")
    verifying = verbs.add_parser("verify")
    verifying.add_argument("folder", type=Path)
    verifying.add_argument("--key", type=Path)
    verbs.add_parser("version").add_argument("version")
    asked = parser.parse_args(argv)
    if asked.verb == "build":
        return release(asked.into)
    if asked.verb == "join":
        wrong = [*join(asked.folders, asked.into)]
        print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
        return 1 if wrong else seal(asked.into)
    if asked.verb == "verify":
        return verify(asked.folder, asked.key)
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", asked.version):
        parser.error(f"{asked.version} is no version such as 0.2.0 or 0.2.0rc1")
    print("\n".join(str(file.relative_to(ROOT)) for file in set_version(asked.version)))
    print("now: make setup, make lock, python -m tools.shipped, a heading in CHANGELOG.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
