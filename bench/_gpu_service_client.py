"""The client of `bench.gpu_service`: completions by token ids, streamed; the same for every server."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

ASK_S_MAX = 180.0


@dataclass(slots=True)
class Answer:
    """When each chunk with a token came, in seconds after the request, and what the last ones said."""

    times_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def loaded(self) -> dict[str, int]:
        """Return the prompt's tokens by where they came from, other than computed; nothing if not told."""
        tokens = self.receipt.get("tokens", {})
        return {source: count for source, count in tokens.items() if count and source != "compute"}


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: Sequence[int]
    max_tokens: int
    session: str
    after_s: float = 0.0


class Client:
    """Sends requests to one server; each call is over when all its answers are."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def ask(self, prompt: Sequence[int], session: str, max_tokens: int = 4) -> Answer:
        """Send one prompt. Raises `RuntimeError` if it is refused or its stream ends with an error."""
        return self.ask_all([Ask(prompt, max_tokens, session)])[0]

    def ask_all(self, asks: Sequence[Ask]) -> list[Answer]:
        """Send all at the same time, or so long after as they say. Raises as `ask`."""
        return asyncio.run(self._all(asks))

    async def _all(self, asks: Sequence[Ask]) -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=ASK_S_MAX)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            return list(await asyncio.gather(*(self._one(http, ask) for ask in asks)))

    async def _one(self, http: aiohttp.ClientSession, ask: Ask) -> Answer:
        body = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        await asyncio.sleep(ask.after_s)
        answer, sent_s = Answer(), time.perf_counter()
        headers = {"X-Session-Id": ask.session}
        async with http.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"the stream ended with {event['error']}")
                if event.get("choices"):
                    answer.times_s.append(time.perf_counter() - sent_s)
                answer.usage = event.get("usage") or answer.usage
                answer.receipt = event.get("receipt") or answer.receipt
        answer.end_s = time.perf_counter() - sent_s
        if not answer.times_s:
            raise RuntimeError("a stream without a token")
        return answer


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds; 0 of nothing."""
    if len(seconds) < 2:
        return 1e3 * sum(seconds)
    return 1e3 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]
