"""Who is calling: API keys to tenants, and what separates tenants' blocks.

Deny by default: every path but exactly `/health` needs a key once keys are configured, whatever
the method. Keys are read from the `Authorization` header alone, compared as SHA-256 digests
against all keys in constant time, and never appear in a log or an error. The administrator's key
belongs to no tenant. Knows ASGI scopes; nothing of routes beyond that a tenant's need a tenant.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from configs.settings import AuthSettings, LimitsSettings
from router.openai import AuthenticationFailed, Forbidden, InvalidValue, TooManyRequests

OPEN_PATH = "/health"
OPEN_METHODS = frozenset({"GET", "HEAD"})
LOCAL_TENANT = "local"
ADMIN = ""
"""The administrator among the tenants' names, where requests are counted."""
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is: a tenant's, the administrator's (`tenant=None`), or both without keys."""

    tenant: str | None
    is_admin: bool = False


def is_open(scope: Scope) -> bool:
    """Whether a request is for what anybody may see."""
    return scope["path"] == OPEN_PATH and scope["method"] in OPEN_METHODS


def tenant_of(scope: Scope) -> str:
    """The tenant who asks. Raises `Forbidden` for the administrator, who has no blocks or sessions."""
    caller: Caller = scope["state"]["caller"]
    if caller.tenant is None:
        raise Forbidden("The administrator's key is no tenant's. Use a key of auth.api_keys here.")
    return caller.tenant


def require_admin(scope: Scope) -> None:
    """Raises `Forbidden` for everybody but the administrator."""
    caller: Caller = scope["state"]["caller"]
    if not caller.is_admin:
        raise Forbidden(
            f"{scope['path']} tells of all tenants or clears them: it needs the administrator's API key "
            "(auth.admin_key); a tenant's does not do."
        )


class Authenticator:
    """Maps a request to its caller.

    Without tenants' keys everybody is the tenant `local`, and the administrator as well unless there is
    a key for that.
    """

    def __init__(self, settings: AuthSettings) -> None:
        admin = settings.admin_key
        self._admin = None if admin is None else _digest(admin.get_secret_value().encode())
        self._tenant_of: list[tuple[bytes, str]] = [
            (_digest(key.get_secret_value().encode()), tenant)
            for tenant, keys in settings.api_keys.items()
            for key in keys
        ]

    def caller(self, scope: Scope) -> Caller | None:
        """The caller of an HTTP request; None for the open health path without a good key.

        Raises `AuthenticationFailed` when a key is needed and is missing or not ours.
        """
        headers = Headers(scope=scope)
        if not self._tenant_of:
            return Caller(LOCAL_TENANT, self._admin is None or self._is_admin(headers))
        try:
            return self._owner(_key_digest(headers))
        except AuthenticationFailed:
            if is_open(scope):
                return None
            raise

    def _owner(self, digest: bytes) -> Caller:
        found: Caller | None = None
        for known, tenant in self._tenant_of:  # all of them, so that time tells nothing
            if secrets.compare_digest(digest, known):
                found = Caller(tenant)
        if self._admin is not None and secrets.compare_digest(digest, self._admin):
            found = Caller(None, is_admin=True)
        if found is None:
            raise AuthenticationFailed("The API key is not valid.")
        return found

    def _is_admin(self, headers: Headers) -> bool:
        """On an open endpoint, where clients send whatever they like as a key."""
        assert self._admin is not None
        try:
            return secrets.compare_digest(_key_digest(headers), self._admin)
        except AuthenticationFailed:
            return False


def server_secret(settings: AuthSettings) -> bytes:
    """The secret in the settings, or a new random one.

    Every ingress of one service must hold the same secret, or conversations change replicas and
    miss their blocks when they change the ingress: draw it once, where the service is started.
    """
    if settings.server_secret is None:
        return secrets.token_bytes(SECRET_BYTES)
    return settings.server_secret.get_secret_value().encode()


def tenant_salt(secret: bytes, tenant: str, cache_salt: str | None) -> bytes:
    """32 bytes that go into the namespace of the tenant's blocks (law L2).

    A client's `cache_salt` only narrows: it is hashed under the tenant, so no choice of it can
    reach another tenant's blocks.
    """
    of_tenant = hmac.digest(secret, b"samovar tenant salt\0" + tenant.encode(), "sha256")
    if cache_salt is None:
        return of_tenant
    return hmac.digest(of_tenant, b"cache salt\0" + cache_salt.encode(), "sha256")


def _key_digest(headers: Headers) -> bytes:
    """Of the API key in the headers. Raises `AuthenticationFailed` when there is none."""
    given = headers.getlist("authorization")
    if not given:
        raise AuthenticationFailed("No API key: send the header `Authorization: Bearer <key>`.")
    if len(given) > 1:
        raise AuthenticationFailed("More than one Authorization header was sent.")
    scheme, _, key = given[0].partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationFailed("The Authorization header must be `Bearer <key>`.")
    return _digest(key.strip(" ").encode("latin-1"))  # ASGI headers are latin-1: the bytes as sent


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# How much may be open at the same time, for one tenant and for one ingress: requests, answers, tokens.
#
# Pure counting, for one thread (the event loop). Knows nothing of HTTP or of what a request is.

CODE = "concurrency_limit"


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes while it is open. `param`: the field that would have to be smaller.

    `sequences`: answers, of all its prompts. `tokens`: prompts, and answers at full length; at least.
    """

    sequences: int
    tokens: int
    sequences_param: str = "n"
    tokens_param: str = "max_tokens"


NOTHING = Need(0, 0)


class ConcurrencyLimit:
    """Counts what is open. `lease` blocks nobody: over a limit it raises at once.

    `per_key`: the setting that says how many requests one tenant may have open.
    """

    def __init__(
        self,
        limits: LimitsSettings,
        per_key: Literal["concurrent_per_key", "reads_per_key"] = "concurrent_per_key",
    ) -> None:
        self._limits = limits
        self._per_key = per_key
        self._open_of: dict[str, list[RequestLease]] = {}
        self._open_total = 0

    @property
    def open_total(self) -> int:
        """Requests open now."""
        return self._open_total

    def open_of(self, tenant: str) -> int:
        """Requests of `tenant` open now."""
        return len(self._open_of.get(tenant, ()))

    @contextmanager
    def lease(self, tenant: str) -> Iterator[RequestLease]:
        """Hold one place while the request is open; what it needs besides is told to the lease.

        Raises `TooManyRequests` with `Retry-After` when the tenant or the ingress has none left.
        """
        limit: int = getattr(self._limits, self._per_key)
        if self.open_of(tenant) >= limit:
            message = f"{limit} requests of this API key are open (limits.{self._per_key}). Try again later."
            raise TooManyRequests(message, self._limits.retry_after_s, code=CODE)
        if self._open_total >= self._limits.concurrent_total:
            limit = self._limits.concurrent_total
            message = f"{limit} requests are open on this server (limits.concurrent_total). Try again later."
            raise TooManyRequests(message, self._limits.retry_after_s, code=CODE)
        lease = RequestLease(self, tenant)
        self._open_of.setdefault(tenant, []).append(lease)
        self._open_total += 1
        try:
            yield lease
        finally:
            self._open_total -= 1
            self._open_of[tenant].remove(lease)
            if not self._open_of[tenant]:
                del self._open_of[tenant]  # tenants that left must not pile up

    def check(self, lease: RequestLease, need: Need) -> None:
        """Raises unless what `lease` needs is left to its tenant: 429, or 400 when it can never be."""
        limits = self._limits
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
        """Raises AssertionError when the counts do not add up."""
        assert all(self._open_of.values()), "a tenant without requests is remembered"
        counted = sum(map(len, self._open_of.values()))
        assert self._open_total == counted, (self._open_total, counted)


class RequestLease:
    """An open request's part of its tenant's limits."""

    def __init__(self, limit: ConcurrencyLimit, tenant: str) -> None:
        self.tenant = tenant
        self.need = NOTHING
        self._limit = limit

    def ask(self, need: Need) -> None:
        """This is what it needs, as far as is known now. Raises `ApiError`; then it keeps what it had."""
        self._limit.check(self, need)
        self.need = need
