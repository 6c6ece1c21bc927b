"""The clients of `make bench-router`: they play one phase of a schedule against one service.

A turn goes out at its time, or a little after the answer before it when that came late; one that fails is
asked again, as a person would. Each says what it saw in a `Record`. Knows nothing of routers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import openai

from bench._router_load import Phase, Turn
from bench._router_tally import Record

ANSWER_TOKENS = 16
GAP_S_MIN = 0.25
"""Between an answer and the next question of the same session, at least."""

SIDE_CHARS = 400
"""How much of the question a side request quotes."""

TURN_S_MAX = 60.0
TRIES_MAX = 3
GIVEN_UP = "I do not know."
"""What the conversation has in place of an answer that never came."""

FAILURES = (openai.OpenAIError, RuntimeError, TimeoutError)

Message = dict[str, str]


@dataclass
class _Conversation:
    """`messages`: what was said, two for each turn that is over; `turned` tells of each."""

    messages: list[Message] = field(default_factory=list)
    turned: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def turns(self) -> int:
        return len(self.messages) // 2


class Player:
    """All sessions of one run; their conversations go on from phase to phase."""

    def __init__(
        self, client: openai.AsyncOpenAI, model: str, router: str, round_number: int, sides: int = 0
    ) -> None:
        """`sides`: requests after each answer under the same id, as a front end asks for a title and tags."""
        self._client = client
        self._sides = sides
        self._model = model
        self._router = router
        self._round = round_number
        self._conversations: dict[int, _Conversation] = defaultdict(_Conversation)
        self.records: list[Record] = []

    async def play(
        self,
        phase: Phase,
        turns: Sequence[Turn],
        *,
        at_s: float = 0.0,
        event: Callable[[], Any] | None = None,
    ) -> None:
        """Until every turn is answered or given up. `event` is called in a thread `at_s` after the start."""
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            if event is not None:
                tasks.create_task(_at(began_s + at_s, event))
            for turn in turns:
                tasks.create_task(self._turn(phase, turn, began_s, tasks))

    def home(self, session: int) -> str:
        """The replica that served the session last; empty when none has."""
        served = [record for record in self.records if record.session == session and record.replica]
        return max(served, key=lambda record: record.done_s).replica if served else ""

    async def _turn(self, phase: Phase, turn: Turn, began_s: float, tasks: asyncio.TaskGroup) -> None:
        conversation = self._conversations[turn.session]
        await asyncio.sleep(max(0.0, began_s + turn.at_s - time.monotonic()))
        if conversation.turns < turn.number:
            async with conversation.turned:
                await conversation.turned.wait_for(lambda: conversation.turns >= turn.number)
            await asyncio.sleep(GAP_S_MIN)
        question = {"role": "user", "content": turn.text}
        messages = [*conversation.messages[: 2 * turn.number], question]
        record = await self._ask(messages, f"bench-{turn.session}", phase, turn)
        self.records.append(record)
        if turn.branch == 0:
            async with conversation.turned:
                conversation.messages += [question, {"role": "assistant", "content": record.text or GIVEN_UP}]
                conversation.turned.notify_all()
            for side in range(self._sides):
                tasks.create_task(self._side(phase, turn, side, record.text))

    async def _side(self, phase: Phase, turn: Turn, side: int, answer: str) -> None:
        quoted = f"### Task {side}:\nName this conversation.\n### Chat:\n{turn.text[-SIDE_CHARS:]}\n{answer}"
        asked = replace(turn, branch=-1 - side)
        messages = [{"role": "user", "content": quoted}]
        self.records.append(await self._ask(messages, f"bench-{turn.session}", phase, asked))

    async def _ask(self, messages: list[Message], session: str, phase: Phase, turn: Turn) -> Record:
        digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()
        record = Record(
            router=self._router,
            round=self._round,
            phase=phase,
            session=turn.session,
            number=turn.number,
            branch=turn.branch,
            sent_s=time.monotonic(),
            prompt=digest,
        )
        errors: list[str] = []
        while len(errors) < TRIES_MAX:
            try:
                async with asyncio.timeout(TURN_S_MAX):
                    record = await self._stream(messages, session, record)
                break
            except FAILURES as error:
                errors.append(f"{type(error).__name__}: {str(error)[:120]}")
                await asyncio.sleep(GAP_S_MIN)
        return replace(record, errors=tuple(errors), done_s=time.monotonic())

    async def _stream(self, messages: list[Message], session: str, record: Record) -> Record:
        """`record` with the answer. Raises `RuntimeError` for a stream that ends without saying why."""
        body: dict[str, Any] = {"model": self._model, "messages": messages, "temperature": 0}
        extra = {"session_id": session, "min_tokens": ANSWER_TOKENS}  # all answers cost the same
        stream: Any = await self._client.chat.completions.create(
            **body,
            max_tokens=ANSWER_TOKENS,
            extra_body=extra,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, first_s = "", None
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.delta.content:
                        first_s = first_s or time.monotonic()
                        text += choice.delta.content
                if chunk.usage:
                    if first_s is None:
                        raise RuntimeError("an answer without text")
                    receipt = chunk.model_extra["receipt"]
                    return replace(
                        record,
                        first_s=first_s,
                        text=text,
                        prompt_tokens=chunk.usage.prompt_tokens,
                        answer_tokens=chunk.usage.completion_tokens,
                        tokens=receipt["tokens"],
                        replica=",".join(receipt["replica"]),
                    )
        raise RuntimeError("the stream ended before its usage")


async def _at(when_s: float, event: Callable[[], Any]) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))
    await asyncio.to_thread(event)
