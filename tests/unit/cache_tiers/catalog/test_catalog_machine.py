"""The catalog against a plain model of it and of the tiers' real bytes: random histories, books checked
after each step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samovar.cache_tiers.blocks.extent import (
    KEY_BYTES,
    ROOT,
    Address,
    Clear,
    ExtentHeader,
    Placement,
    session_of,
)
from samovar.cache_tiers.blocks.tiers import TIERS, TierName
from samovar.cache_tiers.catalog.transfers import Transfer
from samovar.cache_tiers.catalog.types import Eviction, Held, Pin, ReservationRefused
from samovar.cache_tiers.media.tier import Scanned
from samovar.cache_tiers.messages import BlockRange
from tests.support.amounts import examples
from tests.support.inside import registry_of
from tests.support.nodes.catalog_world import (
    ALICE,
    ALL,
    BOB,
    SHAPE,
    World,
    header,
    landed,
    lookup,
    record_bytes,
    tag,
)

SESSIONS = [tag("s1"), tag("s1______side"), tag("s2")]  # the second is another lineage of the first's session
TENANTS = [ALICE, BOB]
PLACEMENTS = [
    Placement(min_ttl_s=0.0, ttl_s=1e6),
    Placement(min_ttl_s=100.0, ttl_s=1e6),
    Placement(min_ttl_s=5.0, ttl_s=50.0, lowest="nvme"),
]
CONVERSATIONS = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 14, 15, 16), (21, 22, 23)]
POWERS: list[tuple[TierName, ...]] = [(), ("cpu",), ("nvme",), ("s3",), ("s3", "cpu"), ("s3", "nvme")]
BIG_EXTENT = record_bytes(header(CONVERSATIONS[0]))

tiers = st.sampled_from(ALL)
tenants = st.sampled_from(TENANTS)
sessions = st.sampled_from(SESSIONS)


@st.composite
def headers(draw: st.DrawFn) -> ExtentHeader:
    ids = draw(st.sampled_from(CONVERSATIONS))
    first = draw(st.integers(0, len(ids) - 1))
    end = draw(st.integers(first + 1, len(ids)))
    return header(
        ids[:end],
        first,
        tenant=draw(tenants),
        session=draw(sessions),
        tail_tokens=draw(st.sampled_from([0, 0, 0, 3])),
        # One placement for an extent: the catalog keeps the first it is told.
        placement=PLACEMENTS[(first + end) % len(PLACEMENTS)],
    )


class CatalogMachine(RuleBasedStateMachine):
    """`held`, `real` and `sessions` are the model; whom to evict is the catalog's choice, and judged."""

    @initialize(extents=st.integers(2, 4), share=st.sampled_from([1.0, 1.0, 0.7]))
    def start(self, extents: int, share: float) -> None:
        budgets: dict[TierName, int] = {
            "cpu": extents * BIG_EXTENT,
            "nvme": 2 * extents * BIG_EXTENT,
            "s3": 4 * extents * BIG_EXTENT,
        }
        self.world = World(budgets, dict.fromkeys(TENANTS, share), tombstones_max=3)
        self.catalog = self.world.catalog
        for tenant in TENANTS:  # whoever stores has asked before
            for session in SESSIONS:
                self.catalog.find(lookup([], tenant=tenant, session=session), ())
        self.headers: dict[Address, ExtentHeader] = {}
        self.held: dict[tuple[TierName, Address], int] = {}
        self.real: dict[tuple[TierName, Address], int] = {}  # what lies in the tiers
        self.flying: list[tuple[Transfer, bool]] = []  # with: is it fenced?
        self.ended: list[Transfer] = []
        self.due: list[Eviction] = []
        self.gone: list[Eviction] = []
        self.pins: list[Pin] = []
        self.cleared: dict[tuple[bytes, bytes | None], int] = {}
        self.lookups: dict[bytes, set[bytes]] = {}

    # Steps of the model.

    def evicted(self, evictions: tuple[Eviction, ...] | list[Eviction], *, may_be_pinned: bool) -> None:
        pinned = {(pin.tier, pin.address) for pin in self.pins if pin.generation in self.generations()}
        for eviction in evictions:
            slot = eviction.tier, eviction.address
            assert self.held.pop(slot) == eviction.nbytes
            assert may_be_pinned or slot not in pinned, "a pinned copy was evicted"
            self.due.append(eviction)

    def generations(self) -> set[int]:
        return {copy.generation for extent in registry_of(self.catalog) for copy in extent.copies.values()}

    def claimed(self) -> set[tuple[TierName, Address]]:
        """What is being written or deleted."""
        flights = {(flight.tier, flight.address) for flight, _ in self.flying}
        return flights | {(eviction.tier, eviction.address) for eviction in self.due}

    def delete(self, eviction: Eviction) -> None:
        self.real.pop((eviction.tier, eviction.address), None)
        self.catalog.dropped(eviction)
        self.due.remove(eviction)
        self.gone.append(eviction)

    def forgotten(self, before: set[Address]) -> None:
        """Transfers of extents that were forgotten are fenced."""
        known = {extent.address for extent in registry_of(self.catalog)}
        self.flying = [
            (flight, fenced or (flight.address in before and flight.address not in known))
            for flight, fenced in self.flying
        ]

    def answered(
        self, answer: Transfer | Held | ReservationRefused, tier: TierName, address: Address
    ) -> None:
        is_busy = (tier, address) in self.claimed()
        if isinstance(answer, Held):
            assert (tier, address) in self.held
        elif isinstance(answer, Transfer):
            assert (tier, address) not in self.held
            assert not is_busy
            assert answer.generation not in {flight.generation for flight, _ in self.flying}
            self.evicted(answer.victims, may_be_pinned=False)
            self.flying.append((answer, False))
        elif answer.reason == "busy":
            assert is_busy
        elif answer.reason == "full":
            assert self.pins or self.flying or self.due, "nothing was in the way"

    # What happens.

    @rule(tier=tiers, data=st.data())
    def store_at_once(self, tier: TierName, data: st.DataObject) -> None:
        """The usual case, so that the tiers are full most of the time."""
        for of in data.draw(st.lists(headers(), min_size=2, max_size=5)):
            self.store(tier, of, 0)
            if self.flying and self.flying[-1][0].address == of.address:
                self.land(self.flying[-1])

    @rule(tier=tiers, data=st.data())
    def copy_at_once(self, tier: TierName, data: st.DataObject) -> None:
        for _, address in data.draw(st.permutations(list(self.held)))[:2]:
            self.copy(tier, self.headers[address])
            if self.flying and self.flying[-1][0].address == address:
                self.land(self.flying[-1])

    @rule(tier=tiers, of=headers(), lag=st.sampled_from([0, 1, 2]))
    def store(self, tier: TierName, of: ExtentHeader, lag: int) -> None:
        seq = max(0, self.catalog.clears.seq - lag)
        self.headers.setdefault(of.address, of)
        answer = self.catalog.reserve(tier, of, record_bytes(of), clear_seq=seq)
        last = max(
            self.cleared.get((of.tenant, None), 0), self.cleared.get((of.tenant, session_of(of.session)), 0)
        )
        is_late = answer == ReservationRefused("tombstone")
        assert is_late or seq >= last, "what was cleared came back"
        assert not is_late or seq < self.catalog.clears.seq
        assert (answer == ReservationRefused("placement")) == (not is_late and not of.placement.allows(tier))
        self.answered(answer, tier, of.address)

    @rule(tier=tiers, of=headers())
    def copy(self, tier: TierName, of: ExtentHeader) -> None:
        answer = self.catalog.reserve_copy(tier, of.address)
        is_held = any(address == of.address for _, address in self.held)
        assert (answer == ReservationRefused("gone")) == (not is_held)
        self.answered(answer, tier, of.address)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def write_and_commit(self, data: st.DataObject) -> None:
        self.land(data.draw(st.sampled_from(self.flying)))

    def land(self, one: tuple[Transfer, bool]) -> None:
        flight, is_fenced = one
        for victim in flight.victims:
            if victim in self.due:
                self.delete(victim)
        self.real[flight.tier, flight.address] = flight.nbytes
        self.real_fits()
        assert landed(self.catalog, flight) == (not is_fenced)
        if is_fenced:
            del self.real[flight.tier, flight.address]
            self.catalog.abandon(flight)
        else:
            self.held[flight.tier, flight.address] = flight.nbytes
        self.flying.remove((flight, is_fenced))
        self.ended.append(flight)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        flight = data.draw(st.sampled_from(self.flying))
        self.catalog.abandon(flight[0])
        self.flying.remove(flight)
        self.ended.append(flight[0])

    @precondition(lambda self: self.due)
    @rule(data=st.data())
    def delete_one(self, data: st.DataObject) -> None:
        self.delete(data.draw(st.sampled_from(self.due)))

    @precondition(lambda self: self.ended or self.gone)
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """Duplicates and completions of generations that have ended."""
        ended: list[Transfer | Eviction] = [*self.ended, *self.gone]
        late = data.draw(st.sampled_from(ended))
        if isinstance(late, Eviction):
            self.catalog.dropped(late)
        else:
            assert not self.catalog.commit(late)
            self.catalog.abandon(late)

    @rule(tier=tiers, of=headers())
    def pin(self, tier: TierName, of: ExtentHeader) -> None:
        pin = self.catalog.pin(of.address, tier)
        assert (pin is not None) == ((tier, of.address) in self.held)
        if pin is not None:
            self.pins.append(pin)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin_some(self, data: st.DataObject) -> None:
        for tier, address in data.draw(st.permutations(list(self.held)))[:3]:
            self.pin(tier, self.headers[address])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        self.catalog.unpin(pin)
        self.pins.remove(pin)

    @rule(tier=tiers, of=headers())
    def lose(self, tier: TierName, of: ExtentHeader) -> None:
        lost = self.catalog.lose(of.address, tier)
        assert (lost is not None) == ((tier, of.address) in self.held)
        self.evicted([lost] if lost else [], may_be_pinned=True)

    @rule(tenant=tenants, session=st.one_of(st.none(), sessions), luck=st.integers(0, 2))
    def clear(self, tenant: bytes, session: bytes | None, luck: int) -> None:
        if luck:
            return
        before = {extent.address: set(extent.sessions) for extent in registry_of(self.catalog)}
        evictions = self.catalog.clear(Clear(tenant, session))
        self.cleared[tenant, session and session_of(session)] = self.catalog.clears.seq
        self.evicted(evictions, may_be_pinned=True)
        self.forgotten(set(before))
        for _, address in self.held:
            if address.tenant == tenant:
                assert session is not None, "a cleared tenant's extent is still held"
                others = {session_of(tag) for tag in before[address]} - {session_of(session)}
                assert others, "a session's own extent survived its clear"

    @rule(
        seconds=st.sampled_from([0.0, 1.0, 4.0, 20.0, 60.0, -1e6]),
        extents_max=st.sampled_from([1, 1024]),
    )
    def time_goes_by(self, seconds: float, extents_max: int) -> None:
        before = {extent.address for extent in registry_of(self.catalog)}
        self.world.clock.now_s += seconds
        evictions = self.catalog.expired(extents_max)
        assert all(eviction.reason == "expired" for eviction in evictions)
        self.evicted(evictions, may_be_pinned=True)
        self.forgotten(before)

    @rule(tier=tiers, of=headers(), idle_s=st.sampled_from([-1e9, 0.0, 10.0, 1e9]))
    def adopt(self, tier: TierName, of: ExtentHeader, idle_s: float) -> None:
        slot = tier, of.address
        nbytes = record_bytes(of)
        is_known = slot in self.held or slot in self.claimed()
        self.headers.setdefault(of.address, of)
        # A scan sees what lies there: beyond the budget there is nothing, the tier itself saw to that, nor
        # would it take what is being written besides.
        flying = sum(flight.nbytes for flight, _ in self.flying if flight.tier == tier)
        if not is_known and self.real_bytes(tier) + flying + nbytes > self.world.budgets[tier]:
            return
        evictions = self.catalog.adopt(tier, Scanned(of, nbytes, 5000.0 - idle_s), 5000.0)
        if is_known:
            assert evictions == ()
            return
        self.real[slot] = nbytes
        self.held[slot] = nbytes
        self.evicted(evictions, may_be_pinned=False)

    @rule(tier=st.sampled_from(["cpu", "nvme"]), share=st.sampled_from([0.0, 0.5, 1.0]))
    def sinking(self, tier: TierName, share: float) -> None:
        below = TIERS[TIERS.index(tier) + 1]
        cold = self.catalog.sinking(tier, below, share)
        assert len(set(cold)) == len(cold)
        for address in cold:
            assert (tier, address) in self.held
            assert (below, address) not in self.held
            assert self.headers[address].placement.allows(below)

    @rule(
        ids=st.sampled_from(CONVERSATIONS),
        tenant=tenants,
        session=sessions,
        up=st.sampled_from([*POWERS, *[ALL] * 8]),
    )
    def find(self, ids: tuple[int, ...], tenant: bytes, session: bytes, up: tuple[TierName, ...]) -> None:
        asked = lookup(ids, tenant=tenant, session=session)
        spans, tails = self.catalog.find(asked, up)
        keys = [asked.keys[at : at + KEY_BYTES] for at in range(0, len(asked.keys), KEY_BYTES)]
        found: dict[int, TierName] = {}
        end = 0
        for span in spans:
            assert span.first >= end, "spans overlap or are out of order"
            assert span.blocks > 0
            end = span.first + span.blocks
            of = self.header_of(span, tenant)
            assert of.keys[span.offset : span.offset + span.blocks] == tuple(keys[span.first : end])
            assert span.nbytes == record_bytes(of) - (of.blocks - span.blocks) * SHAPE.block_bytes
            found |= dict.fromkeys(range(span.first, end), span.tier)
        best: dict[int, TierName] = {}
        wanted_tails = set()
        for tier in reversed([tier for tier in TIERS if tier in up]):
            for place, address in self.held:
                if place == tier and address.tenant == tenant:
                    of = self.headers[address]
                    best |= {keys.index(key): tier for key in of.keys if key in keys}
                    behind = of.keys[-2] if of.blocks > 1 else of.parent
                    if of.token_counts[-1] < SHAPE.block_tokens and behind in [ROOT, *keys]:
                        wanted_tails.add((of.keys[-1], address.extent_id))
        assert found == best, "a block was missed, or comes from a dearer tier than it could"
        assert {(tail.key, tail.span.extent_id) for tail in tails} == wanted_tails
        for tail in tails:
            of = self.header_of(tail.span, tenant)
            assert of.token_counts[-1] == tail.tokens
            assert of.first_block + tail.span.offset == tail.span.first == of.first_block + of.blocks - 1

    def header_of(self, span: BlockRange, tenant: bytes) -> ExtentHeader:
        assert span.tenant == tenant
        (of,) = (
            self.headers[address]
            for tier, address in self.held
            if tier == span.tier and address.extent_id == span.extent_id and address.tenant == tenant
        )
        return of

    # What always holds.

    def real_bytes(self, tier: TierName) -> int:
        return sum(nbytes for (place, _), nbytes in self.real.items() if place == tier)

    @invariant()
    def real_fits(self) -> None:
        for tier in TIERS:
            real = self.real_bytes(tier)
            assert real <= self.catalog.usage(tier).bytes_accounted, f"{tier}: accounted less than is there"
            assert real <= self.world.budgets[tier], f"{tier}: more than its budget"

    @invariant()
    def the_books_are_right(self) -> None:
        self.catalog.check_integrity()
        for tier in TIERS:
            held = {address: nbytes for (place, address), nbytes in self.held.items() if place == tier}
            flights = [flight for flight, _ in self.flying if flight.tier == tier]
            due = [eviction for eviction in self.due if eviction.tier == tier]
            usage = self.catalog.usage(tier)
            assert usage.extents == len(held)
            assert usage.blocks == sum(self.headers[address].blocks for address in held)
            assert usage.tokens == sum(self.headers[address].tokens for address in held)
            booked = sum(flight.nbytes for flight in flights)
            assert usage.bytes_accounted == sum(held.values()) + booked + sum(e.nbytes for e in due)
            for tenant in TENANTS:
                mine = sum(nbytes for address, nbytes in held.items() if address.tenant == tenant)
                mine += sum(flight.nbytes for flight in flights if flight.address.tenant == tenant)
                assert self.catalog.tenant_bytes(tier, tenant) == mine
                assert mine <= self.world.shares[tenant] * self.world.budgets[tier], "over its share"
        for address in {address for _, address in self.held}:
            copies = tuple(tier for tier in TIERS if (tier, address) in self.held)
            assert self.catalog.copies(address) == copies


CatalogMachine.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=examples(150), stateful_step_count=40
)
test_the_catalog_against_a_plain_model = CatalogMachine.TestCase
