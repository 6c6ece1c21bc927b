"""An ingress and a replica of a whole service are killed, and another user listens on all their ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.faults import dead_listener
from tests.support.services.service import REPLICA, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.guarantee("F33")]

INGRESS = r"ServeReplica:samovar:"
KEY, PROMPT = "alice-key-0123456789abcdef", "what only alice is to read"


@contextmanager
def squatter(port: int, told: list[bytes]) -> Iterator[None]:
    command = [sys.executable, dead_listener.__file__, "squat", str(port), "number"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip().isdigit()
            yield
            process.stdin.close()
            told.append(bytes.fromhex(process.stdout.readline().decode()))
        finally:
            process.kill()


@pytest.mark.parametrize("title", [INGRESS, REPLICA.pattern], ids=["ingress", "replica"])
def test_f33_who_takes_its_ports_is_told_nothing(tmp_path: Path, title: str) -> None:
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 4,
    }
    told: list[bytes] = []
    with serving(tmp_path / "out.txt", key=KEY) as service, ExitStack() as squatters:
        client = httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)

        def answered() -> bool:
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 or "error" in answer.json()
            return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1

        until("an answer", answered, 60)
        (pid,) = service.pids_of(title)
        ports = {one.laddr.port for one in psutil.Process(pid).net_connections() if one.status == "LISTEN"}
        assert ports
        os.kill(pid, signal.SIGKILL)
        until("it is dead", lambda: not psutil.pid_exists(pid))
        for port in ports:
            squatters.enter_context(squatter(port, told))
        for _ in range(3):
            until("an answer", answered, 120)
        squatters.close()
        client.close()
    assert len(told) == len(ports)
    for secret in (KEY, PROMPT):
        assert not [one for one in told if secret.encode() in one]
