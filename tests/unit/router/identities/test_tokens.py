"""Tokens of an issuer: only its own, of its keys of now, for us, in time, and each of one tenant."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey
from pydantic import ValidationError

from samovar.configs.extras import ExtraMissing, missing
from samovar.configs.optional_sections import OidcSettings, is_safe_url
from samovar.configs.settings import Settings
from samovar.router.auth import Caller
from samovar.router.identities import IssuerKeys, TokenKeys, TokenVerifier
from samovar.router.identities.tokens import REFRESH_S, STALE_S, UNKNOWN_S, fetched
from samovar.router.openai import AuthenticationFailed, Unavailable
from tests.support.clock import Clock
from tests.support.router.issuer import AUDIENCE, Issuer, part, running_issuer
from tests.support.router.router_harness import House, bearer, chat, error_of, until


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with running_issuer() as found:
        yield found


@pytest.fixture
def clock() -> Clock:
    return Clock(50_000.0)


def settings_of(issuer: Issuer, **more: Any) -> OidcSettings:
    return OidcSettings(issuer=issuer.url, audience=AUDIENCE, **more)


def verifier(issuer: Issuer, clock: Clock, **more: Any) -> TokenVerifier:
    found = TokenVerifier(settings_of(issuer, **more), IssuerKeys(issuer.url, clock=clock), 1.0)
    found.keys.refresh_if_due()
    return found


def why(found: TokenVerifier, token: str) -> str:
    with pytest.raises(AuthenticationFailed) as caught:
        found.owner(token.encode())
    return str(caught.value.message)


@pytest.mark.parametrize(
    ("kind", "alg"), [("RSA", "RS256"), ("RSA", "PS512"), ("EC", "ES256"), ("OKP", "EdDSA")]
)
def test_a_good_token_is_its_tenants(issuer: Issuer, clock: Clock, kind: str, alg: str) -> None:
    issuer.rotate(kind)
    found = verifier(issuer, clock)
    caller = found.owner(issuer.token(alg=alg).encode())
    assert caller == Caller("kitchen")
    assert caller.credential == "token of u1"
    assert found.owner(issuer.token(alg=alg, tenant="garden", aud=["x", AUDIENCE]).encode()) == Caller(
        "garden"
    )
    assert found.tenants == ("kitchen", "garden")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"exp": int(time.time()) - 3600}, "expired"),
        ({"exp": None}, "no time at which it ends"),
        ({"exp": "never"}, "exp is no time"),
        ({"exp": True}, "exp is no time"),
        ({"exp": 10**400}, "exp is no time"),
        ({"exp": math.inf}, "exp is no time"),
        ({"exp": math.nan}, "exp is no time"),
        ({"nbf": int(time.time()) + 3600}, "not good yet"),
        ({"nbf": "now"}, "nbf is no time"),
        ({"iss": "https://other.example"}, "another issuer"),
        ({"iss": None}, "another issuer"),
        ({"aud": "another"}, "another audience"),
        ({"aud": ["another"]}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"aud": {AUDIENCE: 1}}, "another audience"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": "Kitchen"}, "tenant is none"),
        ({"tenant": "kitchen "}, "tenant is none"),
        ({"tenant": "kitchen\n"}, "tenant is none"),
        ({"tenant": "../kitchen"}, "tenant is none"),
        ({"tenant": "x" * 64}, "tenant is none"),
        ({"tenant": ["kitchen"]}, "tenant is none"),
        ({"tenant": 7}, "tenant is none"),
        ({"tenant": ""}, "tenant is none"),
    ],
)
def test_a_token_of_another_place_time_or_tenant_is_refused(
    issuer: Issuer, clock: Clock, changed: dict[str, Any], reason: str
) -> None:
    found = verifier(issuer, clock)
    assert reason in why(found, issuer.token(**changed))
    assert found.tenants == ()


def test_a_forged_token_is_refused(issuer: Issuer, clock: Clock) -> None:
    found = verifier(issuer, clock)
    own = issuer.keys[0]
    stranger = RSAKey.generate_key(2048, {"kid": own.kid})
    assert "signature" in why(found, issuer.token(key=stranger))
    head, body, signature = issuer.token().split(".")
    other = part(issuer.claims(tenant="garden"))
    assert "signature" in why(found, f"{head}.{other}.{signature}"), "claims of another token"
    assert "signature" in why(found, f"{head}.{body}.")
    flipped = ("A" if signature[0] != "A" else "B") + signature[1:]
    assert "signature" in why(found, f"{head}.{body}.{flipped}")
    brought = {"alg": "RS256", "kid": "mine", "jwk": stranger.as_dict(private=False)}
    assert "no key of its issuer" in why(found, issuer.unsigned(brought, b"x"))
    named = {"alg": "RS256", "kid": own.kid, "jku": "http://127.0.0.1:1/keys"}
    assert "signature" in why(found, issuer.unsigned(named, b"x"))
    asked = {"alg": "RS256", "kid": own.kid, "crit": ["exp"]}
    assert "crit" in why(found, issuer.unsigned(asked, b"x"))


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "nOnE", "", None, 0, ["RS256"]])
def test_a_token_without_a_signature_is_refused(issuer: Issuer, clock: Clock, alg: object) -> None:
    found = verifier(issuer, clock)
    header = {"alg": alg, "kid": issuer.keys[0].kid}
    assert "algorithm is none of" in why(found, issuer.unsigned(header))
    assert "algorithm is none of" in why(found, issuer.unsigned(header, b"x" * 256))


def test_what_is_published_is_no_shared_secret(issuer: Issuer, clock: Clock) -> None:
    """The confusion of HS256 with RS256: signed with the public key, in each form that it may have."""
    found = verifier(issuer, clock)
    key = issuer.keys[0]
    published = json.dumps(key.as_dict(private=False)).encode()
    for secret in (key.as_pem(private=False), key.as_der(private=False), published):
        for alg in ("HS256", "HS384", "hs256"):
            assert "algorithm is none of" in why(found, issuer.confused(secret, alg))
        assert "signature" in why(found, issuer.confused(secret, "RS256"))
        assert "not that of its key" in why(found, issuer.confused(secret, "ES256"))


def test_a_shared_secret_that_is_published_is_no_key(issuer: Issuer, clock: Clock) -> None:
    """Nor one for encrypting, one without a name, or one that is too short."""
    secret = OctKey.generate_key(256, {"kid": "oct"})
    small = RSAKey.generate_key(1024, {"kid": "small"}, auto_kid=False)
    crypt = RSAKey.generate_key(2048, {"kid": "crypt", "use": "enc"})
    bare = RSAKey.generate_key(2048)
    issuer.more = [
        one.as_dict(private=kty)
        for one, kty in ((secret, True), (small, False), (crypt, False), (bare, False))
    ]
    issuer.more += [{"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"}, {"kty": "ML-DSA", "kid": "new"}]
    issuer.more += [{"kty": "EC", "kid": "brainpool", "crv": "BP-256", "x": "AA", "y": "AA"}]
    issuer.more += [OKPKey.generate_key("X25519", {"kid": "exchange"}).as_dict(private=False)]
    issuer.more += [{"kty": ["RSA"], "kid": "list"}, {"kty": "RSA", "kid": "bare"}, {"kid": 7}, "RSA", None]
    found = verifier(issuer, clock)
    assert found.owner(issuer.token().encode()) == Caller("kitchen"), "the others do no harm"
    for kid in ("oct", "small", "crypt", "broken", "new", "brainpool", "exchange", "list", "bare"):
        assert "no key of its issuer" in why(found, issuer.token(kid=kid))


def test_a_curve_is_for_one_algorithm(issuer: Issuer, clock: Clock) -> None:
    issuer.keys = [ECKey.generate_key("P-384", {"kid": "curve"})]
    found = verifier(issuer, clock)
    assert found.owner(issuer.token(alg="ES384").encode()) == Caller("kitchen")
    for alg in ("ES256", "EdDSA"):
        why(found, issuer.unsigned({"alg": alg, "kid": "curve"}, b"x" * 64))


def test_a_key_is_for_one_algorithm(issuer: Issuer, clock: Clock) -> None:
    any_of_rsa = RSAKey.generate_key(2048, {"kid": "one"})
    issuer.keys = [RSAKey.import_key({**any_of_rsa.as_dict(private=True), "alg": "RS256"})]
    found = verifier(issuer, clock)
    assert found.owner(issuer.token().encode()) == Caller("kitchen")
    assert "not that of its key" in why(found, issuer.token(alg="PS256", key=any_of_rsa))


@pytest.mark.parametrize(
    "token",
    [
        "eyJ.eyJ.x",
        "eyJhbGciOiJSUzI1NiJ9.e30.x",
        part([1]) + ".e30.x",
        part({"alg": "RS256", "kid": 7}) + ".e30.x",
        part(b'{"a":' * 5000) + ".e30.x",
        part({"alg": "RS256", "kid": "k", "x": "y" * 20_000}) + ".e30.x",
    ],
)
def test_what_is_no_token_is_refused(issuer: Issuer, clock: Clock, token: str) -> None:
    why(verifier(issuer, clock), token)


def test_claims_that_are_none_are_refused(issuer: Issuer, clock: Clock) -> None:
    from joserfc import jws

    found = verifier(issuer, clock)
    key = issuer.keys[0]
    for payload in (b"[1]", b"no JSON", b'{"a":' * 1000, b""):
        why(found, jws.serialize_compact({"alg": "RS256", "kid": key.kid}, payload, key))


def test_clocks_may_differ_a_little(issuer: Issuer) -> None:
    found = verifier(issuer, Clock(50_000.0))
    now = int(time.time())
    assert found.owner(issuer.token(exp=now - 3).encode()) == Caller("kitchen")
    assert found.owner(issuer.token(nbf=now + 5).encode()) == Caller("kitchen")
    assert "expired" in why(found, issuer.token(exp=now - 20))
    assert "not good yet" in why(found, issuer.token(nbf=now + 60))


def test_who_is_administrator_is_said_by_the_settings(issuer: Issuer, clock: Clock) -> None:
    found = verifier(issuer, clock, admin_if={"groups": "chiefs"})
    admin, both = Caller(None, is_admin=True), Caller("kitchen", is_admin=True)
    assert found.owner(issuer.token(groups=["a", "chiefs"], tenant=None).encode()) == admin
    assert found.owner(issuer.token(groups="chiefs").encode()) == both
    for groups in ("chief", ["chiefs2"], "the chiefs", {"chiefs": 1}, None, 1):
        assert found.owner(issuer.token(groups=groups).encode()) == Caller("kitchen")
    plain = verifier(issuer, clock)
    assert plain.owner(issuer.token(groups=["chiefs"], admin=True, is_admin=True).encode()) == Caller(
        "kitchen"
    )


def test_the_tenants_claim_has_any_name(issuer: Issuer, clock: Clock) -> None:
    found = verifier(issuer, clock, tenant_claim="https://example.com/team")
    assert "names no tenant" in why(found, issuer.token())
    assert found.owner(issuer.token(**{"https://example.com/team": "garden"}).encode()) == Caller("garden")


def test_keys_are_fetched_now_and_then_and_for_an_unknown_one(issuer: Issuer, clock: Clock) -> None:
    found = verifier(issuer, clock)
    keys, old = found.keys, issuer.token()
    fetches = len(issuer.asked)
    for _ in range(20):
        found.owner(old.encode())
        keys.refresh_if_due()
    assert len(issuer.asked) == fetches, "they are kept"
    new_key = issuer.rotate()
    new = issuer.token()
    assert not keys.is_asked_for(str(new_key.kid)), "one was just made"
    clock.now_s += UNKNOWN_S
    assert keys.is_asked_for(str(new_key.kid))
    keys.ask_for(str(new_key.kid))
    assert found.owner(new.encode()) == Caller("kitchen")
    assert "no key of its issuer" in why(found, old), "the former key is gone"
    fetches = len(issuer.asked)
    for number in range(100):
        keys.ask_for(f"invented-{number}")
    assert len(issuer.asked) == fetches, "who invents names costs the issuer nothing"
    clock.now_s += UNKNOWN_S
    for number in range(100):
        keys.ask_for(f"invented-{number}")
    assert len(issuer.asked) == fetches + 2, "one fetch: discovery, and the keys"
    clock.now_s += REFRESH_S
    keys.refresh_if_due()
    assert len(issuer.asked) == fetches + 4


def test_an_issuer_that_does_not_answer_is_outlived_for_a_while(
    issuer: Issuer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    found = verifier(issuer, clock)
    token = issuer.token().encode()
    issuer.status = 500
    for _ in range(4):
        clock.now_s += STALE_S / 4
        found.keys.refresh_if_due()
        assert found.owner(token) == Caller("kitchen")
    clock.now_s += 1
    with pytest.raises(Unavailable, match="not known"):
        found.owner(token)
    assert len(caplog.messages) == 1
    issuer.status = 200
    clock.now_s += UNKNOWN_S
    found.keys.refresh_if_due()
    assert found.owner(token) == Caller("kitchen")


def test_a_fetch_that_fails_in_an_unknown_way_is_not_the_last(
    issuer: Issuer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [RuntimeError("planted")]

    def fetch(url: str) -> bytes:
        if faults:
            raise faults[0]
        return fetched(url)

    found = TokenVerifier(settings_of(issuer), IssuerKeys(issuer.url, fetch, clock), 1.0)
    found.keys.refresh_if_due()
    token = issuer.token().encode()
    with pytest.raises(Unavailable, match="not known"):
        found.owner(token)
    assert "planted" in caplog.text
    faults.clear()
    clock.now_s += UNKNOWN_S
    found.keys.refresh_if_due()
    assert found.owner(token) == Caller("kitchen")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"issuer": "http://127.0.0.1:1"}, "another issuer"),
        ({"jwks_uri": "http://keys.example/keys"}, "no jwks_uri with https"),
        ({"jwks_uri": None}, "no jwks_uri with https"),
        ({"jwks_uri": "file:///etc/passwd"}, "no jwks_uri with https"),
        ({"jwks_uri": "https://idp.example.com:port/keys"}, "cannot be had"),
    ],
)
def test_a_discovery_of_another_is_not_believed(
    issuer: Issuer, clock: Clock, changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    issuer.told |= changed
    with pytest.raises(Unavailable):
        verifier(issuer, clock).owner(issuer.token().encode())
    assert reason in caplog.text


def test_two_keys_of_one_name_are_no_list(
    issuer: Issuer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    issuer.more = [RSAKey.generate_key(2048, {"kid": issuer.keys[0].kid}).as_dict(private=False)]
    with pytest.raises(Unavailable):
        verifier(issuer, clock).owner(issuer.token().encode())
    assert "two keys of one name" in caplog.text


@pytest.mark.parametrize(
    ("url", "is_safe"),
    [
        ("https://login.example.com/realms/x", True),
        ("http://127.0.0.1:8080", True),
        ("http://localhost/x", True),
        ("http://[::1]:1/", True),
        ("http://login.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://localhost.example.com/", False),
        ("http://127.0.0.1@example.com/", False),
    ],
)
def test_an_issuer_is_asked_where_nobody_is_on_the_way(url: str, is_safe: bool) -> None:
    assert is_safe_url(url) == is_safe
    if not is_safe:
        with pytest.raises(ValidationError):
            OidcSettings(issuer=url, audience=AUDIENCE)


def test_an_issuer_has_an_audience_and_needs_its_package() -> None:
    assert OidcSettings(issuer="https://login.example.com").audience == AUDIENCE
    with pytest.raises(ValidationError):
        OidcSettings(audience="")
    assert 'samovar[oidc]"' in missing("joserfc", "auth.oidc.issuer")
    assert issubclass(ExtraMissing, Exception)


async def test_all_who_come_while_keys_are_fetched_wait_for_that_fetch(issuer: Issuer) -> None:
    """And in one thread: else a rotation refuses who comes second, or a flood takes all threads."""
    release, asked = threading.Event(), list[str]()

    def slow(url: str) -> bytes:
        asked.append(url)
        assert release.wait(30)
        return issuer.answer(url.removeprefix(issuer.url))

    keys, through = IssuerKeys(issuer.url, slow), list[bool]()
    kid = str(issuer.keys[0].kid)

    async def app(*_: Any) -> None:
        through.append(keys.find(kid) is not None)

    middleware = TokenKeys(app, keys=keys)
    headers = [(b"authorization", b"Bearer " + issuer.token().encode())]
    scope = {"type": "http", "headers": headers}
    threads = threading.active_count()
    waiting = [asyncio.ensure_future(middleware(scope, None, None)) for _ in range(50)]  # type: ignore[arg-type]
    await until(lambda: bool(asked))
    await asyncio.sleep(0)
    assert threading.active_count() <= threads + 1
    waiting.append(asyncio.ensure_future(middleware(scope, None, None)))  # type: ignore[arg-type]
    waiting[0].cancel()  # it leaves, and takes nothing along
    await asyncio.sleep(0)
    assert through == []
    release.set()
    await asyncio.wait(waiting)
    assert through == [True] * 50
    assert len(asked) == 2, "discovery, and the keys"


async def test_tokens_are_good_at_the_ingress_while_keys_rotate(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.router.identities.tokens.UNKNOWN_S", 0.0)
    told = {"issuer": issuer.url, "audience": AUDIENCE, "admin_if": {"groups": "chiefs"}}
    house = House(settings=Settings.model_validate({"auth": {"oidc": told}}))
    async with house.server() as url, httpx.AsyncClient(base_url=url) as client:

        async def ask(token: str, text: str = "hi") -> httpx.Response:
            headers = bearer(token) | {"x-session-id": "the-same"}
            return await client.post("/v1/chat/completions", json=chat(text), headers=headers)

        kitchen, garden = issuer.token(), issuer.token(tenant="garden")
        assert (await ask(kitchen)).status_code == 200
        assert (await ask(garden)).status_code == 200, "the first token waits for the keys"
        salts = [call.salt for call in house.replicas.calls]
        assert salts[0] != salts[1], "tenants are not mixed"
        for path in ("/v1/sessions", "/metrics", "/v1/models", "/cache/stats"):
            assert (await client.get(path)).status_code == 401
        shown = [
            [one["id"] for one in (await client.get("/v1/sessions", headers=bearer(token))).json()["data"]]
            for token in (kitchen, garden)
        ]
        assert [len(one) for one in shown] == [1, 1], "each sees its own"
        issuer.rotate()
        rotated = await ask(issuer.token())
        assert rotated.status_code == 200, "a key that came meanwhile is fetched for the request itself"
        refused = await ask(kitchen)
        assert refused.status_code == 401
        assert error_of(refused)["code"] == "invalid_api_key"
        assert kitchen not in refused.text
        for bad in (
            issuer.token(aud="another"),
            issuer.token(exp=1),
            issuer.unsigned({"alg": "none", "kid": issuer.keys[0].kid}),
            issuer.confused(issuer.keys[0].as_pem(private=False)),
        ):
            assert (await ask(bad)).status_code == 401
        admin = issuer.token(tenant=None, groups=["chiefs"])
        assert (await client.get("/metrics", headers=bearer(admin))).status_code == 200
        assert (await client.get("/metrics", headers=bearer(issuer.token()))).status_code == 403
        every = (await client.get("/v1/sessions", headers=bearer(admin))).json()["data"]
        assert {one["tenant"] for one in every} == {"kitchen", "garden"}
        unnamed = await client.post("/cache/clear", headers=bearer(admin))
        assert error_of(unnamed)["param"] == "tenant"
        named = await client.post("/cache/clear", json={"tenant": "kitchen"}, headers=bearer(admin))
        assert named.status_code == 200
