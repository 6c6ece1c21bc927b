"""The HTTP API of one ingress as an ASGI app: which path leads where.

Pure of Ray: replicas are a `ReplicaClient`. No OpenAPI pages, no redirects, no FastAPI validation
(bodies are parsed by `parse_request.py`), and every failure has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.settings import Settings
from router import load_book
from router.auth import ADMIN, Authenticator, Caller, require_admin
from router.cache_api import CacheRoutes
from router.errors import ApiError, MethodNotAllowed, ModelNotFound, RouteNotFound, retry_after_header
from router.front_door import HINT_ROUTE, SESSIONS_ROUTE, FrontDoor
from router.generation import GenerationEndpoint, Service
from router.limits import ConcurrencyLimit
from router.local_hosts import LocalHosts
from router.metrics import CONTENT_TYPE, Metrics
from router.prompt import PromptBuilder
from router.readiness import Readiness
from router.replica_client import ReplicaClient
from router.session_directory import SessionDirectory
from router.sessions_api import SessionRoutes
from router.turn_recorder import open_recorder

DISTRIBUTION = "samovar"
NODE_CHARS = 8
"""Of a node's id in a message."""


def build_service(
    *,
    settings: Settings,
    client: ReplicaClient,
    prompts: PromptBuilder,
    model_name: str,
    context_tokens_max: int,
    secret: bytes,
    model: str = "",
    waits: bool = False,
    directory: SessionDirectory | None = None,
) -> Service:
    """The parts of one ingress. `secret`: see `auth.server_secret`; `directory`: by default its own only.

    `model`: fingerprint of the only model that may answer. `waits`: start only when a replica is seen.
    """
    start_s = settings.server.start_timeout_s if waits else 0.0
    return Service(
        settings=settings,
        client=client,
        prompts=prompts,
        model_name=model_name,
        context_tokens_configured=context_tokens_max,
        secret=secret,
        model=model,
        readiness=Readiness(client, settings.cluster.replicas, start_s=start_s),
        metrics=Metrics(),
        concurrency=ConcurrencyLimit(settings.limits),
        reads=ConcurrencyLimit(settings.limits, "reads_per_key"),
        directory=directory or SessionDirectory(None, load_book.BOOK, settings.router),
        recorder=open_recorder(settings),
    )


def build_api(service: Service) -> FastAPI:
    """The app. Its lifespan polls the replicas; without one /health says `loading` for ever."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.readiness.start()
        service.directory.start()
        yield
        await service.directory.stop()
        if service.recorder is not None:
            await asyncio.to_thread(service.recorder.close)
        await service.readiness.stop()
        service.prompts.close()

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    simple, cache, sessions = _SimpleRoutes(service), CacheRoutes(service), SessionRoutes(service)
    routes = [
        _generation_route("/v1/chat/completions", GenerationEndpoint("chat", service)),
        _generation_route("/v1/completions", GenerationEndpoint("completion", service)),
        Route("/v1/sessions", sessions.all),
        Route(HINT_ROUTE, sessions.hint, methods=["POST"]),
        Route(SESSIONS_ROUTE, cache.session, methods=["DELETE"]),
        Route(SESSIONS_ROUTE, sessions.one),
        Route("/v1/cache", cache.own, methods=["DELETE"]),
        Route("/cache/clear", cache.any, methods=["POST"]),
        Route("/reset_prefix_cache", cache.any, methods=["POST"]),
        Route("/cache/stats", cache.stats),
        Route("/v1/models", simple.models),
        Route("/v1/models/{model_id:path}", simple.model),
        Route("/health", simple.health),
        Route("/metrics", simple.metrics),
        Route("/version", simple.version),
    ]
    app.router.routes.extend(routes)
    app.add_exception_handler(HTTPException, _http_exception)
    settings = service.settings
    app.add_middleware(
        FrontDoor,
        authenticator=Authenticator(settings.auth),
        hosts=None if settings.auth.api_keys else LocalHosts(settings.server.allowed_hosts),
        metrics=service.metrics,
        routes=frozenset(route.path for route in routes),
    )
    return app


class _SimpleRoutes:
    """The routes that do not generate."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model_id"]
        if asked != self._service.model_name:
            raise ModelNotFound(asked, self._service.model_name)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        readiness = self._service.readiness
        if readiness.state == "ok":
            return JSONResponse({"status": "ok", "replicas": len(readiness.replicas), **_detail(readiness)})
        headers = retry_after_header(self._service.settings.limits.retry_after_s)
        return JSONResponse({"status": readiness.state}, status_code=503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        if self._service.settings.auth.api_keys:  # it tells of all tenants: whose tokens, and how many
            require_admin(request.scope)
        client, directory = self._service.client, self._service.directory
        caller: Caller = request.scope["state"]["caller"]
        with self._service.reads.lease(caller.tenant or ADMIN):
            told = await asyncio.gather(client.stats(), client.cache_stats(), client.tiers_up())
            self._service.metrics.set_replicas(*told)
        self._service.metrics.set_sessions(*directory.counts())
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version()})

    def _card(self) -> dict[str, object]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": DISTRIBUTION,
            "max_model_len": self._service.context_tokens_max,
        }


def _detail(readiness: Readiness) -> dict[str, str]:
    """What is wrong, although requests are served: a load balancer goes by the status alone."""
    nodes = readiness.nodes_without_tiers
    if not nodes:
        return {}
    named = ", ".join(node[:NODE_CHARS] for node in nodes)
    return {"detail": f"no tier actor answers on node {named}: what was cached there is computed again"}


def version() -> str:
    """The installed version, "unknown" when Samovar runs from a bare checkout."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _generation_route(path: str, endpoint: GenerationEndpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _http_exception(request: Request, refused: Exception) -> Response:
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(refused, HTTPException)
    error: ApiError
    if refused.status_code == 405:
        error = MethodNotAllowed(request.method, (refused.headers or {}).get("Allow", "GET"))
    else:
        error = RouteNotFound(request.method, request.url.path)
    headers = {"content-type": "application/json", **error.headers}
    return Response(error.body_bytes(), error.status, headers)
