"""Ranges of versions answered without packaging agree with packaging."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from layerzero.device.signature import installed_version
from layerzero.plugin.versions import _plainly, contains

RELEASE = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
TAIL = st.sampled_from(["", "", "", "b36", "rc1", ".post1", ".dev3", "+cu130", ".*", " "])
VERSION = st.builds(lambda release, tail: release + tail.replace(".*", ""), RELEASE, TAIL)
CLAUSE = st.builds(
    lambda sign, release, tail: sign + release + tail,
    st.sampled_from([">=", "<=", "==", "!=", ">", "<", "~=", "===", " >="]),
    RELEASE,
    TAIL,
)


@given(st.lists(CLAUSE, max_size=3).map(",".join), VERSION)
def test_the_answer_is_that_of_packaging(specifier: str, version: str) -> None:
    try:
        expected = SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidSpecifier:
        with pytest.raises(InvalidSpecifier):
            contains(specifier, version)
        return
    assert contains(specifier, version) is expected


def test_numbers_alone_need_no_packaging() -> None:
    assert _plainly(">=3.5,<4", "3.6.0") is True
    assert _plainly(">=0.17.2,<0.18", "0.17.1") is False
    assert _plainly("==1.0", "1") is True
    assert _plainly("", "1.2") is True
    for specifier, version in ((">=3.0.0b1,<4", "3.1"), (">=1", "1.0+cpu"), ("~=1.2", "1.3"), (">=1", "1.\u0661")):
        assert _plainly(specifier, version) is None


def test_a_version_that_is_none_is_in_no_range() -> None:
    assert not contains(">=1", "unknown")


def test_a_folder_left_behind_does_not_hide_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale, whole = tmp_path / "a", tmp_path / "b"
    (stale / "lz_left_behind-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(whole))
    monkeypatch.syspath_prepend(str(stale))
    monkeypatch.syspath_prepend(str(tmp_path / "nowhere.zip"))
    assert installed_version("lz-left-behind") is None
    folder = whole / "lz_left_behind-2.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lz-left-behind\nVersion: 2.0\n\nVersion: 9\n")
    monkeypatch.syspath_prepend(str(whole))
    assert installed_version("lz.left_behind") == "2.0"
    assert installed_version("lz-never-there") is None
