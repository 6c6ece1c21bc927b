"""Many at once, with hang-ups in between: every request that stays is answered (docs/adr/001)."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.support.services.service import MODEL, Service, until

ROUNDS = 12
ANSWER_S = 60.0


async def _burst(client: httpx.AsyncClient, rng: random.Random) -> list[int]:
    async def one(number: int) -> int:
        # Two prompts in one request are two calls to replicas at the same moment.
        prompts = [f"{number} one", f"{number} two"] if number % 2 else f"{number} one"
        body = {"model": MODEL, "prompt": prompts, "max_tokens": 1}
        headers = {"x-session-id": str(rng.randint(0, 3))}
        hangs_up = number % 3 == 0
        try:
            timeout_s = rng.uniform(0.001, 0.05) if hangs_up else ANSWER_S
            answer = await client.post("/v1/completions", json=body, headers=headers, timeout=timeout_s)
        except httpx.TimeoutException:
            assert hangs_up, f"request {number} was not answered in {ANSWER_S} s"
            return 499
        return answer.status_code

    return list(await asyncio.gather(*(one(number) for number in range(9))))


@pytest.mark.guarantee("F23")
async def test_bursts_with_cancellations(service: Service) -> None:
    rng = random.Random(1)
    async with httpx.AsyncClient(base_url=service.url) as client:
        for _ in range(ROUNDS):
            codes = await _burst(client, rng)
            assert {code for number, code in enumerate(codes) if number % 3} == {200}
    until("all pages are back", service.idle)
