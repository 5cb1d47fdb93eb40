"""Makes the calls and answers that the tests share importable: tests are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "linear_attention_calls"
_spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
assert _spec is not None and _spec.loader is not None
sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_NAME])
