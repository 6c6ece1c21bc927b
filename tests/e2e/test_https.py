"""HTTPS by a private authority, and TLS between the processes behind it: real clients, what is refused.

The service speaks both, so that no port at all may answer plain text.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from samovar.configs.tls import TlsFiles
from tests.house import ROOT
from tests.support.router.certificates import Authority
from tests.support.services.service import MODEL, READY, Service, for_served_dtype

SAMOVAR = Path(sys.executable).with_name("samovar")


@pytest.fixture(scope="module")
def tea(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "tea")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who certifies processes for each other; its file lists a certificate that is revoked."""
    made = Authority(tmp_path_factory.mktemp("nodes"), "nodes")
    made.issue("revoked")
    folder, own = made.folder / "tls", made.issue("node")
    folder.mkdir()
    shutil.copy(own.certificate, folder / "tls.crt")
    shutil.copy(own.key, folder / "tls.key")
    (folder / "ca.crt").write_bytes(made.file.read_bytes() + made.revoke("revoked"))
    return made


@pytest.fixture(scope="module")
def service(tea: Authority, nodes: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    files = tea.issue("server")
    one = Service(
        tmp_path_factory.mktemp("https") / "out.txt",
        *("--server.tls-certificate", str(files.certificate), "--server.tls-key", str(files.key)),
        *("--cluster.tls-dir", str(nodes.folder / "tls")),
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
    # And what it said went over links, and not through Serve for want of them.
    inlets = {port for port, address in ports_of(service).items() if address == HERE} - {service.port}
    assert inlets <= connected(service), "an inlet has no link"


@pytest.mark.skipif(shutil.which("javac") is None, reason="there is no JDK")
def test_a_client_in_java_trusts_the_authority_alone(service: Service, tea: Authority) -> None:
    """It offers an upgrade to HTTP/2, as the JDK's does by default."""
    words = ("java", ROOT / "tests/clients/scripts/Chat.java", service.url)
    told = run(*words, tea.file, MODEL)
    first, *events = told.stdout.splitlines()
    assert first == "200 HTTP_1_1 TLSv1.3", told.stderr
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert "Paris" in text
    stranger = run(*words, Authority(tea.folder, "java").file, MODEL)
    assert stranger.returncode != 0
    assert "PKIX path" in stranger.stderr


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


HELLOS = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",  # what gRPC begins with
    b"\xff\0\0\0\0\0\0\0\1\x7f",  # ZeroMQ
    b"\0" * 64,
)
ALERT, HERE = b"\x15", "127.0.0.1"


def ports_of(service: Service) -> dict[int, str]:
    """All ports that the service's processes listen at, -> the address; its own are at IPv4's loopback."""
    found = {}
    for process in service.processes():
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    found[one.laddr.port] = one.laddr.ip
    return found


def connected(service: Service) -> set[int]:
    """Ports at which one of the service's processes has a connection."""
    found = [process.net_connections("inet") for process in service.processes()]
    return {one.laddr.port for some in found for one in some if one.status == psutil.CONN_ESTABLISHED}


def answer(port: int, hello: bytes, context: ssl.SSLContext | None = None) -> bytes | None:
    """What a port says to `hello` until it closes; None: it keeps the connection, and says nothing."""
    said = b""
    try:
        with socket.create_connection((HERE, port), 10) as plain:
            plain.settimeout(6)  # above what who does not prove itself is given
            with plain if context is None else context.wrap_socket(plain, server_hostname=HERE) as one:
                one.sendall(hello)
                while piece := one.recv(4096):
                    said += piece
    except TimeoutError:
        return said or None
    except OSError:  # a reset, or an alert that the ssl module has read
        return said
    return said


def answers(
    ports: Iterable[int], hello: bytes, context: ssl.SSLContext | None = None
) -> dict[int, bytes | None]:
    with ThreadPoolExecutor(32) as pool:
        asked = {port: pool.submit(answer, port, hello, context) for port in ports}
        return {port: one.result() for port, one in asked.items()}


def showing(trusted: Path, own: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted)
    context.set_alpn_protocols(["h2"])  # gRPC takes no other
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def test_no_port_answers_plain_text(service: Service) -> None:
    ports = ports_of(service)
    own = {port for port, address in ports.items() if address == HERE}
    assert service.port in own
    assert len(own) >= 4, f"the endpoint, and inlets of proxy, ingress and replica: {ports}"
    assert len(ports) > len(own) + 5, f"Ray's: {ports}"
    for hello in HELLOS:
        for port, said in answers(ports, hello).items():
            assert said is not None, f"port {port} waits for more"
            assert said[:1] in (b"", ALERT), f"port {port} answers {hello!r} with {said!r}"


def test_each_port_wants_a_certificate_of_the_authority(service: Service, nodes: Authority) -> None:
    ports = {port: address for port, address in ports_of(service).items() if port != service.port}
    good, late = nodes.issue("good"), nodes.issue("late", days=-1)
    stranger = Authority(nodes.folder, "coffee").issue("stranger")
    for own in (None, late, stranger):
        refused = answers(ports, HELLOS[1], showing(nodes.file, own))
        assert refused == dict.fromkeys(ports, b""), own
    # Of ours, so is one that is revoked; Ray reads no lists of those.
    ours = [port for port, address in ports.items() if address == HERE]
    revoked = TlsFiles(nodes.folder / "revoked.pem", nodes.folder / "revoked.key")
    assert answers(ours, HELLOS[1], showing(nodes.file, revoked)) == dict.fromkeys(ours, b"")
    for port, said in answers(ports, HELLOS[1], showing(nodes.file, good)).items():
        assert said, f"port {port} is silent to who may ask"


def test_certificates_that_nodes_could_not_use_are_refused_at_once(nodes: Authority, tmp_path: Path) -> None:
    late = nodes.issue("too-late", days=-1)
    for source, name in ((nodes.file, "ca.crt"), (late.certificate, "tls.crt"), (late.key, "tls.key")):
        shutil.copy(source, tmp_path / name)
    ended = run(SAMOVAR, "serve", "--tiers.nvme.dir", tmp_path / "kv", "--cluster.tls-dir", tmp_path)
    assert ended.returncode != 0
    assert "cluster.tls_dir" in ended.stderr
    assert "expired" in ended.stderr
