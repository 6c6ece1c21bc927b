"""What it costs to seal texts on a disk: a row, a reply, a kept turn, and the search of sealed knowledge.

`python -m bench.sealed`: CPU time of a thread, the median of five; with and without a key side by side.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from samovar.cache_tiers.encryption import (
    LeasedKeys,
    OuterKeys,
    OuterWrapper,
    Sealing,
    SessionKeyFile,
    SessionSealer,
    open_row,
    random_key,
    row_name,
    seal_row,
)
from samovar.cache_tiers.sessions import Item, ItemBounds, ItemStore
from samovar.configs.optional_sections import KnowledgeSettings
from samovar.router.context.knowledge import (
    Change,
    Content,
    Limits,
    LoopRecord,
    Provenance,
    RecordBounds,
    SqliteStore,
)
from samovar.router.context.sealed import open_sealed

TENANT, SESSION = b"t" * 16, b"s" * 8 + bytes(8)
ENTRIES, WRITE = 10_000, 100
REPEATS = 5


def cpu_us(call: Callable[[], object], count: int = 300) -> float:
    """Median CPU time of one call, us."""
    found = []
    for _ in range(REPEATS):
        begun_s = time.thread_time()
        for _ in range(count):
            call()
        found.append((time.thread_time() - begun_s) / count * 1e6)
    return statistics.median(found)


def sealing_in(folder: Path) -> Sealing:
    """Keys in a folder, without Ray."""
    folder.mkdir()
    outer = folder / "outer"
    outer.write_text(secrets.token_hex(32))
    keys = SessionKeyFile(folder / "session-keys", OuterKeys(outer), wall_clock=time.time)
    return Sealing(LeasedKeys(keys, time.monotonic), OuterWrapper(OuterKeys(outer)))


def of_rows() -> None:
    """Print what one row takes."""
    key, name = random_key(), row_name("reply", b"n" * 32, 1.0, 2.0)
    for size in (1000, 16384, 65536):
        data = bytes(size)
        sealed = seal_row(key, name, data)
        seal_us = cpu_us(partial(seal_row, key, name, data))
        open_us = cpu_us(partial(open_row, key, name, sealed))
        print(f"a row of {size} bytes: sealed in {seal_us:.1f} us, opened in {open_us:.1f} us")


def of_replies(folder: Path, sealing: Sealing | None) -> None:
    """Print what a reply of 16 KiB takes, on its way to the disk and from it after a restart."""

    def store() -> ItemStore:
        sealer = None if sealing is None else SessionSealer(sealing.sessions)
        bounds = ItemBounds(1 << 26, 4, folder / "replies.sqlite")
        return ItemStore(bounds, lambda tenant, session: 0.0, lambda: 20.0, sealer)

    item = Item(TENANT, SESSION, "reply", b"n" * 32, bytes(16384), 10.0, 110.0, is_durable=True)
    first = store()
    kept_us = cpu_us(lambda: first.put([item]))
    first.close()
    again = store()
    recalled_us = cpu_us(lambda: again.replies(TENANT, SESSION))
    print(f"a reply of 16 KiB: kept in {kept_us:.0f} us, recalled in {recalled_us:.0f} us")
    again.close()


def of_knowledge(folder: Path, sealing: Sealing | None) -> None:
    """Print what turns, entries and searches take."""
    store: Any = SqliteStore(folder / "knowledge.sqlite")
    if sealing is not None:
        store = open_sealed(store, KnowledgeSettings(), "", sealing=sealing, tag_of=lambda _: TENANT)
    bounds, me = RecordBounds(10**6, 2**30), Provenance("me")
    number = iter(range(10**6))

    def keep() -> None:
        name = f"t{next(number)}"
        store.records.put("tea", LoopRecord("turn", name, "x" * 4096, name, SESSION, at_s=2e9), bounds)

    print(f"a turn of 4 KiB: kept in {cpu_us(keep):.0f} us")

    def write(first: int, count: int) -> None:
        texts = [
            f"entry {one} says what word{one % WRITE} is: {'text ' * 60}"
            for one in range(first, first + count)
        ]
        store.write(
            "tea", [Change(Content("gotcha", "", text), me) for text in texts], Limits(10**6, 2**40, 9)
        )

    def search() -> float:
        begun_s = time.thread_time()
        store.by_words("tea", ["word7"], (), 9)
        return (time.thread_time() - begun_s) * 1e3

    begun_s = time.thread_time()
    for first in range(0, ENTRIES, WRITE):
        write(first, WRITE)
    wrote_s, first_ms = time.thread_time() - begun_s, search()
    next_ms = statistics.median(search() for _ in range(20))
    write(ENTRIES, 1)
    print(
        f"{ENTRIES} entries: written in {wrote_s:.2f} s; the first search {first_ms:.1f} ms, the next"
        f" {next_ms:.2f} ms, one behind a write {search():.0f} ms"
    )
    store.close()


if __name__ == "__main__":
    of_rows()
    for is_sealed in (False, True):
        print("sealed:" if is_sealed else "plain:")
        with tempfile.TemporaryDirectory() as made:
            sealing = sealing_in(Path(made) / "keys") if is_sealed else None
            of_replies(Path(made), sealing)
            of_knowledge(Path(made), sealing)
