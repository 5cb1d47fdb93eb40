"""Readiness of hub kernels: where the policy speaks of the hub, lock and store are verified before a request asks."""

from __future__ import annotations

from collections.abc import Iterator

from layerzero.model.config import Policy
from layerzero.plugin.manager import PluginState
from layerzero.plugin.probing import probe
from layerzero.public.checks import Check, Status
from layerzero.public.situation import Situation
from layerzero.reasons import reason

__all__ = ["hub"]


def hub(now: Situation, policy: Policy) -> Iterator[Check]:
    """One check when the policy has a `hub` section: is the package there, and everything as it was locked."""
    if not policy.hub:
        return
    record = next((record for record in now.records if record.name == "hub"), None)
    if record is None or record.state == PluginState.FAILED:
        why = reason("BACKEND_NOT_INSTALLED", "layerzero-hub") if record is None else record.reasons[0]
        yield Check.because("hub", "locked kernels", Status.FAIL, why, "pip install 'layerzero-hub[kernels]'")
        return
    result = probe("hub")
    if not result.status.available or result.status.reasons:
        told = result.status.reasons
        why = told[0] if told else reason("BACKEND_IMPORT_FAILED", "no reason given")
        yield Check.because("hub", "locked kernels", Status.FAIL, why, result.status.fix or why.hint)
    elif result.health is None or not result.health.ok:
        detail = "no answer" if result.health is None else result.health.detail
        yield Check.because(
            "hub", "locked kernels", Status.FAIL, reason("HEALTH_CHECK_FAILED", detail), "lz hub verify"
        )
    else:
        yield Check("hub", "locked kernels", Status.OK, result.health.detail)
