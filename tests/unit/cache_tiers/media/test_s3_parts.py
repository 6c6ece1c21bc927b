"""The S3 tier's pure parts: object keys, and the ledger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from samovar.cache_tiers.blocks.extent import Address
from samovar.cache_tiers.blocks.record import TierError, TierFull
from samovar.cache_tiers.media.s3 import LISTING_LAG_S, PENDING_MAX, S3Ledger
from samovar.cache_tiers.media.s3_client import S3Keys


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
        self.bad_snapshot: dict[Address, int] = {}

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
        self.ledger.set_bad(address(number), size)
        self.bad.pop(address(number), None)
        if size is not None:
            self.bad[address(number)] = size

    @rule(number=st.integers(0, 255))
    def add_pending(self, number: int) -> None:
        self.ledger.add_pending(address(number))
        assert address(number) in self.ledger.pending

    @rule(number=st.integers(0, 255))
    def settle(self, number: int) -> None:
        self.ledger.settle(address(number))
        assert address(number) not in self.ledger.pending

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin(self) -> None:
        self.ledger.begin_listing()
        self.snapshot, self.bad_snapshot = dict(self.there), dict(self.bad)

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def end(self) -> None:
        assert self.snapshot is not None
        self.ledger.end_listing(self.snapshot, 0, self.bad_snapshot)
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


def test_pending_deletes_are_bounded() -> None:
    ledger = S3Ledger(0)
    for number in range(PENDING_MAX + 5):
        ledger.add_pending(Address(b"", b"", number.to_bytes(4, "big")))
    assert len(ledger.pending) == PENDING_MAX
    assert ledger.pending[0].extent_id == (5).to_bytes(4, "big")
    ledger.check_integrity()


def test_a_wrong_account_is_found() -> None:
    ledger = S3Ledger(10)
    ledger.set(address(1), 3)
    ledger._sizes[address(2)] = 4
    with pytest.raises(AssertionError, match="3 bytes accounted"):
        ledger.check_integrity()


class LaggingMachine(RuleBasedStateMachine):
    """Against a dict of what lies in the bucket, whose listings are late by up to `LISTING_LAG_S`."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ledger = S3Ledger(1000, lambda: self.now_s)
        self.there: dict[Address, int] = {}
        self.was: list[tuple[float, dict[Address, int]]] = [(0.0, {})]

    @rule(number=st.integers(0, 3), size=st.integers(1, 200))
    def put(self, number: int, size: int) -> None:
        if address(number) in self.there:  # a record is put where none is
            return
        self.ledger.reserve(address(number), size)
        self.there[address(number)] = size
        self.was.append((self.now_s, dict(self.there)))

    @rule(number=st.integers(0, 3))
    def delete(self, number: int) -> None:
        self.ledger.gone(address(number))
        self.there.pop(address(number), None)
        self.was.append((self.now_s, dict(self.there)))

    @rule(seconds=st.sampled_from((1.0, 20.0, 70.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(late=st.floats(0.0, 1.0))
    def listing(self, late: float) -> None:
        self.ledger.begin_listing()
        shown_s = self.now_s - late * LISTING_LAG_S
        shown = [there for at_s, there in self.was if at_s <= shown_s]
        self.ledger.end_listing(shown[-1] if shown else {}, 0, {})

    @invariant()
    def is_never_below(self) -> None:
        self.ledger.check_integrity()
        for one, size in self.there.items():
            assert self.ledger.size_of(one) is not None, f"{size} bytes are not counted"

    def teardown(self) -> None:
        self.now_s += LISTING_LAG_S + 1.0
        self.ledger.begin_listing()
        self.ledger.end_listing(self.there, 0, {})
        assert self.ledger.bytes_held == sum(self.there.values()), "nor is it for ever above"


TestLagging = LaggingMachine.TestCase
TestLagging.settings = settings(derandomize=True, deadline=None, max_examples=60)


def test_changes_are_forgotten_that_every_listing_shows() -> None:
    now_s = 0.0
    ledger = S3Ledger(10**9, lambda: now_s)
    for number in range(1000):
        now_s = float(number)
        ledger.set(Address(b"", b"", number.to_bytes(4, "big")), 1)
    assert len(ledger._changed_s) == LISTING_LAG_S + 1
