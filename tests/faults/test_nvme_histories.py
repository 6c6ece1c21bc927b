"""The `nvme` tier under histories: at random against a dict, and from many threads at once."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samovar.cache_tiers.blocks.record import TierError, TierFull, TierMiss
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import (
    DEADLINE_S,
    Sealed,
    SickCalls,
    check,
    make,
    open_tier,
    path_of,
    read_all,
    temporaries,
    why_bad,
)


def test_many_threads_at_the_same_extents(tmp_path: Path) -> None:
    """Puts, deletes, quarantines and reads of four extents at once: bytes are right, accounts exact."""
    tier = open_tier(tmp_path, durability="none")
    records = [make(seed) for seed in range(4)]
    start = threading.Barrier(6)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            start.wait()
            for _ in range(150):
                one_step(tier, records[rng.integers(4)], int(rng.integers(10)))
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    check(tier)
    assert not temporaries(tmp_path)


def one_step(tier: NvmeTier, sealed: Sealed, dice: int) -> None:
    if dice < 5:
        tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    elif dice < 7:
        tier.delete(sealed.address)
    elif dice < 8:
        tier.quarantine(sealed.address)
    else:
        try:
            assert why_bad(tier, sealed) is None
        except TierMiss:
            return


def test_g9_a_busy_extent_keeps_nobody_longer_than_the_deadline(tmp_path: Path) -> None:
    calls, sealed = SickCalls(), make(1)
    tier = open_tier(tmp_path, calls)
    inside, go_on = threading.Event(), threading.Event()

    def hangs(sick: SickCalls, name: str, args: tuple[Any, ...]) -> Any:
        if name == "fsync":
            inside.set()
            assert go_on.wait(30)
        return sick.really(name, *args)

    calls.arm(hangs, 1, 100_000)
    thread = threading.Thread(
        target=lambda: tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
    )
    thread.start()
    assert inside.wait(30)
    with pytest.raises(TierError, match="deadline"):
        tier.put(sealed.address, sealed.record, deadline=Deadline(0.05))
    assert tier.bytes_held() == 0
    with pytest.raises(TierMiss):  # others are not kept at all
        tier.read(make(2).address, 0, 1, deadline=Deadline(DEADLINE_S))
    go_on.set()
    thread.join(30)
    assert why_bad(tier, sealed) is None
    check(tier)


class Machine(RuleBasedStateMachine):
    """Histories of one small tier against a dict: what is there, what is quarantined, what it takes."""

    NUMBERS = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="nvme")
        self.tier = self.open()
        self.there: dict[int, Sealed] = {}

    def open(self) -> NvmeTier:
        return open_tier(
            Path(self.folder.name),
            durability="none",
            bytes_max=4 * 12288,
            quarantine_bytes_max=2 * 12288,
        )

    @rule(number=NUMBERS, blocks=st.integers(1, 4))
    def put(self, number: int, blocks: int) -> None:
        sealed = make(number, blocks=blocks)
        try:
            self.tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
        except TierFull:
            assert sum(-(-each.record.nbytes // 4096) * 4096 for each in self.there.values()) > 2 * 12288
            return
        self.there[number * 10 + blocks] = sealed

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        self.tier.delete(self.there.pop(number).address)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        self.tier.quarantine(self.there.pop(number).address)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def rot_and_scan(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        with path_of(self.tier, self.there.pop(number).address).open("r+b") as file:
            file.write(b"rotten")
        self.scan()

    @rule()
    def scan(self) -> None:
        found = {scanned.header.address for scanned in self.tier.scan()}
        assert found == {sealed.address for sealed in self.there.values()}

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = self.open()
        self.scan()

    @rule()
    def probe(self) -> None:
        self.tier.probe()

    @rule(number=NUMBERS, blocks=st.integers(1, 4))
    def read(self, number: int, blocks: int) -> None:
        sealed = make(number, blocks=blocks)
        if number * 10 + blocks in self.there:
            assert why_bad(self.tier, sealed) is None
        else:
            with pytest.raises(TierMiss):
                read_all(self.tier, sealed)

    @invariant()
    def holds(self) -> None:
        check(self.tier)
        assert self.tier.bytes_held() <= 4 * 12288
        assert not temporaries(Path(self.folder.name))

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, derandomize=True, deadline=None)
