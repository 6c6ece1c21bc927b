"""Tokens (JWT) of an OpenID Connect issuer: whose they are, by the keys that it publishes.

The keys are fetched in a thread, now and then and when a token names one that is not known; verifying only
looks into memory. Signatures are `joserfc`'s; which algorithms and claims are good is said here.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.configs.json_text import parse_json
from samovar.configs.optional_sections import OidcSettings, is_safe_url
from samovar.configs.settings import TenantName
from samovar.router.auth import Caller
from samovar.router.openai import AuthenticationFailed, Unavailable

if TYPE_CHECKING:
    from joserfc.jwk import Key

logger = logging.getLogger(__name__)

ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
    "Ed25519",
)
"""Of two keys, of which the issuer publishes one. None of a shared secret (HS256): what is published would
then be enough to sign; nor `none`."""
KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""First letters of an algorithm -> the only type of key that it is verified with."""
CURVES = ("P-256", "P-384", "P-521", "Ed25519")
PUBLIC = ("kty", "kid", "use", "alg", "n", "e", "crv", "x", "y")
"""What is taken of a published key."""
RSA_BITS_MIN = 2048
LEEWAY_S = 10.0
"""By how much the issuer's clock may differ."""
REFRESH_S = 300.0
"""How often the keys are fetched: so long a token is good whose key the issuer has taken back."""
UNKNOWN_S = 10.0
"""Least time between two fetches for tokens whose keys are not known: every client can send such tokens."""
STALE_S = 3600.0
"""How long keys are good while the issuer does not answer."""
FETCH_S = 10.0
DOCUMENT_BYTES_MAX = 1 << 20
KEYS_MAX = 64
TOKEN_CHARS_MAX = 16 << 10
TIME_S_MAX = 1e12
TENANTS_MAX = 4096
"""Tenants that are remembered by name; others are served as well, but not listed."""
DISCOVERY = "/.well-known/openid-configuration"

Fetch = Callable[[str], bytes]
"""Gets a document by its URL. Raises `IssuerSilent`."""
TENANT: TypeAdapter[str] = TypeAdapter(TenantName)


class IssuerSilent(Exception):
    """The issuer's documents cannot be had; the message says why."""


def is_token(secret: bytes) -> bool:
    """Return whether a credential looks like a token: three parts, of which the first is an object."""
    return secret.startswith(b"eyJ") and secret.count(b".") == 2


def fetched(url: str) -> bytes:
    """Return the document at `url`. Raises `IssuerSilent`."""
    import httpx  # who has no issuer needs none

    ends_s, found = time.monotonic() + FETCH_S, bytearray()
    try:
        with httpx.stream("GET", url, timeout=FETCH_S, follow_redirects=False) as answer:
            if answer.status_code != httpx.codes.OK:
                raise IssuerSilent(f"{url} answered {answer.status_code}")
            for piece in answer.iter_bytes():
                found += piece
                if len(found) > DOCUMENT_BYTES_MAX or time.monotonic() > ends_s:
                    raise IssuerSilent(f"{url} is too long, or too slow")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise IssuerSilent(f"{url} cannot be had: {error or type(error).__name__}") from error
    return bytes(found)


class IssuerKeys:
    """The issuer's public keys, by their names (`kid`). Thread-safe. `clock`: monotonic."""

    def __init__(
        self, issuer: str, fetch: Fetch = fetched, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer = issuer
        self._fetch = fetch
        self._clock = clock
        self._fetching = threading.Lock()
        self._keys: Mapping[str, Key] = {}
        self._known_s = self._tried_s = -math.inf
        self._problem = ""

    def find(self, kid: str) -> Key | None:
        """Return the key of that name; None: there is none. Raises `IssuerSilent` if keys are not known."""
        if self._clock() - self._known_s > STALE_S:
            raise IssuerSilent("the issuer's keys are not known")
        return self._keys.get(kid)

    def is_asked_for(self, kid: str) -> bool:
        """Return whether a fetch may bring the key of that name: one goes on, or none was just made."""
        return kid not in self._keys and (self._fetching.locked() or self._may_fetch())

    def ask_for(self, kid: str) -> None:
        """Fetch all keys, if that may bring this one; those who ask at once wait for one fetch."""
        with self._fetching:
            if kid not in self._keys and self._may_fetch():
                self._refresh()

    def refresh_if_due(self) -> None:
        """Fetch all keys if they are old; after a failure as soon as for an unknown one. Never raises."""
        with self._fetching:
            if self._clock() - self._known_s >= REFRESH_S and self._may_fetch():
                self._refresh()

    def _may_fetch(self) -> bool:
        return self._clock() - self._tried_s >= UNKNOWN_S

    def _refresh(self) -> None:
        self._tried_s = self._clock()
        try:
            self._keys = self._published()
            self._known_s, self._problem = self._tried_s, ""
        except Exception as error:  # also whatever a library raises at what the issuer publishes
            problem, is_odd = str(error), not isinstance(error, IssuerSilent)
            if problem != self._problem:
                logger.error("the keys of auth.oidc.issuer are not refreshed: %s", problem, exc_info=is_odd)
            self._problem = problem

    def _published(self) -> dict[str, Key]:
        told = _object(self._fetch(self._issuer.rstrip("/") + DISCOVERY))
        if told.get("issuer") != self._issuer:
            raise IssuerSilent(f"{self._issuer}{DISCOVERY} is of another issuer")
        url = told.get("jwks_uri")
        if not isinstance(url, str) or not is_safe_url(url):
            raise IssuerSilent(f"{self._issuer}{DISCOVERY} names no jwks_uri with https")
        listed = _object(self._fetch(url)).get("keys")
        if not isinstance(listed, list) or len(listed) > KEYS_MAX:
            raise IssuerSilent(f"{url} is no list of at most {KEYS_MAX} keys")
        found: dict[str, Key] = {}
        for one in listed:
            key = _key_of(one)
            if key is not None:
                if one["kid"] in found:
                    raise IssuerSilent(f"{url} has two keys of one name")
                found[one["kid"]] = key
        return found


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = parse_json(data)
    except ValueError as error:
        raise IssuerSilent("the issuer's answer is no JSON") from error
    if not isinstance(found, dict):
        raise IssuerSilent("the issuer's answer is no JSON object")
    return found


def _key_of(one: Any) -> Key | None:
    """Return a published key, if it is one of those that we verify with; others are passed over."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from joserfc import jwk
    from joserfc.errors import JoseError

    if not isinstance(one, dict) or not isinstance(one.get("kid"), str):
        return None
    if one.get("kty") not in KEY_TYPES.values() or one.get("use", "sig") != "sig":
        return None
    if one["kty"] != "RSA" and one.get("crv") not in CURVES:
        return None
    try:
        key = jwk.import_key({name: one[name] for name in PUBLIC if name in one})
    except (JoseError, UnsupportedAlgorithm, ValueError, TypeError, KeyError) as error:
        logger.warning("a key of auth.oidc.issuer is not usable: %s", type(error).__name__)
        return None
    if isinstance(key, jwk.RSAKey) and key.public_key.key_size < RSA_BITS_MIN:
        logger.warning("an RSA key of auth.oidc.issuer has fewer than %d bits, and is not used", RSA_BITS_MIN)
        return None
    return key


class TokenVerifier:
    """Says whose a token is. `clock`: Unix time."""

    def __init__(
        self,
        settings: OidcSettings,
        keys: IssuerKeys,
        retry_after_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self._settings = settings
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._tenants: dict[str, None] = {}

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants of good tokens so far, up to a bound."""
        return tuple(self._tenants)

    def owner(self, token: bytes) -> Caller:
        """Return whose token that is.

        Raises `AuthenticationFailed` that says why it is not good, without quoting it; `Unavailable` if the
        issuer's keys are not known.
        """
        header = header_of(token)
        try:
            key = self.keys.find(header["kid"])
        except IssuerSilent:
            message = "The keys of the tokens' issuer (auth.oidc.issuer) are not known."
            raise Unavailable(message, self._retry_after_s) from None
        if key is None:
            raise AuthenticationFailed("The token is signed by no key of its issuer.")
        caller = self._caller(_verified(token, header["alg"], key))
        if caller.tenant is not None and len(self._tenants) < TENANTS_MAX:
            self._tenants[caller.tenant] = None
        return caller

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        own, now_s = self._settings, self._clock()
        audience = claims.get("aud")
        if claims.get("iss") != own.issuer:
            raise AuthenticationFailed("The token is of another issuer.")
        if own.audience not in (audience if isinstance(audience, list) else [audience]):
            raise AuthenticationFailed("The token is for another audience.")
        expires_s, begins_s = _time(claims, "exp"), _time(claims, "nbf")
        if expires_s is None:
            raise AuthenticationFailed("The token has no time at which it ends (exp).")
        if now_s >= expires_s + LEEWAY_S:
            raise AuthenticationFailed("The token has expired.")
        if begins_s is not None and now_s < begins_s - LEEWAY_S:
            raise AuthenticationFailed("The token is not good yet (nbf).")
        is_admin = any(_has(claims.get(name), value) for name, value in own.admin_if.items())
        tenant = claims.get(own.tenant_claim)
        if tenant is None and not is_admin:
            raise AuthenticationFailed("The token names no tenant (auth.oidc.tenant_claim).")
        if tenant is not None:
            try:
                # As it is: what is made small, or cut, could be another's name.
                tenant = TENANT.validate_python(tenant, strict=True)
            except ValidationError:
                message = "The token's tenant is none: small letters, digits, - and _, 63 at most."
                raise AuthenticationFailed(message) from None
        subject = claims.get("sub")
        by = f"token of {subject[:128]}" if isinstance(subject, str) else "token"
        return Caller(tenant, is_admin=is_admin, credential=by)


def header_of(token: bytes) -> dict[str, str]:
    """Return `alg` and `kid` of a token, of which nothing is proved yet. Raises `AuthenticationFailed`."""
    if len(token) > TOKEN_CHARS_MAX:
        raise AuthenticationFailed("The token is too long.")
    try:
        first = token.partition(b".")[0]
        header = parse_json(base64.urlsafe_b64decode(first + b"=" * (-len(first) % 4)))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise AuthenticationFailed("The token is none.")
    algorithm, kid = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:
        raise AuthenticationFailed(f"The token's algorithm is none of {', '.join(ALGORITHMS)}.")
    if not isinstance(kid, str):
        raise AuthenticationFailed("The token does not name its key (kid).")
    if "crit" in header:
        raise AuthenticationFailed("The token asks for what is not known here (crit).")
    return {"alg": algorithm, "kid": kid}


def _verified(token: bytes, algorithm: str, key: Key) -> dict[str, Any]:
    """Return the claims. Raises `AuthenticationFailed` if this key has not signed them."""
    from joserfc import jws
    from joserfc.errors import JoseError

    told = key.get("alg")
    if key.key_type != KEY_TYPES[algorithm[:2]] or told not in (None, algorithm):
        raise AuthenticationFailed("The token's algorithm is not that of its key.")
    try:
        payload = jws.deserialize_compact(token, key, algorithms=[algorithm]).payload
        claims = parse_json(payload)
    except (JoseError, ValueError):
        raise AuthenticationFailed("The token's signature is not good.") from None
    if not isinstance(claims, dict):
        raise AuthenticationFailed("The token holds no claims.")
    return claims


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    found = claims.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < TIME_S_MAX:
        raise AuthenticationFailed(f"The token's {name} is no time.")
    return float(found)


def _has(claim: Any, value: str) -> bool:
    return value in claim if isinstance(claim, list) else claim == value


class TokenKeys:
    """ASGI middleware, outside of what asks for keys: fetches the key of a token that is not known yet."""

    def __init__(self, app: ASGIApp, *, keys: IssuerKeys) -> None:
        self._app = app
        self._keys = keys
        self._fetch: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kid = self._named(scope) if scope["type"] == "http" else None
        if kid is not None and self._keys.is_asked_for(kid):
            if self._fetch is None or self._fetch.done():
                self._fetch = asyncio.ensure_future(asyncio.to_thread(self._keys.ask_for, kid))
            await asyncio.shield(self._fetch)  # one thread for all who wait, also when some leave
        await self._app(scope, receive, send)

    def _named(self, scope: Scope) -> str | None:
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        secret = token.strip(" ").encode("latin-1")
        if scheme.lower() != "bearer" or not is_token(secret):
            return None
        try:
            return header_of(secret)["kid"]
        except AuthenticationFailed:
            return None
