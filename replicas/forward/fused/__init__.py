"""A forward pass of few launches, for GPUs: a kernel of our own between each two matrix products."""

from samovar.replicas.forward.fused.step import FusedForward

__all__ = ["FusedForward"]
