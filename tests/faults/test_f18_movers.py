"""F18: movers that race, messages that come twice or late, in one catalog. Nodes: `test_f18_nodes.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from samovar.cache_tiers.blocks.extent import Address, Clear
from samovar.cache_tiers.blocks.tiers import TierName
from samovar.cache_tiers.catalog.index import HeldExtent
from samovar.cache_tiers.catalog.transfers import Transfer, TransferTable, _Drop
from samovar.cache_tiers.catalog.types import Eviction, ReservationRefused
from tests.support.nodes.catalog_world import ALICE, BOB, World, header, landed, record_bytes, tag

T = TypeVar("T")

RACES, RACE_STEPS = 40, 120
TIERS: tuple[TierName, ...] = ("cpu", "nvme")
SESSIONS = (tag("s1"), tag("s2"))
NBYTES = record_bytes(header([0, 1]))


def test_f18_a_commit_after_a_clear_and_new_reservations_changes_nothing() -> None:
    world = World()
    of = header(range(3))
    old = world.reserved("nvme", of)
    assert world.catalog.clear(Clear(ALICE)) == []
    elsewhere = world.reserved("cpu", of)  # new life, while the old write is still out
    for _ in range(2):
        assert not world.catalog.commit(old)
        world.catalog.check_integrity()
    assert world.reserve("nvme", of) == ReservationRefused("busy"), "the old record may be there"
    world.catalog.abandon(old)
    world.catalog.check_integrity()
    new = world.reserved("nvme", of)
    assert not world.catalog.commit(old)
    world.catalog.abandon(old)
    world.catalog.check_integrity()
    assert world.finish(elsewhere)
    assert world.spans(range(3)) == [(0, 3, "cpu")]
    assert world.catalog.copies(of.address) == ("cpu",), "what was only reserved is not there"
    assert world.finish(new)
    assert world.catalog.copies(of.address) == ("cpu", "nvme")


@dataclass
class Race:
    """Movers that step when the seed says so, over a medium that remembers whose record lies where.

    Messages are repeated, and those of movers that were given up arrive at any later time.
    """

    rng: random.Random
    world: World = field(default_factory=lambda: World({"cpu": 3 * NBYTES, "nvme": 4 * NBYTES, "s3": 0}))
    medium: dict[tuple[TierName, Address], int] = field(default_factory=dict)  # -> who wrote it
    flights: dict[int, Transfer] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)
    over: list[Transfer] = field(default_factory=list)
    deletes: list[Eviction] = field(default_factory=list)
    deleted: list[Eviction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.extents = [
            header([10 * number, number], tenant=tenant, session=session)
            for number, (tenant, session) in enumerate(
                (tenant, session) for tenant in (ALICE, BOB) for session in SESSIONS for _ in range(2)
            )
        ]

    def step(self) -> None:
        steps = (self.reserve, self.write, self.finish, self.give_up, self.repeat, self.delete, self.lose)
        self.rng.choices((*steps, self.clear), (8, 6, 6, 2, 8, 6, 2, 1))[0]()
        self.check()

    def reserve(self) -> None:
        of, tier = self.rng.choice(self.extents), self.rng.choice(TIERS)
        catalog = self.world.catalog
        if self.rng.random() < 0.4:
            answer = catalog.reserve_copy(tier, of.address)
        else:
            answer = catalog.reserve(tier, of, record_bytes(of), clear_seq=catalog.clears.seq)
        if isinstance(answer, Transfer):
            self.flights[answer.generation] = answer
            self.deletes += answer.victims

    def write(self) -> None:
        """Into the medium, once its victims are gone from there."""
        for flight in self._some(list(self.flights.values())):
            if not set(flight.victims) & set(self.deletes):
                self.medium[flight.tier, flight.address] = flight.generation
                self.written.add(flight.generation)

    def finish(self) -> None:
        for flight in self._some([f for f in self.flights.values() if f.generation in self.written]):
            is_held = landed(self.world.catalog, flight)
            assert is_held == (flight.generation not in self.fenced), "a commit that must not, or must, be"
            if not is_held:
                self._take_back(flight)
            self._end(flight)

    def give_up(self) -> None:
        for flight in self._some(list(self.flights.values())):
            self._take_back(flight)
            self._end(flight)

    def repeat(self) -> None:
        """What was said before is said again, however long ago."""
        for flight in self._some(self.over):
            if self.rng.random() < 0.5:
                assert not self.world.catalog.commit(flight), "an old generation was committed"
            else:
                self.world.catalog.abandon(flight)
        for eviction in self._some(self.deleted):
            self.world.catalog.dropped(eviction)

    def delete(self) -> None:
        for eviction in self._some(self.deletes):
            self.medium.pop((eviction.tier, eviction.address), None)
            self.world.catalog.dropped(eviction)
            self.deletes.remove(eviction)
            self.deleted.append(eviction)

    def lose(self) -> None:
        eviction = self.world.catalog.lose(self.rng.choice(self.extents).address, self.rng.choice(TIERS))
        self.deletes += [eviction] if eviction else []

    def clear(self) -> None:
        of = self.rng.choice(self.extents)
        session = of.session if self.rng.random() < 0.7 else None
        self.deletes += self.world.catalog.clear(Clear(of.tenant, session))
        gone = {e.address for e in self.extents if e.tenant == of.tenant and session in (None, e.session)}
        self.fenced |= {g for g, flight in self.flights.items() if flight.address in gone}
        assert not any(self.world.catalog.copies(address) for address in gone), "cleared, and still there"

    def check(self) -> None:
        catalog = self.world.catalog
        catalog.check_integrity()
        for of in self.extents:
            for tier in catalog.copies(of.address):
                pin = catalog.pin(of.address, tier)
                assert pin is not None
                catalog.unpin(pin)
                assert self.medium.get((tier, of.address)) == pin.generation, (
                    "held, but another one lies there"
                )
        for tier in TIERS:
            lies = sum(NBYTES for place, _ in self.medium if place == tier)
            assert catalog.usage(tier).bytes_accounted >= lies, "more lies there than is known of"

    def _take_back(self, flight: Transfer) -> None:
        if self.medium.get((flight.tier, flight.address)) == flight.generation:
            del self.medium[flight.tier, flight.address]
        self.world.catalog.abandon(flight)

    def _end(self, flight: Transfer) -> None:
        del self.flights[flight.generation]
        self.over.append(flight)

    def _some(self, of: list[T]) -> list[T]:
        """One of them, if there is one."""
        return [self.rng.choice(of)] if of else []


def races() -> list[Race]:
    runs = [Race(random.Random(seed)) for seed in range(RACES)]
    for run in runs:
        for _ in range(RACE_STEPS):
            run.step()
    return runs


def test_f18_racing_movers_and_repeated_messages_leave_one_owner_and_right_books() -> None:
    runs = races()
    assert sum(len(run.over) for run in runs) > 10 * RACES
    assert sum(len(run.fenced) for run in runs) > RACES / 2


def any_generation(table: TransferTable, transfer: Transfer) -> bool:
    """The fence, off: whatever is on its way to that place is what is meant."""
    now = table._claims.get((transfer.tier, transfer.address))
    if not isinstance(now, Transfer):
        return False
    now.state = "verified"
    return REAL_COMMIT(table, now)


def any_drop(table: TransferTable, eviction: Eviction) -> None:
    now = table._claims.get((eviction.tier, eviction.address))
    REAL_DROPPED(table, now.eviction if isinstance(now, _Drop) else eviction)


def no_fence(_table: TransferTable, _extent: HeldExtent) -> None:
    """A clear that does not stop what is on its way."""


REAL_COMMIT, REAL_DROPPED = TransferTable.commit, TransferTable.dropped


@pytest.mark.parametrize(
    ("method", "bug", "told"),
    [
        ("commit", any_generation, "an old generation was committed"),
        ("dropped", any_drop, "more lies there than is known of"),
        ("fence", no_fence, "a transfer's extent is forgotten"),
    ],
)
def test_f18_fires_when_the_fence_is_off(
    monkeypatch: pytest.MonkeyPatch, method: str, bug: Callable[..., object], told: str
) -> None:
    monkeypatch.setattr(TransferTable, method, bug)
    with pytest.raises(AssertionError, match=told):
        races()
