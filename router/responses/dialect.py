"""/v1/responses as a dialect of the one way to generate."""

from __future__ import annotations

from functools import partial

from router.openai import AnswerHead, ApiError, Dialect, Json, ParsedRequest, json_bytes, rename
from router.responses.answers import ResponsesShape
from router.responses.request import FIELDS, ParsedResponse, ResponsesParser
from router.responses.store import ResponseStore, StoredResponse


class ResponsesDialect(Dialect):
    """OpenAI's /v1/responses; what is to be kept of answers goes into `store`."""

    id_prefix = "resp_"

    def __init__(self, parser: ResponsesParser, store: ResponseStore) -> None:
        self._parser = parser
        self._store = store

    def parse(self, body: bytes, tenant: str) -> ParsedResponse:
        """Return the request of a body. Raises `ApiError` naming the field at fault."""
        return self._parser.response(body, tenant)

    def shape(self, head: AnswerHead, request: ParsedRequest, tenant: str, session: bytes) -> ResponsesShape:
        """Return the shape of one answer."""
        assert isinstance(request, ParsedResponse)
        return ResponsesShape(head, request, partial(self._keep, request, tenant, session))

    def _keep(
        self, request: ParsedResponse, tenant: str, session: bytes, response: Json, answer: Json
    ) -> None:
        messages = json_bytes({"messages": [*request.said, answer]})
        items = tuple(item["id"] for item in response["output"])
        stored = StoredResponse(json_bytes(response), messages, session, items)
        self._store.put(tenant, response["id"], stored, forgets=request.forgets)

    def renamed(self, error: ApiError) -> ApiError:
        """Return an error with the names that the fields have here."""
        return rename(error, FIELDS)
