"""One answer, from the request's body to the last byte."""

from router.generation.generation import GenerationEndpoint, IngressServices
from router.generation.readiness import Readiness
from router.generation.recorder import open_recorder

__all__ = ["GenerationEndpoint", "IngressServices", "Readiness", "open_recorder"]
