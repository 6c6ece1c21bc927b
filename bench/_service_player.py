"""Plays a trace's turns to a running service, its clock sped up: prompts of token ids, nothing to understand.

A prompt keeps what the trace says of the session's last one and goes on with ids of its own, so that two
services get the very same prompts; an answer is never part of the next prompt, as in the simulator. Idle
times are the trace's, divided by the rate, from the end of the answer on. What the trace sends beside a
conversation follows the answer that it followed there, under the same session id. Knows no policies.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from samovar.cluster.plan.traces.trace import TraceTurn

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
    lineage: int = 0
    is_main: bool = True


@dataclass(frozen=True, slots=True)
class Script:
    """A lineage of a session: its start, and of each turn the prompt and the idle time after it.

    Times are the trace's. `after`: it starts `starts_s` after the end of so many of the conversation's turns;
    0: after the beginning. `is_main`: of each turn.
    """

    session: int
    starts_s: float
    prompts: tuple[tuple[int, ...], ...]
    idle_s: tuple[float, ...]
    is_main: tuple[bool, ...]
    lineage: int = 0
    after: int = 0


def scripts(turns: Sequence[TraceTurn], *, scale: float, tokens_max: int, seed: int) -> list[Script]:
    """A trace's lineages, prompts `scale` times as long; one longer than `tokens_max` ends its lineage."""
    by_key: dict[int, list[TraceTurn]] = {}
    for turn in turns:
        by_key.setdefault(turn.key, []).append(turn)
    shared = random.Random(seed).choices(IDS, k=tokens_max)
    known: dict[int, tuple[int, ...]] = {}
    found = []
    lasts: dict[int, int] = {}  # turns of the conversations themselves
    for key, of in sorted(by_key.items()):
        rng = random.Random(f"{seed}-{key}")
        prompts: list[tuple[int, ...]] = []
        idle_s: list[float] = []
        for at, turn in enumerate(of):
            size = max(16, int(turn.input_tokens * scale))
            if size > tokens_max:
                break
            kept = min(int(turn.kept_tokens * scale), size - 1)
            before = prompts[-1] if prompts else ()
            if not prompts and turn.blocks:  # what many sessions begin with
                of_all = random.Random(f"{seed}-{turn.blocks[0]}").choices(IDS, k=tokens_max)
                first = tuple((of_all if turn.is_side else shared)[: int(turn.block_tokens * scale)])
                before = known.setdefault(turn.blocks[0], first)
                kept = len(before)
            start = before[: min(kept, len(before), size - 1)]
            prompts.append((*start, *rng.choices(IDS, k=size - len(start))))
            ended_s = turn.turn().ended_s
            idle_s.append(max(0.0, of[at + 1].started_s - ended_s) if at + 1 < len(of) else 0.0)
        lasts.setdefault(of[0].session, len(prompts))
        starts_s, after = of[0].started_s, 0
        if of[0].lineage:
            over_s = [turn.turn().ended_s for turn in by_key.get(of[0].session, ())]
            after = sum(at_s <= starts_s for at_s in over_s)
            starts_s -= over_s[after - 1] if after else 0.0
        # Beside a conversation that is cut short nothing is sent after its end.
        if prompts and after <= lasts[of[0].session] > 0:
            is_main = tuple(turn.is_main for turn in of[: len(prompts)])
            found.append(
                Script(of[0].session, starts_s, tuple(prompts), tuple(idle_s), is_main, of[0].lineage, after)
            )
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
            self._over = {
                script.session: [asyncio.Event() for _ in script.prompts]
                for script in sessions
                if not script.lineage
            }
            async with asyncio.TaskGroup() as tasks:
                for script in sessions:
                    tasks.create_task(self._session(client, script, tick))

    async def _session(self, client: httpx.AsyncClient, script: Script, tick: Any) -> None:
        if script.after:
            await self._over[script.session][script.after - 1].wait()
        await asyncio.sleep(script.starts_s / self.rate)
        for number, prompt in enumerate(script.prompts):
            self.played.append(await self._turn(client, script, number, prompt))
            if not script.lineage:
                self._over[script.session][number].set()
            tick()
            await asyncio.sleep(script.idle_s[number] / self.rate)

    async def _turn(
        self, client: httpx.AsyncClient, script: Script, number: int, prompt: Sequence[int]
    ) -> Played:
        session = script.session
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
            script.lineage,
            script.is_main[number],
        )
