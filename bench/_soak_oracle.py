"""The soak's oracle: a turn is asked again under a `cache_salt` that nobody used, so nothing is cached.

Both answers are greedy, and on a CPU the engine is exact: text, reason of the end and token counts must be
identical. The service must not remember replies (`limits.reply_memory_bytes_max=0`), or the same messages
would be other token ids under another salt.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got."""

    text: str
    finish_reason: str
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    receipt: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Turn:
    """One turn of a session that was answered to its end."""

    session: str
    number: int
    messages: Sequence[Message]
    max_tokens: int
    extra: Mapping[str, Any]
    answer: Answer
    is_checked: bool = False


class Asks(Protocol):
    """Asks the service, greedily and for the whole answer at once. `extra`: more fields of the body."""

    async def __call__(
        self, messages: Sequence[Message], max_tokens: int, extra: Mapping[str, Any]
    ) -> Answer: ...


def difference(one: Answer, other: Answer) -> str:
    """What differs between two answers to the same question; empty: nothing that the cache may not change."""
    for name in ("prompt_tokens", "text", "answer_tokens", "finish_reason"):
        ours, theirs = getattr(one, name), getattr(other, name)
        if ours != theirs:
            return f"{name} is {ours!r}, and {theirs!r}"
    return ""


class Oracle:
    """Counts what was checked and keeps what was wrong."""

    def __init__(self, ask: Asks) -> None:
        self._ask = ask
        self.checked = 0
        self.repeated: Counter[str] = Counter()
        """Prompt tokens of `check_all`'s answers with the cache, by where they came from."""

        self.wrong: list[dict[str, Any]] = []

    async def check(self, turn: Turn) -> None:
        """Ask again without a cache. Raises what `ask` raises."""
        name = f"oracle-{uuid.uuid4().hex}"  # as a session it may come to any replica
        # Its blocks are of no use: they stay in main memory and are the first to go.
        extra = {"prompt_cache_retention": "in_memory", "cache_profile": "batch"}
        fresh = await self._ask(
            turn.messages, turn.max_tokens, {"cache_salt": name, "session_id": name, **extra}
        )
        turn.is_checked = True
        self.checked += 1
        if fresh.cached_tokens:
            self._note(turn, fresh, f"{fresh.cached_tokens} tokens were cached under a salt of its own")
        self._compare(turn, fresh, "without a cache")

    async def repeat(self, turn: Turn) -> None:
        """Ask again with the cache, as it is by now. Raises what `ask` raises."""
        answer = await self._ask(turn.messages, turn.max_tokens, turn.extra)
        self.repeated.update(answer.receipt["tokens"])
        self._compare(turn, answer, "later")

    def _compare(self, turn: Turn, answer: Answer, how: str) -> None:
        differs = difference(turn.answer, answer)
        if differs:
            self._note(turn, answer, f"{differs} {how}")

    def _note(self, turn: Turn, answer: Answer, what: str) -> None:
        self.wrong.append({"what": what, "turn": asdict(turn), "other": asdict(answer)})

    async def check_all(self, turns: Sequence[Turn], *, at_once: int) -> list[Exception]:
        """Repeat all, and check those that were not yet, `at_once` at a time. Errors of `ask`."""
        places = asyncio.Semaphore(at_once)

        async def one(turn: Turn) -> None:
            async with places:
                await self.repeat(turn)
                if not turn.is_checked:
                    await self.check(turn)

        found = await asyncio.gather(*(one(turn) for turn in turns), return_exceptions=True)
        errors = []
        for result in found:
            if isinstance(result, Exception):
                errors.append(result)
            elif isinstance(result, BaseException):
                raise result
        return errors
