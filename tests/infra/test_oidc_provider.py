"""Tokens of a real issuer, npm's oidc-provider, at the ingress: its keys rotated, its tenants apart."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from joserfc.jwk import RSAKey

from samovar.configs.settings import Settings
from tests.infra.needs import need, needs_infra
from tests.support.router.issuer import part
from tests.support.router.router_harness import House, bearer, chat
from tests.support.services.service import free_port

pytestmark = needs_infra
SCRIPT = Path(__file__).with_name("oidc_provider.mjs")
MODULES = Path(os.environ.get("TESTS_OIDC_PROVIDER", "build/oidc/node_modules")).absolute()
START_S = 120.0


class Provider:
    """The issuer's process, whose keys are exchanged by a restart: as far as clients see, they rotate."""

    def __init__(self, folder: Path, modules: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys: list[dict[str, object]] = []
        self._folder = folder
        shutil.copy(SCRIPT, folder)
        (folder / "node_modules").symlink_to(modules)

    @asynccontextmanager
    async def running(self, *keys: RSAKey) -> AsyncIterator[None]:
        self.keys = [key.as_dict(private=True) for key in keys]
        (self._folder / "keys.json").write_text(json.dumps({"keys": self.keys}))
        process = await asyncio.create_subprocess_exec(
            *("node", SCRIPT.name, str(self.port), "keys.json"),
            cwd=self._folder,
            env={**os.environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
                while not await self._answers(client):
                    assert process.returncode is None, "the issuer has ended"
            yield
        finally:
            process.terminate()
            await process.wait()

    async def _answers(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/.well-known/openid-configuration")).status_code == 200
        except httpx.TransportError:
            return False

    async def token(self, client_id: str, resource: str = "urn:samovar") -> str:
        form = {
            "grant_type": "client_credentials",
            "client_id": client_id,
            "client_secret": f"secret-of-{client_id}-in-a-test",
            "resource": resource,
        }
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{self.url}/token", data=form)
        assert answer.status_code == 200, answer.text
        token: str = answer.json()["access_token"]
        return token


def key(name: str) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": name, "use": "sig"})


async def test_tokens_of_a_real_issuer_while_its_keys_rotate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("node")
    monkeypatch.setattr("samovar.router.identities.tokens.UNKNOWN_S", 0.0)
    monkeypatch.setattr("samovar.router.identities.tokens.LEEWAY_S", 0.0)
    issuer = Provider(tmp_path, MODULES)
    told = {"issuer": issuer.url, "audience": "samovar", "admin_if": {"groups": "samovar-admins"}}
    house = House(settings=Settings.model_validate({"auth": {"oidc": told}}))
    first, second = key("first"), key("second")
    async with house.server() as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def status(token: str, path: str = "/v1/models") -> int:
            return (await client.get(path, headers=bearer(token))).status_code

        async with issuer.running(first):
            kitchen, garden = await issuer.token("kitchen"), await issuer.token("garden")
            for token in (kitchen, garden):
                headers = bearer(token) | {"x-session-id": "the-same"}
                answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
                assert answer.status_code == 200, answer.text
            assert len({call.salt for call in house.replicas.calls}) == 2, "tenants are not mixed"
            for token in (kitchen, garden):
                assert len((await client.get("/v1/sessions", headers=bearer(token))).json()["data"]) == 1
            assert await status(kitchen, "/metrics") == 403
            chief = await issuer.token("chief")
            assert await status(chief, "/metrics") == 200
            assert await status(await issuer.token("kitchen", "urn:other")) == 401, "for another audience"
            short = await issuer.token("kitchen", "urn:short")
            async with asyncio.timeout(60):
                while await status(short) != 401:
                    pass
            head, claims, signature = kitchen.split(".")
            _, of_garden, _ = garden.split(".")
            assert await status(f"{head}.{of_garden}.{signature}") == 401, "claims of another's token"
            assert await status(f"{part({'alg': 'none', 'kid': 'first'})}.{claims}.") == 401
        async with issuer.running(second, first):
            assert await status(await issuer.token("kitchen")) == 200, "signed by the new key"
            assert await status(kitchen) == 200, "the former one is still published"
        async with issuer.running(second):
            await status(f"{part({'alg': 'RS256', 'kid': 'unknown'})}.{claims}.{signature}")  # fetches anew
            assert await status(kitchen) == 401, "the former key is gone"
            assert await status(await issuer.token("garden")) == 200
