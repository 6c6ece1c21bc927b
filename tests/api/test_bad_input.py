"""F31, F32, F34 against the real service: bad input gets one clear 4xx in OpenAI's shape, never a 500."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.services.service import MODEL, Service

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def chat(**change: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 2, **change}).encode()


def raw(text: str) -> bytes:
    """A body written by hand, for what json.dumps would not write."""
    return f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "hi"}}], {text}}}'.encode()


BAD_BODIES = {
    "empty": b"",
    "not json": b"{nope",
    "not an object": b"[]",
    "not utf-8": b'{"model": "\xff\xfe"}',
    "nested 10000 deep": b"[" * 10_000 + b"]" * 10_000,
    "nested in a field": raw('"metadata": ' + '{"a":' * 5000 + "1" + "}" * 5000),
    "NaN temperature": raw('"temperature": NaN'),
    "infinite temperature": raw('"temperature": 1e999'),
    "n is 1e9": chat(n=10**9),
    "n is 0": chat(n=0),
    "n is text": chat(n="2"),
    "max_tokens is -2": chat(max_tokens=-2),
    "max_tokens is 1e12": chat(max_tokens=10**12),
    "max_tokens is 1e400": raw('"max_completion_tokens": 1e400'),
    "100000 stops": chat(stop=["x"] * 100_000),
    "a long stop": chat(stop="x" * 100_000),
    "a million messages": b'{"model":"m","messages":[' + b"{}," * 1_000_000 + b"{}]}",
    "no messages": chat(messages=[]),
    "messages is null": chat(messages=None),
    "unknown role": chat(messages=[{"role": "wizard", "content": "hi"}]),
    "content is a number": chat(messages=[{"role": "user", "content": 7}]),
    "lone surrogate": raw('"user": "\\ud800"'),
    "lone surrogate in text": (
        f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "\\ud800"}}]}}'
    ).encode(),
    "image": chat(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}],
            }
        ]
    ),
    "seed is text": chat(seed="x"),
    "top_logprobs without logprobs": chat(top_logprobs=3),
    "21 top_logprobs": chat(logprobs=True, top_logprobs=21),
    "long id": chat(session_id="x" * 1_000_000),
    "no model": json.dumps({"messages": HELLO}).encode(),
}


def assert_openai_error(answer: httpx.Response, *status: int) -> dict[str, object]:
    assert 400 <= answer.status_code < 500, answer.text[:300]
    if status:
        assert answer.status_code in status, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 2000, "an error must not echo the input"
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_f31_bad_bodies(service: Service, body: bytes) -> None:
    with service.http() as http:
        answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert_openai_error(answer)


def test_f31_100_mib_body_is_refused_and_not_kept(service: Service) -> None:
    def memory_bytes() -> int:
        root = psutil.Process(service.process.pid)
        return sum(child.memory_info().rss for child in root.children(recursive=True))

    def body():  # type: ignore[no-untyped-def]
        for _ in range(100):
            yield b" " * 2**20

    before = memory_bytes()
    with service.http() as http:
        declared = http.post(CHAT, content=b" " * 20 * 2**20)
        assert_openai_error(declared, 413)
        try:
            streamed = http.post(CHAT, content=body())
        except httpx.WriteError:
            pass  # the server answered and hung up while we were still sending: also a refusal
        else:
            assert_openai_error(streamed, 413)
    assert memory_bytes() - before < 50 * 2**20


@pytest.mark.parametrize("size", [20_000, 70_000, 1_000_000])
def test_f31_gigantic_header(service: Service, size: int) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-big: ")
        answer = b""
        # It may answer and hang up while we are still sending; what it said before that counts.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b"a" * size + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                answer += chunk
    assert answer.startswith(b"HTTP/1.1 431"), answer[:200]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]


def test_f31_garbage_instead_of_http(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"


def test_f31_unknown_routes_and_methods(service: Service) -> None:
    with service.http() as http:
        assert_openai_error(http.get("/v1/nothing"), 404)
        assert_openai_error(http.get(CHAT), 405)
        assert_openai_error(http.get("/-/routes"), 404)
        assert_openai_error(http.get("/docs"), 404)
        assert_openai_error(http.get("/v1/models/none"), 404)


def test_f34_ids_are_names_not_paths(service: Service, tmp_path: Path) -> None:
    with service.http() as http:
        for value in ("../../etc/passwd", "a/b\\c", "%00", "~root"):
            answer = http.post(CHAT, content=chat(session_id=value), headers={"x-user-id": value})
            assert answer.status_code == 200, answer.text
        assert_openai_error(http.post(CHAT, content=chat(session_id="a\x00b")), 400)
        assert_openai_error(http.post(CHAT, content=chat(), headers={"x-session-id": "x" * 2000}), 400)


def test_f32_tokeniser_bombs_do_not_stall_others(service: Service) -> None:
    """A MiB of one character, or of joined emoji, is refused or served; `/health` answers meanwhile."""
    bombs = ["a" * 2**20, "\u200d".join("👩" for _ in range(60_000)), " " * 2**20]
    with service.http() as http:
        for bomb in bombs:
            body = chat(messages=[{"role": "user", "content": bomb}])
            assert_openai_error(http.post(CHAT, content=body), 400)
            assert http.get("/health").status_code == 200
