"""Generation requests, from the body to the last byte of the answer."""

from router.generation.context import AskedTurn, Context, ContextSource, DocumentSource, WindowKeeper
from router.generation.generation import GenerationEndpoint
from router.generation.readiness import Readiness
from router.generation.recorder import open_recorder
from router.generation.response_sender import ResponseSender, cancel_on_disconnect
from router.generation.services import IngressServices
from router.generation.usage import EndedTurn, TenantUsage, UsageBook, summed

__all__ = [
    "AskedTurn",
    "Context",
    "ContextSource",
    "DocumentSource",
    "EndedTurn",
    "GenerationEndpoint",
    "IngressServices",
    "Readiness",
    "ResponseSender",
    "TenantUsage",
    "UsageBook",
    "WindowKeeper",
    "cancel_on_disconnect",
    "open_recorder",
    "summed",
]
