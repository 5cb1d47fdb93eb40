"""Errors after which a device answers nothing more to this process, told apart from those a fallback survives.

A CUDA kernel that touches memory it must not breaks the context it ran in: every later call of that process on that
device fails with the same error, whoever makes it. Running out of memory, an invalid launch or a missing image do not.
Errors of a GPU arrive late, at some later call: unless the process waited for the kernel (as it does after the first
run of each), the kernel that raised is the nearest suspect, not a proven culprit.
"""

from __future__ import annotations

import re

from layerzero.reasons import Reason, ReasonCode, reason

# How a RuntimeError of torch's CPU allocator, or of a C++ library, says that there is no memory left.
NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate memory")

# CUDA's own numbers (HIP keeps the same ones) with the words of its messages and the names of its constants.
POISONED: dict[int, tuple[str, ...]] = {
    700: ("an illegal memory access was encountered", "illegal_address", "illegaladdress"),
    702: ("the launch timed out and was terminated", "launch_timeout", "launchtimeout"),
    710: ("device-side assert triggered", "error_assert", "errorassert"),
    714: ("hardware stack error", "hardware_stack_error", "hardwarestackerror"),
    715: ("an illegal instruction was encountered", "illegal_instruction", "illegalinstruction"),
    716: ("misaligned address", "misaligned_address", "misalignedaddress"),
    717: ("operation not supported on global/shared address space", "invalid_address_space", "invalidaddressspace"),
    718: ("invalid program counter", "invalid_pc", "invalidpc"),
    719: ("unspecified launch failure", "launch_failed", "launchfailure"),
}
LOST: dict[int, tuple[str, ...]] = {
    46: ("device(s) is/are busy or unavailable", "devices_unavailable", "devicesunavailable"),
    214: ("uncorrectable ecc error encountered", "ecc_uncorrectable", "eccuncorrectable"),
    220: ("uncorrectable nvlink error", "nvlink_uncorrectable", "nvlinkuncorrectable"),
    709: ("context is destroyed", "context_is_destroyed", "contextisdestroyed"),
    999: ("cuda error: unknown error", "hip error: unknown error", "cuda_error_unknown", "cudaerrorunknown"),
}
_BY_NUMBER = dict.fromkeys(POISONED, ReasonCode.DEVICE_POISONED) | dict.fromkeys(LOST, ReasonCode.DEVICE_LOST)
# Other runtimes have one word for all of it.
_OTHER = ("device_lost", "device lost", "gpu is lost", "device removed", "gpu has fallen off the bus")
_SPOKEN_BY = re.compile(r"cuda|hip|triton|cudnn|cublas|xpu|sycl|level.?zero|ur_result|pi_error|nvml|gpu", re.IGNORECASE)
_MOST = 300


def sticky(error: BaseException, device: str = "the device") -> Reason | None:
    """DEVICE_POISONED or DEVICE_LOST for an error no later call on the device survives; None for any other."""
    for item in (error, error.__cause__):
        if item is None or not isinstance(item, Exception):
            continue
        number = getattr(item, "error_code", None)  # torch.AcceleratorError carries CUDA's own
        found = (_BY_NUMBER.get(number) if isinstance(number, int) else None) or _by_words(str(item))
        if found is not None:
            words = f"{type(item).__name__}: {' '.join(str(item).split())}"[:_MOST]
            poisoned = found is ReasonCode.DEVICE_POISONED
            return reason(found, words, device) if poisoned else reason(found, device, detail=words)
    return None


def _by_words(text: str) -> ReasonCode | None:
    if not _SPOKEN_BY.search(text):
        return None  # somebody's own error that happens to use such words
    low = text.lower()
    if any(word in low for words in POISONED.values() for word in words):
        return ReasonCode.DEVICE_POISONED
    if any(word in low for word in (*_OTHER, *(word for words in LOST.values() for word in words))):
        return ReasonCode.DEVICE_LOST
    return None
