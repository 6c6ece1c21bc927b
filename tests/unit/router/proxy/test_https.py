"""The guard over TLS: what Serve's options make of it, and who is answered without a certificate."""

from __future__ import annotations

import json
import shutil
import ssl
from pathlib import Path

import httpx
import pytest

from samovar.cluster.serve.rollout import http_options
from samovar.configs.settings import ServerSettings
from samovar.configs.tls import TlsFiles
from tests.support.router.certificates import Authority
from tests.unit.router.proxy.test_proxy_guard import guarded


@pytest.fixture
def tea(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "tea")


def options(files: TlsFiles, client_ca: Path | None = None) -> dict[str, str]:
    """What Serve's proxy gives to uvicorn for these settings."""
    server = ServerSettings(tls_certificate=files.certificate, tls_key=files.key, tls_client_ca=client_ca)
    return {name: value for name, value in http_options(server).items() if name.startswith("ssl_")}


def client(tea: Authority, port: int, own: TlsFiles | None = None) -> httpx.AsyncClient:
    trust = ssl.create_default_context(cafile=tea.file)
    if own is not None:
        trust.load_cert_chain(own.certificate, own.key)
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust, trust_env=False)


async def test_answers_come_over_tls_and_say_to_stay_there(
    monkeypatch: pytest.MonkeyPatch, tea: Authority
) -> None:
    async with (
        guarded(monkeypatch, tls=options(tea.issue("server"))) as (_, port, serve),
        client(tea, port) as asking,
    ):
        for _ in range(2):
            answer = await asking.post("/echo", content=b"tea")
            assert answer.json() == {"bytes": 3}
            assert answer.headers.get_list("strict-transport-security") == ["max-age=31536000"]
        assert serve.scopes[0]["scheme"] == "https"
        assert "server" not in answer.headers


async def test_plain_http_is_not_answered_there(monkeypatch: pytest.MonkeyPatch, tea: Authority) -> None:
    async with guarded(monkeypatch, tls=options(tea.issue("server"))) as (host, port, serve):
        async with httpx.AsyncClient(trust_env=False) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://{host}:{port}/health")
        assert not serve.scopes


async def test_a_certificate_is_taken_up_while_the_server_runs(
    monkeypatch: pytest.MonkeyPatch, tea: Authority
) -> None:
    files = tea.issue("server", host="other.example")
    async with guarded(monkeypatch, tls=options(files)) as (_, port, _):
        async with client(tea, port) as asking:
            with pytest.raises(httpx.ConnectError, match="IP address mismatch"):
                await asking.post("/echo", content=b"tea")
        right = tea.issue("right")
        shutil.copy(right.key, files.key)
        shutil.copy(right.certificate, files.certificate)
        async with client(tea, port) as asking:
            assert (await asking.post("/echo", content=b"tea")).status_code == 200


async def test_without_a_certificate_of_theirs_clients_learn_health_alone(
    monkeypatch: pytest.MonkeyPatch, tea: Authority
) -> None:
    async with guarded(monkeypatch, tls=options(tea.issue("server"), tea.file)) as (_, port, serve):
        async with client(tea, port) as nobody:
            assert (await nobody.get("/health?quick=1")).status_code != 403
            known = len(serve.scopes)
            for path in ("/echo", "/health/../echo", "/healthy", "/"):
                refused = await nobody.get(path)
                assert refused.status_code == 403, path
                assert "server.tls_client_ca" in refused.json()["error"]["message"]
            assert len(serve.scopes) == known, "none of them was passed on"
        async with client(tea, port, tea.issue("guest")) as guest:
            assert (await guest.post("/echo", content=b"tea")).json() == {"bytes": 3}


async def test_a_refusal_is_read_although_its_body_was_not(
    monkeypatch: pytest.MonkeyPatch, tea: Authority
) -> None:
    """TLS has no half-closed connections: what is sent behind a refusal must be read and dropped."""
    async with (
        guarded(monkeypatch, tls=options(tea.issue("server"))) as (_, port, _),
        client(tea, port) as asking,
    ):
        for _ in range(5):
            refused = await asking.post("/echo", content=b"x" * 400_000)
            assert refused.status_code == 413
            assert json.loads(refused.content)["error"]["code"]
