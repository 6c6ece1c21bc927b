"""The soak's clients: sessions of a few turns, each with the whole conversation so far, with human pauses.

One in twenty answers is hung up on in the middle. Everything is greedy, so that the oracle can ask again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from bench._soak_oracle import Answer, Message, Oracle, Turn

# fmt: off
WORDS = (
    "tea", "samovar", "steam", "cup", "guest", "kettle", "water", "leaf",
    "garden", "evening", "river", "stone", "letter", "train", "winter", "market",
    "violin", "bread", "candle", "window", "mountain", "ship", "map", "clock",
    "forest", "rain", "salt", "honey", "mirror", "bridge", "song", "island",
)
# fmt: on
SHARED = "You are the host of a tea house. " + " ".join(WORDS * 3) + "."
"""A system prompt that a quarter of all sessions have: their first blocks are the same extents."""

PROFILES = ("chat", "chat", "documents", "code", "batch")
HANG_UP_SHARE = 0.05
FAILURES = (openai.OpenAIError, RuntimeError)


@dataclass
class Tally:
    """What the clients saw. `errors` holds those of requests that nobody hung up on."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by where they came from, and `answer`."""

    decisions: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    last_turns: dict[int, Turn] = field(default_factory=dict)

    def failed(self, error: BaseException) -> None:
        self.errors[f"{type(error).__name__}: {str(error)[:160]}"] += 1

    def add(self, answer: Answer) -> None:
        self.counts["turns"] += 1
        self.tokens.update(answer.receipt["tokens"])
        self.tokens["answer"] += answer.answer_tokens
        self.decisions[answer.receipt["decision"]] += 1


class Asker:
    """Asks for greedy answers; all clients share one."""

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def __call__(
        self, messages: Sequence[Message], max_tokens: int, extra: Mapping[str, Any]
    ) -> Answer:
        """The whole answer at once."""
        whole: Any = await self._client.chat.completions.create(
            **self._body(messages, max_tokens, extra), stream=False
        )
        (choice,) = whole.choices
        return _answer(choice.message.content, choice.finish_reason, whole)

    async def stream(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        extra: Mapping[str, Any],
        *,
        hang_up_at: int | None,
        tally: Tally,
    ) -> Answer | str:
        """The answer; or what had come when this client hung up, `hang_up_at` chunks after the first.

        Raises `RuntimeError` for a stream that ends without saying why.
        """
        started_s, text, chunks, reason = time.perf_counter(), "", 0, ""
        stream: Any = await self._client.chat.completions.create(
            **self._body(messages, max_tokens, extra), stream=True, stream_options={"include_usage": True}
        )
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content:
                        if not text:
                            tally.ttft_s.append(time.perf_counter() - started_s)
                        text += choice.delta.content
                    reason = choice.finish_reason or reason
                if chunk.usage:
                    return _answer(text, reason, chunk)
                chunks += 1
                if hang_up_at is not None and chunks > hang_up_at:
                    return text
        raise RuntimeError("the stream ended before its usage")

    def _body(self, messages: Sequence[Message], max_tokens: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_body": dict(extra),
        }


def _answer(text: str, reason: str, last: Any) -> Answer:
    """`last`: the whole answer, or the chunk with the usage."""
    if not reason:
        raise RuntimeError("the answer has no finish_reason")
    return Answer(
        text=text,
        finish_reason=reason,
        prompt_tokens=last.usage.prompt_tokens,
        answer_tokens=last.usage.completion_tokens,
        cached_tokens=last.usage.prompt_tokens_details.cached_tokens,
        receipt=last.model_extra["receipt"],
    )


async def guest(
    number: int, ask: Asker, oracle: Oracle, tally: Tally, *, until_s: float, gap_s: float, check_share: float
) -> None:
    """One session after the other until `until_s` (monotonic). Pauses are `gap_s` long on average."""
    rng = random.Random(number)
    await asyncio.sleep(rng.uniform(0, gap_s))
    sessions = 0
    while time.monotonic() < until_s:
        sessions += 1
        name = f"soak-{number}-{sessions}"
        messages: list[Message] = [{"role": "system", "content": SHARED}] if rng.random() < 0.25 else []
        extra = {"session_id": name, "cache_profile": rng.choice(PROFILES)}
        for turn_number in range(rng.randint(2, 6)):
            question = " ".join(rng.choices(WORDS, k=rng.randint(20, 150)))
            messages.append({"role": "user", "content": f"{number}: {question}?"})
            max_tokens = rng.randint(8, 24)
            hang_up_at = rng.randint(0, 2) if rng.random() < HANG_UP_SHARE else None
            try:
                answer = await ask.stream(messages, max_tokens, extra, hang_up_at=hang_up_at, tally=tally)
                if isinstance(answer, Answer):
                    tally.add(answer)
                    turn = Turn(name, turn_number, tuple(messages), max_tokens, extra, answer)
                    tally.last_turns[number] = turn
                    if rng.random() < check_share:
                        await oracle.check(turn)
                    said = answer.text
                else:
                    tally.counts["hung up"] += 1
                    said = answer
            except FAILURES as error:
                tally.failed(error)
                break
            # After a hang-up the client goes on from what it saw: another branch of the conversation.
            messages.append({"role": "assistant", "content": said or "Yes."})
            await asyncio.sleep(min(rng.expovariate(1 / gap_s), max(0.0, until_s - time.monotonic())))
            if time.monotonic() >= until_s:
                return
