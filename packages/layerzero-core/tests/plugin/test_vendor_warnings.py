"""A library that warns while it is imported is not refused where warnings are errors; what it says is shown."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerzero.dispatch.bind import resolve
from layerzero.errors import BackendNotAvailableError, importing
from layerzero.model.enums import Platform
from layerzero.model.kernel import KernelSpec
from layerzero.plugin.probing import probe
from layerzero_verify.testing import fakes
from tools import faulty_plugins as faults

WORDS = "an optional package is not installed"
VENDOR = f"import warnings\nwarnings.warn({WORDS!r}, ImportWarning)\n\ndef run(x):\n    return x\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for modules, which are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("remarking_"):
            del sys.modules[name]


def kernel(module: str) -> KernelSpec:
    return KernelSpec(
        f"{module}.rms_norm.plain",
        "rms_norm",
        module,
        f"{module}:run",
        platforms=frozenset({Platform.CPU}),
        dtypes=frozenset({"float32"}),
        grid_layout="library",
    )


def test_an_adapter_that_warns_is_bound_where_warnings_are_errors(folder: Path) -> None:
    (folder / "remarking_one.py").write_text(VENDOR)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        assert resolve(kernel("remarking_one"))(3) == 3
        with pytest.raises(UserWarning):
            warnings.warn("of somebody else, later", UserWarning, stacklevel=1)
    assert [str(item.message) for item in shown] == [WORDS]


def test_where_warnings_are_no_errors_they_stay_as_they_were(folder: Path) -> None:
    (folder / "remarking_two.py").write_text(VENDOR)
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        before = list(warnings.filters)
        assert resolve(kernel("remarking_two"))(3) == 3
        assert warnings.filters == before
    assert not shown


def test_a_library_that_raises_a_warning_itself_is_refused(folder: Path) -> None:
    (folder / "remarking_three.py").write_text("raise ImportWarning('this machine will not do')\n")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("error")
        with pytest.raises(BackendNotAvailableError, match="this machine will not do"):
            resolve(kernel("remarking_three"))


def test_other_threads_and_what_follows_an_import_within_one_are_treated_as_before() -> None:
    raised: list[Warning] = []

    def elsewhere() -> None:
        try:
            warnings.warn("of another thread", UserWarning, stacklevel=1)
        except UserWarning as error:
            raised.append(error)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        with importing():
            with importing():
                pass
            warnings.warn("still of the import", UserWarning, stacklevel=1)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join(60)
            with warnings.catch_warnings():  # the list it puts back holds our filter for good, which matches nothing
                kept = list(warnings.filters)
        warnings.filters[:] = kept  # type: ignore[index]
        with pytest.raises(UserWarning):
            warnings.warn("after it", UserWarning, stacklevel=1)
    assert [str(item.message) for item in shown] == ["still of the import"]
    assert [str(error) for error in raised] == ["of another thread"]


def test_a_probe_is_not_put_off_by_what_a_library_remarks(tmp_path: Path) -> None:
    faults.install(tmp_path, "chatters_in_probe")
    plugin, said = tmp_path / "faulty_chatters_in_probe" / "plugin.py", 'print("vendor banner {{{ not json")'
    source = plugin.read_text()
    assert said in source
    plugin.write_text(source.replace(said, f"import warnings; warnings.warn({WORDS!r}, ImportWarning)"))
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"}
    result = probe("chatters_in_probe", 60, device=fakes.cpu(), env=environment)
    assert result.status.available, result.status.reasons
