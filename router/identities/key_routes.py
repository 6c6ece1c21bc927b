"""The administrator's routes for keys that come and go: the same as `samovar keys`, without a shell there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from samovar.configs.settings import TenantName
from samovar.router.auth import ConcurrencyLimit, read_model, require_admin
from samovar.router.identities.key_file import (
    LASTS_S_MAX,
    KeyIsOver,
    KeyRecord,
    KeysRefused,
    KeyStore,
    NoSuchKey,
    has_one_owner,
)
from samovar.router.openai import (
    ApiError,
    InvalidValue,
    Unavailable,
    page_limit,
)
from samovar.router.paths import KEY_ROUTE, KEYS, ROTATE_ROUTE

KEEP_S = 86400
"""How long a key that was rotated stays good, if the caller does not say."""

Done = TypeVar("Done")


class KeyBody(BaseModel):
    """A key to make: of a tenant, or of the administrator (`admin`). `lasts_s`: null: until it is revoked."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    tenant: TenantName | None = None
    admin: bool = False
    lasts_s: Annotated[int, Field(ge=1, le=LASTS_S_MAX)] | None = None

    @model_validator(mode="after")
    def _check_owner(self) -> KeyBody:
        if not has_one_owner(self.tenant, self.admin):
            raise ValueError("give the tenant whose key it is, or admin: true")
        return self


class RotateBody(BaseModel):
    """A key to replace. `keep_s`: how long the old one stays good."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    keep_s: Annotated[int, Field(ge=0, le=LASTS_S_MAX)] = KEEP_S


class KeyNotFound(ApiError):
    """404: there is no key of that id."""

    def __init__(self, param: str = "key_id") -> None:
        super().__init__(
            404, "There is no key of that id. GET /v1/keys has them.", param=param, code="key_not_found"
        )


def key_routes(
    store: KeyStore, bodies: ConcurrencyLimit, clock: Callable[[], float] = time.time
) -> list[Route]:
    """Return the routes over kept keys. `bodies`: what bodies are read within. `clock`: Unix time."""
    keys = _KeyRoutes(store, bodies, clock)
    return [
        Route(KEYS, keys.all, methods=["GET"]),
        Route(KEYS, keys.create, methods=["POST"]),
        Route(ROTATE_ROUTE, keys.rotate, methods=["POST"]),
        Route(KEY_ROUTE, keys.revoke, methods=["DELETE"]),
    ]


class _KeyRoutes:
    """The handlers. One at a time is at the keys, whose lock others may hold for seconds."""

    def __init__(self, store: KeyStore, bodies: ConcurrencyLimit, clock: Callable[[], float]) -> None:
        self._store = store
        self._bodies = bodies
        self._clock = clock
        self._turn = asyncio.Lock()

    async def all(self, request: Request) -> Response:
        """Handle GET /v1/keys?limit=&after=: all keys in the order of making, without secrets."""
        require_admin(request.scope)
        limit = page_limit(request.query_params)
        keys = await self._done(self._store.read_if_there)
        after, first = request.query_params.get("after"), 0
        if after is not None:
            place = next((place for place, key in enumerate(keys) if key.id == after), None)
            if place is None:
                raise KeyNotFound("after")
            first = place + 1
        page = keys[first : first + limit]
        now_s = self._clock()
        data = [{"object": "key", **key.told(now_s)} for key in page]
        return JSONResponse({"object": "list", "data": data, "has_more": first + limit < len(keys)})

    async def create(self, request: Request) -> Response:
        """Handle POST /v1/keys."""
        require_admin(request.scope)
        body = await read_model(request, KeyBody, self._bodies)
        return self._made(request, await self._done(partial(self._store.create, body.tenant, body.lasts_s)))

    async def rotate(self, request: Request) -> Response:
        """Handle POST /v1/keys/{key_id}/rotate."""
        require_admin(request.scope)
        body = await read_model(request, RotateBody, self._bodies)
        key_id = request.path_params["key_id"]
        return self._made(request, await self._done(partial(self._store.rotate, key_id, body.keep_s)))

    async def revoke(self, request: Request) -> Response:
        """Handle DELETE /v1/keys/{key_id}: within seconds no ingress takes it any more."""
        require_admin(request.scope)
        record = await self._done(partial(self._store.revoke, request.path_params["key_id"]))
        self._note(request, record)
        return JSONResponse({"object": "key", **record.told(self._clock())})

    def _made(self, request: Request, made: tuple[KeyRecord, str]) -> Response:
        record, key = made
        self._note(request, record)
        told = {"object": "key", **record.told(self._clock()), "key": key}
        return JSONResponse(told, 201, headers={"cache-control": "no-store"})

    @staticmethod
    def _note(request: Request, record: KeyRecord) -> None:
        """Tell the audit log which key it is about."""
        request.scope["state"]["key"] = {name: getattr(record, name) for name in ("id", "tenant", "expires")}

    async def _done(self, work: Callable[[], Done]) -> Done:
        try:
            async with self._turn:
                return await asyncio.to_thread(work)
        except NoSuchKey:
            raise KeyNotFound() from None
        except KeyIsOver as error:
            raise InvalidValue("key_id", f"{error}.") from None
        except (KeysRefused, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            message = f"The API keys (auth.keys_file) cannot be used: {why}."
            raise Unavailable(message, self._bodies.limits.retry_after_s) from None
