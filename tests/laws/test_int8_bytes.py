"""int8 KV is about half of bfloat16 wherever it lies and on its way: real records, headers and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.cache_tiers.blocks.extent import Placement
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.tier import Tier
from tests.laws.test_l14_peers import engine_of, prefill
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Tiered, nvme, receipt_of, tiered
from tests.support.engines.tiny_models import make_tiny_model
from tests.support.nodes.peer_harness import World
from tests.support.services.rclone import s3_server

SHARE_MAX = 0.53
PROMPT = prompt_of(400, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the default model's size, of which there are few."""
    folder = tmp_path_factory.mktemp("int8")
    return make_tiny_model(
        folder / "model", layers=4, hidden=192, q_heads=3, kv_heads=3, dtype=torch.bfloat16
    )


def held(engine: Tiered) -> dict[str, int]:
    """The bytes in each tier that a turn of `PROMPT` leaves there."""
    engine.placement = Placement(first="cpu", write_behind=("nvme", "s3"), lowest="s3")
    engine.run(PROMPT)
    return {row.name: row.bytes_held for row in engine.node.stats().tiers}


def test_int8_takes_half_of_ram_nvme_and_s3(model: Path, tmp_path: Path) -> None:
    taken = {}
    for kv_dtype in ("auto", "int8"):
        with s3_server(tmp_path / f"s3-{kv_dtype}") as settings:
            s3 = S3Tier(settings, wall_clock=lambda: 1_700_000_000.0)
            disk = nvme(tmp_path / kv_dtype)
            tiers: dict[TierName, Tier] = {"cpu": HeapTier(64 * MIB), "nvme": disk, "s3": s3}
            engine = tiered(model, tmp_path, tiers=tiers, dtype="bfloat16", kv_dtype=kv_dtype)
            taken[kv_dtype] = held(engine)
            s3.close()
    for tier in ("cpu", "nvme", "s3"):
        assert 0 < taken["int8"][tier] <= SHARE_MAX * taken["auto"][tier], (tier, taken)


def test_int8_is_half_of_what_another_node_sends(model: Path, tmp_path: Path) -> None:
    sent = {}
    for kv_dtype in ("auto", "int8"):
        world = World()
        a, b = (
            engine_of(world, name, model, tmp_path / kv_dtype, dtype="bfloat16", kv_dtype=kv_dtype)
            for name in "ab"
        )
        answer = a.run(PROMPT)
        returned = prefill(b, [*PROMPT, *answer.ids, 5, 6, 7])
        assert receipt_of(returned.answer).tokens["peer"] >= len(PROMPT)
        sent[kv_dtype] = sum(b.node.stats().peers["a"].nbytes.values())
    assert 0 < sent["int8"] <= SHARE_MAX * sent["auto"], sent
