"""F17, F19: the tier actor dies under load, again and again. Nobody but the operator notices.

Its death is also that of the owner of all objects in Ray's store, which is as small here as it may be.
A service starts for each state of a move, so all of this is slow; the gate has
`tests/faults/test_actor_kills.py`, which goes through all states with an actor without a service around it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.services.guests import Conversation
from tests.support.services.service import until
from tests.support.services.tier_service import MIB, TierService, records, tier_service

pytestmark = pytest.mark.timeout(900)

pytestmark = pytest.mark.slow

CLIENTS = 8
TURNS = 3
KILLS = 4
BACK_S = 90.0
STORE_BYTES = 80 * MIB
CPU_BYTES = 32 * MIB  # less than what is told: things are dropped as well
FLAGS = {
    "cluster.object-store-bytes": STORE_BYTES,
    "tiers.cpu.bytes-max": CPU_BYTES,
    "tiers.faults.kill-after": 4,
    "tiers.store-s-max": 10,  # what a dead actor has promised to call for is kept as long
}

Texts = dict[int, list[str]]


def under_load(service: TierService) -> Texts:
    """What everybody is told, all at once. No request fails."""

    def talk(seed: int) -> list[str]:
        conversation = Conversation(seed)
        return [service.turn(conversation).text for _ in range(TURNS)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return dict(zip(range(CLIENTS), pool.map(talk, range(CLIENTS)), strict=True))


class Truth:
    """What everybody is told without a cache. Asked for once: the answers are the same in all services."""

    def __init__(self) -> None:
        self._texts: Texts = {}

    def of(self, service: TierService) -> Texts:
        def talk(seed: int) -> list[str]:
            conversation, texts = Conversation(seed), []
            for _ in range(TURNS):
                messages = conversation.next_messages()
                texts.append(service.uncached(messages).text)
                conversation.messages = [*messages, {"role": "assistant", "content": texts[-1]}]
            return texts

        if not self._texts:
            with ThreadPoolExecutor(CLIENTS) as pool:
                self._texts = dict(zip(range(CLIENTS), pool.map(talk, range(CLIENTS)), strict=True))
        return self._texts


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def back_again(service: TierService, restarts: int) -> None:
    """The actor is there, as often started as it should be, and stores and loads as if nothing had been."""

    def restarted() -> bool:
        node = service.node()
        return node is not None and node["restarts"] >= restarts

    until(f"the actor has come back {restarts} times", restarted, BACK_S)
    until("it is said to be there", lambda: service.total("samovar_tier_actor_up") == 1)
    service.calm()
    conversation = Conversation(seed=100 + restarts)
    service.turn(conversation)
    until("what is told now is on disk", lambda: service.on_disk(conversation) > 0)
    service.overrun()
    reply = service.turn(conversation)
    assert reply.cached > reply.prompt_tokens // 2, reply.receipt
    assert reply.text == service.uncached(conversation.messages[:-1]).text
    service.check_books()
    records(service.nvme_dir)


@pytest.mark.parametrize(
    "state",
    ["planned", "reserved", "copying", "verified", "dropping"],
)
def test_f17_killed_in_a_state_of_a_move(tmp_path: Path, truth: Truth, state: str) -> None:
    with tier_service(tmp_path, {**FLAGS, "tiers.faults.kill-at": state}) as service:
        assert under_load(service) == truth.of(service)
        back_again(service, restarts=1)


@pytest.fixture(scope="module")
def often_killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierService]:
    folder = tmp_path_factory.mktemp("kills")
    with tier_service(folder, {**FLAGS, "tiers.faults.kill-at": "committed"}) as service:
        yield service


def test_f17_killed_when_committed(often_killed: TierService, truth: Truth) -> None:
    assert under_load(often_killed) == truth.of(often_killed)
    back_again(often_killed, restarts=1)


def test_f17_f19_killed_at_any_moment(often_killed: TierService, truth: Truth) -> None:
    """And with it every object in the store: those that replicas are reading, too."""
    service, over, rng = often_killed, threading.Event(), random.Random(1)
    killed: list[int] = []

    def kill() -> None:
        while not over.is_set() and len(killed) < KILLS:
            over.wait(rng.uniform(0.2, 1.5))
            for pid in service.tier_pids():
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for _ in range(2):  # the second time much of it is cached, somewhere
            assert under_load(service) == truth.of(service)
    finally:
        over.set()
        killer.join()
    assert killed
    back_again(service, restarts=1 + len(killed))
    cpu = service.tier("cpu")
    assert cpu["bytes_held"] <= cpu["bytes_max"] <= STORE_BYTES
