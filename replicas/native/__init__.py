"""A step compiled for this CPU: linear layers and paged attention in C++, exact by construction."""

from samovar.replicas.native.build import (
    build_library,
    pair_variant_here,
    variant_here,
)
from samovar.replicas.native.native_step import (
    BITS_VERSION,
    PAIR_BITS_VERSION,
    NativeForward,
    NativeStep,
    NotNative,
    numbers_digest,
    packed_bytes,
    why_not_native,
)

__all__ = [
    "BITS_VERSION",
    "PAIR_BITS_VERSION",
    "NativeForward",
    "NativeStep",
    "NotNative",
    "build_library",
    "numbers_digest",
    "packed_bytes",
    "pair_variant_here",
    "variant_here",
    "why_not_native",
]
