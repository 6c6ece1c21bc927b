"""What replicas and users ask of the nodes, and whether each answer may be so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from samovar.cache_tiers.blocks import Address, BadRecord, Placement
from samovar.cache_tiers.blocks import record as codec
from samovar.cache_tiers.blocks.extent import KEY_BYTES
from samovar.cache_tiers.messages import (
    BadReport,
    BlockRange,
    Fetch,
    Fetched,
    FetchFailed,
    Lookup,
    LookupResult,
    StoreRequest,
)
from samovar.cache_tiers.node import TierNode
from samovar.cache_tiers.transport import PeerError, PeerLate
from samovar.router.erasure import Erasure
from samovar.router.openai import ApiError
from tests.support.inside import state_of
from tests.world.door import Door
from tests.world.faults import Faults
from tests.world.machine import Machine
from tests.world.model import SHAPE, Conversation, tag
from tests.world.network import CLIENT, Network
from tests.world.returns import over
from tests.world.scheduler import Scheduler

T = TypeVar("T")
LOOKUP_S_MAX = 2.0
OFFER_S_MAX = 1.0
OVER_S_MAX = 5.0
SLACK_S = 1.0
TURNS_MAX = 5
PLACEMENTS = (
    Placement(first="cpu", write_behind=("nvme",), min_ttl_s=0.0),
    Placement(first="cpu", write_behind=("nvme", "s3"), min_ttl_s=10.0),
    Placement(first="nvme", write_behind=("cpu",), min_ttl_s=0.0),
    Placement(first="cpu", write_behind=(), lowest="cpu", min_ttl_s=0.0),
    Placement(first="cpu", write_behind=("s3",), min_ttl_s=0.0, ttl_s=200.0),
)
VERIFIED = ("cpu", "peer")
"""What comes from there was verified by a node, and nothing here spoils memory or calls."""


def _look_here(lookup: Lookup, node: TierNode) -> LookupResult:
    return node.lookup_here(lookup)


class Clients:
    """Users of some tenants, and what they know of their conversations. `seen`: what happened, by name."""

    def __init__(
        self,
        here: Scheduler,
        faults: Faults,
        network: Network,
        machines: Sequence[Machine],
        door: Door,
        seen: Counter[str],
        seed: int,
        tenants: int,
    ) -> None:
        self._here = here
        self._faults = faults
        self._network = network
        self._machines = machines
        self._door = door
        self._seen = seen
        self._rng = random.Random(f"clients {seed}")
        self._number = 0
        self.pause_s = 1.0
        """Of each client between two requests, on average."""
        self.tells_turns = False
        """Whether nodes hear of the turns: where they learn who comes back."""
        self.now: dict[tuple[bytes, bytes], Conversation] = {}
        self.past: list[Conversation] = []
        for tenant in range(tenants):
            for session in range(3):
                self._begin(tag("tenant", tenant), tag("session", session))

    @property
    def all(self) -> list[Conversation]:
        named = [*self.now.values(), *self.past]
        return [*named, *(other for one in named for other in one.others.values())]

    def live(self, until_s: float) -> None:
        """One client's life: one request after the other, at any node, of any tenant."""
        kinds = ["turn", "read", "ghost", "stale", "foreign", "demote", "erase", "erase tenant"]
        while self._here.now_s < until_s:
            self._here.sleep(self._rng.expovariate(1.0 / self.pause_s))
            kind = self._rng.choices(kinds, [40, 15, 8, 6, 3, 4, 6, 1])[0]
            talked = [one for one in self.now.values() if one.turns or not kind.startswith("erase")]
            conversation = self._rng.choice(talked or list(self.now.values()))
            machine = self._rng.choice(self._machines)
            try:
                self._do(kind, conversation, machine)
            except PeerError as error:
                self._seen[f"client: {type(error).__name__}"] += 1

    def _do(self, kind: str, conversation: Conversation, machine: Machine) -> None:
        if kind in ("turn", "read"):
            self.turn(conversation, machine, adds=kind == "turn")
        elif kind in ("ghost", "stale"):
            erased = [one for one in self.past if one.erased_s is not None and one.turns]
            if erased:
                one = self._rng.choice(erased[-8:])
                (self.ghost if kind == "ghost" else self._stale)(one, machine)
        elif kind == "foreign":
            self._foreign(conversation, machine)
        elif kind == "demote":
            self._demote(conversation, machine)
        else:
            self.erase(conversation.tenant, None if kind == "erase tenant" else conversation.session)

    def has(self, machine: Machine, address: Address) -> bool:
        """Whether a node knows of an extent, in any tier that it can read."""
        return machine.node is not None and bool(state_of(machine.node).catalog.copies(address))

    # -- requests of a replica --------------------------------------------------------------

    def turn(
        self,
        conversation: Conversation,
        machine: Machine,
        *,
        adds: bool = True,
        peers: Sequence[str] | None = None,
    ) -> int:
        """Look up, load, and store what was missing, and the next turn; return the blocks loaded.

        `peers`: nodes that are asked as well; None: any two.
        """
        turns = min(conversation.turns + adds, TURNS_MAX)
        if conversation.is_closed or not turns:
            return 0
        conversation.looking += 1
        began_s = self._here.now_s
        self._door.keep(conversation.tenant + conversation.session + conversation.number.to_bytes(4, "big"))
        try:
            found = self._look(conversation, conversation.chain(turns), machine, peers)
        finally:
            conversation.looking -= 1
        conversation.turns = max(conversation.turns, turns)
        loaded = sum(self._load(conversation, span, machine) for span in found.spans)
        self._here.sleep(self._rng.choice((0.0, 0.1, 2.0)) * self._rng.random())
        have = {block for span in found.spans for block in range(span.first, span.first + span.blocks)}
        for number in range(turns):
            extent = conversation.extent(number)
            if not have.issuperset(range(extent.first, extent.end)):
                self._offer(conversation, number, found, machine)
        if self.tells_turns:
            told = over(
                conversation.tenant,
                conversation.session,
                conversation.chain(turns),
                self._here.now_s - began_s,
            )
            self._ask(machine, "turn over", lambda node: node.turn_over(told), OVER_S_MAX)
        return loaded

    def _look(
        self, conversation: Conversation, chain: bytes, machine: Machine, peers: Sequence[str] | None = None
    ) -> LookupResult:
        others = [one.name for one in self._machines if one is not machine]
        asked = self._rng.sample(others, min(len(others), 2))
        if peers is not None:
            asked = [name for name in peers if name in others]
        lookup = self._lookup(conversation, chain, *asked)
        found = self._ask(machine, "lookup", lambda node: node.lookup(lookup), LOOKUP_S_MAX)
        for span in found.spans:
            self._seen[f"found in {span.tier}"] += 1
            if span.tenant != conversation.tenant:
                self._here.violate("another tenant's", f"{conversation.name} finds a span of another tenant")
        if not found.spans:
            self._seen["found nowhere"] += 1
        return found

    def _lookup(self, conversation: Conversation, chain: bytes, *peers: str) -> Lookup:
        return Lookup(
            *(conversation.namespace, chain, conversation.tenant, conversation.session, peers),
            starts_turn=self.tells_turns and conversation.looking > 0,
        )

    def _load(self, conversation: Conversation, span: BlockRange, machine: Machine) -> int:
        """Fetch and verify as a replica does; what it takes is compared with the truth."""
        deadline_s = self._rng.choice((0.5, 2.0, 5.0))
        fetched = self._fetch(conversation, span, machine, deadline_s)
        if isinstance(fetched, FetchFailed):
            self._seen[f"not fetched: {fetched.reason}"] += 1
            return 0
        assert fetched.data is not None
        self._seen[f"fetched from {fetched.tier}"] += 1
        keys = self._keys(conversation, span)
        try:
            header = codec.decode_header(fetched.data)
            codec.check_belongs(header, conversation.namespace, SHAPE, span.offset, span.first, keys)
            if header.tenant != conversation.tenant:
                self._here.violate("another tenant's", f"{conversation.name} is served another's record")
            payload = fetched.data[codec.header_bytes(header.blocks, SHAPE.layers) :]
            good = codec.good_blocks(header, payload, fetched.first)
            if fetched.first + good < span.offset + span.blocks:
                raise BadRecord("checksum", f"{good} blocks are good")
        except BadRecord as error:
            self._bad(conversation, span, fetched, error, machine)
            return 0
        at = (span.offset - fetched.first) * SHAPE.block_bytes
        got = payload[at : at + span.blocks * SHAPE.block_bytes].tobytes()
        if got != self._truth(conversation, span):
            self._here.violate("a wrong byte", f"{conversation.name} from {fetched.tier} of {machine.name}")
        return span.blocks

    def _bad(
        self,
        conversation: Conversation,
        span: BlockRange,
        fetched: Fetched,
        error: BadRecord,
        machine: Machine,
    ) -> None:
        self._seen[f"bad record: {error.kind}"] += 1
        if fetched.tier in VERIFIED:
            what = f"{conversation.name} from {fetched.tier} of {machine.name}: {error}"
            self._here.violate("served unverified", what)
        report = BadReport(
            conversation.namespace, conversation.tenant, span.extent_id, fetched.tier or span.tier, error.kind
        )
        self._ask(machine, "report", lambda node: node.report([report]), 60.0)

    def _fetch(
        self, conversation: Conversation, span: BlockRange, machine: Machine, deadline_s: float
    ) -> Fetched | FetchFailed:
        fetch = Fetch(
            *(conversation.namespace, conversation.tenant, span.extent_id, span.offset, span.blocks),
            tier=span.tier,
            deadline_s=deadline_s,
            node=span.node,
        )
        return self._ask(machine, "fetch", lambda node: node.fetch(fetch), deadline_s + SLACK_S)

    def _offer(self, conversation: Conversation, number: int, found: LookupResult, machine: Machine) -> None:
        extent = conversation.extent(number)
        offer = StoreRequest(number, extent.header, extent.record.nbytes, found.incarnation, found.clear_seq)
        records = {number: extent.record}
        reply = self._ask(machine, "offer", lambda node: node.offer([offer], records), OFFER_S_MAX)
        self._seen[f"offer: {reply.outcomes[0]}"] += 1

    def _ask(self, machine: Machine, what: str, run: Callable[[TierNode], T], timeout_s: float) -> T:
        """Ask a node; that it is late is never so."""
        process = machine.process
        try:
            return self._network.call(CLIENT, machine.name, what, run, timeout_s)
        except PeerLate:
            stacks = [
                self._here.stack_of(task) for task in (process.tasks if process else ()) if task.name == what
            ]
            self._here.violate("late", f"a {what} of {machine.name} after {timeout_s:.2f} s")
            self._here.told.extend(stacks[:3])
            raise

    def _keys(self, conversation: Conversation, span: BlockRange) -> tuple[bytes, ...]:
        chain = conversation.chain(TURNS_MAX)
        ends = range(span.first, span.first + span.blocks)
        return tuple(chain[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in ends)

    def _truth(self, conversation: Conversation, span: BlockRange) -> bytes:
        parts = [conversation.extent(number) for number in range(TURNS_MAX)]
        whole = b"".join(part.payload for part in parts)
        return whole[span.first * SHAPE.block_bytes : (span.first + span.blocks) * SHAPE.block_bytes]

    # -- what must not be -------------------------------------------------------------------

    def ghost(self, conversation: Conversation, machine: Machine) -> None:
        """Look for what was erased."""
        if machine.name in conversation.away and machine.has_not_listed():
            return
        found = self._look(conversation, conversation.chain(conversation.turns), machine)
        if found.spans or found.tails:
            tiers = sorted({span.tier for span in found.spans})
            self._here.violate("erased and found", f"{conversation.name} in {tiers} of {machine.name}")

    def _stale(self, conversation: Conversation, machine: Machine) -> None:
        """Fetch what was erased by what was known of it before."""
        extent = conversation.extent(self._rng.randrange(conversation.turns))
        other = self._rng.choice(self._machines).name
        tier = self._rng.choice(("cpu", "nvme", "s3", "peer"))
        span = BlockRange(
            extent.header.extent_id, conversation.tenant, extent.first, 0, extent.header.blocks,
            tier, 0, node=other if tier == "peer" else "",
        )  # fmt: skip
        fetched = self._fetch(conversation, span, machine, 2.0)
        if isinstance(fetched, Fetched):
            what = f"{conversation.name} from {tier} of {machine.name}"
            self._here.violate("erased and served", what)

    def _foreign(self, conversation: Conversation, machine: Machine) -> None:
        """Ask for another tenant's blocks, as one's own."""
        others = [one for one in self.now.values() if one.tenant != conversation.tenant and one.turns]
        if not others:
            return
        other = self._rng.choice(others)
        lookup = Lookup(other.namespace, other.chain(other.turns), conversation.tenant, conversation.session)
        found = self._ask(machine, "lookup", lambda node: node.lookup(lookup), LOOKUP_S_MAX)
        if found.spans or found.tails:
            self._here.violate("another tenant's", f"{conversation.name} finds {other.name}")

    # -- requests of users ------------------------------------------------------------------

    def _demote(self, conversation: Conversation, machine: Machine) -> None:
        def run(node: TierNode) -> int:
            return node.sessions.demote(conversation.tenant, conversation.session)

        self._seen["demoted"] += self._ask(machine, "demote", run, 60.0)

    def erase(self, tenant: bytes, session: bytes | None) -> None:
        """Erase, and ask again, until it is done or for some time; what is acknowledged is gone then."""
        closed = [
            one for (whose, name), one in self.now.items() if whose == tenant and session in (None, name)
        ]
        for one in closed:
            one.is_closed = True
            self.past.append(one)
            self._begin(one.tenant, one.session)
        while any(one.looking for one in closed):
            self._here.sleep(0.05)
        names = None if session is None else (session.hex(),)
        what = Erasure("sessions", tenant.hex(), names, at_s=self._here.now_s)
        for _ in range(self._rng.choice((1, 3, 8))):
            lives = {machine.name: machine.lives for machine in self._machines if machine.is_up}
            outcome, message = self._wish(what)
            self._seen[f"erasure: {outcome}"] += 1
            self._here.tell(f"erasure of {[one.name for one in closed]}: {outcome}")
            if outcome == "goes on":
                for one in closed:
                    one.goes_on = True
                    self._others_are_clear(one, message, lives)
            if outcome == "done":
                for one in closed:
                    one.erased_s, one.away = self._here.now_s, frozenset(self._network.left)
                return
            self._here.sleep(self._rng.choice((0.2, 3.0)))

    def _others_are_clear(self, conversation: Conversation, message: str, lives: Mapping[str, int]) -> None:
        """One place that fails stops no other: what the answer does not name is clear.

        `lives`: of the nodes that were up when it was asked. One that has come since was not asked, and hears
        of it as the erasure goes on.
        """
        for machine in self._machines:
            was_asked = machine.is_up and lives.get(machine.name) == machine.lives
            if machine.node is None or not was_asked or machine.name in message or not conversation.turns:
                continue
            lookup = self._lookup(conversation, conversation.chain(conversation.turns))
            look = partial(_look_here, lookup)
            if self._ask(machine, "lookup", look, LOOKUP_S_MAX).spans:
                what = f"{conversation.name} is left at {machine.name}, and the answer was: {message}"
                self._here.violate("one failure stopped others", what)

    def _wish(self, what: Erasure) -> tuple[str, str]:
        bound_s = 60.0
        try:
            self._door.erase(what, bound_s)
        except ApiError as error:
            return ("goes on" if "goes on by itself" in error.message else "refused"), error.message
        except PeerError:
            return "the door died", ""
        except TimeoutError:
            self._here.violate("late", f"an erasure after {bound_s:.0f} s")
            return "late", ""
        return "done", ""

    def _begin(self, tenant: bytes, session: bytes) -> None:
        self._number += 1
        sizes = tuple(self._rng.randint(1, 3) for _ in range(TURNS_MAX))
        placement = self._rng.choice(PLACEMENTS)
        self.now[tenant, session] = Conversation(tenant, session, self._number, sizes, placement)
