"""`lz plugin new NAME`: write a complete backend package that passes the conformance kit as it is.

The files under `template/` are the package, with @NAME@ (a Python name) and @DASHED@ (a distribution name) to fill in.
"""

from __future__ import annotations

import keyword
import os
import re
import shutil
import tempfile
from pathlib import Path

from layerzero.errors import InvalidInputError
from layerzero.plugin.discovery import BUILTINS

__all__ = ["write_plugin"]

_TEMPLATE = Path(__file__).with_name("template")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")
_TAKEN = frozenset({*BUILTINS, "core", "layerzero", "testing", "any", "auto"})

# file in the new package -> file under template/ (None: empty)
_FILES: dict[str, str | None] = {
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    "src/layerzero_@NAME@/__init__.py": "init.py.txt",
    "src/layerzero_@NAME@/plugin.py": "plugin.py.txt",
    "src/layerzero_@NAME@/kernels.py": "kernels.py.txt",
    "src/layerzero_@NAME@/capabilities.json": "capabilities.json.txt",
    "src/layerzero_@NAME@/py.typed": None,
    "tests/test_@NAME@.py": "test.py.txt",
}


def write_plugin(name: str, folder: str | Path = ".") -> Path:
    """Write the package `layerzero-NAME` into `folder` and return its path.

    The name is lowercase letters, digits and underscores (a dash counts as an underscore). A path that exists
    already is never touched: InvalidInputError.
    """
    module = str(name).replace("-", "_")
    if not _NAME.match(module) or keyword.iskeyword(module) or module.endswith("_"):
        raise InvalidInputError(
            f"{name!r} cannot be the name of a backend", code="VALUE_INVALID", value=str(name)[:60],
            limit="lowercase letters, digits and underscores, beginning with a letter",
            hint="use lowercase letters, digits and underscores, beginning with a letter, at most 40",
        )  # fmt: skip
    if module in _TAKEN:
        raise InvalidInputError(
            code="PLUGIN_DUPLICATE", value=module, limit="layerzero-core", hint="choose another name"
        )
    dashed = module.replace("_", "-")
    target = Path(folder) / f"layerzero-{dashed}"
    if target.exists():
        raise InvalidInputError(f"{target} exists already", code="VALUE_INVALID", value=str(target),
                                hint="choose another name or folder; nothing was written")  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Whole or not at all: fill a folder beside the target, then rename it.
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
    try:
        for path, source in _FILES.items():
            text = "" if source is None else (_TEMPLATE / source).read_text(encoding="utf-8")
            file = draft / path.replace("@NAME@", module)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("@NAME@", module).replace("@DASHED@", dashed), encoding="utf-8")
        draft.chmod(0o777 & ~_umask())
        os.rename(draft, target)  # unlike replace, never takes the place of a folder with files in it
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
