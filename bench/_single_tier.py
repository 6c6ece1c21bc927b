"""Simulates one cache under a trace: how many prompt tokens each policy finds. Measured by `bench.policy`.

Time is the trace's: a request runs as long as the trace states or assumes, whatever it hits. Answers are not
cached as blocks. For prices, lower tiers and replicas see `sim.py`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast import Forecast, Hint, SessionKey
from samovar.cache_tiers.policy import IdleSessions, ResidencyPolicy
from samovar.cluster.plan.simulator.tier import SimTier
from samovar.cluster.plan.traces.replay import Growth, ended_s, events
from samovar.cluster.plan.traces.trace import TraceTurn
from samovar.configs.sections import PolicySettings, PredictorSettings, ProfileSettings, ProfilesSettings


@dataclass(frozen=True, slots=True)
class Hits:
    """Token counts over the turns that began at `count_from_s` or later.

    `main_...`: of conversations themselves, without what was sent beside them.
    """

    prompt_tokens: int
    hit_tokens: int
    main_prompt_tokens: int = 0
    main_hit_tokens: int = 0

    @property
    def rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)


class _Count:
    """Counts hits; of the conversations themselves as well."""

    def __init__(self, count_from_s: float) -> None:
        self._from_s = count_from_s
        self._all = self._main = (0, 0)  # tokens of prompts, and those found

    def add(self, turn: TraceTurn, blocks: int) -> None:
        """Count a turn that found `blocks` of its prompt."""
        if turn.started_s < self._from_s:
            return
        hit_tokens = min(blocks * turn.block_tokens, turn.input_tokens)
        self._all = self._all[0] + turn.input_tokens, self._all[1] + hit_tokens
        if turn.is_main:
            self._main = self._main[0] + turn.input_tokens, self._main[1] + hit_tokens

    def hits(self) -> Hits:
        return Hits(self._all[0], self._all[1], self._main[0], self._main[1])


def hits_with(
    turns: Sequence[TraceTurn],
    blocks_max: int,
    policy: ResidencyPolicy,
    settings: PolicySettings,
    *,
    curves: Sequence[Forecast] | None = None,
    next_s: Sequence[float] | None = None,
    count_from_s: float = 0.0,
    pins: bool = True,
    profiles: ProfilesSettings | None = None,
    hints: Sequence[Hint] = (),
) -> Hits:
    """Replay `turns`, ordered by start, through a cache of `blocks_max` blocks.

    `curves`: a predictor's forecast at the end of each turn. `next_s`: of each turn, for the oracle. `pins`:
    running requests keep their blocks. Without it turns take no time and pin nothing, which no engine can do
    and which makes small caches look better than they are. `profiles`: how long it keeps what, as a node's
    tiers do; None: a GPU's pool, where profiles do not count. `hints`: by their time, each sent while its
    session is idle.
    """
    sessions = IdleSessions(PredictorSettings().sessions_max)
    profile_of: dict[SessionKey, ProfileSettings] = {}
    placed = None if profiles is None else profile_of.__getitem__
    block_tokens = turns[0].block_tokens if turns else 1
    tier = SimTier(blocks_max, block_tokens, policy, settings, sessions, pins=pins, placed=placed)
    growth = Growth()
    found = _Count(count_from_s)
    waiting = deque(hints)
    for event in events(turns, takes_time=pins):
        turn, number = event.turn, event.number
        while waiting and waiting[0].at_s < event.at_s:
            hint = waiting.popleft()
            sessions.hint(hint.session, hint.event, hint.expected_return_s, hint.at_s)
            tier.changed(hint.session)
        if event.is_end:
            sessions.ended(
                turn.key,
                event.at_s,
                tokens=turn.input_tokens + turn.output_tokens,
                new_tokens=growth.after(turn.key, turn.input_tokens - turn.kept_tokens),
                is_tool=turn.stop == "tool_calls",
                next_s=next_s[number] if next_s is not None else math.inf,
            )
            tier.changed(turn.key)
            for changed in [] if curves is None else sessions.told(turn.key, curves[number], event.at_s):
                tier.changed(changed)
            continue
        if profiles is not None:
            profile_of[turn.key] = profiles.named(turn.profile)
        sessions.started(turn.key, event.at_s)
        hits = tier.use(turn.blocks, turn.key, event.at_s, ended_s(turn) if pins else event.at_s)
        found.add(turn, hits)
    tier.check_integrity()
    return found.hits()


def belady_hits(turns: Sequence[TraceTurn], blocks_max: int, *, count_from_s: float = 0.0) -> Hits:
    """Return the hits of the optimal block-level choice with knowledge of the future (Belady, 1966).

    It may bypass a block and pins nothing. A reference, not a policy for a server. Of blocks with the same
    next use the deeper one is evicted first.
    """
    upcoming = _next_uses(turns)
    resident: dict[int, tuple[int, int]] = {}
    furthest: list[tuple[int, int, int]] = []
    found = _Count(count_from_s)
    for turn, uses in zip(turns, upcoming, strict=True):
        hits = len(turn.blocks)
        for depth, number in enumerate(turn.blocks):
            if number not in resident:
                hits = depth
                break
        for depth, (number, use) in enumerate(zip(turn.blocks, uses.tolist(), strict=True)):
            is_full = number not in resident and len(resident) >= blocks_max
            if is_full and not _make_room(resident, furthest, (use, depth)):
                continue
            resident[number] = (use, depth)
            heapq.heappush(furthest, (-use, -depth, number))
        found.add(turn, hits)
    return found.hits()


NEVER = 1 << 60


def _make_room(
    resident: dict[int, tuple[int, int]], furthest: list[tuple[int, int, int]], beside: tuple[int, int]
) -> bool:
    """Evict the block with the latest next use, if that is later than `beside`; False if there is none."""
    while furthest:
        use, depth, number = furthest[0]
        if resident.get(number) != (-use, -depth):
            heapq.heappop(furthest)  # used since
            continue
        if (-use, -depth) <= beside:
            return False
        heapq.heappop(furthest)
        del resident[number]
        return True
    return False


def _next_uses(turns: Sequence[TraceTurn]) -> list[npt.NDArray[np.int64]]:
    """Return, for each block of each turn, the turn that uses it next."""
    following: dict[int, int] = {}
    found: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(turns)
    for at in range(len(turns) - 1, -1, -1):
        blocks = turns[at].blocks
        found[at] = np.array([following.get(number, NEVER) for number in blocks], dtype=np.int64)
        following.update(dict.fromkeys(blocks, at))
    return found
