"""A directory that another service holds is waited for, and nothing that was cleared comes back with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks import Clear, TierError
from samovar.cache_tiers.media import FaultyTier
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.media.tier import Tier
from samovar.cache_tiers.node.build import build_tiers
from samovar.cache_tiers.node.manager import NodeIdentity, NodePorts, TierNode
from samovar.cache_tiers.node.state import PendingDeletes
from samovar.configs.sections import MIB, FaultSettings, TierSettings
from tests.support.clock import Clock
from tests.support.inside import join_scans
from tests.support.nodes.node_harness import OTHER_TENANT, SESSION, TENANT, Bench, bench, nvme, sample

PENDING = "owed.json"
SETTINGS = TierSettings()


def former(path: Path, *stored: int, tenant: bytes = TENANT) -> Bench:
    """A service that owns the directory and has stored these samples in it."""
    house = bench([nvme(path)], pending_path=path / PENDING)
    for number in stored:
        assert house.store(sample(number, tenant=tenant)) == "taken"
    return house


def later(path: Path, *, faults: FaultSettings | None = None) -> Bench:
    """A service that came while the directory was taken."""
    disk: Tier = nvme(path, waits=True)
    tiers = [HeapTier(4 << 20), disk if faults is None else FaultyTier(disk, faults)]
    return bench(tiers, late_pending_path=path / PENDING, incarnation="second")


def tick_past_retry(house: Bench) -> None:
    """Let the next try come, and its scan end."""
    house.clock.now_s += SETTINGS.breaker_open_s
    house.node.tick()
    join_scans(house.node, 10.0)
    house.node.check_integrity()


def state(house: Bench) -> str:
    return next(tier.state for tier in house.node.stats().tiers if tier.name == "nvme")


def test_a_tier_whose_directory_is_taken_is_refused_unless_it_waits(tmp_path: Path) -> None:
    owner = nvme(tmp_path)
    with pytest.raises(TierError, match="in use by pid"):
        nvme(tmp_path)
    waiting = nvme(tmp_path, waits=True)
    assert "in use by pid" in waiting.why_not_ours()
    with pytest.raises(TierError, match="in use by pid"):
        waiting.take()
    with pytest.raises(TierError, match="closed"):
        waiting.delete(sample(1).header.address)
    owner.close()
    assert waiting.take()
    assert waiting.why_not_ours() == ""
    assert not waiting.take()
    waiting.close()


def test_a_tier_that_cannot_be_opened_is_off_and_keeps_its_size(tmp_path: Path) -> None:
    """By which an alert and `samovar diagnose` tell it from one that is not to be there."""
    settings = TierSettings.model_validate({"nvme": {"bytes_max": MIB}})
    (tmp_path / "kv").write_text("no directory")
    media = build_tiers(settings, tmp_path / "kv", make_cpu=HeapTier, wall_clock=lambda: 2000.0)
    ports = NodePorts(Clock(), lambda: 2000.0, lambda *_: None)
    node = TierNode(settings, media, NodeIdentity("node", "first"), ports, workers=0)
    try:
        rows = {tier.name: tier for tier in node.stats().tiers}
    finally:
        node.close()
    assert rows["nvme"].state.startswith("off: opening"), rows["nvme"].state
    assert (rows["nvme"].bytes_max, rows["s3"].bytes_max) == (MIB, 0)


@pytest.mark.parametrize("faults", [None, FaultSettings(delay_s=1e-9)], ids=["plain", "wrapped"])
def test_what_the_former_owner_stored_is_found_once_it_has_ended(
    tmp_path: Path, faults: FaultSettings | None
) -> None:
    owner = former(tmp_path, 1)
    house = later(tmp_path, faults=faults)
    assert state(house).startswith("off: in use by pid")
    assert house.store(sample(2)) == "taken", "main memory serves meanwhile"
    tick_past_retry(house)
    assert state(house).startswith("off: in use by pid")
    assert house.tiers_of(sample(1)) == []
    owner.node.close()
    house.node.tick()
    assert state(house).startswith("off: in use by pid"), "a try has its pause"
    tick_past_retry(house)
    assert state(house) == "up"
    assert house.tiers_of(sample(1)) == ["nvme"]
    assert house.load(sample(1)) is not None
    assert house.copies(sample(2)) == ("cpu",)
    house.node.close()


def test_a_clear_meanwhile_is_heeded_when_the_directory_becomes_ours(tmp_path: Path) -> None:
    owner = former(tmp_path, 1)
    assert owner.store(sample(3, tenant=OTHER_TENANT)) == "taken"
    house = later(tmp_path)
    house.store(sample(1))
    cleared = house.node.clear(Clear(TENANT, SESSION))
    assert (cleared.extents, cleared.unreachable) == (1, ()), (
        "another process's directory is not ours to clear"
    )
    owner.node.close()
    tick_past_retry(house)
    assert state(house) == "up"
    assert house.tiers_of(sample(1)) == []
    assert house.tiers_of(sample(3, tenant=OTHER_TENANT)) == ["nvme"]
    assert not list((tmp_path / "v1" / TENANT.hex()).rglob("*.kv*")), "its file is gone, too"
    assert house.store(sample(1)) == "taken", "what is stored after the clear stays"
    house.node.tick()
    assert house.tiers_of(sample(1)) != []
    house.node.close()


def test_clears_that_the_former_owner_could_not_finish_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = former(tmp_path, 1)

    def fails(*_args: object, **_more: object) -> None:
        raise TierError("the disk does not answer")

    monkeypatch.setattr(owner.tiers["nvme"], "delete", fails)
    assert owner.node.clear(Clear(TENANT, SESSION)).unreachable == ("nvme",)
    assert (tmp_path / PENDING).read_text()
    house = later(tmp_path)
    owner.node.close()
    tick_past_retry(house)
    assert house.tiers_of(sample(1)) == []
    tick_past_retry(house)
    house.node.close()
    again = former(tmp_path)
    assert again.tiers_of(sample(1)) == []
    again.node.close()


def test_clears_after_it_became_ours_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = former(tmp_path, 1)
    house = later(tmp_path)
    owner.node.close()
    tick_past_retry(house)

    def fails(*_args: object, **_more: object) -> None:
        raise TierError("the disk does not answer")

    monkeypatch.setattr(house.tiers["nvme"], "delete", fails)
    assert house.node.clear(Clear(TENANT, SESSION)).unreachable == ("nvme",)
    assert TENANT.hex() in (tmp_path / PENDING).read_text()
    house.node.close()


def test_a_clear_of_a_tier_that_was_taken_out_waits_beside_those_of_the_others(tmp_path: Path) -> None:
    path, archived = tmp_path / "owed.json", ["archive", TENANT.hex(), None]
    kept = PendingDeletes(path, 8)
    kept.add_clear("nvme", Clear(TENANT, SESSION))
    kept.add("nvme", sample(1).header.address, cleared=True)
    document = json.loads(kept.text())
    document["deletes"][0][0] = "archive"
    document["clears"].append(archived)
    path.write_text(json.dumps(document))
    again = PendingDeletes(path, 8)
    assert not again.read_failed
    assert [clear for clear, _ in again.clears_of("nvme")] == [Clear(TENANT, SESSION)]
    assert again.of("nvme") == []
    again.scanned("nvme")
    left = json.loads(again.text())
    assert (left["clears"], left["deletes"]) == ([archived], document["deletes"]), "until it is there again"
