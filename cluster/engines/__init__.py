"""Environments that other engines live in, beside Samovar's own: made, found, checked, removed."""

from samovar.cluster.engines.interpreter import VllmPython, has_vllm, vllm_python

__all__ = ["VllmPython", "has_vllm", "vllm_python"]
