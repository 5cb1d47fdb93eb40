"""What `layerzero.plugin` offers authors for an honest answer to `layerzero_capabilities`."""

from __future__ import annotations

import sys

import pytest

from layerzero.model.enums import Platform
from layerzero.plugin import dist_version, needs_dist, needs_sm, reason, vendor_status
from layerzero_verify.testing import fakes
from tools.pretended_vendors import pretend

VENDOR = {"dist": "fakelib", "import": "fakelib.core", "version": ">=2,<3", "extra": "fake"}
EMPTY = {"schema_version": "1.0", "backend": "fake", "platforms": ["cuda"], "vendor": VENDOR, "ops": {}}
KERNEL = fakes.capabilities("fake", vendor=VENDOR)
H100 = fakes.gpu(90)


def codes(status):
    return [item.code.value for item in status.reasons]


def test_an_absent_vendor_is_named_with_the_exact_command():
    with pretend({"fakelib": None, "layerzero-fake": "1.0"}, {"fakelib": None}) as imported:
        status = vendor_status(EMPTY, H100)
    assert codes(status) == ["BACKEND_NOT_INSTALLED", "BACKEND_STUB"]
    assert status.fix == "pip install 'layerzero-fake[fake]'" == status.reasons[0].hint
    assert (status.available, status.version, imported) == (False, None, [])


def test_a_vendor_of_another_version_is_not_imported():
    with pretend({"fakelib": "3.1"}, {"fakelib": None}) as imported:
        status = vendor_status(KERNEL, fakes.cpu())
    assert codes(status) == ["BACKEND_VERSION_MISMATCH"]
    assert (status.reasons[0].value, status.reasons[0].limit) == ("fakelib 3.1", ">=2,<3")
    assert (status.version, imported) == ("3.1", [])


def test_a_vendor_that_is_there_makes_its_kernels_usable():
    with pretend({"fakelib": "2.5"}, {"fakelib": None}) as imported:
        status = vendor_status(KERNEL, fakes.cpu())
    assert (status.available, status.kernels, status.reasons, status.fix) == (True, ("fake.rms_norm.plain",), (), "")
    assert imported == ["fakelib", "fakelib.core"]
    assert "fakelib" not in sys.modules


@pytest.mark.parametrize("error", [ImportError("libx.so.1: cannot open\nshared object"), SystemExit(127)])
def test_a_vendor_that_cannot_be_imported_is_a_reason_not_an_end(error):
    with pretend({"fakelib": "2.5"}, {"fakelib": error}):
        status = vendor_status(KERNEL, fakes.cpu())
    assert codes(status) == ["BACKEND_IMPORT_FAILED"]
    assert not status.available and not status.kernels
    assert type(error).__name__ in status.reasons[0].message and "\n" not in status.reasons[0].message
    assert "import fakelib.core" in status.fix


def test_without_kernels_the_status_says_so_and_names_the_platforms():
    with pretend({"fakelib": "2.5"}, {"fakelib": None}):
        assert codes(vendor_status(EMPTY, H100)) == ["BACKEND_STUB"]
        assert codes(vendor_status(EMPTY, fakes.cpu())) == ["PLATFORM_MISMATCH", "BACKEND_STUB"]


def test_every_check_is_asked_and_one_that_raises_hides_nothing():
    def broken(device):
        raise OSError("no nvidia-smi")

    with pretend({"fakelib": "2.5", "second": "1.0"}, {"fakelib": None}):
        checks = (needs_sm(100), broken, needs_dist("second", ">=2"), lambda device: [reason("BACKEND_CONFLICT", "x")])
        status = vendor_status(EMPTY, H100, *checks)
    assert codes(status) == [
        "SM_TOO_OLD", "VENDOR_REFUSED", "BACKEND_VERSION_MISMATCH", "BACKEND_CONFLICT", "BACKEND_STUB",
    ]  # fmt: skip
    assert "OSError: no nvidia-smi" in status.reasons[1].message
    assert status.reasons[2].hint == "pip install 'second>=2'"


def test_a_reason_from_a_check_makes_every_kernel_unusable():
    with pretend({"fakelib": "2.5", "triton": None}, {"fakelib": None}):
        status = vendor_status(KERNEL, fakes.cpu(), needs_dist("triton"))
    assert codes(status) == ["BACKEND_NOT_INSTALLED"]
    assert status.fix == "pip install triton"
    assert not status.available and not status.kernels


def test_checks_are_not_asked_about_a_vendor_that_is_not_there():
    asked = []
    with pretend({"fakelib": None}):
        vendor_status(KERNEL, fakes.cpu(), lambda device: asked.append(device) or ())
    assert asked == []


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (fakes.gpu(75), ["SM_TOO_OLD"]),
        (fakes.gpu(80), []),
        (fakes.gpu(90), []),
        (fakes.gpu(100), ["SM_TOO_NEW"]),
        (fakes.gpu(90, sm_version=None), ["SM_UNKNOWN"]),
        (fakes.cpu(), []),
        (fakes.gpu(90, platform=Platform.ROCM, sm_version=None), []),
    ],
    ids=["sm75", "sm80", "sm90", "sm100", "no-sm", "cpu", "rocm"],
)
def test_needs_sm_speaks_only_of_devices_that_have_one(device, expected):
    assert [item.code.value for item in needs_sm(80, 99)(device)] == expected


def test_pretending_leaves_no_trace():
    before = dist_version("pluggy"), sys.modules["json"], list(sys.meta_path)
    with pretend({"pluggy": "99.0", "PyYAML": None}, {"json": ImportError("no")}) as imported:
        assert dist_version("pluggy") == "99.0"
        assert dist_version("pyyaml") is None
        with pytest.raises(ImportError, match="no"):
            __import__("json")
    assert (dist_version("pluggy"), sys.modules["json"], list(sys.meta_path)) == before
    assert imported == ["json"]
