"""vLLM behind a replica: whose turn it is, what is told of an answer, what is forgotten. Without vLLM."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from samovar.cache_tiers.blocks import TAG_BYTES, ChainMarks, Placement
from samovar.cache_tiers.forecast import EDGES, Forecast
from samovar.cache_tiers.messages import TurnEnded
from samovar.cache_tiers.vllm.replica_turn import (
    FromConnector,
    PromptTold,
    ReplicaTurn,
    StoresTold,
    ToReplica,
    TurnTold,
)
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Failed,
    GenerateRequest,
    Grammar,
    Refused,
    Resume,
    Route,
    SamplingParams,
)
from samovar.replicas.vllm import forgetting
from samovar.replicas.vllm.engine import VllmEngine
from samovar.replicas.vllm.forgetting import PageSalts
from samovar.replicas.vllm.source import is_replayed, vllm_sampling
from tests.support.engines.token_source import FakeSource, vllm_engine

A, B = b"a" * TAG_BYTES, b"b" * TAG_BYTES
SESSION = b"s" * TAG_BYTES
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2]


def asked(max_tokens: int = 4, ids: list[int] | None = None, **of: Any) -> GenerateRequest:
    request = {name: of.pop(name) for name in list(of) if name not in SAMPLING}
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **of)
    made = {"tenant": A, "session": SESSION} | request
    return GenerateRequest("q", PROMPT if ids is None else ids, params, **made)


SAMPLING = {one.name for one in fields(SamplingParams)}


class Asking:
    """Asks an engine, and keeps what it delivers."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.told: dict[int, list[Event]] = {}
        self._news = asyncio.Event()
        engine.start(self._take)

    def _take(self, events: list[tuple[int, Event]]) -> None:
        for key, event in events:
            self.told.setdefault(key, []).append(event)
        self._news.set()

    def ask(self, key: int, request: GenerateRequest) -> None:
        self.engine.answer(key, request)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self._news.clear()
                await self._news.wait()

    async def end_of(self, key: int) -> list[Event]:
        await self.until(lambda: is_over(self.told.get(key, [])))
        return self.told[key]

    async def answer(self, request: GenerateRequest, key: int = 0) -> list[Event]:
        self.told.pop(key, None)
        self.ask(key, request)
        return await self.end_of(key)


def is_over(events: list[Event]) -> bool:
    return bool(events) and (
        isinstance(events[-1], Refused | Failed)
        or (isinstance(events[-1], Delta) and events[-1].finish_reason is not None)
    )


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def ids_of(events: list[Event]) -> list[int]:
    return [one for event in events if isinstance(event, Delta) for one in event.token_ids]


async def idle(engine: VllmEngine) -> None:
    async with asyncio.timeout(20):
        while (await engine.stats()).running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def asking(source: FakeSource, **of: Any) -> AsyncIterator[Asking]:
    engine = vllm_engine(source, **of)
    made = Asking(engine)
    yield made
    await engine.check_integrity()
    await engine.close()
    await idle(engine)
    assert source.open == 0
    await engine.check_integrity()


async def test_at_most_so_many_sequences_are_in_vllm_and_the_rest_takes_turns_by_tenant() -> None:
    source = FakeSource()
    async with asking(source, sequences_max=2) as asks:
        for key in range(6):
            asks.ask(key, asked(tenant=A))
        asks.ask(6, asked(tenant=B))
        assert (await asks.engine.stats()).waiting == 5
        most, order = 0, list[int]()

        def all_over() -> bool:
            nonlocal most
            most = max(most, source.open)
            order.extend(key for key in asks.told if is_over(asks.told[key]) and key not in order)
            return len(order) == 7

        await asks.until(all_over)
        assert most == 2
        assert order.index(6) < 4, "the other tenant has waited for all of the first"


async def test_better_priorities_of_a_tenant_go_first() -> None:
    async with asking(FakeSource(), sequences_max=1) as asks:
        for key, priority in enumerate((0, 5, 1)):
            asks.ask(key, asked(priority=priority))
        await asks.until(lambda: is_over(asks.told.get(1, [])))
        assert is_over(asks.told.get(2, []))


async def test_what_finds_no_place_is_refused_at_once_and_told_when_to_come_again() -> None:
    async with asking(FakeSource(), sequences_max=1, queue_max=1) as asks:
        asks.ask(0, asked(50))
        asks.ask(1, asked(2))
        (refused,) = await asks.answer(asked(), key=2)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.retry_after_s) == ("queue_full", 1.0)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_what_waits_or_has_not_begun_is_aborted_without_a_trace(is_begun: bool) -> None:
    source = FakeSource()
    async with asking(source, sequences_max=1) as asks:
        if not is_begun:
            asks.ask(0, asked(1000))
        asks.ask(1, asked())  # a task that has not run yet, or one that waits
        asks.engine.abort(1)
        asks.engine.abort(0)
        await asyncio.sleep(0.05)
        assert (await asks.answer(asked(), key=2))[-1].finish_reason == "length"  # type: ignore[union-attr]
        await idle(asks.engine)
        stats = await asks.engine.stats()
        assert (stats.running, stats.waiting, stats.aborted) == (0, 0, 1 if is_begun else 2)


async def test_a_stop_string_ends_an_answer_and_vllm_computes_no_more_of_it() -> None:
    source = FakeSource()
    async with asking(source) as asks:
        events = await asks.answer(asked(1000, stop=("of leaves",)))
        assert text_of(events) == "tea is an infusion "
        assert events[-1].finish_reason == "stop"  # type: ignore[union-attr]
        await asks.until(lambda: True)
        async with asyncio.timeout(20):
            while not source.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_all_answers_of_a_request_are_told_each_to_its_own_end() -> None:
    async with asking(FakeSource()) as asks:
        asks.ask(0, asked(3, n=2))

        def deltas() -> list[Delta]:
            return [event for event in asks.told.get(0, []) if isinstance(event, Delta)]

        await asks.until(lambda: sum(delta.finish_reason is not None for delta in deltas()) == 2)
        assert [[delta.index for delta in deltas()].count(index) for index in (0, 1)] == [3, 3]
        assert (await asks.engine.stats()).finished == {"length": 2}


async def test_an_engine_that_has_ended_fails_its_answers_so_that_another_replica_goes_on() -> None:
    source = FakeSource()
    async with asking(source) as asks:
        asks.ask(0, asked(1000))
        await asks.until(lambda: len(asks.told.get(0, [])) > 2)
        source.is_ill = True
        failed = (await asks.end_of(0))[-1]
        assert isinstance(failed, Failed)
        assert failed.replica_lost
        with pytest.raises(RuntimeError):
            asks.engine.check_health()


async def test_what_vllm_does_not_take_is_a_refusal_of_the_request() -> None:
    source = FakeSource()
    source.refuses = "logit_bias is odd"
    async with asking(source) as asks:
        (refused,) = await asks.answer(asked())
        assert refused == Refused("invalid", "logit_bias is odd")


async def test_a_greedy_answer_goes_on_behind_what_another_replica_has_told() -> None:
    source = FakeSource()
    async with asking(source) as asks:
        events = await asks.answer(asked(6, resume=Resume(0, (1, 2, 3))))
        assert list(source.asked[0].token_ids) == [*PROMPT, 1, 2, 3]
        assert source.asked[0].sampling["max_tokens"] == 3
        assert len(ids_of(events)) == 3
        assert events[-1].finish_reason == "length"  # type: ignore[union-attr]


@pytest.mark.parametrize("of", [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}])
async def test_an_answer_with_penalties_is_computed_again_and_compared(of: dict[str, float]) -> None:
    source = FakeSource()
    async with asking(source) as asks:
        events = await asks.answer(asked(6, resume=Resume(0, (1, 2, 3)), **of))
        assert list(source.asked[0].token_ids) == PROMPT
        assert ids_of(events) == [4, 5, 6]
        failed = (await asks.answer(asked(6, resume=Resume(0, (1, 7, 3)), **of)))[-1]
        assert isinstance(failed, Failed)
        assert "cannot be continued" in failed.message


def test_a_grammar_goes_by_replay_as_vllm_begins_it_behind_the_prompt() -> None:
    assert is_replayed(SamplingParams(grammar=Grammar("regex", "a*", "guided_regex")))
    assert not is_replayed(SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2))


OURS = {"stop", "grammar", "prompt_logprobs_from", "shown_token_ids", "continues_text"}
"""What the replica does itself, or passes by another way."""


def test_each_field_of_sampling_is_given_to_vllm_or_is_ours() -> None:
    params = SamplingParams(
        max_tokens=9,
        min_tokens=4,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        stop_token_ids=(3,),
        seed=5,
        logprobs=2,
        allowed_token_ids=(1, 2),
        logit_bias=((1, 2.0),),
        prompt_logprobs=1,
    )
    plain = vllm_sampling(replace(SamplingParams(), max_tokens=1), 1, (0,))
    for field in fields(SamplingParams):
        if field.name in OURS:
            continue
        changed = replace(SamplingParams(), max_tokens=1)
        value = True if field.name == "ignore_eos" else getattr(params, field.name)
        changed = replace(changed, **{field.name: value})
        assert vllm_sampling(changed, 1, (0,)) != plain, f"{field.name} changes nothing"
    given = vllm_sampling(params, 2, (0, 9), spent=3, choice=1)
    assert (given["max_tokens"], given["min_tokens"], given["seed"]) == (6, 1, 6)
    assert given["stop_token_ids"] == [0, 3, 9]
    assert vllm_sampling(replace(params, ignore_eos=True), 1, (0, 9))["stop_token_ids"] == [3]


async def test_logprobs_are_told_as_our_engine_tells_them() -> None:
    async with asking(FakeSource()) as asks:
        *_, last = await asks.answer(asked(2, logprobs=0))
        assert isinstance(last, Delta)
        assert [(one.token, one.logprob) for one in last.logprobs] == [("is", -0.5)]


class TestForgetting:
    @pytest.mark.guarantee("G12")
    async def test_g12_what_is_forgotten_is_not_found_by_its_tenant_and_others_keep_theirs(self) -> None:
        source = FakeSource()
        async with asking(source) as asks:

            async def cached(tenant: bytes, salt: bytes) -> int:
                events = await asks.answer(asked(tenant=tenant, salt=salt))
                assert isinstance(events[0], Admitted)
                return events[0].cached_tokens

            assert [await cached(A, b"a"), await cached(B, b"b")] == [0, 0]
            assert [await cached(A, b"a"), await cached(B, b"b")] == [7, 7]
            assert await asks.engine.forget({A + SESSION}) == 0
            assert [await cached(A, b"a"), await cached(B, b"b")] == [0, 7]
            await asks.engine.forget({B})
            assert [await cached(A, b"a"), await cached(B, b"b")] == [7, 0]

    @pytest.mark.guarantee("G12")
    async def test_g12_what_a_running_answer_goes_on_to_compute_is_not_found_either(self) -> None:
        source = FakeSource()
        async with asking(source) as asks:
            asks.ask(0, asked(1000))
            await asks.until(lambda: len(asks.told.get(0, [])) > 1)
            await asks.engine.forget({A})
            assert (await asks.answer(asked(), key=1))[0].cached_tokens == 0  # type: ignore[union-attr]

    def test_a_salt_that_tenants_share_is_forgotten_for_all_of_them(self) -> None:
        salts = PageSalts(b"x")
        first = salts.salt(A, b""), salts.salt(B, b"")
        assert first[0] == first[1]
        salts.forget({A})
        assert salts.salt(B, b"") != first[1]

    def test_too_many_salts_forget_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(forgetting, "SALTS_MAX", 4)
        salts = PageSalts(b"x")
        first = salts.salt(A, b"0")
        for number in range(1, 5):
            salts.salt(A, str(number).encode())
        assert salts.salt(A, b"0") != first

    def test_lives_of_a_replica_share_nothing(self) -> None:
        assert PageSalts(b"x").salt(A, b"") != PageSalts(b"y").salt(A, b"")


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[FromConnector]:
    made = FromConnector(tmp_path / "told.sock")
    yield made
    made.close()


class TestReceipts:
    async def test_a_receipt_says_from_which_tier_a_prompt_came_with_its_first_token(
        self, connector: FromConnector
    ) -> None:
        source = FakeSource(connector=connector.path)
        async with asking(source, connector=connector) as asks:
            source.tells = {0: PromptTold(0, 4, {"nvme": 4}, 0.25)}
            source.pages = {}
            first = (await asks.answer(asked(ids=[1, 2, 3, 4, 5, 6, 1, 2], placement=Placement())))[0]
            assert isinstance(first, Admitted)
            assert first.receipt.tokens["nvme"] == 4
            assert first.receipt.tokens["gpu"] == 0
            assert first.receipt.tokens["compute"] == 4
            assert (first.cached_tokens, first.receipt.decision, first.receipt.load_s) == (4, "load", 0.25)
            assert (await asks.engine.stats()).tokens_by_source["nvme"] == 4

    async def test_what_was_to_be_loaded_and_did_not_come_counts_as_computed(
        self, connector: FromConnector
    ) -> None:
        source = FakeSource(connector=connector.path)
        async with asking(source, connector=connector) as asks:
            await asks.answer(asked(), key=1)
            source.tells = {2: PromptTold(2, 4, {"cpu": 1}, 0.1, "a block was bad")}
            first = (await asks.answer(asked(route=Route(cached_tokens=8)), key=2))[0]
            assert isinstance(first, Admitted)
            # vLLM counts 7 tokens, of which 4 were to be loaded, and one has come.
            assert [first.receipt.tokens[one] for one in ("gpu", "cpu", "compute")] == [3, 1, 4]
            assert first.receipt.miss == "a block was bad"

    async def test_without_tiers_it_says_what_vllm_had(self) -> None:
        async with asking(FakeSource()) as asks:
            await asks.answer(asked())
            first = (await asks.answer(asked(route=Route(cached_tokens=12))))[0]
            assert isinstance(first, Admitted)
            assert [first.receipt.tokens[one] for one in ("gpu", "compute")] == [7, 1]
            assert not first.receipt.missed

    async def test_what_a_session_left_elsewhere_is_missed(self) -> None:
        async with asking(FakeSource()) as asks:
            ids = [1 + number % 6 for number in range(40)]
            first = (await asks.answer(asked(ids=ids, route=Route(cached_tokens=36))))[0]
            assert isinstance(first, Admitted)
            assert first.receipt.missed == {"not in the pool": 32}

    async def test_nonsense_at_the_socket_is_left_out(self, connector: FromConnector) -> None:
        teller, other = ToReplica(connector.path), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for nonsense in (b"\xc1nonsense", b""):
            other.sendto(nonsense, str(connector.path))
        other.close()
        teller.tell(StoresTold(1))
        assert list(connector.heard()) == [StoresTold(1)]
        teller.close()


class Reports:
    """Tiers that hear of turns: each is followed by a return, sure and soon."""

    def __init__(self) -> None:
        self.heard: list[TurnEnded] = []

    def turn_over(self, over: TurnEnded) -> Forecast | None:
        self.heard.append(over)
        return Forecast(np.linspace(-0.5, -20.0, EDGES, dtype=np.float32))


@pytest.mark.parametrize("is_told_first", [False, True])
async def test_a_turn_is_reported_with_the_marks_of_its_chain_and_the_forecast_counts_as_load(
    connector: FromConnector, is_told_first: bool
) -> None:
    reports = Reports()
    async with asking(FakeSource(), connector=connector, reports=reports) as asks:
        teller, marks = ToReplica(connector.path), ChainMarks((2,), b"m" * 8)
        if is_told_first:
            teller.tell(TurnTold(0, marks))
        await asks.answer(asked(3, placement=Placement()))
        if not is_told_first:
            assert (await asks.engine.load(3600)).returns == 0
            teller.tell(TurnTold(0, marks))
        async with asyncio.timeout(20):
            while (await asks.engine.load(3600)).returns < 0.5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        (over,) = reports.heard
        assert (over.marks, over.input_tokens, over.output_tokens, over.stop) == (marks, 8, 3, "stop")
        await asks.engine.forget({A + SESSION})
        assert (await asks.engine.load(3600)).returns == 0
        teller.close()


async def test_a_replica_that_leaves_waits_for_the_last_stores(connector: FromConnector) -> None:
    async with asking(FakeSource(), connector=connector) as asks:
        teller = ToReplica(connector.path)
        teller.tell(StoresTold(2))
        assert not await asks.engine.hand_over(0.05)
        teller.tell(StoresTold(0))
        assert await asks.engine.hand_over(20)
        teller.close()


async def test_a_replica_that_was_busy_still_hears_that_all_is_stored(connector: FromConnector) -> None:
    """Its socket had no room when the connector told it: it would wait for all of its time."""
    async with asking(FakeSource(), connector=connector) as asks:
        teller = ToReplica(connector.path)
        teller.tell(StoresTold(2))
        for key in range(30):
            teller.tell(PromptTold(key))
        teller.tell(StoresTold(0))
        assert teller.resend()
        assert not await asks.engine.hand_over(0.05)
        teller.resend()  # as the connector does at each step
        assert await asks.engine.hand_over(0.05)
        teller.close()


async def test_prices_are_learned_from_what_is_computed_alone() -> None:
    source = FakeSource(step_s=0.03)
    async with asking(source) as asks:
        before = await asks.engine.prices()
        for number in range(6):
            await asks.answer(asked(1, ids=[1 + number % 6] * 900), key=number)
        after = await asks.engine.prices()
        assert abs(after.seconds(900, 0) - 0.03) < abs(before.seconds(900, 0) - 0.03)


def test_a_turn_goes_through_vllm_as_plain_data() -> None:
    for placement in (None, Placement(first="nvme", write_behind=(), ttl_s=7.0)):
        turn = ReplicaTurn(3, A, SESSION, b"salt", placement, ("node",))
        said = turn.params()
        assert ReplicaTurn.of(SimpleNamespace(kv_transfer_params=said)) == turn
    assert ReplicaTurn.of(SimpleNamespace(kv_transfer_params=None)) is None
    with pytest.raises(ValueError, match="turn of a replica"):
        ReplicaTurn.of(SimpleNamespace(kv_transfer_params={"samovar": {**said["samovar"], "key": "x"}}))
