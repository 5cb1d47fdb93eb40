"""The judge: draws calls, knows the right answers, takes the time, and never runs a kernel.

    python -m layerzero_hostile.judge '{"backend": "mine", "device": "cpu"}'

A process of its own, clean when it starts. It loads the plugins to know what they declare; their kernels are imported
and called in forks of a second process (`serve`), which has no right answer anywhere in it. One JSON line for every
kernel goes to the standard output.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.errors import UnknownNameError
from layerzero.model.kernel import KernelSpec
from layerzero.numerics import Tolerance, compare
from layerzero.tuning.truth import flat, reduction
from layerzero_hostile import serve
from layerzero_hostile.cheats import Cheat
from layerzero_hostile.drawing import altered, larger, least_seconds, nan_in, other_cases, resized
from layerzero_verify.kernels import SAME, Bench
from layerzero_verify.lineup import resolve
from layerzero_verify.testing.cases import Case

_FIRST_S, _CALL_S = 180.0, 60.0  # a first call may compile
_SLACK = 4.0  # times the kit's tolerance, for calls that are not the kit's: rounding is not what is looked for here
_NARROW = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
_ROUNDING = 32.0  # units in the last place of a narrow dtype that its rounding explains
_HIDDEN = ("PYTEST_", "COVERAGE", "GITHUB_", "TOX_")  # variables that tell of a checker
_BURSTS, _BURST, _CALLS, _SECONDS = 4, 8, 600, 0.6
_ALTERED = 4  # tensors of which one number is changed
_RACED = 4  # calls in a row of one large call that is timed


@dataclass(frozen=True)
class Finding:
    """What the gate says of one kernel: the cheat it is refused for, or how many calls found none."""

    kernel: str
    cheat: Cheat | None = None
    seen: str = ""
    phase: str = ""
    calls: int = 0
    seconds: float = 0.0
    skipped: str = ""

    @property
    def message(self) -> str:
        """In words."""
        if self.cheat is None:
            return self.skipped or f"no cheat in {self.calls} calls"
        return f"{self.cheat.says.format(seen=self.seen)} ({self.phase})"

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible."""
        found = {"kernel": self.kernel, "code": None if self.cheat is None else self.cheat.value}
        return {**found, "message": self.message, "phase": self.phase, "calls": self.calls,
                "seconds": round(self.seconds, 2), "skipped": self.skipped}  # fmt: skip


class Refused(Exception):
    """A cheat was found."""

    def __init__(self, cheat: Cheat, seen: str, phase: str) -> None:
        super().__init__(cheat.says.format(seen=seen))
        self.cheat, self.seen, self.phase = cheat, seen, phase


class Server:
    """The process that loads plugins and forks for kernels. Its program lies in a folder of its own, under a name that
    says nothing."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="app")
        program = Path(self.folder) / "main.py"
        shutil.copyfile(serve.__file__, program)
        ours, theirs = socket.socketpair()
        env = {name: value for name, value in os.environ.items() if not name.startswith(_HIDDEN) and name != "CI"}
        env["PYTHONPATH"] = os.pathsep.join(place for place in sys.path if place)
        env["MALLOC_PERTURB_"] = str(serve.POISON ^ 0xFF)  # glibc fills what it gives out with poison
        self.process = subprocess.Popen(
            [sys.executable, str(program)], env=env, stdin=theirs.fileno(), stdout=subprocess.DEVNULL
        )
        theirs.close()
        self.channel = ours
        self.patched = ""

    def wait(self) -> None:
        """Until the plugins are loaded; what they replaced is kept."""
        self.channel.settimeout(_FIRST_S)
        self.patched = str(serve.receive(self.channel)[0]["patched"])

    def close(self) -> None:
        """End it and what descends from it."""
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Fork:
    """One kernel in a process of its own. What comes from there is data, never code."""

    def __init__(self, server: Server, told: dict[str, Any], phase: Callable[[], str]) -> None:
        self.channel, theirs = socket.socketpair()
        socket.send_fds(server.channel, [json.dumps(told).encode()], [theirs.fileno()])
        theirs.close()
        self.pid, self.first, self.phase, self.calls = 0, True, phase, 0
        self.pid = int(self._answer(_FIRST_S)[0]["ready"])

    def ask(self, do: str, *parts: bytes, **said: Any) -> tuple[dict[str, Any], list[bytes], float]:
        """An answer, its bytes, and the seconds it took by this process's clock."""
        begin = time.perf_counter()
        serve.send(self.channel, {"do": do, **said}, *parts)
        answer, results = self._answer(_FIRST_S if self.first else _CALL_S)
        self.first = False
        return answer, results, time.perf_counter() - begin

    def _answer(self, seconds: float) -> tuple[dict[str, Any], list[bytes]]:
        self.channel.settimeout(seconds)
        try:
            return serve.receive(self.channel)
        except TimeoutError:
            raise Refused(Cheat.HUNG, f"not within {seconds:g} s", self.phase()) from None
        except (EOFError, OSError, ValueError) as error:
            raise Refused(Cheat.CRASHED, f"its process is gone ({type(error).__name__})", self.phase()) from None

    def close(self) -> None:
        """End the process and what it started."""
        self.channel.close()
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


@dataclass
class Call:
    """One call and what is right for it."""

    case: Case
    phase: str
    wrong: Cheat
    make: Callable[[], tuple[Any, ...]]
    want: list[Tensor] = field(default_factory=list)
    like: Any = None  # a result of the op, for its form
    bound: Tolerance = SAME
    random: bool = False


class Examination:
    """One kernel on trial."""

    def __init__(self, server: Server, spec: KernelSpec, device: torch.device, seed: int) -> None:
        self.server, self.spec, self.device = server, spec, device
        self.bench = Bench(spec, device)
        self.chance = random.Random(f"{seed} {spec.kernel_id}")
        self.phase, self.calls = "its first call", 0
        self.known: list[tuple[Call, list[Tensor]]] = []  # calls that were answered, with the right results

    # -- drawing -------------------------------------------------------------------------------------
    def drawn(
        self,
        case: Case,
        phase: str,
        wrong: Cheat,
        seed: int,
        edit: Callable[..., Any] | None = None,
        slack: float = _SLACK,
    ) -> Call:
        """A call and its truth; whatever the reference raises is raised."""
        edits = self.chance.getrandbits(32)

        def make() -> tuple[Any, ...]:
            args = case.arguments(self.device, seed)
            return args if edit is None else edit(args, random.Random(edits))

        bench = self.bench
        given = make()
        call = Call(case, phase, wrong, make, random=bool(bench.op.random and bench.op.random(given)))
        with torch.no_grad():
            call.like = bench.op.fallback_impl(*make())  # type: ignore[misc]
            if not call.random:
                call.want = flat(bench.truth(make()))
        bound = bench.bound(case, reduction(given))
        call.bound = replace(bound, rtol=bound.rtol * slack, atol=bound.atol * slack)
        return call

    def _sizes(self, case: Case, *, grow: bool) -> Case | None:
        """The case with other sizes, as the kernel's limits and the op allow."""
        for turn in range(6):
            found = resized(case, self.chance, grow=grow and turn < 3)
            if found is not None and self._accepted(found):
                return found
        return None

    def _accepted(self, case: Case) -> bool:
        try:
            with self.bench.locked():
                return self.bench.accepts(case.arguments(self.device, 1))
        except (RuntimeError, ValueError, IndexError, AssertionError, ZeroDivisionError):
            return False

    # -- the trial -----------------------------------------------------------------------------------
    def run(self) -> Finding:
        """Look from all sides; the first cheat ends it."""
        begin = time.perf_counter()
        plain = self.bench.plain()
        if plain is None:
            return Finding(self.spec.kernel_id, skipped="the conformance kit has no plain call of it")
        fork = None
        try:
            fork = self._fork(watched=False)
            self._trial(fork, plain)
        except Refused as refused:
            refused = self._diagnosed(refused, plain)
            seconds = time.perf_counter() - begin
            return Finding(self.spec.kernel_id, refused.cheat, refused.seen, refused.phase, self.calls, seconds)
        finally:
            if fork is not None:
                fork.close()
        return Finding(self.spec.kernel_id, calls=self.calls, seconds=time.perf_counter() - begin)

    def _fork(self, *, watched: bool) -> Fork:
        op = self.bench.op
        args = self.bench.arguments(self.bench.plain())  # type: ignore[arg-type]
        told = {
            "kernel": self.spec.kernel_id, "op": self.spec.op, "device": str(self.device), "watched": watched,
            "compiles": self.spec.jit, "random": bool(op.random and op.random(args)),
        }  # fmt: skip
        return Fork(self.server, told, lambda: self.phase)

    def _trial(self, fork: Fork, plain: Case) -> None:
        seed = self.chance.getrandbits(30)
        kit = self.drawn(plain, "the conformance kit's own call", Cheat.WRONG, 0, slack=1.0)
        self._call(fork, kit)
        first = self.drawn(plain, "other numbers", Cheat.VALUES, seed)
        self._call(fork, first)
        second = self.drawn(plain, "other numbers in the same tensors", Cheat.STALE, seed + 1)
        self._call(fork, second, again=True)
        with suppress(ValueError):  # of each tensor, until there is no other
            for turn in range(_ALTERED):
                edit = functools.partial(altered, turn)
                self._call(fork, self.drawn(plain, "one number changed", Cheat.STALE, seed + 1, edit), again=True)
        self._call(fork, kit)
        sized = [call for call in self._fresh(plain, seed + 2) if self._call(fork, call)]
        for case in other_cases(self.bench, plain, self.chance):
            self._maybe(fork, case, f"other numbers, {case.label}", Cheat.VALUES, seed + 3)
        self._maybe(fork, plain, "a call with a NaN in it", Cheat.NAN_HIDDEN, seed + 4, nan_in)
        self._settled(fork, 0.03)
        self._many(fork, [first], "timed as in a race", Cheat.TIMED, timed=_BURST)
        same = [call for call in (kit, first, second, *sized) if call.case.dtype == plain.dtype]
        self._many(fork, same, "many calls", Cheat.CALL_COUNT, timed=0)
        self._roofline(fork, plain)
        self._settled(fork, 0.05)

    def _fresh(self, plain: Case, seed: int) -> Iterator[Call]:
        """Calls of sizes that no kit has, in every dtype."""
        for dtype in self.bench.dtypes:
            for turn in range(3 if dtype == plain.dtype else 1):
                case = self._sizes(replace(plain, dtype=dtype), grow=turn == 0) or replace(plain, dtype=dtype)
                word, wrong = ("sizes", Cheat.SIZES) if dtype == plain.dtype else ("dtype", Cheat.DTYPES)
                with suppress(RuntimeError, ValueError, IndexError, TypeError):
                    yield self.drawn(case, f"fresh {word}, {dtype} {_sizes_of(case)}", wrong, seed + 7 * turn)

    def _maybe(self, fork: Fork, *given: Any) -> None:
        """A call, where the reference has an answer for it."""
        try:
            call = self.drawn(*given)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return
        self._call(fork, call)

    def _mutates(self, args: tuple[Any, ...]) -> bool:
        return bool(self.bench.op.mutates and self.bench.op.mutates(args))

    # -- one request ---------------------------------------------------------------------------------
    def _call(self, fork: Fork, call: Call, *, again: bool = False) -> bool:
        self.phase = call.phase
        args = call.make()
        decoys = [_decoy(item) for item in serve.tensors_of(call.like)]
        answer, results, _ = fork.ask(
            "call", serve.packed(args), *map(serve.raw, decoys), again=again, layout=self.bench.layout(args),
            mutates=self._mutates(args), may_alias=_shares(call),
            sizes=[item.numel() * item.element_size() for item in decoys],
            decoys=[_word(item) for item in decoys], shapes=[list(item.shape) for item in decoys],
        )  # fmt: skip
        self.calls += 1
        self._before_numbers(answer, call)
        wrong = self._wrong(call, results, decoys)
        if wrong is not None:
            if wrong[0] is not Cheat.EXPECTED_READ:
                late, now, _ = fork.ask("settle", seconds=0.25)
                if late.get("later") == "a result" and self._wrong(call, now, decoys) is None:
                    raise Refused(Cheat.UNFINISHED, "the result came after the return", call.phase)
            raise Refused(*wrong, call.phase)
        self._after(fork, answer, call.phase)
        if not call.random:
            self.known.append((call, call.want))
        return True

    def _before_numbers(self, answer: dict[str, Any], call: Call) -> None:
        """What is wrong before any number is looked at."""
        for key, cheat in (("patched", Cheat.PATCHED), ("raised", Cheat.RAISED), ("odd", Cheat.LAZY_RESULT)):
            if answer.get(key):
                raise Refused(cheat, answer[key], call.phase)
        problem = _form(answer["leaves"], serve.tensors_of(call.like))
        if problem:
            raise Refused(Cheat.WRONG_FORM, problem, call.phase)

    def _wrong(self, call: Call, results: list[bytes], decoys: list[Tensor]) -> tuple[Cheat, str] | None:
        """How the results differ from the truth, by the name of what explains it best."""
        leaves = [_tensor(data, item) for data, item in zip(results, serve.tensors_of(call.like), strict=True)]
        if decoys and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(leaves, decoys, strict=True)):
            return Cheat.EXPECTED_READ, "the result is what lay beside the call under the name `expected`"
        if call.random:
            return None
        found = flat(_rebuilt(call.like, iter(leaves)))
        if call.wrong is Cheat.NAN_HIDDEN:  # where it comes to stand is the kernel's affair, that it is seen is not
            there = [bool(item.isnan().any()) for item in flat(call.like)]
            hidden = [number for number, got in enumerate(found) if there[number] and bool(got.isfinite().all())]
            return (Cheat.NAN_HIDDEN, f"none in result {hidden[0]}") if hidden else None
        for got, want in zip(found, call.want, strict=True):
            report = compare(got, want, call.bound)
            if not report.ok:
                return self._named(call, found, got, want, report)
        return None

    def _named(self, call: Call, found: list[Tensor], got: Tensor, want: Tensor, report: Any) -> tuple[Cheat, str]:
        for before, wanted in reversed(self.known):
            if (
                before is not call
                and _close(found, wanted, before.bound)
                and not _close(call.want, wanted, before.bound)
            ):
                return Cheat.STALE, f"the result belongs to {before.phase}"
        if bool(_poisoned(got).any()):
            return Cheat.UNWRITTEN, f"{int(_poisoned(got).sum())} of {got.numel()} elements"
        for narrow in _NARROW.get(call.case.dtype, ()):
            step = _ROUNDING * torch.finfo(getattr(torch, narrow)).eps
            scale = float(want[want.isfinite()].abs().max()) if bool(want.isfinite().any()) else 0.0
            if compare(got, want, Tolerance(step, step * scale)).ok and call.wrong not in (Cheat.STALE,):
                return Cheat.PRECISION, f"off by {report.max_abs:.3g}, as {narrow} is"
        if call.wrong in (Cheat.WRONG, Cheat.SIZES, Cheat.VALUES, Cheat.DTYPES):
            for word, one, other in _both_ways(got, want):
                right = _right_rows(one, other, call.bound)
                if right is not None:
                    return Cheat.SKIPPED, f"{right[1] - right[0]} of {right[1]} {word} are wrong"
        return call.wrong, report.seen

    def _after(self, fork: Fork, answer: dict[str, Any], phase: str) -> None:
        """What a call did beside its work."""
        if answer.get("threads"):  # what they are there for shows soon
            answer = {**answer, "later": fork.ask("settle", seconds=0.3)[0]["later"]}
        for key, cheat in _AFTER:
            if answer.get(key):
                raise Refused(cheat, answer[key], phase)

    def _settled(self, fork: Fork, seconds: float) -> None:
        self._after(fork, fork.ask("settle", seconds=seconds)[0], "a moment after the calls")

    def _many(self, fork: Fork, calls: list[Call], phase: str, wrong: Cheat, *, timed: int) -> None:
        if self._mutates(calls[0].make()):
            return  # a second call would find what the first has written
        self.phase = phase
        order = [0] * _BURSTS if timed else [self.chance.randrange(len(calls)) for _ in range(_CALLS)]
        answer, results, _ = fork.ask(
            "many", *(serve.packed(call.make()) for call in calls), order=order, timed=timed, seconds=_SECONDS, most=8,
            layout=self.bench.layout(calls[0].make()), mutates=False,
        )  # fmt: skip
        if answer.get("raised"):
            raise Refused(Cheat.RAISED, answer["raised"], phase)
        self.calls += answer["done"] * max(1, timed)
        for (place, count), data in zip(answer["kinds"], results, strict=True):
            call = replace(calls[place], wrong=wrong, phase=phase)
            found = self._wrong(call, _cut(data, serve.tensors_of(call.like)), [])
            if found is not None:  # the first of many is given as to all phases before, the second as by a program
                cheat = Cheat.CHECKER if place % 2 else wrong
                raise Refused(cheat, f"{count} results of {calls[place].phase}: {found[1]}", phase)
        if answer["patched"]:
            raise Refused(Cheat.PATCHED, answer["patched"], phase)
        self._after(fork, answer, phase)

    def _roofline(self, fork: Fork, plain: Case) -> None:
        """A larger call, timed from here: below what its operations take at best, it was not computed."""
        case = larger(self.bench, plain, self._accepted)
        if case is None or self._mutates(plain.arguments(self.device)):
            return
        call = self.drawn(case, f"timed from outside, {_sizes_of(case)}", Cheat.TIMED, self.chance.getrandbits(30))
        if call.random:
            return
        self.phase = call.phase
        floor = least_seconds(self.bench, call.make())
        args = call.make()
        self._raced(fork.ask("race", serve.packed(args), rounds=1, layout=self.bench.layout(args)), call)
        fastest = min(self._raced(fork.ask("race", rounds=_RACED, layout=self.bench.layout(args)), call) for _ in "ab")
        if fastest < floor:
            raise Refused(Cheat.ROOFLINE, f"{fastest * 1e3:.3g} ms a call, at least {floor * 1e3:.3g}", call.phase)
        found = self._wrong(call, fork.ask("raced")[1], [])
        if found is not None:
            raise Refused(Cheat.TIMED, found[1], call.phase)

    def _raced(self, told: tuple[dict[str, Any], list[bytes], float], call: Call) -> float:
        answer, _, seconds = told
        if answer.get("raised"):
            raise Refused(Cheat.RAISED, answer["raised"], call.phase)
        self.calls += _RACED
        return seconds / _RACED

    # -- who behaves for checkers --------------------------------------------------------------------
    def _diagnosed(self, refused: Refused, plain: Case) -> Refused:
        """Wrong at once: the same call again, where everything says that a checker is at work."""
        if refused.cheat in (Cheat.PATCHED, Cheat.HUNG, Cheat.EXPECTED_READ) or self.calls > 1:
            return refused
        fork = None
        try:
            fork = self._fork(watched=True)
            self._call(fork, self.drawn(plain, "the conformance kit's own call", Cheat.WRONG, 0, slack=1.0))
        except Refused:
            return refused
        finally:
            if fork is not None:
                fork.close()
        return Refused(Cheat.CHECKER, f"elsewhere {refused}", refused.phase)


_AFTER = (
    ("changed", Cheat.INPUT_CHANGED), ("overrun", Cheat.OVERRUN), ("aliased", Cheat.ALIASED),
    ("later", Cheat.CHANGED_LATER), ("state", Cheat.STATE), ("threads", Cheat.THREADS),
)  # fmt: skip


# -- results ----------------------------------------------------------------------------------------------------------
def _word(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8).cpu()


def _decoy(tensor: Tensor) -> Tensor:
    """A tensor like an expected result that is right for nothing."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return torch.randn(tensor.shape).to(tensor.dtype) * 3
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def _form(leaves: list[dict[str, Any]], wanted: list[Tensor]) -> str:
    """What differs in the form of the results, "" if nothing."""
    if len(leaves) != len(wanted):
        return f"{len(leaves)} tensors instead of {len(wanted)}"
    for found, want in zip(leaves, wanted, strict=True):
        if found["folded"]:
            return "elements that share their memory"
        if (found["dtype"], found["shape"]) != (_word(want), list(want.shape)):
            return f"{found['dtype']} {found['shape']} instead of {_word(want)} {list(want.shape)}"
        if torch.device(found["device"]).type != want.device.type:
            return f"on {found['device']} instead of {want.device}"
    return ""


def _tensor(data: bytes, like: Tensor) -> Tensor:
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).reshape(like.shape).to(like.device)


def _cut(data: bytes, like: list[Tensor]) -> list[bytes]:
    found, at = [], 0
    for item in like:
        size = item.numel() * item.element_size()
        found.append(data[at : at + size])
        at += size
    return found


def _rebuilt(like: Any, leaves: Iterator[Tensor]) -> Any:
    """A result of the form of another with these tensors in it."""
    if isinstance(like, Tensor):
        return next(leaves)
    if isinstance(like, dict):
        return {key: _rebuilt(item, leaves) for key, item in like.items()}
    if isinstance(like, (tuple, list)):
        return [_rebuilt(item, leaves) for item in like]
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        made = {part.name: _rebuilt(getattr(like, part.name), leaves) for part in dataclasses.fields(like)}
        return replace(like, **{key: item for key, item in made.items() if item is not getattr(like, key)})
    return like


def _close(found: list[Tensor], wanted: list[Tensor], bound: Tolerance) -> bool:
    if len(found) != len(wanted):
        return False
    return all(a.shape == b.shape and compare(a, b, bound).ok for a, b in zip(found, wanted, strict=True))


def _poisoned(tensor: Tensor) -> Tensor:
    """Elements that hold the pattern of memory that nobody has written."""
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.zeros(1, dtype=torch.bool)
    parts = _bits(tensor).reshape(tensor.numel(), -1)
    return (parts == serve.POISON).all(dim=1)


def _both_ways(got: Tensor, want: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    return [("rows", got, want), ("columns", got.mT, want.mT)] if got.ndim > 1 else []


def _right_rows(got: Tensor, want: Tensor, bound: Tolerance) -> tuple[int, int] | None:
    """How many of the rows are right, where some are and some are not."""
    pairs = list(zip(got.flatten(0, -2), want.flatten(0, -2), strict=True))[:4096]
    right = sum(compare(a, b, bound).ok for a, b in pairs)
    return (right, len(pairs)) if 0 < right < len(pairs) else None


def _shares(call: Call) -> bool:
    """Whether the op's own result may lie in an argument: a view is a right answer then."""
    args = call.make()
    return any(serve.overlap(out, item) for out in serve.tensors_of(call.like) for item in serve.tensors_of(args))


def _sizes_of(case: Case) -> str:
    return " ".join(f"{name}={n}" for name, n in case.given.items() if type(n) is int)


# -- the program ------------------------------------------------------------------------------------------------------
def judge(request: dict[str, Any]) -> Iterator[Finding]:
    """The findings on the kernels that a request names, one after the other."""
    before = serve.Watch(random=False, cuda=False)
    server = Server()
    try:
        target = resolve(
            op=request.get("op"), kernel=request.get("kernel"), backend=request.get("backend"),
            device=request.get("device"), compiles=bool(request.get("compiles", True)),
        )  # fmt: skip
        wanted = request.get("kernels")
        kernels = [item for item in target.kernels if wanted is None or item.kernel_id in wanted]
        server.wait()
        patched = server.patched
        for spec in kernels:
            if patched:
                yield Finding(spec.kernel_id, Cheat.PATCHED, patched, "while plugins were loaded")
                continue
            finding = Examination(server, spec, target.device, int(request["seed"])).run()
            now = before.found()  # plugins were loaded here, too, and one may have waited
            patched = now["patched"] or ("the tolerance table" if "the tolerance table" in now["state"] else "")
            if patched:
                finding = replace(finding, cheat=Cheat.PATCHED, seen=patched, phase="in the process that judges")
            yield finding
        for name, why in target.absent:
            if wanted is None or name in wanted:
                yield Finding(name, skipped=why)
    finally:
        server.close()


def main() -> None:
    """One JSON line for each kernel."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a plugin prints is no finding
    try:
        for finding in judge(json.loads(sys.argv[1])):
            print(json.dumps(finding.to_json()), file=out, flush=True)
    except UnknownNameError as error:
        print(json.dumps({"error": str(error), "code": error.code.value, "hint": error.hint}), file=out, flush=True)


if __name__ == "__main__":
    main()
