"""The HTTP API of one ingress as an ASGI app, and its Ray Serve deployment class.

The API itself is independent of Ray: replicas are a `ReplicaClient`. No pages of FastAPI's, no redirects, no
FastAPI validation (bodies are parsed by `openai/parse.py`); every failure has OpenAI's error shape. The
OpenAPI document is `operations.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from samovar.cache_tiers.actors import rpc
from samovar.cache_tiers.blocks import TIERS, tenant_tag
from samovar.cache_tiers.sessions import ItemBounds, session_actor
from samovar.configs.imports import collector_paused
from samovar.configs.optional_sections import INGRESSES_MAX
from samovar.configs.settings import Settings
from samovar.configs.telemetry import Tracer, open_tracer, set_up_logs
from samovar.replicas.links import Links, open_inlet
from samovar.replicas.messages import REPLICA_DEPLOYMENT
from samovar.replicas.model import ModelCard, describe_model, ensure_model, leave_torch_out, load_tokenizer
from samovar.router.anthropic import MessagesDialect, MessagesParser, messages_error, models_page
from samovar.router.auth import (
    ADMIN,
    GREETING_PATH,
    PAGE_PATH,
    Authenticator,
    Caller,
    ConcurrencyLimit,
    require_admin,
    server_secret,
    tenant_salt,
)
from samovar.router.erasure import Erasures, UnfinishedFile
from samovar.router.generation import (
    GenerationEndpoint,
    IngressServices,
    PromptStage,
    Readiness,
    open_recorder,
)
from samovar.router.ingress.middleware import (
    HINT_ROUTE,
    PAGE_ROUTE,
    RESPONSE_ROUTE,
    SESSIONS_ROUTE,
    AuthMiddleware,
    LocalHosts,
)
from samovar.router.ingress.operations import OPENAPI_ROUTE, methods_of, openapi_document
from samovar.router.ingress.operator_routes import CacheRoutes, SessionRoutes
from samovar.router.ingress.places import (
    add_places,
    forget_entries_here,
    forget_here,
    forget_made,
    forget_sessions,
    unfinished_dir,
)
from samovar.router.ingress.routes import CorsOrigins, ResponseRoutes, TokenizerRoutes
from samovar.router.ingress.taker import RequestTaker
from samovar.router.ingresses import (
    Ingresses,
    IngressShares,
    KnownSessions,
    SharedResponses,
    ingress_count,
    merged,
    ray_ingresses,
)
from samovar.router.metrics import CONTENT_TYPE, Metrics
from samovar.router.observe.live import LiveHub, LiveRoutes, PageFiles
from samovar.router.openai import (
    ApiError,
    ChatDialect,
    CompletionDialect,
    MethodNotAllowed,
    RequestParser,
    RouteNotFound,
    json_bytes,
    retry_after_header,
)
from samovar.router.prompt import PromptBuilder
from samovar.router.proxy import are_proxies_guarded
from samovar.router.responses import ResponsesDialect, ResponsesParser
from samovar.router.routing import ReplicaClient, SessionDirectory, load_tracker, ray_clients

DISTRIBUTION = "samovar"
KEPT_FILE = "replies.sqlite"
"""Beside the nvme tier's records."""
TENANTS_MAX = 4096
"""Tenants whose tags are remembered: a tag is an HMAC."""
MESSAGES_PATH = "/v1/messages"
SYNCS = 4
"""Reports of all ingresses, after which the share of each is known."""
NODE_CHARS = 8
"""Characters of a node's id shown in a message."""


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
    generation: Mapping[str, float] | None = None,
    commit: str | None = None,
    tracer: Tracer | None = None,
    ingresses: Ingresses | None = None,
    first_s: float = 0.0,
) -> IngressServices:
    """Create the parts of one ingress.

    `secret`: see `auth.server_secret`. `directory`: by default a local one without link. `model`:
    fingerprint of the only model that may answer. `waits`: start only when a replica is seen.
    `generation`: the model's own defaults, used unless the settings say no. `commit`: of the hub.
    `tracer`: None: requests are not traced. `ingresses`: all ingresses; None: there is no other. `first_s`:
    how long the start waits for a replica if it need not see one.
    """
    TIERS.take_up(settings.tiers.more)
    start_s = settings.server.start_timeout_s if waits else first_s
    readiness = Readiness(
        client,
        settings.cluster.replicas,
        start_s=start_s,
        must_see=waits,
        known=lambda: load_tracker.BOOK.nodes,
    )
    directory = directory or SessionDirectory(None, load_tracker.BOOK, settings.router)
    concurrency = ConcurrencyLimit(settings.limits, has_keys=bool(settings.auth.api_keys))
    tag_of = lru_cache(TENANTS_MAX)(partial(tenant_tag, secret))
    shares = IngressShares(
        directory.ingress,
        None if ingresses is None else directory.link,
        concurrency,
        tag_of,
        ingresses_at_start=ingress_count(settings) or INGRESSES_MAX,
        wait_s=settings.ingress.wait_s,
        unsettled_s=settings.ingress.silent_s + SYNCS * settings.router.sync_s,
    )
    directory.report = None if ingresses is None else shares
    metrics, stages = Metrics(), list[PromptStage]()
    has_entries: dict[str, Any] = {}
    if settings.knowledge.enabled:
        from samovar.router.context.documents import (  # who has it off does not pay for its imports
            Front,
            open_documents,
        )
        from samovar.router.ingress.knowledge_routes import ServedText, open_knowledge

        knowledge = open_knowledge(settings, prompts, context_tokens_max)
        text = ServedText(prompts, context_tokens_max)
        front = Front(readiness, context_tokens_max, lambda: concurrency.open_total)
        documents = open_documents(settings, knowledge, text, client, prompts, directory, front, secret)
        stages += [documents, knowledge]  # documents stand in front, alike for all who name them
        has_entries = {"has_entries": knowledge.has}
    if settings.compaction.enabled:
        from samovar.router.context.compaction import (  # who has it off does not pay for its imports
            Served,
            open_compaction,
        )

        own = open_compaction(
            settings,
            prompts=prompts,
            client=client,
            directory=directory,
            served=Served(secret, model),
            metrics=metrics,
            window_tokens=lambda: min(
                [context_tokens_max, *(one.context_tokens_max for one in readiness.replicas)]
            ),
            **has_entries,
        )
        stages.append(own)  # last: it makes room for what the others have put in
    service = IngressServices(
        settings=settings,
        client=client,
        prompts=prompts,
        model_name=model_name,
        context_tokens_configured=context_tokens_max,
        secret=secret,
        model=model,
        readiness=readiness,
        metrics=metrics,
        concurrency=concurrency,
        reads=ConcurrencyLimit(settings.limits, "reads_per_key"),
        directory=directory,
        shares=shares,
        known=KnownSessions(prompts.replies, directory, settings.ingress),
        responses=SharedResponses(
            settings.limits.responses_max,
            settings.limits.responses_bytes_max,
            directory=directory,
            settings=settings.ingress,
            tag_of=tag_of,
            salt_of=partial(tenant_salt, secret, cache_salt=None),
        ),
        ingresses=ingresses,
        recorder=open_recorder(settings),
        generation=(generation or {}) if settings.model.generation_config == "auto" else {},
        commit=commit,
        tracer=tracer,
        stages=tuple(stages),
        adapters=settings.engine.vllm.adapters if settings.engine.kind == "vllm" else (),
        clears=Erasures(UnfinishedFile(unfinished_dir(settings, secret)), settings.limits.retry_after_s),
    )
    add_places(service)
    return service


def build_api(service: IngressServices, taker: RequestTaker | None = None) -> FastAPI:
    """Create the app. Its lifespan polls the replicas; without it /health says `loading` forever.

    `taker`: of requests that come over links, which Serve does not count: the lifespan's end waits for them.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        until_s = asyncio.get_running_loop().time() + settings.ingress.start_wait_s
        service.directory.start()  # first: a new directory knows of all ingresses when the replicas are up
        await service.readiness.start()
        await service.shares.settled(until_s)
        await service.clears.start()
        for stage in service.stages:
            stage.start()
        yield
        if taker is not None:
            taker.refuse()
        await hub.stop()  # its streams have no end
        if taker is not None:
            await taker.finish(limits.request_timeout_s)
        await service.clears.stop()
        for stage in service.stages:
            await stage.stop()
        await service.directory.stop()
        if service.recorder is not None:
            await asyncio.to_thread(service.recorder.close)
        await service.readiness.stop()
        service.prompts.close()
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.close)
        for stage in service.stages:
            await asyncio.to_thread(stage.close)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    settings, limits = service.settings, service.settings.limits
    stored = service.responses
    parser = RequestParser(limits, service.context_tokens_configured, service.generation)
    variables = service.prompts.template.variables
    messages = MessagesParser(parser, limits, variables)
    simple, cache, sessions = _SimpleRoutes(service), CacheRoutes(service), SessionRoutes(service)
    tokenizer, responses = TokenizerRoutes(service, parser, messages), ResponseRoutes(service)
    hub = LiveHub(service)
    live, page = LiveRoutes(service, hub), PageFiles()
    messages_api = MessagesDialect(messages, service.prompts.vocabulary.text)
    responses_api = ResponsesDialect(ResponsesParser(parser, limits, stored), stored)
    routes = [
        _generation_route("/v1/chat/completions", GenerationEndpoint(ChatDialect(parser), service)),
        _generation_route("/v1/completions", GenerationEndpoint(CompletionDialect(parser), service)),
        _generation_route(MESSAGES_PATH, GenerationEndpoint(messages_api, service)),
        _generation_route("/v1/responses", GenerationEndpoint(responses_api, service)),
        Route(RESPONSE_ROUTE, responses.one),
        Route(f"{RESPONSE_ROUTE}/input_items", responses.items),
        Route(RESPONSE_ROUTE, responses.delete, methods=["DELETE"]),
        Route(f"{MESSAGES_PATH}/count_tokens", tokenizer.count, methods=["POST"]),
        Route("/v1/sessions", sessions.all),
        Route(HINT_ROUTE, sessions.hint, methods=["POST"]),
        Route(SESSIONS_ROUTE, cache.session, methods=["DELETE"]),
        Route(SESSIONS_ROUTE, sessions.one),
        Route("/v1/usage", live.usage),
        Route("/v1/cache", cache.own, methods=["DELETE"]),
        Route("/cache/clear", cache.any, methods=["POST"]),
        Route("/reset_prefix_cache", cache.any, methods=["POST"]),
        Route("/cache/stats", cache.stats),
        Route("/v1/models", simple.models),
        Route("/v1/models/{model_id:path}", simple.model),
        Route("/tokenize", tokenizer.tokenize, methods=["POST"]),
        Route("/detokenize", tokenizer.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer.info),
        Route("/v1/embeddings", simple.embeddings, methods=["POST"]),
        Route("/health", simple.health),
        Route("/metrics", simple.metrics),
        Route("/version", simple.version),
        Route(GREETING_PATH, simple.hello),
        Route(OPENAPI_ROUTE, simple.openapi),
    ]
    if settings.server.page:
        routes += [
            Route("/v1/live", live, methods=["GET"]),
            Route(PAGE_PATH, page.index),
            Route(PAGE_ROUTE, page.one),
        ]
    if settings.knowledge.enabled:
        from samovar.router.context.documents import document_routes
        from samovar.router.ingress.knowledge_routes import knowledge_routes

        routes += knowledge_routes(service)
        clears = service.clears
        routes += document_routes(service, partial(forget_sessions, clears), partial(forget_made, clears))
    app.router.routes.extend(routes)
    app.state.live = hub
    app.add_exception_handler(HTTPException, _http_exception)
    origins = settings.server.cors_origins
    app.add_middleware(
        AuthMiddleware,
        authenticator=Authenticator(settings.auth, has_page=settings.server.page),
        hosts=None if settings.auth.api_keys else LocalHosts(settings.server.allowed_hosts, origins),
        metrics=service.metrics,
        routes=frozenset(route.path for route in routes),
        errors={MESSAGES_PATH: messages_error},
        tracer=service.tracer,
    )
    if origins:  # outermost: refusals must be readable too
        app.add_middleware(CorsOrigins, origins=origins)
    return app


class _SimpleRoutes:
    """Handlers of the routes that do not generate."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service
        self._created = int(time.time())
        self._document: bytes | None = None

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._service.model_names]
        if "anthropic-version" in request.headers:
            return JSONResponse(models_page(cards))
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model_id"]
        if not asked:  # /v1/models/
            return await self.models(request)
        self._service.refuse_other_model(asked)
        return JSONResponse(self._card(asked))

    async def hello(self, request: Request) -> Response:
        """Handle GET and HEAD /api/hello."""
        return Response(b"", 200)

    async def health(self, request: Request) -> Response:
        readiness = self._service.readiness
        if readiness.state == "ok":
            return JSONResponse({"status": "ok", "replicas": len(readiness.replicas), **_detail(readiness)})
        headers = retry_after_header(self._service.settings.limits.retry_after_s)
        return JSONResponse({"status": readiness.state}, status_code=503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        if self._service.settings.auth.api_keys:  # they reveal the token counts of all tenants
            require_admin(request.scope)
        client, directory = self._service.client, self._service.directory
        caller: Caller = request.scope["state"]["caller"]
        with self._service.reads.lease(caller.tenant or ADMIN):
            told = await asyncio.gather(client.stats(), client.cache_stats(), client.tiers_up())
            self._service.metrics.set_replicas(*told)
        self._service.metrics.set_sessions(*directory.counts(), self._service.prompts.salts_changed)
        text, ingresses = self._service.metrics.text(), self._service.ingresses
        if ingresses is not None:
            text = await asyncio.to_thread(merged, text, await ingresses.metrics())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def embeddings(self, request: Request) -> Response:
        message = f"{self._service.model_name!r} is a chat model: this server makes no embeddings."
        raise ApiError(400, message, param="model", code="embeddings_not_served")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version()})

    async def openapi(self, request: Request) -> Response:
        if self._document is None:  # not on the event loop: a tenth of a second
            limits, served = self._service.settings.limits, methods_of(request.app.routes)
            self._document = await asyncio.to_thread(
                lambda: json_bytes(openapi_document(limits, version(), served))
            )
        return Response(self._document, media_type="application/json")

    def _kind(self, name: str) -> str:
        """Return what the served model is to another name: an adapter's base, or what stands behind it."""
        return "parent" if name in self._service.adapters else "root"

    def _card(self, name: str) -> dict[str, object]:
        defaults = self._service.generation
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": DISTRIBUTION,
            "max_model_len": self._service.context_tokens_max,
            **({} if name == self._service.model_name else {self._kind(name): self._service.model_name}),
            **({} if self._service.commit is None else {"revision": self._service.commit}),
            **({"generation_defaults": defaults} if defaults else {}),
        }


def _detail(readiness: Readiness) -> dict[str, str]:
    """Return what is wrong although requests are served; load balancers use the status alone."""
    nodes = readiness.nodes_without_tiers
    if not nodes:
        return {}
    named = ", ".join(node[:NODE_CHARS] for node in nodes)
    return {"detail": f"no tier actor answers on node {named}: blocks cached there are recomputed"}


def version() -> str:
    """Return the installed version, "unknown" if Samovar runs from a bare checkout."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _generation_route(path: str, endpoint: GenerationEndpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _http_exception(request: Request, refused: Exception) -> Response:
    """Raise Starlette's own refusals, unknown path and unknown method, as errors of the API."""
    assert isinstance(refused, HTTPException)
    if refused.status_code == 405:
        raise MethodNotAllowed(request.method, (refused.headers or {}).get("Allow", "GET"))
    raise RouteNotFound(request.method, request.url.path)


__all__ = ["Ingress", "build_api", "build_service", "open_prompts"]


def open_prompts(settings: Settings, model_dir: str | None) -> tuple[ModelCard, PromptBuilder]:
    """Inspect the served model and return it with the builder of its prompts. Raises `ModelRefused`."""
    path = Path(model_dir) if model_dir else ensure_model(settings.model)
    card = describe_model(settings, path)
    prompts = PromptBuilder(
        load_tokenizer(card.path),
        vocab_tokens=card.vocab,
        context_tokens_max=card.context_tokens(settings.model.context_tokens_max),
        eos_token_ids=card.eos_token_ids,
        settings=settings,
    )
    return card, prompts


def item_bounds(settings: Settings) -> ItemBounds:
    """Return how much of what ingresses share is kept; on disk if blocks are."""
    nvme = settings.tiers.nvme
    path = settings.nvme_dir / KEPT_FILE if settings.tiers.enabled and nvme.bytes_max > 0 else None
    return ItemBounds(settings.ingress.kept_bytes_max, settings.ingress.replies_per_session, path)


def _all_ingresses(settings: Settings) -> Ingresses | None:
    """Return all ingresses of the deployment that this process belongs to; None if there is only one."""
    if ingress_count(settings) == 1:
        return None
    own = serve.get_replica_context()
    return ray_ingresses.RayIngresses(serve.get_deployment_handle(own.deployment, own.app_name))


@serve.ingress()
class Ingress:
    """The Serve deployment class: one process that parses, tokenises and streams.

    A thin shell: loads the tokenizer, builds the API over the replicas' handle, and can drain. The number
    and placement of ingresses are decided in `cluster/serve/app.py`. `model_dir`: the model that the
    replicas of `model_app` serve; None: that of `settings.model`. `waits`: not up before it has seen a
    replica.

    With more than one ingress `settings.auth.server_secret` must be set, the same for all. The served name
    is `settings.model.served_name` or the model's own; the context is the model's, or
    `settings.model.context_tokens_max` if that is smaller. Raises `ModelRefused`.
    """

    def __init__(
        self, settings: Settings, model_dir: str | None, model_app: str, waits: bool = False
    ) -> None:
        set_up_logs(settings.telemetry)
        tracer = open_tracer(settings.telemetry, "ingress")
        handle = serve.get_deployment_handle(REPLICA_DEPLOYMENT, model_app, _check_exists=False)
        links = settings.cluster.links
        calls_max = min(links.calls_max, 4 * settings.limits.concurrent_total)  # as Serve's own bound
        links = links.model_copy(update={"calls_max": calls_max})
        inlet = open_inlet(links, settings.engine.coalesce_ms / 1000)
        self._taker = None
        if inlet is not None and are_proxies_guarded(os.environ):
            self._taker = RequestTaker(inlet, settings.router.heartbeat_s)
        with collector_paused():  # of transformers, and a vocabulary
            leave_torch_out()
            card, prompts = open_prompts(settings, model_dir)
        self._service = build_service(
            settings=settings,
            client=ray_clients.RayReplicaClient(
                handle,
                retry_after_s=settings.limits.retry_after_s,
                clear_timeout_s=settings.tiers.store_s_max,
                stall_s=settings.router.stall_s,
                tracer=tracer,
                inlet=inlet,
                links=Links(links, settings.router.heartbeat_s),
            ),
            prompts=prompts,
            tracer=tracer,
            model_name=settings.model.served_name or card.name,
            context_tokens_max=card.context_tokens(settings.model.context_tokens_max),
            model=card.fingerprint.hex(),
            waits=waits,
            first_s=settings.ingress.start_wait_s,
            ingresses=_all_ingresses(settings),
            secret=server_secret(settings.auth),
            generation=card.generation,
            commit=card.commit,
            directory=SessionDirectory(
                ray_clients.RayDirectoryLink(
                    rpc.ActorRef(
                        partial(
                            session_actor,
                            settings.router.sessions_max,
                            settings.router.lineages_max,
                            settings.tiers.store_s_max,
                            settings.telemetry,
                            item_bounds(settings),
                            settings.ingress.silent_s,
                        ),
                        restart_backoff_s_max=settings.tiers.node.restart_backoff_s_max,
                    ),
                    clear_s_max=settings.tiers.store_s_max,
                ),
                load_tracker.BOOK,
                settings.router,
                quiet_s=settings.ingress.silent_s / 2,  # or it would count as dead
            ),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_api(self._service, self._taker)
        if self._taker is not None:
            self._taker.app = app
        return app

    async def record_replica_metadata(self) -> dict[str, object]:
        """Return where this ingress takes requests over links, for the proxies (Ray Serve's hook)."""
        return {} if self._taker is None else await self._taker.listen()

    def reconfigure(self, config: dict[str, int]) -> None:
        """Apply settings that may change without a restart (Ray Serve's hook).

        `replicas`: the wanted number of replicas.
        """
        self._service.readiness.wanted = config["replicas"]

    async def forget_here(self, tenant: str, sessions: tuple[bytes, ...] | None) -> tuple[int, bool]:
        """Forget what is here of a tenant, as another ingress was asked; return replies, and if it is all."""
        return await forget_here(self._service, tenant, sessions)

    async def forget_entries_here(self, tenant: str, entries: tuple[str, ...] | None) -> bool:
        """Erase what was made of these entries of knowledge, or of any, as another ingress was asked."""
        return await forget_entries_here(self._service, tenant, entries)

    def discard_here(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response, as another ingress was asked; return whether it was here."""
        return self._service.responses.delete(tenant, response_id)

    def metrics_here(self) -> tuple[str, bytes]:
        """Return this ingress's name and its own metrics, as text."""
        metrics, directory = self._service.metrics, self._service.directory
        outcomes, _, unsynced = directory.counts()
        metrics.set_sessions(outcomes, {}, unsynced, self._service.prompts.salts_changed)
        return load_tracker.BOOK.ingress, metrics.own_text()

    def drain(self) -> int:
        """Stop admitting work, permanently. Returns how many generations are still open."""
        self._service.readiness.drain()
        return self.in_flight()

    def in_flight(self) -> int:
        """Return the number of generations open now."""
        return self._service.concurrency.open_total

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state of this ingress are inconsistent."""
        self._service.concurrency.check_integrity()
        self._service.prompts.check_integrity()
        self._service.directory.table.check_integrity()
        load_tracker.BOOK.check_integrity()
