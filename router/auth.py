"""Who is calling: API keys to tenants, and what separates tenants' blocks.

Deny by default: every path but exactly `/health` needs a key once keys are configured, whatever
the method. Keys are read from the `Authorization` header alone, compared as SHA-256 digests
against all keys in constant time, and never appear in a log or an error. Knows ASGI scopes;
nothing of routes or of what a tenant may do.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from configs.settings import AuthSettings
from router.errors import AuthenticationFailed

OPEN_PATH = "/health"
OPEN_METHODS = frozenset({"GET", "HEAD"})
LOCAL_TENANT = "local"
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is."""

    tenant: str


def is_open(scope: Scope) -> bool:
    """Whether a request is for what anybody may see."""
    return scope["path"] == OPEN_PATH and scope["method"] in OPEN_METHODS


class Authenticator:
    """Maps a request to its tenant. Without configured keys everybody is the tenant `local`."""

    def __init__(self, settings: AuthSettings) -> None:
        self._tenant_of: list[tuple[bytes, str]] = [
            (_digest(key.get_secret_value().encode()), tenant) for tenant, key in settings.api_keys.items()
        ]

    def caller(self, scope: Scope) -> Caller | None:
        """The caller of an HTTP request; None for the open health path without a good key.

        Raises `AuthenticationFailed` when a key is needed and is missing or not ours.
        """
        if not self._tenant_of:
            return Caller(LOCAL_TENANT)
        try:
            return Caller(self._tenant(Headers(scope=scope)))
        except AuthenticationFailed:
            if is_open(scope):
                return None
            raise

    def _tenant(self, headers: Headers) -> str:
        given = headers.getlist("authorization")
        if not given:
            raise AuthenticationFailed("No API key: send the header `Authorization: Bearer <key>`.")
        if len(given) > 1:
            raise AuthenticationFailed("More than one Authorization header was sent.")
        scheme, _, key = given[0].partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationFailed("The Authorization header must be `Bearer <key>`.")
        digest = _digest(key.strip(" ").encode("latin-1"))  # ASGI headers are latin-1: the bytes as sent
        found: str | None = None
        for known, tenant in self._tenant_of:  # all of them, so that time tells nothing
            if secrets.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise AuthenticationFailed("The API key is not valid.")
        return found


def server_secret(settings: AuthSettings) -> bytes:
    """The configured secret, or a new random one.

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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
