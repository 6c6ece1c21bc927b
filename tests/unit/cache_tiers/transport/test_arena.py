"""The arena: no byte belongs to two, none is lost, none is leased while something may write to it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from samovar.cache_tiers.transport.arena import ALIGN, Arena, ArenaPiece
from tests.support.amounts import examples
from tests.support.inside import free_in

PAGES = 16


def take(arena: Arena, pages: int, *, expires: bool = False) -> ArenaPiece:
    piece = arena.take(pages * ALIGN, expires=expires)
    assert piece is not None
    arena.check_integrity()
    return piece


def test_the_first_hole_that_fits_is_taken_and_neighbours_become_one() -> None:
    arena = Arena(4 * ALIGN + 5)
    one, two, three = take(arena, 1), take(arena, 1), take(arena, 2)
    assert arena.take(1, expires=False) is None
    arena.release(one.generation)
    arena.release(three.generation)
    assert arena.take(3 * ALIGN, expires=False) is None, "there are as many bytes, but not in one piece"
    arena.release(two.generation)
    arena.check_integrity()
    assert take(arena, 4).offset == 0


def test_a_generation_is_never_given_twice_and_an_old_one_releases_nothing() -> None:
    arena = Arena(ALIGN)
    old = take(arena, 1)
    arena.release(old.generation)
    new = take(arena, 1)
    assert (new.offset, new.generation > old.generation) == (old.offset, True)
    arena.release(old.generation)
    arena.release(99)
    assert arena.held(new.generation) == new
    assert arena.held(old.generation) is None


def test_an_armed_piece_is_taken_back_in_time_and_one_that_is_not_armed_never() -> None:
    arena = Arena(4 * ALIGN)
    armed, idle = take(arena, 1, expires=True), take(arena, 1, expires=True)
    arena.arm(armed.generation, 10.0)
    arena.expire(9.9)
    assert arena.held(armed.generation) == armed
    arena.expire(10.0)
    assert arena.held(armed.generation) is None
    assert arena.held(idle.generation) == idle
    with pytest.raises(ValueError, match="not held"):
        arena.arm(armed.generation, 20.0)
    with pytest.raises(ValueError, match="not held"):
        arena.arm(take(arena, 1, expires=False).generation, 20.0)


def test_a_piece_that_is_written_to_is_free_only_when_that_has_ended() -> None:
    arena = Arena(ALIGN)
    piece = take(arena, 1)
    arena.begin_write(piece.generation)
    with pytest.raises(ValueError, match="not free to be written"):
        arena.begin_write(piece.generation)
    arena.release(piece.generation)
    arena.check_integrity()
    assert arena.held(piece.generation) is None
    assert arena.take(1, expires=False) is None
    arena.end_write(piece.generation)
    take(arena, 1)


def test_what_is_exported_is_no_destination() -> None:
    arena = Arena(ALIGN)
    with pytest.raises(ValueError, match="not free to be written"):
        arena.begin_write(take(arena, 1, expires=True).generation)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_are_none_are_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="has bytes"):
        Arena(ALIGN).take(nbytes, expires=False)
    with pytest.raises(ValueError, match="an arena has"):
        Arena(ALIGN + nbytes - 1)


def test_planted_bugs_are_found() -> None:
    arena = Arena(4 * ALIGN)
    piece = take(arena, 1)
    free_in(arena).append((piece.offset, ALIGN))
    with pytest.raises(AssertionError, match="two owners"):
        arena.check_integrity()
    arena._free = [(2 * ALIGN, 2 * ALIGN)]
    with pytest.raises(AssertionError, match="no owner"):
        arena.check_integrity()
    arena._free = [(ALIGN, ALIGN), (2 * ALIGN, 2 * ALIGN)]
    with pytest.raises(AssertionError, match="are one"):
        arena.check_integrity()
    arena._free = [(ALIGN, 3 * ALIGN)]
    arena._released.add(piece.generation)
    with pytest.raises(AssertionError, match="nothing writes there"):
        arena.check_integrity()


class ArenaMachine(RuleBasedStateMachine):
    """Beside it, a plain model: who may touch which page."""

    pieces = Bundle("pieces")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(PAGES * ALIGN)
        self.now_s = 0.0
        self.owners: dict[int, int] = {}  # page -> generation
        self.ends_s: dict[int, float] = {}
        self.writes: set[int] = set()
        self.released: set[int] = set()

    @rule(target=pieces, nbytes=st.integers(1, 6 * ALIGN), expires=st.booleans())
    def take(self, nbytes: int, expires: bool) -> ArenaPiece | None:
        piece = self.arena.take(nbytes, expires=expires)
        pages = -(-nbytes // ALIGN)
        if piece is None:
            free = "".join("x" if page in self.owners else "." for page in range(PAGES))
            assert "." * pages not in free, f"{pages} pages fit into {free}"
            return None
        assert piece.generation not in self.owners.values()
        for page in range(piece.offset // ALIGN, piece.offset // ALIGN + pages):
            assert page not in self.owners, "a page of somebody else"
            self.owners[page] = piece.generation
        return piece

    def gone(self, generation: int) -> None:
        self.owners = {page: owner for page, owner in self.owners.items() if owner != generation}
        self.ends_s.pop(generation, None)

    @rule(piece=pieces)
    def release(self, piece: ArenaPiece | None) -> None:
        if piece is None:
            return
        self.arena.release(piece.generation)
        if piece.generation in self.writes:
            self.released.add(piece.generation)
        else:
            self.gone(piece.generation)

    @rule(piece=pieces)
    def arm(self, piece: ArenaPiece | None) -> None:
        if piece is not None and piece.expires and piece.generation in self.owners.values():
            self.arena.arm(piece.generation, self.now_s + 5.0)
            self.ends_s[piece.generation] = self.now_s + 5.0

    @rule(s=st.floats(0.0, 4.0))
    def expire(self, s: float) -> None:
        self.now_s += s
        self.arena.expire(self.now_s)
        for generation in [g for g, ends_s in self.ends_s.items() if ends_s <= self.now_s]:
            self.gone(generation)

    @rule(piece=pieces)
    def begin_write(self, piece: ArenaPiece | None) -> None:
        if piece is None or piece.expires or piece.generation in self.writes:
            return
        if self.arena.held(piece.generation) is not None:
            self.arena.begin_write(piece.generation)
            self.writes.add(piece.generation)

    @rule(piece=pieces)
    def end_write(self, piece: ArenaPiece | None) -> None:
        if piece is not None and piece.generation in self.writes:
            self.arena.end_write(piece.generation)
            self.writes.remove(piece.generation)
            if piece.generation in self.released:
                self.released.remove(piece.generation)
                self.gone(piece.generation)

    @invariant()
    def the_books_agree(self) -> None:
        self.arena.check_integrity()
        assert self.arena.free_bytes == (PAGES - len(self.owners)) * ALIGN
        assert self.arena.writes == len(self.writes)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(
    derandomize=True, deadline=None, max_examples=examples(150), stateful_step_count=40
)
