"""`SamovarConnector`: Samovar's tiers under an unmodified `vllm serve`, by its `KVConnectorBase_V1`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SamovarConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "samovar.cache_tiers.vllm.connector", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"socket": "/run/samovar/tiers.sock"}}'

vLLM guards none of its calls on the scheduler's side: an exception ends its engine. So each call here answers
"nothing there" instead. A thin shell: decisions are in `scheduler.py`, copies in `worker.py`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from samovar.cache_tiers.blocks import CPU, NVME, PEER, SumsSetup, compile_sums
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.vllm.messages import ConnectorOptions, Jobs
from samovar.cache_tiers.vllm.names.chain import extra_digests
from samovar.cache_tiers.vllm.names.identity import Adapters, model_path, namespace_of, weights_digest
from samovar.cache_tiers.vllm.pages.tensors import open_pages
from samovar.cache_tiers.vllm.refusals import (
    COUNTED_MEDIA,
    check_config,
    check_ranks,
    check_version,
    counts_media,
)
from samovar.cache_tiers.vllm.replica_turn import ToReplica
from samovar.cache_tiers.vllm.scheduler import FETCHES_AT_ONCE, Hearers, SchedulerHalf, Threads
from samovar.cache_tiers.vllm.told import (
    SamovarHandshake,
    SamovarMetadata,
    SamovarMetrics,
    SamovarStats,
    SamovarTaken,
    event_of,
)
from samovar.cache_tiers.vllm.worker import WorkerHalf
from samovar.configs.loader import load

logger = logging.getLogger("vllm.samovar")

LOOKUP_THREADS, LOAD_THREADS = 4, 3
CLEAR_S_MAX = 5.0
KNOWN_WEIGHTS = Path("~/.cache/samovar/vllm-weights.json")

Result = TypeVar("Result")


def guarded(nothing: Callable[[], Result]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator: the method answers `nothing()` instead of raising."""

    def decorate(method: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Result:
            try:
                return method(*args, **kwargs)
            except Exception:
                logger.exception("samovar: %s failed; the tiers are not used here", method.__name__)
                return nothing()

        return call

    return decorate


def _no_tokens() -> tuple[int | None, bool]:
    return 0, False


def _no_sources() -> dict[Any, int]:
    return {}


def _no_events() -> Sequence[Any]:
    return ()


def _no_stats() -> SamovarStats | None:
    return None


def _not_kept() -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _not_cleared() -> bool | None:
    return False


class _SchedulerCalls:
    """What vLLM calls in the process of its scheduler."""

    _vllm_config: Any
    _options: ConnectorOptions
    _link: SocketLink
    _scheduler: SchedulerHalf | None
    _block_tokens: int
    _ranks: tuple[int, int]  # tensor parallel, pipeline parallel
    _weights: bytes
    _adapters: Adapters
    _counts_media: bool

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take in the layouts of the workers' pages: from now on there is a namespace.

        Raises `ValueError` at the start if a rank is not there or on another machine.
        """
        assert self._scheduler is not None
        layouts = check_ranks(metadata, *self._ranks, machine_id())
        self._scheduler.named(
            namespace_of(
                weights=self._weights,
                vllm=vllm.__version__,
                config=config_text(self._vllm_config),
                block_tokens=self._block_tokens,
                layouts=layouts,
            ),
            len(layouts),
        )
        if self._link.ping() is not None:  # if not, the link warns
            logger.info("samovar: uses the tiers at %s", self._options.socket)

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """Begin the request's lookup."""
        assert self._scheduler is not None
        self._scheduler.begin(request)

    @guarded(_no_tokens)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerHalf.matched`; loads are always asynchronous."""
        assert self._scheduler is not None
        tokens = self._scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerHalf.allocated`. Not guarded: vLLM would wait for a load that is not begun."""
        assert self._scheduler is not None
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(_no_sources)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return the loaded tokens by where they lay, in vLLM's words."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # not in older minors

        assert self._scheduler is not None
        words = {CPU.name: CacheHitSource.HOST, NVME.name: CacheHitSource.DISK, PEER: CacheHitSource.P2P}
        found: dict[Any, int] = {}
        for tier, tokens in self._scheduler.loaded_from(request).items():
            word = words.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[word] = found.get(word, 0) + tokens
        return found if sum(found.values()) == num_external_tokens else {}

    @guarded(SamovarMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> SamovarMetadata:
        """Return the step's jobs."""
        assert self._scheduler is not None
        new, context = step_size(scheduler_output)
        is_idle = not scheduler_output.num_scheduled_tokens
        return SamovarMetadata(self._scheduler.step(new, context, is_idle=is_idle))

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what a step has ended."""
        assert self._scheduler is not None
        out, said = connector_output, connector_output.kv_connector_worker_meta
        self._scheduler.stepped(
            out.finished_recving or (),
            out.finished_sending or (),
            out.invalid_block_ids or (),
            said.stores if isinstance(said, SamovarTaken) else {},
        )

    @guarded(_no_events)
    def take_events(self) -> Sequence[Any]:
        """Return what routers are to be told since the last call."""
        if self._scheduler is None or self._scheduler.announced is None:
            return ()
        return [event_of(one) for one in self._scheduler.announced.take()]

    @guarded(_not_kept)
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerHalf.ended`."""
        assert self._scheduler is not None
        status = getattr(request.status, "name", "")
        stop = "length" if "LENGTH" in status else "abort" if "ABORT" in status else "stop"
        return self._scheduler.ended(request, block_ids, stop)  # type: ignore[arg-type]

    def has_pending_block_frees(self) -> bool:
        """Whether stores will free pages soon: vLLM waits for them, instead of preempting."""
        return self._scheduler is not None and self._scheduler.is_saving

    def has_pending_push_work(self) -> bool:
        """Whether something is under way of which vLLM would hear only if it steps on."""
        return self._scheduler is not None and self._scheduler.is_waiting

    @guarded(_not_cleared)
    def reset_cache(self) -> bool | None:
        """Clear what this connector's tenant has in the tiers."""
        return None if self._scheduler is None else self._scheduler.clear(CLEAR_S_MAX)

    def _extra_of(self, request: Any) -> Callable[[int], Sequence[bytes]]:
        """Return what names the blocks of a request besides tokens. May take long; raises `ValueError`."""
        if self._counts_media and request.mm_features:
            # Their form does not tell: with options of the processor vLLM makes a digest of the number.
            raise ValueError(f"images are numbered: {COUNTED_MEDIA}")
        adapter = self._adapters.name(request.lora_request)
        keys_of = generate_block_hash_extra_keys
        return functools.partial(extra_digests, request, adapter, keys_of, self._block_tokens)


class _WorkerCalls:
    """What vLLM calls in the process of a rank."""

    _connector_metadata: Any
    _options: ConnectorOptions
    _link: SocketLink
    _worker: WorkerHalf | None
    _block_tokens: int
    _page_count: int
    _ranks: tuple[int, int]
    _tells: bool
    _mark: Callable[[], Callable[[], None]] | None = None
    _handshake: SamovarHandshake | None = None
    _bad: frozenset[int] = frozenset()  # pages whose load failed, until vLLM asks for them

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take vLLM's KV tensors. Raises `ValueError` at the start if they are not pages of like layers."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        # It may take minutes, once: until then numpy computes the same sums.
        threading.Thread(target=compile_checksums, name="samovar-sums", daemon=True).start()
        pages = open_pages(kv_caches, self._page_count)
        rank = get_pp_group().rank_in_group * self._ranks[0] + get_tp_group().rank_in_group
        self._handshake, self._mark = SamovarHandshake(pages.layout, rank, machine_id()), pages.mark
        self._worker = WorkerHalf(
            self._options,
            self._link,
            ThreadPoolExecutor(LOAD_THREADS, "samovar"),
            pages,
            block_tokens=self._block_tokens,
            rank=rank,
        )

    def get_handshake_metadata(self) -> SamovarHandshake | None:
        """Return the layout of the pages, for the scheduler."""
        return self._handshake

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads, and its stores: of turns that ended before it.

        Stores not in `wait_for_save`: 0.29 does not call that in a step without a forward pass.
        """
        jobs = self._jobs
        if self._worker is not None and (jobs.loads or jobs.stores):
            assert self._mark is not None
            self._worker.start(jobs.loads, jobs.stores, self._mark())

    @property
    def _jobs(self) -> Jobs:
        metadata = self._connector_metadata
        return metadata.jobs if isinstance(metadata, SamovarMetadata) else Jobs()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step reads what is still being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a turn's blocks are stored when it has ended."""

    def wait_for_save(self) -> None:
        """Nothing: pages of a store are kept until it is over."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose stores and whose loads are over."""
        if self._worker is None:
            return None, None
        sent, received, bad = self._worker.finished(may_wait=self._jobs.may_wait)
        self._bad |= bad
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return pages whose load failed: vLLM computes them."""
        bad, self._bad = self._bad, frozenset()
        return set(bad)

    def build_connector_worker_meta(self) -> SamovarTaken | None:
        """Return the stores that the tiers have taken, if there are routers to hear of it."""
        taken = {} if self._worker is None else self._worker.taken()
        return SamovarTaken(taken) if taken and self._tells else None


class SamovarConnector(_SchedulerCalls, _WorkerCalls, KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. Raises `ValueError` at the start for what has no namespace, naming the fix."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        self._options = ConnectorOptions.of(transfer.kv_connector_extra_config)
        check_config(vllm_config, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._page_count: int = kv_cache_config.num_blocks
        self._link = SocketLink(self._options.socket, f"vllm {role.name.lower()} {os.getpid()}")
        self._scheduler: SchedulerHalf | None = None
        path = self._options.replica if role == KVConnectorRole.SCHEDULER else None
        self._replica = None if path is None else ToReplica(path)
        self._worker: WorkerHalf | None = None
        events = vllm_config.kv_events_config
        self._tells = events is not None and events.enable_kv_cache_events
        if role == KVConnectorRole.SCHEDULER:
            known = KNOWN_WEIGHTS.expanduser()
            self._weights = weights_digest(model_path(vllm_config), known)
            self._adapters = Adapters(known)
            self._counts_media = counts_media(vllm_config)
            self._scheduler = SchedulerHalf(
                self._options,
                self._link,
                Threads(
                    ThreadPoolExecutor(LOOKUP_THREADS, "samovar-lookup"),
                    ThreadPoolExecutor(FETCHES_AT_ONCE, "samovar-fetch"),
                ),
                block_tokens=self._block_tokens,
                pages=self._page_count,
                extra_of=self._extra_of,
                hearers=Hearers(self._tells)
                if self._replica is None
                else Hearers(self._tells, self._replica.tell, self._replica.resend),
            )

    @guarded(_no_stats)
    def get_kv_connector_stats(self) -> SamovarStats | None:
        """Return what was counted since the last call: vLLM asks each half once at the end of a step."""
        if self._scheduler is not None:
            self._scheduler.worth.step_over()
            counts, self._scheduler.counts = self._scheduler.counts, Counter()
            return SamovarStats.of(counts)
        return None if self._worker is None else SamovarStats.of(self._worker.counted())

    def shutdown(self) -> None:
        """Close the connections."""
        self._link.close()
        if self._replica is not None:
            self._replica.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SamovarStats:
        """Return what a step has counted, as it came from another process."""
        return SamovarStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SamovarMetrics:
        """Return the counters of vLLM's `/metrics`."""
        return SamovarMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether pages may move (asked from 0.33 on): they may not, copies know where they lie."""
        return False


@guarded(lambda: None)
def compile_checksums() -> None:
    """Have this process compute checksums by the compiled library."""
    compile_sums(SumsSetup.of(load(None, os.environ, []).settings))


def machine_id() -> str:
    """Return what tells this machine, as it runs now, from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def step_size(output: Any) -> tuple[int, int]:
    """Return a step's new tokens of prompts, and the tokens that they stand behind on average."""
    new = context = 0
    for request in output.scheduled_new_reqs:
        tokens = output.num_scheduled_tokens.get(request.req_id, 0)
        new += tokens
        context += tokens * request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        tokens = output.num_scheduled_tokens.get(request_id, 0)
        if tokens > 1:
            new += tokens
            context += tokens * computed
    return new, context // new if new else 0


def config_text(vllm_config: Any) -> str:
    """Return one text of what, besides weights, makes a model's KV: its configuration as vLLM runs it."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    parts = {
        "hf": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "sliding_window": str(getattr(cache, "sliding_window", None)),
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
    }
    return json.dumps(parts, sort_keys=True, default=str)
