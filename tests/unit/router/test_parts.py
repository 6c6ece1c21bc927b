"""Keys, limits, session keys, the event pump and Ray's client, each alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from samovar.configs.settings import AuthSettings, LimitsSettings
from samovar.replicas.messages import (
    Admitted,
    Delta,
    Event,
    Forgotten,
    GenerateRequest,
    Refused,
    SamplingParams,
    TierSign,
)
from samovar.router.auth import ConcurrencyLimit, server_secret, tenant_salt
from samovar.router.generation.failover import EventPump
from samovar.router.ingresses import IngressesCleared
from samovar.router.ingresses.ray_ingresses import RayIngresses
from samovar.router.openai.errors import InvalidValue, TooManyRequests, shown
from samovar.router.openai.messages import ChatMessage
from samovar.router.openai.parse import BodyIds, ParsedChat, ParsedCompletion
from samovar.router.routing import ray_clients
from samovar.router.routing.ray_clients import RayReplicaClient
from samovar.router.routing.replica_client import ReplicaFailed, ReplicaLost
from samovar.router.routing.session import session_key
from tests.support.router.fake_replica import INFO

SECRET = b"secret"


def conversation(*texts: str, ids: BodyIds | None = None) -> ParsedChat:
    roles = ["system", "user", "assistant"]
    messages = tuple(
        ChatMessage(roles[0] if place == 0 else roles[2 - place % 2], text)  # type: ignore[arg-type]
        for place, text in enumerate(texts)
    )
    return ParsedChat(model="m", sampling=SamplingParams(), messages=messages, ids=ids or BodyIds())


def key(request: ParsedChat | ParsedCompletion, tenant: str = "t", **headers: str) -> str:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return session_key(SECRET, tenant, given, request, 512)


def test_session_key_order() -> None:
    everything = conversation("s", "u", ids=BodyIds("session", "cache", "user", None))
    headers = {
        "x_session_id": "1",
        "x_session_affinity": "2",
        "x_openwebui_chat_id": "3",
        "x_user_id": "4",
    }
    seen = [key(everything, **headers)]
    for name in ("x_session_id", "x_session_affinity"):
        del headers[name]
        seen.append(key(everything, **headers))
    for ids in (BodyIds(None, "cache", "user"), BodyIds(None, None, "user")):
        seen.append(key(conversation("s", "u", ids=ids), **headers))
    del headers["x_openwebui_chat_id"]
    seen.append(key(conversation("s", "u", ids=BodyIds(None, None, "user")), **headers))
    seen.append(key(conversation("s", "u"), **headers))
    seen.append(key(conversation("s", "u")))
    assert len(set(seen)) == len(seen)
    assert all(len(value) == 64 for value in seen)


def test_session_key_of_a_headerless_conversation_stays() -> None:
    turns = ["s", "u1", "a1", "u2", "a2"]
    assert len({key(conversation(*turns[:length])) for length in (2, 4, 5)}) == 1
    assert key(conversation("s", "u1")) != key(conversation("s", "u9"))
    text = "a document " * 100
    plain = [
        ParsedCompletion(model="m", sampling=SamplingParams(), prompts=(text + end,)) for end in ("", "x")
    ]
    assert key(plain[0]) == key(plain[1])


def test_session_key_depends_on_tenant_kind_and_secret() -> None:
    assert key(conversation("s"), "t", x_session_id="v") != key(conversation("s"), "u", x_session_id="v")
    assert key(conversation("s"), x_session_id="v") != key(conversation("s"), x_user_id="v")
    assert key(conversation("s"), x_session_id="v") != session_key(
        b"other", "t", {"x-session-id": "v"}, conversation("s"), 512
    )


def test_an_unused_bad_id_is_refused_too() -> None:
    with pytest.raises(InvalidValue) as caught:
        key(conversation("s", ids=BodyIds(user="a\nsecret")), x_session_id="fine")
    assert caught.value.param == "user"
    assert "secret" not in caught.value.message


@pytest.mark.guarantee("G2", "F14")
def test_salts_separate_tenants_and_only_narrow() -> None:
    salts = [
        tenant_salt(secret, tenant, salt)
        for secret in (b"1", b"2")
        for tenant in ("a", "b")
        for salt in (None, "", "a", "b")
    ]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 32 for salt in salts)
    assert server_secret(AuthSettings()) != server_secret(AuthSettings())


def test_concurrency_limit_counts_and_forgets() -> None:
    limit = ConcurrencyLimit(LimitsSettings(concurrent_per_key=2, concurrent_total=3, retry_after_s=1.2))
    with limit.lease("a"), limit.lease("a"), limit.lease("b"):
        for tenant, word in (("a", "API key"), ("c", "server")):
            with pytest.raises(TooManyRequests) as caught, limit.lease(tenant):
                raise AssertionError("no place was left")
            assert caught.value.headers["retry-after"] == "2"
            assert word in caught.value.message
        limit.check_integrity()
    assert (limit.open_total, limit.open_of("a")) == (0, 0)
    limit.check_integrity()


def test_values_in_messages_are_short_and_printable() -> None:
    for value in ("x" * 10_000, 10**5000, "\ud800\0\n", ["x"] * 1000):
        assert len(shown(value)) < 500
        assert shown(value).isprintable()


# The pump ------------------------------------------------------------------------------------


async def test_pump_merges_waits_and_closes() -> None:
    gate, closed = asyncio.Event(), []

    async def stream(name: str, *events: Event) -> AsyncGenerator[list[Event], None]:
        try:
            for event in events:
                yield [event]
            await gate.wait()
            yield [Delta(0, name, ())]
        finally:
            closed.append(name)

    first = Admitted("r", 0, 0.0)
    async with EventPump([stream("a", first), stream("b", first)]) as pump:
        seen = {(await pump.next(5) or (9, []))[0] for _ in range(2)}
        assert seen == {0, 1}
        assert await pump.next(0.01) is None
        gate.set()
        assert await pump.next(5) is not None
    assert sorted(closed) == ["a", "b"]


async def test_pump_ends_and_raises() -> None:
    async def short() -> AsyncGenerator[list[Event], None]:
        yield [Admitted("r", 0, 0.0)]

    async def broken() -> AsyncGenerator[list[Event], None]:
        yield [Admitted("r", 0, 0.0)]
        raise ReplicaLost("x")

    async with EventPump([short()]) as pump:
        assert await pump.next(5) is not None
        with pytest.raises(StopAsyncIteration):
            await pump.next(5)
    async with EventPump([broken()]) as pump:
        await pump.next(5)
        with pytest.raises(ReplicaLost):
            await pump.next(5)


# Ray's client over a handle that only looks like one -------------------------------------------


@dataclass
class FakeAnswer:
    """What one replica says to a broadcast: an answer, an exception, or nothing ever (`SILENT`)."""

    says: Any

    async def get_async(self) -> Any:
        if self.says is SILENT:
            await asyncio.get_running_loop().create_future()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


SILENT = object()


class FakeHandle:
    """Records what a Serve handle would be asked."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps
        self.asked: dict[str, Any] = {}
        self.cancels = 0
        self.broadcasts: list[tuple[object, ...]] = []
        self.generate = self
        self._left = iter(steps)

    def options(self, **options: Any) -> FakeHandle:
        self.asked = options
        return self

    def remote(self, request: GenerateRequest) -> FakeHandle:
        return self

    def __aiter__(self) -> FakeHandle:
        return self

    async def __anext__(self) -> list[Event]:
        for step in self._left:
            if isinstance(step, Exception):
                raise step
            return [step]
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancels += 1

    def broadcast(self, method: str, *args: object) -> FakeHandle:
        self.broadcasts.append((method, *args))
        return self

    async def _fetch_replica_results_async(self) -> list[FakeAnswer]:
        if isinstance(self.steps[0], Exception):
            raise self.steps[0]
        return [FakeAnswer(step) for step in self.steps]


REQUEST = GenerateRequest("r", [1], SamplingParams(max_tokens=1))
END = Delta(0, "x", (1,), finish_reason="stop")


async def run(handle: FakeHandle, stop_after: int = 9) -> list[Event]:
    stream = RayReplicaClient(handle, retry_after_s=1.5).generate(REQUEST, "key")
    seen: list[Event] = []
    async for events in stream:
        seen += events
        if len(seen) == stop_after:
            break
    await stream.aclose()
    return seen


async def test_ray_client_passes_events_and_the_session() -> None:
    handle = FakeHandle(Admitted("r", 0, 0.0), END)
    assert len(await run(handle)) == 2
    assert handle.asked == {"stream": True, "session_id": "key"}
    assert handle.cancels == 0


async def test_ray_client_cancels_what_is_not_over() -> None:
    for steps, stop_after, cancels in (
        ([Admitted("r", 0, 0.0), END], 1, 1),
        ([Admitted("r", 0, 0.0), END], 2, 0),
        ([Refused("queue_full", "full")], 1, 0),
    ):
        handle = FakeHandle(*steps)
        await run(handle, stop_after)
        assert handle.cancels == cancels


async def test_ray_client_translates_exceptions() -> None:
    refused = await run(FakeHandle(BackPressureError(num_queued_requests=1, max_queued_requests=1)))
    assert isinstance(refused[0], Refused)
    assert refused[0].retry_after_s == 1.5
    with pytest.raises(ReplicaLost):
        await run(FakeHandle(RayActorError()))
    with pytest.raises(ReplicaFailed):
        await run(FakeHandle(RayTaskError("f", "inside", ValueError("x"))))


async def test_ray_client_describes_those_that_answer() -> None:
    client = RayReplicaClient(FakeHandle(INFO, RayActorError()), retry_after_s=1)
    assert await client.describe() == [INFO]
    for failure in (TimeoutError(), RayActorError(), RayServeException("shutting down")):
        client = RayReplicaClient(FakeHandle(failure), retry_after_s=1)
        assert (await client.describe(), await client.stats()) == ([], [])


async def test_a_replica_that_hangs_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's own way of waiting gives nobody's answer if one is late."""
    monkeypatch.setattr(ray_clients, "CONTROL_S", 0.05)
    client = RayReplicaClient(FakeHandle(INFO, SILENT, INFO), retry_after_s=1, clear_timeout_s=0.05)
    assert await client.describe() == [INFO, INFO]
    cleared = Forgotten(pages=1, extents=2, nbytes=3)
    client = RayReplicaClient(FakeHandle(cleared, SILENT), retry_after_s=1, clear_timeout_s=0.05)
    counts = await client.clear(b"t", None)
    assert (counts.replicas, counts.silent) == (1, 1)
    assert await RayReplicaClient(FakeHandle(5, SILENT), retry_after_s=1).pool_bytes(b"t", b"s") is None
    assert await RayReplicaClient(FakeHandle(5, 6), retry_after_s=1).pool_bytes(b"t", b"s") == 11


@pytest.mark.parametrize("why", [TimeoutError(), RayActorError(), RayServeException("shutting down")])
async def test_replicas_that_cannot_be_asked_have_cleared_nothing(why: Exception) -> None:
    """Else a clear that reached none would be whole where none need run, or another model's answered."""
    client = RayReplicaClient(FakeHandle(why), retry_after_s=1)
    counts = await client.clear(b"t", None)
    assert (counts.replicas, counts.silent) == (0, 1)
    assert await client.pool_bytes(b"t", b"s") is None


async def test_where_no_replica_is_there_is_nothing_to_clear() -> None:
    """A model that sleeps has none, and Ray says so by an exception."""
    none = DeploymentUnavailableError("Replica")  # type: ignore[arg-type]
    client = RayReplicaClient(FakeHandle(none), retry_after_s=1)
    counts = await client.clear(b"t", None)
    assert (counts.replicas, counts.silent) == (0, 0)
    assert await client.pool_bytes(b"t", b"s") == 0


async def test_one_ingress_that_hangs_silences_no_other() -> None:
    told = ("one", b"a 1"), ("two", b"a 2")
    ingresses = RayIngresses(FakeHandle(told[0], SILENT, told[1]), timeout_s=0.01)
    assert await ingresses.metrics() == dict(told)
    cleared = await RayIngresses(FakeHandle((2, True), SILENT, (1, False)), timeout_s=0.01).forget("t", None)
    assert cleared == IngressesCleared(replies=3, silent=1, unfinished=1)
    for failure in (TimeoutError(), RayActorError(), RayServeException("shutting down")):
        assert await RayIngresses(FakeHandle(failure)).metrics() == {}


async def test_ray_client_tells_of_nodes_by_what_any_replica_of_theirs_heard() -> None:
    answers = (TierSign("n1", False), TierSign("n1", True), TierSign("n2", False), None, RayActorError())
    assert await RayReplicaClient(FakeHandle(*answers), retry_after_s=1).tiers_up() == {
        "n1": True,
        "n2": False,
    }


@pytest.mark.guarantee("F33")
def test_comparing_keys_looks_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from samovar.router import auth

    compared = []
    real = auth.secrets.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(auth.secrets, "compare_digest", counting)
    keys = {f"tenant-{number}": f"sk-{number:020d}" for number in range(5)}
    authenticator = auth.Authenticator(AuthSettings(api_keys=keys))
    headers = [(b"authorization", b"Bearer sk-" + b"0" * 20)]
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers}
    started_s = time.monotonic()
    assert authenticator.caller(scope) == auth.Caller("tenant-0")
    assert compared == [(32, 32)] * 5
    assert time.monotonic() - started_s < 5
