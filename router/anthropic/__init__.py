"""Anthropic's Messages API: its requests as chat requests, answers and errors in its shapes."""

from router.anthropic.answers import MessagesShape
from router.anthropic.body import bounded_messages_body
from router.anthropic.dialect import MessagesDialect, models_page
from router.anthropic.errors import messages_error
from router.anthropic.request import MessagesParser, ParsedMessages

__all__ = [
    "MessagesDialect",
    "MessagesParser",
    "MessagesShape",
    "ParsedMessages",
    "bounded_messages_body",
    "messages_error",
    "models_page",
]
