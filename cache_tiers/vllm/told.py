"""What the connector and vLLM tell each other, in vLLM's own types. A thin shell; needs vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core import kv_cache_utils

from samovar.cache_tiers.vllm.events import Removed, Stored
from samovar.cache_tiers.vllm.messages import Jobs, PageLayout, StoresTaken

OWNER = "samovar"

FAMILIES = {
    "hit_tokens": ("samovar_hit_tokens", "tier", "Prompt tokens that were loaded from Samovar's tiers"),
    "missed": ("samovar_missed", "reason", "Requests of which something was not loaded"),
    "failed_loads": ("samovar_failed_loads", "reason", "Fetches of the workers that failed"),
    "bad_records": ("samovar_bad_records", "kind", "Records that were not what they should be"),
    "loaded_blocks": ("samovar_loaded_blocks", "tier", "Blocks that were copied into pages, of each rank"),
    "stores": ("samovar_stores", "outcome", "Records that were offered to the tiers"),
}
"""What is counted -> name in `/metrics` behind `vllm:`, label, help."""


@dataclass
class SamovarMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's jobs, from the scheduler to the workers."""

    jobs: Jobs = field(default_factory=Jobs)


@dataclass
class SamovarHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker's pages are, for the scheduler's namespace. `machine`: on which it runs."""

    layout: PageLayout
    rank: int
    machine: str


@dataclass
class SamovarTaken(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Stores that are over, from the workers to the scheduler."""

    stores: StoresTaken = field(default_factory=dict)

    def aggregate(self, other: SamovarTaken) -> SamovarTaken:
        """Return what both workers say."""
        names = self.stores.keys() | other.stores.keys()
        return SamovarTaken(
            {name: {**self.stores.get(name, {}), **other.stores.get(name, {})} for name in names}
        )


@dataclass
class SamovarStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in a step: family -> label -> amount."""

    @staticmethod
    def of(counts: Mapping[tuple[str, str], int]) -> SamovarStats | None:
        """Return the counters; None: there are none."""
        data: dict[str, dict[str, int]] = {}
        for (family, label), amount in counts.items():
            data.setdefault(family, {})[label] = amount
        return SamovarStats(data) if data else None

    def reset(self) -> None:
        """Forget all."""
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> SamovarStats:
        """Add another's."""
        for family, labels in other.data.items():
            own = self.data.setdefault(family, {})
            for label, amount in labels.items():
                own[label] = own.get(label, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return them for a line of the log."""
        return {
            f"{family} {label}": amount
            for family, labels in self.data.items()
            for label, amount in labels.items()
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class SamovarMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters in vLLM's own `/metrics`."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._families = {
            family: metric_types[PromCounter](
                name=f"vllm:{name}", documentation=text, labelnames=[*labelnames, label]
            )
            for family, (name, label, text) in FAMILIES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what a step has counted."""
        values = self.per_engine_labelvalues[engine_idx]
        for family, labels in transfer_stats_data.items():
            for label, amount in labels.items() if family in self._families else ():
                self._families[family].labels(*values, label).inc(amount)


def event_of(event: Stored | Removed) -> BlockStored | BlockRemoved:
    """Return what routers read: as vLLM's own offloading tells its chunks, and with extra keys."""
    convert = kv_cache_utils.maybe_convert_block_hash
    if isinstance(event, Removed):
        return BlockRemoved(
            block_hashes=[convert(one) for one in event.hashes],
            medium=event.place.medium,
            group_idx=0,
            locality=event.place.locality,
            ownership=OWNER,
        )
    chain, first, end = event.chain, event.first, event.end
    request, tokens = chain.request, chain.block_tokens
    lora = request.lora_request
    session = {"session_id": request.session_id} if "session_id" in BlockStored.__struct_fields__ else {}
    return BlockStored(
        block_hashes=[convert(one) for one in chain.hashes[first:end]],
        parent_block_hash=convert(chain.hashes[first - 1]) if first else None,
        token_ids=list(chain.token_ids[first * tokens : end * tokens]),
        block_size=tokens,
        lora_id=lora.adapter_id if lora else None,
        lora_name=lora.name if lora else None,
        medium=event.place.medium,
        extra_keys=_extra_keys(request, first, end, tokens),
        group_idx=0,
        locality=event.place.locality,
        ownership=OWNER,
        **session,
    )


def _extra_keys(request: Any, first: int, end: int, tokens: int) -> list[Any] | None:
    """Return what besides tokens vLLM's hashes of the blocks are made of; None: nothing."""
    if not (request.mm_features or request.lora_request or request.cache_salt):
        return None
    found, image = [], 0
    for block in range(end):
        keys, image = kv_cache_utils.generate_block_hash_extra_keys(
            request, block * tokens, (block + 1) * tokens, image
        )
        found.append(keys)
    untag = getattr(kv_cache_utils, "to_event_extra_keys", list)  # keys have tags from 0.31 on
    told: list[Any] | None = untag(found[first:])
    return told
