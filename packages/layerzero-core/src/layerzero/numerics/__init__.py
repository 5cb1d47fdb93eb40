"""How close is close enough, and how far off a result is: shared by tuning, verification and the conformance kit."""

from layerzero.numerics.compare import ErrorLocation, ErrorReport, assert_close, compare
from layerzero.numerics.tolerances import HitMode, Tolerance, definition_tolerance, full_float32, tolerance

__all__ = [
    "ErrorLocation",
    "ErrorReport",
    "HitMode",
    "Tolerance",
    "assert_close",
    "compare",
    "definition_tolerance",
    "full_float32",
    "tolerance",
]
