"""Generation requests, from the body to the last byte of the answer."""

from samovar.router.generation.generation import GenerationEndpoint
from samovar.router.generation.recorder import open_recorder
from samovar.router.generation.response_sender import ResponseSender, cancel_on_disconnect
from samovar.router.generation.services import IngressServices, ModelTable, Readiness, ReadinessOfAll
from samovar.router.generation.stages import AnsweredTurn, AskedTurn, Context, PromptStage
from samovar.router.generation.usage import EndedTurn, TenantUsage, UsageBook, summed

__all__ = [
    "AnsweredTurn",
    "AskedTurn",
    "Context",
    "EndedTurn",
    "GenerationEndpoint",
    "IngressServices",
    "ModelTable",
    "PromptStage",
    "Readiness",
    "ReadinessOfAll",
    "ResponseSender",
    "TenantUsage",
    "UsageBook",
    "cancel_on_disconnect",
    "open_recorder",
    "summed",
]
