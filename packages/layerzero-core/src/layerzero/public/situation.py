"""Where do we stand? The process as doctor and readiness see it, read so that a wrong setting cannot blind them.

A bad variable or policy file stops every ordinary call. Here it is set aside and remembered, and the rest is
looked at without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerzero import env as environment
from layerzero._ops.signature import PUBLIC
from layerzero.device.probe import probe_devices
from layerzero.dispatch.run import current_world
from layerzero.env import Env
from layerzero.errors import LayerZeroError
from layerzero.model.config import Policy
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec
from layerzero.plugin.manager import PluginRecord, load_plugins
from layerzero.plugin.vendor import hardware_reasons
from layerzero.policy.layers import from_env, merge
from layerzero.policy.load import from_mapping, load_file
from layerzero.policy.rules import Verdict, evaluate
from layerzero.runtime.state import state
from layerzero.selection.world import World


@dataclass(frozen=True)
class Situation:
    """Everything the checks look at.

    environ    the environment without the variables that are wrong; child processes get this one
    wrong      what is wrong with variables, as the errors they cause
    problem    why the policy could not be built; the World then has the default one
    plugins    pluggy's manager with the plugins that loaded
    """

    env: Env
    environ: Mapping[str, str]
    wrong: tuple[LayerZeroError, ...]
    problem: LayerZeroError | None
    world: World
    records: tuple[PluginRecord, ...]
    devices: tuple[DeviceSpec, ...]
    plugins: Any

    @property
    def device(self) -> DeviceSpec:
        """The device calls would mostly run on: the first accelerator, else the CPU."""
        return self.devices[0]

    def fits(self, kernel: KernelSpec) -> bool:
        """Whether a device of this machine could run the kernel, whatever the call."""
        return any(not hardware_reasons(kernel, device) for device in self.devices)


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
        return Situation(env, environ, wrong, None, world, state.records, devices, state.plugin_manager)
    except LayerZeroError as error:
        loaded = load_plugins(env=env)
        ops = {**loaded.ops, **PUBLIC}
        world = World(registry=loaded.registry, ops=ops)
        # A wrong variable is listed by itself already.
        problem = None if wrong and str(error) in {str(item) for item in wrong} else error
        return Situation(env, environ, wrong, problem, world, loaded.records, devices, loaded.pm)


def policy_from(config: str | os.PathLike[str] | Mapping[str, Any], env: Env) -> Policy:
    """The policy a process would have with this file (or mapping in its form), the environment on top."""
    if isinstance(config, (str, os.PathLike)):
        layer = load_file(config)
    else:
        layer = from_mapping(config, source="readiness_check")
    return merge((layer, from_env(env)))
