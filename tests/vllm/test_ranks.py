"""Three ranks of tensor parallelism under a real vLLM: what comes back is there on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.configs.settings import ModelSettings
from samovar.replicas.model import ensure_model
from tests.vllm.servers import BLOCK_TOKENS, Answer, Tiers, Vllm, prompt

RANKS, TOKENS = 3, 400  # the model has three KV heads
HELD = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture
def ranks(bin_dir: Path, folder: Path) -> Iterator[Vllm]:
    place = folder / "ranks"
    place.mkdir()
    made = Vllm(bin_dir, place, ensure_model(ModelSettings()), folder / "run" / "tiers.sock", RANKS)
    try:
        made.start()
        made.until_ready()
        yield made
    finally:
        made.end()


def by_record(tiers: Tiers) -> list[Path]:
    """Records on disk, the largest last."""
    return sorted(tiers.kv.rglob("*.kv"), key=lambda path: path.stat().st_size)


def test_ranks_bring_back_what_each_has_stored(ranks: Vllm, tiers: Tiers) -> None:
    """From main memory, from disk in another life of the tiers; not where one rank has a damaged record."""

    def ask() -> Answer:
        ranks.forget()
        answer = ranks.ask(ids)
        tiers.until_settled()
        return answer

    def again() -> None:
        tiers.end()
        tiers.start()

    ids = prompt("ranks", TOKENS)
    tiers.start()
    cold = ranks.ask(ids)
    tiers.until_settled()
    assert cold.receipt["stored_blocks"] > 0
    assert (ask().by_tier, ask().text) == ({"cpu": HELD}, cold.text)
    again()
    loaded = ask()
    assert (loaded.by_tier, loaded.text) == ({"nvme": HELD}, cold.text)
    tiers.end()
    assert len(by_record(tiers)) >= RANKS
    data = bytearray(by_record(tiers)[-1].read_bytes())
    data[-len(data) // 4] ^= 1
    by_record(tiers)[-1].write_bytes(data)
    tiers.start()
    damaged = ask()
    came = sum(damaged.by_tier.values())
    assert came < HELD
    assert damaged.text == cold.text
    text = "\n".join(ranks.metrics())
    told = f'vllm:samovar_hit_tokens_total{{engine="0",model_name="m",tier="nvme"}} {float(HELD + came)}'
    assert told in text
