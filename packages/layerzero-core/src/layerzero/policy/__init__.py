"""Policy: what the user wants, from files, environment, code and calls, merged into one frozen value.

`layers`  PolicyLayer, merge, precedence          `rules`  what a Policy says about a kernel
`load`    files, mappings, discovery              `watch`  hot reload
`schema`  the file's pydantic models (lazy)       `parse`  bytes to dicts with line numbers
"""

from __future__ import annotations

from layerzero.policy.layers import Level, PolicyLayer, from_env, merge
from layerzero.policy.rules import Verdict, evaluate, has_exact, judge, thresholds

__all__ = ["Level", "PolicyLayer", "Verdict", "evaluate", "from_env", "has_exact", "judge", "merge", "thresholds"]
