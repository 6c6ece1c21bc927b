"""Tells what an error of a device means: memory is short, the device is lost, or one computation failed."""

from __future__ import annotations

_SHORT = ("_STATUS_ALLOC_FAILED", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory")
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")
"""In the messages of errors that torch releases before 2.8, and other libraries, raise as `RuntimeError`."""


_OF_RECORDING = "captur"
"""In the message of every error of a recording (`cudaErrorStreamCapture*`): it ends, the context does not."""


REASON_CHARS_MAX = 300


def in_a_line(error: Exception, chars_max: int = REASON_CHARS_MAX) -> str:
    """Return what went wrong, for a sentence that people read."""
    return f"{type(error).__name__}: {str(error).strip()[:chars_max]}"


def is_memory_short(error: BaseException) -> bool:
    """Return whether the device's memory did not suffice: what takes less of it may still be computed.

    Libraries allocate beside torch, and say so in their own words. Errors that only quote such a one, as
    that of ranks which no longer agree, are something else.
    """
    import torch  # here, as in `device.py`

    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_theirs = type(error) is RuntimeError or isinstance(error, torch.AcceleratorError)
    return is_theirs and any(mark in str(error) for mark in _SHORT)


def is_device_lost(error: BaseException) -> bool:
    """Return whether the device's context is lost: every later call fails, whatever it is asked.

    All errors of CUDA are such, except that memory is short, and what cannot be recorded as a graph.
    """
    import torch

    if is_memory_short(error) or _OF_RECORDING in str(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _LOST)
