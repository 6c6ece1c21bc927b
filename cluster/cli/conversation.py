"""A conversation in the terminal: its turns, what a request says, what an answer's figures are.

Pure, with clock readings passed in; HTTP is in `chat.py`, keyboard and screen in `chat.py`.
"""

from __future__ import annotations

import unicodedata
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samovar.cluster.serve.startup_table import TIER_WORDS
from samovar.configs.model_reference import DEFAULT_NAME

KEPT = "\n\t\u200c\u200d"  # the last two: zero-width non-joiner and joiner
DROPPED = ("Cc", "Cf", "Cs")  # Unicode's categories: control, format, surrogate
TOY_PENALTY = 1.1
"""Repetition penalty of the default model: 135 M parameters in 4 bits repeat themselves without an end."""
RETRY_TEMPERATURE = 0.7


class ChatError(Exception):
    """A failure between here and the server; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled. None: the server's default, which is the model's own.

    The default model is greedy and does not repeat itself, unless a temperature is given.
    """

    temperature: float | None = None
    max_tokens: int | None = None

    def fields(self, model: str) -> dict[str, Any]:
        """Return the fields of a request to `model`, in the form that the `openai` client takes."""
        found: dict[str, Any] = {}
        if self.max_tokens is not None:
            found["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            found["temperature"] = self.temperature
        elif model == DEFAULT_NAME:
            found["temperature"] = 0.0
        if model == DEFAULT_NAME:
            found["extra_body"] = {"repetition_penalty": TOY_PENALTY}
        return found


@dataclass(slots=True)
class ChatTurn:
    """One question and its answer as it arrives. Times: seconds of one monotonic clock."""

    started_s: float
    text: str = ""
    first_text_s: float | None = None
    last_text_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    saved_s: float = 0.0
    miss: str = ""  # why not more of the prompt was cached

    def take(self, chunk: Mapping[str, Any], now_s: float) -> str:
        """Account for one chunk and return its new text, free of control characters."""
        self._take_usage(chunk.get("usage"))
        self._take_receipt(chunk.get("receipt"))
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
        """Raise `ChatError` if the stream ended without a reason to finish: the text may be cut."""
        if self.finish_reason is None:
            raise ChatError("the connection ended in the middle of the answer")

    def summary(self) -> str:
        """Return one line of figures; unknown ones are left out."""
        parts = []
        if self.prompt_tokens is not None and self.cached_tokens is None:
            parts.append(f"prompt {self.prompt_tokens} tok")
        elif self.prompt_tokens is not None:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tok cached{self._sources()}")
        if self.miss:
            parts.append(f"not more: {self.miss}")
        if self.saved_s > 0:
            parts.append(f"saved {self.saved_s:.2f} s")
        if self.answer_tokens is not None:
            parts.append(f"answer {self.answer_tokens} tok")
        if self.first_text_s is not None:
            parts.append(f"first word {self.first_text_s - self.started_s:.2f} s")
        if (rate := self._tokens_per_s()) is not None:
            parts.append(f"{rate:.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
        if self.finish_reason == "length":
            parts.append("cut at the token limit")
        return " · ".join(parts)

    def _sources(self) -> str:
        named = [
            f"{TIER_WORDS.get(tier, printable(tier))} {count}"
            for tier, count in self.cached_by_tier.items()
            if count
        ]
        return f" ({', '.join(named)})" if named else ""

    def _tokens_per_s(self) -> float | None:
        """Return the tokens after the first, divided by the time after the first."""
        if self.answer_tokens is None or self.first_text_s is None or self.last_text_s is None:
            return None
        elapsed_s = self.last_text_s - self.first_text_s
        return (self.answer_tokens - 1) / elapsed_s if elapsed_s > 0 and self.answer_tokens > 1 else None

    def _take_usage(self, usage: dict[str, Any] | None) -> None:
        if not usage:
            return
        self.prompt_tokens = usage.get("prompt_tokens")
        self.answer_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens")
        by_tier = details.get("cached_tokens_by_tier")
        if isinstance(by_tier, dict):
            self.cached_by_tier = {
                str(tier): count for tier, count in by_tier.items() if isinstance(count, int)
            }

    def _take_receipt(self, receipt: Any) -> None:
        """Note what loading saved (the price of computing the same, less the load), and why not more."""
        if isinstance(receipt, dict):
            miss = receipt.get("miss")
            self.miss = printable(miss) if isinstance(miss, str) else ""
            avoided_ms, load_ms = (receipt.get(name) for name in ("recompute_ms_avoided", "load_ms"))
            if isinstance(avoided_ms, int | float) and isinstance(load_ms, int | float):
                self.saved_s = max(0.0, (avoided_ms - load_ms) / 1000)


@dataclass(slots=True)
class Conversation:
    """The messages so far and their session.

    The history always alternates: a question without an answer is never kept.
    """

    model: str
    system: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    history: list[dict[str, str]] = field(default_factory=list)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def request(self, question: str) -> dict[str, Any]:
        """Return the body of the request that asks `question`."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*head, *self.history, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | self.sampling.fields(self.model)

    def keep(self, question: str, answer: str) -> None:
        """Add a turn. An empty answer is dropped together with its question."""
        if answer:
            self.history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]

    def take_back(self) -> list[dict[str, str]]:
        """Remove the last turn and return its question and answer; [] if there is none."""
        turn = self.history[-2:]
        del self.history[-2:]
        return turn

    def use(self, model: str) -> None:
        """Go on with another model: the messages stay, their blocks are of no use to it."""
        if model != self.model:
            self.model, self.session_id = model, uuid.uuid4().hex

    def json(self) -> dict[str, Any]:
        """Return the conversation as it can be saved: a model's name and OpenAI's messages."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*head, *self.history]}

    def markdown(self) -> str:
        """Return the conversation as Markdown, a heading a message."""
        parts = [f"# {self.model}"]
        parts += [f"## {message['role']}\n\n{message['content']}" for message in self.json()["messages"]]
        return "\n\n".join(parts) + "\n"

    def restart(self) -> None:
        """Drop the messages and start a new session; the system message stays."""
        self.history = []
        self.session_id = uuid.uuid4().hex


def error_message(body: Any) -> str | None:
    """Return the message of an error in OpenAI's format; None if the body is something else."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return printable(error["message"])
    return printable(error) if isinstance(error, str) else None


def error_code(body: Any) -> str | None:
    """Return the code of an error in OpenAI's format; None if it has none."""
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def printable(text: str) -> str:
    """Return the text without characters that could control the terminal or misrepresent the text.

    These are control characters, invisible ones such as overrides of the writing direction, and halves of
    surrogate pairs, which cannot be printed at all. Joiners stay: scripts and emoji need them.
    """
    return "".join(c for c in text if c in KEPT or unicodedata.category(c) not in DROPPED)
