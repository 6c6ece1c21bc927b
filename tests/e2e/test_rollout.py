"""A service that is changed while people use it: more replicas, fewer, another model. Nobody sees errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.services.guests import Conversation, Reply
from tests.support.services.service import until
from tests.support.services.tier_service import TierService

UPDATE_S = 240.0
UPDATED = "Samovar is updated"
UNCHANGED = "the configuration is unchanged"
CLIENTS = 2
CHATS = 3  # of each client, by turns


class Rolling(TierService):
    """A service with a file of settings, which `write` changes."""

    file: Path

    def write(self, replicas: int, **sections: Any) -> None:
        self.file.write_text(yaml.safe_dump({"cluster": {"replicas": replicas}, **sections}))

    def reload(self, says: str = UPDATED) -> float:
        """SIGHUP, and wait for what it says then; how long that took."""
        began_s, before = time.monotonic(), self._said()
        self.process.send_signal(signal.SIGHUP)
        until("it says what came of it", lambda: self._said() != before, UPDATE_S)
        assert self._said() == before + Counter([says]), self.text
        return time.monotonic() - began_s

    def _said(self) -> Counter[str]:
        assert self.process.poll() is None, self.text
        return Counter({says: self.text.count(says) for says in (UPDATED, UNCHANGED)})

    def replicas(self) -> set[str]:
        return {str(replica["replica_id"]) for replica in self.stats()["replicas"]}


@dataclass
class Crowd:
    """Clients who chat all the time. `failures`: what any of them ever saw go wrong."""

    service: TierService
    turns: int = 0
    failures: list[BaseException] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Crowd:
        self._threads = [threading.Thread(target=self._chat, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "an answer never came"

    def goes_on(self, turns: int = 4) -> None:
        """Some more turns are answered."""
        wanted = self.turns + turns
        until("people chat", lambda: self.turns >= wanted or self.failures, 120)
        assert not self.failures, self.failures

    def _chat(self, number: int) -> None:
        rng = random.Random(number)
        try:
            for seed in range(1000 * (number + 1), 1000 * (number + 2), CHATS):
                chats = [Conversation(seed + place, turn_words=20) for place in range(CHATS)]
                for _ in range(4 * CHATS):
                    if self._stop.is_set():
                        return
                    self.service.turn(rng.choice(chats), max_tokens=4)
                    self.turns += 1
        except BaseException as failure:  # noqa: BLE001 - of a thread: told by the one who looks
            self.failures.append(failure)


def another_model(model_dir: Path, target: Path) -> Path:
    """The same weights under a configuration that says one word more: that is another model."""
    shutil.copytree(model_dir, target, copy_function=os.link)
    config = target / "config.json"
    said = json.loads(config.read_text()) | {"comment": "a second edition"}
    config.unlink()  # or the first one's would be changed as well
    config.write_text(json.dumps(said))
    return target


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Rolling]:
    file = tmp_path / "samovar.yaml"
    file.write_text(yaml.safe_dump({"cluster": {"replicas": 2}}))
    service = Rolling(tmp_path / "service", {"config": file})
    service.file = file
    try:
        service.wait_ready()
        yield service
    finally:
        code = service.stop()
    assert code == 0, service.text


def turns(service: TierService, talks: list[Conversation]) -> list[Reply]:
    return [service.turn(talk, max_tokens=4) for talk in talks]


@pytest.mark.slow
@pytest.mark.guarantee("F27", "G3")
@pytest.mark.timeout(1200)
def test_f27_replicas_come_and_go_and_the_model_changes_under_traffic(
    service: Rolling, smollm2: Path, tmp_path: Path
) -> None:
    hot = [Conversation(seed, turn_words=20) for seed in range(1, 7)]
    with Crowd(service) as crowd:
        service.write(3)
        print("2 -> 3:", service.reload())
        until("there are three", lambda: len(service.replicas()) == 3)
        turns(service, hot)
        assert all(reply.cached > 0 for reply in turns(service, hot))
        crowd.goes_on()

        before = service.replicas()
        service.write(2)
        print("3 -> 2:", service.reload())
        until("there are two", lambda: len(service.replicas()) == 2)
        assert service.replicas() < before, "those that stay were not touched"
        replies = turns(service, hot)
        assert all(reply.cached > 0 for reply in replies), [reply.receipt for reply in replies]
        crowd.goes_on()

        service.write(0)
        service.reload(UNCHANGED)
        service.write(2, auth={"admin_key": "an-administrator-who-was-not-there"})
        service.reload(UNCHANGED)
        assert "the section `auth` cannot be changed" in service.text
        assert all(reply.cached > 0 for reply in turns(service, hot))
        crowd.goes_on()

        before = service.replicas()
        service.write(2, model={"path": str(another_model(smollm2, tmp_path / "second"))})
        print("another model:", service.reload())
        until("the old ones are gone", lambda: not service.replicas() & before)
        replies = turns(service, hot)
        assert [reply.cached for reply in replies] == [0] * len(hot), "another model's blocks were used"
        assert all(reply.cached > 0 for reply in turns(service, hot))
        crowd.goes_on()
    assert not crowd.failures
    print("turns:", crowd.turns)
    service.check_books()
