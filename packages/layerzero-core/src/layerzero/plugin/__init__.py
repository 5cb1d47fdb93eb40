"""Everything a backend may import. docs/plugins.md is the author's manual; `lz plugin new NAME` writes a package.

A backend is a pip package with a `capabilities.json`, which says what each kernel can do, and a module with up to five
hooks (see `layerzero.plugin.spec`; the first is enough), named by an entry point in the group `layerzero.backends`::

    CAPABILITIES = Path(__file__).with_name("capabilities.json")

    @hookimpl
    def layerzero_register(registrar):
        registrar.backend(CAPABILITIES)

    @hookimpl
    def layerzero_capabilities(device):
        return vendor_status(CAPABILITIES, device)

Where nothing is special, `backend_hooks(__package__)` gives these two and the self test of the module `health`.

Rules that keep everybody safe:

- registration must not import the vendor library; a kernel names its adapter as "module:function", and the
  string is imported when the kernel is bound for the first time;
- an adapter takes the op's canonical arguments positionally, in the order `lz.list_ops()` shows, and must not
  change its inputs unless the op says so;
- `layerzero_capabilities` and `layerzero_health` may import the vendor: they run in a subprocess with a time limit;
- a plugin that raises, exits or breaks a rule costs only itself; `lz doctor` shows the reason and the fix;
- import only from `layerzero.plugin`, `layerzero.model`, `layerzero.reasons`, `layerzero.errors` and `layerzero.files`.
"""

from layerzero.errors import BackendNotAvailableError, CapabilitiesError, InvalidInputError, PluginError
from layerzero.model.artifact import CompileOrder, NeedsDevice
from layerzero.model.checks import expect_rank, expect_shape, expect_tensor, simple_context
from layerzero.model.context import Context
from layerzero.model.device import DeviceSpec
from layerzero.model.kernel import KernelSpec, Limit
from layerzero.model.op import Call, Op, OperationSpec
from layerzero.model.status import BackendStatus, HealthReport
from layerzero.plugin.artifacts import artifact_folder
from layerzero.plugin.discovery import dist_version
from layerzero.plugin.registrar import Registrar
from layerzero.plugin.spec import API_VERSION, ENTRY_POINT_GROUP, hookimpl
from layerzero.plugin.vendor import backend_hooks, needs_dist, needs_sm, vendor_status
from layerzero.reasons import Reason, ReasonCode, reason
from layerzero.registry.capabilities import load_capabilities

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "BackendNotAvailableError",
    "BackendStatus",
    "Call",
    "CapabilitiesError",
    "CompileOrder",
    "Context",
    "DeviceSpec",
    "HealthReport",
    "InvalidInputError",
    "KernelSpec",
    "Limit",
    "NeedsDevice",
    "Op",
    "OperationSpec",
    "PluginError",
    "Reason",
    "ReasonCode",
    "Registrar",
    "artifact_folder",
    "backend_hooks",
    "dist_version",
    "expect_rank",
    "expect_shape",
    "expect_tensor",
    "hookimpl",
    "load_capabilities",
    "needs_dist",
    "needs_sm",
    "reason",
    "simple_context",
    "vendor_status",
]
