"""A reader of `/v1/live`: its events, the states they add up to, and the raw ASGI call of an open stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.router.router_harness import until

Json = dict[str, Any]


def patched(target: Any, patch: Any) -> Any:
    """`target` after a merge patch, as RFC 7386 has it."""
    if not isinstance(patch, dict):
        return patch
    made = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = patched(made.get(key), value)
    return made


def events_of(body: bytes) -> list[tuple[str, Json]]:
    """The events of a stream's bytes, comments left out."""
    events = []
    for block in body.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            assert name.startswith("event: ")
            assert data.startswith("data: ")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


class LiveReader:
    """An open stream; without `flow` it takes nothing more. `is_closed`: the app is done with it."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self.is_over = False
        self.is_closed = False
        self.largest = 0
        self.flow = asyncio.Event()
        self.flow.set()
        self.gone = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.flow.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            self.largest = max(self.largest, len(message["body"]))
            self.is_over = not message.get("more_body", False)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def state(self) -> Json:
        """The state after all events so far."""
        state: Json = {}
        for name, data in events_of(self.body):
            if name == "state":
                state = data
            elif name == "change":
                state = patched(state, data)
        return state

    @property
    def turns(self) -> list[Json]:
        return [data for name, data in events_of(self.body) if name == "turn"]

    def names(self) -> list[str]:
        return [name for name, _ in events_of(self.body)]


@asynccontextmanager
async def reading(app: Any, key: str | None = None, method: str = "GET") -> AsyncIterator[LiveReader]:
    """An open stream of `app`, until the block ends; it has been answered."""
    reader = LiveReader()
    headers = [(b"host", b"127.0.0.1")] + ([(b"authorization", f"Bearer {key}".encode())] if key else [])
    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "method": method,
        "path": "/v1/live",
        "raw_path": b"/v1/live",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
    }
    task = asyncio.create_task(app(scope, reader.receive, reader.send))
    task.add_done_callback(lambda _: setattr(reader, "is_closed", True))
    try:
        await until(lambda: reader.status is not None or task.done())
        yield reader
    finally:
        reader.gone.set()
        reader.flow.set()
        await asyncio.wait_for(task, 10)
