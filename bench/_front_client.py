"""Many streams of one client process, in raw HTTP: it must cost little beside what it measures.

As a program: `python -m bench._front_client HOST PORT STREAMS SECONDS`; prints `begun`, `over` and its
figures as JSON. With `lone REQUESTS` in place of the last two: one request after the other. Of a server whose
tokens do not say when they were made it counts the chunks alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import cast

STAMP = re.compile(rb'"content":"((?:\d+\.\d{6} )+)"')
PLAIN = re.compile(rb'"content":"[^"]')
BEGIN_S_MAX = 120.0
ANSWER_TOKENS = 8000
REST_S = 0.05
"""Between lone requests: what an answer leaves to be done is over by then."""


@dataclass
class Stream:
    """One answer. `asked_s`: when it was sent; times of tokens: (made, arrived)."""

    asked_s: float = 0.0
    ttft_added_s: float | None = None
    tokens: list[tuple[float, float]] = field(default_factory=list)
    chunks: int = 0


class Reader(asyncio.Protocol):
    """Sends one request when connected, and notes what comes."""

    def __init__(self, request: bytes, clients: Clients) -> None:
        self.stream = Stream()
        self._request = request
        self._clients = clients
        self._head = b""
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.stream.asked_s = time.monotonic()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s, stream = time.monotonic(), self.stream
        if len(self._head) < 16:
            self._head += data[:16]
            if len(self._head) >= 12 and self._head[9:12] != b"200":
                self._clients.failed(f"status {self._head[9:12]!r}: {data[-200:]!r}")
        data = self._rest + data
        whole = data.rfind(b"\n") + 1
        self._rest = data[whole:]
        for found in STAMP.finditer(data, 0, whole):
            stamps = [float(word) for word in found[1].split()]
            stream.chunks += 1
            if stream.ttft_added_s is None:
                asked_s, made_s = stamps[:2]
                stream.ttft_added_s = (now_s - stream.asked_s) - (made_s - asked_s)
                del stamps[0]
                self._clients.began()
            stream.tokens += [(made_s, now_s) for made_s in stamps]
        if stream.ttft_added_s is None and (plain := len(PLAIN.findall(data, 0, whole))):
            if not stream.chunks:
                self._clients.began()
            stream.chunks += plain

    def connection_lost(self, error: Exception | None) -> None:
        if not self._clients.is_over:
            self._clients.failed(f"a stream ended: {error}")


class Clients:
    """All streams of one run."""

    def __init__(self, streams: int) -> None:
        self._missing = streams
        self.all_begun = asyncio.Event()
        self.errors: list[str] = []
        self.is_over = False

    def began(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self.all_begun.set()

    def failed(self, why: str) -> None:
        self.errors.append(why)
        self.began()


def asking(host: str, port: int, max_tokens: int = ANSWER_TOKENS) -> bytes:
    """Return a request for a streamed answer."""
    body = json.dumps(
        {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    return head + body


async def run_lone(host: str, port: int, requests: int) -> dict[str, object]:
    """Send requests for one token, one after the other; return the figures."""
    loop, added, errors = asyncio.get_running_loop(), list[float](), list[str]()
    print("begun", flush=True)
    for _ in range(requests):
        clients = Clients(1)
        _, reader = await loop.create_connection(
            partial(Reader, asking(host, port, max_tokens=1), clients), host, port
        )
        async with asyncio.timeout(BEGIN_S_MAX):
            await clients.all_begun.wait()
        clients.is_over = True
        await asyncio.sleep(REST_S)
        reader.transport.abort()
        errors += clients.errors
        if reader.stream.ttft_added_s is not None:
            added.append(reader.stream.ttft_added_s)
    print("over", flush=True)
    shares = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9}
    seen: dict[str, object] = {f"ttft_added_{name}_ms": _at(added, share) for name, share in shares.items()}
    return seen | {"errors": len(errors), "first_error": errors[:1]}


async def run(host: str, port: int, streams: int, seconds: float) -> dict[str, object]:
    """Open the streams, read them for `seconds` after all have begun, hang up; return the figures."""
    loop, clients, readers, request = asyncio.get_running_loop(), Clients(streams), [], asking(host, port)
    for number in range(streams):
        _, reader = await loop.create_connection(lambda: Reader(request, clients), host, port)
        readers.append(reader)
        if number % 16 == 15:
            await asyncio.sleep(0.05)  # arrivals are spread a little
    async with asyncio.timeout(BEGIN_S_MAX):
        await clients.all_begun.wait()
    print("begun", flush=True)
    began_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    cpu_s, ended_s = time.process_time() - cpu_s, time.monotonic()
    clients.is_over = True
    print("over", flush=True)
    for reader in readers:
        reader.transport.abort()
    return figures([reader.stream for reader in readers], began_s, ended_s) | {
        "client_cpu_s": cpu_s,
        "errors": len(clients.errors),
        "first_error": clients.errors[:1],
    }


def figures(streams: list[Stream], began_s: float, ended_s: float) -> dict[str, object]:
    """Return what the streams saw between two times. Times in ms."""
    added, delays, tokens, chunks = [], [], 0, 0
    for stream in streams:
        seen = [(made, came) for made, came in stream.tokens if began_s <= came <= ended_s]
        tokens += len(seen)
        chunks += stream.chunks
        delays += [came - made for made, came in seen]
        for (made, came), (next_made, next_came) in itertools.pairwise(seen):
            added.append((next_came - came) - (next_made - made))
    ttft = [stream.ttft_added_s for stream in streams if stream.ttft_added_s is not None]
    return {
        "tokens": tokens,
        "seconds": ended_s - began_s,
        "tokens_a_chunk": sum(len(stream.tokens) for stream in streams) / max(1, chunks),
        "ttft_added_ms": _at(ttft, 0.5),
        "ttft_added_p99_ms": _at(ttft, 0.99),
        "delay_p50_ms": _at(delays, 0.5),
        "delay_p99_ms": _at(delays, 0.99),
        "itl_p50_added_ms": _at(added, 0.5),
        "itl_p99_added_ms": _at(added, 0.99),
    }


def _at(values: list[float], share: float) -> float:
    """Return a percentile in ms; 0 without values."""
    values = sorted(values)
    return round(1000 * values[min(len(values) - 1, int(share * len(values)))], 2) if values else 0.0


def main() -> int:
    host, port, streams, amount = sys.argv[1:]
    if streams == "lone":
        work = run_lone(host, int(port), int(amount))
    else:
        work = run(host, int(port), int(streams), float(amount))
    print(json.dumps(asyncio.run(work)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
