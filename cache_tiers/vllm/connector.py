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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from samovar.cache_tiers.blocks import CPU, NVME, PEER, SumsSetup, compile_sums
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.vllm.chain import extra_digest
from samovar.cache_tiers.vllm.identity import namespace_of, weights_digest
from samovar.cache_tiers.vllm.messages import ConnectorOptions, Jobs, PageLayout
from samovar.cache_tiers.vllm.pages import open_pages
from samovar.cache_tiers.vllm.refusals import check_config, check_version
from samovar.cache_tiers.vllm.scheduler import FETCHES_AT_ONCE, SchedulerHalf, Threads
from samovar.cache_tiers.vllm.worker import WorkerHalf
from samovar.configs.loader import load

logger = logging.getLogger("vllm.samovar")

LOOKUP_THREADS, LOAD_THREADS = 4, 3
CLEAR_S_MAX = 5.0
KNOWN_WEIGHTS = Path("~/.cache/samovar/vllm-weights.json")

Result = TypeVar("Result")


@dataclass
class SamovarMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's jobs, from the scheduler to the workers."""

    jobs: Jobs = field(default_factory=Jobs)


@dataclass
class SamovarHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker's pages are, for the scheduler's namespace."""

    layout: PageLayout


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


def _not_kept() -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _not_cleared() -> bool | None:
    return False


class SamovarConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. Raises `ValueError` at the start for what has no namespace, naming the fix."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        transfer = vllm_config.kv_transfer_config
        self._options = ConnectorOptions.of(transfer.kv_connector_extra_config)
        check_config(vllm_config, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._page_count: int = kv_cache_config.num_blocks
        self._link = SocketLink(self._options.socket, f"vllm {role.name.lower()} {os.getpid()}")
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._mark: Callable[[], Callable[[], None]] | None = None
        self._layout: PageLayout | None = None
        self._bad: set[int] = set()  # pages whose load failed, until vLLM asks for them
        if role == KVConnectorRole.SCHEDULER:
            self._weights = weights_digest(model_path(vllm_config), KNOWN_WEIGHTS.expanduser())
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
            )

    # ---- the scheduler's half

    @guarded(lambda: None)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Take in the layout of the worker's pages: from now on there is a namespace."""
        assert self._scheduler is not None
        (handshake,) = metadata.values()
        self._scheduler.namespace = namespace_of(
            weights=self._weights,
            vllm=vllm.__version__,
            config=config_text(self._vllm_config),
            block_tokens=self._block_tokens,
            layout=handshake.layout,
            rank=0,
            ranks=1,
        )

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
        return SamovarMetadata(self._scheduler.step(new, context))

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what a step has ended."""
        assert self._scheduler is not None
        out = connector_output
        self._scheduler.stepped(
            out.finished_recving or (), out.finished_sending or (), out.invalid_block_ids or ()
        )

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> None:
        """Take the time of a step: vLLM asks once at the end of each. There are no counters."""
        if self._scheduler is not None:
            self._scheduler.worth.step_over()

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

    has_pending_push_work = has_pending_block_frees  # and it steps on, or nothing would tell it

    @guarded(_not_cleared)
    def reset_cache(self) -> bool | None:
        """Clear what this connector's tenant has in the tiers."""
        return None if self._scheduler is None else self._scheduler.clear(CLEAR_S_MAX)

    def _extra_of(self, request: Any, tokens: int) -> Sequence[bytes]:
        return extra_of(request, tokens, self._block_tokens)

    # ---- the worker's half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take vLLM's KV tensors. Raises `ValueError` at the start if they are not pages of like layers."""
        # It may take minutes, once: until then numpy computes the same sums.
        threading.Thread(target=compile_checksums, name="samovar-sums", daemon=True).start()
        pages = open_pages(kv_caches, self._page_count)
        self._layout, self._mark = pages.layout, pages.mark
        self._worker = WorkerHalf(
            self._options,
            self._link,
            ThreadPoolExecutor(LOAD_THREADS, "samovar"),
            pages,
            block_tokens=self._block_tokens,
        )

    def get_handshake_metadata(self) -> SamovarHandshake | None:
        """Return the layout of the pages, for the scheduler."""
        return None if self._layout is None else SamovarHandshake(self._layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.start(self._jobs().loads, (), lambda: None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step reads what is still being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a turn's blocks are stored when it has ended."""

    def wait_for_save(self) -> None:
        """Begin the step's stores, of turns that ended before it."""
        stores = self._jobs().stores
        if self._worker is not None and stores:
            assert self._mark is not None
            self._worker.start((), stores, self._mark())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose stores and whose loads are over."""
        if self._worker is None:
            return None, None
        sent, received, bad = self._worker.finished()
        self._bad |= bad
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return pages whose load failed: vLLM computes them."""
        bad, self._bad = self._bad, set()
        return bad

    def shutdown(self) -> None:
        """Close the connections."""
        self._link.close()

    def _jobs(self) -> Jobs:
        metadata = self._connector_metadata
        return metadata.jobs if isinstance(metadata, SamovarMetadata) else Jobs()


@guarded(lambda: None)
def compile_checksums() -> None:
    """Have this process compute checksums by the compiled library."""
    compile_sums(SumsSetup.of(load(None, os.environ, []).settings))


def extra_of(request: Any, tokens: int, block_tokens: int) -> list[bytes]:
    """Return the extra digest of each block up to a token, shortened by trailing empty ones.

    By vLLM's own rule of what besides tokens a block depends on: images, adapter, salt. Raises `ValueError`
    for an adapter whose content is not named by a path.
    """
    lora = request.lora_request
    if not (request.mm_features or lora or request.cache_salt):
        return []
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    found, image, adapter = [], 0, () if lora is None else adapter_name(lora)
    for start in range(0, tokens // block_tokens * block_tokens, block_tokens):
        keys, image = generate_block_hash_extra_keys(request, start, start + block_tokens, image)
        all_keys = (*(keys or ()), *adapter)
        found.append(extra_digest(all_keys) if all_keys else b"")
    while found and not found[-1]:
        found.pop()
    return found


def adapter_name(lora: Any) -> tuple[object, ...]:
    """Return what names an adapter by its content: two may have one name. Raises `ValueError`."""
    path = Path(lora.lora_path)
    if not path.is_dir():
        raise ValueError(f"the adapter {lora.lora_name} is no local directory")
    return ("lora", weights_digest(path, KNOWN_WEIGHTS.expanduser()))


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


def model_path(vllm_config: Any) -> Path:
    """Return where the model's weights lie. Raises `ValueError` if they are not on this machine."""
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"the weights of {model.model} are not on this machine: {error}") from error


def config_text(vllm_config: Any) -> str:
    """Return one text of what, besides weights, makes a model's KV: its configuration as vLLM runs it."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = {
        "hf": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "sliding_window": str(getattr(cache, "sliding_window", None)),
    }
    return json.dumps(parts, sort_keys=True, default=str)
