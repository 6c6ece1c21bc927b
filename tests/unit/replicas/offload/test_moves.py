"""Moves beside the steps: a move's pages are its own until it is over, and no work of it is the engine's."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samovar.cache_tiers.blocks.extent import Bytes
from samovar.replicas.kv.block_io import PageIo, Ticket
from samovar.replicas.kv.copy_device import CopyEvent, Told
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.kv.page_pool import PagePool
from samovar.replicas.offload import load, offload, store
from samovar.replicas.offload.load import PageMoves
from samovar.replicas.offload.tier_client import CompletionQueue, WorkerPools, begin
from samovar.replicas.scheduling import RestorePiece
from tests.support.engines.engines import prompt_of
from tests.support.engines.simulated_device import SimulatedDevice, SimulatedEvent
from tests.support.engines.tier_engines import SCAN_S, InlineExecutor, Tiered, receipt_of, tiered
from tests.support.inside import join_scans

GEOMETRY = KvGeometry(layers=1, block_tokens=1, kv_heads=1, head_dim=4, dtype=torch.uint8)


class World:
    def __init__(self) -> None:
        self.device = SimulatedDevice(
            np.zeros((8, GEOMETRY.block_bytes), dtype=np.uint8), random.Random(3), 1.0
        )
        self.pool = PagePool(8, GEOMETRY.block_tokens)
        self.lane, self.arrivals = InlineExecutor(), CompletionQueue()
        self.moves = PageMoves(PageIo(self.device, GEOMETRY), self.pool, self.lane, self.arrivals)
        self.ended: list[Any] = []

    def settle(self) -> None:
        while self.device.run_one():
            pass
        self.arrivals.take_in()


def payload(blocks: int, value: int = 9) -> Bytes:
    return np.full(blocks * GEOMETRY.block_bytes, value, dtype=np.uint8)


def test_pages_of_a_sequence_that_ends_belong_to_the_move_until_its_copy_is_over() -> None:
    world = World()
    pages, piece = [world.pool.allocate(), world.pool.allocate()], RestorePiece(0, 2, "cpu", 2)
    assert world.moves.bring_in(payload(2), pages, world.moves.mark(), world.ended.append)
    assert (world.moves.pages_held(), world.moves.pages_leaving()) == ([], 0)
    world.moves.keep(piece, pages)
    world.pool.release(pages)  # their sequence is aborted
    assert (world.moves.pages_held(), world.moves.pages_leaving()) == ([pages], 2)
    assert not world.ended
    world.pool.check_integrity([pages])
    world.settle()
    assert world.ended == [None]
    assert (world.device.pages[pages] == 9).all()
    world.moves.let_go(piece)
    world.moves.let_go(piece)
    assert (world.moves.pages_held(), world.pool.active) == ([], 0)


def test_a_ticket_keeps_its_memory_alive_until_what_waits_for_it_is_told() -> None:
    class Event:
        told: list[Told] = []

        def then(self, told: Told) -> None:
            self.told.append(told)

    host = payload(1)
    alive = weakref.ref(host)
    Ticket(Event(), host).then(lambda failure: None)  # type: ignore[arg-type]
    del host
    gc.collect()
    assert alive() is not None
    Event.told.clear()
    gc.collect()
    assert alive() is None


def test_work_that_no_thread_could_be_started_for_never_runs() -> None:
    """Python's executor queues it before it starts the thread."""

    class Queueing(InlineExecutor):
        def submit(self, work: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
            queued.append(lambda: work(*args))
            raise RuntimeError("can't start new thread")

    queued: list[Callable[[], None]] = []
    ran: list[int] = []
    assert not begin(Queueing(), ran.append, 1)
    queued.pop()()
    assert ran == []
    assert begin(InlineExecutor(), ran.append, 2)
    assert ran == [2]


def test_what_leaves_is_taken_in_the_lane_and_its_pages_are_free_then() -> None:
    world = World()
    world.lane.held = True
    page = world.pool.allocate()
    world.device.pages[page] = 5

    def take(written: CopyEvent, copied: Callable[[], None]) -> Bytes:
        out = payload(1, 0)
        world.moves.io.begin_out([page], out, written).wait()
        copied()
        world.arrivals.take_in()
        assert (world.moves.pages_held(), world.pool.active) == ([], 0), "held while the record is sealed"
        world.device.pages[page] = 6  # as who has the page now
        return out

    world.moves.take_out([page], take, world.ended.append)
    world.pool.release([page])
    world.settle()
    assert (world.ended, world.moves.pages_leaving()) == ([], 1)
    world.lane.release()
    world.settle()
    assert world.pool.active == 0
    assert (world.ended[0] == 5).all()


def test_a_preempted_sequences_pages_are_free_before_its_record_is_sealed(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are out by then; checksums take as long again."""
    engine = tiered(tiny_llama, tmp_path, preemption="swap")
    inner, held, seal = engine.built.engine, list[int](), store.seal
    offload = inner.offload
    assert offload is not None

    def sealing(*args: Any, **named: Any) -> Any:
        offload.arrivals.take_in()
        held.append(sum(map(len, offload.moves.pages_held())))
        return seal(*args, **named)

    key = engine.submit(prompt_of(60), max_tokens=20)
    engine.driver.step()
    (sequence,) = inner.scheduler.running
    monkeypatch.setattr(store, "seal", sealing)
    assert offload.swap_out(sequence, sequence.pages)
    monkeypatch.undo()
    assert held == [0]
    engine.drain()
    assert engine.driver.answers[key].failed is None


@pytest.mark.parametrize("fails", ["out", "no thread"])
def test_a_move_out_that_fails_ends_and_gives_its_pages_back(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    page = world.pool.allocate()
    if fails == "no thread":
        monkeypatch.setattr(world.lane, "submit", broken)
    world.moves.take_out([page], broken, world.ended.append)
    world.pool.release([page])
    world.settle()
    assert world.ended == [None]
    assert world.pool.active == 0


def broken(*_: object) -> None:
    raise RuntimeError("no such memory")


def test_a_move_in_that_cannot_begin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(world.moves.io, "begin_in", broken)
    assert not world.moves.bring_in(payload(1), [1], world.moves.mark(), world.ended.append)
    world.settle()
    assert world.ended == []


def test_what_a_device_reports_under_a_move_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    lost = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(SimulatedEvent, "then", lambda _, told: told(lost))
    assert world.moves.bring_in(payload(1), [1], world.moves.mark(), world.ended.append)
    assert world.ended == [lost]


def test_a_device_that_fails_under_a_load_ends_the_engine(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its pages hold then, nobody knows."""
    engine = tiered(tiny_llama, tmp_path)
    prompt = prompt_of(60)
    engine.run(prompt)
    engine.forget_pool()
    lost = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(Ticket, "then", lambda _, told: told(lost))
    engine.submit([*prompt, *prompt_of(9, seed=4)])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.drain()


def test_no_copy_and_no_checksum_on_the_engines_thread(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores, loads and swaps of a real engine: who does the work."""
    workers: dict[str, set[str]] = {}

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            workers.setdefault(name, set()).add(threading.current_thread().name.rpartition("_")[0])
            return real(*args, **more)

        return call

    monkeypatch.setattr(PageIo, "begin_in", watched("in", PageIo.begin_in))
    monkeypatch.setattr(PageIo, "begin_out", watched("out", PageIo.begin_out))
    monkeypatch.setattr(store, "seal", watched("seal", store.seal))
    monkeypatch.setattr(load, "unpack", watched("check", load.unpack))
    monkeypatch.setattr(offload, "unpack", watched("check swapped", offload.unpack))
    lanes = WorkerPools.of_threads(2, 2)
    engine = tiered(tiny_llama, tmp_path, lanes=lanes, pool_tokens=256, preemption="swap")
    join_scans(engine.node, SCAN_S)  # the clock stands still: nobody asks again
    wake = threading.Semaphore(0)
    engine.built.engine.on_wake(wake.release)
    prompt = prompt_of(60)
    _to_the_end(engine, wake, prompt)
    engine.forget_pool()
    again = [*prompt, *prompt_of(9, seed=4)]
    assert receipt_of(_to_the_end(engine, wake, again)[0]).tokens["cpu"] > 0
    for attempt in range(20):  # blocks that are still in the pool are not brought back
        _to_the_end(
            engine, wake, *(prompt_of(50 + i, seed=10 * attempt + i) for i in range(4)), max_tokens=40
        )
        if "check swapped" in workers:
            break
    assert engine.built.engine.stats().swaps > 0
    lanes.close()
    assert workers == {
        "in": {"samovar-fetch", "samovar-moves"},
        "out": {"samovar-store", "samovar-moves"},
        "seal": {"samovar-store", "samovar-moves"},
        "check": {"samovar-fetch"},
        "check swapped": {"samovar-moves"},
    }


def _to_the_end(
    engine: Tiered, wake: threading.Semaphore, *prompts: list[int], max_tokens: int = 8
) -> list[Any]:
    """Run requests until they are answered and stored; wait for arrivals when there is no work."""
    keys = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
    while engine.built.engine.requests.open_keys() or not engine.built.engine.is_settled:
        if engine.built.engine.has_work:
            engine.driver.step()
        elif not engine.node.work():
            wake.acquire(timeout=1.0)
    return [engine.driver.answers[key] for key in keys]
