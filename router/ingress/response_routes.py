"""Routes of stored responses: reading one, or what it answered, and deleting it.

POST /v1/responses is a `GenerationEndpoint`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.auth import tenant_of
from router.erasure import Erasure
from router.generation import IngressServices
from router.openai import InvalidValue, cursor, no_such_cursor, shown, whole_number
from router.responses import ResponseNotFound, StoredResponse, input_items

ITEMS_DEFAULT, ITEMS_MAX = 20, 100
"""Items of a page, as of OpenAI's API."""


class ResponseRoutes:
    """Handlers of /v1/responses/{id}. They raise `ApiError`. A tenant sees its own responses only."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service

    async def one(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}: the response as it was sent."""
        stored = await self._stored(request)
        return Response(stored.response, media_type="application/json")

    async def items(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}/input_items: what the response answered, newest first."""
        params = request.query_params
        limit, after = whole_number(params, "limit", ITEMS_DEFAULT, ITEMS_MAX), cursor(params)
        order = params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidValue("order", f"order={shown(order)} is neither asc nor desc.")
        items = input_items(request.path_params["response_id"], await self._stored(request))
        if order == "desc":
            items.reverse()
        if after:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise no_such_cursor(after)
            items = items[places[0] + 1 :]
        page = items[:limit]
        ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return JSONResponse({"object": "list", "data": page, "has_more": len(items) > limit, **ids})

    async def _stored(self, request: Request) -> StoredResponse:
        response_id, tenant = request.path_params["response_id"], tenant_of(request.scope)
        responses = self._service.responses
        stored = responses.get(tenant, response_id)
        if stored is None and await responses.fetch(tenant, response_id):
            stored = responses.get(tenant, response_id)
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/responses/{id}. Its blocks stay until the session is deleted."""
        response_id, tenant = request.path_params["response_id"], tenant_of(request.scope)
        (cleared,) = await self._service.clears.erase(Erasure("response", tenant, (response_id,)))
        if not cleared["responses"]:
            raise ResponseNotFound(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
