"""A replica is sent away by autoscaling: what streams goes on, what is idle goes on where its blocks are."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.services.service import MODEL, Service, for_served_dtype, serving, until

pytestmark = pytest.mark.timeout(400)
HISTORY = "The samovar stood on the table and the guests had not come back yet. " * 12
FLAGS = {
    "cluster.replicas": 2,
    "cluster.autoscaling.enabled": "true",
    "cluster.autoscaling.replicas-max": 2,
    "cluster.autoscaling.metrics-interval-s": 1,
    "cluster.autoscaling.upscale-delay-s": 600,
    "cluster.autoscaling.downscale-delay-s": 12,
    "cluster.autoscaling.resumption-weight": 0,
    "engine.threads": 1,
    "engine.pool-bytes-max": for_served_dtype(64 << 20),
    "tiers.nvme.bytes-max": 0,
    "tiers.audit-share": 0,
    "tiers.lookup-s-max": 5,
    "router.stall-s": 60,
}
SESSIONS = 6
STREAM_TOKENS = 96


def ask(client: httpx.Client, messages: list[dict[str, str]], session: str, **more: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
    reply = client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert reply.status_code == 200, reply.text
    return reply.json()


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def uncached(client: httpx.Client, messages: list[dict[str, str]], **more: Any) -> str:
    answer = ask(client, messages, "nobody's", cache_salt=os.urandom(8).hex(), **more)
    assert answer["receipt"]["tokens"]["compute"] == sum(answer["receipt"]["tokens"].values())
    return text_of(answer)


def first_turn(client: httpx.Client, session: str) -> tuple[list[dict[str, str]], str]:
    """The messages up to the next question, and who served it."""
    messages = [{"role": "user", "content": f"{session}. {HISTORY}"}]
    answer = ask(client, messages, session)
    (home,) = answer["receipt"]["replica"]
    messages.append({"role": "assistant", "content": text_of(answer)})
    return [*messages, {"role": "user", "content": "Who came back?"}], home


def stream_on(service: Service, session: str, over: threading.Event) -> list[str]:
    """One answer after the other until it is `over`, and one more."""
    client, texts = service.openai(), []
    is_last = False
    while not is_last:
        is_last = over.is_set()
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about tea."}],
            max_tokens=STREAM_TOKENS,
            temperature=0,
            stream=True,
            extra_headers={"x-session-id": session},
            extra_body={"ignore_eos": True},
        )
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[-1].finish_reason == "length"
        texts.append("".join(choice.delta.content or "" for choice in choices))
    return texts


@pytest.mark.slow  # the gate scales by numbers in tests/unit: test_autoscale.py, test_handover.py
def test_a_downscale_breaks_no_stream_and_no_idle_session_starts_again(tmp_path: Path) -> None:
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", str(value))]
    over = threading.Event()
    with serving(tmp_path / "autoscale.txt", *flags) as service, service.http() as client:
        assert len(service.replica_pids()) == 2
        with ThreadPoolExecutor(SESSIONS) as threads:  # at once, so that both replicas get some
            first = list(threads.map(lambda n: first_turn(client, f"idle-{n}"), range(SESSIONS)))
        homes = {home for _, home in first}
        assert len(homes) == 2, "one replica served them all"
        with ThreadPoolExecutor(4) as threads:
            streams = [threads.submit(stream_on, service, f"stream-{n}", over) for n in range(4)]
            try:
                until("one replica is left", lambda: len(service.replica_pids()) == 1, 90.0)
            finally:
                over.set()
            texts = {text for stream in streams for text in stream.result(timeout=120)}
        assert len(texts) == 1, "a stream has said something else"
        question = [{"role": "user", "content": "Tell me about tea."}]
        assert texts == {uncached(client, question, max_tokens=STREAM_TOKENS, ignore_eos=True)}
        for number, (messages, _) in enumerate(first):
            answer = ask(client, messages, f"idle-{number}")
            tokens = answer["receipt"]["tokens"]
            assert tokens["compute"] < 40, (number, answer["receipt"])
            assert text_of(answer) == uncached(client, messages)
        assert client.get("/health").json() == {"status": "ok", "replicas": 1}


@pytest.mark.slow
def test_the_last_replica_goes_when_nobody_is_there_and_comes_with_the_next_guest(tmp_path: Path) -> None:
    scaling = {
        "replicas-min": 0,
        "downscale-to-zero-delay-s": 5,
        "upscale-delay-s": 0,
        "downscale-delay-s": 0,
    }
    flags = {**FLAGS, "cluster.replicas": 1, **{f"cluster.autoscaling.{k}": v for k, v in scaling.items()}}
    parts = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    with serving(tmp_path / "zero.txt", *parts) as service, service.http() as client:
        messages, _ = first_turn(client, "idle")
        until("no replica is left", lambda: not service.replica_pids(), 90.0)
        until("the ingress knows", lambda: client.get("/health").json()["replicas"] == 0)
        assert client.get("/health").json() == {"status": "ok", "replicas": 0}
        answer = ask(client, messages, "idle")
        assert answer["receipt"]["tokens"]["cpu"] > 100, answer["receipt"]
        assert text_of(answer) == uncached(client, messages)
