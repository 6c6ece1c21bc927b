"""Plays a trace's turns to a running service, its clock sped up: prompts of token ids, nothing to understand.

A prompt keeps what the trace says of the session's last one and goes on with ids of its own, so that two
services get the very same prompts; an answer is never part of the next prompt, as in the simulator. Idle
times are the trace's, divided by the rate, from the end of the answer on. Knows no policies.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.traces.trace import TraceTurn

IDS = range(1000, 40_000)
ANSWER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Played:
    """One turn that was answered. `at_s`: since the start, of the real clock."""

    session: int
    number: int
    at_s: float
    ttft_s: float
    prompt_tokens: int
    tokens: dict[str, int]  # by where their KV came from
    text: str
    replica: str = ""  # who served it last


@dataclass(frozen=True, slots=True)
class Script:
    """A session: its start, and of each turn the prompt and the idle time after it, by the trace's clock."""

    session: int
    starts_s: float
    prompts: tuple[tuple[int, ...], ...]
    idle_s: tuple[float, ...]


def scripts(turns: Sequence[TraceTurn], *, scale: float, tokens_max: int, seed: int) -> list[Script]:
    """A trace's sessions, prompts `scale` times as long; one longer than `tokens_max` ends its session."""
    by_session: dict[int, list[TraceTurn]] = {}
    for turn in turns:
        by_session.setdefault(turn.session, []).append(turn)
    shared = random.Random(seed).choices(IDS, k=tokens_max)
    known: dict[int, tuple[int, ...]] = {}
    found = []
    for session, of in by_session.items():
        rng = random.Random(f"{seed}-{session}")
        prompts: list[tuple[int, ...]] = []
        idle_s: list[float] = []
        for at, turn in enumerate(of):
            size = max(16, int(turn.input_tokens * scale))
            if size > tokens_max:
                break
            kept = min(int(turn.kept_tokens * scale), size - 1)
            before = prompts[-1] if prompts else ()
            if not prompts and turn.blocks:  # what many sessions begin with
                first = known.setdefault(turn.blocks[0], tuple(shared[: int(turn.block_tokens * scale)]))
                before, kept = first, len(first)
            start = before[: min(kept, len(before), size - 1)]
            prompts.append((*start, *rng.choices(IDS, k=size - len(start))))
            ended_s = turn.turn().ended_s
            idle_s.append(max(0.0, of[at + 1].started_s - ended_s) if at + 1 < len(of) else 0.0)
        if prompts:
            found.append(Script(session, of[0].started_s, tuple(prompts), tuple(idle_s)))
    return found


@dataclass
class Player:
    """`rate`: seconds of the trace that pass in one."""

    url: str
    model: str
    rate: float
    timeout_s: float = 120.0
    played: list[Played] = field(default_factory=list)

    async def play(self, sessions: Sequence[Script], tick: Any) -> None:
        """Until every session has had its last answer. Raises what the client raises, and `RuntimeError`."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s, limits=limits) as client:
            self._began_s = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for script in sessions:
                    tasks.create_task(self._session(client, script, tick))

    async def _session(self, client: httpx.AsyncClient, script: Script, tick: Any) -> None:
        await asyncio.sleep(script.starts_s / self.rate)
        for number, prompt in enumerate(script.prompts):
            self.played.append(await self._turn(client, script.session, number, prompt))
            tick()
            await asyncio.sleep(script.idle_s[number] / self.rate)

    async def _turn(
        self, client: httpx.AsyncClient, session: int, number: int, prompt: Sequence[int]
    ) -> Played:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "min_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "session_id": f"player-{session}",
        }
        sent_s = time.monotonic()
        answer = await client.post("/v1/completions", json=body)
        took_s = time.monotonic() - sent_s
        if answer.is_error:
            raise RuntimeError(f"turn {number} of {session}: {answer.status_code}: {answer.text}")
        said = answer.json()
        receipt = said["receipt"]
        return Played(
            session,
            number,
            sent_s - self._began_s,
            took_s,
            said["usage"]["prompt_tokens"],
            receipt["tokens"],
            said["choices"][0]["text"],
            receipt["replica"][-1],
        )
