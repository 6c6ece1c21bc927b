"""What a start holds when it is over: the weights once, and none of the pool's memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from samovar.cache_tiers.actors.staging import StagingBuffer
from samovar.cache_tiers.blocks.extent import ExtentHeader
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import SampleRequest
from samovar.configs.cluster import ClusterSettings
from samovar.configs.sections import MIB, CpuTierSettings, TierSettings
from samovar.configs.settings import EngineSettings, ModelSettings, Settings
from samovar.replicas.kv.kv_pool import KvPool
from samovar.replicas.native import NotNative
from samovar.replicas.offload.tier_client import TierAccess, WorkerPools
from samovar.replicas.start.build import Start
from tests.support.clock import Clock
from tests.support.engines.native_steps import library
from tests.support.engines.tier_engines import InlineExecutor, make_node

GIB = 1024 * MIB


def resident_bytes(pool: KvPool) -> int:
    """What the system holds of the pool's memory."""
    nbytes = pool.page_bytes.numel()
    seen = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    address = ctypes.c_void_p(pool.page_bytes.data_ptr())
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(nbytes), seen) == 0
    return mmap.PAGESIZE * sum(one & 1 for one in seen)


def tensors_held() -> dict[int, int]:
    """The bytes of each memory that a tensor of such numbers as weights lies in, by its address."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    # Of some layouts, as oneDNN's, which other tests may have left, storage cannot be seen.
    dense = [one for one in tensors if one.layout is torch.strided]
    there = [one for one in dense if one.device.type == "cpu" and one.is_floating_point()]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in there}


@dataclass
class Starts:
    """Starts of one model on one machine, whose RAM tier is of another size each time."""

    model_dir: Path
    keep: Path
    sampled: list[TierName] = field(default_factory=list)

    def start(self, ram_bytes: int, **engine: object) -> Start:
        tiers = TierSettings(cpu=CpuTierSettings(bytes_max=ram_bytes))
        settings = Settings(
            model=ModelSettings(path=self.model_dir, dtype="bfloat16"),
            engine=EngineSettings.model_validate(
                {"threads": 1, "step_tokens_max": 64, "exact": False, **engine}
            ),
            cluster=ClusterSettings(replicas=1),
            tiers=tiers,
        )
        clock = Clock()
        outbox = StagingBuffer(tiers.staged_bytes_max, keep_s=600.0, clock=clock)
        node = make_node({"cpu": HeapTier(256 * MIB)}, outbox, tiers, clock)
        sample: Callable[[SampleRequest], tuple[ExtentHeader, ...]] = node.sample

        def seen(ask: SampleRequest) -> tuple[ExtentHeader, ...]:
            self.sampled.append(ask.tier)
            return sample(ask)

        node.sample = seen  # type: ignore[method-assign]
        access = TierAccess(node, outbox, WorkerPools(*(InlineExecutor() for _ in range(7))), clock)
        return Start(settings, self.model_dir, "test", pages=2000, tiers=access, keep=self.keep)


@pytest.fixture
def starts(tiny_llama: Path, tmp_path: Path) -> Starts:
    return Starts(tiny_llama, tmp_path)


def test_what_loads_take_is_measured_once_whatever_memory_is_free(starts: Starts) -> None:
    """The RAM tier is sized by what is free at a start: no two starts found what the other had measured."""
    starts.start(10 * GIB).run()
    assert "cpu" in starts.sampled
    starts.sampled.clear()
    starts.start(11 * GIB).run()
    assert "cpu" not in starts.sampled, "the disk gave no samples, so that is tried again"
    starts.start(MIB).run()
    assert "cpu" in starts.sampled, "it holds no large samples: another road"


def test_none_of_the_pools_memory_is_taken_by_what_a_start_measures(starts: Starts) -> None:
    start = starts.start(10 * GIB)
    built = start.run()
    pool = built.engine.runner.pool
    assert starts.sampled
    assert resident_bytes(pool) == 0
    pool.page_bytes[1].fill_(1)
    assert 0 < resident_bytes(pool) < pool.page_bytes.numel()
    assert pool.page_bytes.sum() == pool.geometry.block_bytes, "the others are zeros"


@pytest.mark.parametrize("step", ["native", "lean"])
def test_the_weights_are_held_once(starts: Starts, step: str) -> None:
    """By a first start, which loads the model, and by a second, which reads its files."""
    if step == "native":
        try:
            library(torch.bfloat16)
        except NotNative as why:
            pytest.skip(str(why))
    weights, largest = 0, 0
    for file in starts.model_dir.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118 - no mapping
        weights, largest = weights + sum(sizes), max(largest, *sizes)
    for is_second in (False, True):
        before = tensors_held()
        start = starts.start(10 * GIB, step=step)
        start.run()
        assert (start.step.model is None) == is_second
        held = {at: nbytes for at, nbytes in tensors_held().items() if at not in before}
        held.pop(start.runner.pool.page_bytes.data_ptr())
        # The native step's copy is not torch's; it may still read the embedding.
        assert sum(held.values()) <= (largest if step == "native" else weights) + weights // 10, held
