"""Spot notices, from an HTTP server that answers as a machine's metadata service does, or as none should."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from samovar.cache_tiers.actors.cluster_watch import (
    NOTICE_S,
    NoticeUnclear,
    SpotMetadata,
    SpotNotice,
    SpotWatch,
)
from samovar.configs.sections import NodeSettings
from tests.support.constants import tuned
from tests.support.inside import thread_of
from tests.support.services.metadata_server import MetadataServer
from tests.support.services.service import until

NOW_S = datetime(2026, 1, 31, 9, 24, 35, tzinfo=UTC).timestamp()


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as made:
        yield made


def settings(server: MetadataServer) -> NodeSettings:
    return tuned(
        NodeSettings(spot_notice="aws", spot_notice_url=server.url, spot_poll_s=0.02), spot_answer_s_max=0.3
    )


# -- reading -------------------------------------------------------------------------------


def read(server: MetadataServer, body: bytes) -> SpotNotice | None:
    server.answer(body)
    return SpotMetadata(server.url, 1.0).notice(NOW_S)


def test_a_notice_is_read(server: MetadataServer) -> None:
    terminate = b'{"action": "terminate", "time": "2026-01-31T09:26:35Z"}'
    assert read(server, terminate) == SpotNotice("terminate", 120.0)
    stop = b'{"action": "stop", "time": "2026-01-31T09:25:35"}'
    assert read(server, stop) == SpotNotice("stop", 60.0)


@pytest.mark.parametrize("at", ["2026-01-31T09:24:34Z", "2026-01-31T10:24:35Z", "1999-01-01T00:00:00Z"])
def test_a_clock_that_is_wrong_does_not_make_the_notice_so(
    server: MetadataServer, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(server, f'{{"action": "hibernate", "time": "{at}"}}'.encode())
    assert found == SpotNotice("hibernate", NOTICE_S)
    assert "from now" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b'"terminate"',
        b"\xff\xfe",
        b"{}",
        b'{"action": "terminate"}',
        b'{"action": "terminate", "time": 7}',
        b'{"action": "terminate", "time": "soon"}',
        b"[" * 100_000,
    ],
)
def test_garbage_is_no_notice(server: MetadataServer, body: bytes) -> None:
    with pytest.raises(NoticeUnclear):
        read(server, body)


# -- asking --------------------------------------------------------------------------------


def test_it_takes_a_token_first_and_keeps_it(server: MetadataServer) -> None:
    metadata = SpotMetadata(server.url, 1.0)
    assert metadata.notice(NOW_S) is None
    assert metadata.notice(NOW_S) is None
    assert server.tokens == 1
    server.expire_tokens()
    with pytest.raises(NoticeUnclear, match="401"):
        metadata.notice(NOW_S)
    server.announce("terminate", datetime.fromtimestamp(NOW_S, UTC) + timedelta(seconds=119))
    notice = metadata.notice(NOW_S)
    assert notice is not None
    assert notice.left_s == pytest.approx(119.0)
    assert server.tokens == 2


def test_the_first_version_of_the_service_is_not_enough(server: MetadataServer) -> None:
    server.has_tokens = False
    with pytest.raises(NoticeUnclear, match="token: 404"):
        SpotMetadata(server.url, 1.0).notice(NOW_S)


def test_no_proxy_is_asked(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert SpotMetadata(server.url, 1.0).notice(NOW_S) is None


# -- the watch -----------------------------------------------------------------------------


class Drains:
    """What it is told; refuses the first `refusals` times."""

    def __init__(self, refusals: int = 0, error: Exception | None = None) -> None:
        self._refusals = refusals
        self._error = error
        self.told: list[float] = []
        self.taken = threading.Event()

    def __call__(self, left_s: float) -> bool:
        self.told.append(left_s)
        if len(self.told) <= self._refusals:
            if self._error is not None:
                raise self._error
            return False
        self.taken.set()
        return True


def in_s(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def test_a_notice_is_handed_on_once(server: MetadataServer) -> None:
    drains = Drains()
    watch = SpotWatch(settings(server), drains)
    watch.start()
    until("it asks", lambda: server.asked > 3)
    assert drains.told == []
    server.announce("terminate", in_s(90))
    assert drains.taken.wait(10)
    thread_of(watch).join(10)
    assert not thread_of(watch).is_alive(), "there is nothing more to learn"
    (left_s,) = drains.told
    assert 85 < left_s < 91


@pytest.mark.parametrize("error", [None, RuntimeError("GCS is away")])
def test_whoever_does_not_listen_is_told_again(server: MetadataServer, error: Exception | None) -> None:
    drains = Drains(refusals=2, error=error)
    server.announce("terminate", in_s(90))
    watch = SpotWatch(settings(server), drains)
    watch.start()
    assert drains.taken.wait(10)
    assert len(drains.told) == 3
    assert drains.told == sorted(drains.told, reverse=True), "time goes on"


@pytest.mark.parametrize("fault", ["error", "garbage", "hang", "reset", "no-http"])
def test_whatever_the_service_does_the_watch_lives_on(
    server: MetadataServer, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault = fault
    drains = Drains()
    watch = SpotWatch(settings(server), drains)
    with caplog.at_level(logging.INFO, "samovar.cache_tiers.actors.cluster_watch"):
        watch.start()
        until("it is asked, again and again", lambda: server.asked > 2)
        assert thread_of(watch).is_alive()
        assert drains.told == []
        server.fault = ""
        until("it has recovered", lambda: "answer again" in caplog.text)
        server.announce("terminate", in_s(60))
        assert drains.taken.wait(10)
    assert caplog.text.count("the instance metadata do not answer") == 1, "once, and not every few seconds"


def test_without_a_service_it_waits_and_can_be_stopped(server: MetadataServer) -> None:
    server.close()
    watch = SpotWatch(settings(server), Drains())
    began_s = time.monotonic()
    watch.start()
    until("it has noticed", lambda: watch._trouble)
    watch.stop()
    thread_of(watch).join(10)
    assert not thread_of(watch).is_alive()
    assert time.monotonic() - began_s < 10
