"""Engines for tests: the product's own parts put together over a small pool."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from samovar.cache_tiers.pricing.meters import UNKNOWN_PREFILL, PrefillPrice
from samovar.configs.cluster import ClusterSettings
from samovar.configs.optional_sections import TelemetrySettings
from samovar.configs.sections import TierSettings
from samovar.configs.settings import EngineSettings, LimitsSettings, ModelSettings, Settings
from samovar.replicas.answers import EngineLimits, refusal
from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import Admitted, Delta, Failed, GenerateRequest, Refused, SamplingParams
from samovar.replicas.offload.tier_client import TierAccess
from samovar.replicas.ranks import Launch, RankSubprocess
from samovar.replicas.scheduling import Scheduler
from samovar.replicas.start.build import BuiltEngine, Start
from tests.support.engines import exactness
from tests.support.engines.other_cpu import is_played


@cache
def _kept() -> TemporaryDirectory[str]:
    """What the first engine of a model here has measured: a probe of the real model takes seconds."""
    return TemporaryDirectory(prefix="samovar-kept-")


def small_engine(
    model_dir: Path,
    *,
    pool_tokens: int = 2048,
    dtype: str = "float32",
    weights: str = "auto",
    exact: bool | None = None,
    n_max: int = 4,
    tiers: TierAccess | None = None,
    tier_settings: TierSettings | None = None,
    prefill: PrefillPrice = UNKNOWN_PREFILL,
    launch: Launch = RankSubprocess,
    measures_anew: bool = False,
    telemetry: TelemetrySettings | None = None,
    **engine: object,
) -> BuiltEngine:
    """A real engine on CPU with a pool of `pool_tokens` slots. One thread: tests share the cores.

    `measures_anew`: does not use what earlier engines of this model have measured.
    """
    block_tokens = int(engine.get("block_tokens", 16))  # type: ignore[call-overload]
    defaults = {"threads": 1, "device": "cpu", "sequences_max": 8, "step_tokens_max": 64}
    if is_played():  # the step that is not exact there, and that all families have
        defaults["step"] = "transformers"
    settings = Settings(
        model=ModelSettings(path=model_dir, dtype=dtype, weights=weights),
        engine=EngineSettings(**{**defaults, **engine, "exact": exact}),
        limits=LimitsSettings(n_max=n_max),
        cluster=ClusterSettings(replicas=1),
        tiers=tier_settings or TierSettings(),
        telemetry=telemetry or TelemetrySettings(),
    )
    pages = 1 + pool_tokens // block_tokens
    keep = None if measures_anew else Path(_kept().name)
    built = Start(
        settings, model_dir, "test", pages=pages, tiers=tiers, prefill=prefill, keep=keep, launch=launch
    ).run()
    if exact is None and defaults["device"] == engine.get("device", "cpu"):
        exactness.note(model_dir.name, dtype, built.info.exactness)
    return built


@dataclass
class Answer:
    """What came of one request."""

    refused: Refused | None = None
    failed: Failed | None = None
    admitted: Admitted | None = None
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    finish: dict[int, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def ids(self) -> list[int]:
        return self.token_ids[0]


class Driver:
    """Submits requests to an engine and steps it by hand, checking its books at every step."""

    def __init__(self, engine: Engine, *, check: bool = True) -> None:
        self.engine = engine
        self.check = check
        self.answers: dict[int, Answer] = {}
        self._keys = itertools.count(1)

    def next_key(self) -> int:
        return next(self._keys)

    def submit(
        self, prompt: list[int], *, n: int = 1, salt: bytes = b"", max_tokens: int = 8, **params: object
    ) -> int:
        key = self.next_key()
        sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})  # type: ignore[arg-type]
        answer = self.answers[key] = Answer()
        answer.refused = self.engine.requests.add(key, GenerateRequest(f"r{key}", prompt, sampling, n, salt))
        return key

    def step(self) -> None:
        for key, event in self.engine.step():
            answer = self.answers[key]
            if isinstance(event, Admitted):
                answer.admitted = event
            elif isinstance(event, Refused):
                answer.refused = event
            elif isinstance(event, Failed):
                answer.failed = event
            elif isinstance(event, Delta):
                answer.deltas.append(event)
                answer.texts[event.index] = answer.texts.get(event.index, "") + event.text
                answer.token_ids.setdefault(event.index, []).extend(event.token_ids)
                if event.finish_reason:
                    answer.finish[event.index] = event.finish_reason
        if self.check:
            self.engine.check_integrity()

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def run(self, prompt: list[int], **params: object) -> Answer:
        key = self.submit(prompt, **params)  # type: ignore[arg-type]
        self.drain()
        return self.answers[key]


def prompt_of(length: int, seed: int = 0, vocab: int = 512, first: int = 3) -> list[int]:
    """`length` token ids without the special ones, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first, vocab, (length,), generator=generator).tolist()


def refusal_now(request: GenerateRequest, limits: EngineLimits, scheduler: Scheduler) -> Refused | None:
    """What `OpenRequests.add` would refuse a request with."""
    pool = scheduler.pool
    return refusal(
        request,
        limits,
        scheduler.waiting.of(request.tenant),
        scheduler.waiting,
        free_places=scheduler.queues.free_places,
        sequences_max=scheduler.queues.sequences_max,
        pool_tokens=pool.usable * pool.block_tokens,
    )
