"""`samovar chat`: a conversation in the terminal with anything that speaks OpenAI's chat API.

The thin shell: HTTP, keyboard and screen. What a conversation and a turn are is in
`conversation.py`. It does not know whether Samovar or another server answers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from rich.console import Console

from cluster.conversation import (
    Conversation,
    StreamError,
    Turn,
    error_message,
    printable,
    sse_data,
    sse_lines,
)
from configs.settings import ServerSettings

CONNECT_S = 5.0
SILENCE_S = 120.0  # a living server sends a comment at least every few seconds
HELP = """\
/new          forget this conversation and begin another
/system TEXT  set the system message (without TEXT: remove it)
/help         show this
/quit         leave (Ctrl-D does as well); Ctrl-C stops an answer"""


class ChatError(Exception):
    """What went wrong between here and the server, with what to do about it."""


class ChatClient:
    """The two calls a chat needs. Blocking; for one thread. Close it when done."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` is the server's root, with or without `/v1`. Raises ChatError when it is no HTTP URL."""
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"--url {url} is not a URL. Write it like http://127.0.0.1:8000")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ChatError("the API key in SAMOVAR_API_KEY holds characters that no HTTP header can carry")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            # A proxy from the environment cannot reach this very machine.
            trust_env=not ServerSettings(host=parts.hostname).is_loopback,
        )

    def close(self) -> None:
        self._http.close()

    def first_model(self) -> str:
        """The id of the first model that is served. Raises ChatError."""
        with self._explained():
            reply = self._http.get("/v1/models")
            self._check(reply)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self.url} does not list any model: is it an OpenAI endpoint?") from error

    def stream(self, body: dict[str, Any], session_id: str) -> Iterator[str]:
        """The data of each event of the answer. Raises ChatError."""
        headers = {"X-Session-Id": session_id}
        with (
            self._explained(),
            self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply,
        ):
            if reply.is_error:
                reply.read()
            self._check(reply)
            yield from sse_data(sse_lines(reply.iter_text()))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ChatError(
                f"nothing answers at {self.url} ({error}). "
                "Start it with `samovar serve`, or name another address with --url"
            ) from error
        except httpx.TimeoutException as error:
            raise ChatError(f"{self.url} is silent for too long ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to {self.url} broke: {error}") from error

    def _check(self, reply: httpx.Response) -> None:
        if not reply.is_error:
            return
        try:
            said = error_message(reply.json())
        except ValueError:
            said = None
        said = said or printable(reply.reason_phrase) or "no reason given"
        hints = {
            401: ". Put the API key into SAMOVAR_API_KEY",
            403: ". Put the API key into SAMOVAR_API_KEY",
            429: ". It is busy, try again in a moment",
            503: ". It is still loading or about to stop, try again in a moment",
        }
        raise ChatError(f"the server refused ({reply.status_code}): {said}{hints.get(reply.status_code, '')}")


class Chat:
    """Reads lines, asks, prints answers. `read` returns the next line or raises EOFError."""

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
        """Go on until /quit or the end of the input. Ctrl-C at the prompt clears the line."""
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

    def ask(self, question: str) -> Turn:
        """One turn, printed as it comes in. What fails is printed, counted and not kept."""
        turn = Turn(started_s=self.clock())
        try:
            body = self.conversation.request(question)
            for data in self.client.stream(body, self.conversation.session_id):
                text = turn.take(data, self.clock())
                self.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
                if turn.done:
                    break
            turn.check_complete()
        except KeyboardInterrupt:
            # What was read stays in the conversation: the person saw it and may speak of it.
            self._end_line(turn)
            self.console.print("stopped", style="dim")
        except (ChatError, StreamError) as error:
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

    def _end_line(self, turn: Turn) -> None:
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
    """Chat on this process's standard streams; returns the exit code (1 when a turn failed)."""
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
    """A prompt with history on a terminal; plain lines from a pipe."""
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
    """The lines typed before, in a file that only its owner may read."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "samovar" / "chat_history"
    try:
        path = path.expanduser()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where this user's home is
        errors.print(f"no history is kept in {path}: {error}", style="dim", markup=False)
        return InMemoryHistory()
    return FileHistory(str(path))
