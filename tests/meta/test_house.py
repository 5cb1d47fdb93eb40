"""The figures of the house are inside what is allowed, and counted as they say."""

from __future__ import annotations

from pathlib import Path

from tools.house import Import, circles, figures, imports, lines


def test_no_figure_is_worse_than_it_may_be():
    assert [item for item in figures() if not item.ok] == []


def test_an_import_inside_a_function_closes_a_circle_and_one_for_type_checkers_does_not(tmp_path: Path):
    house = tmp_path / "house"
    for name, text in {
        "__init__.py": "from house.cellar import jar\n",
        "cellar/__init__.py": "",
        "cellar/jar.py": "def f():\n    from house.attic import box\n",
        "attic/__init__.py": "",
        "attic/box.py": "from house.cellar.jar import f\n",
        "hall.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.attic.box\n",
        "attic/chest.py": "import house.hall\n",
    }.items():
        file = house / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = set(imports(house))
    assert Import("house.cellar.jar", "house.attic.box") in found
    assert Import("house.hall", "house.attic.box") not in found
    assert circles(found) == [{"attic", "cellar"}]
    assert lines(house.rglob("*.py")) == 8
