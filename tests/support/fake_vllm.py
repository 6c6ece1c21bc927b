"""An engine as vLLM is to a connector. Its KV tells what it was computed from: any wrong byte is seen."""

from __future__ import annotations

import functools
import hashlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from samovar.cache_tiers.blocks import Bytes
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.vllm.messages import ConnectorOptions, Jobs, PageLayout
from samovar.cache_tiers.vllm.names.chain import extra_digest
from samovar.cache_tiers.vllm.names.identity import namespace_of
from samovar.cache_tiers.vllm.replica_turn import Told
from samovar.cache_tiers.vllm.scheduler import Hearers, SchedulerHalf, Threads
from samovar.cache_tiers.vllm.worker import WorkerHalf

LAYERS, LAYER_BYTES, BLOCK_TOKENS = 3, 512, 4
LAYOUT = PageLayout(tuple(f"layer {number} float32 (4, 32)" for number in range(LAYERS)), LAYER_BYTES)
GARBAGE = 0xEE
THREADS = 2


def kv_of(world: str, ids: Sequence[int], extra: Sequence[object], rank: int = 0) -> Bytes:
    """The KV of the last block of `ids` on a rank: of everything before it, and of what it depends on."""
    seed = hashlib.sha256(f"{world} {list(ids)} {list(extra)} {rank}".encode()).digest()
    rng = np.random.default_rng(np.frombuffer(seed, dtype=np.uint32))
    return rng.integers(0, 256, (LAYERS, LAYER_BYTES), dtype=np.uint8)


@dataclass
class FakeRequest:
    """The fields of vLLM's that the connector reads. `images`: by block, what is in it besides its ids."""

    request_id: str
    prompt_token_ids: list[int]
    images: dict[int, str] = field(default_factory=dict)
    session_id: str | None = None
    kv_transfer_params: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's own: of all that is before them."""
        ids = self.all_token_ids
        ends = range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS)
        return [hashlib.sha256(f"vllm {ids[:end]} {self.images}".encode()).digest() for end in ends]


def image_digests(request: FakeRequest, tokens: int) -> list[bytes]:
    blocks = tokens // BLOCK_TOKENS
    return [extra_digest((request.images[at],)) if at in request.images else b"" for at in range(blocks)]


class Lane(ThreadPoolExecutor):
    """Knows what it was given: `wait` waits for it, however busy the machine is."""

    def __init__(self) -> None:
        super().__init__(THREADS)
        self._given: list[Future[Any]] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self._given = [one for one in self._given if not one.done()] + [super().submit(*args, **kwargs)]
        return self._given[-1]

    def wait(self) -> None:
        wait(self._given)


class FakePages:
    """Pages in memory. `before_gather`: a place for faults."""

    def __init__(self, pages: int) -> None:
        self.layout = LAYOUT
        self.memory = np.full((pages, LAYERS, LAYER_BYTES), GARBAGE, dtype=np.uint8)
        self.before_gather: Callable[[], None] = lambda: None

    def gather(self, pages: Sequence[int], out: Bytes) -> None:
        self.before_gather()
        out[:] = self.memory[list(pages)]

    def scatter(self, pages: Sequence[int], blocks: Bytes) -> None:
        self.memory[list(pages)] = blocks

    def compute(self, page: int, block: Bytes | int) -> None:
        """Have a step write a page: of a device some time later."""
        self.memory[page] = block

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def settle(self) -> None:
        """Let all computing happen: vLLM gives pages to nobody else before."""


class FakeVllm:
    """Runs one request after the other through both halves of the connector. `world`: whose weights.

    `ranks`: workers with pages of their own. As in vLLM a load or a store is over when it is on all of them,
    and a page is bad if it is on one.
    """

    def __init__(
        self,
        socket: Path,
        *,
        world: str = "a",
        pages: int = 256,
        ranks: int = 1,
        events: bool = False,
        tell: Callable[[Told], None] | None = None,
        extra_of: Callable[[FakeRequest, int], Sequence[bytes]] | None = None,
        worker_pool: Executor | None = None,
        make_pages: Callable[[int], FakePages] = FakePages,
    ) -> None:
        self.world = world
        self.options = ConnectorOptions(socket, lookup_s_max=30.0, load_s_max=30.0, trusts_clients=True)
        names = ("scheduler", *(f"worker {rank}" for rank in range(ranks)))
        self.links = [SocketLink(socket, name, call_s=30.0) for name in names]
        self.lookups = Lane()
        self.pools = [self.lookups, *(ThreadPoolExecutor(THREADS) for _ in range(1 + ranks))]
        self.rank_pages = [make_pages(pages) for _ in range(ranks)]
        self.pages = self.rank_pages[0]
        self.free = list(range(1, pages))
        self.kept: dict[str, list[int]] = {}
        self.scheduler = SchedulerHalf(
            self.options,
            self.links[0],
            Threads(self.pools[0], self.pools[1]),
            block_tokens=BLOCK_TOKENS,
            pages=pages,
            extra_of=lambda request: functools.partial(extra_of or image_digests, request),
            hearers=Hearers(events, tell),
        )
        namespace = namespace_of(
            weights=hashlib.sha256(world.encode()).digest(),
            vllm="0.32.0",
            config="{}",
            block_tokens=BLOCK_TOKENS,
            layouts=[LAYOUT] * ranks,
        )
        self.scheduler.named(namespace, ranks)
        self.workers = [
            WorkerHalf(
                self.options,
                self.links[1 + rank],
                worker_pool or self.pools[2 + rank],
                self.rank_pages[rank],
                block_tokens=BLOCK_TOKENS,
                rank=rank,
            )
            for rank in range(ranks)
        ]
        self.worker = self.workers[0]
        self.counts: Counter[tuple[str, str]] = Counter()
        self._left: dict[tuple[str, str], int] = {}  # what and request -> ranks that have not ended it
        self.loaded_tokens = 0
        self.receipts: list[dict[str, Any]] = []
        self.numbers = 0

    def truth(self, request: FakeRequest, block: int, rank: int) -> Bytes:
        ids = request.all_token_ids[: (block + 1) * BLOCK_TOKENS]
        return kv_of(self.world, ids, [request.images.get(at, "") for at in range(block + 1)], rank)

    def request(self, ids: Sequence[int], **fields: Any) -> FakeRequest:
        self.numbers += 1
        return FakeRequest(f"r{self.numbers}", list(ids), **fields)

    def run(self, request: FakeRequest, *, output: int = 5, aborts: str = "") -> int:
        """Serve a request, checking all that was loaded; return the tokens that were loaded.

        `aborts`: "loading" = while its load runs, "computing" = in the middle of its prompt.
        """
        self.scheduler.begin(request)
        loaded = self.matched(request)
        total = len(request.prompt_token_ids) + output
        pages = [self.free.pop() for _ in range(-(-total // BLOCK_TOKENS))]
        self.scheduler.allocated(request, pages, loaded)
        request.num_computed_tokens = loaded  # as vLLM has it while the load still runs
        jobs = self.scheduler.step(0, 0)
        self.start(jobs)
        if aborts == "loading" and loaded:
            self._end(request, pages, is_loading=True)
            return 0
        bad = self.received(request) if loaded else set()
        good = next(
            (at for at in range(loaded // BLOCK_TOKENS) if pages[at] in bad),
            loaded // BLOCK_TOKENS,
        )
        for block in range(good):
            for rank, own in enumerate(self.rank_pages):
                wrong = own.memory[pages[block]] != self.truth(request, block, rank)
                assert not wrong.any(), f"block {block} of {request.request_id} was loaded and is not its own"
        stop = len(request.prompt_token_ids) // 2 if aborts == "computing" else None
        self.compute(request, pages, good, output if stop is None else 0, stop)
        self.loaded_tokens += good * BLOCK_TOKENS
        self._end(request, pages)
        return good * BLOCK_TOKENS

    def matched(self, request: FakeRequest) -> int:
        self.lookups.wait()
        while True:
            tokens = self.scheduler.matched(request, 0)
            self.scheduler.check_integrity()
            if tokens is not None:
                return tokens
            self.start(self.scheduler.step(0, 0, is_idle=True))

    def received(self, request: FakeRequest) -> set[int]:
        bad: set[int] = set()
        while True:
            received, now_bad = self.step_over(is_idle=True)
            bad |= now_bad
            if request.request_id in received:
                return bad

    def start(self, jobs: Jobs) -> None:
        for worker, own in zip(self.workers, self.rank_pages, strict=True):
            worker.start(jobs.loads, jobs.stores, own.mark())

    def step_over(self, *, is_idle: bool = False) -> tuple[set[str], set[int]]:
        """End a step: return the requests that are loaded on all ranks, and pages that are bad on one.

        `is_idle`: it has computed nothing.
        """
        sent, received, bad = set[str](), set[str](), set[int]()
        taken: dict[str, dict[int, int]] = {}
        for worker in self.workers:
            ended = worker.finished(may_wait=is_idle)
            sent |= self._on_all("sent", ended[0])
            received |= self._on_all("received", ended[1])
            bad |= ended[2]
            for request_id, blocks in worker.taken().items():
                taken.setdefault(request_id, {}).update(blocks)
            self.counts.update(worker.counted())
        self.scheduler.stepped(received, sent, bad, taken)
        self._free(sent)
        return received, bad

    def _on_all(self, what: str, requests: Iterable[str]) -> set[str]:
        done = set()
        for request_id in requests:
            left = self._left.pop((what, request_id), len(self.workers)) - 1
            if left:
                self._left[what, request_id] = left
            else:
                done.add(request_id)
        return done

    def compute(
        self, request: FakeRequest, pages: list[int], first: int, output: int, stop: int | None
    ) -> None:
        request.output = [7 * at % 1000 for at in range(output)]
        sure = request.num_tokens - 1 if stop is None else stop
        for block in range(first, len(pages)):
            for rank, own in enumerate(self.rank_pages):
                if (block + 1) * BLOCK_TOKENS <= sure:
                    own.compute(pages[block], self.truth(request, block, rank))
                else:
                    own.compute(pages[block], GARBAGE)  # half a block, or nothing yet
        # A step is under way whose tokens vLLM counts already.
        request.num_computed_tokens = sure + 2 * BLOCK_TOKENS
        request.num_in_flight_tokens = 2 * BLOCK_TOKENS

    def _end(self, request: FakeRequest, pages: list[int], *, is_loading: bool = False) -> None:
        keeps, params = self.scheduler.ended(request, pages, "stop")
        self.receipts.append((params or {}).get("samovar", {}))
        assert not (keeps and is_loading), "pages that are being written are to be stored"
        if keeps or is_loading:
            self.kept[request.request_id] = pages
        else:
            self._scribble(pages)
        self.start(self.scheduler.step(0, 0))
        if is_loading:
            self.received(request)
            self._free({request.request_id})

    def _free(self, requests: set[str]) -> None:
        for request_id in requests:
            if request_id in self.kept:
                self._scribble(self.kept.pop(request_id))

    def _scribble(self, pages: list[int]) -> None:
        """Give pages back: what reads them from now on reads what others write there."""
        for own in self.rank_pages:
            own.settle()
            own.memory[pages] = GARBAGE
        self.free.extend(pages)

    def settle(self) -> None:
        """Wait until no page is kept any more."""
        while self.kept:
            self.step_over(is_idle=True)
        for pool in self.pools:  # and until its threads have nothing to do
            together = threading.Barrier(THREADS + 1)
            for _ in range(THREADS):
                pool.submit(together.wait)
            together.wait()
        self.step_over()

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown()
        for link in self.links:
            link.close()


def prompt(seed: int, blocks: int) -> list[int]:
    """Token ids of so many blocks and one more token."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(blocks * BLOCK_TOKENS + 1)]
