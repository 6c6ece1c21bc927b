"""L14 through the tiers: a turn whose blocks come back is the turn without a cache, bit for bit.

Where the probe says that this CPU is not exact, within the bound (`tests/support/engines/exactness.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks.extent import Address, Bytes, Placement
from samovar.cache_tiers.blocks.record import Record
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.pricing.meters import PrefillPrice
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import MIB, Prefilled, Tiered, nvme, receipt_of, same, tiered
from tests.support.inside import records_in
from tests.support.nodes.damages import one_bit, wrong_blocks
from tests.support.nodes.old_records import as_version
from tests.support.services.rclone import s3_server
from tests.support.services.service import until

NEW_TURN = 21
DEAR = PrefillPrice(0.0, 1.0, 0.0)  # loading always pays
pytestmark = pytest.mark.timeout(300)


def placement_of(tier: TierName) -> Placement:
    return Placement(first=tier, write_behind=(), lowest="s3")


def truth(model: Path, folder: Path, prompt: list[int], **engine: object) -> Prefilled:
    """The turn computed without any cache."""
    bare = tiered(model, folder / "none", tiers={}, prefix_reuse=False, **engine)
    return bare.prefill(prompt, logprobs=5)


def first_turn(engine: Tiered, length: int, vocab: int = 512) -> list[int]:
    """Serve a turn; the prompt of the next one."""
    prompt = prompt_of(length, seed=length, vocab=vocab)
    answer = engine.run(prompt)
    engine.forget_pool()
    return [*prompt, *answer.ids, *prompt_of(NEW_TURN, seed=length + 1, vocab=vocab)]


def holds(engine: Tiered, tier: TierName) -> bool:
    return any(row.name == tier and row.extents > 0 for row in engine.node.stats().tiers)


@pytest.fixture
def s3(tmp_path: Path):
    with s3_server(tmp_path / "s3") as settings:
        tier = S3Tier(settings, wall_clock=lambda: 1_700_000_000.0)
        yield tier
        tier.close()


@pytest.mark.parametrize(
    ("length", "kv_dtype", "step"),
    [
        *((length, "auto", "auto") for length in (15, 16, 17, 41, 90)),
        *((17, "int8", "auto"), (90, "int8", "auto")),
        *((length, "auto", step) for length in (17, 90) for step in ("lean", "transformers")),
    ],
)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_l14_a_returning_turn_is_the_same_from_ram_and_disk(
    tiny_llama: Path, tmp_path: Path, tier: TierName, length: int, kv_dtype: str, step: str
) -> None:
    made: Tier = HeapTier(64 * MIB) if tier == "cpu" else nvme(tmp_path / "kv")
    engine = tiered(tiny_llama, tmp_path, tiers={tier: made}, kv_dtype=kv_dtype, step=step)
    engine.placement = placement_of(tier)
    prompt = first_turn(engine, length)
    returned = engine.prefill(prompt, logprobs=5)
    same(returned, truth(tiny_llama, tmp_path, prompt, kv_dtype=kv_dtype, step=step))
    # All but the last sampled token, whose slot was never written, and the new turn.
    receipt = receipt_of(returned[0])
    assert receipt.tokens[tier] == length + 8 - 1
    assert receipt.tokens["compute"] == NEW_TURN + 1
    assert receipt.decision == "load"
    assert returned[0].admitted is not None
    assert returned[0].admitted.cached_tokens == length + 7


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_l14_blocks_in_groups_of_heads_come_back_and_answer_as_one_group_does(
    tiny_llama: Path, tmp_path: Path, kv_dtype: str
) -> None:
    tiers: dict[TierName, Tier] = {"nvme": nvme(tmp_path / "kv")}
    engine = tiered(tiny_llama, tmp_path, tiers=tiers, kv_groups=2, kv_dtype=kv_dtype)
    engine.placement = placement_of("nvme")
    prompt = first_turn(engine, 41)
    returned = engine.prefill(prompt, logprobs=5)
    same(returned, truth(tiny_llama, tmp_path, prompt, kv_dtype=kv_dtype))
    assert receipt_of(returned[0]).tokens["nvme"] == 41 + 8 - 1


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_l14_a_returning_turn_is_the_same_from_s3(
    tiny_llama: Path, tmp_path: Path, s3: S3Tier, kv_dtype: str
) -> None:
    engine = tiered(tiny_llama, tmp_path, tiers={"s3": s3}, kv_dtype=kv_dtype)
    engine.placement = placement_of("s3")
    prompt = first_turn(engine, 70)
    returned = engine.prefill(prompt, logprobs=5)
    same(returned, truth(tiny_llama, tmp_path, prompt, kv_dtype=kv_dtype))
    assert receipt_of(returned[0]).tokens["s3"] == 77


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "step"),
    [
        ("bfloat16", "auto", "auto"),
        pytest.param("bfloat16", "auto", "lean", marks=pytest.mark.slow),
        pytest.param("float32", "auto", "auto", marks=pytest.mark.slow),
        pytest.param("bfloat16", "int8", "auto", marks=pytest.mark.slow),
    ],
)
def test_l14_the_real_model_through_every_tier_and_every_move(
    smollm2: Path, tmp_path: Path, s3: S3Tier, dtype: str, kv_dtype: str, step: str
) -> None:
    """cpu, then copied to nvme and s3, each alone after a restart, and promoted on the way back."""
    disk = nvme(tmp_path / "kv")
    tiers: dict[TierName, Tier] = {"cpu": HeapTier(256 * MIB), "nvme": disk, "s3": s3}
    kept = {"dtype": dtype, "kv_dtype": kv_dtype, "step": step}
    engine = tiered(smollm2, tmp_path, tiers=tiers, prefill=DEAR, **kept)
    engine.placement = Placement(first="cpu", write_behind=("nvme", "s3"), lowest="s3")
    prompt = first_turn(engine, 75, vocab=49152)
    expected = truth(smollm2, tmp_path, prompt, **kept)

    def returns(tiers: dict[TierName, Tier], source: TierName) -> None:
        again = tiered(smollm2, tmp_path, tiers=tiers, prefill=DEAR, **kept)
        again.placement = engine.placement
        until("the tier has been looked through", lambda: holds(again, source))
        for expected_source in (source, "cpu" if "cpu" in tiers else source):  # promoted by the first
            returned = again.prefill(prompt, logprobs=5)
            same(returned, expected)
            assert receipt_of(returned[0]).tokens[expected_source] >= 82
            again.forget_pool()

    returned = engine.prefill(prompt, logprobs=5)
    same(returned, expected)
    assert receipt_of(returned[0]).tokens["cpu"] == 82
    returns({"nvme": disk}, "nvme")
    returns({"cpu": HeapTier(256 * MIB), "nvme": disk}, "nvme")
    returns({"s3": s3}, "s3")
    returns({"cpu": HeapTier(256 * MIB), "s3": s3}, "s3")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tier", ["nvme", "s3"])
def test_l14_what_an_earlier_release_stored_is_adopted_and_served(
    tiny_llama: Path,
    tmp_path: Path,
    s3: S3Tier,
    monkeypatch: pytest.MonkeyPatch,
    tier: TierName,
    version: int,
) -> None:
    """A node that starts over records of an older version of the format finds them and checks them."""
    made: Tier = s3 if tier == "s3" else nvme(tmp_path / "kv")
    put = type(made).put

    def put_older(made: Tier, address: Address, record: Record, **options: Any) -> None:
        put(made, address, Record(as_version(version, record.data)), **options)

    with monkeypatch.context() as earlier:
        earlier.setattr(type(made), "put", put_older)
        engine = tiered(tiny_llama, tmp_path, tiers={tier: made})
        engine.placement = placement_of(tier)
        prompt = first_turn(engine, 41)
    if isinstance(made, NvmeTier):
        made.close()
        made = nvme(tmp_path / "kv")
    assert {found.header.version for found in made.scan()} == {version}
    again = tiered(tiny_llama, tmp_path, tiers={tier: made})
    again.placement = placement_of(tier)
    until("the tier has been looked through", lambda: holds(again, tier))
    returned = again.prefill(prompt, logprobs=5)
    same(returned, truth(tiny_llama, tmp_path, prompt))
    assert receipt_of(returned[0]).tokens[tier] == 41 + 8 - 1


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_l14_many_turns_never_drift(tiny_llama: Path, tmp_path: Path, kv_dtype: str) -> None:
    """Ten turns, each from the tiers alone: nothing adds up."""
    engine = tiered(tiny_llama, tmp_path, kv_dtype=kv_dtype)
    prompt = prompt_of(19, seed=1)
    for turn in range(10):
        returned = engine.prefill(prompt, logprobs=5)
        same(returned, truth(tiny_llama, tmp_path, prompt, kv_dtype=kv_dtype))
        if turn:
            assert receipt_of(returned[0]).tokens["compute"] == 1 + 7
        prompt = [*prompt, *returned[0].ids, *prompt_of(7, seed=turn)]
        engine.forget_pool()


@pytest.mark.parametrize(("spoil", "is_exact"), [(one_bit, True), (wrong_blocks, False)])
def test_l14_fires_when_a_loaded_block_is_not_what_was_stored(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Bytes], None],
    is_exact: bool,
) -> None:
    """The law itself, both branches on any CPU: with the checks switched off, what is wrong must be seen.

    Equality is shown against a load of the good record: the same chunks, so the same bits on every CPU.
    """
    monkeypatch.setattr(
        "samovar.replicas.offload.load.good_blocks", lambda header, payload, first: header.blocks - first
    )

    def loaded(spoil: Callable[[Bytes], None] | None) -> Prefilled:
        engine = tiered(tiny_llama, tmp_path, tiers={"cpu": HeapTier(64 * MIB)})
        engine.placement = placement_of("cpu")
        prompt = first_turn(engine, 60)
        records = records_in(engine.tiers["cpu"])
        for address, data in records.items() if spoil else ():
            records[address] = data.copy()
            spoil(records[address])  # type: ignore[misc]
        returned = engine.prefill(prompt, logprobs=5)
        assert receipt_of(returned.answer).tokens["cpu"] > 0
        if spoil is None:
            same(returned, truth(tiny_llama, tmp_path, prompt))
        return returned

    good = loaded(None)
    same(loaded(None), good, is_exact)
    with pytest.raises(AssertionError, match="the KV differs"):
        same(loaded(spoil), good, is_exact)
