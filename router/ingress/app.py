"""The HTTP API of one ingress as an ASGI app, and its Ray Serve deployment class.

The API itself is independent of Ray: replicas are a `ReplicaClient`. No pages of FastAPI's, no redirects, no
FastAPI validation (bodies are parsed by `openai/parse.py`); every failure has OpenAI's error shape. The
OpenAPI document is `operations.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
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
from samovar.cache_tiers.sessions import ItemBounds, SessionState, session_actor
from samovar.configs.imports import collector_paused, keep_collections_short, return_freed_memory
from samovar.configs.optional_sections import INGRESSES_MAX
from samovar.configs.settings import Settings
from samovar.configs.telemetry import Tracer, open_tracer, set_up_logs
from samovar.configs.tls import node_tls
from samovar.replicas.links import Inlet, Links, open_inlet
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
    ReadinessOfAll,
    open_recorder,
)
from samovar.router.ingress.middleware import (
    HINT_ROUTE,
    PAGE_ROUTE,
    RESPONSE_ROUTE,
    SESSIONS_ROUTE,
    AuthMiddleware,
    LocalHosts,
    route_label,
)
from samovar.router.ingress.operations import OPENAPI_ROUTE, methods_of, openapi_document
from samovar.router.ingress.operator_routes import CacheRoutes, SessionRoutes
from samovar.router.ingress.places import (
    add_places,
    forget_entries_here,
    forget_here,
    forget_made,
    forget_sessions,
    open_sealing,
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
    Dialect,
    MethodNotAllowed,
    RequestParser,
    RouteNotFound,
    json_bytes,
    retry_after_header,
)
from samovar.router.prompt import PromptBuilder
from samovar.router.proxy import are_proxies_guarded
from samovar.router.responses import ResponsesDialect, ResponsesParser
from samovar.router.routing import (
    ReplicaClient,
    ReplicasOfAll,
    SessionDirectory,
    load_tracker,
    ray_clients,
)

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
    concurrency = ConcurrencyLimit(settings.limits, has_keys=settings.auth.has_keys)
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
    identities = None
    if settings.auth.is_followed:
        from samovar.router.identities import (  # who has keys in the settings only needs none
            Identities,
            open_keys,
        )

        identities = Identities(settings.auth, open_keys(settings), settings.limits.retry_after_s)
    metrics, stages, sealing = Metrics(), list[PromptStage](), open_sealing(settings)
    has_entries: dict[str, Any] = {}
    if settings.knowledge.enabled:
        from samovar.router.context.documents import (  # who has it off does not pay for its imports
            Front,
            open_documents,
        )
        from samovar.router.ingress.knowledge_routes import ServedText, open_knowledge

        knowledge = open_knowledge(settings, prompts, context_tokens_max, sealing, tag_of)
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
            sealing=sealing,
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
        bodies=ConcurrencyLimit(settings.limits, has_keys=settings.auth.has_keys),
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
        identities=identities,
        sealing=sealing,
    )
    add_places(service)
    return service


def build_further(
    first: IngressServices,
    settings: Settings,
    *,
    client: ReplicaClient,
    prompts: PromptBuilder,
    card: ModelCard,
    book: load_tracker.ReplicaLoadTracker,
    waits: bool = False,
) -> IngressServices:
    """Create the parts of a further model of one ingress: those that know no model are the first's.

    `settings`: the model's own. `book`: of its replicas.
    """
    start_s = settings.server.start_timeout_s if waits else settings.ingress.start_wait_s
    directory = first.directory.beside(book)
    return replace(
        first,
        settings=settings,
        client=client,
        prompts=prompts,
        model_name=settings.model.served_name or card.name,
        context_tokens_configured=card.context_tokens(settings.model.context_tokens_max),
        model=card.fingerprint.hex(),
        readiness=Readiness(
            client, settings.cluster.replicas, start_s=start_s, must_see=waits, known=lambda: book.nodes
        ),
        metrics=Metrics(),
        directory=directory,
        known=KnownSessions(prompts.replies, directory, settings.ingress),
        generation=card.generation if settings.model.generation_config == "auto" else {},
        commit=card.commit,
        adapters=settings.engine.vllm.adapters if settings.engine.kind == "vllm" else (),
        is_further=True,
    )


def build_front(models: Sequence[IngressServices]) -> IngressServices:
    """Create the parts of an ingress before several models, of which the first is the first.

    What is asked of no model is asked of all their replicas; prompts are each model's own.
    """
    first = models[0]
    own = replace(first, directory=first.directory.alone())
    front = replace(
        first,
        client=ReplicasOfAll({one.model: one.client for one in models}),
        readiness=ReadinessOfAll([one.readiness for one in models]),
        models=(own, *models[1:]),
    )
    add_places(front)
    return front


def build_api(service: IngressServices, taker: RequestTaker | None = None) -> FastAPI:
    """Create the app. Its lifespan polls the replicas; without it /health says `loading` forever.

    `taker`: of requests that come over links, which Serve does not count: the lifespan's end waits for them.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        until_s = asyncio.get_running_loop().time() + settings.ingress.start_wait_s
        if service.identities is not None:
            service.identities.start()
        if audit is not None:
            audit.start()
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
        for one in service.each_model:
            one.prompts.close()
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.close)
        for stage in service.stages:
            await asyncio.to_thread(stage.close)
        if service.identities is not None:
            await asyncio.to_thread(service.identities.stop)
        if audit is not None:
            await asyncio.to_thread(audit.stop)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    settings, limits = service.settings, service.settings.limits
    simple, cache, sessions = _SimpleRoutes(service), CacheRoutes(service), SessionRoutes(service)
    each = [_model_routes(one) for one in service.each_model]
    tokenizer, responses = each[0].tokenizer, ResponseRoutes(service)
    endpoints = each[0].endpoints
    if service.models:
        tokenizer = tokenizer.before(service, [one.tokenizer for one in each])
        endpoints = {
            path: endpoint.before(service, [one.endpoints[path] for one in each])
            for path, endpoint in endpoints.items()
        }
    hub = LiveHub(service)
    live, page = LiveRoutes(service, hub), PageFiles()
    routes = [
        *(_generation_route(path, endpoint) for path, endpoint in endpoints.items()),
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
    if settings.auth.keys_file is not None:
        from samovar.router.identities import key_routes, open_keys

        keys = open_keys(settings)
        assert keys is not None
        routes += key_routes(keys, service.bodies)
    app.router.routes.extend(routes)
    app.state.live = hub
    app.add_exception_handler(HTTPException, _http_exception)
    origins = settings.server.cors_origins
    known = frozenset(route.path for route in routes)
    app.add_middleware(
        AuthMiddleware,
        authenticator=Authenticator(settings.auth, has_page=settings.server.page, others=service.identities),
        hosts=None if settings.auth.has_keys else LocalHosts(settings.server.allowed_hosts, origins),
        metrics=service.metrics,
        routes=known,
        errors={MESSAGES_PATH: messages_error},
        tracer=service.tracer,
    )
    if service.identities is not None and service.identities.tokens is not None:
        from samovar.router.identities import TokenKeys

        app.add_middleware(TokenKeys, keys=service.identities.tokens.keys)
    audit = None
    if settings.auth.audit_file is not None:
        from samovar.router.identities import AuditLog, AuditQueue, AuditTrail  # who has it off needs none

        audit = AuditQueue(AuditLog(settings.auth.audit_file))
        app.add_middleware(AuditTrail, queue=audit, label=lambda path: route_label(path, known))
    if origins:  # outermost: refusals must be readable too
        app.add_middleware(CorsOrigins, origins=origins)
    return app


@dataclass(frozen=True, slots=True)
class _ModelRoutes:
    """What answers requests for one model: by path what generates, and the tokenizer's routes."""

    endpoints: dict[str, GenerationEndpoint]
    tokenizer: TokenizerRoutes


def _model_routes(service: IngressServices) -> _ModelRoutes:
    limits, stored = service.settings.limits, service.responses
    parser = RequestParser(limits, service.context_tokens_configured, service.generation)
    messages = MessagesParser(parser, limits, service.prompts.template.variables)
    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": ChatDialect(parser),
        "/v1/completions": CompletionDialect(parser),
        MESSAGES_PATH: MessagesDialect(messages, service.prompts.vocabulary.text),
        "/v1/responses": ResponsesDialect(ResponsesParser(parser, limits, stored), stored),
    }
    endpoints = {path: GenerationEndpoint(dialect, service) for path, dialect in dialects.items()}
    return _ModelRoutes(endpoints, TokenizerRoutes(service, parser, messages))


class _SimpleRoutes:
    """Handlers of the routes that do not generate."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service
        self._created = int(time.time())
        self._document: bytes | None = None

    async def models(self, request: Request) -> Response:
        cards = [self._card(one, name) for one in self._service.each_model for name in one.model_names]
        if "anthropic-version" in request.headers:
            return JSONResponse(models_page(cards))
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model_id"]
        if not asked:  # /v1/models/
            return await self.models(request)
        self._service.refuse_other_model(asked)
        of = next(one for one in self._service.each_model if asked in one.model_names)
        return JSONResponse(self._card(of, asked))

    async def hello(self, request: Request) -> Response:
        """Handle GET and HEAD /api/hello."""
        return Response(b"", 200)

    async def health(self, request: Request) -> Response:
        readiness = self._service.readiness
        models = {one.model_name: len(one.readiness.replicas) for one in self._service.models}
        each = {"models": models} if models else {}
        if readiness.state == "ok":
            told = {"status": "ok", "replicas": len(readiness.replicas), **each, **_detail(readiness)}
            return JSONResponse(told)
        headers = retry_after_header(self._service.settings.limits.retry_after_s)
        return JSONResponse({"status": readiness.state, **each}, status_code=503, headers=headers)

    async def metrics(self, request: Request) -> Response:
        if self._service.settings.auth.has_keys:  # they reveal the token counts of all tenants
            require_admin(request.scope)
        client, directory = self._service.client, self._service.directory
        caller: Caller = request.scope["state"]["caller"]
        with self._service.reads.lease(caller.tenant or ADMIN):
            told = await asyncio.gather(client.stats(), client.cache_stats(), client.tiers_up())
            self._service.metrics.set_replicas(*told)
        _, states, unsynced = directory.counts()
        text, ingresses = _metrics_text(self._service, states, unsynced), self._service.ingresses
        if ingresses is not None:
            parts, name = await ingresses.metrics(), load_tracker.BOOK.ingress
            if name not in parts:  # it could ask none: without the label its own would be other series
                parts[name] = _metrics_text(self._service, {}, unsynced, own=True)
            text = await asyncio.to_thread(merged, text, parts)
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

    def _card(self, of: IngressServices, name: str) -> dict[str, object]:
        # What the served model is to another name: an adapter's base, or what stands behind it.
        kind, defaults = "parent" if name in of.adapters else "root", of.generation
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": DISTRIBUTION,
            "max_model_len": of.context_tokens_max,
            **({} if name == of.model_name else {kind: of.model_name}),
            **({} if of.commit is None else {"revision": of.commit}),
            **({"generation_defaults": defaults} if defaults else {}),
        }


def _metrics_text(
    service: IngressServices, states: Mapping[SessionState, int], unsynced: int, *, own: bool = False
) -> bytes:
    """Return the metrics of an ingress; of several models each one's have the label `model`.

    `states`, `unsynced`: see `Metrics.set_sessions`. `own`: without what all ingresses know alike.
    """
    for one in service.each_model:
        is_first = not one.is_further  # sessions are no model's: they are told once
        one.metrics.set_sessions(
            one.directory.outcomes,
            states if is_first else {},
            unsynced if is_first else 0,
            one.prompts.salts_changed,
        )
    text = service.metrics.own_text() if own else service.metrics.text()
    return merged(text, {one.model_name: one.metrics.own_text() for one in service.models}, label="model")


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
    kept = settings.ingress
    return ItemBounds(kept.kept_bytes_max, kept.replies_per_session, path, settings.tiers.encryption_key_file)


def _all_ingresses(settings: Settings) -> Ingresses | None:
    """Return all ingresses of the deployment that this process belongs to; None if there is only one."""
    if ingress_count(settings) == 1:
        return None
    own = serve.get_replica_context()
    return ray_ingresses.RayIngresses(serve.get_deployment_handle(own.deployment, own.app_name))


def _replica_client(
    model_app: str,
    *,
    settings: Settings,
    tracer: Tracer | None,
    inlet: Inlet | None,
    links: Links,
    further: str = "",
) -> ray_clients.RayReplicaClient:
    """Return the client of the replicas of one application. `further`: see `RayReplicaClient`."""
    return ray_clients.RayReplicaClient(
        serve.get_deployment_handle(REPLICA_DEPLOYMENT, model_app, _check_exists=False),
        retry_after_s=settings.limits.retry_after_s,
        clear_timeout_s=settings.tiers.store_s_max,
        stall_s=settings.router.stall_s,
        tracer=tracer,
        inlet=inlet,
        links=links,
        further=further,
    )


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

    `further`: of each model beside the first its own settings, directory and application, by its key in
    `models`.
    """

    def __init__(
        self,
        settings: Settings,
        model_dir: str | None,
        model_app: str,
        waits: bool = False,
        further: Mapping[str, tuple[Settings, str | None, str]] | None = None,
    ) -> None:
        set_up_logs(settings.telemetry)
        keep_collections_short()
        tracer = open_tracer(settings.telemetry, "ingress")
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
            others = {
                name: (own, app, *open_prompts(own, path))
                for name, (own, path, app) in (further or {}).items()
            }
        return_freed_memory()
        client = partial(
            _replica_client,
            settings=settings,
            tracer=tracer,
            inlet=inlet,
            links=Links(links, settings.router.heartbeat_s, node_tls()),
        )
        self._service = build_service(
            settings=settings,
            client=client(model_app),
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
        self._further: dict[str, IngressServices] = {}
        for name, (own, app, its_card, its_prompts) in others.items():
            self._further[name] = build_further(
                self._service,
                own,
                client=client(app, further=name),
                prompts=its_prompts,
                card=its_card,
                book=load_tracker.book_of(name),
                waits=waits,
            )
        if self._further:
            self._service = build_front([self._service, *self._further.values()])

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_api(self._service, self._taker)
        if self._taker is not None:
            self._taker.app = app
        return app

    async def record_replica_metadata(self) -> dict[str, object]:
        """Return where this ingress takes requests over links, for the proxies (Ray Serve's hook)."""
        return {} if self._taker is None else await self._taker.listen()

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Apply settings that may change without a restart (Ray Serve's hook).

        `replicas`: the wanted number of replicas; `models`: the same of each model beside the first.
        """
        self._service.each_model[0].readiness.wanted = config["replicas"]
        for name, wanted in config.get("models", {}).items():
            self._further[name].readiness.wanted = wanted

    async def forget_here(self, tenant: str, sessions: tuple[bytes, ...] | None) -> tuple[int, bool]:
        """Forget what is here of a tenant, as another ingress was asked; return replies, and if it is all."""
        return await forget_here(self._service, tenant, sessions)

    async def forget_entries_here(self, tenant: str, entries: tuple[str, ...] | None) -> bool:
        """Erase what was made of these entries of knowledge, or of any, as another ingress was asked."""
        return await forget_entries_here(self._service, tenant, entries)

    def discard_here(self, tenant: str, response_id: str) -> bool:
        """Delete a stored response, as another ingress was asked; return whether it was here."""
        return self._service.responses.discard_here(tenant, response_id)

    def metrics_here(self) -> tuple[str, bytes]:
        """Return this ingress's name and its own metrics, as text."""
        _, _, unsynced = self._service.directory.counts()
        return load_tracker.BOOK.ingress, _metrics_text(self._service, {}, unsynced, own=True)

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
        for one in self._service.each_model:
            one.prompts.check_integrity()
        self._service.directory.table.check_integrity()
        for book in (load_tracker.BOOK, *load_tracker.BOOKS.values()):
            book.check_integrity()
