"""Authentication, tenant salts and per-tenant concurrency limits.

Deny by default: once there are keys (`AuthSettings.has_keys`), every path needs a key, whatever the method;
except exactly `/health`, the files of the live page, which hold no data, and a browser's preflight, which
cannot carry a key and gets nothing. Keys are read from the headers `Authorization` and `x-api-key` only,
compared as SHA-256 digests against all keys in constant time, and never appear in a log or an error. The
administrator's key belongs to no tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from samovar.cache_tiers.sessions import Use
from samovar.configs.settings import AuthSettings, LimitsSettings
from samovar.router.openai import (
    ApiError,
    AuthenticationFailed,
    Forbidden,
    InvalidValue,
    TooManyRequests,
    Unavailable,
    check_structure,
    read_body,
    validated,
)

OPEN_PATH = "/health"
GREETING_PATH = "/api/hello"
"""Claude Code asks it at its start, without its key, to see whether there is a server."""
PAGE_PATH, PAGE_FILES = "/", "/page/"
OPEN_METHODS = frozenset({"GET", "HEAD"})
LOCAL_TENANT = "local"
ADMIN = ""
"""The administrator's name among the tenants, for counting requests."""
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request: a tenant, the administrator (`tenant=None`), or both.

    `credential`: what it was proved by, as a record of who did what may name it; empty: by a key of the
    settings.
    """

    tenant: str | None
    is_admin: bool = False
    credential: str = field(default="", compare=False)


class Owners(Protocol):
    """Those who may call beside the owners of keys in the settings."""

    def owner(self, secret: bytes) -> Caller | None:
        """Return whose key that is; None: it is no caller's.

        Raises `AuthenticationFailed` that says why it is not good, `Unavailable` if that cannot be known now.
        """


def is_open(scope: Scope) -> bool:
    """Return whether a request is for a path that needs no key and tells nothing: health, the greeting."""
    return scope["path"] in (OPEN_PATH, GREETING_PATH) and scope["method"] in OPEN_METHODS


def is_page(scope: Scope) -> bool:
    """Return whether a request is for a file of the live page, which holds no data."""
    path: str = scope["path"]
    return (path == PAGE_PATH or path.startswith(PAGE_FILES)) and scope["method"] in OPEN_METHODS


def is_preflight(scope: Scope) -> bool:
    """Return whether a browser asks what it may send: such a request never carries a key."""
    headers = Headers(scope=scope)
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def tenant_of(scope: Scope) -> str:
    """Return the tenant of a request.

    Raises `Forbidden` for the administrator, who has no blocks or sessions.
    """
    caller: Caller = scope["state"]["caller"]
    if caller.tenant is None:
        raise Forbidden("The administrator's key belongs to no tenant. Use a tenant's key here.")
    return caller.tenant


def require_admin(scope: Scope) -> None:
    """Raise `Forbidden` unless the caller is the administrator."""
    caller: Caller = scope["state"]["caller"]
    if not caller.is_admin:
        raise Forbidden(
            f"{scope['path']} shows or clears the data of all tenants: it needs the administrator's API "
            "key (auth.admin_key), not a tenant's."
        )


class Authenticator:
    """Maps a request to its caller.

    Without tenant keys every caller is the tenant `local`, and also the administrator unless an admin key
    is set. `has_page`: whether there is the live page, whose files need no key. `others`: who else may call;
    None: no others.
    """

    def __init__(
        self, settings: AuthSettings, *, has_page: bool = False, others: Owners | None = None
    ) -> None:
        self._has_page = has_page
        self._has_keys = settings.has_keys
        self._others = others
        admin = settings.admin_key
        self._admin = None if admin is None else _digest(admin.get_secret_value().encode())
        self._tenant_of: list[tuple[bytes, str]] = [
            (_digest(key.get_secret_value().encode()), tenant)
            for tenant, keys in settings.api_keys.items()
            for key in keys
        ]

    def caller(self, scope: Scope) -> Caller | None:
        """Return the caller of an HTTP request; None for an open path without a valid key.

        Raises `AuthenticationFailed` if a key is needed and is missing or unknown, `Unavailable` if whose it
        is cannot be known now.
        """
        headers = Headers(scope=scope)
        if not self._has_keys:
            return Caller(LOCAL_TENANT, self._admin is None or self._is_admin(headers))
        try:
            return self._owner(_keys(headers))
        except (AuthenticationFailed, Unavailable):
            if is_open(scope) or (self._has_page and is_page(scope)):
                return None
            raise

    def _owner(self, keys: Sequence[bytes]) -> Caller:
        """Return whose keys these are; an unknown key does not spoil another header's good one."""
        found: set[Caller] = set()
        refused: ApiError = AuthenticationFailed("The API key is not valid.")
        for key in keys:
            digest = _digest(key)
            for known, tenant in self._tenant_of:  # compare with all keys: constant time
                if secrets.compare_digest(digest, known):
                    found.add(Caller(tenant))
            if self._admin is not None and secrets.compare_digest(digest, self._admin):
                found.add(Caller(None, is_admin=True))
            if self._others is not None:
                try:
                    owner = self._others.owner(key)
                except (AuthenticationFailed, Unavailable) as error:
                    refused = error
                else:
                    found |= set() if owner is None else {owner}
        if not found:
            raise refused
        if len(found) > 1:
            raise AuthenticationFailed(
                "The headers Authorization and x-api-key hold keys of different owners."
            )
        return found.pop()

    def _is_admin(self, headers: Headers) -> bool:
        """Check the admin key on an open endpoint, where clients may send any value as a key."""
        assert self._admin is not None
        try:
            keys = _keys(headers)
        except AuthenticationFailed:
            return False
        return any(secrets.compare_digest(_digest(key), self._admin) for key in keys)


def server_secret(settings: AuthSettings) -> bytes:
    """Return the secret from the settings, or a new random one.

    All ingresses of one service must hold the same secret; otherwise a session that changes the ingress
    changes replicas and misses its blocks. Draw it once, where the service is started.
    """
    if settings.server_secret is None:
        return secrets.token_bytes(SECRET_BYTES)
    return settings.server_secret.get_secret_value().encode()


def tenant_salt(secret: bytes, tenant: str, cache_salt: str | None) -> bytes:
    """Return the 32 bytes that go into the namespace of the tenant's blocks (G2 in docs/guarantees.md).

    A client's `cache_salt` is hashed under the tenant, so it can only narrow the namespace and never reach
    another tenant's blocks.
    """
    of_tenant = hmac.digest(secret, b"samovar tenant salt\0" + tenant.encode(), "sha256")
    if cache_salt is None:
        return of_tenant
    return hmac.digest(of_tenant, b"cache salt\0" + cache_salt.encode(), "sha256")


def _keys(headers: Headers) -> list[bytes]:
    """Return the API keys in the headers, at most one of each.

    Raises `AuthenticationFailed` if there is none. An `Authorization` of another scheme, which may be meant
    for a proxy, counts only where nothing else is sent.
    """
    authorization, api_key = headers.getlist("authorization"), headers.getlist("x-api-key")
    for name, values in (("Authorization", authorization), ("x-api-key", api_key)):
        if len(values) > 1:
            raise AuthenticationFailed(f"More than one {name} header was sent.")
    keys = [key.strip(" ") for key in api_key if key.strip(" ")]
    for value in authorization:
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer" and key:
            keys.append(key.strip(" "))
        elif not keys:
            raise AuthenticationFailed("The Authorization header must be `Bearer <key>`.")
    if not keys:
        raise AuthenticationFailed(
            "No API key: send the header `Authorization: Bearer <key>` or `x-api-key: <key>`."
        )
    return [key.encode("latin-1") for key in keys]  # ASGI headers are latin-1: the bytes as sent


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


CODE = "concurrency_limit"


@dataclass(frozen=True, slots=True)
class Need:
    """Resources a request holds while it is open.

    `sequences`: answers to all its prompts. `tokens`: prompts plus answers at full length, as a lower
    bound. `*_param`: the request field to reduce if the limit is exceeded.
    """

    sequences: int
    tokens: int
    sequences_param: str = "n"
    tokens_param: str = "max_tokens"


NOTHING = Need(0, 0)


class ConcurrencyLimit:
    """Counts open requests, answers and tokens, per tenant and for one ingress.

    Never blocks: `lease` raises at once if a limit is exceeded. Not thread-safe; use it from the event
    loop. `per_key`: the setting with the number of requests one tenant may have open. `has_keys`: False
    where all callers are one tenant: requests are then limited in total only, what they need by the queues.
    """

    def __init__(
        self,
        limits: LimitsSettings,
        per_key: Literal["concurrent_per_key", "reads_per_key"] = "concurrent_per_key",
        *,
        has_keys: bool = True,
    ) -> None:
        self.limits = limits
        self.has_keys = has_keys
        self._per_key = per_key
        self._open_of: dict[str, list[RequestLease]] = {}
        self._open_total = 0

    @property
    def open_total(self) -> int:
        """Number of requests open now."""
        return self._open_total

    def open_of(self, tenant: str) -> int:
        """Return the number of requests of `tenant` open now."""
        return len(self._open_of.get(tenant, ()))

    @property
    def tenants(self) -> tuple[str, ...]:
        """Those who have requests open."""
        return tuple(self._open_of)

    def use_of(self, tenant: str) -> Use:
        """Return what the requests of `tenant` hold now."""
        needs = [lease.need for lease in self._open_of.get(tenant, ())]
        return Use(len(needs), sum(need.sequences for need in needs), sum(need.tokens for need in needs))

    @contextmanager
    def lease(self, tenant: str) -> Iterator[RequestLease]:
        """Hold one place while the request is open; declare its further needs with `RequestLease.ask`.

        Raises `TooManyRequests` with `Retry-After` if the tenant or the ingress has no place left.
        """
        limit: int = getattr(self.limits, self._per_key)
        if self.has_keys and self.open_of(tenant) >= limit:
            message = f"{limit} requests of this API key are open (limits.{self._per_key}). Try again later."
            raise TooManyRequests(message, self.limits.retry_after_s, code=CODE)
        if self._open_total >= self.limits.concurrent_total:
            limit = self.limits.concurrent_total
            message = f"{limit} requests are open on this server (limits.concurrent_total). Try again later."
            raise TooManyRequests(message, self.limits.retry_after_s, code=CODE)
        lease = RequestLease(self, tenant)
        self._open_of.setdefault(tenant, []).append(lease)
        self._open_total += 1
        try:
            yield lease
        finally:
            self._open_total -= 1
            self._open_of[tenant].remove(lease)
            if not self._open_of[tenant]:
                del self._open_of[tenant]  # entries of inactive tenants must not accumulate

    def check(self, lease: RequestLease, need: Need) -> None:
        """Raise if `need` exceeds what the lease's tenant has left: 429, or 400 if it can never fit."""
        if not self.has_keys:
            return
        limits = self.limits
        others = [other.need for other in self._open_of[lease.tenant] if other is not lease]
        for name, what, asked, taken, limit, param in (
            (
                "sequences_per_key",
                "answers (prompts x n)",
                need.sequences,
                sum(other.sequences for other in others),
                limits.sequences_per_key,
                need.sequences_param,
            ),
            (
                "tokens_per_key",
                "tokens (prompts and max_tokens)",
                need.tokens,
                sum(other.tokens for other in others),
                limits.tokens_per_key,
                need.tokens_param,
            ),
        ):
            if asked > limit:
                message = (
                    f"The request asks for {asked} {what}, and one API key may have {limit} under way "
                    f"(limits.{name}). Lower {param}."
                )
                raise InvalidValue(param, message)
            if taken + asked > limit:
                message = (
                    f"{taken} {what} of this API key are under way and the request asks for {asked}: "
                    f"together more than {limit} (limits.{name}). Try again later."
                )
                raise TooManyRequests(message, limits.retry_after_s, code=CODE)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the counts do not add up."""
        assert all(self._open_of.values()), "a tenant without requests is remembered"
        counted = sum(map(len, self._open_of.values()))
        assert self._open_total == counted, (self._open_total, counted)


class RequestLease:
    """The part of its tenant's limits that an open request holds."""

    def __init__(self, limit: ConcurrencyLimit, tenant: str) -> None:
        self.tenant = tenant
        self.need = NOTHING
        self._limit = limit

    def ask(self, need: Need) -> None:
        """Declare what the request needs, as far as is known now.

        Raises `ApiError`; the previous need then stays in place.
        """
        self._limit.check(self, need)
        self.need = need


Body = TypeVar("Body", bound=BaseModel)


async def read_model(request: Request, model: type[Body], bodies: ConcurrencyLimit) -> Body:
    """Return the body as `model` has it; none at all is an empty object. Raises `ApiError`.

    Its caller holds one of `bodies` while it comes, which takes as long as the client likes.
    """
    caller: Caller = request.scope["state"]["caller"]
    with bodies.lease(caller.tenant or ADMIN):
        raw = await read_body(request.receive, request.headers, bodies.limits)
        check_structure(raw, bodies.limits)
        return validated(model, raw if raw.strip() else b"{}")
