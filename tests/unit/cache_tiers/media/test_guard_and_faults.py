"""The tier that misbehaves on purpose: it does what it was told, the same for the same seed, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from samovar.cache_tiers.blocks.extent import Address, Bytes, Clear
from samovar.cache_tiers.blocks.record import Record, TierError, TierFull, TierMiss
from samovar.cache_tiers.media.faults import FaultyTier
from samovar.cache_tiers.media.tier import Deadline, Scanned, Tier, TierAround
from samovar.configs.sections import FaultSettings

ADDRESS = Address(bytes(16), bytes(32), bytes(32))
STORED = np.arange(256, dtype=np.uint8)


class Memory(Tier):
    """One dict. Hands out read-only views of its very bytes, as the object store does."""

    name = "nvme"
    is_shared = True
    keeps_bad = True

    def __init__(self) -> None:
        self.records: dict[Address, Bytes] = {}
        self.log: list[str] = []

    def put(self, address: Address, record: Record, *, deadline: Deadline) -> None:
        self.log.append(f"put {deadline.seconds}")
        self.records[address] = record.data

    def read(self, address: Address, start: int, nbytes: int, *, deadline: Deadline) -> Bytes:
        self.log.append(f"read {deadline.seconds}")
        if address not in self.records:
            raise TierMiss("not there")
        view = self.records[address][start : start + nbytes]
        view.flags.writeable = False
        return view

    def delete(self, address: Address) -> None:
        self.log.append("delete")
        self.records.pop(address, None)

    def quarantine(self, address: Address) -> None:
        self.log.append("quarantine")

    def scan(self) -> Iterator[Scanned]:
        self.log.append("scan")
        return iter(())

    def purge_quarantine(self, tenant: bytes) -> int:
        self.log.append("purge_quarantine")
        return 1

    def mark_cleared(self, clears: Sequence[Clear], deadline: Deadline) -> None:
        self.log.append("mark_cleared")

    def purge(self, tenant: bytes, is_known: Callable[[Address], bool], deadline: Deadline) -> bool:
        self.log.append("purge")
        return False

    def is_marked(self, address: Address, session: bytes, deadline: Deadline) -> bool:
        self.log.append("is_marked")
        return True

    def settle(self) -> bool:
        self.log.append("settle")
        return True

    def rescan(self, is_known: Callable[[Address], bool]) -> Iterator[Scanned]:
        self.log.append("rescan")
        return iter(())

    def touch(self, address: Address) -> None:
        self.log.append("touch")

    def bytes_held(self) -> int:
        return sum(data.nbytes for data in self.records.values())

    def probe(self) -> None:
        self.log.append("probe")

    def close(self) -> None:
        self.log.append("close")


def _filled(settings: FaultSettings) -> tuple[FaultyTier, Memory, list[float]]:
    memory = Memory()
    memory.records[ADDRESS] = STORED.copy()
    slept: list[float] = []
    return FaultyTier(memory, settings, sleep=slept.append), memory, slept


def _read(tier: Tier, nbytes: int = 256) -> Bytes:
    return tier.read(ADDRESS, 0, nbytes, deadline=Deadline(1.0))


def _call_all(tier: Tier) -> None:
    tier.put(ADDRESS, Record(STORED.copy()), deadline=Deadline(3.0))
    tier.read(ADDRESS, 0, 256, deadline=Deadline(4.0))
    tier.quarantine(ADDRESS)
    list(tier.scan())
    list(tier.rescan(bool))
    tier.mark_cleared([Clear(bytes(16))], Deadline(1.0))
    assert tier.purge(bytes(16), bool, Deadline(1.0)) is False
    assert tier.is_marked(ADDRESS, bytes(16), Deadline(1.0))
    tier.settle()
    assert tier.purge_quarantine(bytes(16)) == 1
    tier.touch(ADDRESS)
    tier.probe()
    tier.delete(ADDRESS)


def test_without_faults_it_is_the_tier_itself() -> None:
    tier, memory, slept = _filled(FaultSettings())
    plain = Memory()
    _call_all(tier)
    _call_all(plain)
    assert memory.log == plain.log
    assert slept == []
    assert not tier.struck
    assert tier.name == "nvme"
    memory.records[ADDRESS] = STORED
    assert np.shares_memory(_read(tier), STORED)
    assert tier.bytes_held() == 256
    assert tier.is_shared
    assert tier.keeps_bad
    assert tier.calls == {
        **dict.fromkeys(["put", "quarantine", "scan", "probe", "delete"], 1),
        **dict.fromkeys(["rescan", "mark_cleared", "purge", "is_marked", "settle", "purge_quarantine"], 1),
        "read": 2,
    }
    tier.close()
    assert memory.log[-1] == "close"


def test_a_miss_stays_a_miss() -> None:
    tier = FaultyTier(Memory(), FaultSettings())
    with pytest.raises(TierMiss):
        _read(tier)


def test_delays() -> None:
    tier, _, slept = _filled(FaultSettings(delay_s=5.0))
    _call_all(tier)
    assert slept == [5.0] * 12  # not `touch`
    assert tier.struck == {"delay": 12}


CALLS: dict[str, Callable[[Tier], object]] = {
    "put": lambda tier: tier.put(ADDRESS, Record(STORED), deadline=Deadline(1.0)),
    "read": lambda tier: _read(tier),
    "delete": lambda tier: tier.delete(ADDRESS),
    "quarantine": lambda tier: tier.quarantine(ADDRESS),
    "scan": lambda tier: list(tier.scan()),
    "probe": lambda tier: tier.probe(),
    "rescan": lambda tier: list(tier.rescan(bool)),
    "mark_cleared": lambda tier: tier.mark_cleared([], Deadline(1.0)),
    "purge": lambda tier: tier.purge(bytes(16), bool, Deadline(1.0)),
    "is_marked": lambda tier: tier.is_marked(ADDRESS, bytes(16), Deadline(1.0)),
    "settle": lambda tier: tier.settle(),
    "purge_quarantine": lambda tier: tier.purge_quarantine(bytes(16)),
}
"""Every method of the contract that faults strike."""

PASSED_ON = {
    *{"on_marks", "bad_found", "touch", "bytes_held", "close", "warm", "why_not_ours", "take"},
    *{"medium_free_bytes", "drop_cache"},
}
"""Those that touch no medium, never raise, or whose failure costs nothing."""

NOT_PASSED_ON = {"ref"}
"""An object handed out could not be corrupted: the record is read instead."""


def test_faults_reach_every_method_of_the_contract() -> None:
    contract = {name for name, value in vars(Tier).items() if callable(value) and not name.startswith("_")}
    assert contract == {*CALLS, *PASSED_ON, *NOT_PASSED_ON}
    passed_on = vars(FaultyTier).keys() | vars(TierAround).keys()
    assert contract - NOT_PASSED_ON <= passed_on, "a method of the base would not reach the tier"
    assert FaultyTier(Memory(), FaultSettings()).ref(ADDRESS) is None


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize(("fault", "text"), [("error", "failed"), ("hang", "hung")])
def test_an_error_never_reached_the_tier(method: str, fault: str, text: str) -> None:
    settings = FaultSettings(hang_s=0.001, **{f"{fault}_rate": 1.0})
    tier, memory, _ = _filled(settings)
    with pytest.raises(TierError, match=f"{method} {text}"):
        CALLS[method](tier)
    assert memory.log == []
    assert tier.calls[method] == 1
    assert tier.struck[fault] == 1


def test_touch_and_close_never_fail() -> None:
    tier, memory, _ = _filled(FaultSettings(error_rate=1.0, hang_rate=1.0))
    tier.touch(ADDRESS)
    tier.close()
    assert memory.log == ["touch", "close"]


def test_no_room() -> None:
    tier, memory, _ = _filled(FaultSettings(full_rate=1.0))
    with pytest.raises(TierFull):
        tier.put(ADDRESS, Record(STORED), deadline=Deadline(1.0))
    assert memory.log == []
    assert np.array_equal(_read(tier), STORED)  # reads are not touched


def test_a_flip_is_one_bit_of_a_copy() -> None:
    tier, memory, _ = _filled(FaultSettings(flip_rate=1.0))
    places = set()
    for _ in range(100):
        data = _read(tier)
        difference = np.bitwise_xor(data, STORED)
        assert np.unpackbits(difference).sum() == 1
        places.add(int(np.flatnonzero(np.unpackbits(difference))[0]))
        assert np.array_equal(memory.records[ADDRESS], STORED)
    assert len(places) > 80  # anywhere
    assert _read(tier, 0).nbytes == 0


def test_a_short_read_is_a_beginning() -> None:
    tier, _, _ = _filled(FaultSettings(truncate_rate=1.0))
    lengths = set()
    for _ in range(50):
        data = _read(tier)
        assert data.nbytes < 256
        assert np.array_equal(data, STORED[: data.nbytes])
        lengths.add(data.nbytes)
    assert len(lengths) > 20


def test_short_and_flipped_at_once() -> None:
    tier, memory, _ = _filled(FaultSettings(truncate_rate=1.0, flip_rate=1.0))
    for _ in range(50):
        data = _read(tier)
        flipped = np.unpackbits(np.bitwise_xor(data, STORED[: data.nbytes])).sum()
        assert flipped == (data.nbytes > 0)
        assert np.array_equal(memory.records[ADDRESS], STORED)


def _history(settings: FaultSettings) -> list[str]:
    tier, _, slept = _filled(settings)
    seen = []
    for _ in range(60):
        slept.clear()
        try:
            seen.append(_read(tier).tobytes().hex() + f" {slept}")
        except TierError as error:
            seen.append(f"{error} {slept}")
    return seen


def test_the_same_seed_gives_the_same_faults() -> None:
    faults = FaultSettings(
        seed=7, delay_s=1.0, delay_rate=0.3, error_rate=0.3, flip_rate=0.3, truncate_rate=0.3
    )
    assert _history(faults) == _history(faults)
    assert _history(faults) != _history(faults.model_copy(update={"seed": 8}))


def test_one_rate_does_not_shift_the_others() -> None:
    flips = _history(FaultSettings(seed=7, flip_rate=0.3))
    with_errors = _history(FaultSettings(seed=7, flip_rate=0.3, error_rate=0.3))
    kept = [a == b for a, b in zip(flips, with_errors, strict=True) if "failed" not in b]
    assert all(kept)
    assert 0 < len(kept) < 60


def test_the_rates_are_rates() -> None:
    tier, _, _ = _filled(FaultSettings(seed=1, flip_rate=0.25))
    for _ in range(1000):
        _read(tier)
    assert 200 < tier.struck["flip"] < 300


def test_faults_can_be_changed_while_it_runs() -> None:
    tier, _, _ = _filled(FaultSettings())
    assert np.array_equal(_read(tier), STORED)
    tier.update(FaultSettings(error_rate=1.0))
    with pytest.raises(TierError):
        _read(tier)
    tier.update(FaultSettings())
    assert np.array_equal(_read(tier), STORED)


def test_a_new_seed_begins_anew() -> None:
    faults = FaultSettings(seed=3, flip_rate=1.0)
    tier, _, _ = _filled(FaultSettings(seed=1))
    _read(tier)
    tier.update(faults)
    fresh, _, _ = _filled(faults)
    assert np.array_equal(_read(tier), _read(fresh))


class Hanging:
    """A read in a thread of its own, known to hang when `begun` is set."""

    def __init__(self, tier: FaultyTier) -> None:
        self.error: TierError | None = None
        self._tier = tier
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            _read(self._tier)
        except TierError as error:
            self.error = error

    def ended(self) -> bool:
        self.thread.join(timeout=10.0)
        return not self.thread.is_alive()


class Watched(FaultyTier):
    """Says when a call is about to hang."""

    def __init__(self, inner: Tier, settings: FaultSettings) -> None:
        super().__init__(inner, settings)
        self.hangs = threading.Semaphore(0)

    def _strike(self, fault: str) -> None:
        super()._strike(fault)
        if fault in ("hang", "delay"):
            self.hangs.release()


@pytest.mark.parametrize("end", ["release", "close"])
def test_f08_a_hang_ends_at_once_when_told(end: str) -> None:
    tier = Watched(Memory(), FaultSettings(hang_rate=1.0, hang_s=3600.0))
    reads = [Hanging(tier) for _ in range(3)]
    for _ in reads:
        assert tier.hangs.acquire(timeout=10.0)
    assert all(read.thread.is_alive() for read in reads)
    getattr(tier, end)()
    assert all(read.ended() for read in reads)
    assert all(read.error is not None and "hung" in str(read.error) for read in reads)
    assert tier.struck["hang"] == 3

    # After `release` the next one hangs again; after `close` none does, not even when released.
    again = Hanging(tier)
    assert tier.hangs.acquire(timeout=10.0)
    if end == "release":
        assert again.thread.is_alive()
        tier.close()
    assert again.ended()
    tier.release()
    assert Hanging(tier).ended()


def test_a_hang_ends_by_itself() -> None:
    tier = FaultyTier(Memory(), FaultSettings(hang_rate=1.0, hang_s=0.01))
    with pytest.raises(TierError, match="hung"):
        _read(tier)


def test_close_cuts_a_delay_short() -> None:
    memory = Memory()
    memory.records[ADDRESS] = STORED
    tier = Watched(memory, FaultSettings(delay_s=600.0))
    read = Hanging(tier)
    assert tier.hangs.acquire(timeout=10.0)
    tier.close()
    assert read.ended()
    assert read.error is None
