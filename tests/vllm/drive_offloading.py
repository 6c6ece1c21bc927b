"""Runs in vLLM's environment: vLLM's own tiering over `SamovarTier`, with its main memory, without a GPU.

    python drive_offloading.py SOCKET RUN       RUN: store | load | clear

Says what came back as one line of JSON. What vLLM's worker would write into a chunk is a function of its key.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

CHUNKS, SLOTS, CHUNK_BYTES, TOKENS, WITHIN_S = 12, 16, 8192, 32, 60.0


def spec() -> Any:
    """Return what a tier is told, of two groups of layers: full attention and a sliding window."""
    config = OffloadingConfig(
        groups=(
            OffloadingGroupConfig(TOKENS, ("model.layers.0",), 0),
            OffloadingGroupConfig(TOKENS, ("model.layers.1",), 1),
        ),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig("m", "bfloat16"),
        cache=OffloadingCacheConfig(TOKENS, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
    return SimpleNamespace(config=config, tokens_per_block=(TOKENS, TOKENS), blocks_per_chunk=1)


def key_of(number: int, group: int) -> bytes:
    return make_offload_key(b"%032d" % number, group)


def payload(key: bytes) -> np.ndarray[Any, Any]:
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def request(name: str, keys: list[bytes]) -> ReqContext:
    context = ReqContext(name)
    for key in keys:
        context.set_offload_key_position(key, (1 + int(key[:32])) * TOKENS)
    return context


class Engine:
    def __init__(self, socket: str) -> None:
        told = spec()
        self.region = SharedOffloadRegion(told.config.engine_id, SLOTS, None, CHUNK_BYTES, CHUNK_BYTES)
        self.primary = CPUPrimaryTierOffloadingManager(SLOTS, self.region)
        tier = {
            "type": "SamovarTier",
            "module_path": "samovar.cache_tiers.vllm.offloading.tier",
            "socket": socket,
            "namespace": bytes(32).hex(),
            "lookup_s_max": 5.0,
        }
        view = self.primary.get_kv_memoryview()
        self.rows = np.asarray(view).view(np.uint8)
        self.tier = SecondaryTierFactory.create_secondary_tier(tier, view, told)
        self.manager = TieringOffloadingManager(self.primary, [self.tier])

    def step(self, *new: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new, ()))
        time.sleep(0.005)

    def until(self, holds: Any) -> None:
        ends_s = time.monotonic() + WITHIN_S
        while not holds():
            assert time.monotonic() < ends_s, "vLLM would wait on"
            self.step()

    def store(self, keys: list[bytes]) -> None:
        context = request("store", keys)
        self.manager.on_new_request(context)
        out = self.manager.prepare_store(keys, context)
        assert out is not None
        assert out.keys_to_store == keys
        for key, slot in zip(keys, out.store_spec.block_ids, strict=True):
            self.rows[slot] = payload(key)
        self.manager.complete_store(keys, context)
        self.until(lambda: not self.manager.has_pending_work())
        self.manager.on_request_finished(context)

    def load(self, keys: list[bytes]) -> tuple[int, int]:
        """Return how many leading keys come back, and of how many the bytes are right."""
        context = request("load", keys)
        self.manager.on_new_request(context)
        found = 0
        for key in keys:
            last = LookupResult.RETRY
            ends_s = time.monotonic() + WITHIN_S
            while last in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                assert time.monotonic() < ends_s, "vLLM would ask on"
                last = self.manager.lookup(key, context)
                self.step()
            if last is not LookupResult.HIT:
                break
            found += 1
        right = 0
        if found:
            loaded = self.manager.prepare_load(keys[:found], context)
            right = sum(
                np.array_equal(self.rows[slot], payload(key))
                for key, slot in zip(keys, loaded.block_ids, strict=False)
            )
            self.manager.complete_load(keys[:found], context)
        self.manager.on_request_finished(context)
        return found, right

    def end(self) -> None:
        del self.rows
        self.manager.shutdown()


def main() -> None:
    socket, run = sys.argv[1:]
    engine = Engine(socket)
    keys = [key_of(number, 0) for number in range(CHUNKS)]
    window = [key_of(number, 1) for number in range(CHUNKS - 3, CHUNKS)]
    said: dict[str, Any] = {}
    if run == "store":
        engine.store(keys)
        engine.store(window)
    elif run == "clear":
        said["cleared"] = engine.tier.clear(5.0)
    else:
        said["found"], said["right"] = engine.load(keys)
        said["window"], said["window_right"] = engine.load(window)
    engine.end()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
