"""HTTPS by a private authority: real clients, a certificate that is renewed, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.router.certificates import Authority
from tests.support.services.service import MODEL, READY, Service, for_served_dtype

SAMOVAR = Path(sys.executable).with_name("samovar")


@pytest.fixture(scope="module")
def tea(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "tea")


@pytest.fixture(scope="module")
def service(tea: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    files = tea.issue("server")
    one = Service(
        tmp_path_factory.mktemp("https") / "out.txt",
        *("--server.tls-certificate", str(files.certificate), "--server.tls-key", str(files.key)),
        *("--engine.pool-bytes-max", str(for_served_dtype(64 * 2**20)), "--engine.threads", "1"),
    )
    one.url = f"https://127.0.0.1:{one.port}"
    try:
        yield one.wait_ready()
    finally:
        assert one.stop() == 0, one.text


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A program to its end, with these variables besides its environment."""
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def curl(service: Service, *flags: str) -> subprocess.CompletedProcess[str]:
    return run("curl", "-sS", "--noproxy", "*", *flags, f"{service.url}/health")


def test_real_clients_trust_the_authority(service: Service, tea: Authority) -> None:
    ready = READY.search(service.text)
    assert ready is not None
    assert ready[1] == service.url
    assert json.loads(curl(service, "--cacert", str(tea.file)).stdout)["status"] == "ok"
    with httpx.Client(verify=ssl.create_default_context(cafile=tea.file), trust_env=False) as trusting:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", http_client=trusting)
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_our_own_commands_know_the_certificate_of_the_server_here(service: Service) -> None:
    status = run(SAMOVAR, "status", "--json", XDG_STATE_HOME=str(service.output.with_suffix(".state")))
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["health"]["status"] == "ok"
    nobody = str(service.output.with_suffix(".nobody"))
    stranger = run(SAMOVAR, "status", "--url", service.url, "--json", XDG_STATE_HOME=nobody)
    assert stranger.returncode != 0
    assert "certificate" in stranger.stderr


def test_strangers_plain_text_and_old_versions_are_refused(service: Service, tea: Authority) -> None:
    assert "certificate" in curl(service).stderr
    other = Authority(tea.folder, "coffee")
    assert "certificate" in curl(service, "--cacert", str(other.file)).stderr
    assert curl(service, "--cacert", str(tea.file), "--tls-max", "1.1").returncode != 0
    with socket.create_connection(("127.0.0.1", service.port), 10) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        plain.settimeout(20)
        said = b""
        with suppress(ConnectionResetError):
            while piece := plain.recv(4096):
                said += piece
    assert b"HTTP" not in said


def test_a_renewed_certificate_is_served_without_a_restart(service: Service, tea: Authority) -> None:
    def serial() -> str:
        told = curl(service, "--cacert", str(tea.file), "-v", "-o", "/dev/null", "-w", "%{certs}")
        assert told.returncode == 0, told.stderr
        return next(line for line in told.stdout.splitlines() if line.startswith("Serial Number:"))

    before, new = serial(), tea.issue("renewed")
    shutil.copy(new.key, tea.folder / "server.key")
    shutil.copy(new.certificate, tea.folder / "server.pem")
    assert serial() != before


def test_a_certificate_that_nobody_could_trust_is_refused_at_once(tea: Authority, tmp_path: Path) -> None:
    late = tea.issue("late", days=-1)
    flags = ("--server.tls-certificate", str(late.certificate), "--server.tls-key", str(late.key))
    ended = run(SAMOVAR, "serve", "--tiers.nvme.dir", tmp_path, *flags)
    assert ended.returncode != 0
    assert "server.tls_certificate" in ended.stderr
    assert "expired" in ended.stderr
