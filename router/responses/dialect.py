"""/v1/responses as a dialect of the one way to generate."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from samovar.router.openai import AnswerHead, ApiError, Dialect, Json, ParsedRequest, json_bytes, rename
from samovar.router.responses.answers import ResponsesShape
from samovar.router.responses.request import FIELDS, ParsedResponse, ResponseNotFound, ResponsesParser
from samovar.router.responses.store import StoredResponse

FETCHES_MAX = 64
"""Responses that one request may have fetched, by their ids or by those of their items."""


class SharedStore(Protocol):
    """Responses that other ingresses find too."""

    def put(self, tenant: str, response_id: str, stored: StoredResponse, *, forgets: int) -> bool:
        """Keep a response; `tell` shares it. See `ResponseStore.put`."""
        ...

    async def tell(self) -> None:
        """Share what was put."""
        ...

    async def fetch(self, tenant: str, wanted_id: str) -> bool:
        """Take over the response of that id, or with an item of that id; return whether there is one."""
        ...


class ResponsesDialect(Dialect):
    """OpenAI's /v1/responses; what is to be kept of answers goes into `store`."""

    id_prefix = "resp_"

    def __init__(self, parser: ResponsesParser, store: SharedStore) -> None:
        self._parser = parser
        self._store = store

    async def parse(self, body: bytes, tenant: str) -> ParsedResponse:
        """Return the request of a body; responses that it names are fetched.

        Raises `ApiError` naming the field at fault.
        """
        for _ in range(FETCHES_MAX):
            try:
                return self._parser.response(body, tenant)
            except ResponseNotFound as missing:
                if not await self._store.fetch(tenant, missing.wanted_id):
                    raise
        return self._parser.response(body, tenant)

    async def over(self) -> None:
        """Share the responses that were kept, before the client can name them."""
        await self._store.tell()

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
