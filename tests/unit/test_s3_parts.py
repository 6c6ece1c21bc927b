"""The S3 tier's pure parts: object keys, the ledger; and the pool of threads with deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_tiers.blocks.extent import Address
from cache_tiers.blocks.record import TierError, TierFull
from cache_tiers.media.guard import Call, DeadlinePool
from cache_tiers.media.s3 import OWED_MAX, S3Ledger
from cache_tiers.media.s3_keys import S3Keys


def address(number: int) -> Address:
    return Address(bytes([number]) * 16, bytes([number]) * 32, number.to_bytes(32, "big"))


@pytest.mark.parametrize("prefix", ["", "samovar/kv", "/a//b/", "x.y-z_1"])
def test_keys_and_back(prefix: str) -> None:
    keys = S3Keys(prefix)
    one = address(7)
    key = keys.record(one)
    assert key.endswith(f"v1/{'07' * 16}/{'07' * 32}/{one.extent_id.hex()}")
    assert not key.startswith("/")
    assert "//" not in key
    assert keys.parse(key) == one
    assert keys.parse_bad(keys.bad(one)) == one
    assert keys.parse(keys.bad(one)) is keys.parse_bad(key) is None


@pytest.mark.parametrize("prefix", ["..", "a/../b", "./a", "a/."])
def test_a_prefix_does_not_climb(prefix: str) -> None:
    with pytest.raises(ValueError, match="must not climb"):
        S3Keys(prefix)


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key + "0",
        lambda key: key[:-1],
        lambda key: key.upper(),
        lambda key: key + "\n",
        lambda key: key.replace("v1", "v2"),
        lambda key: "x" + key,
        lambda key: key.replace("07/", "../", 1),
    ],
)
def test_other_keys_are_not_ours(change: Callable[[str], str]) -> None:
    keys = S3Keys("p")
    assert keys.parse(change(keys.record(address(7)))) is None


class LedgerMachine(RuleBasedStateMachine):
    """Against a dict of what lies in the bucket."""

    BYTES_MAX = 1000

    def __init__(self) -> None:
        super().__init__()
        self.ledger = S3Ledger(self.BYTES_MAX)
        self.there: dict[Address, int] = {}
        self.bad: dict[Address, int] = {}
        self.snapshot: dict[Address, int] | None = None

    numbers = st.integers(0, 5)
    sizes = st.integers(0, 400)

    @rule(number=numbers, size=sizes)
    def put(self, number: int, size: int) -> None:
        try:
            before = self.ledger.reserve(address(number), size)
        except TierFull:
            held = sum(self.there.values()) + sum(self.bad.values())
            assert held - self.there.get(address(number), 0) + size > self.BYTES_MAX
            return
        assert before == self.there.get(address(number))
        self.there[address(number)] = size

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        self.ledger.set(address(number), None)
        self.there.pop(address(number), None)

    @rule(number=numbers, size=st.none() | st.integers(0, 50))
    def quarantine(self, number: int, size: int | None) -> None:
        if self.snapshot is not None:
            return  # quarantines during a listing are counted from the next one on
        self.ledger.set_bad(address(number), size)
        self.bad.pop(address(number), None)
        if size is not None:
            self.bad[address(number)] = size

    @rule(number=st.integers(0, 255))
    def owe(self, number: int) -> None:
        self.ledger.owe(address(number))
        assert address(number) in self.ledger.owed

    @rule(number=st.integers(0, 255))
    def settle(self, number: int) -> None:
        self.ledger.settle(address(number))
        assert address(number) not in self.ledger.owed

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin(self) -> None:
        self.ledger.begin_listing()
        self.snapshot = dict(self.there)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def end(self) -> None:
        assert self.snapshot is not None
        self.ledger.end_listing(self.snapshot, 0, self.bad)
        self.snapshot = None
        assert self.ledger.bytes_held == sum(self.there.values()) + sum(self.bad.values())

    @invariant()
    def holds(self) -> None:
        self.ledger.check_integrity()
        for number in range(6):
            assert self.ledger.size_of(address(number)) == self.there.get(address(number))


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(derandomize=True, deadline=None, max_examples=60)


def test_bytes_are_not_told_before_a_listing() -> None:
    ledger = S3Ledger(100)
    with pytest.raises(TierError, match="not been listed"):
        _ = ledger.bytes_held
    ledger.begin_listing()
    ledger.end_listing({address(1): 5}, 7, {address(2): 11})
    assert ledger.bytes_held == 23
    with pytest.raises(TierFull):
        ledger.reserve(address(3), 78)
    ledger.reserve(address(3), 77)


def test_owed_deletes_are_bounded() -> None:
    ledger = S3Ledger(0)
    for number in range(OWED_MAX + 5):
        ledger.owe(Address(b"", b"", number.to_bytes(4, "big")))
    assert len(ledger.owed) == OWED_MAX
    assert ledger.owed[0].extent_id == (5).to_bytes(4, "big")
    ledger.check_integrity()


def test_a_wrong_account_is_found() -> None:
    ledger = S3Ledger(10)
    ledger.set(address(1), 3)
    ledger._sizes[address(2)] = 4
    with pytest.raises(AssertionError, match="3 bytes accounted"):
        ledger.check_integrity()


@pytest.fixture
def pool() -> Iterator[DeadlinePool]:
    made = DeadlinePool(2, "deadline-test")
    yield made
    made.close()


def idle(pool: DeadlinePool, timeout_s: float = 5.0) -> bool:
    with pool._lock:
        return pool._lock.wait_for(lambda: pool.busy == 0, timeout_s)


def test_results_and_errors_come_through(pool: DeadlinePool) -> None:
    assert pool.run(lambda call: 5, 5) == 5

    def timeout(call: Call) -> None:
        raise TimeoutError("the job's own")

    with pytest.raises(TimeoutError, match="the job's own"):
        pool.run(timeout, 5)
    assert idle(pool)
    pool.check_integrity()


def test_who_waits_gives_up_and_no_thread_is_added(pool: DeadlinePool) -> None:
    go = threading.Event()
    for _ in range(2):
        with pytest.raises(TierError, match="not within its deadline"):
            pool.run(lambda call: go.wait(), 0.05)
    pool.check_integrity()
    assert (pool.busy, pool.stuck) == (2, 2)
    began_s = time.monotonic()
    for _ in range(50):
        with pytest.raises(TierError, match="all 2 connections hang"):
            pool.run(lambda call: None, 10)
    assert time.monotonic() - began_s < 1
    assert sum(thread.name == "deadline-test" for thread in threading.enumerate()) == 2
    go.set()
    assert idle(pool)
    assert pool.stuck == 0
    assert pool.run(lambda call: "again", 5) == "again"
    pool.check_integrity()


def test_a_place_is_waited_for_until_the_deadline(pool: DeadlinePool) -> None:
    go = threading.Event()
    pending = [pool.start(lambda call: go.wait(), 10) for _ in range(2)]
    with pytest.raises(TierError, match="no connection was free in time"):
        pool.run(lambda call: None, 0.05)
    threading.Timer(0.05, go.set).start()
    assert pool.run(lambda call: 1, 10) == 1
    assert all(one.result() for one in pending)


def test_waiting_for_a_place_ends_when_all_hang(pool: DeadlinePool) -> None:
    """And not only at its own deadline."""
    go = threading.Event()
    errors: list[TierError] = []

    def wait() -> None:
        try:
            pool.run(lambda call: None, 60)
        except TierError as error:
            errors.append(error)

    pending = [pool.start(lambda call: go.wait(), 0.2) for _ in range(2)]
    waiter = threading.Thread(target=wait)
    waiter.start()
    for one in pending:
        with pytest.raises(TierError):
            one.result()
    waiter.join(10)
    assert "hang" in str(errors[0])
    go.set()


def test_a_job_learns_that_nobody_waits(pool: DeadlinePool) -> None:
    go, told = threading.Event(), threading.Event()
    outcome: list[object] = []

    def job(call: Call) -> None:
        call.check()
        go.wait()
        try:
            call.check()
        except TierError as error:
            outcome.append(error)
        outcome.append(call.commit())
        told.set()

    with pytest.raises(TierError):
        pool.run(job, 0.05)
    go.set()
    assert told.wait(5)
    assert isinstance(outcome[0], TierError)
    assert outcome[1] is False


def test_what_was_committed_is_waited_for(pool: DeadlinePool) -> None:
    """Else the job would think it succeeded, and its caller that it failed."""
    committed, go = threading.Event(), threading.Event()

    def job(call: Call) -> str:
        assert call.commit()
        committed.set()
        go.wait()
        return "done"

    pending = pool.start(job, 0.05)
    assert committed.wait(5)
    threading.Timer(0.3, go.set).start()
    assert pending.result() == "done"


def test_closed(pool: DeadlinePool) -> None:
    go = threading.Event()
    pending = pool.start(lambda call: go.wait(), 5)
    pool.close()
    with pytest.raises(TierError, match="closed"):
        pool.run(lambda call: None, 5)
    go.set()
    assert pending.result()
