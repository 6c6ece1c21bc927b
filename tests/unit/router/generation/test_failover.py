"""Answers that outlive their replicas: real engines behind a client that loses them at chosen tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch

from samovar.cache_tiers.blocks.extent import Placement
from samovar.configs.settings import RouterSettings
from samovar.replicas.engine.engine import Engine
from samovar.replicas.messages import (
    KEPT_REF_BYTES,
    Admitted,
    Delta,
    Event,
    Failed,
    GenerateRequest,
    Grammar,
    Keep,
    Receipt,
    Refused,
    Resume,
    Route,
    SamplingParams,
    TokenLogprob,
)
from samovar.replicas.serving.served import EventStream, merge_deltas
from samovar.router.generation import failover
from samovar.router.generation.answer import Answer
from samovar.router.generation.failover import (
    AnswerNotKept,
    Outcome,
    Progress,
    ReplicaFull,
    ReplicaSilent,
    Trials,
    resuming,
    seeded,
)
from samovar.router.prompt.prompt import Prompt
from samovar.router.routing.replica_client import ReplicaClient, ReplicaFailed, ReplicaLost
from tests.support.engines.engines import prompt_of, small_engine
from tests.support.engines.exactness import assert_same_logprobs
from tests.support.router.fake_replica import FakeReplicas, Script, say
from tests.support.router.router_harness import House, chat, error_of, make_settings
from tests.unit.router.generation.test_stream import chunks_of

CHAT = "/v1/chat/completions"
TOKENS = 24
PROMPT = prompt_of(37, seed=5)
JSON = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"a": {"enum": ["red", "blue"]}, "b": {"type": "string", '
    '"maxLength": 9}}, "required": ["a", "b"], "additionalProperties": false, '
    '"x-guidance": {"whitespace_flexible": false}}',
    "guided_json",
)
DRAWN = {"temperature": 1.3, "seed": 11}
QUICK = RouterSettings(heartbeat_s=0.02, stall_s=0.1, resume_s_max=0.5, resumes_max=3)
PATIENT = RouterSettings(resumes_max=20)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PAUSE_S", 0.001)
    monkeypatch.setattr(failover, "PAUSE_S_MAX", 0.002)


# Real engines that are lost ---------------------------------------------------------------------


class Engines:
    """A client over engines in turn; the calls in `kills` are lost after that many deltas."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.calls: list[GenerateRequest] = []
        self.kills: dict[int, int] = {}  # number of the call -> deltas that still get through
        self.lost = 0
        self._keys = itertools.count(1)
        self._inbox: dict[int, list[Event]] = {}

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        number = len(self.calls)
        self.calls.append(request)
        engine, key = self.engines[number % len(self.engines)], next(self._keys)
        left = self.kills.get(number, 10**9)
        self._inbox[key] = []
        refused = engine.requests.add(key, request)
        assert refused is None, refused
        try:
            for _ in range(10**4):
                if not self._inbox[key]:
                    for other, event in engine.step():
                        self._inbox[other].append(event)
                    engine.check_integrity()
                events, self._inbox[key] = self._inbox[key], []
                deltas = [event for event in events if isinstance(event, Delta)]
                if len(deltas) > left or not left:
                    kept = events[: len(events) - len(deltas) + left]
                    if kept:
                        yield merge_deltas(kept)
                    self.lost += 1
                    raise ReplicaLost("ActorDiedError")
                left -= len(deltas)
                yield merge_deltas(events)
                await asyncio.sleep(0)
        finally:
            engine.requests.abort(key)
            del self._inbox[key]


@dataclass
class Heard:
    """What came of one request."""

    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    finish: dict[int, str | None] = field(default_factory=dict)
    admissions: int = 0


async def ask(
    client: object,
    request: GenerateRequest,
    settings: RouterSettings = PATIENT,
    outcomes: list[Outcome] | None = None,
) -> Heard:
    heard = Heard()
    count = [].append if outcomes is None else outcomes.append
    stream = resuming(cast(ReplicaClient, client), request, "session", settings, count)
    async for events in stream:
        assert events, "a sign of life was passed on"
        for event in events:
            if isinstance(event, Admitted):
                heard.admissions += 1
                continue
            assert isinstance(event, Delta), event
            choice = event.index
            assert heard.finish.get(choice) is None, "tokens after the end"
            heard.texts[choice] = heard.texts.get(choice, "") + event.text
            heard.token_ids[choice] = heard.token_ids.get(choice, ()) + event.token_ids
            heard.logprobs[choice] = heard.logprobs.get(choice, ()) + event.logprobs
            heard.finish[choice] = event.finish_reason
    assert set(heard.finish.values()) <= {"stop", "length"}
    assert len(heard.finish) == request.n
    return heard


def request_of(n: int = 1, **params: Any) -> GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **params})
    return GenerateRequest("r", PROMPT, sampling, n)


@pytest.fixture(scope="module")
def engines(tiny_llama: Path) -> list[Engine]:
    return [small_engine(tiny_llama).engine for _ in range(2)]


def assert_same(heard: Heard, whole: Heard, is_exact: bool) -> None:
    """All that is heard; log-probabilities, where the CPU is not exact, within the bound."""
    for choice in whole.logprobs:
        ours, expected = heard.logprobs[choice], whole.logprobs[choice]
        assert_same_logprobs(ours, expected, torch.float32, is_exact)
    assert replace(heard, logprobs=whole.logprobs) == whole


async def same_texts(
    engines: list[Engine], request: GenerateRequest, kills: int, is_exact: bool, seed: int = 1
) -> None:
    """`kills` losses at random tokens, up to three of them an answer: what is heard is always the same."""
    rng = random.Random(seed)
    whole = await ask(Engines(engines), request)
    lost = 0
    while lost < kills:
        client, outcomes = Engines(engines), list[Outcome]()
        client.kills = {number: rng.randint(0, 20 // (number + 1)) for number in range(rng.randint(1, 3))}
        heard = await ask(client, request, outcomes=outcomes)
        assert heard.admissions >= whole.admissions
        heard.admissions = whole.admissions
        assert_same(heard, whole, is_exact)
        assert set(outcomes) <= {"resumed"}
        lost += client.lost


@pytest.mark.guarantee("F20")
@pytest.mark.parametrize("params", [{}, DRAWN], ids=["greedy", "drawn"])
async def test_f20_50_kills_at_random_tokens_50_identical_texts(
    engines: list[Engine], tiny_is_exact: bool, params: dict[str, Any]
) -> None:
    await same_texts(engines, request_of(**params), 50, tiny_is_exact)


@pytest.mark.guarantee("F20")
@pytest.mark.parametrize(
    "params",
    [
        {**DRAWN, "logprobs": 2},
        {**DRAWN, "presence_penalty": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.4},
        {**DRAWN, "n": 2},
        {**DRAWN, "n": 3, "logprobs": 1, "min_tokens": 9, "stop": (" ", "e")},
        {**DRAWN, "n": 2, "max_tokens": 99, "ignore_eos": False, "grammar": JSON},
    ],
    ids=["logprobs", "penalties", "n=2", "n=3", "json"],
)
async def test_f20_whatever_was_asked_for(
    engines: list[Engine], tiny_is_exact: bool, params: dict[str, Any]
) -> None:
    await same_texts(engines, request_of(**params), 12, tiny_is_exact)


@pytest.mark.guarantee("F20")
async def test_f20_stop_strings_and_characters_that_were_held_back(
    engines: list[Engine], tiny_is_exact: bool
) -> None:
    plain = (await ask(Engines(engines), request_of(**DRAWN))).texts[0]
    stop = (plain[14:17], plain[9:11] + "no such text")
    await same_texts(engines, request_of(**DRAWN, stop=stop), 12, tiny_is_exact)
    assert (await ask(Engines(engines), request_of(**DRAWN, stop=stop))).finish == {0: "stop"}


@pytest.mark.guarantee("G12")
async def test_g12_what_is_resumed_behind_a_deletion_leaves_nothing_at_its_replica(tiny_llama: Path) -> None:
    """The replica that is asked then was told of the deletion before, and would take it for a new turn."""
    engines = [small_engine(tiny_llama).engine for _ in range(2)]
    client, kept = Engines(engines), Keep(bytes(KEPT_REF_BYTES), b"", 1)
    client.kills = {0: 5}
    request = replace(request_of(), placement=Placement(), keep=kept)
    stream = resuming(
        cast(ReplicaClient, client), request, "session", PATIENT, [].append, lambda: client.lost > 0
    )
    async for _ in stream:
        continue
    first, second = client.calls
    assert (first.placement, first.keep, first.is_cleared) == (Placement(), kept, False)
    assert (second.placement, second.keep, second.is_cleared) == (None, None, True)
    for engine, there in zip(engines, (True, False), strict=True):
        again = Engines([engine])
        found = [event async for events in again.generate(request_of(), "") for event in events]
        admitted = next(event for event in found if isinstance(event, Admitted))
        assert (admitted.cached_tokens > 0) == there


@pytest.mark.parametrize("is_exact", [True, False], ids=["equal", "bound"])
@pytest.mark.parametrize("fault", ["token", "choice"])
async def test_a_planted_fault_is_noticed(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, fault: str, is_exact: bool
) -> None:
    asks = Progress.asks

    def faulty(self: Progress) -> list[GenerateRequest]:
        wrong = []
        for good in asks(self):
            if good.resume is not None and fault == "token":
                good = replace(good, resume=replace(good.resume, token_ids=good.resume.token_ids[:-1]))
            elif good.resume is not None:
                good = replace(good, resume=None)  # begins anew: what was passed on comes twice
            wrong.append(good)
        return wrong

    monkeypatch.setattr(Progress, "asks", faulty)
    with pytest.raises(AssertionError):
        await same_texts(engines, request_of(**DRAWN), 5, is_exact)


# Scripts ----------------------------------------------------------------------------------------

LOST = ReplicaLost("ActorDiedError")
SCRIPTED = GenerateRequest("r", [1, 2], SamplingParams(max_tokens=9, seed=1), route=Route(avoid=("old",)))


def script_of(*scripts: Script) -> Callable[[GenerateRequest], Script]:
    """One for each call, the last for all that follow."""
    calls = iter(scripts)
    latest: list[Script] = []

    def script(request: GenerateRequest) -> Script:
        latest[:] = [next(calls, latest[0] if latest else [])]
        return latest[0]

    return script


async def test_before_the_first_token_the_whole_request_is_asked_again() -> None:
    request = replace(SCRIPTED, n=2)
    ends: Script = [Delta(0, "a", (1,), (), "stop"), Delta(1, "b", (2,), (), "stop")]
    replicas = FakeReplicas(script_of([Admitted("one", 0, 0.0), LOST], [Admitted("two", 0, 0.0), *ends]))
    outcomes: list[Outcome] = []
    heard = await ask(replicas, request, QUICK, outcomes)
    assert heard.texts == {0: "a", 1: "b"}
    assert [call.resume for call in replicas.calls] == [None, None]
    assert replicas.calls[1] == replace(request, route=Route(avoid=("old", "one")))
    assert outcomes == ["resumed"]


async def test_what_is_told_again_is_not_computed_anew_behind_a_deletion() -> None:
    """Its events would be others than those that the client has seen."""
    keep = Keep(bytes(KEPT_REF_BYTES), b"", 1, is_attaching=True)
    replicas = FakeReplicas(script_of([Admitted("one", 0, 0.0), Delta(0, "a", (1,), (), "stop")]))
    stream = resuming(
        cast(ReplicaClient, replicas), replace(SCRIPTED, keep=keep), "session", QUICK, [].append, lambda: True
    )
    with pytest.raises(AnswerNotKept):
        await anext(stream)
    assert not replicas.calls


def test_choices_that_go_on_apart_have_no_common_order() -> None:
    """One that begins again before its first token has, and one of its own, too."""
    admitted, later = Admitted("one", 0, 0.0), [Admitted("two", 0, 0.0)]
    for n, has_begun, is_apart in ((3, True, True), (3, False, False), (1, True, False)):
        answer = Answer([Prompt([1, 2, 3], None)], n, 1.0)
        answer.apply(0, [admitted])
        if has_begun:
            answer.apply(0, [Delta(0, "x", (1,))])
        assert answer.resumes_apart(later) is is_apart
        assert not answer.resumes_apart([Delta(0, "y", (2,))])


async def test_only_unfinished_answers_go_on_each_by_itself() -> None:
    begin: Script = [
        Admitted("one", 0, 0.0),
        Delta(0, "a", (1,)),
        Delta(1, "b", (2,), (), "stop"),
        Delta(2, "c", (3,)),
        Failed("going away", replica_lost=True),
        Delta(0, "late", (9,)),
    ]

    def script(request: GenerateRequest) -> Script:
        if request.resume is None:
            return begin
        choice = request.resume.choice
        return [Admitted(f"two-{choice}", 0, 0.0), Delta(choice, "z", (7,), (), "length")]

    replicas = FakeReplicas(script)
    heard = await ask(replicas, replace(SCRIPTED, n=3), QUICK)
    assert heard.texts == {0: "az", 1: "b", 2: "cz"}
    assert [call.resume for call in replicas.calls[1:]] == [Resume(0, (1,)), Resume(2, (3,))]
    assert {(call.n, call.route.avoid) for call in replicas.calls[1:]} == {(1, ("old", "one"))}
    assert replicas.open == 0


@pytest.mark.guarantee("F21")
async def test_f21_a_silent_replica_is_left_and_what_it_says_later_is_not_heard() -> None:
    wakes = asyncio.Event()
    stalled: Script = [Admitted("one", 0, 0.0), Delta(0, "a", (1,)), wakes, Delta(0, "late", (9,))]
    goes_on: Script = [Admitted("two", 0, 0.0), Delta(0, "b", (2,)), 0.05, Delta(0, "c", (3,), (), "stop")]
    replicas = FakeReplicas(script_of(stalled, goes_on))
    replicas.cancelled.clear()
    waking = asyncio.get_running_loop().call_later(0.12, wakes.set)
    heard = await ask(replicas, SCRIPTED, QUICK)
    waking.cancel()
    assert heard.texts == {0: "abc"}
    assert replicas.cancelled.is_set()
    assert replicas.calls[1].resume == Resume(0, (1,))
    assert replicas.open == 0


class Beating(FakeReplicas):
    """Signs of life before the script."""

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        for _ in range(20):
            await asyncio.sleep(0.02)
            yield []
        async for events in super().generate(request, session_key):
            yield events


async def test_f21_a_slow_replica_that_says_so_is_not_left() -> None:
    replicas = Beating(lambda request: say(["a", "b"]))
    assert (await ask(replicas, SCRIPTED, QUICK)).texts == {0: "ab"}
    assert len(replicas.calls) == 1


async def test_a_full_replica_is_asked_again_when_it_is_not_the_first() -> None:
    full = Refused("queue_full", "full", 0.01)
    rest: Script = [Admitted("two", 0, 0.0), Delta(0, "b", (2,), (), "stop")]
    replicas = FakeReplicas(script_of([*say(["a", "z"])[:2], LOST], *[[full]] * 9, rest))
    assert (await ask(replicas, SCRIPTED, QUICK)).texts == {0: "ab"}
    assert {call.resume for call in replicas.calls[1:]} == {Resume(0, (10,))}


async def collect(replicas: FakeReplicas, settings: RouterSettings) -> list[Event]:
    events: list[Event] = []
    async for came in resuming(replicas, SCRIPTED, "session", settings, [].append):
        events += came
    return events


async def test_the_first_refusal_is_the_answer() -> None:
    full = Refused("queue_full", "full", 0.01)
    replicas = FakeReplicas(lambda request: [full])
    assert await collect(replicas, QUICK) == [full]
    assert len(replicas.calls) == 1


@pytest.mark.parametrize(
    ("script", "error", "calls"),
    [
        ([LOST], ReplicaLost, 4),
        ([Failed("going away", replica_lost=True)], ReplicaLost, 4),
        ([Admitted("one", 0, 0.0), Delta(0, "a", (1,)), asyncio.Event()], ReplicaLost, 4),
        ([Admitted("one", 0, 0.0), Delta(0, "a", (1,)), Delta(3, "?", (1,))], ReplicaFailed, 1),
        ([Admitted("one", 0, 0.0), ReplicaFailed("TaskError")], ReplicaFailed, 1),
    ],
    ids=["dies", "says so", "stalls", "protocol", "fails"],
)
async def test_gives_up(script: Script, error: type[Exception], calls: int) -> None:
    replicas = FakeReplicas(lambda request: script)
    with pytest.raises(error):
        await collect(replicas, QUICK)
    assert len(replicas.calls) == calls
    assert replicas.open == 0


async def test_nobody_there_is_waited_for_as_long_as_is_allowed_and_counts_as_no_loss() -> None:
    replicas = FakeReplicas(script_of(*[[asyncio.Event()]] * 3, say(["a"])))
    none = replace_settings(resumes_max=0)
    assert (await ask(replicas, SCRIPTED, none)).texts == {0: "a"}
    replicas = FakeReplicas(lambda request: [asyncio.Event()])
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(ReplicaSilent):
        await collect(replicas, none)
    assert asyncio.get_running_loop().time() - began_s >= QUICK.resume_s_max
    assert replicas.open == 0


def replace_settings(**changes: Any) -> RouterSettings:
    return RouterSettings(**{**QUICK.model_dump(), **changes})


async def test_leaving_cancels_every_stream(engines: list[Engine]) -> None:
    gate = asyncio.Event()

    def script(request: GenerateRequest) -> Script:
        if request.resume is None:
            return [Admitted("one", 0, 0.0), Delta(0, "a", (1,)), Delta(1, "b", (2,)), LOST]
        return [Admitted("two", 0, 0.0), Delta(request.resume.choice, "c", (3,)), gate]

    replicas = FakeReplicas(script)
    stream = resuming(replicas, replace(SCRIPTED, n=2), "session", PATIENT, [].append)
    while len(replicas.calls) < 3:
        await anext(stream)
    assert replicas.open == 2
    await stream.aclose()
    assert replicas.open == 0


# The parts --------------------------------------------------------------------------------------


def test_trials_bound_losses_pauses_and_time() -> None:
    trials = Trials(QUICK, deadline_s=10.5)
    assert trials.wait_s(10.0) == QUICK.stall_s
    assert trials.wait_s(10.45) == pytest.approx(0.05)
    assert trials.lost(ReplicaSilent("x"), 10.1) is not None
    assert (trials.losses, trials.avoid, trials.is_recovering) == (0, (), False)
    assert trials.lost(ReplicaFull(Refused("queue_full", "full", 30.0)), 10.2) == pytest.approx(0.3)
    trials.loss_of(Admitted("one", 0, 0.0), is_begun=False)
    trials.is_heard = True
    assert trials.wait_s(99.0) == QUICK.stall_s
    assert trials.lost(ReplicaSilent("x"), 99.0) is not None
    assert (trials.losses, trials.avoid, trials.deadline_s) == (1, ("one",), 99.5)
    assert trials.lost(ReplicaLost("x"), 99.1) is not None
    assert trials.deadline_s == 99.5  # nobody has said a word since
    assert trials.lost(ReplicaLost("x"), 99.5) is None
    again = Trials(QUICK, deadline_s=10.5, is_again=True)
    assert isinstance(again.loss_of(Refused("invalid", "x"), is_begun=True), ReplicaLost)
    assert again.loss_of(Refused("invalid", "x", param="guided_regex"), is_begun=True) is None
    assert Trials(replace_settings(resumes_max=0), 1.0).lost(ReplicaLost("x"), 0.0) is None


def test_progress_refuses_what_nobody_asked_for() -> None:
    progress = Progress(replace(SCRIPTED, resume=Resume(2, (1,))))
    with pytest.raises(ReplicaFailed):
        progress.take(Delta(0, "x", (2,)))
    progress.take(Delta(2, "x", (2,)))
    progress.check_integrity()
    assert [one.resume for one in progress.asks()] == [Resume(2, (1, 2))]
    progress.take(Delta(2, "x", (3,), (), "stop"))
    assert progress.is_over
    with pytest.raises(ReplicaFailed):
        progress.take(Delta(2, "x", (4,)))
    too_long = Progress(SCRIPTED)
    too_long.take(Delta(0, "x", tuple(range(9))))
    with pytest.raises(AssertionError, match="has it all"):
        too_long.check_integrity()


def test_an_answer_names_all_its_replicas_and_keeps_its_first_receipt() -> None:
    answer = Answer([Prompt([1, 2, 3], None)], 1, 1.0)
    first = Receipt(tokens={"gpu": 2, "compute": 1})
    answer.apply(0, [Admitted("b", 2, 0.0, first), Delta(0, "x", (1,))])
    answer.apply(0, [Admitted("a", 0, 0.0, Receipt(tokens={"compute": 3}))])
    assert answer.replica_ids == ["a", "b"]
    assert answer.receipt.cached_tokens == 2


def test_drawn_answers_get_a_seed_once() -> None:
    drawn = [seeded(SamplingParams(max_tokens=1)).seed for _ in range(2)]
    assert None not in drawn
    assert drawn[0] != drawn[1]
    for params in (SamplingParams(max_tokens=1, temperature=0), SamplingParams(max_tokens=1, seed=5)):
        assert seeded(params) is params


async def test_a_stream_says_when_it_has_nothing_to_say() -> None:
    stream = EventStream(1, coalesce_s=0.01, heartbeat_s=0.02)
    assert await stream.next() == []
    stream.put(Admitted("one", 0, 0.0))
    assert await stream.next() == [Admitted("one", 0, 0.0)]
    stream.put(Delta(0, "a", (1,)))
    assert await stream.next() == [Delta(0, "a", (1,))]
    assert await stream.next() == []
    stream.put(Delta(0, "b", (2,)))
    stream.put(Delta(0, "c", (3,), (), "stop"))
    assert stream.is_over
    assert not stream.is_read
    assert await stream.next() == [Delta(0, "bc", (2, 3), (), "stop")]
    assert stream.is_read


# Through the ingress -------------------------------------------------------------------------


async def test_f20_a_stream_goes_on_and_is_counted() -> None:
    begin: Script = [Admitted("one", 0, 0.0), Delta(0, "Hel", (1,)), LOST]
    house = House(script_of(begin, [Admitted("two", 0, 0.0), Delta(0, "lo", (2,), (), "stop")]))
    async with house.server() as url, httpx.AsyncClient() as client:
        response = await client.post(url + CHAT, json=chat(stream=True, temperature=1))
        metrics = (await client.get(url + "/metrics")).text
    chunks = chunks_of(response.text)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "Hello"
    assert response.text.endswith("data: [DONE]\n\n")
    assert chunks[-1]["receipt"]["replica"] == ["one", "two"]
    seeds = {call.sampling.seed for call in house.replicas.calls}
    assert len(seeds) == 1
    assert None not in seeds
    assert 'samovar_failovers_total{outcome="resumed"} 1.0' in metrics


@pytest.mark.guarantee("F20")
@pytest.mark.parametrize("stream", [True, False])
async def test_f20_giving_up_is_an_error_and_never_a_cut(stream: bool) -> None:
    house = House(lambda request: [Admitted("one", 0, 0.0), Delta(0, "a", (1,)), LOST])
    async with house.server() as url, httpx.AsyncClient() as client:
        response = await client.post(url + CHAT, json=chat(stream=stream))
        metrics = (await client.get(url + "/metrics")).text
    if stream:
        assert chunks_of(response.text)[-1]["error"]["code"] == "replica_lost"
    else:
        assert (response.status_code, error_of(response)["code"]) == (503, "replica_lost")
    assert len(house.replicas.calls) == 1 + house.settings.router.resumes_max
    assert 'samovar_failovers_total{outcome="gave_up"} 1.0' in metrics


async def test_signs_of_life_do_not_keep_pings_away() -> None:
    house = House(settings=make_settings(sse_keepalive_s=0.05))
    house.replicas.__class__ = Beating
    async with house.server() as url, httpx.AsyncClient() as client:
        response = await client.post(url + CHAT, json=chat(stream=True))
    assert response.text.count(": ping") >= 2
