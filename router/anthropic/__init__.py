"""Anthropic's Messages API: its requests as chat requests, answers and errors in its shapes."""

from samovar.router.anthropic.body import bounded_messages_body
from samovar.router.anthropic.dialect import MessagesDialect, MessagesShape, messages_error, models_page
from samovar.router.anthropic.request import MessagesParser, ParsedMessages

__all__ = [
    "MessagesDialect",
    "MessagesParser",
    "MessagesShape",
    "ParsedMessages",
    "bounded_messages_body",
    "messages_error",
    "models_page",
]
