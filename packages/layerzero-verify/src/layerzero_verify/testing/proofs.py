"""Make `proofs.json`: run the conformance kit on a plugin and write down which of its kernels passed, and in what.

    lz plugin prove mybackend                       # or: python -m layerzero_verify.testing.proofs mybackend
    python -m layerzero_verify.testing.proofs mybackend --dry-run

The file is written beside the backend's capabilities.json and belongs into its wheel: on the family of devices the kit
ran on, with these very sources of the package and this version of the vendor library, its kernels then serve their
first call unchecked. Families proven before of the same are kept, so that one file can hold a CPU and several GPUs. A
kernel that failed one test has no proof, and a plugin that broke the contract has none at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from layerzero.device.signature import family_of
from layerzero.errors import CapabilitiesError, ConfigurationError
from layerzero.files import write_whole
from layerzero.model.kernel import BackendSpec
from layerzero.model.situation import words_of
from layerzero.registry.kinds import decoded, read
from layerzero.registry.proofs import SCHEMA_VERSION, beside, load_proofs, sealed, sources
from layerzero_verify.testing.cases import tried_by
from layerzero_verify.testing.kit import Kit

_SUITE = "from layerzero_verify.testing.suite import *\n"


@dataclass
class Found:
    """What the kit found of one kernel."""

    dtypes: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    failed: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"dtypes": sorted(self.dtypes), "words": sorted(self.words)}


class Recorder:
    """A pytest plugin beside the kit's own: remembers by kernel what passed."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.kernels: dict[str, Found] = {}
        self.failed: list[str] = []
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Any:
        report = yield
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.counts[report.outcome] += 1
            self._note(item, report.outcome)
        return report

    def _note(self, item: pytest.Item, outcome: str) -> None:
        case, spec = tried_by(item)
        if outcome == "failed":
            self.failed.append(item.name)
        if spec is None or outcome == "skipped":
            return
        found = self.kernels.setdefault(spec.kernel_id, Found())
        if outcome == "failed":
            found.failed = True
            return
        name = getattr(item, "originalname", item.name)
        if name == "test_gradients_match_the_reference":
            found.words.add("backward")
        if case is not None:
            from layerzero_verify.testing.run import context, place  # whose asserts pytest wants to rewrite first

            ctx = context(self.kit, case, case.arguments(place(self.kit, spec)))
            found.dtypes.add(ctx.dtype)
            found.words |= words_of(ctx)


def prove(target: str, options: Iterable[str] = ()) -> Recorder:
    """Run the kit on a plugin in this process. What it found is in the recorder, whatever the outcome."""
    recorder = Recorder(Kit.open(target))
    with tempfile.TemporaryDirectory(prefix="lz-proof-") as folder:
        Path(folder, "test_conformance.py").write_text(_SUITE, encoding="utf-8")
        arguments = [
            "-q", "--tb=line", "--color=no", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:logging",
            "-p", "layerzero_verify.testing.pytest_plugin", "--lz-plugin", target, "--rootdir", folder,
            "-c", os.devnull, *options, folder,
        ]  # fmt: skip
        code = pytest.main(arguments, plugins=[recorder])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise ConfigurationError(f"the kit could not run on {target}: {code!r}", value=target, limit="a plugin")
    return recorder


def make(backend: BackendSpec, path: Path, kernels: Mapping[str, Mapping[str, Found]], made: str) -> dict[str, Any]:
    """The document for one backend: these families (family → kernel → what was found) anew, the others as they were."""
    vendor = f"{backend.vendor} {backend.vendor_version}" if backend.vendor else ""
    code = sources(path)
    families = _before(path, backend, vendor, code)
    for family, own in kernels.items():
        alike: dict[str, dict[str, Any]] = {}
        for name, found in sorted(own.items()):
            if found.dtypes and not found.failed:
                entry = alike.setdefault(json.dumps(found.to_json()), {"ids": [], **found.to_json()})
                entry["ids"].append(name)
        families[family] = {"made": made, "kernels": list(alike.values())}
    document = {
        "schema_version": SCHEMA_VERSION, "backend": backend.name, "version": backend.version, "vendor": vendor,
        **({} if code is None else {"sources": code}), "families": dict(sorted(families.items())),
    }  # fmt: skip
    return sealed(document)


def _before(path: Path, backend: BackendSpec, vendor: str, code: str | None) -> dict[str, Any]:
    """Families a file of the same package and vendor library holds already."""
    try:
        load_proofs(path, backend.name, backend.version, vendor, "")
        document = decoded(read(path))
    except CapabilitiesError:
        return {}
    same = (document.get("sources"), document["vendor"]) == (code, vendor)
    same = same and (code is not None or document["version"] == backend.version)
    return dict(document["families"]) if same else {}


def _text(document: Mapping[str, Any]) -> str:
    """One line a kernel: the file is read by people too, in a diff."""
    head = {name: value for name, value in document.items() if name != "families"}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items() if name != "hash"]
    families = []
    for family, entry in document["families"].items():
        kernels = ",\n".join(f"   {json.dumps(item)}" for item in entry["kernels"])
        made = json.dumps(entry["made"])
        families.append(f'  {json.dumps(family)}: {{"made": {made}, "kernels": [\n{kernels}\n  ]}}')
    lines.append(' "families": {\n' + ",\n".join(families) + "\n }")
    lines.append(f' "hash": {json.dumps(head["hash"])}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(
    target: str, *, family: str | None = None, dry_run: bool = False, options: Iterable[str] = ()
) -> dict[str, Any]:
    """Prove a plugin and write the file of each of its backends. Returns what was found, by backend."""
    import torch

    from layerzero.plugin.manager import load_plugins

    loaded = load_plugins()
    record = loaded.record(target)
    names = record.backends if record is not None else ()
    if record is None or (not names and not dry_run):
        raise ConfigurationError(f"no plugin {target!r} with a backend is installed", value=target, limit="a plugin")
    recorder = prove(target, options)
    outcome: dict[str, Any] = {"counts": recorder.counts, "failed": recorder.failed, "backends": {}}
    contract = [name for name in recorder.failed if "[" not in name]
    if contract:
        return {**outcome, "contract": contract}
    counts = recorder.counts
    for name in names:
        backend, capabilities = loaded.registry.backends[name], loaded.capabilities[name]
        ran: dict[str, dict[str, Found]] = {}
        machines = set()
        for kernel in recorder.kit.kernels:
            where = recorder.kit.device_for(kernel)
            if kernel.backend == name and not isinstance(where, str) and kernel.kernel_id in recorder.kernels:
                ran.setdefault(family or family_of(where[1]), {})[kernel.kernel_id] = recorder.kernels[kernel.kernel_id]
                machines.add(where[1].name)
        if not ran or not capabilities.source:
            continue
        path = beside(capabilities.source)
        made = (
            f"python -m layerzero_verify.testing.proofs {target}; commit {_commit(path)}; torch {torch.__version__}; "
            f"{', '.join(sorted(machines))}; {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )
        document = make(backend, path, ran, made)
        if not dry_run:
            write_whole(path, _text(document))
        proven = {item for here in ran for entry in document["families"][here]["kernels"] for item in entry["ids"]}
        mine = {kernel.kernel_id for kernel in recorder.kit.kernels if kernel.backend == name}
        outcome["backends"][name] = {
            "path": str(path), "families": sorted(ran), "proven": sorted(proven), "unproven": sorted(mine - proven),
        }  # fmt: skip
    return outcome


def _commit(path: Path) -> str:
    """The commit of the source tree the package is in; LAYERZERO_COMMIT where git cannot tell."""
    from layerzero import env

    given: str | None = env.read().commit
    if given:
        return given
    command = ["git", "-C", str(path.parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m layerzero_verify.testing.proofs", description=__doc__)
    parser.add_argument("plugin", help="entry point of the plugin; options for pytest after -- write nothing")
    parser.add_argument("--family", help="name of the family, where the machine pretends to be another one")
    parser.add_argument("--dry-run", action="store_true", help="run the kit, write nothing")
    words = sys.argv[1:] if arguments is None else arguments
    at = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:at])
    options = words[at + 1 :]  # with any, perhaps not the whole kit is run: nothing is written then
    found = write(given.plugin, family=given.family, dry_run=given.dry_run or bool(options), options=options)
    print(json.dumps(found, indent=1))
    whole = found["backends"] and not found["failed"]
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
