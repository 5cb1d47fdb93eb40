"""Fuzzing: mutated inputs against everything that reads bytes from outside; only our own exceptions may come out.

    python -m tools.fuzz --iterations 1000000            every target, going on where the last run was interrupted
    python -m tools.fuzz policy ipc --minutes 5          two of them, five minutes in all

Atheris is not built for every platform, so this is an engine of our own: seeded, resumable, guided by coverage. Inputs
begin with the committed corpus (tests/fuzz/corpora/TARGET). Every so often one runs under a line tracer; if it reaches
a line of the target's modules that none before it reached, it joins the pool that is mutated further. What breaks is
kept in build/fuzz/TARGET/crash-*, and belongs into the corpus once mended. A run goes on with its count only while
the code it fuzzes is the same; after a change it begins anew, with the inputs that were found before.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import machine
from tools.req_plugin import current_commit
from tools.requirements_doc import ROOT

__all__ = ["CORPORA", "Crash", "Fuzzer", "Target", "corpus", "main", "mutated"]

CORPORA = ROOT / "tests" / "fuzz" / "corpora"
STATE = ROOT / "build" / "fuzz"
MAX_LEN = 4_096
CHUNK = 1_000
HANG_S = 10.0
_POOL = 400
_TRACE_EVERY = 64


@dataclass(frozen=True)
class Target:
    """What is fuzzed. `run` returns "ok" or a reason code and lets everything that is not ours escape.

    modules  names whose lines count as coverage (prefixes of module names)
    words    pieces worth inserting
    repair   makes a mutated input plausible again (a checksum, a hash); applied to half of them
    """

    name: str
    run: Callable[[bytes], str]
    modules: tuple[str, ...]
    words: tuple[bytes, ...] = ()
    repair: Callable[[bytes], bytes] | None = None


class Crash(AssertionError):
    """An input that something else than one of our exceptions came out of, or nothing at all for too long."""

    def __init__(self, target: str, data: bytes, why: str) -> None:
        super().__init__(f"{target}: {why}\ninput ({len(data)} bytes): {data[:400]!r}")
        self.data, self.why = data, why


def corpus(name: str) -> list[bytes]:
    """The committed inputs of a target."""
    return [file.read_bytes() for file in sorted((CORPORA / name).iterdir()) if file.is_file()]


# -- mutation ----------------------------------------------------------------------------------------------------
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**63), 0.0, -0.0, 1e308, 0.1, "", "x", "a" * 200, "é",
    "\u202e",
    "../..", "\0", [], {}, [[]], {"": {}}, [None], "0", "-1", "nan", ">=64", "*", "[", "**", "${x}", "1e999",
)  # fmt: skip
_BYTES = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"{", b"}", b"[", b"]", b'"', b"'", b":", b",", b"-", b"\\", b"&a", b"*a",
    b"#", b"!!", b"|", b">", b"\t", b"1e999", b"NaN", b"Infinity", b"-0", b"\xed\xa0\x80", b"\\u0000", b"\\ud800",
)  # fmt: skip
_SIGNS = ("", "/", "..", "\\", "\0", "é", "x", "\n", '"', "*", "-", "9", " ", "\ud800")


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """Another input: the tree of a JSON document changed, or its bytes."""
    if chance.random() < 0.5:
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            pass
        else:
            for _ in range(1 + (chance.random() < 0.3)):
                tree = _tree(tree, chance, 0)
            return json.dumps(tree, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")[:MAX_LEN]
    found = bytearray(data)
    for _ in range(1 + int(chance.expovariate(0.7))):
        _step(found, others, chance, words)
    return bytes(found[:MAX_LEN])


def _step(found: bytearray, others: Sequence[bytes], chance: random.Random, words: Sequence[bytes]) -> None:
    kind, size = chance.randrange(8), len(found)
    at = chance.randrange(size) if size else 0
    if kind == 0 and size:
        found[at] ^= 1 << chance.randrange(8)
    elif kind == 1 and size:
        found[at] = chance.randrange(256)
    elif kind == 2 and size:
        del found[at : at + 1 + chance.randrange(16)]
    elif kind == 3:
        found[at:at] = chance.choice(_BYTES)
    elif kind == 4 and words:
        word = chance.choice(words)
        found[at : at + (len(word) if chance.random() < 0.5 else 0)] = word
    elif kind == 5 and size:
        piece = found[at : at + 1 + chance.randrange(64)]
        found[at:at] = piece * (1 + chance.randrange(4))
    elif kind == 6 and others:
        other = chance.choice(others)
        start = chance.randrange(len(other)) if other else 0
        found[at:] = other[start:]
    else:
        found[at : at + 4] = str(chance.choice((0, -1, 2**31, 2**63, 10**30, 0.1))).encode()


def _tree(value: Any, chance: random.Random, depth: int) -> Any:
    if depth > 6 or chance.random() < 0.15:
        return chance.choice(_ODD)
    if isinstance(value, dict) and value:
        key, changed, lot = chance.choice(list(value)), dict(value), chance.random()
        if lot < 0.12:
            del changed[key]
        elif lot < 0.22:
            changed[chance.choice(("x", f"{key}y", "", "é", key.upper(), "schema_version"))] = chance.choice(_ODD)
        elif lot < 0.3:
            changed[chance.choice(list(value))] = value[key]
        else:
            changed[key] = _tree(value[key], chance, depth + 1)
        return changed
    if isinstance(value, list) and value:
        at, lot = chance.randrange(len(value)), chance.random()
        if lot < 0.15:
            return [*value, *value[at:]][:64]
        if lot < 0.25:
            return value[:at] + value[at + 1 :]
        return [*value[:at], _tree(value[at], chance, depth + 1), *value[at + 1 :]]
    if isinstance(value, bool) or value is None:
        return chance.choice(_ODD)
    if isinstance(value, (int, float)) and abs(value) < 2**80:
        return chance.choice((value + 1, value - 1, -value, value * 1_000, str(value), [value], value / 2))
    if isinstance(value, str) and value:
        at = chance.randrange(len(value))
        return value[:at] + chance.choice(_SIGNS) + value[at + 1 :]
    return chance.choice(_ODD)


# -- running -----------------------------------------------------------------------------------------------------
@dataclass
class Fuzzer:
    """One target under way; `state` can be saved and taken up again."""

    target: Target
    seed: int = 1
    done: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    pool: list[bytes] = field(default_factory=list)
    lines: set[tuple[str, int]] = field(default_factory=set)
    growth: list[tuple[int, int]] = field(default_factory=list)
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.pool = self.pool or corpus(self.target.name)

    def begin(self) -> None:
        """The corpus itself, under the tracer."""
        for data in corpus(self.target.name):
            self._one(data, trace=True)
        self._grown()

    def play(self, iterations: int) -> None:
        """So many mutated inputs. Raises Crash at the first that breaks something."""
        name = f"{self.target.name}:{self.seed}:{self.done}:{len(self.pool)}".encode()
        chance = random.Random(hashlib.sha256(name).digest())
        repair = self.target.repair
        for number in range(iterations):
            data = mutated(chance.choice(self.pool), self.pool, chance, self.target.words)
            if repair is not None and chance.random() < 0.5:
                data = repair(data)
            self._one(data, trace=number % _TRACE_EVERY == 0)
        self.done += iterations
        self._grown()

    def _grown(self) -> None:
        if not self.growth or self.growth[-1][1] != len(self.lines):
            self.growth.append((self.done, len(self.lines)))

    def _one(self, data: bytes, *, trace: bool) -> None:
        fresh: set[tuple[str, int]] = set()
        started = time.perf_counter()
        try:
            if trace:
                sys.settrace(_tracer(self.target.modules, fresh))
            try:
                outcome = self.target.run(data)
            finally:
                if trace:
                    sys.settrace(None)
        except Exception as error:
            last = "".join(traceback.format_exception(error)[-6:])
            raise Crash(self.target.name, data, f"{type(error).__name__}: {error}\n{last}") from error
        took = time.perf_counter() - started
        self.slowest = max(self.slowest, took)
        if took > HANG_S:
            raise Crash(self.target.name, data, f"took {took:.1f} s")
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if fresh - self.lines:
            self.lines |= fresh
            if data not in self.pool:
                self.pool.append(data)
                if len(self.pool) > _POOL:
                    del self.pool[len(corpus(self.target.name))]

    # -- keeping --------------------------------------------------------------------------------
    def figures(self) -> dict[str, Any]:
        """What came of it so far."""
        return {
            "target": self.target.name, "iterations": self.done, "seed": self.seed, "pool": len(self.pool),
            "lines": len(self.lines), "growth": self.growth, "outcomes": dict(sorted(self.outcomes.items())),
            "slowest_ms": round(self.slowest * 1e3, 1), "crashes": 0, "code": code_digest(self.target),
        }  # fmt: skip

    def save(self, path: Path) -> None:
        """Write whole or not at all."""
        data = {
            **self.figures(),
            "inputs": [base64.b64encode(item).decode() for item in self.pool],
            "reached": sorted(self.lines),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(data))
        os.replace(temporary, path)

    @staticmethod
    def load(target: Target, path: Path, seed: int) -> Fuzzer:
        """Go on with a saved run of the same seed, else begin."""
        try:
            data = json.loads(path.read_bytes())
            inputs = [base64.b64decode(item) for item in data["inputs"]]
            if data["seed"] != seed or data["code"] != code_digest(target):
                return Fuzzer(target, seed, pool=list(dict.fromkeys([*corpus(target.name), *inputs])))
            return Fuzzer(
                target, seed, data["iterations"], data["outcomes"], inputs,
                {(name, line) for name, line in data["reached"]}, [tuple(item) for item in data["growth"]],
                data["slowest_ms"] / 1e3,
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError):
            return Fuzzer(target, seed)


@functools.cache
def _sources(modules: tuple[str, ...]) -> str:
    """A hash over the source of these modules, whether or not they are imported."""
    found = hashlib.sha256()
    for module in modules:
        package, _, rest = module.partition(".")
        spec = importlib.util.find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            start = Path(folder) / Path(*rest.split(".")) if rest else Path(folder)
            files = {*start.parent.glob(f"{start.name}*.py"), *(start.rglob("*.py") if start.is_dir() else ())}
            for file in sorted(files):
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def code_digest(target: Target) -> str:
    """What tells two states of the fuzzed code apart."""
    return _sources(target.modules)


def _tracer(modules: tuple[str, ...], found: set[tuple[str, int]]) -> Callable[..., Any]:
    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            found.add((frame.f_globals.get("__name__", ""), frame.f_lineno))
        return local

    def begin(frame: Any, event: str, arg: Any) -> Any:
        return local if str(frame.f_globals.get("__name__", "")).startswith(modules) else None

    return begin


# -- the program -------------------------------------------------------------------------------------------------
def targets() -> dict[str, Target]:
    """Every target by name."""
    from tests.fuzz.targets import TARGETS

    return {target.name: target for target in TARGETS}


def run_one(target: Target, iterations: int, deadline: float, seed: int) -> int:
    """Fuzz one target until it has had so many iterations or the time is over; exit code."""
    folder = STATE / target.name
    fuzzer = Fuzzer.load(target, folder / "state.json", seed)
    if not fuzzer.lines:
        fuzzer.begin()
    started, first = time.monotonic(), fuzzer.done
    try:
        while fuzzer.done < iterations and time.monotonic() < deadline:
            fuzzer.play(min(CHUNK, iterations - fuzzer.done))
            if fuzzer.done % (10 * CHUNK) == 0:
                fuzzer.save(folder / "state.json")
    except Crash as crash:
        kept = folder / f"crash-{hashlib.sha256(crash.data).hexdigest()[:12]}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(crash.data)
        print(f"{crash}\nkept in {kept}", flush=True)
        return 1
    fuzzer.save(folder / "state.json")
    figures = {k: v for k, v in fuzzer.figures().items() if k != "growth"}
    rate = (fuzzer.done - first) / max(1e-9, time.monotonic() - started)
    state = "done" if fuzzer.done >= iterations else "interrupted; the next run goes on from here"
    grew = f"{fuzzer.growth[0][1]} -> {fuzzer.growth[-1][1]}"
    print(f"{target.name}: {state}, {rate:.0f} a second, lines {grew}, {json.dumps(figures)}", flush=True)
    return 0 if fuzzer.done >= iterations else 3


def main(argv: Iterable[str] | None = None) -> int:
    """Run the targets, as many at a time as there are cores; 0: all done, 3: time ran out, 1: something broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the figures of all targets there")
    args = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    known = targets()
    unknown = [name for name in args.targets if name not in known]
    if unknown:
        parser.error(f"unknown target {unknown[0]}; there are {', '.join(known)}")
    deadline = time.monotonic() + args.minutes * 60
    if len(args.targets) == 1:
        return run_one(known[args.targets[0]], args.iterations, deadline, args.seed)
    waiting, running, codes = list(args.targets or known), [], []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            # What is left is shared: each target that still waits gets its part of it.
            turns = -(-(len(waiting) + len(running)) // args.jobs)
            minutes = max(0.01, (deadline - time.monotonic()) / 60 / turns)
            command = [sys.executable, "-m", "tools.fuzz", waiting.pop(0), "--iterations", str(args.iterations)]
            running.append(subprocess.Popen([*command, "--minutes", str(minutes), "--seed", str(args.seed)]))
        running[0].wait(None) if len(running) == args.jobs or not waiting else None
        codes += [process.returncode for process in running if process.poll() is not None]
        running = [process for process in running if process.poll() is None]
        time.sleep(0.05)
    if args.json is not None:
        _write_figures(args.json, args.targets or list(known))
    return 1 if any(code not in (0, 3) for code in codes) else max(codes, default=0)


def _write_figures(path: Path, names: Iterable[str]) -> None:
    rows = []
    for name in names:
        state = STATE / name / "state.json"
        if state.exists():
            data = json.loads(state.read_bytes())
            rows.append({key: value for key, value in data.items() if key not in ("inputs", "reached")})
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "benchmark": "fuzz", "command": "make prove NAME=fuzz", "commit": current_commit(), "machine": machine(),
        "targets": rows,
    }  # fmt: skip
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
