"""Putting the engine's side of the cache tiers together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cache_tiers.cost import PrefillMeter
from cache_tiers.extent import BlockShape
from cache_tiers.fast_clock import fast_clock
from cache_tiers.messages import TierPrice
from cache_tiers.outbox import Outbox
from configs.settings import Settings
from replicas.handover import Handover
from replicas.kv_pool import KvGeometry
from replicas.lanes import Arrivals, Lanes
from replicas.offload import Offload
from replicas.page_io import PageIo
from replicas.page_pool import PagePool
from replicas.preempt import DropNewest, NewestByPrice, PreemptionPolicy, SwapNewest
from replicas.swap_space import SwapSpace
from replicas.tier_link import TierLink
from replicas.turn_news import TurnNews
from replicas.turn_store import TurnStore


@dataclass(frozen=True, slots=True)
class TierAccess:
    """How this replica reaches its node's tiers. `outbox`: where records wait to be called for."""

    link: TierLink
    outbox: Outbox
    lanes: Lanes
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time


def block_shape(geometry: KvGeometry) -> BlockShape:
    """Bytes of a block as the records know them: a layer is K, then V, of all slots."""
    return BlockShape(geometry.layers, geometry.block_bytes // geometry.layers, geometry.block_tokens)


def build_offload(
    access: TierAccess,
    settings: Settings,
    geometry: KvGeometry,
    pool: PagePool,
    io: PageIo,
    meter: PrefillMeter,
) -> Offload:
    """The engine's side of the tiers, ready to be asked."""
    shape, tiers, arrivals = block_shape(geometry), settings.tiers, Arrivals()
    turns = TurnStore(
        link=access.link,
        outbox=access.outbox,
        io=io,
        pool=pool,
        shape=shape,
        settings=tiers,
        meter=meter,
        lanes=access.lanes,
        arrivals=arrivals,
        wall_clock=access.wall_clock,
    )
    return Offload(
        link=access.link,
        io=io,
        pool=pool,
        shape=shape,
        settings=tiers,
        meter=meter,
        swap=SwapSpace(tiers.swap_bytes_max, shape, io),
        turns=turns,
        handover=Handover(
            link=access.link,
            pool=pool,
            turns=turns,
            meter=meter,
            lane=access.lanes.lookup,
            arrivals=arrivals,
            horizon_s=tiers.policy.horizon_s_max,
        ),
        lanes=access.lanes,
        arrivals=arrivals,
        clock=access.clock,
        news=TurnNews(
            *(access.link, pool, access.lanes.returns, arrivals),
            block_tokens=shape.block_tokens,
            clock=fast_clock(access.clock, tiers.predictor.clock_rate),
            rate=tiers.predictor.clock_rate,
        ),
    )


def preemption_policy(
    settings: Settings, geometry: KvGeometry, meter: PrefillMeter, copy: Callable[[], TierPrice] | None
) -> PreemptionPolicy:
    """By `engine.preemption`. `copy` measures one direction; None: there is nowhere to swap to."""
    if settings.engine.preemption == "drop" or copy is None:
        return DropNewest()
    if settings.engine.preemption == "swap":
        return SwapNewest()
    return NewestByPrice(lambda: meter.price, copy(), geometry.block_bytes, geometry.block_tokens)
