"""The terminal chat: its pure part, and the whole of it against a small server in this process."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console
from typer.testing import CliRunner

from samovar.cluster.cli import chat as chat_module
from samovar.cluster.cli.chat import Chat, ChatClient
from samovar.cluster.cli.conversation import (
    RETRY_TEMPERATURE,
    TOY_PENALTY,
    ChatError,
    ChatTurn,
    Conversation,
    Sampling,
    printable,
)
from samovar.cluster.cli.main import app
from samovar.configs.model_reference import DEFAULT_NAME

ROOT = Path(__file__).resolve().parents[4]


def chunk(text: str | None = None, finish: str | None = None) -> str:
    delta = {} if text is None else {"content": text}
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


USAGE = json.dumps(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 212,
            "completion_tokens": 34,
            "prompt_tokens_details": {"cached_tokens": 192},
        },
    }
)
ANSWER = [chunk(""), chunk("Hel"), chunk("lo"), chunk(finish="stop"), USAGE, "[DONE]"]


def test_a_turn_adds_up() -> None:
    turn = ChatTurn(started_s=10.0)
    for data, now_s in zip(ANSWER[:-1], [10.1, 10.21, 12.21, 12.3, 12.3], strict=True):
        turn.take(json.loads(data), now_s)
    turn.check_complete()
    assert turn.text == "Hello"
    assert turn.finish_reason == "stop"
    assert turn.summary() == "192 of 212 prompt tok cached · answer 34 tok · first word 0.21 s · 16 tok/s"


def test_a_miss_shows_a_zero_and_what_is_unknown_is_left_out() -> None:
    turn = ChatTurn(started_s=0.0)
    assert turn.summary() == ""
    turn.take(json.loads(USAGE.replace("192", "0")), 1.0)
    assert "0 of 212 prompt tok cached" in turn.summary()
    assert "first word" not in turn.summary()
    turn.take({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}, 1.0)
    assert turn.summary() == "prompt 9 tok"


def test_a_turn_says_where_its_tokens_came_from_and_what_that_saved() -> None:
    turn = ChatTurn(started_s=0.0)
    by_tier = {"gpu": 100, "cpu": 0, "nvme": 92}
    details = {"cached_tokens": 192, "cached_tokens_by_tier": by_tier}
    receipt = {"recompute_ms_avoided": 1028.0, "load_ms": 48.0}
    turn.take({"usage": {"prompt_tokens": 212, "prompt_tokens_details": details}, "receipt": receipt}, 1.0)
    assert turn.summary() == "192 of 212 prompt tok cached (pool 100, disk 92) · saved 0.98 s"
    turn.take({"receipt": {"recompute_ms_avoided": 10.0, "load_ms": 48.0}}, 1.0)
    assert "saved" not in turn.summary()


def test_a_turn_says_why_not_more_of_it_was_cached() -> None:
    turn = ChatTurn(started_s=0.0)
    miss = "not stored: computing 38 us a token, loading 65\x1b[2J"
    turn.take({"receipt": {"miss": miss}}, 1.0)
    assert turn.summary() == "not more: not stored: computing 38 us a token, loading 65[2J"


def test_a_stream_that_only_stops_is_not_complete() -> None:
    turn = ChatTurn(started_s=0.0)
    turn.take(json.loads(chunk("Hel")), 1.0)
    with pytest.raises(ChatError, match="middle of the answer"):
        turn.check_complete()


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9b\r\n\tc\x00") == "a[2Jb\n\tc"


def test_an_answer_cannot_be_read_otherwise_than_it_is_written() -> None:
    assert printable("a\u202etxt.exe\u202c\u2066b\u2069\ufeff\U000e0041") == "atxt.exeb"
    assert printable("half \ud83d of a pair") == "half  of a pair"
    for kept in (
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\U0001f469\u200d\U0001f52c",
        "\u05e9\u05dc\u05d5\u05dd",
    ):
        assert printable(kept) == kept


def test_a_conversation_alternates_and_restarts() -> None:
    assert "temperature" not in Conversation(model="m").request("hi")
    talk = Conversation(model="m", system="be brief", sampling=Sampling(0.2, 512))
    talk.keep("one", "1")
    talk.keep("lost", "")
    body = talk.request("two")
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["temperature"], body["max_tokens"]) == (0.2, 512)
    session = talk.session_id
    talk.restart()
    assert talk.history == []
    assert talk.session_id != session
    assert talk.system == "be brief"


def test_the_default_model_neither_rambles_nor_repeats_itself_and_others_are_as_they_are() -> None:
    toy = {"temperature": 0.0, "extra_body": {"repetition_penalty": TOY_PENALTY}}
    assert Sampling().fields(DEFAULT_NAME) == toy
    assert Sampling(0.9).fields(DEFAULT_NAME) == {**toy, "temperature": 0.9}
    assert Sampling().fields("another") == {}


class FakeServer(ThreadingHTTPServer):
    """Answers /v1/models, and each chat request with the next of `answers`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.answers: list[list[str] | tuple[int, str]] = []
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.hints: list[tuple[str, dict[str, Any], str | None]] = []
        self.hint_status = 200
        self.models_status = 200
        self.models = ["fake-model"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        body = (
            {"data": [{"id": name} for name in self.server.models]}
            if self.server.models_status == 200
            else {"error": {"message": "no"}}
        )
        self._reply(self.server.models_status, json.dumps(body))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/hint"):
            self.server.hints.append((self.path, body, self.headers.get("Authorization")))
            self._reply(self.server.hint_status, "{}")
            return
        self.server.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
        answer = self.server.answers.pop(0)
        if isinstance(answer, tuple):
            self._reply(*answer)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for data in answer:
            self.wfile.write(f": ping\n\ndata: {data}\n\n".encode())

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


def reader(*lines: str | type[BaseException]) -> Callable[[], str]:
    left = list(lines)

    def read() -> str:
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(
    url: str, *lines: str | type[BaseException], key: str | None = None, model: str = "fake-model"
) -> tuple[Chat, str]:
    out = StringIO()
    console = Console(file=out, width=200)
    client = ChatClient(url, key)
    chat = Chat(client, Conversation(model=model), console, console, reader(*lines))
    chat.run()
    client.close()
    return chat, out.getvalue()


def test_two_turns_keep_the_conversation_and_its_session(server: FakeServer) -> None:
    server.answers = [ANSWER, ANSWER, ANSWER]
    chat, text = talk(server.url, "hi", "", "again", "/new", "afresh", key="my-key")
    headers = [headers for headers, _ in server.requests]
    contents = [[m["content"] for m in body["messages"]] for _, body in server.requests]
    assert contents == [["hi"], ["hi", "Hello", "again"], ["afresh"]]
    sessions = [h["x-session-id"] for h in headers]
    assert sessions[0] == sessions[1] != sessions[2]
    assert {h["authorization"] for h in headers} == {"Bearer my-key"}
    assert text.startswith("Hello\n192 of 212 prompt tok cached · answer 34 tok · first word ")
    assert chat.failed_turns == 0


def test_who_leaves_or_begins_anew_says_that_the_conversation_is_over(server: FakeServer) -> None:
    server.answers = [ANSWER, ANSWER]
    talk(server.url, "hi", "/new", "afresh", "/quit", key="my-key")
    sessions = [headers["x-session-id"] for headers, _ in server.requests]
    assert server.hints == [
        (f"/v1/sessions/{session}/hint", {"event": "closed"}, "Bearer my-key") for session in sessions
    ]


def test_the_end_of_the_input_says_so_as_well_and_nothing_asked_is_nothing_to_end(server: FakeServer) -> None:
    server.answers = [ANSWER]
    talk(server.url, "hi")
    talk(server.url, "/quit")
    assert [body for _, body, _ in server.hints] == [{"event": "closed"}]


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_does_not_understand_is_left_all_the_same(server: FakeServer, status: int) -> None:
    server.answers, server.hint_status = [ANSWER], status
    chat, text = talk(server.url, "hi", "/quit")
    assert len(server.hints) == 1
    assert chat.failed_turns == 0
    assert not re.search(rf"\b{status}\b(?! tok/s)", text), "nor is it told"


def test_line_separators_in_an_answer_do_not_cut_it(server: FakeServer) -> None:
    text = "one\u2028two\u2029three\u00a0four"
    raw = chunk("@").replace("@", text)  # as a server does that writes UTF-8 without escapes
    server.answers = [[raw, chunk("@").replace("@", "\x85!"), chunk(finish="stop"), "[DONE]"]]
    chat, _ = talk(server.url, "hi")
    assert chat.failed_turns == 0
    assert chat.conversation.history[-1]["content"] == text + "!"


@pytest.mark.parametrize("host", ["127.0.0.1", "LocalHost", "127.0.0.2"])
def test_no_proxy_stands_between_us_and_this_machine(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    client = ChatClient(server.url.replace("127.0.0.1", host))
    if host == "127.0.0.2":  # nobody listens there, but it is asked directly
        assert not client.trusts_env
    else:
        assert client.first_model() == "fake-model"
    client.close()
    elsewhere = ChatClient("http://samovar.example")
    assert elsewhere.trusts_env
    elsewhere.close()


@pytest.mark.parametrize("key", [None, "my-key"])
def test_what_is_meant_for_openai_is_not_sent_here(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-of-openai")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-openai")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer of-openai\nX-Own: of-openai")
    server.answers = [ANSWER]
    chat, _ = talk(server.url, "hi", key=key)
    assert chat.failed_turns == 0
    headers = server.requests[0][0]
    assert "of-openai" not in str(headers)
    assert headers.get("authorization") == (f"Bearer {key}" if key else None)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("{", "not JSON: '{'"),
        ("[1]", "not a JSON object: '[1]'"),
        ("[" * 100_000, "not JSON"),
        ('{"error": {"message": "out of\\u001b pages"}}', "out of pages. The"),
        ('{"error": "out of pages"}', "out of pages. The"),
        ('{"error": {"code": 5}}', "the server reported an error"),
    ],
)
def test_an_event_that_is_no_chunk_ends_the_turn(server: FakeServer, event: str, said: str) -> None:
    server.answers = [[chunk("Hel"), event, "[DONE]"], ANSWER]
    chat, text = talk(server.url, "a", "b")
    assert said in text
    assert chat.failed_turns == 1


def test_a_redirect_is_refused(server: FakeServer) -> None:
    server.answers = [(307, "")]  # it would carry the key to another server
    assert "refused (307)" in talk(server.url, "a")[1]


def test_the_commands_of_the_prompt(server: FakeServer) -> None:
    server.answers = [ANSWER, ANSWER]
    lines = ("/system be kind", "hi", "/system", "hi", "/what", "/help", KeyboardInterrupt, "/quit", "never")
    _, text = talk(server.url, *lines)
    assert server.requests[0][1]["messages"][0] == {"role": "system", "content": "be kind"}
    assert server.requests[1][1]["messages"][0]["role"] == "user"
    assert "there is no command /what" in text
    assert "/quit or Ctrl-D leaves" in text
    assert len(server.requests) == 2


@pytest.mark.parametrize("leave", ["/quit", "/exit", "/bye"])
def test_there_are_several_words_to_leave(server: FakeServer, leave: str) -> None:
    talk(server.url, leave, "never")
    assert server.requests == []


def test_a_question_is_asked_again_in_place_of_the_turn_it_was(server: FakeServer) -> None:
    server.models = [DEFAULT_NAME]
    server.answers = [ANSWER, [chunk("Other"), chunk(finish="stop"), "[DONE]"], (500, "<html>"), ANSWER]
    chat, text = talk(server.url, "/retry", "hi", "/retry", "/retry", model=DEFAULT_NAME)
    assert "no question to ask again" in text
    bodies = [body for _, body in server.requests]
    assert [[m["content"] for m in body["messages"]] for body in bodies] == [["hi"]] * 3
    assert [body["temperature"] for body in bodies] == [0, RETRY_TEMPERATURE, RETRY_TEMPERATURE]
    assert {body["repetition_penalty"] for body in bodies} == {TOY_PENALTY}
    assert chat.conversation.history == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Other"},
    ], "an answer is not lost to a retry that fails"
    assert chat.conversation.sampling == Sampling()


def test_another_model_goes_on_with_the_conversation_in_a_session_of_its_own(server: FakeServer) -> None:
    server.models, server.answers = ["fake-model", "big"], [ANSWER, ANSWER]
    _, text = talk(server.url, "hi", "/model", "/model small", "/model big", "on")
    assert "* fake-model\n  big" in text
    assert "small is not served here: fake-model, big" in text
    (first, second) = server.requests
    assert (first[1]["model"], second[1]["model"]) == ("fake-model", "big")
    assert [m["content"] for m in second[1]["messages"]] == ["hi", "Hello", "on"]
    assert first[0]["x-session-id"] != second[0]["x-session-id"]


def test_temperature_and_history(server: FakeServer) -> None:
    server.answers = [ANSWER, ANSWER]
    lines = ("/history", "/temperature 3", "/temperature x", "/temperature 0.5", "hi", "/temperature", "on")
    _, text = talk(server.url, *lines, "/history")
    assert "nothing was said yet" in text
    assert text.count("give a number from 0 to 2") == 2
    assert [body.get("temperature") for _, body in server.requests] == [0.5, None]
    assert "user: hi\nassistant: Hello\nuser: on\nassistant: Hello\n" in text


def test_a_conversation_is_saved_for_its_owner_only(server: FakeServer, tmp_path: Path) -> None:
    server.answers = [ANSWER]
    as_json, as_markdown = tmp_path / "talk.json", tmp_path / "new" / "talk.md"
    lines = (
        "/system be kind",
        "hi",
        "/save",
        f"/save {as_json}",
        f"/save {as_markdown}",
        f"/save {tmp_path}",
    )
    _, text = talk(server.url, *lines)
    assert "give a file" in text
    assert "cannot be written" in text
    saved = json.loads(as_json.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert as_markdown.read_text().endswith("## user\n\nhi\n\n## assistant\n\nHello\n")
    assert stat.S_IMODE(as_json.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("lines", "sent"),
    [
        (('"""one', "two", '"""'), "one\ntwo"),
        (('"""one"""',), "one"),
        (('"""', "def f():", "    return 1", 'f()"""'), "def f():\n    return 1\nf()"),
        (('"""one', "two"), "one\ntwo"),
    ],
    ids=["three lines", "one line", "indented", "the input ends"],
)
def test_a_message_may_have_several_lines(server: FakeServer, lines: tuple[str, ...], sent: str) -> None:
    server.answers = [ANSWER]
    talk(server.url, *lines)
    assert server.requests[0][1]["messages"][-1]["content"] == sent


def test_a_conversation_that_is_too_long_has_a_way_on(server: FakeServer) -> None:
    error = {"message": "The context is 8192 tokens.", "code": "context_length_exceeded"}
    server.answers = [(400, json.dumps({"error": error}))]
    assert "8192 tokens. Begin another conversation with /new" in talk(server.url, "a")[1]


def test_an_error_ends_with_one_full_stop(server: FakeServer) -> None:
    server.answers = [(404, json.dumps({"error": {"message": "This endpoint serves 'x'."}}))]
    assert "serves 'x'. The question is not kept." in talk(server.url, "a")[1]


def test_a_failed_turn_is_told_and_not_kept(server: FakeServer) -> None:
    server.answers = [
        (429, '{"error": {"message": "256 requests wait already"}}'),
        [chunk("Hel"), '{"error": {"message": "the replica died"}}', "[DONE]"],
        [chunk("Hel")],
        (500, "<html>"),
        ANSWER,
    ]
    chat, text = talk(server.url, "a", "b", "c", "d", "e")
    assert "refused (429): 256 requests wait already. It is busy" in text
    assert "the replica died. The question is not kept" in text
    assert "ended in the middle of the answer" in text
    assert "refused (500)" in text
    assert chat.failed_turns == 4
    assert [m["content"] for m in chat.conversation.history] == ["e", "Hello"]


def test_ctrl_c_stops_the_answer_and_not_the_program(server: FakeServer) -> None:
    server.answers = [ANSWER, ANSWER]
    out = StringIO()
    client = ChatClient(server.url)
    ticks = 0

    def clock() -> float:
        nonlocal ticks
        ticks += 1
        if ticks == 4:  # after the start, the empty first chunk and "Hel"
            raise KeyboardInterrupt
        return float(ticks)

    console = Console(file=out, width=200)
    chat = Chat(client, Conversation(model="m"), console, console, reader("hi", "on"), clock)
    chat.run()
    client.close()
    assert "Hel\nstopped\n" in out.getvalue()
    assert [m["content"] for m in chat.conversation.history] == ["hi", "Hel", "on", "Hello"]


def test_whoever_cannot_be_reached_is_named_with_the_way_out(server: FakeServer) -> None:
    server.models_status = 401
    with pytest.raises(ChatError, match="SAMOVAR_API_KEY"):
        ChatClient(server.url + "/v1/").first_model()
    with pytest.raises(ChatError, match="samovar serve"):
        ChatClient("http://127.0.0.1:1").first_model()
    with pytest.raises(ChatError, match="not a URL"):
        ChatClient("127.0.0.1:8000")
    with pytest.raises(ChatError, match="SAMOVAR_API_KEY"):
        ChatClient(server.url, "kée")


def test_a_pipe_can_chat(server: FakeServer) -> None:
    server.answers = [ANSWER, (503, '{"error": {"message": "loading"}}')]
    command = [sys.executable, "-m", "samovar", "chat", "--url", server.url]
    done = subprocess.run(
        command,
        input="hi\nmore\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SAMOVAR_API_KEY": "from-the-environment"},
        check=False,
    )
    assert done.stdout.startswith("Hello\n192 of 212 prompt tok")
    assert "still loading" in done.stderr
    assert done.returncode == 1
    assert server.requests[0][1]["model"] == "fake-model"
    assert server.requests[0][0]["authorization"] == "Bearer from-the-environment"


def test_what_is_no_text_is_asked_without_it(server: FakeServer) -> None:
    """A file in Latin-1: in a pipe, and as an argument."""
    server.answers = [ANSWER, ANSWER]
    env = {"SAMOVAR_URL": server.url, "SAMOVAR_API_KEY": ""}
    piped = CliRunner().invoke(app, ["chat"], input=b"gr\xfc\xdfe\n", env=env)
    given = CliRunner().invoke(app, ["chat", "gr\udcfc\udcdfe"], env=env)
    assert (piped.exit_code, given.exit_code) == (0, 0), (piped.exception, given.exception)
    asked = [body["messages"][0]["content"] for _, body in server.requests]
    assert asked == ["gr\ufffd\ufffde", "gr??e"]


def test_one_question_gives_its_answer_alone(server: FakeServer) -> None:
    server.answers = [ANSWER, (503, '{"error": {"message": "loading"}}')]
    command = [sys.executable, "-m", "samovar", "chat", "--max-tokens", "7", "hello there"]
    env = {**os.environ, "SAMOVAR_URL": server.url.removeprefix("http://")}
    first, second = (
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL
        )
        for _ in range(2)
    )
    assert (first.returncode, first.stdout, first.stderr) == (0, "Hello\n", "")
    assert server.requests[0][1]["messages"] == [{"role": "user", "content": "hello there"}]
    assert server.requests[0][1]["max_tokens"] == 7
    assert (second.returncode, second.stdout) == (1, "")
    assert "still loading" in second.stderr


def test_the_history_is_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = chat_module._history(Console(file=StringIO()))
    history.store_string("a private question")
    path = tmp_path / "samovar" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "a private question" in path.read_text()


def test_without_a_home_the_chat_goes_on_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "~nosuchuser/state")
    said = StringIO()
    history = chat_module._history(Console(file=said, width=200))
    assert isinstance(history, InMemoryHistory)
    assert "no history is kept in ~nosuchuser/state" in said.getvalue()
