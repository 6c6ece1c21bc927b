"""A session moves to another node and its blocks follow it, over NIXL; a real service on two raylets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.services.service import MODEL, READY, REPLICA, START_S, free_port, until

pytestmark = pytest.mark.timeout(400)
HISTORY = "The samovar stood on the table and the guests had not come back yet. " * 30
ROOT = Path(__file__).resolve().parents[2]


class TwoNodes:
    """The service as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "two-nodes.txt"
        port = free_port()
        cache = Path(os.environ.get("SAMOVAR_MODEL__CACHE_DIR", Path.home() / ".cache" / "samovar"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.services.two_node_service", str(port), str(cache)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self.output.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"it ended: {self.text}"
            return READY.search(self.text) is not None

        until("two nodes are ready", ready, START_S)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def tell(self, command: str) -> str:
        said = len(self.text.splitlines())
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return until(command, lambda: "".join(self.text.splitlines()[said:]))

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate("quit\n", timeout=90)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def ask(self, messages: list[dict[str, str]], session: str, **more: Any) -> tuple[str, dict[str, Any]]:
        body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **more}
        reply = self.http.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        return answer["choices"][0]["message"]["content"], answer["receipt"]

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.http.get("/cache/stats").json()["nodes"]
        return found

    def replica_process(self, replica: str) -> psutil.Process:
        """The process that has written a log in the name of `replica`."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if REPLICA.search(" ".join(process.cmdline())) and any(
                    replica in opened.path for opened in process.open_files()
                ):
                    return process
        raise AssertionError(f"no process of replica {replica}")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    two = TwoNodes(tmp_path_factory.mktemp("two"))
    try:
        two.wait_ready()
        yield two
    finally:
        two.stop()


def conversation(service: TwoNodes, session: str) -> tuple[list[dict[str, str]], str]:
    """A first turn; the messages so far, and who served it. Its blocks are in its node's tier by then."""
    messages = [{"role": "user", "content": f"{session}. {HISTORY}"}]
    text, receipt = service.ask(messages, session)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Who came back?"}]
    (home,) = receipt["replica"]

    def stored() -> bool:
        listed = service.http.get(f"/v1/sessions/{session}").json()
        return bool(listed["bytes"] and listed["bytes"]["cpu"])

    until("the turn is stored", stored, 120)
    return messages, home


def uncached(service: TwoNodes, messages: list[dict[str, str]]) -> str:
    """What the answer is without any cache."""
    text, receipt = service.ask(messages, "nobody's", cache_salt=os.urandom(8).hex())
    assert receipt["tokens"]["compute"] == sum(receipt["tokens"].values())
    return text


def ways(service: TwoNodes) -> dict[str, int]:
    pulls: dict[str, int] = {}
    for node in service.nodes():
        for peer in node["peers"].values():
            for way, count in peer["pulls"].items():
                pulls[way] = pulls.get(way, 0) + count
    return pulls


def test_a_session_whose_replica_died_goes_on_at_another_node_with_its_blocks(service: TwoNodes) -> None:
    assert len({node["node_id"] for node in service.nodes()}) == 2, "the replicas are on one node"
    messages, home = conversation(service, "moves")
    killed = service.replica_process(home)
    os.kill(killed.pid, signal.SIGKILL)
    text, receipt = service.ask(messages, "moves")
    assert receipt["replica"] != [home]
    assert receipt["tokens"]["peer"] > 300, receipt
    assert ways(service).get("nixl", 0) >= 1, service.nodes()
    assert text == uncached(service, messages)
    _, again = service.ask(messages, "moves")
    assert again["tokens"]["peer"] == 0, "what was pulled is kept here"
    assert again["tokens"]["compute"] < 40


@pytest.mark.slow  # the gate drains a node's tiers: test_two_nodes.py
def test_f27_a_draining_node_gives_its_sessions_away_and_gets_no_new_turns(service: TwoNodes) -> None:
    until("both nodes serve again", lambda: len({node["node_id"] for node in service.nodes()}) == 2, 120)
    head = service.tell("head")  # the ingress is there: it is not what goes away
    kept: dict[str, tuple[list[dict[str, str]], str]] = {}
    for number in range(20):  # a session's first node is drawn by its name and a secret
        messages, _ = conversation(service, f"drains-{number}")
        kept[f"drains-{number}"] = messages, row_of(service, f"drains-{number}")["node"]
        moving = [session for session, (_, node) in kept.items() if node != head]
        if len(moving) == 3:
            break
    leaving = kept[moving[0]][1]
    assert service.tell(f"drain {leaving} 60") == "draining"

    def drained() -> bool:
        node = next(node for node in service.nodes() if node["node_id"] == leaving)
        return bool(node["draining"] and node["drained"])

    def goes_elsewhere() -> bool:
        """The ingress learns of a drain with its next exchange."""
        service.ask(kept[moving[0]][0], moving[0])
        return bool(row_of(service, moving[0])["node"] != leaving)

    until("the node has given its blocks away", drained, 60)
    until("the ingress has heard of it", goes_elsewhere, 30)
    del kept[moving[0]]
    for session, (messages, node) in kept.items():
        text, receipt = service.ask(messages, session)
        assert row_of(service, session)["node"] != leaving, "a new turn went to a draining node"
        assert receipt["tokens"]["compute"] < 60, (session, node, receipt, service.nodes())
        assert text == uncached(service, messages)


def row_of(service: TwoNodes, session: str) -> dict[str, Any]:
    row: dict[str, Any] = service.http.get(f"/v1/sessions/{session}").json()
    return row
