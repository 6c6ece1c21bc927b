"""Generation requests, from the body to the last byte of the answer."""

from router.generation.generation import GenerationEndpoint
from router.generation.readiness import Readiness
from router.generation.recorder import open_recorder
from router.generation.response_sender import ResponseSender, cancel_on_disconnect
from router.generation.services import IngressServices
from router.generation.stages import AnsweredTurn, AskedTurn, Context, PromptStage
from router.generation.usage import EndedTurn, TenantUsage, UsageBook, summed

__all__ = [
    "AnsweredTurn",
    "AskedTurn",
    "Context",
    "EndedTurn",
    "GenerationEndpoint",
    "IngressServices",
    "PromptStage",
    "Readiness",
    "ResponseSender",
    "TenantUsage",
    "UsageBook",
    "cancel_on_disconnect",
    "open_recorder",
    "summed",
]
