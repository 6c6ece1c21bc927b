"""The routes that look at the cache or make it forget.

A tenant clears what is its own; the administrator clears any tenant's, or everybody's, and sees the
statistics. A clear that did not reach everything says so (503 `clear_incomplete`): who asked for
something to be gone must not be told that it is. Knows HTTP; nothing of where blocks lie.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cache_tiers.messages import Clear, Cleared
from cache_tiers.tags import tenant_tag
from configs.settings import TenantName
from router.auth import LOCAL_TENANT, Caller, require_admin, tenant_of
from router.errors import MissingField, SessionNotFound, Unavailable
from router.generation import Service
from router.json_body import check_structure, read_body
from router.parse_request import error_of
from router.replica_client import ClearCounts
from router.session_directory import DirectoryLost
from router.session_key import check_id, tags_of_id
from router.sessions_api import tag_of_name

logger = logging.getLogger("samovar.cache_api")


class ClearBody(BaseModel):
    """The body of the administrator's clear. No unknown fields: a typo must not clear everything."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    tenant: TenantName | None = None


class CacheRoutes:
    """Handlers over one `Service`. They raise `ApiError`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        # A tenant that left the configuration has no replies here; its blocks are cleared by name.
        self._tenants = tuple(service.settings.auth.api_keys) or (LOCAL_TENANT,)

    async def session(self, request: Request) -> Response:
        """DELETE /v1/sessions/{id}: what the caller made under that id, in whichever field it was sent."""
        raw_id = request.path_params["session_id"]
        if not raw_id:
            raise MissingField("session_id")
        check_id("session_id", raw_id, self._service.settings.limits.id_chars_max)
        named = tag_of_name(raw_id)
        caller: Caller = request.scope["state"]["caller"]
        if caller.tenant is None and named is not None:  # the administrator may clear what it sees listed
            return await self._cleared(self._owners(named), (named,))
        tenant = tenant_of(request.scope)
        sessions = tags_of_id(self._service.secret, tenant, raw_id) if named is None else (named,)
        with self._service.concurrency.lease(tenant):
            return await self._cleared([tenant], sessions)

    async def own(self, request: Request) -> Response:
        """DELETE /v1/cache: all that the caller made."""
        tenant = tenant_of(request.scope)
        with self._service.concurrency.lease(tenant):
            return await self._cleared([tenant], None)

    async def any(self, request: Request) -> Response:
        """POST /cache/clear, /reset_prefix_cache: all of one tenant, or of every tenant configured."""
        require_admin(request.scope)
        limits = self._service.settings.limits
        raw = await read_body(request.receive, request.headers, limits)
        check_structure(raw, limits)
        try:
            body = ClearBody.model_validate_json(raw) if raw.strip() else ClearBody()
        except ValidationError as refused:
            raise error_of(refused) from None
        return await self._cleared(self._tenants if body.tenant is None else [body.tenant], None)

    async def stats(self, request: Request) -> Response:
        """GET /cache/stats: the counters of replicas and nodes that answer now."""
        require_admin(request.scope)
        client = self._service.client
        replicas, nodes = await asyncio.gather(client.stats(), client.cache_stats())
        return JSONResponse(
            {
                "replicas": [_plain(asdict(replica)) for replica in replicas],
                "nodes": [_plain(asdict(node)) for node in nodes],
            }
        )

    def _owners(self, session: bytes) -> list[str]:
        """Tenants who have a session of that tag. Raises `SessionNotFound`."""
        service = self._service
        owners = [
            tenant
            for tenant in self._tenants
            if service.directory.table.get(tenant_tag(service.secret, tenant), session) is not None
        ]
        if not owners:
            raise SessionNotFound()
        return owners

    async def _cleared(self, tenants: Sequence[str], sessions: tuple[bytes, ...] | None) -> Response:
        service = self._service
        counts: ClearCounts | None = None
        replies, silent_nodes = 0, 0
        for tenant in tenants:
            tag = tenant_tag(service.secret, tenant)
            if tenant in self._tenants:
                replies += await service.prompts.forget(tenant, sessions)
            for session in [None] if sessions is None else sessions:
                service.directory.forget(tag, session)
            reached = await service.client.clear(tag, sessions)
            counts = reached if counts is None else counts + reached
            elsewhere, silent = await self._cleared_elsewhere(tag, sessions)
            counts, silent_nodes = counts.with_nodes(elsewhere), silent_nodes + silent
        assert counts is not None, "a clear of nobody"
        self._refuse_incomplete(counts, silent_nodes)
        cleared = {
            "replies": replies,
            "pages": counts.pages,
            "extents": counts.extents,
            "bytes": counts.nbytes,
        }
        return JSONResponse({"object": "cache.cleared", "cleared": cleared, "replicas": counts.replicas})

    async def _cleared_elsewhere(
        self, tenant: bytes, sessions: tuple[bytes, ...] | None
    ) -> tuple[list[Cleared], int]:
        """Also on nodes where no replica is left: what was cleared there, and how many did not answer."""
        link = self._service.directory.link
        if link is None or not self._service.settings.tiers.enabled:
            return [], 0
        clear = Clear(tenant) if sessions is None else Clear(tenant, sessions[0], sessions[1:])
        done: list[Cleared | None] = []
        try:
            done += (await link.clear(clear)).values()
        except DirectoryLost as lost:
            logger.warning("a clear did not reach the nodes without replicas: %s", lost)
            done.append(None)
        return [one for one in done if one is not None], sum(one is None for one in done)

    def _refuse_incomplete(self, counts: ClearCounts, silent_nodes: int) -> None:
        wanted = max(self._service.readiness.wanted, counts.replicas + counts.silent)
        problems = []
        if counts.replicas < wanted:
            problems.append(f"{wanted - counts.replicas} of {wanted} replicas did not answer")
        if silent_nodes:
            problems.append("the tiers of some nodes did not answer")
        if counts.unreachable:
            tiers = ", ".join(counts.unreachable)
            problems.append(f"the tiers {tiers} did not answer and delete theirs as soon as they do")
        if problems:
            message = f"Not everything is cleared: {'; '.join(problems)}. Ask again until this succeeds."
            raise Unavailable(message, self._service.settings.limits.retry_after_s, code="clear_incomplete")


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: no infinities, no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
