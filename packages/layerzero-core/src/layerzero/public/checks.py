"""`lz.doctor` and `lz.readiness_check`: is everything as it should be, and if not, what exactly to do.

Doctor looks at the machine and at every plugin, whatever the policy wants. Readiness asks whether this process, with
its policy, may take traffic. Both return a report and raise nothing for what they find.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from layerzero import env as environment
from layerzero._ops.signature import PUBLIC
from layerzero.device.probe import probe_devices
from layerzero.dispatch.run import current_world
from layerzero.env import Env
from layerzero.errors import LayerZeroError
from layerzero.json_form import Plain
from layerzero.model.config import Policy
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.plugin.manager import PluginRecord, load_plugins
from layerzero.policy.rules import Verdict, evaluate
from layerzero.reasons import Reason, ReasonCode
from layerzero.runtime.state import state
from layerzero.selection.world import World


class Status:
    """The words a `Check.status` may be. Only "fail" makes a report not ok."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Check(Plain):
    """One thing that was looked at: what, how it stands, why, and the exact fix.

    `group` names the section of the report it belongs to. `code` is None while all is well.
    """

    group: str
    name: str
    status: str
    message: str = ""
    code: ReasonCode | None = None
    fix: str = ""

    @staticmethod
    def because(group: str, name: str, status: str, why: Reason, fix: str = "") -> Check:
        """A check that a Reason speaks for; the fix is the reason's hint unless another is given."""
        return Check(group, name, status, why.message, why.code, fix or why.hint)

    @staticmethod
    def error(group: str, name: str, error: LayerZeroError, status: str = Status.FAIL) -> Check:
        return Check(group, name, status, error.body, error.code, error.hint)


@dataclass(frozen=True)
class _Report:
    """What both reports share."""

    checks: tuple[Check, ...]
    title: ClassVar[str] = "report"

    @property
    def ok(self) -> bool:
        """Whether nothing failed; warnings and skipped checks do not count."""
        return all(check.status != Status.FAIL for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == Status.FAIL)

    def check(self, name: str, group: str | None = None) -> Check:
        """The check of this name (in this group); KeyError when there is none."""
        for item in self.checks:
            if item.name == name and group in (None, item.group):
                return item
        raise KeyError(name)

    def counts(self) -> dict[str, int]:
        words = (Status.OK, Status.WARN, Status.FAIL, Status.SKIP)
        return {word: sum(check.status == word for check in self.checks) for word in words}

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "counts": self.counts(), "checks": [check.to_json() for check in self.checks]}

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """One line."""
        words = ", ".join(f"{count} {word}" for word, count in self.counts().items() if count)
        return f"{self.title}: {'ok' if self.ok else 'problems found'} ({words})"

    def __str__(self) -> str:
        lines: list[str] = []
        group = ""
        for check in self.checks:
            if check.group != group:
                group = check.group
                lines += ["", group] if lines else [group]
            code = f"{check.code.value}: " if check.code is not None else ""
            lines.append(f"  {check.status:<5} {check.name:<22} {code}{check.message}".rstrip())
            if check.fix:
                lines.append(f"        fix: {check.fix}")
        return "\n".join([*lines, "", *self._after(), self.summary()])

    def _after(self) -> Sequence[str]:
        """Lines between the checks and the summary."""
        return ()


@dataclass(frozen=True)
class DoctorReport(_Report):
    """What `lz.doctor` found. `libraries` maps each library of interest to its version, None when absent."""

    libraries: Mapping[str, str | None] = field(default_factory=dict)
    title: ClassVar[str] = "doctor"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "libraries": dict(self.libraries)}

    def _after(self) -> Sequence[str]:
        versions = (f"  {name:<16}{version or '-'}" for name, version in self.libraries.items())
        return ["libraries", *versions, ""] if self.libraries else ()


@dataclass(frozen=True)
class ReadinessReport(_Report):
    """What `lz.readiness_check` found; `caches` holds the numbers of the selection cache and the hot table."""

    caches: Mapping[str, Any] = field(default_factory=dict)
    title: ClassVar[str] = "readiness"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "caches": dict(self.caches)}

    def require(self) -> None:
        """Raise LayerZeroError naming everything that failed; for a service that must not start otherwise."""
        if self.ok:
            return
        lines = "".join(f"\n  {check.name}: {check.message}; {check.fix}" for check in self.failed)
        first = self.failed[0]
        raise LayerZeroError(f"not ready{lines}", code=first.code or ReasonCode.CONFIG_INVALID, hint=first.fix)


def some_of(names: Collection[str], most: int) -> str:
    """The first of these names in order, and how many more there are."""
    return ", ".join(sorted(names)[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True)
class Situation:
    """Everything the checks look at. A wrong setting stops every ordinary call; here it is set aside and remembered.

    environ    the environment without the variables that are wrong; child processes get this one
    wrong      what is wrong with variables, as the errors they cause
    problem    why the policy could not be built; the World then has the default one
    """

    env: Env
    environ: Mapping[str, str]
    wrong: tuple[LayerZeroError, ...]
    problem: LayerZeroError | None
    world: World
    records: tuple[PluginRecord, ...]
    devices: tuple[DeviceSpec, ...]

    @property
    def device(self) -> DeviceSpec:
        """The device calls would mostly run on: the first accelerator, else the CPU."""
        return self.devices[0]

    def fits(self, kernel: KernelSpec) -> bool:
        """Whether a device of this machine could run the kernel, whatever the call."""
        return any(not kernel.check_device(device) for device in self.devices)


def verdict_on(kernel: KernelSpec, policy: Policy) -> Verdict:
    """What a policy says of a kernel whatever the call: rules with conditions neither deny nor allow here."""
    return evaluate(policy, kernel.op, kernel.kernel_id, kernel.backend, lambda name: None)


def tolerant_env(environ: Mapping[str, str] | None = None) -> tuple[Env, dict[str, str], tuple[LayerZeroError, ...]]:
    """Read the variables one by one: (what is right, the environment without the wrong ones, the errors)."""
    given = dict(os.environ if environ is None else environ)
    wrong: list[LayerZeroError] = []
    for name in sorted(name for name in given if name.startswith(environment.PREFIX)):
        try:
            environment.read({name: given[name]})
        except LayerZeroError as error:
            wrong.append(error)
            del given[name]
    try:
        return environment.read(given), given, tuple(wrong)
    except LayerZeroError as error:  # two variables that contradict each other, each right by itself
        kept = {name: value for name, value in given.items() if not name.startswith(environment.PREFIX)}
        return environment.read(kept), kept, (*wrong, error)


def look() -> Situation:
    """The situation of this process. Loads the plugins when that has not happened yet; never raises for a setting."""
    env, environ, wrong = tolerant_env()
    devices = probe_devices()
    try:
        world = current_world()
        return Situation(env, environ, wrong, None, world, state.records, devices)
    except LayerZeroError as error:
        loaded = load_plugins(env=env)
        ops = {**loaded.ops, **PUBLIC}
        world = World(registry=loaded.registry, ops=ops)
        # A wrong variable is listed by itself already.
        problem = None if wrong and str(error) in {str(item) for item in wrong} else error
        return Situation(env, environ, wrong, problem, world, loaded.records, devices)


def doctor(backend: str | None = None, *, timeout: float | None = None, probe: bool = True) -> DoctorReport:
    """Look at the machine, the settings and every plugin; each vendor is probed in its own process.

    `backend` looks at one backend or plugin only. `timeout` limits each probe (default: LAYERZERO_PROBE_TIMEOUT,
    60 s). `probe=False` starts no process: metadata is then taken at its word. A crashing, hanging or lying vendor,
    a wrong variable or a corrupt policy file is a finding, never an exception.
    """
    from layerzero.public.check_backends import clashes, first_use, plugins, unknown, vendors
    from layerzero.public.check_machine import health, libraries, measured, platform, settings, shipped
    from layerzero.public.check_policy import table

    now = look()
    limit = (now.env.probe_timeout if timeout is None else timeout) if probe else None
    found = [*plugins(now, backend), *vendors(now, backend, limit)]
    if backend is not None:
        found += [*first_use(now, backend), *shipped(now, backend)] if found else []
        return DoctorReport(tuple(found or unknown(now, backend)))
    plan = table(now, now.world, "settings")
    rest = [*clashes(now), *first_use(now), *shipped(now), *measured(now), *health(now)]
    return DoctorReport((*platform(now), *settings(now), plan, *found, *rest), libraries())


def readiness_check(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None, *, production: bool = False
) -> ReadinessReport:
    """Check whether this process may take traffic: schemas, policy, the kernels it needs, JIT artifacts, caches.

    `config` is a policy file (or a mapping in its form) to judge instead of the policy in force. What the policy
    names and is not available is a failure with its fix; `report.require()` turns failures into an exception. With
    `production` also what a server must not start with: kernels that may be chosen and are not compiled, quarantined
    ones, misspelt variables, a compiler or a tuner beside requests.
    """
    from layerzero.public.check_policy import readiness

    return readiness(look(), config, production)
