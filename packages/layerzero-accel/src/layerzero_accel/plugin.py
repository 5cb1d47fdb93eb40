"""Hooks of the accelerator. It brings no kernels: core finds it by itself, at import (`layerzero.dispatch.accel`)."""

from __future__ import annotations

from importlib.metadata import version

from layerzero.plugin import BackendStatus, DeviceSpec, HealthReport, Registrar, hookimpl


@hookimpl
def layerzero_register(registrar: Registrar) -> None:
    """Nothing is registered: no backend and no kernel, only a faster way to the same choice."""


@hookimpl
def layerzero_capabilities(device: DeviceSpec) -> BackendStatus:
    """Whether core could load the compiled library and set it up with this torch; any device will do."""
    from layerzero.dispatch.accel import accelerator

    why = accelerator.why
    here = version("layerzero-accel")
    if why is None:
        return BackendStatus("accel", True, here)
    return BackendStatus("accel", False, here, (), (why,), why.hint)


@hookimpl
def layerzero_health(backend: str) -> HealthReport:
    """One call a few times over: found by the C path, with the very result of the path in Python."""
    import torch

    import layerzero as lz
    from layerzero._ops.signature import PUBLIC
    from layerzero.dispatch.accel import accelerator

    native = accelerator.native
    if native is None:
        detail = "left aside by LAYERZERO_ACCEL=off" if accelerator.wanted is False else str(accelerator.why)
        return HealthReport(backend, accelerator.wanted is False, detail)
    x = torch.linspace(-4.0, 4.0, 64).reshape(2, 32)
    expected = PUBLIC["silu_and_mul"].function(x, backend="reference")
    found = [lz.silu_and_mul(x, backend="reference") for _ in range(3)]
    before = native.counts()["exact"]
    found.append(lz.silu_and_mul(x, backend="reference"))
    error = max(float((item - expected).abs().max()) for item in found)
    if native.counts()["exact"] != before + 1:
        return HealthReport(backend, False, "a call made four times was not found in the table", error)
    return HealthReport(backend, error == 0.0, "the same result as in Python", error)
