"""The conformance kit over Liger's real kernels."""

from layerzero_verify.testing.suite import *  # noqa: F403 # the kit's tests are taken in by name, all of them
