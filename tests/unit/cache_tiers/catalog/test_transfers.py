"""The states of a transfer, and what fences it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.tiers import TIERS, TierName
from samovar.cache_tiers.catalog.index import HeldExtent
from samovar.cache_tiers.catalog.transfers import (
    NEXT,
    Ledger,
    Source,
    StaleTransfer,
    State,
    Transfer,
    TransferTable,
)
from tests.support.nodes.catalog_world import World, header

NBYTES = 100
EXTENTS = [HeldExtent(header([number]), 0.0) for number in range(3)]
KNOWN = {extent.address: extent for extent in EXTENTS}


def table(transfers_max: int = 4) -> TransferTable:
    return TransferTable({tier: Ledger(10 * NBYTES) for tier in TIERS}, transfers_max)


def begun(mover: TransferTable, number: int, source: Source = "cpu", tier: TierName = "nvme") -> Transfer:
    transfer = Transfer(mover.next_generation(), source, tier, EXTENTS[number], NBYTES)
    mover.reserve(transfer, ())
    mover.check_integrity({}, KNOWN.get)
    return transfer


def test_a_transfer_goes_through_all_states() -> None:
    mover = table()
    transfer = begun(mover, 1)
    steps: tuple[State, ...] = ("copying", "verified", "committed", "dropping")
    for state in steps:
        if state == "committed":
            assert mover.commit(transfer)
        else:
            mover.advance(transfer, state)
        assert transfer.state == state
        assert len(mover) == 1
        assert mover.is_busy("nvme", transfer.address) == (state in ("copying", "verified"))
        mover.check_integrity({}, KNOWN.get)
    mover.end(transfer)
    assert transfer.state == "done"
    assert len(mover) == 0
    assert mover.reached["cpu>nvme:planned"] == mover.reached["cpu>nvme:done"] == 1
    mover.check_integrity({}, KNOWN.get)


def test_one_transfer_for_an_extent_and_a_tier() -> None:
    mover = table()
    transfer = begun(mover, 1)
    assert mover.is_busy("nvme", transfer.address)
    assert mover.is_writing("nvme", transfer.address)
    assert not mover.is_busy("s3", transfer.address)
    begun(mover, 1, tier="s3")


def test_no_more_transfers_than_allowed() -> None:
    world = World(transfers_max=1)
    transfer = world.reserved("cpu", header([1]))
    refused = world.reserve("cpu", header([2]))
    assert getattr(refused, "reason", "") == "busy"
    world.catalog.abandon(transfer)
    world.store("cpu", header([2]))
    world.store("cpu", header([3]))


def test_a_transfer_that_got_no_room_is_counted() -> None:
    mover = table()
    mover.refused("cpu", "nvme")
    assert dict(mover.reached) == {"cpu>nvme:planned": 1, "cpu>nvme:failed": 1}
    mover.check_integrity({}, KNOWN.get)


def test_f18_a_transfer_that_was_given_up_cannot_go_on() -> None:
    mover = table()
    old = begun(mover, 1)
    mover.advance(old, "copying")
    assert mover.abandon(old)
    new = begun(mover, 1)
    mover.advance(new, "copying")
    assert new.generation != old.generation
    for state in ("verified", "copying", "committed"):
        with pytest.raises(StaleTransfer):
            mover.advance(old, state)  # type: ignore[arg-type]
    assert not mover.commit(old)
    assert not mover.abandon(old)
    mover.end(old)  # says nothing about the new one
    assert (old.state, new.state) == ("failed", "copying")
    mover.check_integrity({}, KNOWN.get)


def test_f18_the_room_of_a_failed_transfer_is_free_only_when_nothing_of_it_is_left() -> None:
    mover = table()
    transfer = begun(mover, 1)
    mover.advance(transfer, "copying")
    mover.end(transfer)
    assert len(mover) == 0
    assert mover.is_busy("nvme", transfer.address)
    assert not mover.is_writing("nvme", transfer.address)
    assert not mover.commit(transfer)
    mover.check_integrity({}, KNOWN.get)
    assert mover.abandon(transfer)
    assert not mover.is_busy("nvme", transfer.address)
    mover.check_integrity({}, KNOWN.get)


def test_f18_a_duplicate_step_is_refused() -> None:
    mover = table()
    transfer = begun(mover, 1)
    mover.advance(transfer, "copying")
    with pytest.raises(ValueError, match="does not come after"):
        mover.advance(transfer, "copying")
    with pytest.raises(ValueError, match="does not come after"):
        mover.commit(transfer)  # nothing is committed unverified
    mover.check_integrity({}, KNOWN.get)


def test_every_state_but_the_last_ones_has_a_next() -> None:
    assert {state for state, after in NEXT.items() if not after} == {"done", "failed"}
    assert "failed" not in NEXT["committed"]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(TIERS),
            st.sampled_from(["reserve", "abandon", "fence", *NEXT]),
            st.integers(0, 1),
        )
    )
)
def test_any_sequence_keeps_the_books(steps: list[tuple[int, TierName, str, int]]) -> None:
    mover = table(3)
    transfers: list[Transfer] = []
    for number, tier, step, behind in steps:
        if step == "reserve":
            if not mover.is_full and not mover.is_busy(tier, EXTENTS[number].address):
                transfers.append(begun(mover, number, "replica", tier))
        elif transfers:
            transfer = transfers[-1 - behind] if behind < len(transfers) else transfers[-1]
            try:
                if step == "committed":
                    assert not (mover.commit(transfer) and transfer.is_fenced)
                elif step in ("done", "failed"):
                    mover.end(transfer)
                elif step == "abandon":
                    mover.abandon(transfer)
                elif step == "fence":
                    mover.fence(transfer.extent)
                else:
                    mover.advance(transfer, step)  # type: ignore[arg-type]
            except (StaleTransfer, ValueError):
                pass  # refused, as it should be: the books below are what counts
        mover.check_integrity({}, KNOWN.get)
