"""What others on this machine get at, what is refused at the start, and one replica that is killed."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import psutil
import pytest
import torch

from tests.support.services.service import MODEL, Service, for_served_dtype, serving, until

LOOPBACK_IN_IPV6 = "::ffff:127.0.0.1"


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One replica, and no answer goes on at another."""
    flags = ("--engine.pool-bytes-max", str(for_served_dtype(64 * 2**20)), "--router.resumes-max", "0")
    with serving(tmp_path_factory.mktemp("lost") / "out.txt", *flags) as service:
        yield service


@pytest.mark.guarantee("F37")
def test_nothing_listens_beyond_this_machine(service: Service) -> None:
    """F37, S1. Ray's own servers too: whoever reaches them can run code."""
    listening = [
        (process.name(), connection.laddr.ip, connection.laddr.port)
        for process in service.processes()
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    beyond = [
        (name, port) for name, ip, port in listening if ip not in ("127.0.0.1", "::1", LOOPBACK_IN_IPV6)
    ]
    # Serve's replicas bind their internal gRPC port to all interfaces; it must ask for Ray's token.
    assert all(name.startswith("ray::ServeRepli") for name, _ in beyond), beyond
    for _, port in beyond:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_nobody_else_gets_at_rays_sockets_logs_and_token(service: Service, sockets: Path) -> None:
    assert sockets.is_socket() or list(sockets.iterdir())
    walls = [
        folder
        for folder in sockets.parents
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o077
    ]
    assert walls, f"others get at {sockets}"
    assert all((folder / "ray").is_dir() for folder in walls)
    token = service.output.parent / "token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert f"{token} was readable by other users (mode 0644)" in service.text


def test_rays_workers_are_no_nicer_than_the_service(service: Service) -> None:
    """Ray's default is 15: a tier actor then gets no core beside a busy neighbour."""
    workers = [process for process in service.processes() if process.cmdline()[:1][0].startswith("ray::")]
    titles = " ".join(process.cmdline()[0] for process in workers)
    assert "ServeReplica" in titles
    assert "TierActor" in titles
    own = psutil.Process(service.process.pid).nice()
    assert {process.nice() for process in workers} == {own}, titles


@pytest.mark.slow  # a service more; the gate kills them in test_failover.py
def test_killed_in_mid_stream_ends_with_an_error_event_never_a_silent_cut(lone: Service) -> None:
    """F20 where answers may not go on elsewhere (`test_failover.py`): an error with a code."""
    stream = lone.openai().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me about tea."}],
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = iter(stream)
    for _ in range(3):
        next(chunks)
    (pid,) = lone.replica_pids()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError) as caught:
        for _ in chunks:
            pass
    assert caught.value.code == "replica_lost"


@pytest.mark.slow
def test_the_service_heals(lone: Service) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

    def answers() -> bool:
        with lone.http() as http:
            answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200

    until("a new replica answers", answers, 120)
    until("no page is held", lone.idle)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: nothing to refuse")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused = Service(tmp_path / "gpu.txt", "--config", "local-gpu")
    assert refused.process.wait(120) == 2
    assert "engine.device" in refused.text


def test_a_busy_port_is_named(service: Service, tmp_path: Path) -> None:
    second = Service(tmp_path / "second.txt", port=service.port)
    assert second.process.wait(120) == 1
    assert f"127.0.0.1:{service.port}" in second.text
    assert "--port" in second.text
