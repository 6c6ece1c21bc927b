"""The live stream of a whole service: a conversation is seen to move, others are not; a stop ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.router.live_reader import events_of, patched
from tests.support.services.guests import Conversation
from tests.support.services.service import until
from tests.support.services.tier_service import ADMIN_KEY, TierService, flag, tier_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {name: f"key-of-tenant-{name}" for name in ("alice", "bob")}


class Watcher(threading.Thread):
    """Watches with a key. `state`: as of now; `texts`, `turns`: all so far."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(daemon=True)
        self.client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        self.state: dict[str, Any] = {}
        self.texts: list[str] = []
        self.turns: list[dict[str, Any]] = []
        self.is_over = False

    def run(self) -> None:
        block = b""
        try:
            with self.client.stream("GET", "/v1/live") as answer:
                assert answer.status_code == 200, answer.read()
                for part in answer.iter_raw():
                    *whole, block = (block + part).split(b"\n\n")
                    for name, data in (one for text in whole for one in events_of(text + b"\n\n")):
                        self.texts.append(str(data))
                        if name == "turn":
                            self.turns.append(data)
                        else:
                            self.state = data if name == "state" else patched(self.state, data)
        except httpx.TransportError:  # closed by the test, or cut off by the server's end
            self.texts.append("")
        self.is_over = True

    def lineage(self) -> dict[str, Any]:
        """The main lineage of the only session."""
        for session in self.state.get("sessions", {}).values():
            return next(dict(one) for one in session["lineages"].values() if one["main"])
        return {}

    def sees(self, what: str, test: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        until(what, lambda: bool(self.lineage()) and test(self.lineage()), 30)
        return self.lineage()


@contextmanager
def watching(service: TierService, *keys: str) -> Iterator[list[Watcher]]:
    watchers = [Watcher(service.url, key) for key in keys]
    for watcher in watchers:
        watcher.start()
    try:
        until("all see a state", lambda: all(watcher.state for watcher in watchers))
        yield watchers
    finally:
        for watcher in watchers:
            watcher.client.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierService]:
    env = {"SAMOVAR_AUTH__API_KEYS": flag(KEYS), "SAMOVAR_AUTH__ADMIN_KEY": ADMIN_KEY}
    with tier_service(tmp_path_factory.mktemp("live"), env=env, key=ADMIN_KEY) as service:
        yield service


@pytest.mark.guarantee("G2")
def test_a_conversation_is_seen_to_leave_the_pool_and_to_return_by_its_owner_only(
    service: TierService,
) -> None:
    guest = Conversation(7, turn_words=120, key=KEYS["alice"])
    with watching(service, KEYS["alice"], KEYS["bob"], ADMIN_KEY) as (alice, bob, admin):
        service.turn(guest)
        here = alice.sees(
            "its blocks in the pool and in a tier", lambda one: has(one, "gpu") and has(one, "cpu")
        )
        assert here["forecast"]["survival"]
        assert sum(blocks for _, blocks in here["runs"]) == here["blocks"]["cpu"]
        service.overrun(KEYS["bob"])
        alice.sees("its blocks leave the pool", lambda one: one["blocks"]["gpu"] == 0 and has(one, "cpu"))
        service.turn(guest)
        alice.sees("its blocks return", lambda one: has(one, "gpu"))
        until("both turns", lambda: len(alice.turns) == 2 and len(admin.turns) == 3)
        first, again = alice.turns
        usage = httpx.get(f"{service.url}/v1/usage", headers={"authorization": f"Bearer {guest.key}"}).json()
        admin_state, name = admin.state, first["session"]
    assert first["tokens"]["compute"] == first["prompt_tokens"]
    assert again["tokens"]["cpu"] > 0
    assert again["recompute_ms"] > 0
    assert again["saved_ms"] > 0
    assert again["ttft_ms"] > 0
    assert usage["tokens"]["cpu"] == again["tokens"]["cpu"]
    assert usage["requests"] == 2
    assert usage["bytes_held"]["cpu"] > 0
    assert name not in "".join(bob.texts)
    assert bob.turns[0]["prompt_tokens"] != first["prompt_tokens"]
    assert not {"nodes", "replicas"} & bob.state.keys()
    assert admin_state["sessions"][name]["tenant"] == "alice"
    (node,) = admin_state["nodes"].values()
    assert node["tiers"]["cpu"]["used_bytes"] > 0
    (replica,) = admin_state["replicas"].values()
    assert replica["pages"]["total"] > 0


def has(lineage: dict[str, Any], place: str) -> bool:
    return bool(lineage.get("blocks", {}).get(place))


def test_a_stop_ends_open_streams_and_does_not_wait_for_their_time(tmp_path: Path) -> None:
    flags = {"live.stream-s-max": "86400"}
    with tier_service(tmp_path / "stop", flags) as service, watching(service, "none") as (watcher,):
        assert service.stop() == 0
        until("the stream is over", lambda: watcher.is_over)
