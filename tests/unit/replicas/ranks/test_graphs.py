"""Recorded steps on all ranks: what they record, replay and agree on. A graph is a call that runs again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.replicas.forward.attention_choice import ChosenAttention
from samovar.replicas.forward.graphs import Bucket, GraphLimits, StepGraphs, buckets_of, chunk_buckets_of
from samovar.replicas.forward.inputs import MESSAGE_HEAD, Tiling, step_words_max
from samovar.replicas.forward.runner import Runner
from samovar.replicas.kv import TRASH_PAGE, KvPool
from samovar.replicas.model.spec import inspect_model
from samovar.replicas.ranks import group, worker
from samovar.replicas.ranks.channel import Orders, RankLost
from samovar.replicas.ranks.group import RankSubprocess
from samovar.replicas.ranks.orders import Order
from samovar.replicas.ranks.peers import Peers
from samovar.replicas.ranks.ring import Words
from samovar.replicas.ranks.worker import FollowingRunner, Rank
from samovar.replicas.start import build, measure
from samovar.replicas.start.build import BuiltEngine
from tests.support.engines.engines import Driver, prompt_of
from tests.support.engines.ranks import ThreadRank, split_engine
from tests.support.engines.tiny_models import make_tiny_model
from tests.unit.replicas.forward.test_graphs import Recorder, TensorPaged, rows_by_themselves

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("graphs") / "llama", "llama", q_heads=8, kv_heads=4)


class Looked(Rank):
    """A rank whose pool a test looks at."""

    pools: list[KvPool]

    def _make_pool(self, pages: int) -> None:
        super()._make_pool(pages)
        assert self._runner is not None
        self.pools.append(self._runner.pool)


class Ranks:
    """Engines over several ranks that record, on a CPU: by calls that run again in place of graphs.

    `captures`: of all ranks, rank 0's first; `pools`: of those above it. `runner`: of those, another kind.
    """

    def __init__(self, patch: pytest.MonkeyPatch, model: Path) -> None:
        self.patch = patch
        self.model = model
        self.captures: list[Recorder] = []
        self.pools: list[KvPool] = []
        chosen = ChosenAttention(TensorPaged(), "tensors")  # type: ignore[arg-type]
        patch.setattr(worker, "choose_attention", lambda *_, **__: chosen)
        for module in (build, worker):
            patch.setattr(module, "open_capture", self.opened(Recorder))

    def opened(self, make: Callable[[], Recorder]) -> Callable[[torch.device], Recorder]:
        """Return what opens such captures."""

        def open_capture(device: torch.device) -> Recorder:
            self.captures.append(make())
            return self.captures[-1]

        return open_capture

    def start(self, ranks: int = 2, **more: object) -> AbstractContextManager[BuiltEngine]:
        """Start an engine, anew; what its steps take does not decide on what the next one computes."""
        self.captures.clear()
        self.pools.clear()
        looked = type("Looked", (Looked,), {"pools": self.pools})
        clockless = {"step_s_target": None, "step_stretch": None}
        options: dict[str, Any] = {"pool_tokens": 640, "sequences_max": 6, **clockless, **more}
        return split_engine(self.model, ranks, launch=lambda start: ThreadRank(start, looked), **options)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, model: Path) -> Ranks:
    rows_by_themselves(monkeypatch)
    return Ranks(monkeypatch, model)


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"prompt_logprobs": 1},
)


def answers(built: BuiltEngine, seed: int = 1) -> list[dict[int, list[int]]]:
    """What requests of every kind get that come, go on, and are hung up, on few pages."""
    rng, driver = random.Random(seed), Driver(built.engine)
    for number in range(16):
        prompt = prompt_of(rng.choice([3, 17, 40, 70]), seed=number % 3) + prompt_of(5, seed=number)
        kind = KINDS[number % len(KINDS)]
        key = driver.submit(prompt, max_tokens=rng.choice([1, 2, 12, 25]), seed=number, **kind)
        for _ in range(rng.choice([0, 1, 5])):
            driver.step()
        if number % 5 == 4:
            built.engine.requests.abort(key)
    driver.drain()
    return [answer.token_ids for answer in driver.answers.values()]


def blocks(built: BuiltEngine, ranks: Ranks) -> list[torch.Tensor]:
    """The pages of all ranks, but for the trash page."""
    pools = [built.engine.runner.pool, *ranks.pools]
    return [pool.page_bytes[TRASH_PAGE + 1 :].clone() for pool in pools]


def eager(ranks: Ranks, count: int = 2) -> tuple[list[dict[int, list[int]]], list[torch.Tensor]]:
    """The answers without graphs, and the pages of all ranks."""
    with ranks.patch.context() as patch:
        patch.setattr(build, "open_capture", lambda device: None)
        with ranks.start(count) as built:
            found = answers(built)
            assert built.info.graphs == ""
            assert not ranks.captures
            return found, blocks(built, ranks)


@pytest.mark.parametrize("count", [2, 4])
def test_an_engine_answers_the_same_when_all_ranks_replay(ranks: Ranks, count: int) -> None:
    """Mixed steps in all buckets, padding, pages that are copied, aborts: tokens, and the bytes of all parts.

    A sum over two ranks has one order; over four it depends on a row's place.
    """
    truth, pages = eager(ranks, count)
    with ranks.start(count) as built:
        assert answers(built) == truth
        stats = built.engine.stats()
        assert built.info.graphs.startswith("4 of decodes to 6 rows, 3 of chunks to 64 tokens; ")
        assert built.info.graphs.endswith(f" MiB on each of {count} GPUs")
        assert stats.cow_copies > 0
        (replays,) = {capture.replays for capture in ranks.captures}
        assert len(ranks.captures) == count
        assert 20 < replays < stats.steps, "prompts with log-probabilities are computed eagerly"
        for found, expected in zip(blocks(built, ranks), pages, strict=True):
            assert count > 2 or torch.equal(found, expected)


def test_a_following_rank_makes_no_logits(ranks: Ranks) -> None:
    """And its words are where rank 0's are: in the shape that was recorded."""
    rows = list[tuple[bool, int]]()

    class Counting(StepGraphs):
        def replay(self, inputs: Any) -> Any:
            left = super().replay(inputs)
            rows.append((left is not None, inputs.shape.rows))
            return left

    ranks.patch.setattr("samovar.replicas.forward.runner.StepGraphs", Counting)
    with ranks.start() as built:
        Driver(built.engine).run(prompt_of(20), max_tokens=4)
    with_logits, without = ([row for is_made, row in rows if is_made == makes] for makes in (True, False))
    assert with_logits == without == [*[64, 6] * 2, 32, 1, 1, 1], "at start the largest, twice"


RECORDED = 7
"""The place in a step's message of whether it is a recorded one."""


class OtherShape(StepGraphs):
    """Replays, above rank 0 and once it serves, the graph of another shape with as many rows."""

    serves = False

    def replay(self, inputs: Any) -> Any:
        if self._left is None and self.serves:
            others = [shape for shape in self._replays if shape.rows == inputs.shape.rows]
            inputs.shape = others[0] if others[0] != inputs.shape else others[-1]
        return super().replay(inputs)


class Stale(FollowingRunner):
    """Replays each shape with the words of its first step."""

    def obey(self, message: Words) -> None:
        if message[RECORDED]:
            first = self.__dict__.setdefault("first", {})
            message = first.setdefault(tuple(message[:RECORDED]), message.copy())
        super().obey(message)


class Eager(FollowingRunner):
    """Computes all steps eagerly, padding included: the same sums, and only time is lost."""

    def obey(self, message: Words) -> None:
        message = message.copy()
        message[RECORDED] = 0
        super().obey(message)


@pytest.mark.parametrize("planted", [None, OtherShape, Stale, Eager])
def test_planted_a_rank_that_replays_something_else_is_found(ranks: Ranks, planted: Any) -> None:
    if planted is OtherShape:
        ranks.patch.setattr("samovar.replicas.forward.runner.StepGraphs", planted)
    elif planted is not None:
        ranks.patch.setattr(worker, "FollowingRunner", planted)
    try:
        # Only that one makes ranks wait for each other; the others may be as slow as the machine.
        with ranks.start(sequences_max=16, stuck_step_s=2 if planted is OtherShape else 60) as built:
            ranks.patch.setattr(OtherShape, "serves", True)
            found, pages = answers(built), blocks(built, ranks)
    except RankLost:
        assert planted is OtherShape
        return
    ranks.patch.undo()
    rows_by_themselves(ranks.patch)
    clean = Ranks(ranks.patch, ranks.model)
    with clean.start(sequences_max=16) as built:
        same = found == answers(built) and all(map(torch.equal, pages, blocks(built, clean)))
    assert same == (planted in (None, Eager))


# -- a rank that cannot ---------------------------------------------------------------------


class Spoiled(Recorder):
    """Records two graphs, and no third."""

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        replay = super().__call__(launch)
        self.recorded = getattr(self, "recorded", 0) + 1
        if self.recorded == 3:
            raise RuntimeError("planted: this cannot be recorded")
        return replay


class Short(FollowingRunner):
    """Has no memory for a step of so many rows, before the first of its sums."""

    at, graphs = 0, True

    def _recorded(self, inputs: Any) -> None:
        if self.graphs and inputs.shape.rows == self.at:
            raise torch.OutOfMemoryError("planted")
        super()._recorded(inputs)

    def obey(self, message: Words) -> None:
        if not self.graphs and message[0] == self.at:
            self.graphs = True  # once
            raise torch.OutOfMemoryError("planted")
        super().obey(message)


def no_capture(device: torch.device) -> Recorder:
    raise RuntimeError("planted: nothing is recorded here")


OTHER = "none: Unable: GPU 2 of the replica's 2 cannot, and its log says why"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("the first of rank 1", OTHER),
        ("the last of rank 1", OTHER),
        ("a capture of rank 1", OTHER),
        ("the device of rank 1", OTHER),
        ("a capture of rank 0", "none: RuntimeError: planted: this cannot be recorded"),
        ("the largest step of rank 1", OTHER),
        ("the largest step of rank 0", "none: ModelRefused: a step of 64 tokens"),
    ],
)
def test_where_a_rank_cannot_record_all_compute_eagerly(ranks: Ranks, fault: str, told: str) -> None:
    """And it is told; a start without graphs is a start."""
    truth, pages = eager(ranks)
    with ranks.patch.context() as patch:
        if fault == "the device of rank 1":
            patch.setattr(worker, "open_capture", no_capture)
        elif fault == "the largest step of rank 0":
            patch.setattr(measure, "run_largest_steps", out_of_memory)
        elif "capture" in fault:
            patch.setattr(build if fault[-1] == "0" else worker, "open_capture", ranks.opened(Spoiled))
        else:
            short = {"at": {"first": 64, "last": 1, "largest": 64}[fault.split()[1]], "graphs": "of" in fault}
            short["graphs"] = "largest" not in fault
            patch.setattr(worker, "FollowingRunner", type("Short", (Short,), short))
        with ranks.start() as built:
            assert built.info.graphs.startswith(told)
            replays = [capture.replays for capture in ranks.captures]
            assert answers(built) == truth
            assert replays == [capture.replays for capture in ranks.captures]
            assert all(map(torch.equal, blocks(built, ranks), pages))


def out_of_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("planted")


class Mortal(Recorder):
    """Kills its process at once, at the replay of `LAST`."""

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        replay, last = super().__call__(launch), int(os.environ[LAST])

        def mortal() -> None:
            if self.replays == last:
                os.kill(os.getpid(), signal.SIGKILL)
            replay()

        if last < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return mortal


LAST = "TEST_LAST_REPLAY"


def serve_mortal(start: str) -> None:
    """Be a rank in a process of its own that does not live long."""
    chosen = ChosenAttention(TensorPaged(), "tensors")  # type: ignore[arg-type]
    worker.choose_attention = lambda *_, **__: chosen  # type: ignore[assignment]
    worker.open_capture = lambda device: Mortal()  # type: ignore[assignment]
    worker.serve_rank(worker.start_of(start))


@pytest.fixture
def mortal(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(
        group, "ENTRY", f"import sys; from {__name__} import serve_mortal as go; go(sys.argv[1])"
    )
    return ranks


def test_a_rank_that_dies_in_a_recorded_step_ends_the_replica(
    mortal: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAST, "5")
    with split_engine(mortal.model, 2, launch=RankSubprocess) as built:
        assert built.info.graphs.endswith("2 GPUs")
        driver = Driver(built.engine, check=False)
        key = driver.submit(prompt_of(20), max_tokens=20)
        with pytest.raises(RankLost, match=r"rank 0|rank 1 of 2 has died"):
            driver.drain()
        assert 0 < len(driver.answers[key].ids) <= 5
        with pytest.raises(RankLost):
            built.engine.runner.check()


def test_a_rank_that_dies_while_it_records_ends_the_start(
    mortal: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is left agrees on nothing any more: there are no eager steps, either."""
    monkeypatch.setenv(LAST, "-1")
    with (
        pytest.raises(RankLost, match=r"cannot agree|has died"),
        split_engine(mortal.model, 2, launch=RankSubprocess),
    ):
        pass


# -- what a step tells and sums -------------------------------------------------------------


def test_a_graph_has_its_sums_in_it(ranks: Ranks) -> None:
    """What is tried without them is recorded with them, once; nothing else is summed at start."""
    sums, add_up = list[tuple[int, bool]](), Peers.add_up

    def counted(self: Peers, tensor: torch.Tensor) -> None:
        sums.append((self.rank, self.is_apart))
        add_up(self, tensor)

    ranks.patch.setattr(Peers, "add_up", counted)
    with ranks.start() as built:
        graphs, layers = 7, inspect_model(ranks.model).layers
        assert built.info.graphs.startswith("4 of decodes to 6 rows, 3 of chunks")
        steps = graphs + 2  # and the largest, beside the graphs
        for is_apart in (True, False):
            counts = [sums.count((rank, is_apart)) for rank in range(2)]
            assert counts == [steps * 2 * layers] * 2


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_step_is_one_order_and_two_sums_a_layer(ranks: Ranks, tokens: int) -> None:
    """Recorded or not, beside what copies of pages are told."""
    sums, agreed, told = [0, 0], [0], list[Order]()
    add_up, least, tell = Peers.add_up, Peers.least, Orders.tell

    def counted(self: Peers, tensor: torch.Tensor) -> None:
        sums[self.rank] += 1
        add_up(self, tensor)

    def asked(self: Peers, number: int) -> int:
        agreed[0] += 1
        return least(self, number)

    def noted(self: Orders, kind: int, *parts: Words) -> int:
        told.append(Order(kind))
        return tell(self, kind, *parts)

    layers = inspect_model(ranks.model).layers
    for name, other in (("add_up", counted), ("least", asked)):
        ranks.patch.setattr(Peers, name, other)
    ranks.patch.setattr(Orders, "tell", noted)
    for records in (True, False):
        if not records:
            ranks.patch.setattr(build, "open_capture", lambda device: None)
        with ranks.start() as built:
            driver = Driver(built.engine)
            driver.submit(prompt_of(19 + tokens), max_tokens=8)
            driver.step()
            told.clear()
            sums[:], agreed[0] = [0, 0], 0
            for _ in range(4):
                driver.step()
            built.engine.runner.close()
            assert told == [Order.STEP] * 4
            assert sums == [4 * 2 * layers] * 2
            assert agreed == [0]
            assert built.engine.runner.is_recorded == records


def test_no_step_of_several_ranks_is_launched_before_its_tokens_are_known(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' words come from the host: they would compute token 0."""
    monkeypatch.setattr("samovar.replicas.sampling.draws._is_on_host", lambda tensor: False)
    behind = list[object]()
    monkeypatch.setattr(Runner, "run_behind", lambda *given: behind.append(given))
    for count in (1, 2):
        with ranks.start(count, step="transformers") as built:
            runner, begun = built.engine.runner, list[object]()
            looked = built.engine.scheduler.behind

            def noted(*given: Any, looked: Any = looked, begun: list[object] = begun) -> Any:
                begun.append(given)
                return looked(*given)

            built.engine.scheduler.behind = noted  # type: ignore[method-assign]
            if count == 1:
                runner.backend = TensorPaged()  # type: ignore[assignment]
                runner.record_steps(Recorder(), GraphLimits(4, 16, 4, 64))
            assert runner.computes_behind == (count == 1)
            Driver(built.engine).run(prompt_of(20), max_tokens=6)
            assert bool(begun) == bool(behind) == (count == 1)
            assert count == 1 or runner.run_behind([], torch.empty(0)) is None
            behind.clear()


def test_graphs_are_destroyed_before_the_ranks_leave_each_other(ranks: Ranks) -> None:
    """NCCL waits, when it is left, until no graph's sums go through it."""
    done, forget, close = list[str](), StepGraphs.forget, Peers.close
    ranks.patch.setattr(StepGraphs, "forget", lambda self: (done.append("forget"), forget(self))[1])
    ranks.patch.setattr(Peers, "close", lambda self: (done.append(f"leave {self.rank}"), close(self))[1])
    with ranks.start():
        assert not done
    assert sorted(done) == ["forget", "forget", "leave 0", "leave 1"]
    assert done.index("leave 0") > 0
    assert done.index("leave 1") > 0
    assert done[0] == "forget"


def test_every_recorded_step_fits_into_a_message() -> None:
    rng = random.Random(4)
    for _ in range(300):
        step_tokens, sequences = rng.randint(1, 600), rng.randint(1, 300)
        tiling = Tiling(rng.choice([1, 4, 32, 128]), rng.randint(1, 600), rng.randint(1, 600))
        tokens, table = max(step_tokens, sequences), rng.randint(1, 50)
        most = step_words_max(tokens=tokens, sequences=sequences, blocks=table)
        decodes = [Bucket.of_decodes(rows, tiling) for rows in buckets_of(sequences)]
        chunks = [Bucket.of_chunks(rows, sequences, tiling) for rows in chunk_buckets_of(step_tokens)]
        for bucket in (*decodes, *chunks):
            assert MESSAGE_HEAD + bucket.shape.places()[-1] + 1 + sequences * table <= most
