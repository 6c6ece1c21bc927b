"""F05, G12: the power goes below a real file system (ext4). It starts, serves nothing bad, keeps its word.

The disk is `tests/support/nodes/cut_disk.py`. The gate cuts a few times, `make test-slow` 500.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from samovar.cache_tiers.blocks.extent import Clear
from samovar.cache_tiers.media.nvme import NvmeTier
from samovar.cache_tiers.messages import BadReport
from samovar.cache_tiers.sessions.item_file import ItemFile
from samovar.cache_tiers.sessions.shelf import Item
from samovar.router.erasure import UnfinishedFile
from tests.support.amounts import seeds
from tests.support.nodes.cut_disk import CutDisk, cut_disk, looped
from tests.support.nodes.node_harness import MIB, OTHER_TENANT, TENANT, Bench, Sample, bench, sample

DISK_BYTES = 24 * MIB
HISTORIES = 5
CUTS_QUICK, CUTS = 16, 125
"""Of a history: in the gate, and of each of the four that are slow."""
STEPS = 60
SAMPLE_BYTES = 48


@dataclass
class Promise:
    """What is promised of a conversation from `since` on: it is kept, or erased; None: either."""

    since: int
    is_kept: bool | None


class History:
    """A node, and what ingresses keep, on one disk: what they have promised, and when."""

    def __init__(self, disk: CutDisk, folder: Path, seed: int, durability: str) -> None:
        self._rng = random.Random(seed)
        self._disk = disk
        self._durability = durability
        self.samples: dict[int, Sample] = {}
        self.promises: dict[int, list[Promise]] = {}
        self.node, self.items, self.unfinished = opened(folder, durability)
        self.unfinished.open()
        self.began = disk.now()

    def live(self) -> None:
        for number in range(STEPS):
            kept = [key for key, promises in self.promises.items() if promises[-1].is_kept]
            act = self._rng.random()
            if act < 0.55 or not kept:
                self._store(number)
            elif act < 0.9:
                self._erase(self._rng.choice(kept))
            else:
                self._report(self._rng.choice(kept))
        self.node.node.close()
        self.items.close()
        self.unfinished.close()

    def _store(self, number: int) -> None:
        made = sample(
            number, tenant=self._rng.choice((TENANT, OTHER_TENANT)), session=number.to_bytes(16, "little")
        )
        self.samples[number] = made
        self.promises[number] = [Promise(0, False), Promise(self._disk.now(), None)]
        assert self.node.store(made) == "taken"
        self.items.put(item_of(made))
        self.promises[number].append(Promise(self._disk.now(), self._durability == "crash"))

    def _erase(self, number: int) -> None:
        """As an ingress: it writes the wish down, and that it is done."""
        header, promises = self.samples[number].header, self.promises[number]
        promises.append(Promise(self._disk.now(), None))
        assert self.unfinished.save([number])
        self.items.clear(header.tenant, header.session, 2e9)
        assert self.node.node.clear(Clear(header.tenant, header.session)).unreachable == ()
        promises.append(Promise(self._disk.now(), False))
        assert self.unfinished.save([])

    def _report(self, number: int) -> None:
        """It is said to be bad, and put aside; then, too, an erasure reaches it."""
        header, promises = self.samples[number].header, self.promises[number]
        promises.append(Promise(self._disk.now(), None))
        self.node.node.report(
            [BadReport(header.namespace, header.tenant, header.extent_id, "nvme", "checksum")]
        )
        if self._rng.random() < 0.7:
            self._erase(number)

    def promised(self, number: int, moment: int) -> bool | None:
        """What holds for a conversation if the power goes now."""
        return [one for one in self.promises[number] if one.since <= moment][-1].is_kept


def opened(folder: Path, durability: str = "crash") -> tuple[Bench, ItemFile, UnfinishedFile]:
    tier = NvmeTier(
        folder / "kv",
        bytes_max=16 * MIB,
        durability=durability,  # type: ignore[arg-type]
        direct_io=False,
        quarantine_bytes_max=8192,  # two records: the third one has no room
        wall_clock=lambda: 2000.0,
    )
    node = bench([tier], pending_path=folder / "kv" / "owed.json")
    return node, ItemFile(folder / "kv" / "items"), UnfinishedFile(folder / "unfinished")


def item_of(made: Sample) -> Item:
    header = made.header
    return Item(
        header.tenant,
        header.session,
        "reply",
        header.session,
        made.payload.tobytes(),
        1.0,
        3e9,
        is_durable=True,
    )


def survey(history: History, folder: Path, moment: int, seen: Counter[str]) -> None:
    """Start what was on the disk, and compare it with what was promised."""
    node, items, unfinished = opened(folder)
    unfinished.open()
    kept = {one.session: one.body for one in items.load(0.0)}
    node.node.tick()
    node.node.check_integrity()
    for number, made in history.samples.items():
        promised = history.promised(number, moment)
        payload, body = node.load(made), kept.get(made.header.session)  # bad bytes raise
        assert payload is None or payload.tobytes() == made.payload.tobytes()
        assert body in (None, made.payload.tobytes())
        seen["found" if payload is not None else "missed"] += 1
        seen["lost"] += promised is True and payload is None
        seen["back"] += promised is False and (payload is not None or body is not None)
    node.node.close()
    items.close()
    unfinished.close()
    held = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for number, made in history.samples.items():
        if history.promised(number, moment) is False:
            mark = made.payload.tobytes()[:SAMPLE_BYTES]
            seen["there"] += any(mark in data for data in held)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in main memory, where there is one: images are written to it by the hundred."""
    there = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="cuts", dir=there if there.is_dir() else None) as folder:
        yield Path(folder)


def run(folder: Path, memory: Path, seed: int, cuts: int, durability: str = "crash") -> Counter[str]:
    rng, seen = random.Random(f"cuts {seed}"), Counter[str]()
    with cut_disk(folder, memory / "log", DISK_BYTES) as (disk, mounted):
        history = History(disk, mounted, seed, durability)
        history.live()
        ends = disk.now()
    (folder / "again").mkdir()
    # Half of them right behind a promise.
    told = [one.since for promises in history.promises.values() for one in promises if one.since]
    moments = [rng.choice((rng.choice(told), rng.randrange(history.began, ends))) for _ in range(cuts)]
    for moment in disk.images(moments, memory / "image", rng):
        with looped(memory / "image", folder / "again"):
            survey(history, folder / "again", moment, seen)
    return seen


@pytest.mark.guarantee("F05", "G4", "G5", "G12")
@pytest.mark.parametrize("seed", seeds(HISTORIES))
def test_f05_g12_a_power_cut_below_ext4_breaks_no_promise(tmp_path: Path, memory: Path, seed: int) -> None:
    seen = run(tmp_path, memory, seed, CUTS if seed else CUTS_QUICK)
    assert (seen["lost"], seen["back"], seen["there"]) == (0, 0, 0), seen
    assert seen["found"] > CUTS_QUICK
    assert seen["missed"] > CUTS_QUICK


def test_f05_the_disk_does_lose_what_is_not_flushed(tmp_path: Path, memory: Path) -> None:
    """Nothing is flushed ("none"), and the same is asked: what was erased comes back."""
    seen = run(tmp_path, memory, 0, CUTS_QUICK, durability="none")
    assert seen["back"] + seen["there"] > 0, seen
