"""`python -m tools.settings` writes docs/settings.md from the table of settings; `readers` says who reads one."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from layerzero.settings import GROUPS, SETTINGS, Setting
from tools.workspace import ROOT, packages

__all__ = ["PAGE", "main", "page", "readers"]

PAGE = ROOT / "docs" / "settings.md"
# what declares or carries settings does not read them
_CARRIERS = ("settings.py", "kinds.py", "env.py", "model/config.py")
_HEAD = """\
# Settings

Made by `python -m tools.settings` from the one table in `layerzero/settings.py`; do not edit. A setting comes from a
policy file (`layerzero.yaml`, `layerzero.toml`, `[tool.layerzero]`), from a variable, or from code (`lz.configure`,
`lz.scoped`, a call); the later is stronger. Keys with a dot stand in a group of the file: `cache: {ttl_s: 60}`.

"""
_WORDS = {"boolean": "true, false", "string": "text", "array": "list of texts", "object": "mapping"}
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}


def _sources(reader: str) -> Iterator[Path]:
    """Python files of a room of the core, of a package, or of a folder of the repository."""
    core = packages()[0].path / "src" / "layerzero"
    found = [core / reader, core / f"{reader}.py", ROOT / reader, *(p.path / "src" / reader for p in packages())]
    found += [p.path / "tests" for p in packages()] if reader == "tests" else []
    for place in found:
        if place.is_file():
            yield place
        for file in sorted(place.rglob("*.py")) if place.is_dir() else ():
            if not file.as_posix().endswith(_CARRIERS):
                yield file


@lru_cache(maxsize=2_000)
def _said(file: Path) -> frozenset[str]:
    """Attributes that are read, with their owner, and texts in quotes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(f"'{node.value}'")
    return frozenset(found)


def readers(setting: Setting) -> list[Path]:
    """The files of its reader that act on it: by its key, its field in a policy, or its variable."""
    group, _, name = setting.key.partition(".")
    names = {f"'LAYERZERO_{setting.variable}'", f"'{setting.key}'"}
    if name:  # the fields of a class of its own, else `policy.setting("group.name")`
        names |= {f"settings.{name}", f"_settings.{name}", f"{group}.{name}"}
    elif group:
        names |= {f"policy.{group}", f"policy.{group}_of", f"rule.{group}", f"layer.{group}"}
    else:
        names |= {f"{owner}.{setting.attribute}" for owner in ("settings", "env", "")} | {f"'{setting.attribute}'"}
    return [file for file in _sources(setting.reader) if _said(file) & names]


def _values(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "anyOf" in schema:
        return ", or ".join(_values(part) for part in schema["anyOf"] if part.get("type") != "null")
    limits = [f"{word} {schema[key]:g}" for key, word in _LIMITS.items() if key in schema]
    return _WORDS.get(schema["type"]) or ", ".join((schema["type"], *limits))


def _row(item: Setting) -> str:
    cells = (
        f"`{item.key}`" if item.key else "",
        f"`LAYERZERO_{item.variable}`" if item.variable else "",
        _values(item.kind.schema),
        "" if item.default in (None, (), {}) else f"`{json.dumps(item.default)}`",
        item.doc,
        item.reader,
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """docs/settings.md."""
    head = "| policy key | variable | values | default | | read by |\n|---|---|---|---|---|---|\n"
    keyed = [item for item in SETTINGS if item.key and item.key.partition(".")[0] not in GROUPS]
    text = _HEAD + head + "\n".join(map(_row, keyed)) + "\n"
    for group, doc in GROUPS.items():
        rows = [item for item in SETTINGS if item.key.startswith(f"{group}.")]
        text += f"\n## {group}\n\n{doc}\n\n{head}" + "\n".join(map(_row, rows)) + "\n"
    alone = [item for item in SETTINGS if not item.key]
    text += f"\n## Variables alone\n\n{head}" + "\n".join(map(_row, alone)) + "\n"
    return text


def main() -> int:
    """Write the page; say which settings nobody reads."""
    PAGE.write_text(page(), encoding="utf-8")
    unread = [item.key or item.variable for item in SETTINGS if not readers(item)]
    print(f"wrote {PAGE.relative_to(ROOT)}; read by nobody: {', '.join(unread) or 'none'}")
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main())
