"""Registered memory: each chunk once, no copy across two, nothing left that is no longer mapped."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.configs.sections import MIB
from samovar.replicas.kv.registered import (
    HostCalls,
    Mapping,
    RecordArena,
    RegisteredMemory,
    is_mapped,
    mapping_of,
    populate_pages,
    read_maps,
)

CHUNK = 100
STORE = "1000-1140 rw-s 00000000 00:19 77                         /dev/shm/plasmaAbCd (deleted)"
FILE = "1140-1200 r--s 00000000 fe:00 5 /tmp/ray/session/spilled file"
HEAP = "9000-a000 rw-p 00000000 00:00 0 [heap]"


@dataclass
class Driver:
    """Keeps to the rules of the real one, by address and bytes."""

    maps: str = "\n".join((STORE, FILE, HEAP))
    refuses: set[int] = field(default_factory=set)
    unpopulated: set[int] = field(default_factory=set)
    registered: dict[int, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    reads: int = 0
    later: list[Callable[[], None]] = field(default_factory=list)
    knows_files: bool = True
    has_threads: bool = True

    def register(self, start: int, nbytes: int) -> bool:
        assert nbytes > 0, "cudaHostRegister fails with size 0"
        assert all(end <= start or start + nbytes <= other for other, end in self.registered.items())
        if start in self.refuses:
            return False
        self.registered[start] = start + nbytes
        self.log.append(f"+{start:x}")
        return True

    def unregister(self, start: int) -> None:
        del self.registered[start]
        self.log.append(f"-{start:x}")

    def populate(self, start: int, nbytes: int) -> None:
        if start in self.unpopulated:
            raise OSError(errno.EFAULT, "a hole")

    def read(self) -> str:
        self.reads += 1
        return self.maps

    def is_mapped(self, mapping: Mapping) -> bool:
        return self.knows_files and mapping_of(mapping.start, self.maps) == mapping

    def calls(self) -> HostCalls:
        calls = self.register, self.unregister, self.populate, self.read, self.is_mapped
        return HostCalls(*calls, self.do)

    def do(self, work: Callable[[], None]) -> bool:
        if self.has_threads:
            self.later.append(work)
        return self.has_threads

    def do_later(self) -> None:
        while self.later:
            self.later.pop()()


def test_an_address_is_found_in_its_mapping() -> None:
    maps = "\n".join((STORE, FILE, HEAP))
    store, file, heap = (mapping_of(address, maps) for address in (0x113F, 0x1140, 0x9000))
    assert store is not None
    assert file is not None
    assert heap is not None
    assert (store.start, store.end, store.is_shared_memory) == (0x1000, 0x1140, True)
    assert (file.is_shared, file.is_shared_memory, heap.is_shared) == (True, False, False)
    assert mapping_of(0x2000, maps) is None


def test_what_linux_says_of_shared_memory_is_understood() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.truncate(file.fileno(), 3 * mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            mapping = mapping_of(address + mmap.PAGESIZE, read_maps())
            assert mapping is not None
            assert mapping.is_shared_memory
            assert (mapping.start, mapping.end) == (address, address + 3 * mmap.PAGESIZE)
            populate_pages(address, 3 * mmap.PAGESIZE)
            assert is_mapped(mapping) or not os.path.exists("/proc/self/map_files")
            assert not is_mapped(replace(mapping, file=f"{mapping.file} of another"))
            assert not is_mapped(replace(mapping, end=mapping.end - mmap.PAGESIZE))
    assert not is_mapped(mapping)
    with pytest.raises(OSError, match="could not be brought"):
        populate_pages(address, 3 * mmap.PAGESIZE)


def test_the_object_store_is_registered_by_chunks_as_it_is_used_and_each_once() -> None:
    driver = Driver()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert memory.reaches(0x1000 + 30, 20)
    assert memory.reaches(0x1000 + 40, 5)
    assert driver.log == ["+1000"]
    assert memory.reaches(0x1000 + 250, 70)
    assert driver.registered == {0x1000: 0x1000 + 100, 0x1000 + 200: 0x1000 + 300, 0x1000 + 300: 0x1140}
    assert memory.reaches(0x1000, 300)
    memory.close()
    assert not driver.registered


@pytest.mark.parametrize("is_early", [True, False])
def test_the_rest_of_the_object_store_is_registered_behind_its_first_use_or_at_once_if_it_is_there(
    is_early: bool,
) -> None:
    small = STORE.replace("1000-1140", "3000-3060").replace("77", "78")
    driver = Driver("\n".join((small, FILE, HEAP) + ((STORE,) if is_early else ())))
    memory = RegisteredMemory(driver.calls(), CHUNK)
    memory.begin()
    assert not driver.registered, "not by the thread that has a model to load"
    driver.later.reverse()  # begun first, and they were begun with the largest
    driver.do_later()
    all_of_it = {0x1000 + at: min(0x1140, 0x1000 + at + CHUNK) for at in range(0, 0x140, CHUNK)}
    if is_early:
        assert driver.log[-1] == "+3000", "the largest first"
    else:
        assert driver.log == ["+3000"]
        driver.maps = "\n".join((small, FILE, HEAP, STORE))
        assert memory.reaches(0x1000 + 250, 20)
        assert driver.log == ["+3000", "+10c8"]
        driver.do_later()
    assert driver.registered == {**all_of_it, 0x3000: 0x3060}
    reads = driver.reads
    assert all(memory.reaches(0x1000 + at, 20) for at in range(0, 300, 7))
    assert driver.reads == reads, "no load reads all mappings"
    memory.close()
    assert not driver.registered


def test_a_start_waits_for_what_is_registered_behind_it_and_not_for_ever() -> None:
    driver = Driver()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert memory.settle(10)
    memory.begin()
    assert len(driver.later) == 4, "as many as there are chunks, or threads are of use"
    assert not memory.settle(0.01)
    work = [threading.Thread(target=one) for one in driver.later]
    for thread in work:
        thread.start()
    assert memory.settle(10)
    assert sorted(driver.registered) == [0x1000 + at for at in range(0, 0x140, CHUNK)]
    assert len(driver.log) == len(driver.registered), "each chunk by one of them"
    driver.has_threads = False
    memory = RegisteredMemory(driver.calls(), CHUNK)
    memory.begin()
    assert memory.settle(0), "none could be started"


def test_nothing_is_registered_behind_while_kernels_are_compiled() -> None:
    driver = Driver()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    with memory.held():
        memory.begin()
        threads = [threading.Thread(target=work) for work in driver.later]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        driver.log.append("compiled")
    for thread in threads:
        thread.join()
    assert driver.log[0] == "compiled"
    assert len(driver.registered) == 4


def test_a_driver_that_refuses_ends_what_registers_behind() -> None:
    driver = Driver(refuses={0x1000})
    memory = RegisteredMemory(driver.calls(), CHUNK)
    memory.begin()
    driver.do_later()
    assert memory.settle(0)
    assert not driver.registered


def test_memory_is_populated_in_pieces_that_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[tuple[int, int]] = []

    def madvise(start: ctypes.c_void_p, nbytes: ctypes.c_size_t, _: int) -> int:
        pieces.append((start.value or 0, nbytes.value))
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    populate_pages(64 * MIB, 5 * MIB)
    assert pieces == [(64 * MIB, 2 * MIB), (66 * MIB, 2 * MIB), (68 * MIB, MIB)]


def test_without_the_systems_files_all_mappings_are_read_as_before() -> None:
    driver = Driver(knows_files=False)
    memory = RegisteredMemory(driver.calls(), CHUNK)
    for reads in (1, 2):
        assert memory.reaches(0x1000, 20)
        assert driver.reads == reads


def test_a_load_does_not_wait_for_the_driver_but_for_its_own_chunk() -> None:
    driver, at_work, go_on = Driver(), threading.Event(), threading.Event()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert memory.reaches(0x1000, 20)
    populate = driver.populate

    def slow(start: int, nbytes: int) -> None:
        if start == 0x1000 + 100:
            at_work.set()
            assert go_on.wait(10)
        populate(start, nbytes)

    driver.populate = slow  # type: ignore[method-assign]
    memory = RegisteredMemory(driver.calls(), CHUNK)
    driver.registered.clear()
    behind = threading.Thread(target=memory.reaches, args=(0x1000 + 100, 20))
    behind.start()
    assert at_work.wait(10)
    assert memory.reaches(0x1000, 20), "another chunk"
    waits = threading.Thread(target=memory.reaches, args=(0x1000 + 110, 20))
    waits.start()
    go_on.set()
    behind.join(10)
    waits.join(10)
    assert driver.log.count("+1064") == 1


def test_a_mapping_that_goes_while_it_is_registered_does_not_stay_so() -> None:
    driver = Driver()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert memory.reaches(0x1000, 20)
    populate = driver.populate

    def replaced(start: int, nbytes: int) -> None:
        driver.maps, driver.populate = HEAP, populate  # type: ignore[method-assign]
        assert not memory.reaches(0x1000, 20)
        populate(start, nbytes)

    calls = driver.calls()
    memory._calls = replace(calls, populate=replaced)
    assert not memory.reaches(0x1000 + 100, 20)
    assert not driver.registered


def test_other_memory_is_not_registered() -> None:
    driver = Driver()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    for start, nbytes in ((0x9000, 50), (0x1150, 10), (0x2000, 10), (0x1130, 0x20), (0x1000, 0)):
        assert not memory.reaches(start, nbytes), hex(start)
    assert not driver.log


@pytest.mark.parametrize("why", ["refused", "not populated"])
def test_a_mapping_that_is_refused_is_not_tried_again(why: str) -> None:
    driver = Driver()
    (driver.refuses if why == "refused" else driver.unpopulated).add(0x1000 + 100)
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert memory.reaches(0x1000, 10)
    assert not memory.reaches(0x1000 + 50, 100)
    driver.refuses = driver.unpopulated = set()
    assert not memory.reaches(0x1000 + 150, 10)
    assert memory.reaches(0x1000, 10), "what is registered is of use"


def test_a_driver_that_raises_leaves_no_load_waiting() -> None:
    def broken(start: int, nbytes: int) -> bool:
        raise RuntimeError("CUDA error: initialization error")

    memory = RegisteredMemory(replace(Driver().calls(), register=broken), CHUNK)
    with pytest.raises(RuntimeError, match="initialization"):
        memory.reaches(0x1000, 10)
    reached: list[bool] = []
    other = threading.Thread(target=lambda: reached.append(memory.reaches(0x1000, 10)), daemon=True)
    other.start()
    other.join(10.0)
    assert reached == [False]
    memory.close()


def test_a_mapping_that_is_gone_is_unregistered_before_another_is_registered_in_its_place() -> None:
    driver = Driver()
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert memory.reaches(0x1000, 150)
    driver.maps = STORE.replace("77", "78")
    assert memory.reaches(0x1000, 50)
    assert driver.log == ["+1000", "+1064", "-1000", "-1064", "+1000"]
    driver.maps = STORE.replace("1000-1140", "1010-1100").replace("77", "79")
    assert memory.reaches(0x1020, 50)
    assert driver.log[5:] == ["-1000", "+1010"]
    driver.maps = HEAP
    assert not memory.reaches(0x1020, 50)
    assert not driver.registered


def test_own_memory_is_registered_as_a_whole_or_not_at_all() -> None:
    driver = Driver(refuses={700})
    memory = RegisteredMemory(driver.calls(), CHUNK)
    assert not memory.add(500, 250)
    assert not driver.registered
    assert not memory.add(500, 0)
    driver.refuses = set()
    assert memory.add(500, 250)
    assert driver.registered == {500: 600, 600: 700, 700: 750}
    assert memory.reaches(650, 100)
    assert not memory.reaches(740, 20)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 730), st.integers(1, 400))
def test_no_copy_crosses_the_border_of_two_chunks(offset: int, nbytes: int) -> None:
    """The driver refuses such a copy."""
    memory = RegisteredMemory(Driver().calls(), CHUNK)
    assert memory.add(500, 730)
    parts = list(memory.cuts(500 + offset, nbytes))
    assert [part[0] for part in parts] == [0, *(part[1] for part in parts[:-1])]
    assert parts[-1][1] == nbytes
    registered = range(500, 1230, CHUNK)
    for start, end in parts:
        assert start < end
        assert not any(500 + offset + start < border < 500 + offset + end for border in registered)


def test_a_records_memory_is_used_again_when_no_array_of_it_is_left() -> None:
    arena = RecordArena(np.zeros(3 * 4096, dtype=np.uint8))
    record = arena.empty(8000)
    assert record is not None
    assert record.flags.writeable
    assert arena.empty(5000) is None
    payload = record[4096:].view()
    record[:] = 7
    del record
    assert arena.free_bytes == 4096
    assert (payload == 7).all()
    del payload
    assert arena.free_bytes == 3 * 4096
    assert arena.empty(3 * 4096) is not None
