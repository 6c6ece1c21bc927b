"""L14 with encryption: a turn whose blocks come back from encrypted media is the turn without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.encryption.tier import EncryptedTier
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.tier import Tier
from samovar.configs.sections import FaultSettings
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import Tiered, nvme, receipt_of, same, tiered
from tests.support.nodes.encrypted import OTHER_OUTER, key_file, outer_file
from tests.support.services.rclone import s3_server

NEW_TURN = 21
LENGTH = 41
pytestmark = pytest.mark.timeout(300)


def engine_over(model: Path, folder: Path, tier: Tier) -> Tiered:
    engine = tiered(model, folder, tiers={tier.name: tier})
    engine.placement = Placement(first=tier.name, write_behind=(), lowest="s3")
    return engine


def first_turn(engine: Tiered) -> list[int]:
    """Serve a turn; the prompt of the next one."""
    prompt = prompt_of(LENGTH, seed=LENGTH)
    answer = engine.run(prompt)
    engine.forget_pool()
    return [*prompt, *answer.ids, *prompt_of(NEW_TURN, seed=LENGTH + 1)]


def check_returns(
    model: Path, folder: Path, engine: Tiered, prompt: list[int], tier: TierName | None
) -> None:
    """The next turn is as if computed without a cache, and its blocks came from `tier` (None: computed)."""
    bare = tiered(model, folder / "none", tiers={}, prefix_reuse=False)
    returned = engine.prefill(prompt, logprobs=5)
    same(returned, bare.prefill(prompt, logprobs=5))
    tokens = receipt_of(returned[0]).tokens
    if tier is None:
        assert tokens["compute"] == len(prompt)
    else:  # once this turn was served, all of it
        assert tokens[tier] >= LENGTH + 8 - 1
        assert tokens["compute"] == len(prompt) - tokens[tier]


def test_l14_from_an_encrypted_disk_after_a_restart_too(tiny_llama: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path)
    tier = EncryptedTier(nvme(tmp_path / "kv"), keys)
    engine = engine_over(tiny_llama, tmp_path, tier)
    prompt = first_turn(engine)
    check_returns(tiny_llama, tmp_path, engine, prompt, "nvme")
    engine.node.close()
    again = engine_over(tiny_llama, tmp_path, EncryptedTier(nvme(tmp_path / "kv"), keys))
    check_returns(tiny_llama, tmp_path, again, prompt, "nvme")


def test_l14_from_an_encrypted_bucket(tiny_llama: Path, tmp_path: Path) -> None:
    with s3_server(tmp_path / "s3") as settings:
        tier = EncryptedTier(S3Tier(settings, wall_clock=lambda: 1_700_000_000.0), key_file(tmp_path))
        engine = engine_over(tiny_llama, tmp_path, tier)
        prompt = first_turn(engine)
        check_returns(tiny_llama, tmp_path, engine, prompt, "s3")
        engine.node.close()


@pytest.mark.parametrize("why", ["erased", "other-key", "flipped"])
def test_l14_what_cannot_be_opened_is_computed(tiny_llama: Path, tmp_path: Path, why: str) -> None:
    keys = key_file(tmp_path)
    faulty = FaultyTier(nvme(tmp_path / "kv"), FaultSettings())
    engine = engine_over(tiny_llama, tmp_path, EncryptedTier(faulty, keys))
    prompt = first_turn(engine)
    if why == "erased":
        keys.destroy([Clear(bytes(16))])
    elif why == "other-key":
        outer_file(tmp_path, OTHER_OUTER)
    else:
        faulty.update(FaultSettings(flip_rate=1.0, seed=1))
    check_returns(tiny_llama, tmp_path, engine, prompt, None)
    bad = {row.name: row.verify_failures for row in engine.node.stats().tiers}["nvme"]
    assert bool(bad) == (why == "flipped")
    faulty.update(FaultSettings())
    engine.forget_pool()
    check_returns(tiny_llama, tmp_path, engine, prompt, None)  # before, it looked as if it was stored
    engine.forget_pool()
    check_returns(tiny_llama, tmp_path, engine, prompt, "nvme")
