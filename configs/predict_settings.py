"""Settings of the resumption predictor, of what stays in which tier, and of prefetching."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from configs.section import MIB, TIB, Section

PolicyName = Literal["lru", "t-lru", "ttl", "type-km", "learned"]


class PredictorSettings(Section):
    """Who comes back: learned online from the turns that a node serves."""

    sessions_max: int = Field(
        100_000, ge=1, le=10_000_000, description="sessions whose history is kept; the idlest go first"
    )
    replay_turns: int = Field(8000, ge=32, le=1_000_000, description="latest turns that are learned from")
    saved_turns: int = Field(
        8000,
        ge=0,
        le=40_000,
        description="of these, how many are saved with what was learned; 330 bytes each",
    )
    learning_turns_min: int = Field(
        1000,
        ge=1,
        le=1_000_000,
        description="after a restart that found fewer saved turns it learns again once so many are in",
    )
    batch_turns: int = Field(32, ge=1, le=4096, description="turns of one learning step, one step an arrival")
    learning_rate: float = Field(3e-3, gt=0, le=1, description="step size (Adam)")
    guard_outcomes: int = Field(
        2000, ge=50, le=1_000_000, description="latest outcomes that judge the model and its fallback"
    )
    queue_max: int = Field(
        4096, ge=1, le=1_000_000, description="turns that may wait to be learned from; more are not"
    )
    save_s: float = Field(60.0, gt=0, le=86400, description="how often what was learned is written down")
    file: Path | None = Field(None, description="where; empty = beside the nvme tier's files")
    clock_rate: float = Field(
        1.0, gt=0, le=10_000, description="seconds that count as one: above 1 to replay a recording faster"
    )


class PolicySettings(Section):
    """What stays in which tier."""

    name: PolicyName = Field(
        "learned",
        description="learned = by who is likely to come back; type-km = by kind of turn; lru = by last use; "
        "ttl, t-lru = lru, but first what is older, or deeper, than needed",
    )
    cost_weighting: bool = Field(
        False,
        description="value a token by what computing it would take (grows with its depth): for contexts "
        "beyond about 32k tokens",
    )
    rerank_s: float = Field(1.0, gt=0, le=600, description="idle sessions are ranked anew this often")
    horizon_s_min: float = Field(30.0, gt=0, le=86400, description="shortest horizon of P(comes back)")
    horizon_s_max: float = Field(3600.0, gt=0, le=86400, description="longest horizon of P(comes back)")
    ttl_s: float = Field(300.0, ge=0, le=86400, description="ttl: kept this long after a turn")
    ttl_tool_s: float = Field(120.0, ge=0, le=86400, description="ttl: ... after a tool call")
    slo_tokens: int = Field(
        4096, ge=0, le=10_000_000, description="t-lru: prompt tokens that may be computed in the TTFT wanted"
    )


class PrefetchSettings(Section):
    """Bringing blocks up before they are asked for. Demand always goes first."""

    at_queue: bool = Field(True, description="for requests that wait for a place")
    at_hint: bool = Field(True, description="when a client says that it will be back")
    at_pause: bool = Field(True, description="after a turn, while the upper tier has room")
    by_hazard: bool = Field(
        False,
        description="when the predictor says that it is time; 91 % was wasted on a recorded chat",
    )
    bytes_per_s_max: int = Field(256 * MIB, ge=0, le=TIB, description="budget of guesses; 0 = none")
    inflight_bytes_max: int = Field(256 * MIB, ge=0, le=TIB, description="guesses on their way at a time")
    burst_s: float = Field(2.0, gt=0, le=600, description="budget that may be saved up")
    probability_min: float = Field(0.3, ge=0, le=1, description="P(comes back soon) that is worth a guess")
    useful_share_min: float = Field(
        0.25, ge=0, le=1, description="guessing stops while fewer of its bytes are used"
    )
    useful_guesses: int = Field(50, ge=1, le=100_000, description="latest guesses by which that is measured")
    probe_share: float = Field(
        0.02, ge=0, le=1, description="share of guesses made all the same, so that it can start again"
    )
    holdout_share: float = Field(
        0.05, ge=0, le=0.5, description="sessions nothing is guessed for, to measure against"
    )
    pending_max: int = Field(
        10_000, ge=1, le=10_000_000, description="guesses remembered until they are judged"
    )
