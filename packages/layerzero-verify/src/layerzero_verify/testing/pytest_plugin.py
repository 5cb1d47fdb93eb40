"""pytest plugin of the conformance kit: `-p layerzero_verify.testing.pytest_plugin`. Never loaded by itself.

The setting `layerzero_plugin` (or `--lz-plugin`) names the plugin under test: an entry point ("mybackend") or a
module ("layerzero_mybackend.plugin"). Every kernel it registers becomes parameters of the suite's tests; what a
kernel does not declare, and what this machine cannot run, is skipped with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from layerzero_verify.testing.cases import GROUPS, cases_of, dtypes_of, load_cases
from layerzero_verify.testing.compositions import COMPOSITIONS
from layerzero_verify.testing.kit import Kit, uncompiled

pytest.register_assert_rewrite("layerzero_verify.testing.suite", "layerzero_verify.testing.run")

load_cases()

_KIT = pytest.StashKey[Kit]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting and the option that name the plugin under test."""
    parser.addini("layerzero_plugin", "entry point or module of the LayerZero plugin under test", default="")
    parser.addoption("--lz-plugin", default="", help="entry point or module of the LayerZero plugin under test")
    help_ = "how many compositions prove batch_invariant of a kernel"
    parser.addoption("--lz-compositions", type=int, default=COMPOSITIONS, help=help_)


def pytest_configure(config: pytest.Config) -> None:
    """Make the suite's marker known."""
    gc.freeze()  # what is imported stays: pytest collects garbage several times at its end
    config.addinivalue_line("markers", "lz_group(name): the group of cases a conformance test runs")


def _kit(config: pytest.Config) -> Kit:
    if _KIT not in config.stash:
        target = config.getoption("--lz-plugin") or config.getini("layerzero_plugin")
        if not target:
            raise pytest.UsageError("set layerzero_plugin in the pytest settings, or pass --lz-plugin NAME")
        config.stash[_KIT] = Kit.open(str(target))
    return config.stash[_KIT]


@pytest.fixture(scope="session")
def lz_kit(pytestconfig: pytest.Config) -> Kit:
    """The plugin under test."""
    return _kit(pytestconfig)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each conformance test one parameter per kernel, or per case of its group."""
    if "lz_kernel" in metafunc.fixturenames:
        metafunc.parametrize("lz_kernel", list(_kernels(_kit(metafunc.config))))
    elif "lz_case" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("lz_group")
        name = mark.args[0] if mark else ""
        metafunc.parametrize(
            "lz_case", list(_cases(_kit(metafunc.config), name)) or [_skip(f"no kernel for {name}", name)]
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Skip a test of the kit where a library was told not to compile (FLASHINFER_DISABLE_JIT) and lacks a module."""
    try:
        return (yield)
    except Exception as error:
        missing = uncompiled(error) if _KIT in item.config.stash else None
        if missing is None:
            raise
        pytest.skip(f"not compiled here: {missing}")


def _skip(why: str, label: str) -> Any:
    return pytest.param(None, id=label, marks=pytest.mark.skip(reason=why))


def _kernels(kit: Kit) -> Iterator[Any]:
    for spec in kit.kernels:
        where = kit.device_for(spec)
        if isinstance(where, str):
            yield _skip(f"{spec.kernel_id}: {where}", spec.kernel_id)
        else:
            yield pytest.param(spec, id=spec.kernel_id)


def _cases(kit: Kit, name: str) -> Iterator[Any]:
    for spec in kit.kernels:
        where = kit.device_for(spec)
        for found in GROUPS.get(name, ()):
            if found.op != spec.op:
                continue
            if isinstance(where, str):
                yield _skip(f"{spec.kernel_id}: {where}", spec.kernel_id)
                break
            missing = found.requires - spec.features
            if missing:
                words = ", ".join(sorted(missing))
                yield _skip(f"{spec.kernel_id} does not declare {words}", f"{spec.kernel_id}-no-{words}")
                continue
            if not dtypes_of(spec):
                words = ", ".join(sorted(spec.dtypes))
                yield _skip(f"{spec.kernel_id}: the kit draws no {words}", f"{spec.kernel_id}-dtypes")
            yield from (pytest.param(case, id=case.id) for case in cases_of(found, spec))
