"""An engine over several ranks answers as over one, and stops as a whole when one of them dies."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samovar.cache_tiers.blocks.extent import Bytes, Placement
from samovar.cache_tiers.media.memory import HeapTier
from samovar.configs.sections import TierSettings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.engine.thread import STOPPED, EngineThread
from samovar.replicas.forward.attention import GatherSdpa
from samovar.replicas.forward.attention_choice import ChosenAttention
from samovar.replicas.forward.inputs import Tiling
from samovar.replicas.kv.block_io import PageIo
from samovar.replicas.kv.kv_pool import KvGeometry
from samovar.replicas.messages import Delta, Event, GenerateRequest, SamplingParams
from samovar.replicas.ranks import worker
from samovar.replicas.ranks.channel import RankLost
from samovar.replicas.ranks.group import RankSubprocess
from samovar.replicas.ranks.page_io import SharedPageIo
from samovar.replicas.ranks.worker import Rank
from tests.support.engines.engines import Driver, prompt_of
from tests.support.engines.ranks import Started, ThreadRank, split_engine
from tests.support.engines.tier_engines import MIB, Tiered, nvme, tiered
from tests.support.engines.tiny_models import Family, make_tiny_model

FAMILIES: tuple[Family, ...] = (
    *("llama", "qwen2", "qwen3", "mistral"),
    *("smollm3", "granite", "gemma2", "gemma3_text"),
)
BIASED = "granite"
"""With a bias behind row-wise layers, too."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return {
        name: make_tiny_model(folder / name, name, q_heads=8, kv_heads=4, bias=name == BIASED)
        for name in FAMILIES
    }


def answers(engine: Engine) -> list[dict[int, list[int]]]:
    """Greedy tokens of prompts that are computed in chunks and beside each other, and of forks of one."""
    driver = Driver(engine)
    keys = [driver.submit(prompt_of(50 + 30 * seed, seed=seed), max_tokens=10) for seed in range(3)]
    # Two choices that differ: both write behind the prompt, into a page that they share.
    keys.append(driver.submit(prompt_of(37, seed=9), n=2, max_tokens=10, temperature=1.0, seed=5))
    driver.drain()
    longer = [*prompt_of(50), *driver.answers[keys[0]].ids, *prompt_of(5, seed=8)]
    keys.append(driver.submit(longer, max_tokens=6))
    driver.drain()
    return [driver.answers[key].token_ids for key in keys]


@pytest.fixture(scope="session")
def alone(models: dict[str, Path]) -> dict[str, list[dict[int, list[int]]]]:
    found = {}
    for name, model in models.items():
        with split_engine(model, 1) as built:
            found[name] = answers(built.engine)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_over_ranks(
    models: dict[str, Path], alone: dict[str, list[dict[int, list[int]]]], family: str, ranks: int
) -> None:
    with split_engine(models[family], ranks) as built:
        assert answers(built.engine) == alone[family]
        assert not built.info.exact
        assert f"engine.tensor_parallel={ranks}" in built.info.exactness


class Deaf(Rank):
    """A rank that leaves its part out of one sum, and puts something else there."""

    def __init__(self, start: object) -> None:
        super().__init__(start)  # type: ignore[arg-type]
        add_up, count = self._peers.add_up, itertools.count()

        def forgetful(tensor: torch.Tensor) -> None:
            if next(count) == 7:
                tensor = tensor.zero_()
            add_up(tensor)

        self._peers.add_up = forgetful  # type: ignore[method-assign]
        for module in self._model.modules():
            module._forward_hooks.clear()
        from samovar.replicas.ranks.peers import sum_rowwise
        from samovar.replicas.ranks.split import RankSplit

        plan = self._model.config.base_model_tp_plan  # type: ignore[union-attr]
        sum_rowwise(self._model, RankSplit(1, 2, plan), forgetful)  # type: ignore[arg-type]


class Copyless(Rank):
    """A rank that forgets to copy a page that two choices share before one writes to it."""

    def _make_pool(self, pages: int) -> None:
        super()._make_pool(pages)
        assert self._runner is not None
        self._runner.pool.copy_page = lambda source, target: None  # type: ignore[method-assign]


@pytest.mark.parametrize("broken", [Deaf, Copyless])
def test_a_rank_that_does_something_else_would_be_seen(
    models: dict[str, Path], alone: dict[str, list[dict[int, list[int]]]], broken: type[Rank]
) -> None:
    """The tests above look closely enough."""
    with split_engine(models["llama"], 2, launch=lambda start: ThreadRank(start, broken)) as built:
        assert answers(built.engine) != alone["llama"]


def whole_blocks(engine: Tiered, pages: list[int]) -> torch.Tensor:
    """All bytes of some blocks, of all ranks."""
    offload = engine.built.engine.offload
    assert offload is not None
    io = offload.moves.io
    if isinstance(io, SharedPageIo):
        io._staging[:] = 0xA5  # what an earlier move left there would do as well
    out = np.empty(len(pages) * io.geometry.block_bytes, dtype=np.uint8)
    io.begin_out(pages, out, io.mark()).wait()
    return torch.from_numpy(out)


def computed_blocks(engine: Tiered, prompt: list[int], blocks: int) -> torch.Tensor:
    """The first blocks of a prompt, while it is answered."""
    key, found = engine.submit(prompt), torch.empty(0)
    while engine.built.engine.has_work:
        engine.driver.step()
        running = engine.built.engine.scheduler.running
        if not len(found) and running and running[0].computed >= len(prompt):
            found = whole_blocks(engine, running[0].pages[:blocks])
    engine.drain()
    assert engine.driver.answers[key].admitted is not None
    return found


@pytest.mark.parametrize(
    ("written", "read", "kv_dtype"),
    [(2, 1, "auto"), (2, 4, "auto"), (1, 2, "auto"), (4, 1, "auto"), (2, 4, "int8"), (4, 1, "int8")],
)
@pytest.mark.parametrize("staging", [MIB, 32 * MIB])
def test_extents_do_not_depend_on_the_number_of_ranks(
    models: dict[str, Path], tmp_path: Path, written: int, read: int, kv_dtype: str, staging: int
) -> None:
    prompt, blocks, found, tiers = prompt_of(150, seed=1), 9, [], {"nvme": nvme(tmp_path / "kv")}
    for ranks in (written, read):
        engine = tiered(
            models["qwen2"],
            tmp_path,
            tiers=tiers,  # type: ignore[arg-type]
            launch=ThreadRank,
            exact=False,
            kv_groups=4,
            kv_dtype=kv_dtype,
            tensor_parallel=ranks,
            rank_staging_bytes=staging,
        )
        engine.placement = Placement("nvme", (), "s3")
        found.append(computed_blocks(engine, prompt, blocks))
        receipt = next(iter(engine.driver.answers.values())).admitted.receipt  # type: ignore[union-attr]
        assert (receipt.tokens["nvme"] > 0) == (ranks == read)
        engine.built.engine.runner.close()
    assert found[0].any()
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("is_wrong", [False, True])
def test_an_audit_compares_the_heads_of_all_ranks(
    models: dict[str, Path], tmp_path: Path, is_wrong: bool
) -> None:
    started = Started(ThreadRank)
    engine = tiered(
        models["llama"],
        tmp_path,
        tiers={"cpu": HeapTier(64 * MIB)},
        settings=TierSettings(audit_share=1.0),
        launch=started,
        exact=False,
        kv_groups=4,
        tensor_parallel=2,
    )
    prompt = prompt_of(90, seed=4)
    engine.run(prompt)
    engine.forget_pool()
    (other,) = started.ranks
    assert isinstance(other, ThreadRank)
    assert other.rank is not None
    io = other.rank._io
    assert io is not None
    begin_in = io.begin_in
    if is_wrong:
        io.begin_in = lambda payload, pages, read: begin_in(  # type: ignore[method-assign]
            np.zeros_like(payload), pages, read
        )
    engine.run(prompt)
    engine.drain()
    assert engine.built.engine.stats().audits == {"mismatch" if is_wrong else "equal": 1}
    engine.built.engine.runner.close()


def test_the_staging_memory_is_registered_once_by_each_rank(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would else copy each portion by way of two halves, one behind the other."""
    adopted: list[int] = []

    def adopt(io: PageIo, host: Bytes) -> bool:
        adopted.append(host.nbytes)
        return True

    monkeypatch.setattr(PageIo, "adopt", adopt)
    engine = tiered(
        models["llama"],
        tmp_path,
        launch=Started(ThreadRank),
        exact=False,
        kv_groups=4,
        tensor_parallel=2,
        rank_staging_bytes=MIB,
    )
    engine.run(prompt_of(40))
    engine.built.engine.runner.close()
    assert adopted == [MIB, MIB]


def test_blocks_swapped_out_by_all_ranks_come_back(models: dict[str, Path]) -> None:
    """Two long answers in a pool for one and a half: one is preempted, and swapped."""
    told = []
    for ranks in (1, 2):
        with split_engine(models["llama"], ranks, pool_tokens=256, preemption="swap") as built:
            driver = Driver(built.engine)
            keys = [driver.submit(prompt_of(90, seed=seed), max_tokens=60) for seed in range(2)]
            driver.drain()
            told.append([driver.answers[key].ids for key in keys])
    assert told[0] == told[1]


# -- a rank that dies ----------------------------------------------------------------------


class Served:
    """An engine over processes, on its own thread, as the service has it."""

    def __init__(self, engine: Engine, ranks: list[RankSubprocess]) -> None:
        self.ranks = ranks
        self.events: list[tuple[int, Event]] = []
        self.thread = EngineThread(engine, self.events.extend, idle_check_s=0.05)
        self.thread.start()

    def ids(self, key: int) -> list[int]:
        return [
            i
            for k, event in list(self.events)
            if k == key and isinstance(event, Delta)
            for i in event.token_ids
        ]

    def is_over(self, key: int) -> bool:
        return any(
            k == key and (event == STOPPED or (isinstance(event, Delta) and event.finish_reason is not None))
            for k, event in list(self.events)
        )

    def wait(self, what: object) -> None:
        ends_s = time.monotonic() + 60
        while not what():  # type: ignore[operator]
            assert time.monotonic() < ends_s
            time.sleep(0.005)

    def why_unhealthy(self) -> str:
        try:
            self.thread.check_health(60)
        except RuntimeError as error:
            return str(error)
        return ""


def request(max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest("r", prompt_of(50), sampling)


@pytest.fixture
def served(models: dict[str, Path]) -> Iterator[Served]:
    started = Started(RankSubprocess)
    with split_engine(models["llama"], 2, launch=started) as built:
        served = Served(built.engine, started.ranks)  # type: ignore[arg-type]
        yield served
        served.thread.stop(60)


def test_a_killed_rank_stops_the_replica_and_no_token_is_wrong(
    served: Served, models: dict[str, Path], alone: dict[str, list[dict[int, list[int]]]]
) -> None:
    served.thread.submit(1, request(10))
    served.wait(lambda: served.is_over(1))
    assert served.ids(1) == alone["llama"][0][0]
    assert served.why_unhealthy() == ""
    served.thread.submit(2, request(1500))
    served.wait(lambda: len(served.ids(2)) >= 20)
    os.kill(served.ranks[0].process.pid, signal.SIGKILL)
    served.wait(lambda: served.is_over(2))
    assert "rank" in served.why_unhealthy()
    with split_engine(models["llama"], 1) as built:  # the failover's replica continues from what was sent
        said = served.ids(2)
        assert Driver(built.engine).run(prompt_of(50), max_tokens=len(said)).ids == said
    served.thread.submit(3, request(3))
    served.wait(lambda: served.is_over(3))
    assert served.ids(3) == []


def test_a_killed_rank_of_an_idle_replica_is_noticed(served: Served) -> None:
    served.thread.submit(1, request(2))
    served.wait(lambda: served.is_over(1))
    os.kill(served.ranks[0].process.pid, signal.SIGKILL)
    served.wait(lambda: "rank 1 of 2 has died" in served.why_unhealthy())


def test_a_move_that_a_rank_does_not_end_is_the_end(models: dict[str, Path], tmp_path: Path) -> None:
    """It may still write to the pages, which by then are another sequence's."""

    def unended(number: int) -> None:
        raise RankLost("planted")

    engine = tiered(
        models["llama"],
        tmp_path,
        tiers={"cpu": HeapTier(64 * MIB)},
        launch=ThreadRank,
        exact=False,
        kv_groups=4,
        tensor_parallel=2,
    )
    offload, runner = engine.built.engine.offload, engine.built.engine.runner
    assert offload is not None
    io, prompt = offload.moves.io, prompt_of(90, seed=4)
    engine.run(prompt)
    engine.forget_pool()
    assert isinstance(io, SharedPageIo)
    io._moves.await_done = unended  # type: ignore[method-assign, assignment]
    engine.submit(prompt)
    with pytest.raises(RankLost, match="blocks could not be moved: planted"):
        engine.drain()
    with pytest.raises(RankLost, match="planted"):
        runner.check()
    runner.close()


@pytest.mark.parametrize(("ours", "others"), [(16, 16), (16, 0), (0, 16), (16, 32), (0, 0)])
def test_the_kernel_serves_only_where_all_ranks_take_it_with_the_same_tiles(
    monkeypatch: pytest.MonkeyPatch, ours: int, others: int
) -> None:
    """Rank 0 cuts the tiles for all: a rank with other ones would compute other rows."""
    kernel = GatherSdpa(False, torch.float32)
    kernel.tiling, kernel.name = Tiling(ours, 3, 2) if ours else None, "kernel"
    monkeypatch.setattr(worker, "choose_attention", lambda *_, **__: ChosenAttention(kernel, "chosen"))
    cuts = [(rows << 40) + (3 << 20) + 2 if rows else 0 for rows in (ours, others)]
    told = iter([min(cuts), -max(cuts)])
    peers = SimpleNamespace(least=lambda number: next(told))
    geometry = KvGeometry(1, 16, 1, 16, torch.float32)
    agreed = worker.agreed_attention(
        torch.nn.Module(),
        geometry,
        torch.device("cpu"),
        peers,  # type: ignore[arg-type]
    )
    assert (agreed.sentence == "chosen") == (ours == others)
    assert agreed.backend.tiling == (Tiling(ours, 3, 2) if ours == others and ours else None)


class Failing(Rank):
    """A rank that cannot do its part."""

    def _make_pool(self, pages: int) -> None:
        super()._make_pool(pages)
        assert self._runner is not None

        def copy_page(source: int, target: int) -> None:
            raise torch.OutOfMemoryError("planted on rank 1")

        self._runner.pool.copy_page = copy_page  # type: ignore[method-assign]


def test_what_a_rank_has_failed_with_is_said_by_the_health_check(models: dict[str, Path]) -> None:
    """Rank 0 itself sees a closed connection, no more."""
    started = Started(lambda start: ThreadRank(start, Failing))
    with split_engine(models["llama"], 2, launch=started) as built:
        built.engine.runner._copy([(1, 2)])
        (other,) = started.ranks
        other.stop()
        with pytest.raises(RankLost, match=r"rank 1 of 2 has died \(.*planted on rank 1"):
            built.engine.runner.check()


def test_a_step_that_fails_on_rank_0_is_the_end(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is in the midst of it, and would take the next step's sums for this one's."""
    with split_engine(models["llama"], 2) as built:
        runner = built.engine.runner

        def broken(*_: object) -> None:
            raise torch.OutOfMemoryError("planted")

        with monkeypatch.context() as patched:
            patched.setattr(runner.forward, "logits", broken)
            driver = Driver(built.engine, check=False)
            driver.submit(prompt_of(20))
            with pytest.raises(RankLost, match="planted"):
                driver.step()
        with pytest.raises(RankLost, match="planted"):
            runner.check()
        with pytest.raises(RankLost, match="planted"):
            driver.step()
