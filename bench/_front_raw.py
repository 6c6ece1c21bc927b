"""A bare streaming app under uvicorn: the least that a stream costs in Python. `_front_raw PORT STEP_MS`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import uvicorn


class App:
    """Sends every stream a chunk of our shape every `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._open: set[asyncio.Queue[bytes]] = set()
        self._ticking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._open.add(queue)
        headers = [(b"content-type", b"text/event-stream")]
        asked_s = time.monotonic()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await queue.get()
            stamps = f"{asked_s:.6f} {time.monotonic():.6f} "
            await send({"type": "http.response.body", "body": _chunk(stamps), "more_body": True})
            while True:
                await send({"type": "http.response.body", "body": await queue.get(), "more_body": True})
        finally:
            self._open.discard(queue)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            body = _chunk(f"{time.monotonic():.6f} ")
            for queue in self._open:
                queue.put_nowait(body)


def _chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    chunk = {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "raw",
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def main() -> int:
    port, step_ms = sys.argv[1:]
    uvicorn.run(
        App(float(step_ms) / 1000),
        host="127.0.0.1",
        port=int(port),
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
