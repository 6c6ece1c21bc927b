"""Samovar on three hosts, each with an address of its own, while hosts, cables and processes are lost.

`make test-multinode`. One story: every event finds the guests that the one before has left. Printed at its
end: how long each event kept guests waiting, and how much of what they had said was computed again.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from rich.console import Console
from rich.table import Table

from tests.infra.needs import LAB, need, needs_infra
from tests.infra.netlab import LabError
from tests.infra.samovar_lab import GCS_PORT, SamovarLab, samovar_lab
from tests.support.services.guests import Conversation, Reply
from tests.support.services.service import MODEL, until

pytestmark = [needs_infra, pytest.mark.timeout(1500)]

FIRST = "first turns"
GUESTS = 6
AGAIN_S = 120.0
LONG_TOKENS = 200
DRAIN_S = 20.0
WHOLE = 0.99
"""Of what was said before, cached: all but the last token or two, which every turn computes."""


@dataclass
class Guest:
    """`spoken`: what was asked and what was answered, to be checked. `home`: of the last turn."""

    conversation: Conversation
    last: Reply | None = None
    home: str = ""
    spoken: list[tuple[list[dict[str, str]], str]] = field(default_factory=list)


@dataclass
class Story:
    """`rows`: of the table."""

    samovar: SamovarLab
    guests: list[Guest]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def next_turns(self, event: str, began_s: float | None = None, of: list[Guest] | None = None) -> float:
        """Everybody's next turn, tried again until there is an answer. The share that was cached."""
        began_s = time.monotonic() if began_s is None else began_s
        failed: list[str] = []
        ends: list[float] = []
        guests = self.guests if of is None else of

        def turn(guest: Guest) -> tuple[int, int]:
            before = guest.last.prompt_tokens if guest.last else 0
            reply = _insist(lambda: self.samovar.turn(guest.conversation), failed)
            ends.append(time.monotonic() - began_s)
            messages = guest.conversation.messages
            guest.spoken.append((messages[:-1], messages[-1]["content"]))
            guest.last, guest.home = reply, reply.receipt["replica"][-1]
            print(event, guest.conversation.seed, reply.prompt_tokens, reply.receipt)
            return min(before, reply.cached), before

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(turn, guests))
        share = sum(cached for cached, _ in found) / max(1, sum(before for _, before in found))
        if share < WHOLE and event != FIRST:
            print(*self.samovar.stats()["nodes"], sep="\n")  # where it might have been
        tiers = {
            tier: tokens
            for tier in ("gpu", "cpu", "nvme", "s3", "peer")
            if (tokens := sum(guest.last.by_tier[tier] for guest in guests if guest.last))
        }
        self.rows.append(
            (
                event,
                str(len(guests)),
                f"{min(ends):.1f}",
                f"{max(ends):.1f}",
                str(len(failed)),
                f"{share:.0%}",
                ", ".join(f"{tier} {tokens}" for tier, tokens in tiers.items()),
            )
        )
        return share

    def at(self, worker: str) -> list[Guest]:
        """Who was last served on that worker."""
        node = self.samovar.node_ids()[worker]
        here = {replica for replica, on in self.samovar.replica_nodes().items() if on == node}
        return [guest for guest in self.guests if guest.home in here]

    def check_answers(self) -> int:
        """Every answer since the last check is what a stranger gets, to whom every block is new; how many."""
        asked = [(guest, *one) for guest in self.guests for one in guest.spoken]
        for guest, messages, answer in asked:
            uncached = self.samovar.uncached(messages).text
            assert answer == uncached, f"guest {guest.conversation.seed} got another answer"
        for guest in self.guests:
            guest.spoken.clear()
        return len(asked)


def _insist(turn: Callable[[], Reply], failed: list[str]) -> Reply:
    """As a client does: again, after an error."""
    deadline_s = time.monotonic() + AGAIN_S
    while True:
        try:
            return turn()
        except (openai.APIError, AssertionError) as error:  # refused, or a stream that ended early
            failed.append(f"{type(error).__name__}: {error}")
            print(failed[-1])
            assert time.monotonic() < deadline_s, failed


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    need(*LAB)
    with samovar_lab("multinode", workers=2) as samovar:
        guests = [Guest(Conversation(number, turn_words=180)) for number in range(1, GUESTS + 1)]
        story = Story(samovar, guests)
        yield story
        columns = ("event", "guests", "first answer s", "last answer s", "errors", "cached", "tokens from")
        table = Table(*columns, title="what an event costs")
        for row in story.rows:
            table.add_row(*row)
        Console(width=140).print(table)


def test_sessions_spread_over_the_hosts(story: Story) -> None:
    story.next_turns(FIRST)
    assert len({guest.home for guest in story.guests}) == 2
    assert story.next_turns("nothing") >= WHOLE
    story.samovar.settle()
    story.check_answers()


def test_f27_a_node_is_drained_with_a_deadline(story: Story) -> None:
    samovar = story.samovar
    samovar.start_worker("w3")  # the one that is to take its place
    of_w1, w1 = story.at("w1"), samovar.node_ids()["w1"]
    assert of_w1
    ends_s = time.monotonic() + DRAIN_S
    samovar.drain(w1, DRAIN_S)

    def is_saved() -> bool:
        rows = [node for node in samovar.stats()["nodes"] if node["node_id"] == w1]
        return not rows or (rows[0]["draining"] and sum(rows[0]["drained"].values()) > 0)

    until("its blocks are saved", is_saved, DRAIN_S)
    story.next_turns("while it drains")
    until("its time is up", lambda: time.monotonic() >= ends_s, DRAIN_S + 5)
    samovar.lose("w1")
    share = story.next_turns("drained node went", of=of_w1)
    assert share >= WHOLE
    story.check_answers()


def test_a_node_loses_its_power(story: Story) -> None:
    samovar = story.samovar
    samovar.wait_for_replicas(2)
    story.next_turns("nothing")
    samovar.settle()
    of_w2 = story.at("w2")
    assert of_w2
    began_s = time.monotonic()
    samovar.lose("w2")
    share = story.next_turns("power lost", began_s, of_w2)
    assert share >= WHOLE, "what was in S3 was computed again"
    story.check_answers()


def test_f28_a_cable_is_pulled(story: Story) -> None:
    samovar = story.samovar
    samovar.start_worker("w4")
    samovar.wait_for_replicas(2)
    story.next_turns("nothing")
    samovar.settle()
    of_w3, w3 = story.at("w3"), samovar.workers["w3"]
    began_s = time.monotonic()
    samovar.lab.cut(w3)
    share = story.next_turns("cable pulled", began_s, of_w3 or None)
    assert share >= WHOLE
    samovar.lab.mend(w3)
    # Ray gives a node up for good: it must start anew. Its NVMe is what it was.
    until("its raylet has noticed", lambda: not w3.processes("raylet/raylet"), 60)
    samovar.restart_worker("w3")
    samovar.wait_for_replicas(2)
    assert story.next_turns("cable back, Ray anew") >= WHOLE
    story.check_answers()


def test_a_raylet_is_killed(story: Story) -> None:
    samovar = story.samovar
    samovar.settle()
    of_w4, w4 = story.at("w4"), samovar.workers["w4"]
    began_s = time.monotonic()
    (raylet,) = w4.processes(r"/raylet/raylet ")
    raylet.send_signal(signal.SIGKILL)
    assert story.next_turns("raylet killed", began_s, of_w4 or None) >= WHOLE
    samovar.restart_worker("w4")
    samovar.wait_for_replicas(2)
    story.check_answers()


def test_f37_an_open_cluster_is_refused(story: Story) -> None:
    host = story.samovar.lab.boot("open")
    try:
        story.samovar.prepare(host)
        no_token = {"RAY_AUTH_MODE": "disabled"}
        host.run("rm /root/.ray/auth_token")
        host.run(f"ray start --head --node-ip-address={host.ip} --num-cpus=0 --disable-usage-stats", no_token)
        refused = host.run("samovar deploy --config=/root/samovar/config.yaml", no_token, check=False)
        print(refused.stdout)
        assert refused.returncode == 1
        assert "requires no token" in refused.stdout
        served = host.run("curl -s http://127.0.0.1:8265/api/serve/applications/", no_token).stdout
        assert json.loads(served)["applications"] == {}
    finally:
        host.kill()


def test_the_heads_gcs_is_killed(story: Story) -> None:
    samovar = story.samovar
    head = samovar.head
    log = samovar.lab.shared / "keep-gcs.txt"
    with log.open("w") as out:
        keeper = head.popen(f"samovar keep-gcs --port {GCS_PORT}", stdout=out, stderr=subprocess.STDOUT)
    with contextlib.ExitStack() as after:
        after.callback(head.stop, keeper)
        until("the keeper watches", lambda: "watching GCS" in log.read_text(), 60)
        (gcs,) = head.processes(r"gcs_server")
        began_s = time.monotonic()
        gcs.send_signal(signal.SIGKILL)
        assert story.next_turns("GCS killed", began_s) >= WHOLE

        def is_back() -> bool:
            with contextlib.suppress(LabError):
                return len(samovar.node_ids()) == 2
            return False

        until("GCS answers again", is_back, 60)
        story.rows.append(("GCS answers again", "-", f"{time.monotonic() - began_s:.1f}", "", "", "", ""))
    assert story.next_turns("GCS is back") >= WHOLE
    story.check_answers()


def test_the_heads_machine_is_lost(story: Story) -> None:
    """A stream at another node's front door goes on; with another machine in its place, so does all else."""
    samovar = story.samovar
    samovar.wait_for_replicas(2)
    story.next_turns("nothing")
    samovar.settle()
    samovar.enter_at(next(iter(samovar.workers.values())))
    long = Guest(Conversation(GUESTS + 1, turn_words=30))
    messages = long.conversation.next_messages()
    client = samovar.openai()
    asked: Any = {"messages": messages, "temperature": 0, "max_tokens": LONG_TOKENS}
    with client.chat.completions.create(model=MODEL, stream=True, **asked) as stream:
        chunks = iter(stream)
        text = _next_text(chunks)
        began_s = time.monotonic()
        samovar.head.kill()
        while piece := _next_text(chunks):
            text += piece
    streamed_s = time.monotonic() - began_s
    story.rows.append(("stream over the head's loss", "1", "", f"{streamed_s:.1f}", "0", "", ""))
    assert story.next_turns("head lost", began_s) >= WHOLE
    story.next_turns("head lost, a new session", of=[Guest(Conversation(GUESTS + 2))])
    begun_s = time.monotonic()
    samovar.replace_head()
    story.next_turns("head replaced, a new session", begun_s, [Guest(Conversation(GUESTS + 3))])
    samovar.enter_at(samovar.head)
    assert story.next_turns("by the new head's front door", begun_s) >= WHOLE
    samovar.wait_for_replicas(2)
    story.check_answers()
    assert text == samovar.uncached(messages, max_tokens=LONG_TOKENS).text


def _next_text(chunks: Iterator[ChatCompletionChunk]) -> str:
    """The next words of a stream; empty at its end."""
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            return chunk.choices[0].delta.content
    return ""
