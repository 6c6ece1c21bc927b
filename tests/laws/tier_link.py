"""What calls of a node's tiers promise, whatever carries them: laws that are run over each way to a node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest

from samovar.cache_tiers.blocks import (
    Bytes,
    Clear,
    Placement,
    decode_header,
    good_blocks,
    header_bytes,
    marks_of,
)
from samovar.cache_tiers.messages import (
    BadReport,
    Cleared,
    Fetch,
    FetchFailed,
    LoadReport,
    Lookup,
    LookupResult,
    NodeStats,
    TurnEnded,
)
from tests.support.nodes.node_harness import Sample, sample

KEPT = Placement(write_behind=(), lowest="cpu", min_ttl_s=0.0)


class Way(Protocol):
    """A way to a node. `offer`, `fetch`: with the bytes, which each way carries otherwise."""

    def lookup(self, lookup: Lookup) -> LookupResult | None: ...

    def offer(self, one: Sample, found: LookupResult) -> str: ...

    def fetch(self, fetch: Fetch) -> tuple[int, Bytes] | FetchFailed: ...

    def report(self, bad: list[BadReport], loads: list[LoadReport]) -> None: ...

    def clear(self, clear: Clear) -> Cleared: ...

    def turn_over(self, over: TurnEnded) -> object: ...

    def stats(self) -> NodeStats | None: ...

    def ping(self) -> str | None: ...


def made(number: int) -> Sample:
    """A record of a tenant and a session of its own."""
    tag = number.to_bytes(16, "little")
    return sample(number, tenant=tag, session=tag, placement=KEPT)


def lookup_of(one: Sample) -> Lookup:
    header = one.header
    return Lookup(header.namespace, one.chain, header.tenant, header.session)


def look(way: Way, one: Sample) -> LookupResult:
    found = way.lookup(lookup_of(one))
    assert found is not None
    return found


def fetch_of(one: Sample) -> Fetch:
    header = one.header
    return Fetch(header.namespace, header.tenant, header.extent_id, 0, header.blocks, "cpu", 10.0)


def store(way: Way, one: Sample) -> None:
    assert way.offer(one, look(way, one)) == "taken"
    ends_s = time.monotonic() + 30
    while not look(way, one).spans:
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def assert_loads(way: Way, one: Sample) -> None:
    loaded = way.fetch(fetch_of(one))
    assert not isinstance(loaded, FetchFailed)
    first, data = loaded
    assert first == 0
    assert np.array_equal(data, one.record)
    header = decode_header(data)
    assert good_blocks(header, data[header_bytes(header.blocks, header.shape.layers) :], 0) == header.blocks


def what_is_unknown_is_a_miss(way: Way) -> None:
    one = made(100)
    found = look(way, one)
    assert (found.spans, found.tails) == ((), ())
    assert found.incarnation == way.ping()
    missed = way.fetch(fetch_of(one))
    assert isinstance(missed, FetchFailed)
    assert missed.reason == "gone"


def what_was_taken_is_found_and_is_the_same(way: Way) -> None:
    one = made(101)
    store(way, one)
    (span,) = look(way, one).spans
    header = one.header
    assert (span.extent_id, span.tenant, span.first, span.offset, span.blocks, span.tier) == (
        header.extent_id, header.tenant, 0, 0, header.blocks, "cpu",
    )  # fmt: skip
    assert "cpu" in look(way, one).prices
    assert_loads(way, one)
    assert way.offer(one, look(way, one)) == "held"


def blocks_that_an_extent_has_not_are_a_miss(way: Way) -> None:
    one = made(102)
    store(way, one)
    beyond = way.fetch(replace(fetch_of(one), offset=1))
    assert isinstance(beyond, FetchFailed)
    assert beyond.reason == "gone"


def an_offer_of_another_life_is_refused(way: Way) -> None:
    one = made(103)
    assert way.offer(one, replace(look(way, one), incarnation="another")) == "refused:incarnation"
    assert not look(way, one).spans


def what_is_reported_bad_is_not_found_again(way: Way) -> None:
    one = made(104)
    store(way, one)
    header = one.header
    way.report([BadReport(header.namespace, header.tenant, header.extent_id, "cpu", "checksum")], [])
    assert not look(way, one).spans
    assert isinstance(way.fetch(fetch_of(one)), FetchFailed)
    store(way, one)


def loads_that_are_reported_make_the_price(way: Way) -> None:
    one = made(105)
    for _ in range(8):
        way.report([], [LoadReport("cpu", 1_000_000, 0.5)])
    price = look(way, one).prices["cpu"]
    assert price.is_known
    assert price.seconds(1_000_000) > 0.05


def what_is_cleared_is_gone_and_does_not_come_back(way: Way) -> None:
    one = made(106)
    before = look(way, one)
    store(way, one)
    cleared = way.clear(Clear(one.header.tenant))
    assert (cleared.extents, cleared.nbytes, cleared.unreachable) == (1, one.record.nbytes, ())
    assert not look(way, one).spans
    assert isinstance(way.fetch(fetch_of(one)), FetchFailed)
    assert way.offer(one, before) == "refused:tombstone"
    store(way, one)


def a_clear_of_a_session_leaves_the_others(way: Way) -> None:
    one = made(107)
    other = sample(108, tenant=one.header.tenant, session=b"another-" * 2, placement=KEPT)
    store(way, one)
    store(way, other)
    assert way.clear(Clear(one.header.tenant, one.header.session)).extents == 1
    assert not look(way, one).spans
    assert look(way, other).spans


def a_turns_end_is_counted(way: Way) -> None:
    one = made(109)
    header = one.header
    before = way.stats()
    way.lookup(replace(lookup_of(one), starts_turn=True))
    way.turn_over(TurnEnded(header.tenant, header.session, 1.0, 12, 3, marks_of(header.keys), 4))
    after = way.stats()
    assert before is not None
    assert after is not None
    assert after.returns.turns == before.returns.turns + 1


def the_counters_are_the_nodes(way: Way) -> None:
    one = made(110)
    store(way, one)
    stats = way.stats()
    assert stats is not None
    row = next(row for row in stats.tiers if row.name == "cpu")
    assert row.state == "up"
    assert row.bytes_held >= one.record.nbytes
    assert (stats.incarnation, stats.stores["taken"] > 0) == (way.ping(), True)


def keys_that_are_no_row_of_keys_are_refused(way: Way) -> None:
    one = made(111)
    try:
        found = way.lookup(replace(lookup_of(one), keys=one.chain[:-1]))
    except ValueError:  # in one process
        found = None
    assert found is None
    assert look(way, one).spans == ()


LAWS: tuple[Callable[[Way], None], ...] = (
    what_is_unknown_is_a_miss,
    what_was_taken_is_found_and_is_the_same,
    blocks_that_an_extent_has_not_are_a_miss,
    an_offer_of_another_life_is_refused,
    what_is_reported_bad_is_not_found_again,
    loads_that_are_reported_make_the_price,
    what_is_cleared_is_gone_and_does_not_come_back,
    a_clear_of_a_session_leaves_the_others,
    a_turns_end_is_counted,
    the_counters_are_the_nodes,
    keys_that_are_no_row_of_keys_are_refused,
)
each_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
