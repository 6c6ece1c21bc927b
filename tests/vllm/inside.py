"""Runs the connector by hand with the classes of the vLLM that is imported, without its engine.

    python -m tests.vllm.inside FOLDER

Prints "as it should be" at the end. `test_contract.py` starts it with each minor of vLLM that is there.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import prometheus_client
import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from samovar.cache_tiers.socket.process import TierProcess
from samovar.cache_tiers.vllm import worth
from samovar.configs.loader import load as load_settings

LAYERS, PAGES, TOKENS, RANKS = 3, 40, 16, 2
END_S = 60.0


def configured(folder: Path) -> Any:
    """What the connector reads of a `VllmConfig`."""
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    transfer = KVTransferConfig(
        kv_connector="SamovarConnector",
        kv_connector_module_path="samovar.cache_tiers.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"socket": str(folder / "run" / "tiers.sock"), "lookup_s_max": END_S},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(block_size=TOKENS, cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=RANKS, pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            model=str(folder / "model"),
            hf_config=SimpleNamespace(to_dict=lambda: {"layers": LAYERS}),
            dtype=torch.float32,
            quantization=None,
        ),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


class Request(SimpleNamespace):
    """Fields that `test_what_we_read_is_there` finds in vLLM's `Request`."""

    @staticmethod
    def of(name: str, ids: list[int], salt: str) -> Request:
        blocks = len(ids) // TOKENS
        hashes = [
            hashlib.sha256(f"{salt} {ids[: TOKENS * (at + 1)]}".encode()).digest() for at in range(blocks)
        ]
        return Request(
            request_id=name,
            prompt_token_ids=ids,
            all_token_ids=ids,
            num_tokens=len(ids),
            num_computed_tokens=len(ids),
            num_in_flight_tokens=0,
            block_hashes=hashes,
            prompt_embeds=None,
            prompt_embeds_per_block_hashes={},
            mm_features=[],
            lora_request=None,
            cache_salt=salt,
            session_id="s",
            kv_transfer_params=None,
            status=SimpleNamespace(name="FINISHED_STOPPED"),
        )


class Engine:
    """A scheduler's half and the halves of ranks, with vLLM's own aggregation of what these say."""

    def __init__(self, folder: Path) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

        config = configured(folder)
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        kv = SimpleNamespace(num_blocks=PAGES, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        made = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        self.scheduler = made(config, KVConnectorRole.SCHEDULER, kv)
        self.workers = [made(config, KVConnectorRole.WORKER, kv) for _ in range(RANKS)]
        self.tensors: list[dict[str, torch.Tensor]] = []
        told = {}
        for rank, worker in enumerate(self.workers):
            self.tensors.append({f"layer {at}": torch.zeros(PAGES, 2, TOKENS, 8) for at in range(LAYERS)})
            one = SimpleNamespace(rank_in_group=0), SimpleNamespace(rank_in_group=rank)
            with (
                mock.patch.object(parallel_state, "get_pp_group", lambda one=one: one[0]),
                mock.patch.object(parallel_state, "get_tp_group", lambda one=one: one[1]),
            ):
                worker.register_kv_caches(self.tensors[-1])
            told[0, rank] = worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata_pp_aware(told)
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler, RANKS)
        self.counted: dict[str, dict[str, int]] = {}
        self.events: list[Any] = []
        self.prom = KVConnectorProm(config, ["engine"], {0: ["0"]})

    def step(self) -> KVConnectorOutput:
        """Run a step without a forward pass, as the runner and the scheduler do."""
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        output = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={})
        metadata = self.scheduler.build_connector_meta(output)
        said: list[ModelRunnerOutput | None] = []
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            sent, received = worker.get_finished(set())
            out = KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_stats=worker.get_kv_connector_stats(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
            said.append(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=out))
        made = self.aggregator.aggregate(said)
        assert made is not None
        together = made.kv_connector_output
        assert together is not None
        self.scheduler.update_connector_output(together)
        stats = together.kv_connector_stats
        own = self.scheduler.get_kv_connector_stats()
        if own is not None and not own.is_empty():
            stats = stats.aggregate(own) if stats is not None else own
        if stats is not None:
            self.prom.observe(stats.to_dict() if hasattr(stats, "to_dict") else stats.data)
            again = type(self.scheduler).build_kv_connector_stats(stats.data)
            assert again is not None
            assert again.reduce()
        self.events += self.scheduler.take_events()
        return together

    def until(self, name: str, what: str) -> set[int]:
        """Step until a request's transfer is over on all ranks; return the pages that are bad."""
        ends_s, bad = time.monotonic() + END_S, set[int]()
        while True:
            out = self.step()
            bad |= out.invalid_block_ids
            if name in (getattr(out, what) or ()):
                return bad
            assert time.monotonic() < ends_s, f"{what} of {name}"
            time.sleep(0.002)

    def matched(self, request: Request) -> int:
        self.scheduler.on_new_request(request)
        ends_s = time.monotonic() + END_S
        while True:
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                assert is_async == bool(tokens)
                return int(tokens)
            assert time.monotonic() < ends_s
            time.sleep(0.002)


def main() -> None:
    folder = Path(sys.argv[1])
    words = {"tiers.nvme.dir": folder / "kv", "tiers.cpu.bytes-max": 1 << 26, "model.cache-dir": folder}
    words |= {"tiers.nvme.bytes-max": 1 << 26}
    settings = load_settings(None, {}, [f"--{name}={value}" for name, value in words.items()]).settings
    process = TierProcess(settings, folder / "run" / "tiers.sock")
    worth.LOOKUP_SHARE = 1e6  # however busy the machine is
    try:
        engine = Engine(folder)
        check(engine, process)
    finally:
        process.close()
    assert engine.matched(Request.of("dead", list(range(100)), "a")) == 0  # nobody is there: computed
    assert engine.scheduler.request_finished(Request.of("dead", list(range(100)), "a"), [1, 2])[0] is False
    print(f"vLLM {vllm.__version__}: as it should be")


def check(engine: Engine, process: TierProcess) -> None:
    """Store a request, load it elsewhere, and look at what was told of it."""
    ids = [at * 7 % 1000 for at in range(6 * TOKENS + 1)]
    first = Request.of("first", ids, "a")
    assert engine.matched(first) == 0
    pages = [5, 9, 7, 20, 21, 3, 30]
    for rank, tensors in enumerate(engine.tensors):
        for at, tensor in enumerate(tensors.values()):
            tensor[pages] = torch.rand(len(pages), 2, TOKENS, 8) + rank + 10 * at
    keeps, params = engine.scheduler.request_finished(first, pages)
    assert keeps
    assert params["samovar"]["stored_blocks"] == 6
    assert engine.scheduler.has_pending_push_work()
    assert not engine.until("first", "finished_sending")
    ends_s = time.monotonic() + END_S
    while engine.scheduler.has_pending_push_work():
        engine.step()
        assert time.monotonic() < ends_s
        time.sleep(0.002)
    while sum(tier.extents for tier in process.stats().tiers if tier.name == "cpu") < len(engine.tensors):
        assert time.monotonic() < ends_s  # what was taken is not there before it is copied
        time.sleep(0.002)

    second, others = Request.of("second", ids, "a"), [11, 12, 13, 14, 15, 16, 17]
    assert engine.matched(Request.of("salted", ids, "b")) == 0
    assert engine.matched(second) == 6 * TOKENS
    blocks = SimpleNamespace(get_block_ids=lambda: (others,))
    engine.scheduler.update_state_after_alloc(second, blocks, 6 * TOKENS)
    assert not engine.until("second", "finished_recving")
    for tensors in engine.tensors:
        for tensor in tensors.values():
            assert torch.equal(tensor[others[:6]], tensor[pages[:6]])
            assert not tensor[others[6]].any()
    _, params = engine.scheduler.request_finished(second, others)
    assert params["samovar"]["tokens_by_tier"] == {"cpu": 6 * TOKENS}
    engine.step()

    KVEventBatch(ts=0.0, events=engine.events)
    (stored,) = engine.events
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.block_size, stored.parent_block_hash) == ("CPU", TOKENS, None)
    assert (stored.token_ids, len(stored.block_hashes)) == (ids[: 6 * TOKENS], 6)
    assert stored.extra_keys is not None
    assert stored.extra_keys[0] == ("a",)  # as vLLM's own events have the salt
    assert engine.scheduler.reset_cache()
    (removed,) = engine.scheduler.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes
    assert engine.matched(Request.of("third", ids, "a")) == 0

    text = prometheus_client.generate_latest().decode()
    assert f'vllm:samovar_hit_tokens_total{{engine="0",tier="cpu"}} {6.0 * TOKENS}' in text, text
    assert f'vllm:samovar_loaded_blocks_total{{engine="0",tier="cpu"}} {6.0 * RANKS}' in text, text


if __name__ == "__main__":
    main()
