"""The names of the ways in which a kernel can pass ordinary checks without doing its work."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Cheat"]


class Cheat(StrEnum):
    """Why a kernel is refused; `says` is the message, with what was seen in place of `{seen}`."""

    says: str

    def __new__(cls, code: str, says: str) -> Cheat:
        """A member is its code; the message stands beside it."""
        made = str.__new__(cls, code)
        made._value_ = code
        made.says = says
        return made

    PATCHED = "HOSTILE_PATCHED", "it replaces functions of the program: {seen}"
    LAZY_RESULT = "HOSTILE_LAZY_RESULT", "its result is no plain tensor: {seen}"
    WRONG_FORM = "HOSTILE_WRONG_FORM", "its result has another form than the op's: {seen}"
    UNFINISHED = "HOSTILE_UNFINISHED", "it returns before its work is done: {seen}"
    STALE = "HOSTILE_STALE", "it returns what it computed for an earlier call: {seen}"
    EXPECTED_READ = "HOSTILE_EXPECTED_READ", "it returns the expected result that it found in the caller: {seen}"
    UNWRITTEN = "HOSTILE_UNWRITTEN", "it returns memory that it has not written: {seen}"
    PRECISION = "HOSTILE_PRECISION", "it computes in a narrower dtype than that of the call: {seen}"
    SKIPPED = "HOSTILE_SKIPPED", "it leaves out a part of the work: {seen}"
    NAN_HIDDEN = "HOSTILE_NAN_HIDDEN", "it hides NaN: {seen}"
    CHECKER = "HOSTILE_CHECKER", "it is right only where it sees that it is checked: {seen}"
    SIZES = "HOSTILE_SIZES", "it is right for the sizes of the conformance kit only: {seen}"
    DTYPES = "HOSTILE_DTYPES", "it is right for one dtype only: {seen}"
    VALUES = "HOSTILE_VALUES", "it is right for the numbers of the conformance kit only: {seen}"
    TIMED = "HOSTILE_TIMED", "it gives another result while it is timed: {seen}"
    CALL_COUNT = "HOSTILE_CALL_COUNT", "it is right in its first calls only: {seen}"
    INPUT_CHANGED = "HOSTILE_INPUT_CHANGED", "it changes its arguments: {seen}"
    ALIASED = "HOSTILE_ALIASED", "its result shares memory with {seen}"
    OVERRUN = "HOSTILE_OVERRUN", "it writes beyond the end of {seen}"
    STATE = "HOSTILE_STATE", "it leaves the process changed: {seen}"
    THREADS = "HOSTILE_THREADS", "it leaves threads behind: {seen}"
    CHANGED_LATER = "HOSTILE_CHANGED_LATER", "it changes tensors after it has returned: {seen}"
    ROOFLINE = "HOSTILE_ROOFLINE", "it is faster than the device can be: {seen}"
    WRONG = "HOSTILE_WRONG", "its result is wrong: {seen}"
    RAISED = "HOSTILE_RAISED", "it raises where the op is defined: {seen}"
    CRASHED = "HOSTILE_CRASHED", "it ends the process: {seen}"
    HUNG = "HOSTILE_HUNG", "it does not return: {seen}"
