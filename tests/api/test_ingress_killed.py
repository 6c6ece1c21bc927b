"""The ingress is killed in mid-stream: its client asks again, and reads on where it was."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest

from tests.support.services.service import MODEL, Service, until

TOKENS = 96
CHAT = "/v1/chat/completions"
INGRESS = r"ServeReplica:\S+:Ingress"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me about tea, and its houses."}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 5,
    "logprobs": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def read(
    service: Service, body: dict[str, Any], headers: dict[str, str], kill_at: int | None = None
) -> tuple[list[tuple[str, Any]], Any]:
    """The events of a stream with their ids, and the error that it ended with, if one."""
    pids = [] if kill_at is None else service.pids_of(INGRESS)  # before: looking takes as long as an answer
    found: list[tuple[str, Any]] = []
    name, error, is_done = "", None, False
    with service.http() as http, http.stream("POST", CHAT, json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            elif line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = event["error"]
                    continue
                found.append((name, event))
                if len(found) == kill_at:
                    (pid,) = pids
                    os.kill(pid, signal.SIGKILL)
                    kill_at = None
    assert is_done, "a silent cut"
    return found, error


def said(events: list[tuple[str, Any]]) -> list[Any]:
    """What the choices say, event by event."""
    return [event["choices"] for _, event in events]


def computed(service: Service) -> float:
    return service.total("samovar_replica_generated_tokens_total")


def is_up(service: Service) -> bool:
    with service.http() as http:
        try:
            return http.get("/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["one", "two"])
def test_an_ingress_killed_in_mid_stream_is_followed_by_another(
    more: dict[str, Any], service: Service
) -> None:
    body = BODY | more
    tokens = TOKENS * int(body.get("n", 1))
    whole, failed = read(service, body, {"Idempotency-Key": f"whole {more}"})
    assert failed is None
    before = computed(service)
    named = {"Idempotency-Key": f"killed {more}"}
    seen, failed = read(service, body, named, kill_at=12)
    assert failed is not None
    assert failed["code"] == "ingress_lost", failed
    assert len(seen) < len(whole)
    until("another ingress is up", lambda: is_up(service), 120)
    rest, failed = read(service, body, named | {"Last-Event-ID": seen[-1][0]})
    assert failed is None
    assert said([*seen, *rest]) == said(whole)
    ids = [name for name, _ in [*seen, *rest]]
    assert len(set(ids)) == len(ids) == len(whole)
    assert len({event["id"] for _, event in [*seen, *rest]}) == 1
    assert rest[-1][1]["usage"]["completion_tokens"] == tokens
    assert rest[-1][1]["usage"] == whole[-1][1]["usage"] | {
        "prompt_tokens_details": rest[-1][1]["usage"]["prompt_tokens_details"]
    }
    again, failed = read(service, body, named)  # an ordinary client that just repeats its request
    assert failed is None
    assert [name for name, _ in again] == ids
    assert computed(service) - before == tokens, "it was computed once"
    until("no page is held", service.idle)


def test_an_answer_that_does_not_stream_survives_its_ingress(service: Service) -> None:
    body = {name: value for name, value in BODY.items() if not name.startswith("stream")}
    named = {"Idempotency-Key": "whole answer"}
    with service.http() as http:
        first = http.post(CHAT, json=body, headers=named).raise_for_status().json()
        before = computed(service)
        (pid,) = service.pids_of(INGRESS)
        os.kill(pid, signal.SIGKILL)
        until("the ingress is gone", lambda: pid not in service.pids_of(INGRESS), 30)
        until("another ingress is up", lambda: is_up(service), 120)
        second = http.post(CHAT, json=body, headers=named).raise_for_status()
        assert second.headers["idempotent-replayed"] == "true"
        again = second.json()
    assert again["choices"] == first["choices"]
    assert (again["id"], again["created"]) == (first["id"], first["created"])
    assert computed(service) == before
