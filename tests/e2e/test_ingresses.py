"""Three ingresses before one replica: a conversation may come to any of them, and any may die."""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.support.services.service import MODEL, Service, serving, until

pytestmark = pytest.mark.slow  # the gate has three ingresses in one process: tests/unit/router/ingresses
INGRESSES = 3
INGRESS = "ServeReplica:samovar:Ingress"
BLOCK_TOKENS = 16
KEYS = {"one": "key-of-tenant-one-0001", "two": "key-of-tenant-two-0002"}
ADMIN = "key-of-the-admin-000001"
LIMIT = 6
KILLS = 50
TALKERS = 4
"""Fewer than the limit: until an answer's end is reported, its place is counted (ADR 16)."""
FLAGS = (
    *("--server.ingress-replicas", str(INGRESSES)),
    *("--engine.threads", "1"),
    *("--limits.concurrent-per-key", str(LIMIT)),
    *("--limits.retry-after-s", "0"),
    *("--ingress.wait-s", "10"),  # by default an answer that a loaded machine makes late costs a hit
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    env = {"SAMOVAR_AUTH__API_KEYS": json.dumps(KEYS), "SAMOVAR_AUTH__ADMIN_KEY": ADMIN}
    output = tmp_path_factory.mktemp("ingresses") / "out.txt"
    with serving(output, *FLAGS, key=KEYS["one"], env=env) as service:
        service.admin_key = ADMIN
        all_ingresses_serve(service)
        yield service


@pytest.fixture(scope="module")
def letters(service: Service) -> list[int]:
    with service.http() as http:
        told = [
            http.post("/tokenize", json={"model": MODEL, "prompt": one, "add_special_tokens": False}).json()
            for one in "abcdefghijklmnopqrstuvwxyz"
        ]
    assert all(one["count"] == 1 for one in told)
    return [one["tokens"][0] for one in told]


def all_ingresses_serve(service: Service) -> None:
    """Wait until each ingress has answered."""

    def seen() -> bool:
        with service.http() as http:
            answers = [http.post(**question("Hello")) for _ in range(6)]
        return len({answer.headers.get("x-ingress") for answer in answers if answer.is_success}) == INGRESSES

    until("all ingresses serve", seen, 120)


def template_tokens(service: Service) -> int:
    """Return how many tokens the chat template puts before what a user says."""
    with service.http() as http:
        asked = [
            http.post(
                "/tokenize", json={"model": MODEL, "messages": [{"role": "user", "content": text}]}
            ).json()["tokens"]
            for text in ("Remember this", "What else")
        ]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*asked, strict=False))
    return sum(1 for _ in same)


def question(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0, **more}
    return {"url": "/v1/chat/completions", "json": body}


@dataclass
class Talk:
    """A conversation whose answers are tokens of one letter each, which no tokenizer would write.

    `ingresses`: who served each turn.
    """

    seed: int
    letters: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)
    ingresses: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    chain_tokens: list[int] = field(default_factory=list)

    def ask(self) -> list[dict[str, str]]:
        told = f"Guest {self.seed}, turn {len(self.texts)}: tell me of tea, of winter, and of trains."
        return [*self.messages, {"role": "user", "content": told}]

    def turn(self, client: openai.OpenAI, max_tokens: int = 24) -> None:
        """One turn; a client that retries does so by itself."""
        asked = self.ask()
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=asked,
            max_tokens=max_tokens,
            temperature=1.0,
            seed=self.seed,
            extra_body={"allowed_token_ids": self.letters},
        )
        answer = raw.parse()
        text = answer.choices[0].message.content or ""
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        self.ingresses.append(raw.headers["x-ingress"])
        self.texts.append(text)
        self.cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        self.chain_tokens.append(answer.usage.total_tokens)
        self.messages = [*asked, {"role": "assistant", "content": text}]

    @property
    def hits(self) -> list[bool]:
        """Of each turn after the first: whether all full blocks of the turn before were cached.

        The last token of an answer has no KV yet.
        """
        kept = [(tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in self.chain_tokens]
        return [cached >= before for cached, before in zip(self.cached[1:], kept, strict=False)]


def test_the_second_turn_hits_up_to_the_last_block_at_any_ingress(
    service: Service, letters: list[int]
) -> None:
    client = service.openai()
    changed = 0
    for seed in range(8):
        talk = Talk(seed, letters)
        for _ in range(3):
            talk.turn(client)
        assert all(talk.hits), (talk.ingresses, talk.cached, talk.chain_tokens)
        changed += sum(one != other for one, other in itertools.pairwise(talk.ingresses))
    assert changed, "all turns of a conversation came to one ingress: nothing was shown"


def test_a_session_keeps_to_its_ingress(service: Service) -> None:
    for number in range(4):
        headers = {"x-session-id": f"session-{number}"}
        with service.http() as http:
            ingresses = {http.post(**question("Hi"), headers=headers).headers["x-ingress"] for _ in range(5)}
        assert len(ingresses) == 1, ingresses


def test_what_is_deleted_at_one_is_forgotten_by_all(service: Service) -> None:
    client = service.openai()
    headers = {"x-session-id": "to be forgotten"}
    with service.http() as http:
        stored = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
        for _ in range(6):  # at one ingress or another
            assert http.get(f"/v1/responses/{stored.id}").status_code == 200
        assert http.delete(f"/v1/responses/{stored.id}").status_code == 200
        assert [http.get(f"/v1/responses/{stored.id}").status_code for _ in range(6)] == [404] * 6
        follow = client.responses.create(model=MODEL, input="Hello again", max_output_tokens=2)
        for _ in range(4):
            more = client.responses.create(
                model=MODEL, input="And?", max_output_tokens=1, previous_response_id=follow.id
            )
            assert more.previous_response_id == follow.id
        first = http.post(**question("Remember this", max_tokens=8), headers=headers).json()
        said = first["choices"][0]["message"]["content"]
        assert http.delete("/v1/sessions/to be forgotten").json()["cleared"]["replies"] >= 1
        asked = [{"role": "user", "content": "Remember this"}, {"role": "assistant", "content": said}]
        again = http.post(
            "/v1/chat/completions",
            json={
                "model": MODEL,
                "max_tokens": 1,
                "messages": [*asked, {"role": "user", "content": "What was it?"}],
            },
            headers=headers,
        ).json()
        # The chat template's own system prompt begins every conversation: others of the tenant have it, too.
        told = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        others = http.post(**question("Something else")).json()["usage"]["prompt_tokens_details"]
        assert told <= others["cached_tokens"], "more than a conversation has that never was here"
        assert told <= template_tokens(service), "more than what all conversations begin with"


def test_metrics_are_those_of_all(service: Service) -> None:
    of_ingresses = {
        dict(labels).get("ingress")
        for (name, labels), value in service.metrics().items()
        if name == "samovar_requests_total"
    }
    assert len(of_ingresses) >= INGRESSES
    assert None not in of_ingresses


def test_one_that_hangs_takes_the_metrics_of_no_other(service: Service) -> None:
    stopped, told = service.pids_of(INGRESS)[0], []

    def is_told() -> bool:
        bearer = {"authorization": f"Bearer {ADMIN}"}
        with suppress(httpx.TimeoutException), httpx.Client(base_url=service.url, headers=bearer) as http:
            told.append(http.get("/metrics", timeout=12).raise_for_status().text)
        return bool(told)

    os.kill(stopped, signal.SIGSTOP)
    try:
        until("one of the others is asked", is_told, 120)
    finally:
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    rows = [line for line in told[0].splitlines() if line.startswith("samovar_requests_total{")]
    assert all("ingress=" in row for row in rows), rows
    assert len({row.split('ingress="')[1].split('"')[0] for row in rows}) >= INGRESSES - 1, rows
    all_ingresses_serve(service)


def open_at_once(service: Service, tenant: str, requests: int) -> tuple[int, list[int]]:
    """Send so many requests of a tenant at once; the most that streamed together, and all statuses."""
    spans: list[tuple[float, float]] = []
    bearer = {"authorization": f"Bearer {KEYS[tenant]}"}

    def one(number: int) -> int:
        with (
            httpx.Client(base_url=service.url, headers=bearer) as http,
            http.stream(
                "POST", **question(f"Count, {number}", stream=True, max_tokens=60), timeout=120
            ) as answer,
        ):
            if answer.status_code == 200:
                begin_s = time.monotonic()
                answer.read()
                spans.append((begin_s, time.monotonic()))
            return answer.status_code

    with ThreadPoolExecutor(requests) as pool:
        statuses = list(pool.map(one, range(requests)))
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans), statuses


def test_limits_of_a_tenant_hold_at_all_ingresses_together(service: Service) -> None:
    most, statuses = open_at_once(service, "two", 6 * LIMIT)
    assert set(statuses) == {200, 429}, statuses
    assert LIMIT // INGRESSES <= most < 2 * LIMIT, (most, statuses)


def test_an_ingress_that_dies_is_replaced_and_its_conversations_go_on(
    service: Service, letters: list[int]
) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEYS["one"])
    talks = [Talk(100 + seed, letters) for seed in range(3)]
    for talk in talks:
        talk.turn(client)
    kill_one(service, random.Random(0))
    for talk in talks:
        talk.turn(client)
        assert all(talk.hits), (talk.ingresses, talk.cached, talk.chain_tokens)
    all_ingresses_serve(service)


def kill_one(service: Service, rng: random.Random) -> None:
    pid = rng.choice(service.pids_of(INGRESS))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until("it is dead", lambda: not psutil.pid_exists(pid))


class Tries:
    """What each request was answered, a client's own repetitions included. `said`: by kind of answer."""

    def __init__(self) -> None:
        self.said: collections.Counter[str] = collections.Counter()

    def client(self, service: Service) -> openai.OpenAI:
        hooks = {"response": [self._note]}
        return openai.OpenAI(
            base_url=f"{service.url}/v1",
            api_key=KEYS["one"],
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
        )

    def _note(self, answer: httpx.Response) -> None:
        if answer.status_code >= 400:
            answer.read()
            error = answer.json()["error"]
            self.said[f"{answer.status_code} {error['code']}"] += 1
        else:
            self.said["200"] += 1


def test_ingresses_killed_at_random_under_load(service: Service, letters: list[int]) -> None:
    """Every request succeeds by an unmodified client's own retries, with the same text as without kills."""
    kills, rng = int(os.environ.get("TESTS_KILLS", KILLS)), random.Random(7)
    patient = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEYS["one"])
    reference: dict[int, list[str]] = {}
    for seed in range(TALKERS):
        talk = Talk(1000 + seed, letters)
        for _ in range(3):
            talk.turn(patient)
        reference[seed] = talk.texts
    over, errors = threading.Event(), []
    tally: collections.Counter[str] = collections.Counter()
    tries = Tries()
    most = 0

    def talker(number: int) -> None:
        client = tries.client(service)
        while not over.is_set():
            talk = Talk(1000 + number, letters)
            for turn in range(3):
                try:
                    talk.turn(client)
                except openai.APIError as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    break
                tally["turns"] += 1
                if talk.texts[turn] != reference[number][turn]:
                    tally["wrong"] += 1
            for hit, before, after in zip(talk.hits, talk.ingresses, talk.ingresses[1:], strict=False):
                tally[f"{'same' if before == after else 'other'}:{'hit' if hit else 'miss'}"] += 1

    def crowd() -> None:
        nonlocal most
        while not over.is_set():
            with suppress(httpx.TransportError, ValueError):  # its ingress has died
                most = max(most, open_at_once(service, "two", 2 * LIMIT)[0])

    threads = [threading.Thread(target=talker, args=(number,)) for number in range(TALKERS)]
    threads.append(threading.Thread(target=crowd))
    for thread in threads:
        thread.start()
    try:
        for _ in range(kills):
            until("three ingresses", lambda: len(service.pids_of(INGRESS)) == INGRESSES, 120)
            before = tally["turns"]
            kill_one(service, rng)
            until("answers go on", lambda before=before: tally["turns"] >= before + TALKERS, 120)
    finally:
        over.set()
        for thread in threads:
            thread.join(180)
    print(
        f"\n{kills} kills: {dict(tally)}, tries: {dict(tries.said)}, "
        f"most of tenant two at once: {most}, errors: {errors}"
    )
    assert not errors
    assert not tally["wrong"]
    assert tally["other:hit"], tally
    assert not tally["same:miss"], tally
    assert most < 2 * LIMIT
