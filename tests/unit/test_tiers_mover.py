"""The states of a move, and what fences it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_tiers.blocks.extent import TIERS, Address
from cache_tiers.directory.transfers import NEXT, Move, StaleMove, TransferTable


def address(number: int) -> Address:
    return Address(bytes(16), bytes(32), bytes([number]) * 32)


def test_a_move_goes_through_all_states() -> None:
    mover = TransferTable(4)
    move = mover.plan(address(1), "cpu", "nvme")
    assert move is not None
    mover.reserved(move, 7)
    for state in ("copying", "verified", "committed", "dropping"):
        mover.advance(move, state, 7)  # type: ignore[arg-type]
        assert mover.state(move) == state
        mover.check_integrity()
    mover.end(move)
    assert mover.state(move) is None
    assert mover.reached["cpu>nvme:done"] == 1
    mover.check_integrity()


def test_one_mover_for_an_extent_and_a_tier() -> None:
    mover = TransferTable(4)
    assert mover.plan(address(1), "cpu", "nvme")
    assert mover.plan(address(1), "replica", "nvme") is None
    assert mover.plan(address(1), "cpu", "s3") is not None


def test_no_more_moves_than_allowed() -> None:
    mover = TransferTable(1)
    move = mover.plan(address(1), "cpu", "nvme")
    assert move is not None
    assert mover.plan(address(2), "cpu", "nvme") is None
    mover.end(move)
    assert mover.plan(address(2), "cpu", "nvme") is not None


def test_f18_a_move_that_was_given_up_cannot_go_on() -> None:
    mover = TransferTable(4)
    old = mover.plan(address(1), "cpu", "nvme")
    assert old is not None
    mover.reserved(old, 1)
    mover.advance(old, "copying", 1)
    mover.end(old)
    new = mover.plan(address(1), "cpu", "nvme")
    assert new is not None
    mover.reserved(new, 2)
    mover.advance(new, "copying", 2)
    for move, generation in ((old, 1), (old, 2), (new, 1)):
        with pytest.raises(StaleMove):
            mover.advance(move, "verified", generation)
    mover.end(old)  # says nothing about the new one
    assert mover.state(new) == "copying"
    mover.check_integrity()


def test_f18_a_duplicate_step_is_refused() -> None:
    mover = TransferTable(4)
    move = mover.plan(address(1), "cpu", "nvme")
    assert move is not None
    mover.reserved(move, 1)
    mover.advance(move, "copying", 1)
    with pytest.raises(ValueError, match="does not come after"):
        mover.advance(move, "copying", 1)
    with pytest.raises(ValueError, match="does not come after"):
        mover.advance(move, "committed", 1)  # nothing is committed unverified


def test_every_state_but_the_last_ones_has_a_next() -> None:
    assert {state for state, after in NEXT.items() if not after} == {"done", "failed"}
    assert "failed" not in NEXT["committed"]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(TIERS), st.sampled_from(["plan", *NEXT]), st.integers(0, 1)
        )
    )
)
def test_any_sequence_keeps_the_books(steps: list[tuple[int, str, str, int]]) -> None:
    mover = TransferTable(3)
    moves: list[Move] = []
    for number, target, step, behind in steps:
        if step == "plan":
            move = mover.plan(address(number), "replica", target)  # type: ignore[arg-type]
            if move is not None:
                moves.append(move)
        elif moves:
            move = moves[-1 - behind] if behind < len(moves) else moves[-1]
            try:
                if step == "reserved":
                    mover.reserved(move, move.number)
                elif step in ("done", "failed"):
                    mover.end(move)
                else:
                    mover.advance(move, step, move.number)  # type: ignore[arg-type]
            except (StaleMove, ValueError):
                pass  # refused, as it should be: the books below are what counts
        mover.check_integrity()
