"""A step compiled for this CPU: linear layers and paged attention in C++, exact by construction."""

from replicas.native.native_step import NativeForward, NativeStep, NotNative, why_not_native

__all__ = ["NativeForward", "NativeStep", "NotNative", "why_not_native"]
