"""`lz plugin new NAME`: write a complete backend package that passes the conformance kit as it is.

The files under `template/` are the package, with words such as @NAME@ (a Python name) and @DASHED@ (a
distribution name) to fill in; capabilities.json is made from what each language can declare.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from layerzero.errors import InvalidInputError, invalid
from layerzero.plugin.discovery import BUILTINS, OURS
from layerzero.version import __version__

_TEMPLATE = Path(__file__).with_name("template")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")
_TAKEN = frozenset({*BUILTINS, "layerzero", "testing", "any", "auto"})
# What the files of a new op use under these names: a function of the same name would stand in its place.
_USED = frozenset({"annotations", "expect_tensor", "max", "self_test", "simple_context", "tl", "torch", "triton"})

_ALL = ("float32", "float64", "float16", "bfloat16")
# What a kernel of each language declares, beside its op's own fields.
_DECLARED: dict[str, dict[str, Any]] = {
    "python": {"dtypes": _ALL, "backward": True, "deterministic": True},
    "triton": {
        "dtypes": ("float32", "float16", "bfloat16"), "deterministic": True, "graph_safe": True, "grid": "library",
        "jit": True, "jit_key": ["dtype", "hidden", "needs"],
    },
    "c": {"dtypes": ("float32",), "deterministic": True},
}  # fmt: skip
_OPS: dict[str, dict[str, Any]] = {
    "rms_norm": {"features": ["no_weight"]},
    "attention": {
        "layouts": ["BHSD"], "head_dim": {"min": 1, "max": 512}, "gqa": True, "attn_mask": ["bool", "float"],
        "causal": ["top_left", "bottom_right"], "lse": True,
        "workspace": "batch * num_heads * seq_len_q * seq_len_k * 4 * 2",
    },
}  # fmt: skip
_TRITON = {"dist": "triton", "import": "triton", "version": ">=3.5,<4", "extra": "triton"}
_REGISTER = """    from layerzero_@NAME@.op import DECLARED

    registrar.op(DECLARED)
"""
_HOOK = """exclude = ["*.so"] # what an editable install compiled; the hook adds the one made for the wheel

[tool.hatch.build.targets.wheel.hooks.custom]
"""


def _files(lang: str, new_op: bool) -> dict[str, str]:
    """File in the new package -> file under template/ (an empty name: an empty file)."""
    kernels = f"{lang}_op_kernels" if new_op else f"{lang}_kernels"
    found = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        "src/layerzero_@NAME@/__init__.py": "init.py",
        "src/layerzero_@NAME@/plugin.py": "plugin.py",
        "src/layerzero_@NAME@/kernels.py": f"{kernels}.py",
        "src/layerzero_@NAME@/py.typed": "",
        "tests/test_@NAME@.py": "test.py",
    }
    if new_op:
        found["src/layerzero_@NAME@/op.py"] = "op.py"
    if lang == "c":
        found |= {"hatch_build.py": "hatch_build.py", "src/layerzero_@NAME@/native/kernels.c": f"{kernels}.c"}
    return found


def _capabilities(module: str, ops: dict[str, dict[str, Any]], lang: str, priority: int) -> str:
    word = "plain" if lang == "python" else lang
    said = "Plain PyTorch; replace it with yours" if lang == "python" else "A working start; replace it with yours"
    more = {"vendor": _TRITON} if lang == "triton" else {}
    document = {
        "schema_version": "1.0", "backend": module, "api": ">=2,<3",
        "platforms": ["cuda"] if lang == "triton" else ["cpu"], **more,
        "ops": {
            op: [{
                "kernel_id": f"{module}.{op}.{word}", "function": f"layerzero_{module}.kernels:{op}", "doc": said,
                **_DECLARED[lang], **fields, "priority": priority,
            }]
            for op, fields in ops.items()
        },
    }  # fmt: skip
    return json.dumps(document, indent=2) + "\n"


def _checked_name(name: str, typed: str, what: str) -> None:
    """Refuse what cannot be a name in Python, or looks like no name of ours."""
    if not _NAME.match(name) or keyword.iskeyword(name) or name.endswith("_"):
        raise InvalidInputError(
            f"{typed!r} cannot be the name of {what}", code="VALUE_INVALID", value=str(typed)[:60],
            limit="lowercase letters, digits and underscores, beginning with a letter",
            hint="use lowercase letters, digits and underscores, beginning with a letter, at most 40",
        )  # fmt: skip


def _checked_op(op: str, lang: str) -> bool:
    """Whether an op is new: InvalidInputError where no kernel can be written for one that is known."""
    from layerzero.dispatch.run import current_world

    known = current_world().registry.ops
    if op in _USED:
        raise InvalidInputError(f"the files of a new op use the name {op!r}", value=op, hint="choose another name")
    if op not in known:
        _checked_name(op, op, "an op")
        return True
    ready = sorted(_OPS) if lang == "python" else ["rms_norm"]
    if op not in ready:
        hint = (
            f"begin with --op {ready[-1]} and put your op into its place; lz list --op {op} --page shows its arguments"
        )
        raise InvalidInputError(f"there is no example in {lang} of the known op {op!r}", code="VALUE_INVALID", value=op,
                                limit=ready, hint=hint)  # fmt: skip
    return False


def write_plugin(name: str, folder: str | Path = ".", *, op: str | None = None, lang: str = "python") -> Path:
    """Write the package `layerzero-NAME` into `folder` and return its path.

    Its kernels are in `lang`, of `op`: one that LayerZero knows, or a new one, which is then declared too. Without an
    op they are of rms_norm, in Python of attention as well.

    The name is lowercase letters, digits and underscores (a dash counts as an underscore). A path that exists
    already is never touched: InvalidInputError.
    """
    module = str(name).replace("-", "_")
    _checked_name(module, name, "a backend")
    dashed = module.replace("_", "-")
    target = Path(folder) / f"layerzero-{dashed}"
    if module in _TAKEN or target.name in OURS:  # pip would put the new package in the place of ours
        owner = target.name if target.name in OURS else "layerzero-core"
        raise invalid("PLUGIN_DUPLICATE", module, owner, hint="choose another name")
    if target.exists():
        raise InvalidInputError(f"{target} exists already", code="VALUE_INVALID", value=str(target),
                                hint="choose another name or folder; nothing was written")  # fmt: skip
    new_op = op is not None and _checked_op(op, lang)
    names = [op] if op is not None else ["rms_norm", "attention"] if lang == "python" else ["rms_norm"]
    ops = {item: dict(_OPS.get(item, {})) for item in names}
    if lang == "python" and "rms_norm" in ops:
        ops["rms_norm"]["features"] = ["no_weight", "mixed_weight"]
    words = {
        "@NAME@": module, "@DASHED@": dashed, "@OP@": names[0], "@RELEASE@": ".".join(__version__.split(".")[:2]),
        "@EXTRA@": 'triton = ["triton>=3.5,<4"]\n' if lang == "triton" else "",
        "@HOOK@": _HOOK if lang == "c" else "",
        "@REGISTER@": _REGISTER if new_op else "",
        "@FILES@": ("| `src/layerzero_@NAME@/op.py` | the op: formula, sizes, example |\n" if new_op else "")
        + ("| `src/layerzero_@NAME@/native/kernels.c` | the kernel in C; `hatch_build.py` compiles it |\n"
           if lang == "c" else ""),
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Whole or not at all: fill a folder beside the target, then rename it.
    room = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
    try:
        texts = {
            path: (_TEMPLATE / f"{source}.txt").read_text(encoding="utf-8") if source else ""
            for path, source in _files(lang, new_op).items()
        }
        # nobody else has kernels of a new op; among those of a known one it begins behind the built-in ones
        texts["src/layerzero_@NAME@/capabilities.json"] = _capabilities(module, ops, lang, 50 if new_op else 1)
        for path, text in texts.items():
            for word in ("@FILES@", "@REGISTER@", *words):  # what stands for lines may hold other words
                text = text.replace(word, words[word])
            file = room / "made" / path.replace("@NAME@", module)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        os.rename(room / "made", target)  # unlike replace, never takes the place of a folder with files in it
    finally:
        shutil.rmtree(room, ignore_errors=True)
    return target
