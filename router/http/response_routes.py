"""Routes of stored responses: reading and deleting one. POST /v1/responses is a `GenerationEndpoint`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.auth import tenant_of
from router.responses import ResponseNotFound, ResponseStore


class ResponseRoutes:
    """Handlers of /v1/responses/{id}. They raise `ApiError`. A tenant sees its own responses only."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def one(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}: the response as it was sent."""
        response_id = request.path_params["response_id"]
        stored = self._store.get(tenant_of(request.scope), response_id)
        if stored is None:
            raise ResponseNotFound(response_id)
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/responses/{id}. Its blocks stay until the session is deleted."""
        response_id = request.path_params["response_id"]
        if not self._store.delete(tenant_of(request.scope), response_id):
            raise ResponseNotFound(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
