"""Routes of stored responses: reading and deleting one. POST /v1/responses is a `GenerationEndpoint`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.auth import tenant_of
from router.erasure import Erasure
from router.generation import IngressServices
from router.responses import ResponseNotFound


class ResponseRoutes:
    """Handlers of /v1/responses/{id}. They raise `ApiError`. A tenant sees its own responses only."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service

    async def one(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}: the response as it was sent."""
        response_id, tenant = request.path_params["response_id"], tenant_of(request.scope)
        responses = self._service.responses
        stored = responses.get(tenant, response_id)
        if stored is None and await responses.fetch(tenant, response_id):
            stored = responses.get(tenant, response_id)
        if stored is None:
            raise ResponseNotFound(response_id)
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/responses/{id}. Its blocks stay until the session is deleted."""
        response_id, tenant = request.path_params["response_id"], tenant_of(request.scope)
        (cleared,) = await self._service.clears.erase(Erasure("response", tenant, (response_id,)))
        if not cleared["responses"]:
            raise ResponseNotFound(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
