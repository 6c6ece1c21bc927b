"""OpenAI's Responses API: its requests as chat requests, answers and events, and the responses it stores."""

from router.responses.answers import ResponsesShape
from router.responses.body import bounded_responses_body
from router.responses.dialect import ResponsesDialect
from router.responses.items import input_items
from router.responses.request import ParsedResponse, ResponseNotFound, ResponsesParser
from router.responses.store import ResponseStore, StoredResponse

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
