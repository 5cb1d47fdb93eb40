"""One visit to a GPU machine without network: unpack, install, test, conformance, grid, and bring the results back.

    python benchmarks/gpu.py --parcel parcels/gpu/1 --parcel parcels/gpu/2 --wheels dist --out "$OUT" [--stages …]

Stages, each with a time limit of its own (`--limit kit=300`), each adding to what an earlier visit has done:

unpack   parcels of vendor wheels into the library folder; archives in pieces (compiled caches) into the home folder
install  our wheels, so that entry points are real
doctor   `lz doctor`, as text and as JSON, and the reasons for and against every kernel of eleven typical calls
tests    the tests marked gpu, as junit
kit      the conformance kit for every backend, in shards of their own process; `kit.jsonl` remembers what is done
grid     benchmarks/tuned.py, then `lz solve` and `lz report` from its database
caches   FlashInfer's compiled kernels and ours as an archive in pieces, to be unpacked the next time

After every stage the results so far are packed into `results.tar.xz` under --out. Output is a line or two a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from gpu_parcels import MAX_FILES, pack, split, unpack

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "unpack": 120.0,
    "install": 90.0,
    "doctor": 120.0,
    "tests": 240.0,
    "kit": 420.0,
    "grid": 420.0,
    "caches": 90.0,
}
STAGES = tuple(LIMITS)
SHARD = 40
CACHES = (".cache/flashinfer", ".cache/layerzero", ".triton/cache")
SITE = 'import site\n\nsite.addsitedir("{lib}")  # some vendors keep their compiler behind a .pth file\n'
_OUTCOME = re.compile(r"^(?P<node>\S+::.+?) (?P<word>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


# -- running -----------------------------------------------------------------------------------------
def environment(given: argparse.Namespace) -> dict[str, str]:
    """What every command sees: our libraries first, compilers bounded, xFormers' own CUDA runtime where it is."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(given.lib), *filter(None, [env.get("PYTHONPATH")])])
    env["PATH"] = os.pathsep.join([str(given.lib / "bin"), env.get("PATH", "")])
    env.setdefault("MAX_JOBS", str(os.cpu_count() or 4))
    env.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    if given.commit:
        env["LAYERZERO_COMMIT"] = given.commit
    return env


def command(words: Sequence[str], log: Path, env: Mapping[str, str], limit: float, cwd: Path = ROOT) -> int | None:
    """Run with output into a log; its exit code, None where it ran out of time."""
    with open(log, "a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(words)}\n")
        out.flush()
        process = subprocess.Popen(
            words, cwd=cwd, env=dict(env), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(max(1.0, limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            out.write("\nout of time\n")
            return None


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


# -- the conformance kit --------------------------------------------------------------------------------
class KitFile:
    """`kit.jsonl`: one line a test, so that a visit that ends early loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[tuple[str, str], str] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                item = json.loads(line)
                self.done[item["backend"], item["test"]] = item["outcome"]
            except (ValueError, KeyError, TypeError):  # a torn last line
                continue

    def add(self, backend: str, outcomes: Mapping[str, str]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            for test, outcome in outcomes.items():
                file.write(json.dumps({"backend": backend, "test": test, "outcome": outcome}) + "\n")
                self.done[backend, test] = outcome

    def counts(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (backend, _), outcome in self.done.items():
            counts = found.setdefault(backend, {})
            counts[outcome] = counts.get(outcome, 0) + 1
        return found


def shards(tests: Sequence[str], done: Callable[[str], bool], size: int = SHARD) -> Iterator[list[str]]:
    """Tests that are still to do, in pieces small enough for one process."""
    todo = [test for test in tests if not done(test)]
    for start in range(0, len(todo), size):
        yield todo[start : start + size]


def outcomes(log: str, asked: Sequence[str], code: int | None) -> dict[str, str]:
    """What a verbose pytest log says about the tests asked for.

    A process that died (any exit code but 0 and 1) did so in the first test it does not speak of; after one that was
    stopped because the stage's time was up (None) the rest simply wait.
    """
    found: dict[str, str] = {}
    wanted = set(asked)
    for line in log.splitlines():
        match = _OUTCOME.match(line.strip())
        if match and match["node"] in wanted:
            found[match["node"]] = match["word"].lower()
    missing = [test for test in asked if test not in found]
    if missing and code not in (None, 0, 1):
        found[missing[0]] = "crashed"
    return found


def collected(text: str) -> list[str]:
    """Node ids of `pytest --collect-only -q`."""
    return [line.strip() for line in text.splitlines() if "::" in line and not line.startswith(("=", " "))]


def kit(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    """The kit for every backend, as far as the time goes."""
    end = time.monotonic() + limit
    folder = given.work / "kit"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_kit.py").write_text("from layerzero_verify.testing.suite import *  # noqa: F403\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    kept = KitFile(given.work / "results" / "kit.jsonl")
    names = (
        "import importlib_metadata as m; print(*sorted({e.name for e in m.entry_points(group='layerzero.backends')}))"
    )
    asked = subprocess.run([sys.executable, "-c", names], env=dict(env), capture_output=True, text=True, check=False)
    backends = given.backend or asked.stdout.split()
    for backend in backends:
        base = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p",
                "layerzero_verify.testing.pytest_plugin", "--lz-plugin", backend, "--rootdir", str(folder)]  # fmt: skip
        listing = subprocess.run(
            [*base, "--collect-only", "-q", "test_kit.py"], cwd=folder, env=dict(env), capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
        tests = collected(listing.stdout)
        for number, shard in enumerate(shards(tests, lambda test, name=backend: (name, test) in kept.done)):
            left = end - time.monotonic()
            if left < 5:
                return f"time is up in {backend}; {_told(kept)}"
            arguments, log = folder / "shard.txt", folder / f"{backend}-{number}.log"
            arguments.write_text("\n".join(shard) + "\n")
            log.unlink(missing_ok=True)
            words = [*base, "-v", "--tb=short", "--timeout", "150", f"@{arguments}"]
            code = command(words, log, env, left, folder)
            kept.add(backend, outcomes(log.read_text(errors="replace"), shard, code))
    return _told(kept)


def _told(kept: KitFile) -> str:
    parts = []
    for backend, counts in sorted(kept.counts().items()):
        bad = sum(counts.get(word, 0) for word in ("failed", "error", "crashed"))
        parts.append(f"{backend} {counts.get('passed', 0)} ok" + (f" {bad} BAD" if bad else ""))
    return ", ".join(parts) or "no backend found"


# -- stages -----------------------------------------------------------------------------------------------
def parcels(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    return "; ".join(unpack(item, given.lib, given.apart, Path.home()) for item in given.parcel) or "nothing to unpack"


def doctor(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    results, lz, told = given.work / "results", [sys.executable, "-m", "layerzero_cli"], []
    for page, words in {
        "doctor.txt": [*lz, "doctor"],
        "doctor.json": [*lz, "doctor", "--json"],
        "explain.txt": [sys.executable, "benchmarks/explain.py"],
    }.items():
        done = subprocess.run(
            words, cwd=ROOT, env=dict(env), capture_output=True, text=True, timeout=limit / 3, check=False
        )
        (results / page).write_text(done.stdout)
        told.append(f"{page} exit {done.returncode}")
    return "; ".join(told)


def install(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    wheels = sorted(str(path) for path in given.wheels.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"no wheels in {given.wheels}; make wheels builds them")
    given.lib.mkdir(parents=True, exist_ok=True)
    (given.lib / "sitecustomize.py").write_text(SITE.format(lib=given.lib))
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"]
    code = command([*words, str(given.lib), *wheels], given.work / "install.log", env, limit)
    return f"{len(wheels)} wheels, exit {code}"


def tests(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    log, junit = given.work / "results" / "tests.log", given.work / "results" / "junit.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    code = command([*words, *given.tests], log, env, limit)
    return f"exit {code}: {last_line(log)}"


def grid(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    """Tune, measure, solve and report; the state of the run travels with the results."""
    results, state = given.work / "results", given.work / "results" / "tuned"
    found, log = results / "tuned.json", results / "grid.log"
    words = [sys.executable, "benchmarks/tuned.py", "--machine", given.machine, "--device", "cuda"]
    words += ["--budget", f"{max(10.0, limit - 40):.0f}", "--state", str(state), "--json", str(found)]
    code = command(words, log, env, limit)
    told = [f"exit {code}: {last_line(log)}"]
    after = {**env, "LAYERZERO_PERFDB": str(state / "first.db")}
    lz = [sys.executable, "-m", "layerzero_cli"]
    table, page = results / "dispatch_table.json", results / "report.html"
    code = command([*lz, "solve", "--grid", "benchmarks/grid.toml", "--out", str(table)], log, after, 60)
    told.append(f"solve {code}")
    if found.exists():
        code = command([*lz, "report", str(found), "--out", str(page)], log, after, 60)
        told.append(f"report {code}")
        told += [f"{name} {item['value']}" for name, item in json.loads(found.read_text())["targets"].items()]
    return "; ".join(told)


def caches(given: argparse.Namespace, env: Mapping[str, str], limit: float) -> str:
    home = Path.home()
    whole = given.work / "caches.tar.xz"
    count = pack([home / name for name in CACHES if (home / name).exists()], home, whole)
    for old in given.out.glob("caches.tar.xz.*"):
        old.unlink()
    parts = split(whole, given.out, most=MAX_FILES - 1)  # one file is for the results
    return f"{count} files in {len(parts)} pieces, {whole.stat().st_size >> 20} MiB"


STEPS: Mapping[str, Callable[[argparse.Namespace, Mapping[str, str], float], str]] = {
    "unpack": parcels, "install": install, "doctor": doctor, "tests": tests, "kit": kit, "grid": grid, "caches": caches,
}  # fmt: skip


def results(given: argparse.Namespace) -> None:
    """What there is so far, for the way back."""
    folder = given.work / "results"
    if any(folder.iterdir()):
        pack([folder], given.work, given.out / "results.tar.xz")


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parcel", type=Path, action="append", default=[], help="a folder of wheels, or an archive")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="our own wheels")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu/out")), help="what comes back"
    )
    parser.add_argument("--work", type=Path, default=Path("build/gpu"), help="logs and results on that machine")
    parser.add_argument("--lib", type=Path, default=Path("/opt/lz"), help="where libraries are installed")
    parser.add_argument("--apart", type=Path, default=Path("/opt/xf"), help="where those for another CUDA live")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--commit", default="", help="written into the results; there is no git over there")
    parser.add_argument("--backend", action="append", default=[], help="kit: only this backend")
    parser.add_argument("--tests", nargs="*", default=["packages", "tests"], help="where the gpu tests are")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"of {', '.join(STAGES)}")
    parser.add_argument("--limit", action="append", default=[], metavar="STAGE=SECONDS", help="another time limit")
    given = parser.parse_args(words)
    given.stages = given.stages.split(",")
    given.limits = dict(LIMITS)
    for word in given.limit:
        name, _, value = word.partition("=")
        if name not in LIMITS or not value.replace(".", "", 1).isdigit():
            parser.error(f"--limit {word}: expected STAGE=SECONDS with a stage of {', '.join(STAGES)}")
        given.limits[name] = float(value)
    unknown = [name for name in given.stages if name not in STAGES]
    if unknown:
        parser.error(f"--stages {unknown[0]}: expected some of {', '.join(STAGES)}")
    given.out, given.work = given.out.resolve(), given.work.resolve()
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = _arguments(words)
    for folder in (given.out, given.work / "results"):
        folder.mkdir(parents=True, exist_ok=True)
    env, failed = environment(given), 0
    for stage in (name for name in STAGES if name in given.stages):
        begin = time.monotonic()
        try:
            told = STEPS[stage](given, env, given.limits[stage])
        except (SystemExit, OSError, subprocess.SubprocessError) as error:
            told, failed = f"failed: {error}", failed + 1
        print(f"{stage} {time.monotonic() - begin:.0f} s: {told}"[:1000], flush=True)
        results(given)
    files = sorted(given.out.iterdir())
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) >> 20} MiB to bring back")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
