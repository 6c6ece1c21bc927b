"""F05: the power goes. Only misses; with durability "crash", what was committed or deleted stays so."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from samovar.cache_tiers.media import files
from samovar.cache_tiers.media.tier import Deadline
from tests.support.nodes.nvme_harness import DEADLINE_S, check, make, open_tier, temporaries, why_bad
from tests.support.nodes.power_model import RecordingCalls, cut_power

EXTENTS = 6
SEEDS = 20
CUTS = 4


class Cut(Exception):
    """The power is gone, in the middle of something."""


class CuttableCalls(RecordingCalls):
    """After so many flushes and changes of directories the power goes."""

    left = 10_000

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Cut

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count()
        half = data[: max(len(data) // 2, 4096)]  # several writes to one file, to be lost one by one
        return super().pwrite(fd, half, offset)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        if self.left > 0:  # once it is gone, nothing is tidied up any more
            self._count()
            super().unlink(path)

    def rmdir(self, path: str) -> None:
        if self.left > 0:
            super().rmdir(path)


def history(dir: Path, durability: str, seed: int) -> tuple[CuttableCalls, dict[int, bool | None]]:
    """Puts and deletes until the power goes. Extent -> finished there, finished not there, or unknown."""
    rng = random.Random(seed)
    dir.mkdir()
    calls = CuttableCalls(dir)
    tier = open_tier(dir, calls, durability=durability)
    calls.left = rng.randrange(80)
    state: dict[int, bool | None] = dict.fromkeys(range(EXTENTS), False)
    try:
        for _ in range(40):
            number = rng.randrange(EXTENTS)
            sealed = make(number, tenant=number % 2)
            is_put = rng.random() < 0.7
            state[number] = None
            if is_put:
                tier.put(sealed.address, sealed.record, deadline=Deadline(DEADLINE_S))
            else:
                tier.delete(sealed.address)
            state[number] = is_put
    except Cut:
        calls.left = -1
    finally:
        tier.close()
    return calls, state


def survey(dir: Path, state: dict[int, bool | None], seen: Counter[str]) -> None:
    """After the restart: what is found is good, what was promised is found. Counts what was seen."""
    tier = open_tier(dir)
    seen["torn"] += bool(temporaries(dir))
    found = {scanned.header.address for scanned in tier.scan()}
    assert not temporaries(dir)
    for number, finished in state.items():
        sealed = make(number, tenant=number % 2)
        there = sealed.address in found
        if there:
            rotten = why_bad(tier, sealed)
            assert rotten in (None, "checksum"), rotten  # a checksum is a miss to the replica that finds it
            seen["rotten"] += rotten is not None
            there = rotten is None
        seen["found" if there else "missed"] += 1
        seen["lost"] += finished is True and not there
        seen["back"] += finished is False and there
    seen["bad"] += len(list(dir.rglob("*.bad")))
    check(tier)
    tier.close()


def run(tmp_path: Path, durability: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        calls, state = history(tmp_path / f"{durability}{seed}", durability, seed)
        for cut in range(CUTS):
            image = tmp_path / f"{durability}{seed}-{cut}"
            cut_power(calls, image, random.Random(seed * 100 + cut))
            survey(image, state, seen)
    return seen


def test_f05_what_was_committed_survives_a_power_cut(tmp_path: Path) -> None:
    seen = run(tmp_path, "crash")
    assert (seen["lost"], seen["back"]) == (0, 0), seen
    assert (seen["rotten"], seen["bad"]) == (0, 0), "a record was published before it was flushed"
    assert seen["found"] > 100
    assert seen["missed"] > 100
    assert seen["torn"] > 10


def test_f05_without_flushes_there_are_only_misses(tmp_path: Path) -> None:
    """Durability "none": blocks are lost and torn, and all of that is found; so the model does cut."""
    seen = run(tmp_path, "none")
    assert seen["lost"] > 10, seen
    assert seen["rotten"] + seen["bad"] > 10, seen
    assert seen["found"] > 10


@pytest.mark.parametrize("forgotten", ["file", "leaf", "above"])
def test_f05_the_model_shows_each_flush_that_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    """Leave one kind of fsync out: the test above would fail."""
    flush, sync_dir = CuttableCalls.fsync, files.sync_dir

    def fsync(calls: CuttableCalls, fd: int) -> None:
        if forgotten != "file" or not hasattr(calls.fds[fd], "writes"):
            flush(calls, fd)

    def sync(calls: files.Syscalls, path: str) -> None:
        is_leaf = len(Path(path).name) == 2 and Path(path).name != "v1"
        if forgotten != ("leaf" if is_leaf else "above"):
            sync_dir(calls, path)

    monkeypatch.setattr(CuttableCalls, "fsync", fsync)
    monkeypatch.setattr(files, "sync_dir", sync)
    seen = run(tmp_path, "crash")
    assert seen["lost"] + seen["back"] + seen["rotten"] + seen["bad"] > 0, seen
