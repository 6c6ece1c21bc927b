"""Routes that list sessions, take hints, clear the cache and report its statistics.

A tenant clears its own data; the administrator clears any tenant's or all, and sees the statistics. A clear
that did not reach everything returns 503 `clear_incomplete`: a caller must never be told that data is gone
while it is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from samovar.cache_tiers.blocks import SESSION_BYTES, TAG_BYTES, TIERS, root_tokens, session_of, tenant_tag
from samovar.cache_tiers.forecast import HintEvent
from samovar.cache_tiers.messages import as_json
from samovar.cache_tiers.sessions import Move, SessionRow, SessionState, SessionView
from samovar.configs.settings import TenantName
from samovar.router.auth import ADMIN, Caller, read_model, require_admin, tenant_of
from samovar.router.erasure import Cleared
from samovar.router.generation import IngressServices
from samovar.router.ingress.places import of_sessions
from samovar.router.observe.diagnosis import settings_told
from samovar.router.openai import (
    InvalidValue,
    MissingField,
    SessionNotFound,
    page_limit,
)
from samovar.router.routing import (
    SESSION_PREFIX,
    DirectoryLost,
    check_id,
    session_name,
    tags_of_id,
)

logger = logging.getLogger(__name__)


RETURN_S_MAX = 30 * 86400.0
SOON_S = 60.0
"""A client expected back within this time finds its blocks in main memory."""
LATE_S = 600.0
"""Blocks of a client away for longer are demoted from main memory."""

LIKELY_S = 600.0
"""How far ahead the forecast of a listed lineage looks."""

HINTED_MAX = 32
"""Lineages of a session that a hint reaches, the latest used first."""

STATES: Mapping[HintEvent | None, SessionState] = {
    "typing": "typing",
    "tool_started": "tool",
    "tool_finished": "idle",
    "closed": "closed",
}


class HintBody(BaseModel):
    """A client's hint about its session: an event, the expected return time, or both."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    event: HintEvent | None = None
    expected_return_s: float | None = Field(None, ge=0, le=RETURN_S_MAX, allow_inf_nan=False)


def move_of(event: HintEvent | None, expected_return_s: float | None) -> Move | None:
    """Return what to do with the session's blocks now; None: leave them where they are."""
    if event == "closed":
        return "demote"
    if expected_return_s is not None:
        if expected_return_s <= SOON_S:
            return "promote"
        return "demote" if expected_return_s > LATE_S else None
    return "promote" if event in ("typing", "tool_finished") else None


class SessionRoutes:
    """Handlers of `/v1/sessions`. They raise `ApiError`.

    A tenant sees its own sessions; the administrator sees all. A session is named by the id its client
    sent, in any header or field, or by the `sess_...` name that the list shows: raw ids are not stored. A
    hint takes effect at once.
    """

    def __init__(self, service: IngressServices) -> None:
        self._service = service
        self._places = service.settings.router.session_ids

    async def all(self, request: Request) -> Response:
        """Handle GET /v1/sessions?limit=&after=: the most recently used first."""
        caller: Caller = request.scope["state"]["caller"]
        limit = page_limit(request.query_params)
        after = self._after(caller, request.query_params.get("after"))
        with self._lease(caller):
            page = self._service.directory.table.page(self._tag(caller), limit + 1, after)
        names = self._names_for(caller)
        data = [self._card(view, names) for view in page[:limit]]
        return JSONResponse({"object": "list", "data": data, "has_more": len(page) > limit})

    def _lease(self, caller: Caller) -> AbstractContextManager[object]:
        """Return the place of one read; each asks all replicas, some of them for each lineage."""
        return self._service.reads.lease(caller.tenant or ADMIN)

    def _after(self, caller: Caller, name: str | None) -> SessionView | None:
        """Return the session after which a page starts. Raises `SessionNotFound`."""
        if name is None:
            return None
        named, tag = tag_of_name(name), self._tag(caller)
        tenants = [tag] if tag is not None else list(self._names_for(caller) or ())
        table = self._service.directory.table
        views = (table.view(tenant, named) for tenant in tenants if named is not None)
        found = next((view for view in views if view is not None), None)
        if found is None:
            raise SessionNotFound("after")
        return found

    async def one(self, request: Request) -> Response:
        """Handle GET /v1/sessions/{id}: also the bytes of its blocks, by tier, and its lineages."""
        caller: Caller = request.scope["state"]["caller"]
        view = self._view(request, caller)
        with self._lease(caller):
            held, likely = await asyncio.gather(self._held(view), self._likely(view))
        names = self._names_for(caller)
        card = self._card(view, names)
        card["bytes"] = None if held is None else held[view.session]
        card["lineages"] = [
            {
                "id": row.session[SESSION_BYTES:].hex(),
                "is_main": row is view.main,
                "first_prompt_tokens": root_tokens(row.session),
                **_of_row(row),
                "bytes": None if held is None else held[row.session],
                "likely_within_600s": likely.get(row.session),
            }
            for row in view.rows
        ]
        tenant = caller.tenant if names is None else names.get(view.tenant)
        if tenant is not None:
            for stage in self._service.stages:
                card |= stage.card(tenant, view.session)
        return JSONResponse(card)

    async def hint(self, request: Request) -> Response:
        """Handle POST /v1/sessions/{id}/hint: see `HintBody`."""
        caller: Caller = request.scope["state"]["caller"]
        body = await read_model(request, HintBody, self._service.bodies)
        if body.event is None and body.expected_return_s is None:
            raise MissingField("event")
        view = self._view(request, caller)
        directory = self._service.directory
        how = move_of(body.event, body.expected_return_s)
        # A client knows of its conversation; that a title is not asked for again, it need not say.
        rows = (view.rows if body.event == "closed" else view.living)[:HINTED_MAX]
        with self._lease(caller):
            for row in rows:
                state = STATES.get(body.event, row.state)  # of what is hidden it stays what it was
                directory.hint(row.tenant, row.session, state, body.expected_return_s)
            moves = await asyncio.gather(*(self._hint(row, body, how) for row in rows))
        if None in moves:
            how = None
        view = directory.table.view(view.tenant, view.session) or view
        moved = sum(number or 0 for number in moves)
        card = self._card(view, self._names_for(caller))
        return JSONResponse({**card, "action": how or "none", "extents_moving": moved})

    async def _hint(self, row: SessionRow, body: HintBody, how: Move | None) -> int | None:
        """Apply a hint to one lineage; return the extents moving, None if the directory does not answer."""
        client, link = self._service.client, self._service.directory.link
        await client.hint(row.tenant, row.session, body.event, body.expected_return_s)
        if how == "demote":
            await client.cool(row.tenant, row.session)
        if link is None:
            return 0
        try:
            await link.hint(row.tenant, row.session, body.event, body.expected_return_s)
            return 0 if how is None else await link.move(row.tenant, row.session, how)
        except DirectoryLost as lost:  # hints are best effort
            logger.warning("a hint could not be applied: %s", lost)
            return None

    async def _held(self, view: SessionView) -> dict[bytes, dict[str, int | None]] | None:
        """Return the session's and each lineage's bytes by tier; None if the directory does not answer.

        None of the pool: an engine does not say whose its pages are.
        """
        client, link, tenant = self._service.client, self._service.directory.link, view.tenant
        tags = (view.session, *(row.session for row in view.rows))
        gpu = await asyncio.gather(*(client.pool_bytes(tenant, tag) for tag in tags))
        held: dict[bytes, dict[str, int | None]] = {
            tag: {"gpu": own, **dict.fromkeys(TIERS, 0)} for tag, own in zip(tags, gpu, strict=True)
        }
        if link is None:
            return held
        try:
            answer = await link.held(tenant, tags)
        except DirectoryLost as lost:
            logger.warning("the locations of a session's blocks could not be requested: %s", lost)
            return None
        return {tag: {**own, **answer.get(tag, {})} for tag, own in held.items()}

    async def _likely(self, view: SessionView) -> dict[bytes, float]:
        """Return how likely each lineage is to resume soon, rounded; only those that a node's tiers know."""
        link = self._service.directory.link
        if link is None:
            return {}
        try:
            found = await link.likely(view.tenant, tuple(row.session for row in view.rows), LIKELY_S)
        except DirectoryLost:
            return {}
        return {session: round(one, 3) for session, one in found.items()}

    def _view(self, request: Request, caller: Caller) -> SessionView:
        """Return the session. Raises `SessionNotFound`, also if it is another tenant's."""
        raw_id = request.path_params["session_id"]
        views = [view for view in self._candidates(caller, raw_id) if view is not None]
        if not views:
            raise SessionNotFound()
        return max(views, key=lambda view: view.used_unix_s)

    def _candidates(self, caller: Caller, raw_id: str) -> list[SessionView | None]:
        if not raw_id:
            raise MissingField("session_id")
        check_id("session_id", raw_id, self._service.settings.limits.id_chars_max)
        table = self._service.directory.table
        tag = self._tag(caller)
        names = (self._names_for(caller) or {}) if tag is None else {tag: str(caller.tenant)}
        named = tag_of_name(raw_id)
        if named is not None:
            return [table.view(tenant, named) for tenant in names]
        return [
            table.view(tenant, session)
            for tenant, name in names.items()
            for session in tags_of_id(self._service.secret, name, raw_id, self._places)
        ]

    def _names_for(self, caller: Caller) -> dict[bytes, str] | None:
        """Return the known tenants by their tags, for the administrator; None for a tenant."""
        if caller.tenant is not None:
            return None
        return {tenant_tag(self._service.secret, name): name for name in self._service.tenants}

    def _tag(self, caller: Caller) -> bytes | None:
        """Return the tenant tag whose sessions the caller may see; None: all."""
        return None if caller.tenant is None else tenant_tag(self._service.secret, caller.tenant)

    def _card(self, view: SessionView, names: dict[bytes, str] | None) -> dict[str, Any]:
        """Return what is known of the session: its main lineage's place and length, and the turns of all.

        `names`: see `_names_for`; the session's tenant is told if they are given.
        """
        card: dict[str, Any] = {
            "id": session_name(view.session),
            "object": "session",
            **_of_row(view.main),
            "turns": sum(row.turns for row in view.rows),
            "created": int(min(row.created_unix_s for row in view.rows)),
            "last_used": int(view.used_unix_s),
        }
        if names is not None:
            card["tenant"] = names.get(view.tenant)
        return card


def _of_row(row: SessionRow) -> dict[str, Any]:
    return {
        "home": row.home or None,
        "node": row.nodes[0] if row.nodes else None,
        "turns": row.turns,
        "tokens": row.tokens,
        "created": int(row.created_unix_s),
        "last_used": int(row.used_unix_s),
        "state": row.state,
        "expected_return": None if row.returns_unix_s is None else int(row.returns_unix_s),
    }


def tag_of_name(name: str) -> bytes | None:
    """Return the tag of the whole session in a `sess_...` name; None if it is no such name."""
    digits = name.removeprefix(SESSION_PREFIX)
    if digits == name or len(digits) != 2 * TAG_BYTES:
        return None
    try:
        return session_of(bytes.fromhex(digits))
    except ValueError:
        return None


class ClearBody(BaseModel):
    """Body of the administrator's clear. Unknown fields are refused: a typo must not clear everything."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    tenant: TenantName | None = None


class CacheRoutes:
    """Handlers that clear the cache and report its statistics. They raise `ApiError`."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service

    async def session(self, request: Request) -> Response:
        """Handle DELETE /v1/sessions/{id}: clear the caller's sessions of that id, from any field."""
        raw_id = request.path_params["session_id"]
        if not raw_id:
            raise MissingField("session_id")
        check_id("session_id", raw_id, self._service.settings.limits.id_chars_max)
        named = tag_of_name(raw_id)
        caller: Caller = request.scope["state"]["caller"]
        if caller.tenant is None and named is not None:  # the administrator may clear any listed session
            return await self._cleared(self._owners(named), (named,))
        tenant = tenant_of(request.scope)
        places = self._service.settings.router.session_ids
        sessions = tags_of_id(self._service.secret, tenant, raw_id, places) if named is None else (named,)
        with self._service.concurrency.lease(tenant):
            return await self._cleared([tenant], sessions)

    async def own(self, request: Request) -> Response:
        """Handle DELETE /v1/cache: clear everything of the caller."""
        tenant = tenant_of(request.scope)
        with self._service.concurrency.lease(tenant):
            return await self._cleared([tenant], None)

    async def any(self, request: Request) -> Response:
        """Handle POST /cache/clear, /reset_prefix_cache: clear one tenant, or every tenant with a key.

        One that has none any more has no replies here; its blocks are cleared by name.
        """
        require_admin(request.scope)
        body = await read_model(request, ClearBody, self._service.bodies)
        if body.tenant is None and self._service.settings.auth.oidc.issuer is not None:
            raise InvalidValue(
                "tenant", "Name the tenant: an issuer's tokens name tenants that have no list here."
            )
        request.scope["state"]["of_tenant"] = body.tenant or "*"
        return await self._cleared(self._service.tenants if body.tenant is None else [body.tenant], None)

    async def stats(self, request: Request) -> Response:
        """Handle GET /cache/stats: the counters of the replicas and nodes that answer now.

        Also what the replicas serve, and the settings that `samovar diagnose` judges by.
        """
        require_admin(request.scope)
        client = self._service.client
        replicas, nodes = await asyncio.gather(client.stats(), client.cache_stats())
        return JSONResponse(
            {
                "replicas": [as_json(replica) for replica in replicas],
                "nodes": [as_json(node) for node in nodes],
                "serving": [as_json(info) for info in self._service.readiness.replicas],
                "settings": settings_told(self._service.settings),
            }
        )

    def _owners(self, session: bytes) -> list[str]:
        """Return the tenants with a session of that tag. Raises `SessionNotFound`."""
        service = self._service
        owners = [
            tenant
            for tenant in service.tenants
            if service.directory.table.lineages(tenant_tag(service.secret, tenant), session)
        ]
        if not owners:
            raise SessionNotFound()
        return owners

    async def _cleared(self, tenants: Sequence[str], sessions: tuple[bytes, ...] | None) -> Response:
        done = await self._service.clears.erase(*(of_sessions(tenant, sessions) for tenant in tenants))
        counts = sum(done, Cleared())
        cleared = {name: counts[name] for name in ("replies", "pages", "extents", "bytes")}
        if keys := counts["keys"]:  # of encrypted records
            cleared["keys"] = keys
        replicas = min((one["replicas"] for one in done), default=0)  # no tenant has a key yet
        told: dict[str, Any] = {"object": "cache.cleared", "cleared": cleared, "replicas": replicas}
        if left := max((one["overwriting"] for one in done), default=0):
            told["pages"] = f"unreachable until overwritten, in {left} of {replicas} replicas"
        return JSONResponse(told)
