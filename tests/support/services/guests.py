"""People who chat with a running Samovar, wherever it runs, and what came of each turn."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from openai import OpenAI

from tests.support.services.service import MODEL

ANSWER_TOKENS = 12
PROSE = (
    "tea samovar cup steam guest water kettle coal garden winter letter train river bread honey lamp road "
    "story evening market silver window table neighbour journey music village kitchen copper charcoal"
)
Messages = list[dict[str, str]]


def words(seed: int, count: int) -> str:
    """The same words for the same seed; seeds differ from their first word on."""
    return f"{seed} " + " ".join(random.Random(seed).choices(PROSE.split(), k=count))


@dataclass(frozen=True)
class Reply:
    """What came of one turn. `by_tier`: cached prompt tokens by where they came from."""

    text: str
    prompt_tokens: int
    by_tier: Mapping[str, int]
    receipt: Mapping[str, Any]
    ttft_s: float

    @property
    def cached(self) -> int:
        return sum(self.by_tier.values())


@dataclass
class Conversation:
    """What was said so far. It shares no block with others: it has a system message of its own."""

    seed: int
    session: str = field(default_factory=lambda: f"session-{uuid.uuid4()}")
    turn_words: int = 60
    key: str | None = None
    messages: Messages = field(init=False)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": f"{self.seed} is the number of this guest."}]

    def next_messages(self) -> Messages:
        said = words(1000 * self.seed + len(self.messages), self.turn_words)
        return [*self.messages, {"role": "user", "content": f"{said}. What comes next?"}]


class Guests:
    """Whoever talks to the endpoint at `url`. Answers are greedy: the same question has the same answer."""

    url: str

    @cached_property
    def _clients(self) -> dict[str | None, OpenAI]:
        return {}

    def openai(self, key: str | None = None) -> OpenAI:
        """A client that does not try again by itself."""
        raise NotImplementedError

    def ask(
        self,
        messages: Messages,
        *,
        session: str | None = None,
        salt: str | None = None,
        key: str | None = None,
        max_tokens: int = ANSWER_TOKENS,
        **body: object,
    ) -> Reply:
        """A greedy answer, streamed. Raises what the openai client raises."""
        names = {"session_id": session, "cache_salt": salt}
        began_s = time.monotonic()
        stream = self._client(key).chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={**{name: value for name, value in names.items() if value}, **body},
        )
        text, ttft_s, last = "", 0.0, None
        for chunk in stream:
            last = chunk
            if chunk.choices and chunk.choices[0].delta.content:
                ttft_s = ttft_s or time.monotonic() - began_s
                text += chunk.choices[0].delta.content
        assert last is not None
        assert last.usage is not None, "the stream ended without usage"
        assert last.usage.prompt_tokens_details is not None
        assert last.model_extra is not None
        by_tier = (last.usage.prompt_tokens_details.model_extra or {})["cached_tokens_by_tier"]
        return Reply(text, last.usage.prompt_tokens, by_tier, last.model_extra["receipt"], ttft_s)

    def turn(self, conversation: Conversation, **ask: Any) -> Reply:
        """The conversation's next turn."""
        messages = conversation.next_messages()
        reply = self.ask(messages, session=conversation.session, key=conversation.key, **ask)
        conversation.messages = [*messages, {"role": "assistant", "content": reply.text}]
        return reply

    def uncached(self, messages: Messages, **ask: Any) -> Reply:
        """The same, for somebody to whom every block is new."""
        reply = self.ask(messages, salt=str(uuid.uuid4()), **ask)
        assert reply.cached == 0, f"somebody else's blocks: {reply.receipt}"
        return reply

    def _client(self, key: str | None) -> OpenAI:
        if key not in self._clients:
            self._clients[key] = self.openai(key)
        return self._clients[key]
