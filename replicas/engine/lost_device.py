"""Tells errors after which a device cannot be used any more from those that end one computation."""

from __future__ import annotations

import torch

_MARKS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side assert")
"""In the messages of errors that torch releases before 2.8, and other libraries, raise as `RuntimeError`."""


def is_device_lost(error: BaseException) -> bool:
    """Return whether the device's context is lost: every later call fails, whatever it is asked.

    All errors of CUDA are such, except that memory is short.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS)
