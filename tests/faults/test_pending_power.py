"""F05, G12: the power goes while what was cleared is written down. What was written down before stays so."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.node.state import PendingDeletes
from tests.faults.test_nvme_power import Cut, CuttableCalls
from tests.support.amounts import seeds
from tests.support.nodes.power_model import cut_power

SEEDS = 20
CUTS = 4
TENANT = b"tenant-a" * 2


def history(dir: Path, seed: int) -> tuple[CuttableCalls, list[str]]:
    """Clears and payments until the power goes; the text last written down, and what was on its way."""
    rng = random.Random(seed)
    dir.mkdir()
    calls = CuttableCalls(dir)
    pending = PendingDeletes(dir / "owed.json", 100, calls)
    calls.left = rng.randrange(5, 40)
    texts = [""]
    for number in range(100):
        clear = Clear(TENANT, bytes([number]) * 16)
        pending.add_clear("nvme", clear)
        if number % 3 == 2:
            pending.scanned("nvme")
        texts.append(pending.text())
        try:
            assert pending.save(texts[-1])
        except Cut:
            break
        texts = texts[-1:]
    return calls, texts


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_f05_g12_a_power_cut_loses_no_clear_that_was_written_down(tmp_path: Path, seed: int) -> None:
    calls, texts = history(tmp_path / "disk", seed)
    for cut in range(CUTS):
        cut_power(calls, tmp_path / f"cut{cut}", random.Random(seed * 100 + cut))
        found = PendingDeletes(tmp_path / f"cut{cut}" / "owed.json", 100)
        assert not found.read_failed
        assert found.text() in texts
