"""What the lower floors and `import layerzero` must not drag in."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import layerzero

HOME = Path(layerzero.__file__).parent
FLOORS = (
    "errors",
    "reasons",
    "env",
    "kinds",
    "settings",
    "version",
    "model",
    "numerics",
    "device",
    "registry",
    "policy",
    "health",
    "telemetry",
)
VENDORS = {"flash_attn", "flashinfer", "xformers", "liger_kernel", "triton", "kernels", "tokenizers", "transformers"}


def modules_of(floors):
    for name in floors:
        yield f"layerzero.{name}"
        folder = HOME / name
        if folder.is_dir():
            yield from (f"layerzero.{name}.{item.name}" for item in pkgutil.iter_modules([str(folder)]))


def loaded_after(code):
    """Modules in a fresh interpreter after running some code."""
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    paths = os.pathsep.join(item for item in sys.path if item)
    env = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return set(json.loads(done.stdout))


def test_floors_0_to_2_need_neither_torch_nor_yaml_nor_pydantic():
    """The package itself imports torch, so it is replaced by an empty shell with the same path."""
    names = list(modules_of(FLOORS))
    shell = (
        "import types; shell = types.ModuleType('layerzero'); "
        f"shell.__path__ = [{str(HOME)!r}]; sys.modules['layerzero'] = shell"
    )
    code = shell + "\nimport importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in names)
    heavy = {"torch", "yaml", "pydantic", "platformdirs", "tomllib", "click", "rich", "pluggy", "sqlite3"}
    assert loaded_after(code) & heavy == set()


def test_importing_layerzero_imports_no_vendor_and_nothing_heavy():
    heavy = {"pydantic", "yaml", "click", "rich", "platformdirs", "packaging", "torch._dynamo", "sqlite3"}
    before = loaded_after("import torch")
    added = loaded_after("import torch, layerzero") - before
    assert added & (VENDORS | heavy) == set()
    assert not [name for name in added if name.startswith(("layerzero.plugin", "layerzero_cli", "layerzero.public"))]


def test_a_first_call_imports_no_vendor_and_no_pydantic():
    code = "import torch, layerzero as lz; q = torch.randn(1, 2, 4, 8); lz.attention(q, q, q)"
    added = loaded_after(code) - loaded_after("import torch")
    # packaging and the parser of whole metadata files take fifteen milliseconds; a version and a range rarely need them
    slow = {"packaging.specifiers", "importlib_metadata._adapters", "email.headerregistry"}
    assert added & (VENDORS | slow | {"pydantic", "yaml", "click", "rich", "sqlite3"}) == set()
