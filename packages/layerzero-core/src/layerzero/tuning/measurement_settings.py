"""What kernels are compared in: what a policy forbids stays forbidden, what it prefers does not count."""

from __future__ import annotations

from dataclasses import replace

from layerzero.model.config import Policy
from layerzero.selection.world import Measurements, World

__all__ = ["measurement_settings"]


def measurement_settings(world: World, *, jit: str = "block") -> World:
    """The World to measure in: what may not run may not, but no wish, lock, table or earlier time has a say.

    With `jit="off"` kernels that are not compiled yet stay out.
    """
    before = world.policy
    policy = Policy(
        allow=before.allow,
        deny=before.deny,
        rules=tuple(replace(rule, prefer=(), avoid=(), boosts=(), lock=None) for rule in before.rules),
        strict_mode=before.strict_mode,
        allow_adaptation=before.allow_adaptation,
        backend_isolation=before.backend_isolation,
        jit=jit,
    )
    return world.changed(policy=policy, measurements=Measurements(), table=None, tally=None)
