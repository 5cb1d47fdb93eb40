"""The conformance kit: what a backend has to show before anybody should select its kernels.

A plugin's whole test file is one line::

    from layerzero_verify.testing.suite import *  # noqa: F403

and its pytest settings name the kit's plugin and the plugin under test::

    [tool.pytest.ini_options]
    addopts = "-p layerzero_verify.testing.pytest_plugin"
    layerzero_plugin = "mybackend"

The suite reads the backend's own capabilities: what is declared is tried at its limits against the reference, what is
not declared is skipped by name. `fakes` are for tests of LayerZero itself and of tools built on it.
"""
