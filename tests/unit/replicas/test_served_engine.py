"""The seam between a replica and its engine: the same laws for ours and for one that computes nothing.

What needs no KV: answers, the end of a reader, kept answers, drain, counters, health, erasure's answer.
"""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from samovar.cache_tiers.blocks import TAG_BYTES, Clear
from samovar.cache_tiers.messages import Cleared
from samovar.configs.settings import Settings
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    Forgotten,
    GenerateRequest,
    Grammar,
    Keep,
    Refused,
    SamplingParams,
)
from samovar.replicas.serving.served_engine import OwnEngine, ReplicaLoad, ServedEngine
from tests import house
from tests.house import ROOT
from tests.support.engines import fake_engine
from tests.support.engines.engines import small_engine
from tests.support.engines.fake_engine import STEP_S, EngineReplica, FakeEngine
from tests.support.engines.token_source import FakeSource, vllm_engine
from tests.support.inside import streams_of

TENANT, SESSION = b"t" * TAG_BYTES, b"s" * TAG_BYTES
OWNER = TENANT + SESSION
PROMPT = [1, 2, 3, 4, 5, 6] * 6
LONG = 1500
"""Tokens of an answer that takes longer than `SOON_S`, of either kind of engine."""
SOON_S = 5.0


class Kind(NamedTuple):
    """A replica of one kind of engine. `breaks`: lets its engine fail with the next answer, or before.

    `knows_owners`: it says whose blocks its pages hold, and drops them. vLLM does not: what differs is in
    `tests/unit/replicas/vllm`.
    """

    replica: EngineReplica
    breaks: Callable[[], None]
    knows_owners: bool = True


@pytest.fixture(params=["fake", "own", "vllm"])
def kind(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Kind]:
    if request.param == "fake":
        fake = FakeEngine()
        yield Kind(EngineReplica(fake), lambda: setattr(fake, "is_ill", True))
        return
    if request.param == "vllm":
        source = FakeSource()
        yield Kind(EngineReplica(vllm_engine(source)), lambda: setattr(source, "is_ill", True), False)
        return
    built = small_engine(tiny_llama)
    engine = OwnEngine(built.engine, built.info, Settings().engine)
    quick = built.engine.step

    def slow() -> list[tuple[int, Event]]:
        time.sleep(STEP_S)
        return quick()

    built.engine.step = slow  # type: ignore[method-assign]

    def step() -> list[tuple[int, Event]]:
        raise OSError("the device is gone")

    yield Kind(EngineReplica(engine), lambda: setattr(built.engine, "step", step))
    asyncio.run(engine.close())


def asked(
    max_tokens: int = 5, *, ids: list[int] = PROMPT, keep: Keep | None = None, **sampling: Any
) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling)
    return GenerateRequest("q", ids, params, tenant=TENANT, session=SESSION, keep=keep)


async def told(replica: EngineReplica, request: GenerateRequest) -> list[Event]:
    async with asyncio.timeout(30):
        return [event async for events in replica.generate(request) for event in events]


def ids_of(events: list[Any]) -> list[int]:
    return [one for event in events if isinstance(event, Delta) for one in event.token_ids]


async def running(replica: EngineReplica, count: int) -> None:
    """Wait until so many answers are computed."""
    async with asyncio.timeout(SOON_S):
        while len(streams_of(replica)) != count or (await replica.stats()).running != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_an_answer_is_told_to_its_end(kind: Kind) -> None:
    admitted, *deltas = await told(kind.replica, asked(5))
    assert isinstance(admitted, Admitted)
    assert all(isinstance(delta, Delta) for delta in deltas)
    said = [delta for delta in deltas if isinstance(delta, Delta)]
    assert len(ids_of(said)) == 5
    assert [delta.finish_reason for delta in said if delta.finish_reason] == ["length"]
    assert "".join(delta.text for delta in said)
    again = [event for event in await told(kind.replica, asked(5)) if isinstance(event, Delta)]
    assert ids_of(again) == ids_of(said)


async def test_answers_side_by_side_do_not_mix(kind: Kind) -> None:
    async with asyncio.timeout(30):
        both = await asyncio.gather(*(told(kind.replica, asked(tokens)) for tokens in (3, 9, 6)))
    assert [len(ids_of(events)) for events in both] == [3, 9, 6]


async def test_what_the_engine_refuses_is_told(kind: Kind) -> None:
    (refused,) = await told(kind.replica, asked(ids=[1] * 100_000))
    assert isinstance(refused, Refused)
    assert refused.reason == "too_long"
    (refused,) = await told(kind.replica, asked(grammar=Grammar("regex", "(?=a)", "guided_regex")))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.param) == ("invalid", "guided_regex")
    await running(kind.replica, 0)


async def test_an_answer_ends_with_its_reader(kind: Kind) -> None:
    answer = kind.replica.generate(asked(LONG))
    async with asyncio.timeout(30):
        async for events in answer:
            if any(isinstance(event, Delta) for event in events):
                break
        assert (await kind.replica.stats()).running == 1
        await answer.aclose()  # type: ignore[attr-defined]
    await running(kind.replica, 0)
    await kind.replica.check_integrity()


async def test_a_kept_answer_goes_on_without_a_reader_and_is_told_again(kind: Kind) -> None:
    request = asked(20, keep=Keep(b"r" * 16, b"b" * 32, 0))
    answer = kind.replica.generate(request)
    async with asyncio.timeout(30):
        await anext(answer)
        await anext(answer)
        await answer.aclose()  # type: ignore[attr-defined]
    events = await told(kind.replica, request)
    assert len(ids_of(events)) == 20
    await running(kind.replica, 0)
    assert await kind.replica.settle(30)
    assert (await kind.replica.clear(TENANT, (SESSION,))).leaves_pages is not kind.knows_owners
    assert (await kind.replica.kept(TENANT, b"r" * 16))[1] is None


async def test_a_drained_replica_fails_what_is_open_so_that_another_goes_on(kind: Kind) -> None:
    reading = asyncio.create_task(told(kind.replica, asked(LONG)))
    await running(kind.replica, 1)
    await kind.replica.end()
    *_, failed = await reading
    assert isinstance(failed, Failed)
    assert (failed.replica_lost, failed.replica_id) == (True, (await kind.replica.describe()).replica_id)


async def test_what_routers_autoscaler_and_operators_are_told(kind: Kind) -> None:
    await told(kind.replica, asked(5))
    await running(kind.replica, 0)
    routing = await kind.replica.record_routing_stats()
    assert len(routing["prefill"]) == 3  # type: ignore[arg-type]
    assert routing["load"] == {"number": 1, "ingresses": {}}
    load = ReplicaLoad.of_metrics(await kind.replica.record_autoscaling_stats())
    assert load is not None
    assert (load.running, load.waiting, load.sequences_max) == (0, 0, 8)
    await kind.replica.hint(OWNER, "tool_call", 5.0)
    assert (await kind.replica.stats()).integrity_failures == 0
    if not kind.knows_owners:
        assert await kind.replica.cool(OWNER) == 0
        assert await kind.replica.pool_bytes(OWNER) is (await kind.replica.glance((OWNER,))).blocks is None
        return
    info, seen = await kind.replica.describe(), await kind.replica.glance((OWNER, bytes(2 * TAG_BYTES)))
    assert list(seen.blocks) == [OWNER]
    held = seen.blocks[OWNER]
    assert await kind.replica.pool_bytes(OWNER) == held * info.block_tokens * info.bytes_per_token > 0
    assert await kind.replica.cool(OWNER) == held


async def test_a_replica_whose_engine_failed_is_ill(kind: Kind) -> None:
    kind.replica.check_health()
    kind.breaks()
    await told(kind.replica, asked(1))
    with pytest.raises(RuntimeError):
        kind.replica.check_health()


@pytest.mark.guarantee("G12")
async def test_g12_what_is_erased_is_counted_once(kind: Kind) -> None:
    if not kind.knows_owners:
        pytest.skip("its pages are not found any more: tests/unit/replicas/vllm")
    await told(kind.replica, asked(5))
    await running(kind.replica, 0)
    (held,) = (await kind.replica.glance((OWNER,))).blocks.values()
    assert await kind.replica.clear(b"o" * TAG_BYTES, None) == Forgotten(0, 0, 0)
    assert await kind.replica.clear(TENANT, None) == Forgotten(held, 0, 0)
    assert await kind.replica.clear(TENANT, None) == Forgotten(0, 0, 0)
    assert (await kind.replica.glance((OWNER,))).blocks == {}


async def test_g12_an_engine_forgets_before_the_tiers_and_hands_over_before_it_closes() -> None:
    engine, link = FakeEngine(), SimpleNamespace()
    link.clear = lambda clear: engine.told.append(clear) or Cleared(extents=1, nbytes=10)
    replica = EngineReplica(engine, tiers=SimpleNamespace(link=link))
    await told(replica, asked(5))
    assert await replica.clear(TENANT, (SESSION,)) == Forgotten(len(PROMPT) // 4, 1, 10)
    await replica.end()
    tags = {OWNER}
    assert engine.told == [("forget", tags), Clear(TENANT, SESSION), ("forget", tags), "hand over", "close"]


def test_all_kinds_are_engines_that_are_served(tiny_llama: Path) -> None:
    built = small_engine(tiny_llama)
    own = OwnEngine(built.engine, built.info, Settings().engine)
    kinds: list[ServedEngine] = [FakeEngine(), own, vllm_engine(FakeSource())]
    assert all(one.info.replica_id for one in kinds)


def test_a_replica_asks_for_all_of_the_protocol_and_nothing_else() -> None:
    """What it reached for beyond it, another engine would not have; what it does not ask, none needs."""
    source = (ROOT / "replicas/serving/deployment.py").read_text(encoding="utf-8")
    asked = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("self._engine", "engine")
        and not node.attr.endswith("_max")
    }
    assert asked == {name for name in vars(ServedEngine) if not name.startswith("_")} | {"info"}


def test_another_engine_is_short() -> None:
    sizes = {name: lines for name, lines, _ in house.class_sizes(Path(fake_engine.__file__))}
    assert sizes["FakeEngine"] <= 80


APART = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocked())

import asyncio
import samovar.replicas.messages, samovar.replicas.reply, samovar.replicas.templates
import samovar.replicas.grammar, samovar.replicas.turns, samovar.replicas.links
import samovar.replicas.serving.tracing, samovar.replicas.start.start_notes
from samovar.replicas.answers import OutputProcessor, TextOut, TokenText
from samovar.replicas.messages import Delta, GenerateRequest, SamplingParams
from samovar.replicas.serving.served import EventStream, merge_deltas
from tests.support.engines.fake_engine import EngineReplica, FakeEngine

async def answer():
    request = GenerateRequest("q", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9, stop=("of leaves",)))
    replica = EngineReplica(FakeEngine())
    events = [event async for events in replica.generate(request) for event in events]
    await replica.end()
    return [event for event in events if isinstance(event, Delta)]

said = asyncio.run(answer())
print("".join(delta.text for delta in said), said[-1].finish_reason, "torch" in sys.modules)
"""


def test_another_engine_is_served_where_there_is_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", APART], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "tea is an infusion  stop False\n"
