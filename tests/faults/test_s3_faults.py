"""F09: an S3 server that is down, slow, overloaded or talks nonsense is an error within the deadline."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from pydantic import SecretStr

from samovar.cache_tiers.blocks.record import TierError, TierMiss
from samovar.cache_tiers.media import s3
from samovar.cache_tiers.media.guard import Breaker, GuardedTier, TierLate
from samovar.cache_tiers.media.s3 import S3Tier
from samovar.cache_tiers.media.tier import Deadline
from samovar.cache_tiers.pricing.meters import TierMeter, TierPrice
from tests.support.inside import connections_of, settings_of
from tests.support.nodes.s3_extents import sealed
from tests.support.nodes.s3_stub import Answering, Misbehaviour, Request, Stub, s3_stub

WELL_S = 20.0
NOW_UNIX_S = 4e9
"""Deadline of calls that are meant to succeed: the machine may be busy."""

FAULT_S = 1.0
BOUND_S = 20.0
"""Deadline of calls that are not, and what they may take on a busy machine."""

HEADER, RECORD = sealed(1)
MakeTier = Callable[..., S3Tier]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with s3_stub() as made:
        yield made


SESSION = boto3.session.Session()
"""Shared here, where one test runs at a time: a session of its own costs each tier 0.15 s."""


@pytest.fixture
def make(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTier]:
    made = []
    monkeypatch.setattr("boto3.session.Session", lambda: SESSION)

    def make_one(**changes: object) -> S3Tier:
        made.append(S3Tier(stub.settings(**{"attempts_max": 1, **changes}), lambda: NOW_UNIX_S))
        return made[-1]

    yield make_one
    stub.released.set()
    for tier in made:
        assert idle(tier)
        tier.check_integrity()
        tier.close()


def idle(tier: S3Tier, timeout_s: float = 10.0) -> bool:
    """Wait until no call is under way, those that were given up included."""
    ends_s, connections = time.monotonic() + timeout_s, connections_of(tier._objects)
    free = 0
    while free < settings_of(tier).connections:
        if not connections.acquire(timeout=max(0.0, ends_s - time.monotonic())):
            break
        free += 1
    for _ in range(free):
        connections.release()
    return free == settings_of(tier).connections


def guarded(tier: S3Tier, threads: int = 2) -> GuardedTier:
    """As the node calls it: in time, whatever the server does."""
    breaker, meter = (
        Breaker(100, 1.0, 1.0, time.monotonic),
        TierMeter(TierPrice(0.1, 1e6), clock=time.monotonic),
    )
    guard = GuardedTier(
        tier, bytes_max=10**9, breaker=breaker, meter=meter, threads=threads, clock=time.monotonic
    )
    guard.ready = True
    return guard


def put(tier: S3Tier, deadline_s: float = WELL_S) -> None:
    tier.put(HEADER.address, RECORD, deadline=Deadline(deadline_s))


def read(tier: S3Tier, deadline_s: float = WELL_S) -> bytes:
    return tier.read(HEADER.address, 0, RECORD.nbytes, deadline=Deadline(deadline_s)).tobytes()


OPERATIONS: dict[str, Callable[[S3Tier], object]] = {
    "put": lambda tier: put(tier, FAULT_S),
    "read": lambda tier: read(tier, FAULT_S),
    "delete": lambda tier: tier.delete(HEADER.address),
    "quarantine": lambda tier: tier.quarantine(HEADER.address),
    "scan": lambda tier: list(tier.scan()),
    "probe": S3Tier.probe,
}


def error(status: int, code: str) -> Misbehaviour:
    return lambda to, request: to.error(status, code)


def raw(said: bytes) -> Misbehaviour:
    def answer(to: Answering, request: Request) -> None:
        to.wfile.write(said)
        to.close_connection = True

    return answer


FAULTS: dict[str, Misbehaviour] = {
    "500": error(500, "InternalError"),
    "503": error(503, "SlowDown"),
    "403": error(403, "AccessDenied"),
    "skew": error(403, "RequestTimeTooSkewed"),
    "no-bucket": error(404, "NoSuchBucket"),
    "moved": error(301, "PermanentRedirect"),
    "404-of-a-proxy": lambda to, request: to.answer(404, b"<html>no such page</html>"),
    "reset": lambda to, request: to.reset(),
    "hang": lambda to, request: to.hang(),
    "cut": raw(b""),
    "no-http": raw(b"\x00\x01 220 smtp ready\r\n\r\n"),
    "no-xml": lambda to, request: to.answer(500, b"\x00<<<"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_f09_a_fault_is_an_error_in_time(
    stub: Stub, make: MakeTier, fault: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "LISTING_LAG_S", 0.0)  # else what may have been put aside counts for a minute
    tier = make(read_s_max=0.5 if fault == "hang" else 5.0)
    if operation != "put":
        put(tier)
    stub.misbehave = FAULTS[fault]
    began_s = time.monotonic()
    with pytest.raises(TierError) as caught:
        OPERATIONS[operation](tier)
    assert time.monotonic() - began_s < BOUND_S
    assert not isinstance(caught.value, TierMiss), "a fault is no miss: the breaker must hear of it"
    tier.check_integrity()
    stub.released.set()
    stub.misbehave = stub.behave
    assert idle(tier)
    put(tier)
    tier.probe()
    assert [found.header.address for found in tier.scan()] == [HEADER.address]
    tier.check_integrity()
    assert read(tier) == RECORD.data.tobytes()
    assert tier.bytes_held() == RECORD.nbytes


def test_f09_a_missing_object_is_a_miss(stub: Stub, make: MakeTier) -> None:
    with pytest.raises(TierMiss):
        read(make())


def test_f09_an_archived_object_is_a_miss_and_is_put_again(stub: Stub, make: MakeTier) -> None:
    """A lifecycle rule has moved it; three of them had taken the tier down."""
    tier = make()
    put(tier)

    def archived(to: Answering, request: Request) -> None:
        is_replaced = any(one.method == "PUT" and "if-none-match" not in one.headers for one in stub.requests)
        if request.method == "GET" and "list-type" not in request.query and not is_replaced:
            to.error(403, "InvalidObjectState")
        else:
            stub.behave(to, request)

    stub.misbehave = archived
    with pytest.raises(TierMiss, match="archived"):
        read(tier)
    assert list(tier.scan()) == []
    put(tier)
    assert read(tier) == RECORD.data.tobytes()
    assert [found.header.address for found in tier.scan()] == [HEADER.address]


@pytest.mark.parametrize("operation", ["put", "scan", "probe"])
def test_f09_no_such_key_is_no_miss_where_no_key_was_asked_for(
    stub: Stub, make: MakeTier, operation: str
) -> None:
    stub.misbehave = error(404, "NoSuchKey")
    with pytest.raises(TierError) as caught:
        OPERATIONS[operation](make())
    assert not isinstance(caught.value, TierMiss)


def test_f09_a_listing_of_garbage_is_an_error(stub: Stub, make: MakeTier) -> None:
    tier = make()
    broken = [
        b"\x00",
        b"<ListBucketResult><Contents><Key>v1/x</Key><Size>many</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Size>1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ]
    for body in broken:
        stub.misbehave = lambda to, request, body=body: to.answer(200, body)
        with pytest.raises(TierError):
            list(tier.scan())
        with pytest.raises(TierError):
            tier.bytes_held()


def test_f09_a_listing_that_repeats_itself_ends(stub: Stub, make: MakeTier) -> None:
    tier = make()
    page = b"<IsTruncated>true</IsTruncated><NextContinuationToken>same</NextContinuationToken>"
    stub.misbehave = lambda to, request: to.answer(200, b"<ListBucketResult>" + page + b"</ListBucketResult>")
    with pytest.raises(TierError, match="does not go on"):
        list(tier.scan())
    assert stub.asked("GET") == 2


@pytest.mark.parametrize("attempts", [1, 2])
def test_f09_tries_are_bounded(stub: Stub, make: MakeTier, attempts: int) -> None:
    tier = make(attempts_max=attempts)
    stub.misbehave = error(503, "SlowDown")
    with pytest.raises(TierError, match="SlowDown"):
        tier.read(HEADER.address, 0, 10, deadline=Deadline(20))
    assert stub.asked("GET") == attempts
    with pytest.raises(TierError, match="SlowDown"):
        tier.put(HEADER.address, RECORD, deadline=Deadline(20))
    assert stub.asked("PUT") == attempts
    assert stub.asked("DELETE") == attempts


@pytest.mark.parametrize("endpoint", ["http://samovar.invalid", "http://127.0.0.1:{closed}"])
def test_f09_no_server(make: MakeTier, endpoint: str) -> None:
    """Nothing is raised before the first call."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        tier = make(endpoint=endpoint.format(closed=closed.getsockname()[1]))
        for operation in ("read", "put", "scan", "probe"):
            began_s = time.monotonic()
            with pytest.raises(TierError) as caught:
                OPERATIONS[operation](tier)
            assert not isinstance(caught.value, TierMiss)
            assert time.monotonic() - began_s < BOUND_S
            tier.check_integrity()


def test_f09_a_host_that_drops_packets_costs_the_time_to_connect(make: MakeTier) -> None:
    """A listener whose backlog is full, which on Linux drops what comes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname()):
            tier = make(
                endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}", connect_s=0.3, read_s_max=60.0
            )
            for operation in ("scan", "probe"):  # these have no deadline of their own
                began_s = time.monotonic()
                with pytest.raises(TierError, match="ConnectTimeoutError"):
                    OPERATIONS[operation](tier)
                assert time.monotonic() - began_s < BOUND_S


def test_f09_a_server_that_hangs_holds_no_more_threads_than_it_may(stub: Stub, make: MakeTier) -> None:
    tier = make(connections=2, read_s_max=2.0)
    guard = guarded(tier)
    put(tier)
    stub.misbehave = lambda to, request: to.hang()
    for _ in range(2):
        with pytest.raises(TierLate, match="not done"):
            guard.read(HEADER.address, 0, 10, 0.1)
    for _ in range(20):
        with pytest.raises(TierLate, match="busy"):
            guard.read(HEADER.address, 0, 10, 0.02)
        with pytest.raises(TierError, match="no connection"):
            tier.read(HEADER.address, 0, 10, deadline=Deadline(0.02))
    assert sum(thread.name == "tier-s3" for thread in threading.enumerate()) <= 2
    # Its own time limit frees the threads, not the server.
    assert idle(tier, 5)
    stub.misbehave = stub.behave
    assert read(tier) == RECORD.data.tobytes()
    assert stub.asked("GET") == 1 + 2 + 1  # the put's own, those that hung, this one


def test_f09_a_trickle_is_cut_at_the_deadline(stub: Stub, make: MakeTier) -> None:
    """Each byte comes in time; all of them would take 12 minutes."""
    tier = make(read_s_max=5.0)
    put(tier)

    def trickle(to: Answering, request: Request) -> None:
        to.send_response(206)
        to.send_header("Content-Length", str(RECORD.nbytes))
        to.send_header("Content-Range", stub.content_range(0, RECORD.nbytes, RECORD.nbytes))
        to.end_headers()
        while not stub.released.wait(0.1):
            to.wfile.write(b"x")
            to.wfile.flush()

    stub.misbehave = trickle
    began_s = time.monotonic()
    with pytest.raises(TierError, match="deadline"):
        tier.read(HEADER.address, 0, RECORD.nbytes, deadline=Deadline(0.5))
    assert time.monotonic() - began_s < BOUND_S
    assert idle(tier, 2.0), "the thread has to see the deadline as well"


def test_f09_credentials_may_come_late(
    stub: Stub, make: MakeTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = boto3.Session()
    monkeypatch.setattr("boto3.session.Session", lambda: session)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    tier = make(access_key_id=None, secret_access_key=None)
    with pytest.raises(TierError, match="NoCredentialsError"):
        put(tier)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    put(tier)
    half = make(access_key_id=SecretStr("AKID"), secret_access_key=None)
    with pytest.raises(TierError):
        put(half)


def test_f09_secrets_and_what_servers_say_are_not_repeated(
    stub: Stub, make: MakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tier = make()
    put(tier)
    stub.misbehave = lambda to, request: to.answer(
        500, b"<Error><Code>tell\nthem</Code><Message>psst</Message></Error>"
    )
    with pytest.raises(TierError) as caught:
        put(tier)
    assert str(caught.value) == "put: status 500"
    with pytest.raises(TierError):
        list(tier.scan())
    ours = "".join(entry.getMessage() for entry in caplog.records if entry.name.startswith("samovar"))
    assert "psst" not in ours
    assert "verysecretindeed" not in caplog.text + repr(tier) + repr(vars(tier)) + repr(vars(tier._objects))


def test_f09_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    make: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    put(make())


def test_a_tier_needs_a_bucket(stub: Stub, make: MakeTier) -> None:
    with pytest.raises(ValueError, match="bucket"):
        make(bucket=None)
    assert not stub.requests
