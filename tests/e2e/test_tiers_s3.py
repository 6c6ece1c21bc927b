"""S3 as the only tier below main memory: it serves a restarted service, and whatever it does, answers come.

The server is a real one (rclone), which is then suspended, slowed down, ended, and lied to about its files.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from samovar.cache_tiers.blocks import session_of
from samovar.cluster.serve.s3_demo import S3Demo
from samovar.router.auth import LOCAL_TENANT
from samovar.router.context.documents import document_session
from samovar.router.routing.session import tags_of_id
from tests.support.services.guests import Conversation, Reply, words
from tests.support.services.service import MODEL, free_port, until
from tests.support.services.tier_service import (
    COMPUTING_IS_DEAR,
    SETTLE_S,
    TierService,
    records,
    s3_env,
    s3_flags,
    s3_server,
    tier_service,
)

pytestmark = pytest.mark.timeout(900)

READ_S_MAX = 1
IN_TIME_S = 20.0
"""A server that hangs is woken after the answers: without `read-s-max` a prompt would wait for ever.

How long it may wait at most is a matter of pure classes (tests/unit/replicas/offload/test_lookups.py):
seconds measured beside other tests say more about the machine.
"""
STOPPED_S, RUNNING_S = 0.5, 0.05
UP_AGAIN_S = 60.0
TIMES = 3
"""So many conversations of a name at once: a breaker opens at the third failure."""
NAMES = {
    **{"first": 1, "kept": TIMES, "rotten": 1, "foreign": 1, "pickled": 1},
    **{"hung": TIMES, "slow": TIMES if os.environ.get("TESTS_SLOW") else 0, "down": TIMES, "back": TIMES},
}
"""Conversations of each name."""


class S3Service:
    """A service that has only S3 for what it remembers, and the server under it."""

    def __init__(
        self,
        service: TierService,
        demo: S3Demo,
        told: dict[str, list[Conversation]],
        first: Reply,
        document: Mapping[str, Any],
    ) -> None:
        self.service, self.demo, self.told, self.first = service, demo, told, first
        self.document = document

    def returns(self, name: str) -> list[Reply]:
        """The next turns of the conversations of that name: the same as without a cache, and in time."""
        conversations = self.told[name]
        with ThreadPoolExecutor(TIMES) as pool:  # at once: what failed just before is not asked again
            replies = list(pool.map(self.service.turn, conversations))
            asked = [conversation.messages[:-1] for conversation in conversations]
            references = list(pool.map(self.service.uncached, asked))
        assert [reply.text for reply in replies] == [reference.text for reference in references]
        late = [(reply.ttft_s, dict(reply.receipt)) for reply in replies if reply.ttft_s > IN_TIME_S]
        assert not late, f"over {IN_TIME_S} s: {late}"
        return replies

    def until_down(self) -> None:
        until("its breaker is open", lambda: not self.service.tier_up("s3"), 30)
        assert self.service.tier("s3")["state"] == "open"
        assert self.service.tier("s3")["breaker_opened"] >= 1

    def until_up(self) -> None:
        until("it is used again", lambda: self.service.tier_up("s3"), UP_AGAIN_S)


def added(service: TierService, text: str) -> Mapping[str, Any]:
    """A document, prefilled."""
    with service.http() as client:
        body = {"text": text, "title": "A walk", "prefill": "always"}
        path = f"/v1/documents/{client.post('/v1/documents', json=body).raise_for_status().json()['id']}"

        def done() -> Mapping[str, Any] | None:
            card: Mapping[str, Any] = client.get(path).raise_for_status().json()
            under_way = card["prefill"]["state"] in ("none", "waiting", "running")
            return None if under_way and card["state"] != "failed" else card

        card = until("it is prefilled", done, SETTLE_S)
    assert card is not None
    assert (card["state"], card["prefill"]["state"]) == ("ready", "stored"), card
    return card


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="module")
def s3(files: Path) -> Iterator[S3Service]:
    """Started again; all that was told before is in S3, and nowhere else."""
    told = {
        name: [Conversation(TIMES * i + j) for j in range(count)]
        for i, (name, count) in enumerate(NAMES.items(), start=1)
    }
    everybody = [conversation for some in told.values() for conversation in some]
    with s3_server(files / "bucket", free_port()) as demo:
        flags = {
            **s3_flags(demo),
            "tiers.nvme.bytes-max": 0,
            **{"knowledge.enabled": "true", "knowledge.embedder": "none", "knowledge.dir": files / "kb"},
        }
        with tier_service(files, {**COMPUTING_IS_DEAR, **flags}, env=s3_env(demo)) as service:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(service.turn, everybody))
            document = added(service, words(18, 600))
            service.settle()
        assert len(records(files / "bucket")) >= len(everybody), "a stop writes main memory down"
        impatient = {
            "tiers.s3.read-s-max": READ_S_MAX,
            # On a slow machine a prompt waits, and S3's blocks are in main memory before it is its turn: they
            # would come from there. What is tested here is what S3 itself gives.
            "tiers.prefetch.bytes-per-s-max": 0,
            "tiers.breaker-open-s": 0.5,
            "tiers.breaker-open-s-max": 2,
        }
        with tier_service(files, {**COMPUTING_IS_DEAR, **flags, **impatient}, env=s3_env(demo)) as service:
            first = service.turn(told["first"][0])  # whatever is cold is cold now
            until("S3 is looked through", lambda: service.tier("s3")["extents"] >= len(everybody), UP_AGAIN_S)
            yield S3Service(service, demo, told, first, document)
            service.check_books()


def test_the_first_lookup_after_a_restart_is_a_hit(s3: S3Service) -> None:
    assert s3.first.by_tier["s3"] > s3.first.prompt_tokens // 2, s3.first.receipt
    assert not s3.first.receipt.get("miss"), s3.first.receipt
    assert s3.service.tier("s3")["listed_ago_s"] >= 0
    assert s3.service.total("samovar_slow_lookups_total", tier="s3") == 0


def test_s3_alone_brings_conversations_back_after_a_restart(s3: S3Service) -> None:
    for reply in s3.returns("kept"):
        assert reply.by_tier["s3"] > reply.prompt_tokens // 2, reply.receipt
        assert reply.cached == reply.by_tier["s3"]
    until("what was read is in main memory", lambda: s3.service.tier("cpu")["extents"] > 0)


def test_the_first_question_about_a_prefilled_document_is_a_hit_and_its_deletion_leaves_nothing(
    s3: S3Service, files: Path
) -> None:
    service, card = s3.service, s3.document
    asked = [{"role": "user", "content": "Where does the train go?"}]
    named: dict[str, Any] = {"documents": [card["id"]]}
    reply = service.ask(asked, session="the first to ask", **named)
    assert reply.by_tier["s3"] == card["tokens"] == card["prefill"]["tokens"], reply.receipt
    assert reply.text == service.uncached(asked, **named).text
    assert reply.receipt["documents"]["ids"] == [card["id"]]
    service.settle()
    own = document_session(service.secret, LOCAL_TENANT, card["id"])
    asker = set(tags_of_id(service.secret, LOCAL_TENANT, "the first to ask"))

    def kept() -> list[Path]:
        held = records(files / "bucket").items()
        return [path for path, header in held if session_of(header.session) in {own, *asker}]

    assert kept()
    with service.http() as client:
        assert client.delete(f"/v1/documents/{card['id']}").raise_for_status().json()["deleted"] is True
        body = {"model": MODEL, "messages": asked, **named}
        assert client.post("/v1/chat/completions", json=body).status_code == 404
        found = client.post("/v1/knowledge/search", json={"query": "train river bread honey lamp"}).json()
    assert found["data"] == []
    assert kept() == []
    assert all(card["id"].encode() not in one.read_bytes() for one in (files / "kb").iterdir())


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_f11_garbage_in_the_bucket_is_found_and_nothing_of_it_is_run(s3: S3Service, files: Path) -> None:
    trap = files / "it-was-unpickled"

    def one_bit(data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    kinds: dict[str, Callable[[bytes], bytes]] = {
        "rotten": one_bit,
        "foreign": lambda data: random.Random(1).randbytes(len(data)),
        "pickled": lambda data: pickle.dumps(Trap(trap)).ljust(len(data), b"."),
    }
    found = records(files / "bucket")
    for name, spoil in kinds.items():
        tags = {tag for conversation in s3.told[name] for tag in s3.service.session_tags(conversation)}
        paths = [path for path, header in found.items() if session_of(header.session) in tags]
        assert len(paths) >= NAMES[name]
        for path in paths:
            path.write_bytes(spoil(path.read_bytes()))
    for name in kinds:
        for reply in s3.returns(name):
            # The blocks in front of a flipped bit are as good as before; of the others there are none.
            most = reply.prompt_tokens // 2 if name == "rotten" else 0
            assert reply.by_tier["s3"] <= most, (name, reply.receipt)
    spoilt = sum(NAMES[name] for name in kinds)
    assert sum(s3.service.tier("s3")["verify_failures"].values()) >= spoilt
    assert s3.service.total("samovar_verify_failures_total", tier="s3") >= spoilt
    assert not trap.exists()


def test_f09_an_s3_that_is_gone_is_noticed_and_its_return_as_well(s3: S3Service) -> None:
    s3.demo.stop()
    try:
        for reply in s3.returns("down"):
            assert reply.by_tier["s3"] == 0
        s3.until_down()
    finally:
        s3.demo.start()
    s3.until_up()
    for reply in s3.returns("back"):
        assert reply.by_tier["s3"] > 0, reply.receipt


@contextlib.contextmanager
def hanging(demo: S3Demo) -> Iterator[None]:
    assert demo.pid is not None
    os.kill(demo.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(demo.pid, signal.SIGCONT)


@contextlib.contextmanager
def crawling(demo: S3Demo) -> Iterator[None]:
    """It gets the processor for a moment, twice a second."""
    over = threading.Event()

    def stutter() -> None:
        while not over.is_set():
            with hanging(demo):
                over.wait(STOPPED_S)
            over.wait(RUNNING_S)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_f09_an_s3_that_crawls_does_not_hold_answers_up(s3: S3Service) -> None:
    with crawling(s3.demo):
        s3.returns("slow")
    s3.until_up()


def test_f09_an_s3_that_hangs_is_computed_around_and_then_left_alone(s3: S3Service) -> None:
    with hanging(s3.demo):
        for reply in s3.returns("hung"):
            assert reply.by_tier["s3"] == 0
        s3.until_down()
    s3.until_up()
