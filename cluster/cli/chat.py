"""Runs `samovar chat`: a conversation in the terminal with any server that speaks OpenAI's chat API.

Turns and conversations are pure, with clock readings passed in; HTTP (by the `openai` client), keyboard and
screen are in `ChatClient` and `Chat`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from rich.console import Console

from configs.json_text import parse_json
from configs.settings import ServerSettings

KEPT = "\n\t\u200c\u200d"  # the last two: zero-width non-joiner and joiner
DROPPED = ("Cc", "Cf", "Cs")  # Unicode's categories: control, format, surrogate


class ChatError(Exception):
    """A failure between here and the server; the message says what to do about it."""


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

    def take(self, chunk: Mapping[str, Any], now_s: float) -> str:
        """Account for one chunk and return its new text, free of control characters."""
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
        """Raise `ChatError` if the stream ended without a reason to finish: the text may be cut."""
        if self.finish_reason is None:
            raise ChatError("the connection ended in the middle of the answer")

    def summary(self) -> str:
        """Return one line of figures; unknown ones are left out."""
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
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


@dataclass(slots=True)
class Conversation:
    """The messages so far and their session.

    The history always alternates: a question without an answer is never kept.
    """

    model: str
    system: str | None = None
    temperature: float | None = None  # None: the server's default
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
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body

    def keep(self, question: str, answer: str) -> None:
        """Add a turn. An empty answer is dropped together with its question."""
        if answer:
            self.history += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]

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


def printable(text: str) -> str:
    """Return the text without characters that could control the terminal or misrepresent the text.

    These are control characters, invisible ones such as overrides of the writing direction, and halves of
    surrogate pairs, which cannot be printed at all. Joiners stay: scripts and emoji need them.
    """
    return "".join(c for c in text if c in KEPT or unicodedata.category(c) not in DROPPED)


CONNECT_S = 5.0
SILENCE_S = 120.0  # a live server sends a comment at least every few seconds
HELP = """\
/new          forget this conversation and start another
/system TEXT  set the system message (without TEXT: remove it)
/help         show this
/quit         leave (Ctrl-D does as well); Ctrl-C stops an answer"""


# All that a request may carry: openai adds headers that its own variables name (`OPENAI_ORG_ID`,
# `OPENAI_CUSTOM_HEADERS`), which are meant for another server than this one, and describes this machine.
SENT_HEADERS = {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type"}
SENT_HEADERS |= {"host", "user-agent", "x-session-id"}


class ChatClient:
    """Makes the two HTTP calls that a chat needs. Blocking; for one thread. Close it when done."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's root, with or without `/v1`. Raises `ChatError` if it is no HTTP URL."""
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url {url} is not a URL. Write it like http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ChatError("the API key in SAMOVAR_API_KEY holds characters that no HTTP header can carry")
        self._auth = {"Authorization": f"Bearer {api_key}" if api_key else openai.omit}
        # A proxy from the environment cannot reach this machine's loopback address.
        self.trusts_env = not ServerSettings(host=parts.hostname).is_loopback
        self._openai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="-",  # not sent, but without one openai takes OPENAI_API_KEY
            timeout=openai.Timeout(SILENCE_S, connect=CONNECT_S),
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                trust_env=self.trusts_env,
                follow_redirects=False,
                event_hooks={"request": [_keep_sent_headers]},
            ),
        )

    def close(self) -> None:
        self._openai.close()

    def first_model(self) -> str:
        """Return the id of the first served model. Raises `ChatError`."""
        with self._explained():
            try:
                return self._openai.models.list(extra_headers=self._auth).data[0].id
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ChatError(f"{self.url} does not list any model: is it an OpenAI endpoint?") from error

    def stream(self, body: dict[str, Any], session_id: str) -> Iterator[dict[str, Any]]:
        """Yield each chunk of the answer as it arrives. Raises `ChatError`."""
        headers = {**self._auth, "X-Session-Id": session_id}
        with self._explained(), self._openai.chat.completions.create(**body, extra_headers=headers) as answer:
            for chunk in answer:
                if not isinstance(chunk, openai.BaseModel):
                    said = str(chunk)[:80]
                    raise ChatError(f"the server sent an event that is not a JSON object: {said!r}")
                yield chunk.to_dict(warnings=False)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except openai.APIStatusError as error:
            raise ChatError(_refusal(error)) from error
        except openai.APITimeoutError as error:
            reason = type(error.__cause__).__name__
            raise ChatError(f"{self.url} did not answer in time ({reason})") from error
        except openai.APIConnectionError as error:
            if type(error.__cause__).__name__ != "ConnectError":  # of httpx or httpx2, as openai has it
                raise ChatError(f"the connection to {self.url} broke: {error.__cause__}") from error
            raise ChatError(
                f"nothing answers at {self.url} ({error.__cause__}). "
                "Start it with `samovar serve`, or name another address with --url"
            ) from error
        except openai.APIError as error:  # an error event inside the stream
            raise ChatError(error_message({"error": error.body}) or "the server reported an error") from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            said = getattr(error, "doc", "")[:80]
            raise ChatError(f"the server sent something that is not JSON: {said!r}") from error


def _keep_sent_headers(request: Any) -> None:
    for name in set(request.headers) - SENT_HEADERS:
        del request.headers[name]


def _refusal(error: openai.APIStatusError) -> str:
    """Return what the server said against the request, and what to do about it."""
    try:
        said = error_message(parse_json(error.response.text))
    except ValueError:
        said = None
    said = said or printable(error.response.reason_phrase) or "no reason given"
    hints = {
        401: ". Put the API key into SAMOVAR_API_KEY",
        403: ". Put the API key into SAMOVAR_API_KEY",
        429: ". It is busy, try again in a moment",
        503: ". It is still loading or about to stop, try again in a moment",
    }
    return f"the server refused ({error.status_code}): {said}{hints.get(error.status_code, '')}"


class Chat:
    """Reads lines, asks, prints answers. `read` returns the next line or raises `EOFError`."""

    def __init__(
        self,
        client: ChatClient,
        conversation: Conversation,
        console: Console,
        errors: Console,
        read: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.conversation = conversation
        self.console = console
        self.errors = errors
        self.read = read
        self.clock = clock
        self.failed_turns = 0

    def run(self) -> None:
        """Loop until /quit or the end of the input. Ctrl-C at the prompt clears the line."""
        while True:
            try:
                line = self.read().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.console.print("/quit or Ctrl-D leaves", style="dim", highlight=False)
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(line)

    def ask(self, question: str) -> ChatTurn:
        """Ask and print one turn as it arrives. A failed turn is reported, counted and not kept."""
        turn = ChatTurn(started_s=self.clock())
        try:
            body = self.conversation.request(question)
            for chunk in self.client.stream(body, self.conversation.session_id):
                text = turn.take(chunk, self.clock())
                self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            turn.check_complete()
        except KeyboardInterrupt:
            # The partial answer stays in the conversation: the user saw it and may refer to it.
            self._end_line(turn)
            self.console.print("stopped", style="dim")
        except ChatError as error:
            self.failed_turns += 1
            self._end_line(turn)
            self.errors.print(f"{error}. The question is not kept.", style="red", markup=False)
            return turn
        else:
            self._end_line(turn)
        self.conversation.keep(question, turn.text)
        if summary := turn.summary():
            self.console.print(summary, style="dim", highlight=False)
        return turn

    def _end_line(self, turn: ChatTurn) -> None:
        if turn.text and not turn.text.endswith("\n"):
            self.console.print()

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/new":
            self.conversation.restart()
            said = "a new conversation"
        elif word == "/system":
            self.conversation.system = rest.strip() or None
            said = "the system message is set" if rest.strip() else "no system message"
        elif word == "/help":
            said = HELP
        else:
            said = f"there is no command {printable(word)}\n{HELP}"
        self.console.print(said, style="dim", markup=False, highlight=False)


def run_chat(
    url: str, model: str | None, api_key: str | None, system: str | None, temperature: float | None = None
) -> int:
    """Chat on this process's standard streams and return the exit code (1 if a turn failed)."""
    console, errors = Console(), Console(stderr=True)
    client: ChatClient | None = None
    try:
        client = ChatClient(url, api_key)
        conversation = Conversation(model or client.first_model(), system, temperature)
        if sys.stdin.isatty():
            console.print(f"{conversation.model} at {client.url}. /help shows the commands.", markup=False)
        chat = Chat(client, conversation, console, errors, _reader(errors))
        chat.run()
        return 1 if chat.failed_turns else 0
    except ChatError as error:
        errors.print(f"samovar chat: {error}.", style="red", markup=False, soft_wrap=True)
        return 1
    finally:
        if client is not None:
            client.close()


def _reader(errors: Console) -> Callable[[], str]:
    """Return the line reader: a prompt with history on a terminal, plain lines from a pipe."""
    if not sys.stdin.isatty():
        return _read_pipe
    session: PromptSession[str] = PromptSession(history=_history(errors))
    return lambda: session.prompt("> ")


def _read_pipe() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _history(errors: Console) -> History:
    """Return the lines typed before, kept in a file that only its owner may read."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "samovar" / "chat_history"
    try:
        path = path.expanduser()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user's home cannot be determined
        errors.print(f"no history is kept in {path}: {error}", style="dim", markup=False)
        return InMemoryHistory()
    return FileHistory(str(path))
