"""A service that plays its part: the live page's files, a scripted stream, and a chat without a model.

`python -m tests.page.fake_service [PORT]` serves it for work on the page: a conversation's blocks move on as
time passes. Its routes, headers and shapes are those of the real one (docs/api.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from samovar.configs.optional_sections import LiveSettings
from samovar.router.observe.diagnosis import Snapshot
from samovar.router.observe.live.feed import diff
from samovar.router.observe.live.hub import advice_of
from samovar.router.observe.live.routes import PageFiles
from tests.support.router.snapshots import HEALTHY

MODEL = "play-model"
BLOCK_TOKENS = 16
BLOCK_BYTES = 737_280
SOURCES = ("compute", "gpu", "cpu", "nvme", "s3", "peer")
ADMIN = "admin-key"
TENANTS = {"key-a": "a", "key-b": "b"}
HELLO = "It is **hot**."
POLL_S = 0.05
WORD_S = 0.02
HORIZONS_S = [8, 30, 60, 120, 300, 600, 1200, 3600, 14400, 86400]
SURVIVAL = [0.97, 0.9, 0.8, 0.66, 0.5, 0.41, 0.33, 0.2, 0.1, 0.08]
COMPUTE_MS = 1.6
LOAD_MS = {"gpu": 0.0, "cpu": 0.02, "nvme": 0.08, "s3": 0.2, "peer": 0.06, "none": COMPUTE_MS}


@dataclass
class Talk:
    """A conversation as the fake has it: how many of its blocks are in the pool, and where the others lie."""

    tenant: str
    name: str
    tokens: int = 0
    turns: int = 0
    used_unix_s: float = 0.0
    gpu: int = 0
    runs: list[tuple[str, int]] = field(default_factory=list)
    running: bool = False

    @property
    def blocks(self) -> int:
        return self.tokens // BLOCK_TOKENS

    def place(self, block: int) -> str:
        if block < self.gpu:
            return "gpu"
        end = 0
        for place, length in self.runs:
            end += length
            if block < end:
                return place
        return "none"

    def json(self, *, tells_tenant: bool) -> dict[str, Any]:
        blocks = dict.fromkeys(("cpu", "nvme", "s3", "peer"), 0)
        for place, length in self.runs:
            if place in blocks:
                blocks[place] += length
        blocks = {"gpu": self.gpu, **blocks}
        lineage = {
            "main": True,
            "tokens": self.tokens,
            "turns": self.turns,
            "state": "idle",
            "last_used_unix_s": self.used_unix_s,
            "created_unix_s": self.used_unix_s - 60,
            "home": "Replica#x7",
            "node": "f00dcafe",
            "running": self.running,
            "blocks": blocks,
            "bytes": {place: count * BLOCK_BYTES for place, count in blocks.items()},
            "runs": [list(run) for run in self.runs],
            "forecast": {"since_unix_s": self.used_unix_s, "survival": SURVIVAL},
        }
        owner = {"tenant": self.tenant} if tells_tenant else {}
        return {"last_used_unix_s": self.used_unix_s, **owner, "lineages": {"9c01d2e4": lineage}}


@dataclass
class World:
    """What the service knows. Tests change it from their thread; streams look at it every `POLL_S`."""

    has_keys: bool = False
    has_more: bool = False  # sessions than the stream tells
    replies: dict[str, str] = field(default_factory=dict)
    talks: dict[str, Talk] = field(default_factory=dict)
    turns: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    saved_s: float = 0.0
    live_opened: int = 0
    live_open: int = 0
    cut: int = 0
    """Streams end that opened before this count was raised."""
    deleted: list[str] = field(default_factory=list)
    hints: list[tuple[str, str]] = field(default_factory=list)
    """Session and event."""
    began_unix_s: float = field(default_factory=time.time)
    snapshot: Snapshot = HEALTHY
    """What is diagnosed."""

    def talk(self, tenant: str, session: str) -> Talk:
        known = f"{tenant}/{session}"
        if known not in self.talks:
            self.talks[known] = Talk(tenant, f"sess_{hashlib.sha256(known.encode()).hexdigest()[:32]}")
        return self.talks[known]

    def turn(self, talk: Talk, tokens: int, answer_tokens: int, request_id: str) -> dict[str, Any]:
        """Play a turn: what is stored is reused, all of it is in the pool afterwards."""
        counts = dict.fromkeys(SOURCES, 0)
        for block in range(min(talk.blocks, max(0, tokens - 1) // BLOCK_TOKENS)):
            place = talk.place(block)
            counts["compute" if place == "none" else place] += BLOCK_TOKENS
        counts["compute"] += tokens - sum(counts.values())
        ttft_ms = 20 + sum(count * LOAD_MS.get(source, COMPUTE_MS) for source, count in counts.items())
        recompute_ms = 20 + tokens * COMPUTE_MS
        talk.tokens, talk.turns, talk.used_unix_s = tokens + answer_tokens, talk.turns + 1, time.time()
        talk.gpu, talk.runs = talk.blocks, [("cpu", talk.blocks)] if talk.blocks else []
        mine = self.totals.setdefault(talk.tenant, dict.fromkeys(SOURCES, 0))
        for source, count in counts.items():
            mine[source] += count
        self.saved_s += max(0.0, recompute_ms - ttft_ms) / 1000
        turn = {
            "t": time.time(),
            "session": talk.name,
            "lineage": "9c01d2e4",
            "request_id": request_id,
            "prompt_tokens": tokens,
            "output_tokens": answer_tokens,
            "tokens": counts,
            "ttft_ms": ttft_ms,
            "recompute_ms": recompute_ms,
            "saved_ms": max(0.0, recompute_ms - ttft_ms),
            "e2e_ms": ttft_ms + 100,
            "decision": "load",
            "load_ms": 3.0,
            "replica": ["Replica#x7"],
            "finish": "stop",
            "missed": 0,
        }
        self.turns.append((talk.tenant, turn))
        return turn

    def state(self, tenant: str | None) -> dict[str, Any]:
        """The state that a caller sees; None: the administrator."""
        sees_all = tenant is None or not self.has_keys
        talks = [talk for talk in self.talks.values() if sees_all or talk.tenant == tenant]
        totals = [count for owner, count in self.totals.items() if sees_all or owner == tenant]
        tokens = {source: sum(count[source] for count in totals) for source in SOURCES}
        all_tokens = sum(tokens.values())
        rate = {"hit_rate": 1 - tokens["compute"] / all_tokens} if all_tokens else {}
        state = {
            "t": time.time(),
            "scope": "cluster" if sees_all else "tenant",
            **({} if tenant is None else {"tenant": tenant}),
            "model": {
                "name": MODEL,
                "context_tokens": 8192,
                "block_tokens": BLOCK_TOKENS,
                "bytes_per_token": 46080,
                "kv_dtype": "float32",
                "device": "cpu",
            },
            "totals": {
                "since_unix_s": self.began_unix_s,
                "requests": sum(talk.turns for talk in talks),
                "output_tokens": 480,
                "tokens": tokens,
                **rate,
                "saved_s": self.saved_s,
            },
            "sessions": {talk.name: talk.json(tells_tenant=sees_all) for talk in talks},
            "forecast_at_s": HORIZONS_S,
            **({"left_out": ["sessions"]} if self.has_more else {}),
        }
        return {**state, **self._cluster(talks)} if sees_all else state

    def _cluster(self, talks: list[Talk]) -> dict[str, Any]:
        used = {"cpu": 0, "nvme": 0}
        for talk in talks:
            for place, length in talk.runs:
                if place in used:
                    used[place] += length * BLOCK_BYTES
        in_pool = sum(talk.gpu for talk in talks)
        tier = {"state": "up", "tokens": 2200, "hit_blocks": 100}
        off = {"state": "off: no bucket", "used_bytes": 0, "limit_bytes": 0, "tokens": 0, "hit_blocks": 0}
        running = sum(talk.running for talk in talks)
        points = [[0.05, 0.07, 120], [0.25, 0.2, 80], [0.45, 0.5, 60], [0.7, 0.74, 50], [0.85, 0.8, 40]]
        regret = {"demand": -0.12, "pause": 0.01}
        return {
            "replicas": {
                "Replica#x7": {
                    "node": "f00dcafe",
                    "running": running,
                    "waiting": 0,
                    "loading": 0,
                    "pages": {"active": 30 * running, "cached": in_pool, "free": 256 - in_pool, "total": 512},
                    "prefill_tokens": 2100,
                    "generated_tokens": 480,
                    "preemptions": 0,
                    "evictions": 14,
                    "prefill_price": {"step_s": 0.04, "token_s": 0.0011, "pair_s": 4.5e-07},
                }
            },
            "nodes": {
                "f00dcafe": {
                    "draining": False,
                    "queue": 0,
                    "transport": "off",
                    "tiers": {
                        "cpu": {**tier, "used_bytes": used["cpu"], "limit_bytes": 2**29},
                        "nvme": {**tier, "used_bytes": used["nvme"], "limit_bytes": 2**33},
                        "s3": off,
                    },
                    "predictor": {
                        "state": "learned",
                        "sessions": 12,
                        "turns": 412,
                        "log_loss": 2.31,
                        "fallback_log_loss": 2.4,
                        "calibration": {"horizon_s": 600, "points": points},
                        "hints": {"closed:received": 9, "closed:true": 7, "closed:false": 1},
                    },
                    "lru": {
                        "lookups": 410,
                        "asked_tokens": 1_200_000,
                        "gained_tokens": 61_000,
                        "regretted_tokens": 9_000,
                    },
                    "prefetch": {
                        "started_bytes": 10**9,
                        "used_bytes": 7 * 10**8,
                        "late_bytes": 10**8,
                        "wasted_bytes": 2 * 10**8,
                        "moving_bytes": 0,
                        "regret": regret,
                    },
                }
            },
            "routing": {"home": 9, "moved": 0, "spilled": 1, "new": 2},
            **advice_of(self.snapshot, LiveSettings().advice_chars_max),
        }


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"


def _refused(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "code": None, "param": None}
    return JSONResponse({"error": error}, status)


class FakeService:
    """The routes of the page over a `World`."""

    def __init__(self, world: World) -> None:
        self.world = world
        page = PageFiles()
        self.app = Starlette(
            routes=[
                Route("/", page.index),
                Route("/page/{name:path}", page.one),
                Route("/v1/live", self.live),
                Route("/v1/usage", self.usage),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/sessions/{session}/hint", self.hint, methods=["POST"]),
                Route("/v1/sessions/{session}", self.delete, methods=["DELETE"]),
            ]
        )

    def caller(self, request: Request) -> tuple[bool, str | None]:
        """Whether the caller may come in, and as which tenant."""
        if not self.world.has_keys:
            return True, "local"
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        return key == ADMIN or key in TENANTS, TENANTS.get(key)

    async def live(self, request: Request) -> Response:
        known, tenant = self.caller(request)
        if not known:
            return _refused(401, "Incorrect API key provided.")
        return StreamingResponse(self._events(request, tenant), media_type="text/event-stream")

    async def _events(self, request: Request, tenant: str | None) -> AsyncIterator[str]:
        world = self.world
        world.live_opened += 1
        world.live_open += 1
        cut, told, last = world.cut, len(world.turns), world.state(tenant)
        try:
            yield _event("state", last)
            while cut == world.cut and not await request.is_disconnected():
                await asyncio.sleep(POLL_S)
                state = world.state(tenant)
                for owner, turn in world.turns[told:]:
                    if state["scope"] == "cluster" or owner == tenant:
                        yield _event("turn", turn)
                told = len(world.turns)
                patch = diff(last, state)
                if set(patch) != {"t"}:
                    yield _event("change", patch)
                    last = state
        finally:
            world.live_open -= 1

    async def usage(self, request: Request) -> Response:
        known, tenant = self.caller(request)
        if not known:
            return _refused(401, "Incorrect API key provided.")
        talks = [talk for talk in self.world.talks.values() if talk.tenant == tenant]
        held = {"gpu": sum(talk.gpu for talk in talks) * BLOCK_BYTES, "cpu": 0, "nvme": 0, "s3": 0}
        for talk in talks:
            for place, length in talk.runs:
                if place in held:
                    held[place] += length * BLOCK_BYTES
        return JSONResponse({"object": "usage", "tenant": tenant, "bytes_held": held})

    async def hint(self, request: Request) -> Response:
        known, _ = self.caller(request)
        if not known:
            return _refused(401, "Incorrect API key provided.")
        self.world.hints.append((request.path_params["session"], (await request.json())["event"]))
        return JSONResponse({"object": "session"})

    async def delete(self, request: Request) -> Response:
        _, tenant = self.caller(request)
        session = request.path_params["session"]
        self.world.deleted.append(session)
        self.world.talks.pop(f"{tenant}/{session}", None)
        return JSONResponse({"object": "cache.cleared"})

    async def chat(self, request: Request) -> Response:
        known, tenant = self.caller(request)
        if not known or tenant is None:
            return _refused(401 if not known else 403, "Incorrect API key provided.")
        body = await request.json()
        asked = body["messages"][-1]["content"]
        if asked == "fail":
            return _refused(400, "This prompt is too long.")
        tokens = 20 + sum(len(message["content"]) // 4 for message in body["messages"])
        words = self.world.replies.get(asked, HELLO).split(" ")
        talk = self.world.talk(tenant, request.headers["x-session-id"])
        answer = self._answer(request, talk, tokens, words)
        return StreamingResponse(answer, media_type="text/event-stream")

    async def _answer(
        self, request: Request, talk: Talk, tokens: int, words: list[str]
    ) -> AsyncIterator[str]:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}

        def chunk(delta: dict[str, str], finish: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return f"data: {json.dumps({**head, 'choices': [choice], **more})}\n\n"

        talk.running = True
        try:
            yield chunk({"role": "assistant", "content": ""})
            for number, word in enumerate(words):
                if await request.is_disconnected():
                    return
                yield chunk({"content": f" {word}" if number else word})
                await asyncio.sleep(WORD_S)
            turn = self.world.turn(talk, tokens, len(words), request.headers.get("x-request-id", ""))
            yield chunk({}, "stop", receipt={"tokens": turn["tokens"], "miss": None})
            yield "data: [DONE]\n\n"
        finally:
            talk.running = False


@contextlib.contextmanager
def serving(world: World, port: int) -> Iterator[str]:
    """Serve a world from a thread of its own; yield its URL."""
    config = uvicorn.Config(FakeService(world).app, "127.0.0.1", port, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the fake service did not start"
        assert time.monotonic() < deadline_s, "the fake service did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        world.cut += 1
        server.should_exit = True
        server.force_exit = True
        thread.join(20)


def populate(world: World, tenant: str = "local") -> None:
    """Let some conversations happen whose blocks lie in different places."""
    plays = [
        (640, 0, [("cpu", 42)]),
        (1500, 0, [("cpu", 30), ("nvme", 64)]),
        (900, 20, [("nvme", 58)]),
        (2400, 0, [("nvme", 90), ("none", 20), ("nvme", 30)]),
    ]
    for number, (tokens, gpu, runs) in enumerate(plays):
        talk = world.talk(tenant, f"guest-{number}")
        world.turn(talk, tokens, 30, f"r{number}")
        talk.gpu, talk.runs = gpu, runs
        world.turn(talk, talk.tokens + 40, 30, f"s{number}")
        talk.gpu, talk.runs = gpu, runs
        talk.used_unix_s -= 40 * 4**number


def step_down(talk: Talk) -> None:
    """Move a conversation's blocks one tier down: out of the pool, out of RAM, out of all."""
    if talk.gpu:
        talk.gpu = 0
    else:
        down = {"cpu": "nvme", "nvme": "none"}
        talk.runs = [(down.get(place, place), length) for place, length in talk.runs]


def main(port: int) -> None:
    world = World()
    populate(world)
    with serving(world, port) as url:
        print(url, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(8)
                for talk in list(world.talks.values()):
                    if talk.gpu:
                        step_down(talk)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8765)
