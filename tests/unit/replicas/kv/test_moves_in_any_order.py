"""Moves beside computing, on a device that runs streams in any legal order.

Nothing is read before it is written, overwritten while it is read, or staged where a copy is under way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.replicas.kv import block_io
from samovar.replicas.kv.block_io import PageIo, Ticket
from samovar.replicas.kv.copy_device import DONE, CopyEvent
from samovar.replicas.kv.kv_pool import KvGeometry
from tests.support.engines.simulated_device import GARBAGE, SimulatedDevice, SimulatedStream

GEOMETRY = KvGeometry(layers=1, block_tokens=1, kv_heads=1, head_dim=4, dtype=torch.uint8)
PAGES, HALF_BLOCKS = 9, 2


@dataclass
class _Move:
    ticket: Ticket
    pages: list[int]
    host: Bytes
    expected: Bytes
    is_in: bool


class World:
    """Kernels write and read pages, blocks leave and come; what each must see follows from their order.

    As the engine does it: the pages of a move out are not written, those of a move in are not used, until it
    is done.
    """

    def __init__(self, rng: random.Random, make: Callable[[SimulatedDevice], PageIo]) -> None:
        self.rng = rng
        self.device = SimulatedDevice(np.zeros((PAGES, GEOMETRY.block_bytes), dtype=np.uint8), rng)
        self.io = make(self.device)
        self.truth = self.device.pages.copy()
        self.moves: list[_Move] = []
        self.values = 0

    def new_value(self) -> int:
        self.values = self.values % 120 + 1
        return self.values

    def some(self, *, is_in: bool) -> list[int]:
        """Pages that a move may have: none that it may not share with others under way."""
        taken = {page for move in self.moves if is_in or move.is_in for page in move.pages}
        free = [page for page in range(PAGES) if page not in taken]
        if self.rng.random() < 0.5:
            self.rng.shuffle(free)
        return free[: self.rng.randint(1, 6)]

    def write(self) -> None:
        taken = {page for move in self.moves for page in move.pages}
        free = [page for page in range(PAGES) if page not in taken]
        if free:
            page, value = self.rng.choice(free), self.new_value()
            self.truth[page] = value
            half = GEOMETRY.block_bytes // 2
            row = self.device.pages[page]
            self.device.computing.submit(lambda: row[:half].fill(value), lambda: row[half:].fill(value))

    def read(self) -> None:
        taken = {page for move in self.moves if move.is_in for page in move.pages}
        free = [page for page in range(PAGES) if page not in taken]
        if free:
            page = self.rng.choice(free)
            expected, row = self.truth[page].copy(), self.device.pages[page]

            def look() -> None:
                assert (row == expected).all(), "a kernel has read what was not there yet, or no more"

            self.device.computing.submit(look, look)

    def leave(self) -> None:
        pages = self.some(is_in=False)
        if pages:
            out = np.full(len(pages) * GEOMETRY.block_bytes, GARBAGE, dtype=np.uint8)
            ticket = self.io.begin_out(pages, out, self.io.mark())
            self.moves.append(_Move(ticket, pages, out, self.truth[pages].copy().reshape(-1), is_in=False))

    def come(self) -> None:
        pages = self.some(is_in=True)
        if pages:
            values = np.array([self.new_value() for _ in pages], dtype=np.uint8)
            payload = np.repeat(values, GEOMETRY.block_bytes)
            ticket = self.io.begin_in(payload, pages, self.io.mark())
            self.moves.append(_Move(ticket, pages, payload, payload.copy(), is_in=True))

    def look(self) -> None:
        for move in [move for move in self.moves if move.ticket.done()]:
            self.moves.remove(move)
            if move.is_in:
                self.truth[move.pages] = move.expected.reshape(len(move.pages), -1)
                assert (self.device.pages[move.pages] == self.truth[move.pages]).all(), (
                    "not all of it is there"
                )
            else:
                assert (move.host == move.expected).all(), "the bytes that left are not those of the pages"
            move.host[:] = GARBAGE  # whoever it belongs to may use it again

    def run(self, actions: int) -> None:
        for _ in range(actions):
            self.rng.choice([self.write, self.read, self.leave, self.come, self.look, self.device.happen])()
        while self.device.run_one():
            pass
        assert not self.device.is_busy, "streams wait for each other"
        self.look()
        assert not self.moves
        assert (self.device.pages == self.truth).all()


def right(device: SimulatedDevice) -> PageIo:
    return PageIo(device, GEOMETRY, HALF_BLOCKS * GEOMETRY.block_bytes)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_early_read_no_overwrite_under_a_reader_no_staging_in_flight(rng: random.Random) -> None:
    World(rng, right).run(30)


class ReadsEarly(PageIo):
    def begin_out(self, pages: Sequence[int], out: Bytes, written: CopyEvent) -> Ticket:
        return super().begin_out(pages, out, DONE)


class OverwritesReaders(PageIo):
    def begin_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        return super().begin_in(payload, pages, DONE)


class StagesInFlight(PageIo):
    def __init__(self, device: SimulatedDevice, geometry: KvGeometry, staging_bytes: int) -> None:
        super().__init__(device, geometry, staging_bytes)
        staging = self._in_staging
        turn = staging.next

        def forgetful() -> block_io._Half:
            half = turn()
            half.event = DONE
            return half

        staging.next = forgetful  # type: ignore[method-assign]


class EndsEarly(PageIo):
    def begin_in(self, payload: Bytes, pages: Sequence[int], read: CopyEvent) -> Ticket:
        super().begin_in(payload, pages, read)
        return Ticket(DONE, payload)


@pytest.mark.parametrize("fault", [ReadsEarly, OverwritesReaders, StagesInFlight, EndsEarly])
def test_a_planted_fault_is_found(fault: type[PageIo]) -> None:
    def found(seed: int) -> bool:
        try:
            World(
                random.Random(seed),
                lambda device: fault(device, GEOMETRY, HALF_BLOCKS * GEOMETRY.block_bytes),
            ).run(60)
        except AssertionError:
            return True
        return False

    assert any(found(seed) for seed in range(200))


def test_what_fails_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages may be given away as soon as it has raised."""
    device = SimulatedDevice(np.zeros((PAGES, GEOMETRY.block_bytes), dtype=np.uint8), random.Random(1), 1.0)
    io, real = right(device), SimulatedStream.copy_in

    def broken(stream: SimulatedStream, host: Bytes, page: int) -> None:
        if page == 5:
            raise RuntimeError("no more copies")
        real(stream, host, page)

    monkeypatch.setattr(SimulatedStream, "copy_in", broken)
    with pytest.raises(RuntimeError, match="no more copies"):
        io.begin_in(np.ones(3 * GEOMETRY.block_bytes, dtype=np.uint8), [1, 3, 5], io.mark())
    assert not device.is_busy
    assert device.pages[1].all(), "a part of it had begun"
