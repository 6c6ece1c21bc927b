"""Generation requests, from the body to the last byte of the answer."""

from router.generation.generation import GenerationEndpoint, IngressServices
from router.generation.readiness import Readiness
from router.generation.recorder import open_recorder

__all__ = ["GenerationEndpoint", "IngressServices", "Readiness", "open_recorder"]
