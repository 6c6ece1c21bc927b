"""Replicas that are killed, drained and replaced under traffic: the same suite for both engines.

A killed replica's, and a killed engine core's, answers go on elsewhere. Nothing of them is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.api.test_failover import FORM, pids_of, replicas
from tests.e2e.test_rollout import Crowd
from tests.support.services.guests import Conversation, Reply
from tests.support.services.service import MODEL, until
from tests.vllm_serve.conftest import (
    ENGINES,
    RED,
    START_S,
    Engine,
    EngineService,
    bearer,
    differs,
    flags,
    start,
)

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 96, "ignore_eos": True}
DRAWN: dict[str, Any] = GREEDY | {"temperature": 1, "seed": 7}
FORMED: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 300,
    "response_format": {"type": "json_schema", "json_schema": {"name": "tea", "schema": FORM}},
}
Kill = Callable[[EngineService, str, dict[str, int]], None]
LATEST_PIECE = 20


def answer(
    service: EngineService,
    asked: dict[str, Any],
    disturb: Callable[[str], None] | None = None,
    at_piece: int = 5,
) -> str:
    """An answer. `disturb`: is called once with the replica's id, behind `at_piece` pieces of it."""
    said = [{"role": "user", "content": "Tell me about tea."}]
    body: dict[str, Any] = {"model": MODEL, "messages": said, "stream": True, **asked}
    text, pieces, done = "", 0, False
    with (
        service.http() as http,
        http.stream("POST", "/v1/chat/completions", json=body, headers=bearer(RED)) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            done = done or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            pieces += 1
            if disturb is not None and pieces > at_piece:
                disturb(response.headers["x-replica"])
                disturb = None
    assert done, "a silent cut"
    assert disturb is None, "it was over before it could be disturbed"
    return text


def kill_replica(service: EngineService, replica_id: str, pids: dict[str, int]) -> None:
    os.kill(pids[replica_id], signal.SIGKILL)


def kill_core(service: EngineService, replica_id: str, pids: dict[str, int]) -> None:
    """Kill where it computes: below the replica, of vLLM; the replica itself, of ours."""
    below = {child.pid for child in psutil.Process(pids[replica_id]).children(recursive=True)}
    (core,) = below & set(service.core_pids()) if service.is_vllm else {pids[replica_id]}
    os.kill(core, signal.SIGKILL)


def wait_for_both(service: EngineService, dead: str = "") -> None:
    def are_up() -> bool:
        up = replicas(service)
        return len(up) == 2 and dead not in up

    until("two replicas are up", are_up, START_S)


def disturbed(service: EngineService, asked: dict[str, Any], kill: Kill, at_piece: int) -> str:
    """An answer whose replica is killed within it."""
    killed, pids = list[str](), pids_of(service, replicas(service))
    before = service.total("samovar_failovers_total", outcome="resumed")

    def disturb(replica_id: str) -> None:
        kill(service, replica_id, pids)
        killed.append(replica_id)

    text = answer(service, asked, disturb, at_piece)
    assert service.total("samovar_failovers_total", outcome="resumed") > before
    wait_for_both(service, killed[0])
    return text


def kill_and_compare(service: EngineService, kills: int, kill: Kill) -> None:
    """Each kill hits a stream at some piece of it; the reader sees the text of who was not disturbed."""
    rng = random.Random(20)
    wait_for_both(service)
    whole = answer(service, GREEDY)
    for number in range(kills):
        text = disturbed(service, GREEDY, kill, rng.randint(1, LATEST_PIECE))
        assert text == whole, f"kill {number + 1} of {kills}"
    assert service.total("samovar_replica_integrity_failures_total") == 0


def left_over() -> list[str]:
    """Sockets of connectors, and trackers of `multiprocessing` whose process is no more."""
    found = [str(path) for path in Path(tempfile.gettempdir()).glob("samovar-*/told.sock")]
    for process in psutil.process_iter():
        try:
            if process.ppid() == 1 and "resource_tracker" in " ".join(process.cmdline()):
                found.append(f"{process.pid} {process.cmdline()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class TestKills:
    @pytest.mark.parametrize("kill", [kill_replica, kill_core])
    @differs("greedy text after a failover")
    def test_killed_in_its_midst_an_answer_has_the_same_greedy_text(
        self, service: EngineService, kill: Kill
    ) -> None:
        kill_and_compare(service, 2, kill)

    @pytest.mark.slow
    @pytest.mark.timeout(7200)
    @pytest.mark.parametrize("kill", [kill_replica, kill_core])
    def test_20_kills_20_texts(self, service: EngineService, kill: Kill) -> None:
        kill_and_compare(service, 20, kill)

    def test_an_answer_of_a_form_goes_on_in_its_form(self, service: EngineService) -> None:
        wait_for_both(service)
        whole = answer(service, FORMED)
        assert set(json.loads(whole)) == set(FORM["required"])
        assert disturbed(service, FORMED, kill_replica, 3) == whole

    @differs("drawn text after a failover")
    def test_a_drawn_answer_goes_on(self, service: EngineService) -> None:
        wait_for_both(service)
        whole = answer(service, DRAWN)
        assert answer(service, DRAWN) == whole
        text = disturbed(service, DRAWN, kill_replica, 8)
        assert (text == whole) is not service.is_vllm
        assert text[0] == whole[0]

    def test_nothing_is_left_of_a_killed_replica(self, service: EngineService) -> None:
        wait_for_both(service)
        before = left_over()
        (dead, pid), *_ = pids_of(service, replicas(service)).items()
        below = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        wait_for_both(service, dead)
        _, alive = psutil.wait_procs(below, 30)
        assert [process.cmdline() for process in alive] == []
        assert set(left_over()) <= set(before)


def cached_after(service: EngineService, chats: list[Conversation]) -> list[Reply]:
    return [service.turn(chat, max_tokens=4) for chat in chats]


def rolling(engine: Engine, folder: Path, replicas_of: int) -> EngineService:
    """A service without keys, whose file says how many replicas there are and of which engine."""
    file = folder / "samovar.yaml"
    file.write_text(yaml.safe_dump({"cluster": {"replicas": replicas_of}, "engine": SECTIONS[engine]}))
    apart = ("engine.kind", "cluster.replicas", "engine.vllm.options")
    given = {name: value for name, value in flags("vllm", config=file).items() if name not in apart}
    service = start(folder / "service", given, engine=engine, has_keys=False)
    service.file = file
    return service


SECTIONS: dict[Engine, dict[str, Any]] = {
    "ours": {},
    "vllm": {"kind": "vllm", "vllm": {"options": {"enforce_eager": True}}},
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_leave_and_come_and_conversations_go_on(engine: Engine, tmp_path: Path) -> None:
    """A drain hands over what only the leaving replica has; nobody sees an error."""
    service = rolling(engine, tmp_path, 2)
    try:
        chats = [Conversation(650 + number, turn_words=80) for number in range(4)]
        cached_after(service, chats)
        with Crowd(service) as crowd:
            before = service.replicas()
            service.write(1, engine=SECTIONS[engine])
            service.reload()
            until("there is one", lambda: len(service.replicas()) == 1)
            assert service.replicas() < before
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            crowd.goes_on()
            service.write(2, engine=SECTIONS[engine])
            service.reload()
            until("there are two", lambda: len(service.replicas()) == 2)
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            crowd.goes_on()
        assert not crowd.failures
    finally:
        assert service.stop() == 0, service.text


@pytest.mark.timeout(2400)
def test_from_our_engine_to_vllm_and_back_under_traffic(tmp_path: Path) -> None:
    """Nobody sees an error. What one engine has stored the other does not find; then it is there again."""
    service = rolling("ours", tmp_path, 1)
    try:
        chats = [Conversation(600 + number, turn_words=80) for number in range(3)]
        cached_after(service, chats)
        with Crowd(service) as crowd:
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            service.write(1, engine=SECTIONS["vllm"])
            service.reload()
            assert [reply.cached for reply in cached_after(service, chats)] == [0, 0, 0]
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            crowd.goes_on()
            service.write(1)
            service.reload()
            assert all(reply.cached > 0 for reply in cached_after(service, chats))
            crowd.goes_on()
        assert not crowd.failures
    finally:
        assert service.stop() == 0, service.text
