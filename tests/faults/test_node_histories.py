"""Random histories with faults, crashes and clears against the truth: never a wrong byte, state in order."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Clear, Placement
from samovar.cache_tiers.blocks.record import BadRecord
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.media.memory import HeapTier
from samovar.cache_tiers.messages import BadReport
from samovar.configs.sections import FaultSettings, TierSettings
from tests.support.amounts import seeds
from tests.support.clock import Clock
from tests.support.constants import tuned
from tests.support.inside import join_scans, state_of
from tests.support.nodes.node_faults import MemoryTier, faulty
from tests.support.nodes.node_harness import OTHER_TENANT, TENANT, Bench, Sample, bench, nvme, sample

SEEDS = 12
STEPS = 120
EXTENTS = 14
NBYTES = sample(0).record.nbytes
BUDGETS: dict[TierName, int] = {"cpu": 4 * NBYTES, "nvme": 6 * NBYTES, "s3": 8 * NBYTES}
PLACEMENTS = (
    Placement(first="cpu", write_behind=("nvme",), min_ttl_s=0.0),
    Placement(first="cpu", write_behind=("nvme", "s3"), min_ttl_s=10.0),
    Placement(first="nvme", write_behind=("cpu",), min_ttl_s=0.0),
    Placement(first="cpu", write_behind=(), lowest="cpu", min_ttl_s=0.0),
    Placement(first="s3", write_behind=(), ttl_s=50.0),
)


class History:
    """One seed's life of a node, its crashes included."""

    def __init__(self, seed: int, path: Path) -> None:
        self.rng = random.Random(seed)
        self.path = path
        self.bucket = MemoryTier("s3", BUDGETS["s3"])
        self.clock = Clock()
        self.lives = 0
        self.loads: Counter[str] = Counter()
        self.may_be_found: set[int] = set()
        self.samples = [self._sample(number) for number in range(EXTENTS)]
        self.node = self._start()

    def step(self) -> None:
        kind = self.rng.choices(
            ["store", "offer", "load", "tick", "clear", "faults", "crash", "stop", "work"],
            [30, 10, 40, 10, 3, 6, 2, 1, 8],
        )[0]
        number = self.rng.randrange(EXTENTS)
        if kind in ("store", "offer"):
            self.may_be_found.add(number)
            self.node.offer(self.samples[number])
            if kind == "store":
                self.node.work()
        elif kind == "load":
            self._load(number)
        elif kind == "tick":
            self.clock.now_s += self.rng.choice([0.1, 5.0, 30.0, 100.0, -50.0, -1e6, 1e6])
            self.node.node.tick()
        elif kind == "clear":
            self._clear(number)
        elif kind == "faults":
            self._spoil(self.rng.choice([0.0, 0.1, 0.4]))
        elif kind == "work":
            self.node.node.work()
        else:
            self._restart(crash=kind == "crash")
        self.node.node.check_integrity()
        for name, tier in self.node.tiers.items():  # budgets hold, to a page a file
            assert tier.bytes_held() <= BUDGETS[name] + 4096 * EXTENTS

    def settle(self) -> None:
        """All is well again: what is accounted for is what is there."""
        self._spoil(0.0)
        for _ in range(4):
            self.clock.now_s += 1000.0
            self.node.node.tick()
            join_scans(self.node.node, 10)
            self.node.work()
        state = state_of(self.node.node)
        assert len(state.catalog.transfers) == 0
        assert len(state.pending) == 0
        for name in ("cpu", "s3"):
            assert state.catalog.usage(name).bytes_accounted == self.node.tiers[name].bytes_held()
        files = [found.nbytes for found in self.node.tiers["nvme"].scan()]
        assert state.catalog.usage("nvme").bytes_accounted == sum(files)
        assert all(row.state == "up" for row in self.node.node.stats().tiers)

    def end(self) -> None:
        self.node.node.close()

    def _sample(self, number: int) -> Sample:
        return sample(
            number,
            blocks=1 + number % 3,
            tenant=OTHER_TENANT if number % 5 == 0 else TENANT,
            session=bytes([number % 4]) * 16,
            placement=PLACEMENTS[number % len(PLACEMENTS)],
        )

    def _start(self) -> Bench:
        self.lives += 1
        self.files = nvme(self.path / "kv", BUDGETS["nvme"])
        tiers = [faulty(HeapTier(BUDGETS["cpu"])), faulty(self.files), faulty(self.bucket)]
        node = bench(
            [*tiers],
            settings=tuned(TierSettings(store_queue_max=4, load_s_max=5.0), transfer_queue_max=6),
            pending_path=self.path / "owed.json",
            incarnation=f"life {self.lives}",
            clock=self.clock,
            budgets=BUDGETS,
        )
        join_scans(node.node, 10)
        return node

    def _restart(self, *, crash: bool) -> None:
        if not crash:
            self.node.node.flush(5.0)
            self.node.node.close()
        self.files.close()
        self.node = self._start()

    def _spoil(self, rate: float) -> None:
        for tier in self.node.tiers.values():
            tier.update(  # type: ignore[attr-defined]
                FaultSettings(
                    seed=self.rng.randrange(1000),
                    error_rate=rate,
                    flip_rate=rate,
                    truncate_rate=rate / 2,
                    full_rate=rate,
                )
            )

    def _load(self, number: int) -> None:
        wanted = self.samples[number]
        header = wanted.header
        try:
            loaded = self.node.load(wanted)
        except BadRecord as error:  # what a replica does then
            spans = self.node.look(wanted).spans
            for span in spans:
                self.node.node.report(
                    [BadReport(header.namespace, header.tenant, header.extent_id, span.tier, error.kind)]
                )
            self.loads["bad"] += 1
            return
        self.loads["miss" if loaded is None else "hit"] += 1
        if loaded is not None:
            assert number in self.may_be_found, "it was cleared"
            assert np.array_equal(loaded, wanted.payload), "a wrong byte"

    def _clear(self, number: int) -> None:
        header = self.samples[number].header
        session = header.session if self.rng.random() < 0.7 else None
        self.node.node.clear(Clear(header.tenant, session))
        for other, wanted in enumerate(self.samples):
            if wanted.header.tenant == header.tenant and session in (None, wanted.header.session):
                self.may_be_found.discard(other)


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_never_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    history = History(seed, tmp_path)
    for _ in range(STEPS):
        history.step()
    history.settle()
    history.end()
    assert history.loads["hit"] > 0
