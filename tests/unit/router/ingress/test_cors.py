"""CORS: allowed origins get what a browser needs, others get what they got without it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.support.router.router_harness import KEY, House, chat, make_settings

CHAT = "/v1/chat/completions"
APP = "https://app.example:8443"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-api-key"}


def cors(headers: object) -> dict[str, str]:
    return {name: value for name, value in dict(headers).items() if name.startswith("access-control")}  # type: ignore[call-overload]


@pytest.mark.parametrize("keys", [None, {"alpha": KEY}])
async def test_an_allowed_page_may_ask_and_call(keys: dict[str, str] | None) -> None:
    house = House(settings=make_settings(keys=keys, cors_origins=(APP,)))
    async with house.client(origin=APP) as client:
        preflight = await client.options(CHAT, headers=ASKS)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == APP
        assert "x-api-key" in preflight.headers["access-control-allow-headers"]
        answer = await client.post(CHAT, json=chat(), headers={"x-api-key": KEY})
        assert answer.status_code == 200
        refused = await client.post(CHAT, json={}, headers={"x-api-key": KEY})
        assert refused.status_code == 400
    for response in (preflight, answer, refused):
        assert response.headers["access-control-allow-origin"] == APP
        assert "access-control-allow-credentials" not in response.headers
        assert response.headers["vary"].lower().startswith("origin")
    assert "x-cache" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example", f"{APP}.evil.example", "null"]
)
@pytest.mark.parametrize("keys", [None, {"alpha": KEY}])
async def test_other_pages_get_what_they_got_before(origin: str, keys: dict[str, str] | None) -> None:
    house = House(settings=make_settings(keys=keys, cors_origins=(APP,)))
    plain = House(settings=make_settings(keys=keys))
    told = []
    for one in (house, plain):
        async with one.client(origin=origin) as client:
            preflight = await client.options(CHAT, headers=ASKS)
            answer = await client.post(CHAT, json=chat(), headers={"x-api-key": KEY})
        assert not cors(preflight.headers) | cors(answer.headers)
        told.append((preflight.status_code, answer.status_code))
    assert told[0] == told[1] == ((204, 200) if keys else (403, 403))


async def test_any_origin_needs_keys_and_gets_no_credentials() -> None:
    with pytest.raises(ValidationError, match=r"cors_origins holds '\*'"):
        make_settings(cors_origins=("*",))
    house = House(settings=make_settings(keys={"alpha": KEY}, cors_origins=("*",)))
    async with house.client(origin="https://any.example", **{"x-api-key": KEY}) as client:
        preflight = await client.options(CHAT, headers=ASKS)
        answer = await client.post(CHAT, json=chat())
    for response in (preflight, answer):
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://*.example", "HTTPS://A", "null"]
)
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        make_settings(cors_origins=(origin,))
