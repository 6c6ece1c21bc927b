"""Keys of a file at the ingress: on connections that stay open, at every ingress, and apart by tenant."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from samovar.configs.settings import AuthSettings, Settings
from samovar.router.identities import KeyFile
from tests.support.router.router_harness import House, bearer, chat, error_of


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def settings_of(file: KeyFile, **more: object) -> Settings:
    return Settings.model_validate({"auth": {"keys_file": file.path}, **more})


async def status(client: httpx.AsyncClient, key: str, path: str = "/v1/models") -> int:
    return (await client.get(path, headers=bearer(key))).status_code


async def until_status(client: httpx.AsyncClient, key: str, wanted: int) -> None:
    async with asyncio.timeout(10):
        while await status(client, key) != wanted:
            pass


async def test_a_revoked_key_is_refused_at_each_ingress_on_open_connections(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.router.identities.identities.LOOK_S", 0.05)
    record, key = file.create("kitchen")
    houses = [House(settings=settings_of(file)) for _ in range(2)]
    limits = httpx.Limits(max_connections=1)
    async with (
        houses[0].server() as one,
        houses[1].server() as two,
        httpx.AsyncClient(base_url=one, limits=limits) as first,
        httpx.AsyncClient(base_url=two, limits=limits) as second,
    ):
        for client in (first, second):
            answer = await client.post("/v1/chat/completions", json=chat(), headers=bearer(key))
            assert answer.status_code == 200
            assert answer.headers.get("connection") != "close"
        file.revoke(record.id)
        for client in (first, second):
            await until_status(client, key, 401)
            answer = await client.post("/v1/chat/completions", json=chat(), headers=bearer(key))
            assert error_of(answer)["message"] == "The API key is revoked."
        _, new = file.create("kitchen")
        for client in (first, second):
            await until_status(client, new, 200)


async def test_the_file_makes_the_endpoint_one_with_keys(file: KeyFile) -> None:
    """Everything that an endpoint with `auth.api_keys` refuses: nothing is as on an open one."""
    _, key = file.create("kitchen")
    _, admin = file.create(None)
    house = House(settings=settings_of(file))
    async with house.client() as client:
        for path in ("/v1/models", "/metrics", "/v1/sessions", "/cache/stats", "/v1/usage", "/openapi.json"):
            answer = await client.get(path)
            assert answer.status_code == 401, path
            assert error_of(answer)["code"] == "invalid_api_key"
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 401
        assert (await client.get("/health")).status_code == 200
        for path, tenants, admins in (
            ("/metrics", 403, 200),
            ("/cache/stats", 403, 200),
            ("/v1/usage", 200, 200),
            ("/v1/sessions", 200, 200),
        ):
            assert (await status(client, key, path), await status(client, admin, path)) == (tenants, admins)
        foreign = {"host": "evil.example", "origin": "http://evil.example"}
        assert (await client.get("/v1/models", headers={**bearer(key), **foreign})).status_code == 200
        refused = await client.delete("/v1/cache", headers=bearer(admin))
        assert "belongs to no tenant" in error_of(refused)["message"]
    assert house.service.concurrency.has_keys


async def test_tenants_of_the_file_are_apart_and_the_administrator_sees_them(file: KeyFile) -> None:
    _, kitchen = file.create("kitchen")
    _, garden = file.create("garden")
    _, admin = file.create(None)
    house = House(settings=settings_of(file))
    async with house.client() as client:
        named = {"x-session-id": "the-same"}
        for key in (kitchen, garden):
            answer = await client.post(
                "/v1/chat/completions", json=chat(f"of {key[-4:]}"), headers={**bearer(key), **named}
            )
            assert answer.status_code == 200
        salts = [request.salt for request in house.replicas.calls]
        assert salts[0] != salts[1]
        own = (await client.get("/v1/sessions", headers=bearer(kitchen))).json()["data"]
        assert len(own) == 1
        assert "tenant" not in own[0]
        every = (await client.get("/v1/sessions", headers=bearer(admin))).json()["data"]
        assert sorted(one["tenant"] for one in every) == ["garden", "kitchen"]
        (others,) = [one["id"] for one in every if one["tenant"] == "garden"]
        assert await status(client, kitchen, f"/v1/sessions/{others}") == 404
        assert await status(client, garden, f"/v1/sessions/{others}") == 200
        assert await status(client, admin, f"/v1/sessions/{others}") == 200
        cleared = await client.post("/cache/clear", headers=bearer(admin))
        assert cleared.status_code == 200, cleared.text
        assert (await client.get("/v1/sessions", headers=bearer(admin))).json()["data"] == []


async def test_a_clear_of_all_where_no_tenant_has_a_key_is_of_none(file: KeyFile) -> None:
    _, admin = file.create(None)
    house = House(settings=settings_of(file))
    async with house.client() as client:
        cleared = await client.post("/cache/clear", headers=bearer(admin))
        assert cleared.json()["replicas"] == 0


@pytest.mark.parametrize("more", [{"server": {"host": "0.0.0.0"}}, {"server": {"cors_origins": ("*",)}}])
def test_what_needs_keys_takes_those_of_a_file(file: KeyFile, more: Mapping[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate(more)
    settings = settings_of(file, **more)
    assert settings.auth.has_keys
    assert settings.has_tenants
    assert settings.best_priority("kitchen") == 0
    assert settings.share_of_tenant(None) == 0.5


def test_who_has_no_keys_is_open_as_before() -> None:
    assert not AuthSettings().has_keys
    assert not Settings().has_tenants
    assert AuthSettings.model_validate({"api_keys": {"kitchen": "k" * 16}}).has_keys


async def test_a_live_stream_is_of_a_tenant_of_the_file(file: KeyFile) -> None:
    _, key = file.create("kitchen")
    house = House(settings=settings_of(file))
    async with (
        house.server() as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("GET", "/v1/live", headers=bearer(key)) as stream,
    ):
        assert stream.status_code == 200
        async for line in stream.aiter_lines():
            if '"scope":"tenant"' in line.replace(" ", ""):
                return
    raise AssertionError("no state was told")


async def test_the_administrator_makes_rotates_and_revokes_keys_over_http(
    file: KeyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.router.identities.identities.LOOK_S", 0.05)
    _, admin = file.create(None)
    log = tmp_path / "audit.jsonl"
    house = House(settings=settings_of(file, **{"auth": {"keys_file": file.path, "audit_file": log}}))
    async with house.server() as url, httpx.AsyncClient(base_url=url, headers=bearer(admin)) as client:
        made = await client.post("/v1/keys", json={"tenant": "kitchen", "lasts_s": 3600})
        assert made.status_code == 201, made.text
        assert made.headers["cache-control"] == "no-store"
        first = made.json()
        assert (first["tenant"], first["state"], first["expires"] - first["created"]) == (
            "kitchen",
            "valid",
            3600,
        )
        await until_status(client, first["key"], 200)
        rotated = (await client.post(f"/v1/keys/{first['id']}/rotate")).json()
        await until_status(client, rotated["key"], 200)
        assert await status(client, first["key"]) == 200, "both are good for a while"
        listed = (await client.get("/v1/keys", params={"limit": 2})).json()
        assert [key["tenant"] for key in listed["data"]] == [None, "kitchen"]
        assert listed["has_more"]
        rest = (await client.get("/v1/keys", params={"after": listed["data"][-1]["id"]})).json()
        assert [key["id"] for key in rest["data"]] == [rotated["id"]]
        assert not rest["has_more"]
        for key in (first["key"], rotated["key"], admin):
            assert key not in str(listed) + str(rest)
            assert hashlib.sha256(key.encode()).hexdigest() not in str(listed) + str(rest)
        gone = (await client.delete(f"/v1/keys/{first['id']}")).json()
        assert gone["state"] == "revoked"
        await until_status(client, first["key"], 401)
        over = await client.post(f"/v1/keys/{first['id']}/rotate", json={})
        assert (over.status_code, error_of(over)["param"]) == (400, "key_id")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    changes = [line for line in lines if line["event"] == "keys" and line["status"] < 400]
    assert [(line["what"], line["key"]["id"]) for line in changes] == [
        ("POST /v1/keys", first["id"]),
        ("POST /v1/keys/{key_id}/rotate", rotated["id"]),
        ("DELETE /v1/keys/{key_id}", first["id"]),
    ]
    assert not any(key in log.read_text() for key in (first["key"], rotated["key"], admin))


async def test_keys_are_for_the_administrator_and_bad_wishes_change_nothing(file: KeyFile) -> None:
    _, admin = file.create(None)
    record, key = file.create("kitchen")
    house = House(settings=settings_of(file))
    async with house.client() as client:
        for method, path in (
            ("GET", "/v1/keys"),
            ("POST", "/v1/keys"),
            ("POST", f"/v1/keys/{record.id}/rotate"),
            ("DELETE", f"/v1/keys/{record.id}"),
        ):
            refused = await client.request(method, path, headers=bearer(key))
            assert refused.status_code == 403, path
            assert (await client.request(method, path)).status_code == 401, path
        before = file.path.read_bytes()
        for body, param in (
            ({}, None),
            ({"tenant": "kitchen", "admin": True}, None),
            ({"tenant": "Not one"}, "tenant"),
            ({"tenant": "kitchen", "lasts_s": 0}, "lasts_s"),
            ({"tenant": "kitchen", "lasts_s": 1e99}, "lasts_s"),
            ({"tenant": "kitchen", "days": 3}, "days"),
        ):
            refused = await client.post("/v1/keys", json=body, headers=bearer(admin))
            assert refused.status_code == 400, refused.text
            assert error_of(refused)["param"] == param, refused.text
            owner = "give the tenant whose key it is, or admin: true" in error_of(refused)["message"]
            assert owner == (param is None)
        for method, path in (("DELETE", "/v1/keys/key_000000000000"), ("POST", "/v1/keys/none/rotate")):
            unknown = await client.request(method, path, headers=bearer(admin))
            assert (unknown.status_code, error_of(unknown)["code"]) == (404, "key_not_found")
        assert file.path.read_bytes() == before
        file.path.chmod(0o666)
        broken = await client.post("/v1/keys", json={"tenant": "kitchen"}, headers=bearer(admin))
        assert (broken.status_code, file.path.read_bytes()) == (503, before)
        assert "others may write" in error_of(broken)["message"]


async def test_without_a_file_there_are_no_routes_of_keys() -> None:
    async with House().client() as client:
        assert (await client.get("/v1/keys")).status_code == 404
