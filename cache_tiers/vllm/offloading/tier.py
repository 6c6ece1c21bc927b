"""`SamovarTier`: Samovar's tiers as a secondary tier of vLLM's own offloading, behind its main memory.

vLLM moves blocks between GPU and main memory, for every kind of KV layer that it offloads (latent, hybrid),
and asks this what that no longer holds. A thin shell: what is done is in `chunks.py`.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "SamovarOffloadingConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samovar.cache_tiers.vllm.offloading.tier",
      "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [{
          "type": "SamovarTier", "module_path": "samovar.cache_tiers.vllm.offloading.tier",
          "socket": "/run/samovar/tiers.sock"}]}}'

A secondary tier is told a model's name and no more: not its weights, their revision or quantisation.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from samovar.cache_tiers.blocks import namespace_digest
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.vllm.connector import CLEAR_S_MAX, KNOWN_WEIGHTS, config_text, guarded
from samovar.cache_tiers.vllm.messages import ConnectorOptions
from samovar.cache_tiers.vllm.names.chain import check_media
from samovar.cache_tiers.vllm.names.identity import model_path, weights_digest
from samovar.cache_tiers.vllm.offloading.chunks import ChunkStore, HostChunk
from samovar.cache_tiers.vllm.refusals import check_cache_dtype, check_media_names, check_version

logger = logging.getLogger("vllm.samovar")

THREADS = 4
UNSAFE_HASHES = "xxhash"
TRIED = "0.32"
"""The minor whose offloading this was tried with."""
NOTHING = {"max_load_tokens": 0, "max_offload_tokens": 0}
"""What tells vLLM's offloading to leave a request alone."""


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own way to look up beside its scheduler's loop."""

    def __init__(self, tier_type: str, look: Callable[[Sequence[bytes], ReqContext], Iterable[bool]]) -> None:
        self._look = look
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: ReqContext) -> Iterable[bool]:
        return self._look(keys, req_context)


class SamovarTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. `namespace`: of the model as it runs, which `SamovarOffloadingConnector` fills in.

    Raises `ValueError` without it: nothing that a tier is told names a model's weights. `options`: see
    `ConnectorOptions`; requests cannot name tenants here.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        namespace: str = "",
        **options: Any,
    ) -> None:
        if not namespace:
            raise ValueError(
                "SamovarTier needs the name of the model's weights: use the kv_connector "
                "SamovarOffloadingConnector of samovar.cache_tiers.vllm.offloading.tier"
            )
        said = ConnectorOptions.of(options)
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        blocks = config.cache.blocks_per_chunk
        self._tokens = {group.group_id: group.tokens_per_block * blocks for group in config.groups}
        name = f"vllm offloading {os.getpid()}"
        self._link = SocketLink(said.socket, name)
        self._ask = SocketLink(said.socket, name, call_s=said.lookup_s_max)
        self._store = ChunkStore(
            self._link,
            self._ask,
            np.asarray(primary_kv_view).view(np.uint8),
            namespace_digest(bytes.fromhex(namespace), layout_text(config, self.block_size_bytes).encode()),
            said,
        )
        self._pool = ThreadPoolExecutor(THREADS, "samovar-tier")
        self._jobs: set[Future[None]] = set()
        self._over: deque[tuple[JobResult, list[bytes]]] = deque()  # and what a load did not bring
        self._lookups = _Lookups(tier_type, self._held)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return that new chunks are stored as they come."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Return whether a tier has a chunk; RETRY until it has said so."""
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        """Begin a store."""
        self._begin(self._store_job, job)

    def submit_load(self, job: TransferJob) -> None:
        """Begin a load."""
        self._begin(self._load_job, job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that are over. What a load did not bring is not claimed again for its request."""
        results = []
        while self._over:
            result, missed = self._over.popleft()
            self._lookups.mark_miss(missed)
            results.append(result)
        self._jobs = {job for job in self._jobs if not job.done()}
        return results

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request's lookups."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Begin the step's lookups."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until no job touches vLLM's main memory."""
        wait(self._jobs)

    def shutdown(self) -> None:
        """Wait for the jobs and close the connections."""
        self._lookups.shutdown()
        self._pool.shutdown()
        self._link.close()
        self._ask.close()
        del self._store  # vLLM cannot give its memory back while an array looks at it

    def clear(self, within_s: float) -> bool:
        """See `ChunkStore.clear`."""
        self.drain_jobs()
        return self._store.clear(within_s)

    def _begin(self, work: Callable[[TransferJob, float], None], job: TransferJob) -> None:
        try:
            self._jobs.add(self._pool.submit(work, job, time.monotonic()))
        except RuntimeError:  # it ends, or no thread can be started
            self._over.append((JobResult(job.job_id, False), list(job.keys)))

    def _store_job(self, job: TransferJob, began_s: float) -> None:
        is_stored = False
        try:
            chunks = self._chunks(job)
            is_stored = len(chunks) == len(job.keys) and self._store.store(chunks)
        except Exception:  # not stored; vLLM's loop has no guard
            logger.exception("samovar: a store failed")
        self._end(job, began_s, len(job.keys) if is_stored else 0, None)

    def _load_job(self, job: TransferJob, began_s: float) -> None:
        loaded: list[bytes] = []
        try:
            loaded = [chunk.key for chunk in self._store.load(self._chunks(job))]
        except Exception:  # computed
            logger.exception("samovar: a load failed")
        self._end(job, began_s, len(loaded), loaded)

    def _end(self, job: TransferJob, began_s: float, done: int, loaded: Collection[bytes] | None) -> None:
        is_whole = done == len(job.keys)
        some = tuple(loaded) if loaded and not is_whole else None
        result = JobResult(
            job.job_id, is_whole, some, time.monotonic() - began_s, done * self.block_size_bytes
        )
        missed = [] if loaded is None else [key for key in job.keys if key not in set(loaded)]
        self._over.append((result, missed))

    def _held(self, keys: Sequence[bytes], req_context: ReqContext) -> Iterable[bool]:
        chunks = [self._chunk(key, req_context) for key in keys]
        known = [chunk for chunk in chunks if chunk is not None]
        held = dict(zip(known, self._store.held(known), strict=True))
        return [chunk is not None and held[chunk] for chunk in chunks]

    def _chunks(self, job: TransferJob) -> dict[HostChunk, int]:
        places = [self._chunk(key, job.req_context) for key in job.keys]
        pairs = zip(places, job.chunk_ids, strict=True)
        return {chunk: int(slot) for chunk, slot in pairs if chunk is not None}

    def _chunk(self, key: bytes, req_context: ReqContext) -> HostChunk | None:
        """Return where a key stands in its request; None: at no whole chunk's end."""
        end, group = req_context.get_offload_key_position(key), get_offload_group_idx(key)
        tokens = self._tokens[group]
        if end is None or end <= 0 or end % tokens:
            return None
        return HostChunk(bytes(key), group, end // tokens - 1, tokens)


def layout_text(config: Any, chunk_bytes: int) -> str:
    """Return one text of how a chunk's bytes lie in vLLM's main memory."""
    parallel = config.parallel
    parts = (
        config.groups,
        config.cache,
        config.model.dtype,
        config.worker_kv_bytes_per_block,
        *(parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size),
        *(config.replicated_layout, config.canonical_layout, config.kv_cache_layout, chunk_bytes),
    )
    return repr(parts)


class SamovarOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
    """See the module. Raises `ValueError` at the start for what has no name, naming the fix."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm.__version__)
        if not vllm.__version__.startswith(f"{TRIED}."):
            raise ValueError(f"SamovarTier was tried with vLLM {TRIED}, not {vllm.__version__}: install that")
        check_names(vllm_config)
        check_media_names(vllm_config)
        if role == KVConnectorRole.SCHEDULER:  # the only one that has secondary tiers
            weights = weights_digest(model_path(vllm_config), KNOWN_WEIGHTS.expanduser())
            parts = ("vllm offloading", vllm.__version__, config_text(vllm_config))
            namespace = namespace_digest(weights, *(part.encode() for part in parts))
            name_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config, namespace)
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """Begin a request. One with an image that has no name is neither stored nor loaded."""
        try:
            check_media(request)
        except ValueError as error:
            logger.info("samovar: nothing is offloaded for a request: %s", error)
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), **NOTHING}
        super().on_new_request(request)

    def reset_cache(self) -> bool | None:
        """Reset vLLM's main memory, and clear what this connector's tenant has in the tiers."""
        is_reset = super().reset_cache()
        return is_reset if self._clear() else False

    @guarded(lambda: False)
    def _clear(self) -> bool:
        scheduler = self.connector_scheduler
        tiers = [] if scheduler is None else scheduler.manager.secondary_tiers
        cleared = [tier.clear(CLEAR_S_MAX) for tier in tiers if isinstance(tier, SamovarTier)]
        return all(cleared)


def check_names(vllm_config: Any) -> None:
    """Raise `ValueError` for what vLLM's keys do not name by content, with the fix."""
    if vllm_config.lora_config is not None:
        raise ValueError(
            "vLLM's keys have adapters' names and paths: use SamovarConnector, which names what is in them"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if UNSAFE_HASHES in algorithm:
        raise ValueError(
            f"--prefix-caching-hash-algo {algorithm}: its keys can be made to collide; use sha256"
        )
    check_cache_dtype(vllm_config.cache_config.cache_dtype)


def name_tiers(extra: dict[str, Any], namespace: bytes) -> None:
    """Write the model's name into the settings of each `SamovarTier`."""
    for tier in extra.get("secondary_tiers") or ():
        if tier.get("type") == SamovarTier.__name__:
            tier["namespace"] = namespace.hex()
