"""Records to measure with: a replica that starts loads them as it will load conversations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cache_tiers.blocks import TAG_BYTES, Address, BadRecord, ExtentHeader, TierError, record_bytes
from cache_tiers.media import random_record
from cache_tiers.messages import SampleRequest
from cache_tiers.node.state import NodeState
from cache_tiers.node.transfer import TransferRunner

logger = logging.getLogger(__name__)

TENANT = b"\xff" * TAG_BYTES
"""Of samples: no tenant has this tag."""
SAMPLE_S_MAX = 60.0
"""What a replica that died in the middle of measuring has left expires then."""


class NodeSamples:
    """Puts samples into a tier as stores are put there, and takes them away."""

    def __init__(self, state: NodeState, runner: TransferRunner) -> None:
        self._state = state
        self._runner = runner

    def put(self, ask: SampleRequest) -> tuple[ExtentHeader, ...]:
        """Return the headers of `ask.count` records that are in the tier now; none if there is no room.

        Nothing is evicted for them. What the system keeps of a file in memory is dropped: a load after a
        restart comes from the disk.
        """
        guard = self._state.guards.get(ask.tier)
        nbytes = record_bytes(ask.blocks, ask.shape)
        if guard is None or not guard.is_writable:
            return ()
        with self._state.lock:
            used = self._state.directory.usage(ask.tier).bytes_accounted
        if used + ask.count * nbytes > guard.bytes_max:
            return ()
        headers = []
        try:
            for _ in range(ask.count):
                header, record = random_record(ask.shape, ask.blocks, tenant=TENANT, ttl_s=SAMPLE_S_MAX)
                with self._state.lock:
                    clear_seq = self._state.directory.clears.seq
                transfer = self._runner.reserve(header, nbytes, "replica", ask.tier, clear_seq=clear_seq)
                if isinstance(transfer, str):
                    logger.info("nothing to measure the %s tier with: %s", ask.tier, transfer)
                    break
                headers.append(header)
                self._runner.run(transfer, lambda made=(record, header): made)  # type: ignore[misc]
                guard.tier.drop_cache(header.address)
        except (TierError, BadRecord) as error:
            logger.info("nothing to measure the %s tier with: %s", ask.tier, error)
        if len(headers) == ask.count:
            return tuple(headers)
        self.drop(headers)
        return ()

    def drop(self, headers: Sequence[ExtentHeader]) -> None:
        """Delete samples from every tier that has them by now."""
        for header in headers:
            address: Address = header.address
            with self._state.lock:
                copies = self._state.directory.copies(address)
                lost = [self._state.directory.lose(address, tier) for tier in copies]
            self._state.drop([eviction for eviction in lost if eviction is not None])
