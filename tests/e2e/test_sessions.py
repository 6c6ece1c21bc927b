"""Sessions through a whole service: they have a home, are seen and forgotten, and outlive what knew them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.support.services.guests import Conversation, Messages
from tests.support.services.service import MODEL, until
from tests.support.services.tier_service import COMPUTING_IS_DEAR, TierService, tier_service

DIRECTORY = "ray::SessionActor"
INGRESS = "ray::ServeReplica:samovar:Ingress"
CONTROLLER = "ray::ServeController"
BACK_S = 30.0
TURNS = 5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierService]:
    folder = tmp_path_factory.mktemp("sessions")
    flags = {"cluster.replicas": 2, "server.record": folder / "trace"}
    with tier_service(folder, {**COMPUTING_IS_DEAR, **flags}) as service:
        until("both replicas are up", lambda: len(service.stats()["replicas"]) == 2, 60)
        yield service


@dataclass
class Guest:
    """Somebody who chats and sends nothing but messages. `cached`, `homes`: of each turn."""

    number: int
    messages: Messages = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    name: str = ""

    def turn(self, http: httpx.Client) -> None:
        talk = Conversation(self.number)
        talk.messages = self.messages or talk.messages
        asked = talk.next_messages()
        body = {"model": MODEL, "messages": asked, "max_tokens": 4, "temperature": 0}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        self.messages = [*asked, said["choices"][0]["message"]]
        self.cached.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.homes.append(answer.headers["x-replica"])
        self.name = self.name or latest(http)["id"]


@pytest.fixture(scope="module")
def guest(service: TierService) -> Guest:
    """Has had two turns, whichever tests run."""
    guest = Guest(1)
    with service.http() as http:
        for _ in range(2):
            guest.turn(http)
    return guest


def latest(http: httpx.Client) -> dict[str, Any]:
    """The session that was used last."""
    row: dict[str, Any] = http.get("/v1/sessions", params={"limit": 1}).raise_for_status().json()["data"][0]
    return row


def seen(http: httpx.Client, name: str) -> dict[str, Any]:
    card: dict[str, Any] = http.get(f"/v1/sessions/{name}").raise_for_status().json()
    return card


def unsynced(service: TierService) -> float:
    """How much the directory has not been told yet."""
    return service.total("samovar_sessions_unsynced")


def kill(service: TierService, title: str) -> int:
    """SIGKILL the one process of that title; its pid."""
    (pid,) = service.pids_of(title)
    os.kill(pid, signal.SIGKILL)
    until(f"{title} is dead", lambda: not psutil.pid_exists(pid))
    return pid


def answers(http: httpx.Client) -> bool:
    """Whether the service says that it takes work."""
    try:
        return http.get("/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_without_any_session_header_all_turns_are_at_one_replica(service: TierService, guest: Guest) -> None:
    others = [Guest(number) for number in (2, 3)]
    with service.http() as http:
        for _ in range(TURNS):
            for one in (guest, *others):
                if len(one.homes) < TURNS:
                    one.turn(http)
    for one in (guest, *others):
        assert len(set(one.homes)) == 1, one.homes
        assert one.cached[0] == 0
        assert all(cached > 0 for cached in one.cached[1:]), one.cached
        assert one.cached == sorted(one.cached)
    assert service.total("samovar_affinity_total", outcome="home") == 3 * (TURNS - 1)


def test_a_session_is_seen_hinted_and_gone_in_every_tier(service: TierService) -> None:
    leaving = Guest(7)
    with service.http() as http:
        for _ in range(2):
            leaving.turn(http)
        assert leaving.cached[1] > 0
        card = seen(http, leaving.name)
        assert (card["turns"], card["home"], card["state"]) == (2, leaving.homes[-1], "idle")
        assert card["bytes"]["gpu"] > 0
        until("its blocks are stored", lambda: seen(http, leaving.name)["bytes"]["cpu"] > 0)

        closed = http.post(f"/v1/sessions/{leaving.name}/hint", json={"event": "closed"}).json()
        assert (closed["state"], closed["action"]) == ("closed", "demote")
        assert closed["extents_moving"] > 0
        until("it has left main memory", lambda: seen(http, leaving.name)["bytes"]["cpu"] == 0)
        assert seen(http, leaving.name)["bytes"]["nvme"] > 0

        typing = http.post(f"/v1/sessions/{leaving.name}/hint", json={"event": "typing"}).json()
        assert (typing["state"], typing["action"]) == ("typing", "promote")
        until("it is back in main memory", lambda: seen(http, leaving.name)["bytes"]["cpu"] > 0)
        until("that is told", lambda: service.total("samovar_prefetch_started_bytes_total", why="hint") > 0)
        assert service.total("samovar_predictor_turns_total") > 0

        service.settle()
        cleared = http.delete(f"/v1/sessions/{leaving.name}")
        assert cleared.status_code == 200, cleared.text
        assert cleared.json()["cleared"]["extents"] > 0
        assert http.get(f"/v1/sessions/{leaving.name}").status_code == 404
        leaving.turn(http)
        assert leaving.cached[-1] == 0, "something was left of it"
        assert seen(http, leaving.name)["turns"] == 1


def test_turns_are_recorded_without_a_word(service: TierService) -> None:
    trace, talker = service.nvme_dir.parent / "trace", Guest(9)
    with service.http() as http:
        for _ in range(2):
            talker.turn(http)
    until("rows are written", lambda: len(trace.read_text().splitlines()) > 2)
    header, *rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert header["samovar_trace"] == 1
    assert {row["stop"] for row in rows} <= {"stop", "length", "gone"}
    assert max(row["kept_tokens"] for row in rows) > 0
    assert talker.name.removeprefix("sess_") not in trace.read_text()


def test_the_directory_dies_and_is_told_again(service: TierService, guest: Guest) -> None:
    with service.http() as http:
        dead = kill(service, DIRECTORY)
        guest.turn(http)  # nothing waits for it
        assert http.get("/v1/sessions").json()["data"]
        until("the directory is back", lambda: service.pids_of(DIRECTORY) not in ([], [dead]), BACK_S)
        until("it is told", lambda: unsynced(service) == 0, BACK_S)
        assert seen(http, guest.name)["bytes"]["gpu"] > 0
        guest.turn(http)
    assert len(set(guest.homes)) == 1
    assert guest.cached[-1] > guest.cached[-2] > 0


@pytest.mark.guarantee("F22")
def test_f22_the_ingress_dies_and_sessions_are_still_known(service: TierService, guest: Guest) -> None:
    turns = len(guest.homes)
    with service.http() as http:
        until("the directory knows all that this ingress does", lambda: unsynced(service) == 0)
        kill(service, INGRESS)
        until("the service answers", lambda: answers(http), BACK_S)
        until("it knows the session", lambda: http.get(f"/v1/sessions/{guest.name}").is_success, BACK_S)
        known = seen(http, guest.name)
        assert (known["turns"], known["home"]) == (turns, guest.homes[-1])
        guest.turn(http)
        assert seen(http, guest.name)["turns"] == turns + 1
    assert guest.homes[-1] == guest.homes[0]
    assert guest.cached[-1] > guest.cached[-2]
    assert service.total("samovar_affinity_total", outcome="home") == 1
    service.check_books()


@pytest.mark.guarantee("F22")
def test_f22_the_controller_dies_and_nobody_notices(service: TierService, guest: Guest) -> None:
    stop, failures = threading.Event(), list[BaseException]()
    regular, turns = Guest(9), len(guest.homes)

    def chat() -> None:
        try:
            with service.http() as http:
                while not stop.is_set():
                    regular.turn(http)
                    if len(regular.messages) > 12:  # it need not become long
                        regular.messages = regular.messages[:3]
        except BaseException as failure:  # noqa: BLE001 - of a thread: told below
            failures.append(failure)

    chatting = threading.Thread(target=chat)
    chatting.start()
    try:
        until("somebody chats", lambda: regular.homes or failures)
        dead = kill(service, CONTROLLER)
        until("there is a new one", lambda: service.pids_of(CONTROLLER) not in ([], [dead]), BACK_S)
        before = len(regular.homes)
        until("they still chat", lambda: len(regular.homes) > before + 5 or failures, BACK_S)
    finally:
        stop.set()
        chatting.join(60)
    assert not failures, failures
    with service.http() as http:
        guest.turn(http)
        assert seen(http, guest.name)["turns"] == turns + 1
    assert len(set(guest.homes)) == 1
    assert guest.cached[-1] > 0
    service.check_books()
