"""The giving side: another node asks for a whole extent, and gets what a tier of this one has.

Never asks a third node, so two nodes that want something of each other do not wait in a ring. The copy
stays here: whoever took it is asked first from then on, so nobody uses this one, and it goes as the
coldest. Nothing is verified here; who asked does that, and says so (`check`) when it was no good.
"""

from __future__ import annotations

import logging

from cache_tiers.extent import Address, Bytes, TierName
from cache_tiers.guarded_tier import TierDown, TierLate
from cache_tiers.lazy_link import LazyLink
from cache_tiers.link import Export, LinkDown, LinkError
from cache_tiers.messages import ExtentAsk, Fetched, FetchFailed
from cache_tiers.node_books import NodeBooks
from cache_tiers.node_moves import verified
from cache_tiers.node_reads import HandsOut
from cache_tiers.tier import BadRecord, TierError, TierMiss

logger = logging.getLogger("samovar.tiers")

IN_S3 = "in s3"
NO_ROOM = "no room"


class PeerExports:
    """`agent`: the name of this node's link, so that no other one's lease is released."""

    def __init__(self, books: NodeBooks, link: LazyLink, agent: str) -> None:
        self._books = books
        self._link = link
        self._agent = agent

    def export(self, ask: ExtentAsk) -> Export | FetchFailed:
        """Put a copy of the record where the asker can pull it.

        Fails as `_whole` does, and with: down (no NIXL here), no room (in the arena), in s3 (look there).
        """
        ends_s = self._books.clock() + ask.deadline_s
        if self._is_only_in_s3(ask):
            return FetchFailed(IN_S3)
        try:
            link = self._link.get()
            data = self._whole(ask.address, ends_s)
            if isinstance(data, FetchFailed):
                return data
            lease = link.lease(data.nbytes, expires=True)
            if lease is None:
                return FetchFailed(NO_ROOM, f"for {data.nbytes} bytes in the arena")
            try:
                lease.view[: data.nbytes] = data
                return link.export(lease)
            except LinkError:
                link.release(lease.generation)
                raise
        except LinkDown as error:
            self._link.down(error)
            return FetchFailed("down", str(error))

    def release(self, export: Export) -> None:
        """The asker has it, or will not come for it."""
        if export.agent != self._agent:
            return
        try:
            self._link.get().release(export.generation)
        except LinkDown as error:
            logger.info("nothing to release: %s", error)

    def read(self, ask: ExtentAsk) -> Fetched | FetchFailed:
        """The whole record, for Ray to carry."""
        if self._is_only_in_s3(ask):
            return FetchFailed(IN_S3)
        address, books = ask.address, self._books
        guard = books.guards.get("cpu")
        if guard is not None and guard.is_up and isinstance(guard.tier, HandsOut):
            try:
                return Fetched(0, ref=[guard.tier.ref(address)])
            except TierMiss:
                logger.debug("not in main memory")
        data = self._whole(address, books.clock() + ask.deadline_s)
        return data if isinstance(data, FetchFailed) else Fetched(0, data)

    def check(self, ask: ExtentAsk) -> None:
        """Somebody got something else than this extent from here: are the copies what they should be?"""
        books, address = self._books, ask.address
        with books.lock:
            tiers = books.directory.copies(address)
        for tier in tiers:
            try:
                data = self._read(address, tier, books.clock() + ask.deadline_s)
                verified(data, address, data.nbytes)
            except BadRecord as error:
                books.bad(address, tier, error.kind)
            except TierMiss:
                books.lost(address, tier)
            except TierError as error:
                logger.info("a copy that is under suspicion could not be read: %s", error)

    def _is_only_in_s3(self, ask: ExtentAsk) -> bool:
        with self._books.lock:
            return ask.reads_s3 and self._books.directory.copies(ask.address) == ("s3",)

    def _whole(self, address: Address, ends_s: float) -> Bytes | FetchFailed:
        """The record from the cheapest tier that has it, or a failure: gone | error | timeout | down."""
        books = self._books
        with books.lock:
            tiers = books.directory.copies(address)
            books.directory.touch(address)
        failure = FetchFailed("gone")
        for tier in tiers:
            try:
                return self._read(address, tier, ends_s)
            except TierMiss:
                books.lost(address, tier)
            except BadRecord as error:
                books.bad(address, tier, error.kind)
                failure = FetchFailed("error", str(error))
            except TierDown as error:
                failure = FetchFailed("down", str(error))
            except TierLate as error:
                failure = FetchFailed("timeout", str(error))
            except TierError as error:
                failure = FetchFailed("error", str(error))
        return failure

    def _read(self, address: Address, tier: TierName, ends_s: float) -> Bytes:
        """Raises `TierError`, `BadRecord`."""
        books = self._books
        guard = books.guards[tier]
        with books.lock:
            pin = books.directory.pin(address, tier)
        if pin is None:
            raise TierMiss("gone meanwhile")
        try:
            left_s = ends_s - books.clock()
            if left_s <= 0:
                raise TierLate(f"no time left for {tier}")
            return guard.read(address, 0, pin.nbytes, left_s)
        finally:
            with books.lock:
                books.directory.unpin(pin)
