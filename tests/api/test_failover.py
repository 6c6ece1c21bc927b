"""Replicas that are killed or stopped in mid-stream: the client reads on and never knows."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from tests.support.services.service import MODEL, Service, until

TOKENS = 192
"""A second of computing or more: nobody is to be ready before its replica is disturbed."""
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 24},
        "notes": {
            "type": "array",
            "items": {"type": "string", "maxLength": 16},
            "minItems": 3,
            "maxItems": 4,
        },
        "grams": {"type": "integer"},
    },
    "required": ["name", "notes", "grams"],
}
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 7}
FORMED: dict[str, Any] = SEEDED | {"max_tokens": 300, "ignore_eos": False}
"""Of answers that end where their form does."""
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    FORMED
    | {
        "tools": [{"type": "function", "function": {"name": "brew", "parameters": FORM}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    SEEDED,
    FORMED | {"response_format": {"type": "json_schema", "json_schema": {"name": "tea", "schema": FORM}}},
]
"""Killed in this order."""


@dataclass
class Streamed:
    """What one client has read, up to `[DONE]`; `text`: with the arguments of calls; `pieces`: of it."""

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    replicas: list[str] = field(default_factory=list)
    pieces: int = field(default=0, compare=False)


def stream(
    service: Service, params: dict[str, Any], disturb: Callable[[str], None] | None = None, at_piece: int = 0
) -> Streamed:
    """One answer. `disturb` is called once, with the id of its replica, after `at_piece` pieces of text."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about tea."}],
        **{"max_tokens": TOKENS, "ignore_eos": True, "stream": True},
        "stream_options": {"include_usage": True},
        **params,
    }
    seen, is_done = Streamed(), False
    with service.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                assert seen.finish is None, "text after the end"
                calls = choice["delta"].get("tool_calls") or ()
                seen.text += choice["delta"].get("content") or ""
                seen.text += "".join(call["function"].get("arguments") or "" for call in calls)
                seen.finish = choice["finish_reason"]
                seen.pieces += 1
            if chunk["usage"]:
                seen.tokens = chunk["usage"]["completion_tokens"]
            seen.replicas = chunk.get("receipt", {}).get("replica", seen.replicas)
            if disturb is not None and seen.pieces > at_piece:
                disturb(response.headers["x-replica"])
                disturb = None
    assert is_done, "a silent cut"
    assert disturb is None, "it was over before it could be disturbed"
    if body["ignore_eos"]:
        assert (seen.finish, seen.tokens) == ("length", TOKENS)
    else:
        assert set(json.loads(seen.text)) == set(FORM["required"])
        assert seen.finish == ("tool_calls" if "tools" in params else "stop")
    return seen


def pids_of(service: Service, replica_ids: set[str]) -> dict[str, int]:
    """The processes of replicas: their logs are named after them. Looked up before there is a hurry."""
    found = {}
    for process in service.processes():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            for name in (os.path.basename(opened.path) for opened in process.open_files()):
                found |= {replica_id: process.pid for replica_id in replica_ids if replica_id in name}
    assert found.keys() == replica_ids, "a replica has no process"
    return found


def replicas(service: Service) -> set[str]:
    """Ids of the replicas that answer now."""
    return {
        dict(labels)["replica"] for name, labels in service.metrics() if name == "samovar_replica_running"
    }


def wait_for_both(service: Service, dead: str = "") -> None:
    until("two replicas are up", lambda: len(replicas(service)) == 2 and dead not in replicas(service), 120)
    until("no page is held", service.idle)


def kill_and_compare(service: Service, kills: int) -> None:
    """Every kill hits a stream at a random piece of its text."""
    rng = random.Random(20)
    wait_for_both(service)
    wholes = [stream(service, params) for params in VARIANTS]
    assert len({whole.text for whole in wholes}) == len(VARIANTS)
    for number in range(kills):
        variant, killed = number % len(VARIANTS), list[str]()
        pids = pids_of(service, replicas(service))

        def kill(replica_id: str, killed: list[str] = killed, pids: dict[str, int] = pids) -> None:
            os.kill(pids[replica_id], signal.SIGKILL)
            killed.append(replica_id)

        before = service.total("samovar_failovers_total", outcome="resumed")
        # A call comes in one piece, behind a first one that has no text yet.
        at_piece = rng.randint(0, min(15, wholes[variant].pieces // 5))
        seen = stream(service, VARIANTS[variant], kill, at_piece)
        assert (seen.text, seen.finish) == (wholes[variant].text, wholes[variant].finish)
        assert killed[0] in seen.replicas
        assert len(seen.replicas) > 1
        assert service.total("samovar_failovers_total", outcome="resumed") > before
        wait_for_both(service, killed[0])
    assert service.total("samovar_replica_integrity_failures_total") == 0


@pytest.mark.guarantee("F20")
def test_f20_kills_at_random_tokens_and_identical_texts(service: Service) -> None:
    kill_and_compare(service, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.guarantee("F20")
def test_f20_50_kills_50_identical_texts(service: Service) -> None:
    kill_and_compare(service, 50)


@pytest.mark.guarantee("F21")
def test_f21_a_stopped_replica_is_left_and_comes_back(service: Service) -> None:
    wait_for_both(service)
    gave_up = service.total("samovar_failovers_total", outcome="gave_up")
    whole = stream(service, SEEDED)
    stopped: list[psutil.Process] = []
    pids = pids_of(service, replicas(service))

    def stop(replica_id: str) -> None:
        stopped.append(psutil.Process(pids[replica_id]))
        stopped[0].suspend()

    try:
        seen = stream(service, SEEDED, stop, 3)
        assert seen == Streamed(whole.text, whole.finish, whole.tokens, seen.replicas)
        assert len(seen.replicas) == 2
        again = stream(service, SEEDED)  # while it is still stopped
        assert again.text == whole.text
    finally:
        for process in stopped:
            process.resume()
    wait_for_both(service)
    assert stream(service, VARIANTS[0]).finish == "length"
    assert service.total("samovar_replica_integrity_failures_total") == 0
    assert service.total("samovar_failovers_total", outcome="gave_up") == gave_up
