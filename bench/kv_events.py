"""`python -m bench.kv_events`: what KV events cost: a block of the pool, and a record in a tier, on and off.

`own`: CPU time of the thread that admits, stores and evicts. `all`: of the process, with the publisher's
thread and ZeroMQ's; a subscriber in another process takes every message.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from bench import _report as report
from samovar.cache_tiers.blocks import ROOT, TAG_BYTES, BlockShape, ExtentHeader, Placement, block_key
from samovar.cache_tiers.catalog import Catalog, Clears, Transfer, announced_catalog
from samovar.cache_tiers.events.feed import EventFeed
from samovar.cache_tiers.events.publisher import EventPublisher
from samovar.cache_tiers.policy import LeastRecentlyUsed
from samovar.replicas.kv import ROOT_ENTRY, AnnouncedPool, PagePool

PORTS = range(45_557, 45_620)
BLOCK_TOKENS, PROMPT_BLOCKS, PAGES = 16, 256, 1025
PROMPTS, ROUNDS = 200, 7
EXTENT_BLOCKS, EXTENTS, HELD = 64, 1500, 400
OWNER = bytes(2 * TAG_BYTES)
PLACEMENT = Placement(min_ttl_s=0.0, ttl_s=1e9)

SUBSCRIBER = """
import sys, zmq
sub = zmq.Context().socket(zmq.SUB)
sub.subscribe(b"")
sub.connect("tcp://127.0.0.1:" + sys.argv[1])
while True:
    sub.recv_multipart()
"""

Seconds = tuple[float, float]


@contextmanager
def listened_to(is_on: bool) -> Iterator[EventFeed | None]:
    """Yield the feed of a publisher with a subscriber; None: nothing is told."""
    if not is_on:
        yield None
        return
    publisher = EventPublisher("127.0.0.1", PORTS, model="bench")
    while publisher.port is None:
        time.sleep(0.01)
    subscriber = subprocess.Popen([sys.executable, "-c", SUBSCRIBER, str(publisher.port)])
    try:
        yield publisher.feed
    finally:
        subscriber.kill()
        subscriber.wait()
        publisher.close()


def timed(work: Callable[[], None], feed: EventFeed | None) -> Seconds:
    """Return CPU seconds of this thread, and of the process until all is published."""
    own_s, all_s = time.thread_time(), time.process_time()
    work()
    own_s = time.thread_time() - own_s
    while feed is not None and len(feed):
        time.sleep(0.001)
    return own_s, time.process_time() - all_s


def admissions(feed: EventFeed | None) -> Seconds:
    """Prompts that are published in a full pool, each block evicting one, then found and released."""
    pool = PagePool(PAGES, BLOCK_TOKENS) if feed is None else AnnouncedPool(feed, True, PAGES, BLOCK_TOKENS)
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(PROMPTS):
        tokens = rng.integers(0, 50_000, PROMPT_BLOCKS * BLOCK_TOKENS).tolist()
        keys, parent = [], ROOT
        for start in range(0, len(tokens), BLOCK_TOKENS):
            parent = block_key(bytes(32), parent, tokens[start : start + BLOCK_TOKENS])
            keys.append(parent)
        prompts.append((tokens, keys))

    def work() -> None:
        for tokens, keys in prompts:
            pages, parent = [], ROOT_ENTRY
            for block, key in enumerate(keys):
                page = pool.allocate()
                ids = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
                published = pool.publish(key, parent, ids, page)
                assert published is not None
                pool.own(OWNER, page)
                parent = published.entry.number
                pages.append(page)
            pool.release(pages)

    return timed(work, feed)


def stores(feed: EventFeed | None) -> Seconds:
    """Records that a full tier takes, each evicting one: the directory alone, without a medium."""
    shape = BlockShape(layers=30, layer_bytes=6144, block_tokens=BLOCK_TOKENS)
    made = Catalog if feed is None else lambda *args, **rest: announced_catalog(feed, *args, **rest)
    rng = np.random.default_rng(0)
    headers = [
        ExtentHeader(
            namespace=bytes(32),
            tenant=bytes(TAG_BYTES),
            session=number.to_bytes(TAG_BYTES, "big"),
            shape=shape,
            parent=ROOT,
            first_block=0,
            keys=tuple(rng.bytes(32) for _ in range(EXTENT_BLOCKS)),
            token_counts=(BLOCK_TOKENS,) * EXTENT_BLOCKS,
            checksums=np.zeros((EXTENT_BLOCKS, shape.layers), np.uint64),
            version=2,
            placement=PLACEMENT,
            created_unix_s=0.0,
        )
        for number in range(EXTENTS)
    ]
    nbytes = headers[0].payload_bytes
    catalog = made(
        {"cpu": HELD * nbytes},
        LeastRecentlyUsed(),
        clock=time.monotonic,
        tenant_share=lambda _: 1.0,
        clears=Clears(10, 0.0, time.monotonic),
        transfers_max=100,
    )

    def work() -> None:
        for header in headers:
            catalog.clears.asked(header.tenant, header.session)
            transfer = catalog.reserve("cpu", header, nbytes, clear_seq=catalog.clears.seq)
            assert isinstance(transfer, Transfer)
            for victim in transfer.victims:
                catalog.dropped(victim)
            catalog.transfers.advance(transfer, "copying")
            catalog.transfers.advance(transfer, "verified")
            assert catalog.commit(transfer)
            catalog.transfers.end(transfer)

    return timed(work, feed)


def main() -> None:
    """Measure both, off and on in turns, at best: what else runs takes the cores' caches, too."""
    rows: list[dict[str, str | float]] = []
    for name, work, count in (("block", admissions, PROMPTS * PROMPT_BLOCKS), ("record", stores, EXTENTS)):
        found: dict[bool, list[Seconds]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for is_on in found:
                with listened_to(is_on) as feed:
                    found[is_on].append(work(feed))
        for is_on, seconds in found.items():
            own_s, all_s = (min(column) / count for column in zip(*seconds, strict=True))
            events = "on" if is_on else "off"
            rows.append({"of": name, "events": events, "own_us": own_s * 1e6, "all_us": all_s * 1e6})
    report.show("KV events, CPU time of each", rows)
    report.write("kv-events", rows, module="kv_events")


if __name__ == "__main__":
    main()
