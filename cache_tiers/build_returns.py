"""From settings to what knows who comes back (`node_returns.py`). Decides nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cache_tiers import predictor_file
from cache_tiers.idle_sessions import IdleSessions
from cache_tiers.kaplan_meier import TypeKm
from cache_tiers.node_books import NodeBooks
from cache_tiers.node_prefetch import NodePrefetch
from cache_tiers.node_reads import NodeReads
from cache_tiers.node_returns import NodeReturns
from cache_tiers.node_stores import NodeStores
from cache_tiers.predictor import Predictor
from cache_tiers.prefetch import Prefetcher
from cache_tiers.turn_learner import Forecasts, PredictorFile, TurnLearner
from configs.tier_settings import TierSettings


def build_returns(
    settings: TierSettings,
    books: NodeBooks,
    stores: NodeStores,
    reads: NodeReads,
    sessions: IdleSessions,
    *,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    file: Path | None,
    make: Callable[[], Forecasts] | None,
) -> NodeReturns:
    """`clock`: of sessions, see `fast_clock`; `wall_clock`: as quick as time is. Others: see `TierNode`."""
    predictor, policy = settings.predictor, settings.policy

    def make_predictor() -> Forecasts:
        return TypeKm(predictor) if policy.name == "type-km" else Predictor(predictor)

    prefetch = NodePrefetch(
        *(books, stores, sessions, Prefetcher(settings.prefetch)),
        clock=clock,
        is_demand_busy=lambda: reads.under_way > 0 or stores.has_stores,
        lead_s=policy.horizon_s_min,
        stays_s=policy.horizon_s_max,
    )
    learner = TurnLearner(
        make or make_predictor, queue_max=predictor.queue_max, clock=wall_clock, file=_kept_in(file, settings)
    )
    return NodeReturns(
        *(books, sessions, learner, prefetch),
        clock=clock,
        rate=predictor.clock_rate,
        sessions_max=predictor.sessions_max,
    )


def predictor_path(settings: TierSettings, owed_path: Path | None) -> Path | None:
    """Where the predictor is kept: where the settings say, else beside what else is kept; None: nowhere."""
    if settings.predictor.file is not None:
        return settings.predictor.file
    return None if owed_path is None else owed_path.with_name(predictor_file.FILE_NAME)


def _kept_in(path: Path | None, settings: TierSettings) -> PredictorFile | None:
    """Only what the network has learned is worth a file: counts by kind are soon made again."""
    if path is None or settings.policy.name == "type-km":
        return None

    def restore(predictor: Forecasts) -> str | None:
        return predictor_file.restore(path, predictor) if isinstance(predictor, Predictor) else None

    def save(predictor: Forecasts) -> None:
        if isinstance(predictor, Predictor):
            predictor_file.save(path, predictor)

    return PredictorFile(restore, save, settings.predictor.save_s)
