"""A conversation as a chat client sees it: messages, the lines of a streamed answer, the figures of a turn.

Pure: no HTTP, no terminal, and the clock's readings are handed in. It does not know whose server
answers; anything that speaks OpenAI's chat API will do.
"""

from __future__ import annotations

import unicodedata
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from configs.json_text import parse_json

DONE = "[DONE]"
KEPT = "\n\t\u200c\u200d"  # the last two: zero-width non-joiner and joiner
DROPPED = ("Cc", "Cf", "Cs")  # Unicode's categories: control, format, surrogate


class StreamError(Exception):
    """The answer ended otherwise than it should have; the text says how."""


def sse_lines(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in pieces, as server-sent events mean them.

    `str.splitlines`, and httpx with it, also end lines at U+2028 and U+0085, which may stand in an answer.
    """
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if rest:
        yield rest


def sse_data(lines: Iterable[str]) -> Iterator[str]:
    """The `data` of each server-sent event in a stream of lines without their line ends.

    Comments (`: ping`) and other fields are skipped; an event ends with an empty line or with the stream.
    """
    parts: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            parts.append(line[5:].removeprefix(" "))
        elif not line and parts:
            yield "\n".join(parts)
            parts = []
    if parts:
        yield "\n".join(parts)


@dataclass(slots=True)
class Turn:
    """One question and its answer while it comes in. Times: seconds of one monotonic clock."""

    started_s: float
    text: str = ""
    first_text_s: float | None = None
    last_text_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    done: bool = False

    def take(self, data: str, now_s: float) -> str:
        """Account for one event and return the new text in it, free of control characters.

        Raises StreamError for an error that the server reports inside the stream, and for what is no event.
        """
        if data == DONE:
            self.done = True
            return ""
        try:
            chunk = parse_json(data)
        except ValueError as error:
            raise StreamError(f"the server sent something that is not JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise StreamError(f"the server sent an event that is not a JSON object: {data[:80]!r}")
        if chunk.get("error"):
            raise StreamError(error_message(chunk) or "the server reported an error")
        self._take_usage(chunk.get("usage"))
        text = ""
        for choice in chunk.get("choices") or []:
            text += (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        text = printable(text)
        if text:
            self.text += text
            self.last_text_s = now_s
            if self.first_text_s is None:
                self.first_text_s = now_s
        return text

    def check_complete(self) -> None:
        """Raise StreamError when the stream ended without saying so: the text may be cut."""
        if not self.done:
            raise StreamError("the connection ended in the middle of the answer")

    def summary(self) -> str:
        """One line of figures; what is not known is left out."""
        parts = []
        if self.prompt_tokens is not None:
            parts.append(f"prompt {self.prompt_tokens} tok")
        if self.cached_tokens is not None:
            parts.append(f"cached {self.cached_tokens}")
        if self.answer_tokens is not None:
            parts.append(f"answer {self.answer_tokens} tok")
        if self.first_text_s is not None:
            parts.append(f"TTFT {self.first_text_s - self.started_s:.2f} s")
        if (rate := self._tokens_per_s()) is not None:
            parts.append(f"{rate:.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return " · ".join(parts)

    def _tokens_per_s(self) -> float | None:
        """Tokens after the first, by the time after the first."""
        if self.answer_tokens is None or self.first_text_s is None or self.last_text_s is None:
            return None
        elapsed_s = self.last_text_s - self.first_text_s
        return (self.answer_tokens - 1) / elapsed_s if elapsed_s > 0 and self.answer_tokens > 1 else None

    def _take_usage(self, usage: dict[str, Any] | None) -> None:
        if not usage:
            return
        self.prompt_tokens = usage.get("prompt_tokens")
        self.answer_tokens = usage.get("completion_tokens")
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@dataclass(slots=True)
class Conversation:
    """The messages so far and the session they belong to.

    The history always alternates: a question without an answer is never kept.
    """

    model: str
    system: str | None = None
    temperature: float | None = None  # None: the server's default
    history: list[dict[str, str]] = field(default_factory=list)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def request(self, question: str) -> dict[str, Any]:
        """The body of the request that asks `question`."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*head, *self.history, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body

    def keep(self, question: str, answer: str) -> None:
        """Add a turn. An answer without text is dropped together with its question."""
        if answer:
            self.history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]

    def restart(self) -> None:
        """Forget the messages and begin a new session; the system message stays."""
        self.history = []
        self.session_id = uuid.uuid4().hex


def error_message(body: Any) -> str | None:
    """The message of an error in OpenAI's shape, or None where the body is something else."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return printable(error["message"])
    return printable(error) if isinstance(error, str) else None


def printable(text: str) -> str:
    """The text without what could steer the terminal or make it show something else than it says.

    That is control characters, invisible ones such as overrides of the writing direction, and halves of
    surrogate pairs, which cannot be printed at all. Joiners stay: scripts and emoji need them.
    """
    return "".join(c for c in text if c in KEPT or unicodedata.category(c) not in DROPPED)
