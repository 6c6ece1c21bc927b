"""Hands the blocks of idle sessions that only the pool holds to the node's tiers, at shutdown."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from samovar.cache_tiers.blocks import ROOT, TAG_BYTES, block_key
from samovar.cache_tiers.messages import Lookup, LookupResult
from samovar.cache_tiers.pricing import PrefillMeter
from samovar.replicas.kv import PagePool, PrefixEntry
from samovar.replicas.offload.lookups import held_keys
from samovar.replicas.offload.store import StoreContext, StoredChain, TurnStore
from samovar.replicas.offload.tier_client import CompletionQueue, TierLink, begin

logger = logging.getLogger(__name__)

LOOKUPS_MAX = 4
"""Limit of lookups in flight."""


class Handover:
    """Hands the pool's chains to the tiers before a replica stops.

    Most blocks were offered at the end of their turn; this covers those that were not looked up then, found
    no room or have been dropped by a tier since. Highest value first: P(resumes) x seconds saved / bytes.
    Runs on the engine's thread; lookups run in `lane`.

    `horizon_s`: limit, by the pool's clock, of the resumptions that count.
    """

    def __init__(
        self,
        *,
        link: TierLink,
        pool: PagePool,
        turns: TurnStore,
        meter: PrefillMeter,
        lane: Executor,
        arrivals: CompletionQueue,
        horizon_s: float,
    ) -> None:
        self.skipped = 0
        """Chains that cannot be handed over: their owner is unknown, or the tiers do not answer."""
        self._link = link
        self._pool = pool
        self._turns = turns
        self._meter = meter
        self._lane = lane
        self._arrivals = arrivals
        self._horizon_s = horizon_s
        self._known: OrderedDict[bytes, StoreContext] = OrderedDict()  # by owner; longest untouched first
        self._chains: deque[StoredChain] = deque()
        self._entries: dict[int, PrefixEntry] = {}  # page -> its entry when the chains were listed
        self._offered: set[bytes] = set()
        self._looking = self._looking_blocks = 0

    def learned(self, provenance: StoreContext) -> None:
        """Record the tiers' answer at the start of a turn; keeps as many sessions as the pool can hold."""
        self._known[provenance.owner] = provenance
        self._known.move_to_end(provenance.owner)
        if len(self._known) > self._pool.usable:
            self._known.popitem(last=False)

    def begin(self) -> int:
        """List the pool's chains; return their number."""
        valued = []
        for entries in self._pool.index.chains():
            found = self._owner_of(entries)
            if found is None:
                self.skipped += 1
                continue
            provenance, likely = found
            tokens = len(entries) * self._pool.block_tokens
            value = likely * self._meter.price.added_seconds(tokens, 0) / len(entries)
            chain = StoredChain(provenance, [one.key for one in entries], [one.page for one in entries])
            valued.append((value, chain))
            self._entries.update((entry.page, entry) for entry in entries)
        valued.sort(key=lambda pair: pair[0], reverse=True)
        self._chains = deque(chain for _, chain in valued)
        return len(self._chains)

    def advance(self) -> int:
        """Start as many chains as may be in flight; return how many are left. Call until that is 0."""
        while self._chains and self._may_begin(self._chains[0]):
            chain = self._chains.popleft()
            of = chain.provenance
            lookup = Lookup(of.namespace, b"".join(chain.keys), of.owner[:TAG_BYTES], of.owner[TAG_BYTES:])
            if begin(self._lane, self._look, chain, lookup):
                self._looking += 1
                self._looking_blocks += len(chain.keys)
            else:
                self.skipped += 1
        return len(self._chains) + self._looking

    def _may_begin(self, chain: StoredChain) -> bool:
        """Return whether all of a chain fits beside the lookups in flight."""
        blocks = len(chain.keys) + self._looking_blocks
        has_room = self._turns.has_room(blocks, or_none_staged=self._looking == 0)
        return has_room and self._looking < LOOKUPS_MAX

    def _look(self, chain: StoredChain, lookup: Lookup) -> None:
        """Look up a chain, on a lookup thread."""
        found: LookupResult | None = None
        try:
            found = self._link.lookup(lookup)
        except Exception:  # a fault of the tiers costs only this chain
            logger.exception("a lookup failed")
        self._arrivals.post(lambda: self._found(chain, found))

    def _found(self, chain: StoredChain, found: LookupResult | None) -> None:
        self._looking -= 1
        self._looking_blocks -= len(chain.keys)
        index = self._pool.index
        if found is None or any(index.of_page(page) is not self._entries[page] for page in chain.pages):
            self.skipped += 1  # or its pages have been reused meanwhile
            return
        held = held_keys(found, chain.keys) | self._offered
        offered = self._turns.offer_chain(chain, None, held, found.prices)
        self._offered |= offered

    def _owner_of(self, entries: Sequence[PrefixEntry]) -> tuple[StoreContext, float] | None:
        """Return the chain's owner who is most likely to resume, and the probability."""
        owners = sorted(self._pool.owners_of(entries[-1].page) & self._known.keys())
        first, known = entries[0], [self._known[owner] for owner in owners]
        fitting = [one for one in known if block_key(one.namespace, ROOT, first.token_ids) == first.key]
        if not fitting:
            return None
        sessions = self._pool.sessions
        slots = np.array([sessions.slot(one.owner) for one in fitting], dtype=np.intp)
        likely = sessions.probabilities(slots, self._pool.returns.now_s, self._horizon_s)
        best = int(likely.argmax())
        return fitting[best], float(likely[best])
