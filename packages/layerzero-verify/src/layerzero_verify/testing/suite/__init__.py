"""Every conformance test, for `from layerzero_verify.testing.suite import *` in a plugin's only test file."""

from layerzero_verify.testing.suite.contract import *  # noqa: F403
from layerzero_verify.testing.suite.kernels import *  # noqa: F403

__all__ = [name for name in dir() if name.startswith("test_")]
