"""Runs `samovar chat`: a conversation in the terminal with any server that speaks OpenAI's chat API.

Answers are shown as Markdown while they arrive, and keys wait unseen. HTTP is spoken by the `openai` client.
"""

from __future__ import annotations

import io
import json
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import openai
from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from samovar.cluster.cli.conversation import (
    RETRY_TEMPERATURE,
    ChatError,
    ChatTurn,
    Conversation,
    Sampling,
    error_code,
    error_message,
    printable,
)
from samovar.cluster.cli.running import AccessRefused, base_of, trust_of
from samovar.cluster.serve.secrets import write_private
from samovar.cluster.serve.stages import console_of
from samovar.configs.json_text import parse_json
from samovar.configs.model_reference import DEFAULT_NAME
from samovar.configs.settings import ServerSettings

LEAVE = ("/quit", "/exit", "/bye")
LONG = '"""'
"""Begins and ends a message of several lines."""
HELP = """\
/new            forget this conversation and start another
/retry          ask the last question again
/system TEXT    set the system message (without TEXT: remove it)
/model NAME     go on with another model (without NAME: list them)
/temperature N  0 = always the most likely token (without N: the model's own)
/history        show the conversation
/save FILE      save it, as Markdown (FILE.md) or JSON
/help           show this
/quit           leave (/exit, /bye and Ctrl-D do as well); Ctrl-C stops an answer
Several lines: between \"\"\" and \"\"\", or with Alt-Enter."""
TOY_HINT = f"{DEFAULT_NAME} is a 4-bit toy, to see the cache work: ask twice, and look at the line below."


FENCES = ("```", "~~~")


class AnswerView(Protocol):
    """Shows one answer as it arrives. `close` comes last, also after a failure."""

    def add(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainView:
    """Prints an answer's text as it is."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_at_line_start = True

    def add(self, text: str) -> None:
        """Print more of the answer."""
        if text:
            self._console.file.write(text)  # `print` would expand tabs, and take `:key:` for an emoji
            self._console.file.flush()
            self._is_at_line_start = text.endswith("\n")

    def close(self) -> None:
        """End the last line."""
        if not self._is_at_line_start:
            self._console.print()


class MarkdownView:
    """Prints an answer as Markdown: each block once it is whole, the one that grows below them until then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._live: Live | None = None

    def add(self, text: str) -> None:
        """Show more of the answer."""
        self._rest += text
        whole = whole_blocks(self._rest)
        if whole:
            block, self._rest = self._rest[:whole], self._rest[whole:]
            self._stop()
            self._print(block)
        if self._rest.strip():
            if self._live is None:
                # Longer than the screen, a growing block is cut until it is printed.
                self._live = Live(console=self._console, transient=True, vertical_overflow="ellipsis")
                self._live.start()
            self._live.update(Markdown(self._rest))

    def close(self) -> None:
        """Print what is left."""
        self._stop()
        if self._rest.strip():
            self._print(self._rest, is_last=True)
        self._rest = ""

    def _print(self, block: str, *, is_last: bool = False) -> None:
        if block.strip():
            self._console.print(Markdown(block))
            if not is_last:
                self._console.print()

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def whole_blocks(text: str) -> int:
    """Return the length of the beginning of `text` that later text cannot change: up to its last empty line.

    An empty line inside a code fence ends nothing.
    """
    whole, at, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        at += len(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) else fence
        elif stripped.startswith(FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n"):
            whole = at
    return whole


@contextmanager
def unseen_keys(fd: int | None = None) -> Iterator[None]:
    """Do not show keys that are typed meanwhile; they wait for the next prompt. Ctrl-C works as ever.

    `fd`: of the terminal; None: standard input. Nothing happens where it is no terminal.
    """
    try:
        number = sys.stdin.fileno() if fd is None else fd
        before = termios.tcgetattr(number)
    except (OSError, ValueError, AttributeError, termios.error):  # no terminal
        yield
        return
    quiet = termios.tcgetattr(number)
    # Without canonical mode too: an editing key would be left of it in the terminal's own line.
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(number, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)


class Chat:
    """Reads lines, asks, prints answers. `read` returns the next line or raises `EOFError`.

    `view`: shows one answer; by default its text as it is.
    """

    def __init__(
        self,
        client: ChatClient,
        conversation: Conversation,
        console: Console,
        errors: Console,
        read: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        view: Callable[[Console], AnswerView] = PlainView,
    ) -> None:
        self.client = client
        self.conversation = conversation
        self.console = console
        self.errors = errors
        self.read = read
        self.clock = clock
        self.view = view
        self.failed_turns = 0

    def run(self) -> None:
        """Loop until /quit or the end of the input. Ctrl-C at the prompt clears the line."""
        while True:
            try:
                message = self._read_message()
            except EOFError:
                self.leave()
                return
            except KeyboardInterrupt:
                self.console.print("/quit or Ctrl-D leaves", style="dim", highlight=False)
                continue
            if message in LEAVE:
                self.leave()
                return
            if message.startswith("/"):
                self._command(message)
            elif message:
                self.ask(message)

    def leave(self) -> None:
        """Tell the server that the conversation is over, if there was one: its blocks make room first."""
        if self.conversation.history:
            self.client.closed(self.conversation.session_id)

    def _read_message(self) -> str:
        """Return the next line, or the lines up to the closing quotes if it begins with three."""
        line = self.read().strip()
        if not line.startswith(LONG):
            return line
        lines = [line.removeprefix(LONG)]
        while not lines[-1].rstrip().endswith(LONG):
            try:
                lines.append(self.read().rstrip("\n"))
            except EOFError:  # of a pipe: what is there is the message
                return "\n".join(lines).strip()
        lines[-1] = lines[-1].rstrip().removesuffix(LONG)
        return "\n".join(lines).strip()

    def ask(self, question: str) -> ChatTurn:
        """Ask and print one turn as it arrives. A failed turn is reported, counted and not kept."""
        turn = ChatTurn(started_s=self.clock())
        view = self.view(self.console)
        try:
            with unseen_keys():
                try:
                    body = self.conversation.request(question)
                    for chunk in self.client.stream(body, self.conversation.session_id):
                        view.add(turn.take(chunk, self.clock()))
                    turn.check_complete()
                finally:
                    view.close()
        except KeyboardInterrupt:
            # The partial answer stays in the conversation: the user saw it and may refer to it.
            self.console.print("stopped", style="dim")
        except ChatError as error:
            self.failed_turns += 1
            said = str(error).rstrip(".")
            self.errors.print(f"{said}. The question is not kept.", style="red", markup=False)
            return turn
        self.conversation.keep(question, turn.text)
        if summary := turn.summary():
            self.console.print(summary, style="dim", highlight=False)
        return turn

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        commands: dict[str, Callable[[str], str]] = {
            "/new": self._new,
            "/retry": self._retry,
            "/system": self._system,
            "/model": self._model,
            "/temperature": self._temperature,
            "/history": self._history,
            "/save": self._save,
            "/help": lambda _rest: HELP,
        }
        command = commands.get(word)
        try:
            said = f"there is no command {printable(word)}\n{HELP}" if command is None else command(rest)
        except ChatError as error:
            self.errors.print(f"{error}.", style="red", markup=False)
            return
        if said:
            self.console.print(said, style="dim", markup=False, highlight=False)

    def _new(self, rest: str) -> str:
        self.leave()
        self.conversation.restart()
        return "a new conversation"

    def _retry(self, rest: str) -> str:
        """Ask again; where every answer would be the same, at a temperature that gives another one."""
        turn = self.conversation.take_back()
        if not turn:
            return "there is no question to ask again"
        question = turn[0]["content"]
        before = self.conversation.sampling
        if not before.fields(self.conversation.model).get("temperature", 1.0):
            self.console.print(f"again, at temperature {RETRY_TEMPERATURE}", style="dim", highlight=False)
            self.conversation.sampling = replace(before, temperature=RETRY_TEMPERATURE)
        kept, failed = list(self.conversation.history), self.failed_turns
        try:
            self.ask(question)
        finally:
            self.conversation.sampling = before
        if self.failed_turns > failed:
            self.conversation.history = kept + turn
        return ""

    def _system(self, rest: str) -> str:
        self.conversation.system = rest or None
        return "the system message is set" if rest else "no system message"

    def _model(self, rest: str) -> str:
        names = self.client.models()
        if not rest:
            lines = [f"{'*' if name == self.conversation.model else ' '} {printable(name)}" for name in names]
            return "\n".join(lines)
        if rest not in names:
            return f"{printable(rest)} is not served here: {', '.join(map(printable, names))}"
        self.conversation.use(rest)
        return f"now {rest}"

    def _temperature(self, rest: str) -> str:
        try:
            wanted = float(rest) if rest else None
        except ValueError:
            wanted = -1.0
        if wanted is not None and not 0 <= wanted <= 2:
            return "give a number from 0 to 2"
        self.conversation.sampling = replace(self.conversation.sampling, temperature=wanted)
        return "the model's own temperature" if wanted is None else f"temperature {wanted:g}"

    def _history(self, rest: str) -> str:
        messages = self.conversation.json()["messages"]
        lines = [f"{message['role']}: {printable(message['content'])}" for message in messages]
        return "\n".join(lines) or "nothing was said yet"

    def _save(self, rest: str) -> str:
        if not rest:
            return "give a file: /save FILE.md or /save FILE.json"
        talk = self.conversation
        is_markdown = rest.lower().endswith((".md", ".markdown"))
        text = talk.markdown() if is_markdown else json.dumps(talk.json(), indent=2, ensure_ascii=False)
        try:
            write_private(Path(rest).expanduser(), text)
        except (OSError, RuntimeError) as error:  # RuntimeError: the user after `~` is unknown
            return f"{printable(rest)} cannot be written: {error}"
        return f"saved in {printable(rest)}"


def run_chat(
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    sampling: Sampling | None = None,
    *,
    question: str | None = None,
    plain: bool = False,
) -> int:
    """Chat on this process's standard streams and return the exit code (1 if a turn failed).

    `question`: ask only this; the answer goes to stdout, all else to stderr. `plain`: no Markdown.
    """
    console, errors = (console_of(stderr=one) for one in (False, True))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    # What is no text in the terminal's encoding arrives as halves of characters, which no request can hold.
    question, system, model = (
        one and one.encode(errors="replace").decode() for one in (question, system, model)
    )
    client: ChatClient | None = None
    try:
        client = ChatClient(url, api_key)
        conversation = Conversation(model or client.first_model(), system, sampling or Sampling())
        view: Callable[[Console], AnswerView] = PlainView
        if console.is_terminal and not plain:
            view = MarkdownView
        if question is not None:
            return _ask_once(Chat(client, conversation, console, errors, _read_pipe, view=view), question)
        if sys.stdin.isatty():
            console.print(f"{conversation.model} at {client.url}. /help shows the commands.", markup=False)
            if conversation.model == DEFAULT_NAME:
                console.print(TOY_HINT, style="dim", markup=False, highlight=False)
        chat = Chat(client, conversation, console, errors, _reader(errors), view=view)
        chat.run()
        return 1 if chat.failed_turns else 0
    except ChatError as error:
        errors.print(f"samovar chat: {str(error).rstrip('.')}.", style="red", markup=False, soft_wrap=True)
        return 1
    finally:
        if client is not None:
            client.close()


def _ask_once(chat: Chat, question: str) -> int:
    """Print the answer alone; its figures go to a terminal only, not into a file."""
    turn = ChatTurn(started_s=chat.clock())
    view = chat.view(chat.console)
    try:
        for chunk in chat.client.stream(chat.conversation.request(question), chat.conversation.session_id):
            view.add(turn.take(chunk, chat.clock()))
        turn.check_complete()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        view.close()
    if chat.errors.is_terminal:
        chat.errors.print(turn.summary(), style="dim", highlight=False)
    return 0


EXIT_INTERRUPTED = 130
CLOSED_S = 2.0
"""How long who leaves waits for the server to hear it, at most."""


def _reader(errors: Console) -> Callable[[], str]:
    """Return the line reader: a prompt with history on a terminal, plain lines from a pipe."""
    if not sys.stdin.isatty():
        return _read_pipe
    session: PromptSession[str] = PromptSession(history=_history(errors), key_bindings=_keys())
    return lambda: session.prompt("> ").encode(errors="replace").decode()  # as of a pipe


def _keys() -> KeyBindings:
    """Return the keys beyond prompt_toolkit's own: Alt-Enter begins another line."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


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


CONNECT_S = 5.0
SILENCE_S = 120.0  # a live server sends a comment at least every few seconds


# All that a request may carry: openai adds headers that its own variables name (`OPENAI_ORG_ID`,
# `OPENAI_CUSTOM_HEADERS`), which are meant for another server than this one, and describes this machine.
SENT_HEADERS = {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type"}
SENT_HEADERS |= {"host", "user-agent", "x-session-id"}


class ChatClient:
    """Makes the three HTTP calls that a chat needs. Blocking; for one thread. Close it when done."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url`: the server's root, with or without `/v1`. Raises `ChatError` if it, or the key, is none."""
        try:
            self.url = base_of(url, api_key)
        except AccessRefused as error:
            raise ChatError(str(error)) from error
        self._auth = {"Authorization": f"Bearer {api_key}" if api_key else openai.omit}
        # A proxy from the environment cannot reach this machine's loopback address.
        self.trusts_env = not ServerSettings(host=urlsplit(self.url).hostname).is_loopback
        self._openai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="-",  # not sent, but without one openai takes OPENAI_API_KEY
            timeout=openai.Timeout(SILENCE_S, connect=CONNECT_S),
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                trust_env=self.trusts_env,
                verify=trust_of(self.url),
                follow_redirects=False,
                event_hooks={"request": [_keep_sent_headers]},
            ),
        )

    def close(self) -> None:
        self._openai.close()

    def first_model(self) -> str:
        """Return the id of the first served model. Raises `ChatError`."""
        return self.models()[0]

    def models(self) -> list[str]:
        """Return the ids of the served models, one at least. Raises `ChatError`."""
        with self._explained():
            try:
                found = [model.id for model in self._openai.models.list(extra_headers=self._auth).data]
                return [str(found[0]), *map(str, found[1:])]
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

    def closed(self, session_id: str) -> None:
        """Say that a session is over. It does not matter whether that arrives, or is understood."""
        path = f"/sessions/{quote(session_id, safe='')}/hint"
        options: openai.RequestOptions = {"headers": self._auth, "timeout": CLOSED_S}
        with suppress(openai.OpenAIError, ValueError):
            self._openai.post(path, body={"event": "closed"}, cast_to=object, options=options)

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
        body = parse_json(error.response.text)
    except ValueError:
        body = None
    said, code = error_message(body), error_code(body)
    said = (said or printable(error.response.reason_phrase) or "no reason given").rstrip(".")
    hints = {
        401: ". Put the API key into SAMOVAR_API_KEY",
        403: ". Put the API key into SAMOVAR_API_KEY",
        429: ". It is busy, try again in a moment",
        503: ". It is still loading or about to stop, try again in a moment",
    }
    hint = hints.get(error.status_code, "")
    if code == "context_length_exceeded":
        hint = ". Begin another conversation with /new, or start with a smaller --max-tokens"
    return f"the server refused ({error.status_code}): {said}{hint}"
