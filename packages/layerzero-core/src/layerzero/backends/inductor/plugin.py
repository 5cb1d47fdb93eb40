"""Plugin of the built-in backend `inductor`: kernels that torch's own compiler makes for this machine."""

from __future__ import annotations

from layerzero.backends.inductor.compiling import needs_compiler
from layerzero.plugin import backend_hooks

# The compiler ships with torch; what is asked is whether it finds a C++ compiler.
layerzero_register, layerzero_capabilities, layerzero_health = backend_hooks(__package__, needs_compiler)
