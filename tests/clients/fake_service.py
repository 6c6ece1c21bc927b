"""This tree's ingress over a fake replica, to work on the scripts without a model: `--fake`.

Answers are a fixed sentence; of a prompt the fake has "cached" what it shares with an earlier one. It cannot
call tools or keep to a schema.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from samovar.replicas.messages import Admitted, Delta, GenerateRequest, Receipt, TokenLogprob
from tests.support.router.fake_replica import INFO, Script
from tests.support.router.router_harness import House

WORDS = ["Green", " tea", " goes", " well", " with", " it", "."]
BLOCK_TOKENS = 16
PROMPTS_KEPT = 200


class Memory:
    """The prompts that came before."""

    def __init__(self) -> None:
        self._prompts: deque[list[int]] = deque(maxlen=PROMPTS_KEPT)

    def answer(self, request: GenerateRequest) -> Script:
        prompt = request.prompt_token_ids
        cached = max((_shared(prompt, earlier) for earlier in self._prompts), default=0)
        cached = min(cached, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._prompts.append(prompt)
        receipt = Receipt(tokens={"gpu": cached, "compute": len(prompt) - cached})
        return [
            Admitted(INFO.replica_id, cached, 0.0, receipt),
            *(_word(choice, place, request) for choice in range(request.n) for place in range(len(WORDS))),
        ]


def _word(choice: int, place: int, request: GenerateRequest) -> Delta:
    word, token_id = WORDS[place], 10 + place
    logprobs: tuple[TokenLogprob, ...] = ()
    if (best := request.sampling.logprobs) is not None:
        one = TokenLogprob(token_id, word, word.encode(), -0.5, rank=1)
        logprobs = (replace(one, top=(one,) * best),)
    return Delta(choice, word, (token_id,), logprobs, "stop" if place == len(WORDS) - 1 else None)


def _shared(prompt: list[int], earlier: list[int]) -> int:
    """Length of the common prefix."""
    for place, (one, other) in enumerate(zip(prompt, earlier, strict=False)):
        if one != other:
            return place
    return min(len(prompt), len(earlier))


async def main() -> None:
    async with House(Memory().answer).server() as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
