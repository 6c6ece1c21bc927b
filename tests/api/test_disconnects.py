"""F23: clients that go away. Whenever they do, every page comes back and nothing keeps running."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.services.service import MODEL, Service, until

CHAT = "/v1/chat/completions"
CUTS = 24

pytestmark = pytest.mark.guarantee("F23")


def request(seed: int, **change: object) -> dict[str, object]:
    words = random.Random(seed).choices(["tea", "samovar", "cup", "steam", "guest", "water"], k=40)
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{seed} " + " ".join(words)}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
        **change,
    }


def leave_after(service: Service, seed: int, events: int) -> int:
    """Read that many events of a stream, then hang up. How many were read."""
    seen = 0
    with service.http() as http, http.stream("POST", CHAT, json=request(seed)) as answer:
        assert answer.status_code in (200, 429)
        for line in answer.iter_lines():
            seen += line.startswith("data: ")
            if seen >= events:
                break
    return seen


def test_streams_cut_at_random_places(service: Service) -> None:
    aborted = service.total("samovar_replica_aborted_total")
    rng = random.Random(1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: leave_after(service, seed, rng.randint(1, 6)), range(CUTS)))
    until("all pages are back", service.idle)
    assert service.total("samovar_replica_aborted_total") >= aborted + CUTS * 5 // 6
    assert service.total("samovar_requests_in_flight") <= 1  # this very look at the metrics


def test_cut_before_the_first_token_and_not_streamed(service: Service) -> None:
    for stream, timeouts_s in ((True, (0.02, 0.05)), (False, (0.02, 0.3, 1.0))):
        for timeout_s in timeouts_s:  # of the longest silence, so a stream needs short ones
            try:
                body = request(int(timeout_s * 1000), stream=stream)
                httpx.post(f"{service.url}{CHAT}", json=body, timeout=timeout_s)
            except httpx.TimeoutException:
                continue
    until("all pages are back", service.idle)


def test_choices_are_all_cut(service: Service) -> None:
    with service.http() as http, http.stream("POST", CHAT, json=request(7, n=4, temperature=1.0)) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # held: when this generator goes, the connection does
        next(line for line in lines if line)
        until("four choices run", lambda: service.total("samovar_replica_running") >= 4)
    until("all pages are back", service.idle)
