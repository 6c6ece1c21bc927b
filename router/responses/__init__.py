"""OpenAI's Responses API: its requests as chat requests, answers and events, and the responses it stores."""

from samovar.router.responses.body import bounded_responses_body
from samovar.router.responses.dialect import ResponsesDialect, ResponsesShape
from samovar.router.responses.request import ParsedResponse, ResponseNotFound, ResponsesParser
from samovar.router.responses.store import ResponseStore, StoredResponse, input_items

__all__ = [
    "ParsedResponse",
    "ResponseNotFound",
    "ResponseStore",
    "ResponsesDialect",
    "ResponsesParser",
    "ResponsesShape",
    "StoredResponse",
    "bounded_responses_body",
    "input_items",
]
