"""A service with API keys and small limits: auth (F33), tenants (F14), back-pressure, a tidy stop.

Its window is small, too: a conversation that outgrows it is compacted if it wants to be.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.services.service import MODEL, READY, Service, for_served_dtype, until

KEYS = {"alpha": "sk-alpha-0123456789abcdef", "beta": "sk-beta-0123456789abcdef"}
ADMIN_KEY = "sk-admin-0123456789abcdef"
CONTEXT = 512
FLAGS = (
    *("--engine.pool-bytes-max", str(for_served_dtype(64 * 2**20))),
    *("--engine.sequences-max", "8", "--engine.queue-max", "4", "--engine.threads", "1"),
    *("--model.context-tokens-max", str(CONTEXT), "--limits.concurrent-per-key", "24"),
    *("--compaction.enabled", "true", "--compaction.embedder", "none"),
    # What is expected of this conversation's return is not what is tested.
    *("--compaction.idle-s", "0.1", "--compaction.return-min", "0"),
)
BLOCK_TOKENS = 16
ROOMS = (
    "Lisbon",
    "Oslo",
    "Turin",
    "Graz",
    "Ghent",
    "Porto",
    "Basel",
    "Cork",
    "Split",
    "Lund",
    "Bergen",
    "Nice",
)
TURNS_MAX = 10
COMPACTED = {"compaction": {"mode": "retrieve", "budget_tokens": 96}}


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    output = tmp_path_factory.mktemp("guarded") / "out.txt"
    env = {"SAMOVAR_AUTH__API_KEYS": json.dumps(KEYS), "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY}
    service = Service(output, *FLAGS, key=KEYS["alpha"], admin_key=ADMIN_KEY, env=env)
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def guarded(starting: Service) -> Service:
    return starting.wait_ready()


def body(**change: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}


def test_health_is_503_until_ready(starting: Service) -> None:
    seen: list[int] = []

    def health() -> bool:
        assert starting.process.poll() is None, starting.text
        try:
            seen.append(httpx.get(f"{starting.url}/health", timeout=10).status_code)
        except httpx.TransportError:
            return False  # nobody listens yet
        return seen[-1] == 200

    until("/health is 200", health, 180)
    assert set(seen[:-1]) == {503}, "it listened before it was ready, and said so"
    starting.wait_ready()
    assert len(READY.findall(starting.text)) == 1
    assert "curl" in starting.text


@pytest.mark.guarantee("F33")
class TestWhoMayAsk:
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": KEYS["alpha"]},
            {"authorization": f"Basic {KEYS['alpha']}"},
            {"authorization": f"Bearer {KEYS['alpha'].upper()}"},
            {"authorization": "Bearer"},
            {"x-api-key": "nope"},
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE"])
    def test_no_or_bad_key(self, guarded: Service, headers: dict[str, str], method: str) -> None:
        for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/version", "/nothing", "/v1/live"):
            answer = httpx.request(method, guarded.url + path, headers=headers)
            assert answer.status_code == 401, (method, path, answer.text)
            if method != "HEAD":
                assert answer.json()["error"]["type"] == "authentication_error"

    @pytest.mark.parametrize(
        "path",
        [
            *("//v1/models", "/v1/../v1/models", "/%76%31/models", "/health/", "/health/../v1/models"),
            *("/HEALTH", "/health%2f", "/health;/v1/models"),
            *(f"/v1/models?api_key={KEYS['alpha']}", f"/v1/models?key={KEYS['alpha']}"),
        ],
    )
    def test_no_way_round(self, guarded: Service, path: str) -> None:
        answer = httpx.get(guarded.url + path)
        assert answer.status_code in (401, 404), answer.text
        assert "data" not in answer.json()

    def test_health_is_open_and_says_nothing(self, guarded: Service) -> None:
        assert httpx.get(f"{guarded.url}/health").status_code == 200

    def test_keys_work_and_are_not_printed(self, guarded: Service) -> None:
        for key in KEYS.values():
            assert guarded.openai(key).models.list().data
        assert not any(key in guarded.text for key in KEYS.values())


def test_f14_another_tenant_never_hits(guarded: Service) -> None:
    prompt = [{"role": "user", "content": "A secret of alpha: " + "the tea is in the left drawer. " * 6}]

    def cached(key: str, **extra: object) -> int:
        client = guarded.openai(key)
        answer = client.chat.completions.create(
            model=MODEL,
            messages=prompt,  # type: ignore[arg-type]
            max_tokens=2,
            extra_body={"session_id": "same", "prompt_cache_key": "same", **extra},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(KEYS["alpha"]) == 0
    assert cached(KEYS["alpha"]) > 0
    assert cached(KEYS["beta"]) == 0
    assert cached(KEYS["beta"], cache_salt="alpha") == 0
    assert cached(KEYS["alpha"], cache_salt="a salt narrows further") == 0


def test_f32_prompt_at_the_limit(guarded: Service) -> None:
    """`context - 1` prompt tokens are served; `context` and more are refused with both numbers."""
    client = guarded.openai()
    for tokens in (CONTEXT - 1, CONTEXT, CONTEXT + 1):
        request = {"model": MODEL, "prompt": [100 + i % 1000 for i in range(tokens)], "max_tokens": 1}
        if tokens < CONTEXT:
            assert client.completions.create(**request).usage.prompt_tokens == tokens  # type: ignore[union-attr, call-overload]
            continue
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**request)  # type: ignore[call-overload]
        assert caught.value.code == "context_length_exceeded"
        assert str(CONTEXT) in caught.value.message
        assert str(tokens) in caught.value.message


class LongTalk:
    """A conversation of one tenant that outgrows the window; the client sends all of it, each time."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.session = "a long one"
        self.messages = [{"role": "system", "content": "You keep the keys of a hotel."}]
        for number, room in enumerate(ROOMS):
            told = (
                f"The key of the {room} room is K{number * 7}X. It has a view of the lake and two large beds."
            )
            self.messages += [
                {"role": "user", "content": told},
                {
                    "role": "assistant",
                    "content": f"Noted, {room}. The guests there will be glad of the view.",
                },
            ]

    def post(self, text: str, **fields: object) -> httpx.Response:
        asked = [*self.messages, {"role": "user", "content": text}]
        with self.service.http() as http:
            fields = {
                "messages": asked,
                "session_id": self.session,
                "return_token_ids": True,
                "temperature": 0,
            } | fields
            return http.post("/v1/chat/completions", json=body(**fields))

    def says(self, text: str) -> dict[str, Any]:
        """A turn, and the idle moment after it."""
        before = self.jobs()
        answer = self.post(text, **COMPACTED)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        self.messages += [{"role": "user", "content": text}, said["choices"][0]["message"]]
        until("the idle moment is over", lambda: self.jobs() > before, 60)
        return said

    def jobs(self, **outcome: str) -> float:
        return self.service.total("samovar_compaction_jobs_total", **outcome)

    def card(self, key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.get(f"{self.service.url}/v1/sessions/{self.session}", headers=headers, timeout=60)

    def prompt_of(self, said: dict[str, Any]) -> str:
        with self.service.http() as http:
            shown = http.post("/detokenize", json={"model": MODEL, "tokens": said["prompt_token_ids"]})
        prompt: str = shown.raise_for_status().json()["prompt"]
        return prompt


def test_a_conversation_beyond_the_window_is_cut_and_the_next_turn_finds_its_prefix(guarded: Service) -> None:
    talk = LongTalk(guarded)
    question = "What is the key of the Oslo room?"
    refused = talk.post(question)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "context_length_exceeded"

    said = talk.says(question)
    told = said["receipt"]["compaction"]
    assert told["mode"] == "retrieve"
    assert told["turns_cut"] > len(ROOMS) / 2
    assert told["tokens_cut"] > 0
    assert said["usage"]["prompt_tokens"] < CONTEXT
    assert [one["turn"] for one in told["pieces"]].count(ROOMS.index("Oslo") + 1) == 1
    prompt = talk.prompt_of(said)
    assert "K7X" in prompt, "what was asked for came back"
    assert "K0X" not in prompt, "the rest is left out"
    card = talk.card(KEYS["alpha"]).raise_for_status().json()["compaction"]
    assert {name: card[name] for name in ("mode", "turns_cut", "tokens_cut")} == {
        name: told[name] for name in ("mode", "turns_cut", "tokens_cut")
    }
    assert talk.card(KEYS["beta"]).status_code == 404

    for _ in range(TURNS_MAX):
        done = talk.jobs(outcome="done")
        before = talk.says("Tell me of the lake, of the beds in that room, and of what guests say.")
        if talk.jobs(outcome="done") > done:
            break
    else:
        pytest.fail("no next prefix was computed in an idle moment")
    prepared = talk.card(KEYS["alpha"]).json()["compaction"]["prepared_tokens"]
    again = talk.messages[:]
    after = talk.says("And at night?")
    tokens, cut = after["receipt"]["tokens"], after["receipt"]["compaction"]["turns_cut"]
    assert cut > before["receipt"]["compaction"]["turns_cut"], "this prompt begins with another one's tokens"
    assert sum(tokens.values()) - tokens["compute"] >= prepared // BLOCK_TOKENS * BLOCK_TOKENS
    assert tokens["compute"] < 3 * BLOCK_TOKENS

    talk.messages = again
    fresh = talk.post("And at night?", cache_salt="nothing is cached under it", **COMPACTED).json()
    assert fresh["receipt"]["tokens"]["compute"] == fresh["usage"]["prompt_tokens"]
    assert fresh["prompt_token_ids"] == after["prompt_token_ids"]
    if guarded.says_exact():
        assert fresh["choices"][0]["message"] == after["choices"][0]["message"], "cached is uncached"


@pytest.mark.guarantee("F32")
def test_full_queue_is_429_with_retry_after_and_nobody_is_lost(guarded: Service) -> None:
    def one(number: int) -> httpx.Response:
        with guarded.http() as http:
            words = f"{number} tell me a long story"
            return http.post(
                "/v1/chat/completions",
                json=body(messages=[{"role": "user", "content": words}], max_tokens=48, ignore_eos=True),
            )

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(one, range(20)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == 20
    assert len(served) >= 10  # 8 places, and of the 4 in the queue one tenant has half
    assert refused, "20 at once were meant to be too many"
    for answer in served:
        assert answer.json()["usage"]["completion_tokens"] == 48
    for answer in refused:
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert float(answer.headers["retry-after"]) > 0
    until("all pages are back", guarded.idle)


def test_stop_lets_a_stream_finish_and_refuses_new_work(guarded: Service, tmp_path: Path) -> None:
    """Last: it stops the service."""
    started = threading.Event()

    def stream() -> tuple[int, str | None]:
        tokens, reason = 0, None
        with guarded.openai().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me everything about tea."}],
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        ) as chunks:
            for chunk in chunks:
                started.set()
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
                if chunk.choices and chunk.choices[0].finish_reason:
                    reason = chunk.choices[0].finish_reason
        return tokens, reason

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream)
        assert started.wait(60)
        exit_code = pool.submit(guarded.stop)
        until("new work is refused", lambda: _refused(guarded), 30)
        assert running.result(90) == (100, "length")
        assert exit_code.result(90) == 0


def _refused(service: Service) -> bool:
    with service.http() as http:
        answer = http.post("/v1/chat/completions", json=body())
    if answer.status_code == 200:
        return False
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["message"]
    return True
