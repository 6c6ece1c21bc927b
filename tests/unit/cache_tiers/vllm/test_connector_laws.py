"""Laws of the connector: what is loaded is what would have been computed, whatever happens meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks import CPU
from samovar.cache_tiers.media import Room
from samovar.cache_tiers.messages import BlockRange, Cleared, Fetch, FetchFailed
from samovar.cache_tiers.socket.client import Loaded
from samovar.cache_tiers.socket.process import TierProcess
from samovar.cache_tiers.vllm import idle_wait
from samovar.cache_tiers.vllm.messages import ConnectorOptions, Load
from samovar.cache_tiers.vllm.worker import WorkerHalf
from samovar.configs.loader import load
from tests.support.fake_vllm import BLOCK_TOKENS, FakePages, FakeVllm, prompt

MIB = 1024 * 1024


class Node:
    """`samovar tiers` in this process. `start` after `stop` is another life on the same directory."""

    def __init__(self, folder: Path, **flags: object) -> None:
        self.socket = folder / "run" / "tiers.sock"
        self.folder = folder
        words = {"tiers.nvme.dir": folder / "kv", "tiers.cpu.bytes-max": 64 * MIB, "model.cache-dir": folder}
        words |= {"tiers.nvme.bytes-max": 64 * MIB} | flags
        self.settings = load(None, {}, [f"--{name}={value}" for name, value in words.items()]).settings
        self.process: TierProcess | None = None
        self.start()

    def start(self) -> None:
        self.process = TierProcess(self.settings, self.socket)

    def until_blocks(self, blocks: int) -> None:
        assert self.process is not None
        ends_s = time.monotonic() + 60
        while self.process.stats().tiers[0].blocks < blocks:
            assert time.monotonic() < ends_s
            time.sleep(0.005)

    def stop(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def engines(node: Node) -> Iterator[Any]:
    made: list[FakeVllm] = []

    def make(**options: Any) -> FakeVllm:
        made.append(FakeVllm(node.socket, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.settle()
        engine.close()


def until_held(engine: FakeVllm, ids: list[int], **fields: Any) -> int:
    """Run the same prompt again until its blocks are there; return how many tokens were loaded."""
    ends_s = time.monotonic() + 60
    while not (loaded := engine.run(engine.request(ids, **fields))):
        assert time.monotonic() < ends_s
        engine.settle()
        time.sleep(0.01)
    return loaded


def test_a_prompt_that_comes_again_is_loaded(engines: Any) -> None:
    engine, ids = engines(), prompt(1, 10)
    assert engine.run(engine.request(ids)) == 0
    assert engine.receipts[0]["stored_blocks"] == 11  # with what it has answered
    assert until_held(engine, ids) == 10 * BLOCK_TOKENS
    assert engine.receipts[-1]["tokens_by_tier"] == {"cpu": 10 * BLOCK_TOKENS}


def test_an_engine_that_computes_nothing_is_woken_by_what_it_waits_for(
    node: Node, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup, a fetch, a load, a store: who is not woken waits for a minute here."""
    monkeypatch.setattr(idle_wait, "IDLE_S", 60.0)
    began_s, engine, ids = time.monotonic(), engines(), prompt(1, 6)
    until_held(engine, ids)
    engine.settle()
    node.stop()
    node.start()
    assert until_held(engine, ids) == 6 * BLOCK_TOKENS
    assert engine.receipts[-1]["tokens_by_tier"].keys() <= {"cpu", "nvme"}
    assert time.monotonic() - began_s < idle_wait.IDLE_S


def test_it_is_there_after_a_restart_of_both(node: Node, engines: Any) -> None:
    engine, ids = engines(), prompt(1, 10)
    until_held(engine, ids)
    engine.settle()
    node.stop()
    node.start()
    again = engines()
    assert until_held(again, ids) == 10 * BLOCK_TOKENS
    assert again.receipts[-1]["tokens_by_tier"] == {"nvme": 10 * BLOCK_TOKENS}


def test_what_is_being_stored_is_not_stored_again(engines: Any) -> None:
    """The second request begins before the tiers have what the first one stores."""
    engine, ids = engines(), prompt(1, 10)
    second, pages = engine.request(ids + prompt(2, 3)), engine.free[:20]
    engine.scheduler.begin(second)
    assert engine.matched(second) == 0
    engine.run(engine.request(ids))
    assert engine.receipts[-1]["stored_blocks"] == 11
    engine.compute(second, pages, 0, 5, None)
    _, params = engine.scheduler.ended(second, pages, "stop")
    assert params["samovar"]["stored_blocks"] == 4  # from where the two part


def test_a_conversation_of_the_whole_pool_is_stored(engines: Any) -> None:
    engine, ids = engines(pages=16), prompt(1, 13)
    engine.run(engine.request(ids))
    assert engine.receipts[-1]["stored_blocks"] == 14
    engine.settle()
    assert until_held(engine, ids) == 13 * BLOCK_TOKENS


def test_of_stores_side_by_side_the_front_is_stored_as_far_as_pages_may_be_kept(engines: Any) -> None:
    engine, long, short = engines(pages=32), prompt(1, 15), prompt(2, 15)
    engine.scheduler.begin(first := engine.request(long))
    engine.scheduler.begin(second := engine.request(short))
    pages = [engine.free[:16], engine.free[16:]]
    stored = []
    for request, of in zip((first, second), pages, strict=True):
        assert engine.matched(request) == 0
        engine.compute(request, of, 0, 5, None)
        _, params = engine.scheduler.ended(request, of, "stop")
        stored.append(params["samovar"].get("stored_blocks", 0))
    assert stored == [16, int(0.75 * 32) - 16]
    _, cut = engine.scheduler.step(0, 0).stores
    assert (cut.first, len(cut.pages), len(cut.token_ids)) == (0, 8, 8 * BLOCK_TOKENS)


def test_the_same_ids_with_another_image_are_another_prompt(engines: Any) -> None:
    engine, ids = engines(), prompt(1, 6)
    until_held(engine, ids, images={2: "cat"})
    assert engine.run(engine.request(ids, images={2: "dog"})) == 2 * BLOCK_TOKENS
    assert until_held(engine, ids, images={2: "cat"}) == 6 * BLOCK_TOKENS


def test_keys_that_leave_the_image_out_are_seen(engines: Any) -> None:
    engine, ids = engines(extra_of=lambda request, tokens: []), prompt(1, 6)
    until_held(engine, ids, images={2: "cat"})
    with pytest.raises(AssertionError, match="not its own"):
        engine.run(engine.request(ids, images={2: "dog"}))


@pytest.mark.parametrize("other", [{"world": "b"}, {}])
def test_another_model_and_another_tenant_find_nothing(engines: Any, other: dict[str, str]) -> None:
    engine, ids = engines(), prompt(1, 6)
    until_held(engine, ids)
    stranger = engines(**other)
    fields = {} if other else {"kv_transfer_params": {"tenant": "other"}}
    assert stranger.run(stranger.request(ids, **fields)) == 0


def test_a_flipped_bit_is_never_served(node: Node, engines: Any) -> None:
    engine, ids = engines(), prompt(1, 10)
    until_held(engine, ids)
    engine.settle()
    node.stop()
    (record,) = [path for path in (node.folder / "kv").rglob("*.kv") if path.stat().st_size > 8 * 1536] or [
        None
    ]
    if record is None:
        pytest.fail("no record on disk")
    data = bytearray(record.read_bytes())
    data[-3 * 1536] ^= 1
    record.write_bytes(data)
    node.start()
    again = engines()
    loaded = again.run(again.request(ids))
    assert loaded < 10 * BLOCK_TOKENS
    assert sum(again.receipts[-1]["tokens_by_tier"].values()) == loaded  # what failed is not told as loaded
    assert until_held(again, ids) > 0


def in_two_records(node: Node, engines: Any) -> tuple[FakeVllm, list[int]]:
    """Return a new engine over a prompt that one record has in front and another behind."""
    first, ids = engines(), prompt(1, 10)
    until_held(first, ids[: 4 * BLOCK_TOKENS + 1])
    until_held(first, ids)
    first.settle()
    node.until_blocks(10)
    made: FakeVllm = engines()
    assert made.run(made.request(ids)) == 10 * BLOCK_TOKENS
    return made, ids


def test_a_load_of_several_records_is_over_with_the_last(
    node: Node, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread is late: until then it may write into the pages."""
    engine, ids = in_two_records(node, engines)
    engine.settle()  # what `late` asks the worker, it is not told again: of a store that ends then
    link, seen = engine.links[1], list[int]()
    real = link.fetch

    def late(fetch: Fetch, room: Room | None = None) -> Loaded | FetchFailed:
        if fetch.blocks == 4:  # the one in front
            for _ in range(20):
                time.sleep(0.002)
                seen.append(len(engine.worker.finished()[1]))
        return real(fetch, room)

    monkeypatch.setattr(link, "fetch", late)
    assert engine.run(engine.request(ids)) == 10 * BLOCK_TOKENS
    assert seen == [0] * 20


def test_behind_a_record_that_is_not_there_nothing_counts(
    node: Node, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = in_two_records(node, engines)
    link, real = engine.links[1], engine.links[1].fetch

    def gone(fetch: Fetch, room: Room | None = None) -> Loaded | FetchFailed:
        return FetchFailed("gone") if fetch.blocks == 4 else real(fetch, room)

    monkeypatch.setattr(link, "fetch", gone)
    assert engine.run(engine.request(ids)) == 0


def test_a_node_that_dies_costs_a_recompute(node: Node, engines: Any) -> None:
    engine, ids = engines(), prompt(1, 10)
    until_held(engine, ids)
    node.stop()
    for number in range(5):
        assert engine.run(engine.request(prompt(number, 8))) == 0
    node.start()
    assert until_held(engine, ids) == 10 * BLOCK_TOKENS


@pytest.mark.parametrize("aborts", ["loading", "computing"])
def test_an_aborted_request_stores_only_what_is_there(engines: Any, aborts: str) -> None:
    engine, ids = engines(), prompt(1, 12)
    until_held(engine, ids[: 8 * BLOCK_TOKENS + 1])
    for _ in range(3):
        engine.run(engine.request(ids), aborts=aborts)
        engine.settle()
    assert until_held(engine, ids) % BLOCK_TOKENS == 0


def test_blocks_of_steps_under_way_are_not_stored(node: Node, engines: Any) -> None:
    """Planted: what vLLM counts as computed is believed. The next load sees it."""
    engine, ids = engines(), prompt(1, 6)
    request = engine.request(ids)
    believed = property(lambda _: 0, lambda *_: None)
    request.__class__ = type("Believed", (type(request),), {"num_in_flight_tokens": believed})
    engine.run(request, output=20, aborts="computing")
    engine.settle()
    node.until_blocks(5)
    with pytest.raises(AssertionError, match="not its own"):
        until_held(engine, ids)


def test_pages_that_are_read_too_late_are_noticed(engines: Any) -> None:
    """Planted: others write a page between its copy and its second reading."""
    engine, ids = engines(), prompt(1, 6)
    reads = []

    def overwrite() -> None:
        reads.append(1)
        if len(reads) % 2 == 0:
            engine.pages.memory[:] = len(reads)

    engine.pages.before_gather = overwrite
    engine.run(engine.request(ids))
    engine.settle()
    assert engine.counts["stores", "read too early"] == 1
    engine.pages.before_gather = lambda: None
    assert engine.run(engine.request(ids)) == 0


def test_a_load_is_asked_for_once(engines: Any) -> None:
    """vLLM asks again for what failed: a claim that is repeated is an endless loop."""
    engine, ids = engines(), prompt(1, 6)
    until_held(engine, ids)
    request = engine.request(ids)
    engine.scheduler.begin(request)
    tokens = engine.matched(request)
    assert tokens == 6 * BLOCK_TOKENS
    assert engine.scheduler.matched(request, 0) == tokens  # until it is scheduled
    engine.scheduler.allocated(request, engine.free[:10], tokens)
    assert engine.scheduler.matched(request, 0) == 0
    engine.start(engine.scheduler.step(0, 0))
    engine.received(request)
    engine.scheduler.ended(request, [], "abort")


def test_a_load_that_was_not_planned_is_computed(engines: Any) -> None:
    """vLLM has counted on blocks that we did not promise: each of their pages is told as bad."""
    engine, ids = engines(), prompt(1, 6)
    until_held(engine, ids)
    request = engine.request(ids)
    engine.scheduler.begin(request)
    tokens = engine.matched(request)
    for unplanned, one in ((tokens - BLOCK_TOKENS, request), (tokens, engine.request(ids))):
        pages = engine.free[: unplanned // BLOCK_TOKENS]
        engine.scheduler.allocated(one, pages, unplanned)
        engine.start(engine.scheduler.step(0, 0))
        assert engine.received(one) == set(pages)
        engine.scheduler.ended(one, [], "abort")


def test_after_a_clear_nothing_is_found_whosoever_it_was(engines: Any) -> None:
    engine, ids, other = engines(), prompt(1, 6), {"kv_transfer_params": {"tenant": "other"}}
    until_held(engine, ids)
    until_held(engine, ids, **other)
    assert engine.scheduler.clear(30.0)
    assert engine.run(engine.request(ids)) == 0
    assert engine.run(engine.request(ids, **other)) == 0
    assert until_held(engine, ids) == 6 * BLOCK_TOKENS


@pytest.mark.parametrize("left", [{"unreachable": ("s3",)}, {"is_noted": False}])
def test_a_clear_that_leaves_something_says_so(
    engines: Any, monkeypatch: pytest.MonkeyPatch, left: dict[str, Any]
) -> None:
    """A bucket that does not answer, or a clear that a restart forgets: it has to be asked for again."""
    engine = engines()
    monkeypatch.setattr(engine.links[0], "clear", lambda clear, timeout_s: Cleared(1, 1, **left))
    assert not engine.scheduler.clear(30.0)


class SlowTiers:
    """Tiers whose fetches take so long each, and fail, and a pool that begins when it is told to."""

    def __init__(self, fetch_s: float) -> None:
        self.now_s = 0.0
        self.fetch_s = fetch_s
        self.deadlines_s: list[float] = []
        self.waiting: list[Callable[[], None]] = []
        options = ConnectorOptions(Path("/none"), load_s_max=10.0)
        self.worker = WorkerHalf(
            options,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            FakePages(16),
            block_tokens=BLOCK_TOKENS,
            clock=lambda: self.now_s,
        )

    def submit(self, work: Any, *args: Any) -> Future[Any]:
        self.waiting.append(lambda: work(*args))
        return Future()

    def fetch(self, fetch: Fetch, room: Room | None = None) -> Loaded | FetchFailed:
        self.deadlines_s.append(fetch.deadline_s)
        self.now_s += min(self.fetch_s, fetch.deadline_s)
        return FetchFailed("timeout")

    def load(self, spans: int, queue_s: float) -> set[int]:
        """Load a block in each of so many records; return the pages that are bad once all is over."""
        records = tuple(
            BlockRange(bytes([at]) * 32, b"t" * 16, at, 0, 1, CPU.name, 100) for at in range(spans)
        )
        pages = tuple(range(3, 3 + spans))
        self.worker.start(
            [Load("r", b"n" * 32, (records,), 0, (b"k" * 32,) * spans, pages)], (), lambda: None
        )
        self.now_s += queue_s
        for work in self.waiting:
            assert self.worker.finished() == (set(), set(), set())
            work()
        _, received, bad = self.worker.finished()
        assert received == {"r"}
        return bad


@pytest.mark.parametrize(
    ("fetch_s", "queue_s", "deadlines_s"),
    [(6.0, 0.0, [10.0, 4.0]), (2.0, 7.0, [3.0, 1.0]), (1.0, 10.0, []), (1.0, 0.0, [10.0, 9.0, 8.0, 7.0])],
)
def test_a_load_has_one_end_for_all_its_records_and_their_queue(
    fetch_s: float, queue_s: float, deadlines_s: list[float]
) -> None:
    tiers = SlowTiers(fetch_s)
    assert tiers.load(4, queue_s) == {3, 4, 5, 6}
    assert tiers.deadlines_s == deadlines_s
    assert tiers.now_s <= 10
    counts = tiers.worker.counted()
    assert counts["failed_loads", "late"] == 4 - len(deadlines_s)
    assert counts["failed_loads", "timeout"] == len(deadlines_s)


def test_what_began_before_a_clear_is_neither_loaded_nor_stored(engines: Any) -> None:
    """The weights may have been changed in place: KV of before is that of others."""
    engine, ids = engines(), prompt(1, 6)
    until_held(engine, ids)
    engine.settle()
    waits, runs = engine.request(ids), engine.request(ids[:-1] + prompt(2, 3))
    for request in (waits, runs):
        engine.scheduler.begin(request)
        assert engine.matched(request) == 6 * BLOCK_TOKENS
    assert engine.scheduler.clear(30.0)
    assert engine.scheduler.matched(waits, 0) == 0
    pages = [engine.free.pop() for _ in range(11)]
    engine.compute(runs, pages, 0, 5, None)
    keeps, params = engine.scheduler.ended(runs, pages, "stop")
    assert not keeps
    assert "stored_blocks" not in params["samovar"]


def test_many_turns_in_any_order(node: Node, engines: Any) -> None:
    """Conversations that grow, fork, are aborted, over a node that comes and goes and a tiny main memory."""
    rng = random.Random(11)
    engine = engines(pages=512)
    chats = [prompt(seed, 3) for seed in range(6)]
    for number in range(150):
        ids = rng.choice(chats)
        aborts = rng.choice(["", "", "", "loading", "computing"])
        engine.run(engine.request(ids, session_id=f"s{len(ids)}"), output=rng.randrange(1, 9), aborts=aborts)
        if len(ids) < 40 * BLOCK_TOKENS:
            ids += prompt(number, rng.randrange(3))
        if number % 40 == 39:
            engine.settle()
            node.stop()
            node.start()
    assert engine.loaded_tokens > 0
    engine.settle()


def test_what_cannot_be_begun_is_not_waited_for(engines: Any) -> None:
    class Broken(Executor):
        def submit(self, *_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError("cannot start a thread")

    engine, ids = engines(), prompt(1, 6)
    until_held(engine, ids)
    engine.settle()
    broken = engines(worker_pool=Broken())
    assert broken.run(broken.request(ids)) == 0
