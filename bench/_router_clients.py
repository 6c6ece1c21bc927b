"""The clients of `make bench-router`: they play one phase of a schedule against one service.

A turn goes out at its time, or a little after the answer before it when that came late; one that fails is
asked again, as a person would. After an answer a client may ask for a title, tags and questions under the
same id (`TASKS`), as Open WebUI does. Each says what it saw in a `Record`. Knows nothing of routers.
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

TURN_S_MAX = 60.0
TRIES_MAX = 3
GIVEN_UP = "I do not know."
"""What the conversation has in place of an answer that never came."""

TASKS = (
    "Generate a concise title of three to five words for the chat below",
    "Generate one to three tags that name the subjects of the chat below",
    "Suggest three questions that the user might ask next in the chat below",
)
"""What side requests begin with: one user message each, that quotes the last turn."""

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
    """All sessions of one run; their conversations go on from phase to phase.

    `side_requests`: so many of `TASKS` follow each turn of a conversation.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        router: str,
        round_number: int,
        *,
        side_requests: int = 0,
    ) -> None:
        self._client = client
        self._model = model
        self._router = router
        self._round = round_number
        self._tasks = TASKS[:side_requests]
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
                tasks.create_task(self._turn(phase, turn, began_s))

    def home(self, session: int) -> str:
        """The replica that served the session last; empty when none has."""
        own = (record for record in self.records if record.session == session and record.branch >= 0)
        served = [record for record in own if record.replica]
        return max(served, key=lambda record: record.done_s).replica if served else ""

    async def _turn(self, phase: Phase, turn: Turn, began_s: float) -> None:
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
            quoted = f"USER: {turn.text}\nASSISTANT: {record.text}"
            async with asyncio.TaskGroup() as beside:
                for number, task in enumerate(self._tasks):
                    beside.create_task(self._beside(phase, replace(turn, branch=-1 - number), task, quoted))

    async def _beside(self, phase: Phase, turn: Turn, task: str, quoted: str) -> None:
        message = {"role": "user", "content": f"{task}.\n### Chat\n{quoted}"}
        self.records.append(await self._ask([message], f"bench-{turn.session}", phase, turn))

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
