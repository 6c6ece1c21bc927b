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
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

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

Came = TypeVar("Came")
FIRST = "first turns"
GUESTS = 6
AGAIN_S = 120.0
LONG_TOKENS = 400
LONG: dict[str, Any] = {"min_tokens": LONG_TOKENS}
ASKED_MAX = 24
"""Questions until both kinds of ingress have answered."""
INGRESS = r"ServeReplica:samovar:Ingress"
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


def _insist(turn: Callable[[], Came], failed: list[str]) -> Came:
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
    samovar.settle()
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


@dataclass
class Stream:
    """An answer that is being read, by the ingress `ingress`. `key`: of the request, to ask for it again."""

    samovar: SamovarLab
    messages: list[dict[str, str]]
    session: str
    key: str = field(default_factory=lambda: f"key-{uuid.uuid4()}")
    ingress: str = ""
    text: str = ""

    def begin(self) -> None:
        """Ask, and read the first words."""
        raw = self._ask(self.key)
        self.ingress = raw.headers["x-ingress"]
        self._chunks = iter(raw.parse())
        self.text = _next_text(self._chunks)

    def read(self) -> str:
        """Read to the end; what error ended it, empty if none did."""
        try:
            while piece := _next_text(self._chunks):
                self.text += piece
        except openai.APIError as error:  # an event of the stream, not a connection that broke
            return f"{type(error).__name__}: {error}"
        return ""

    def again(self) -> tuple[str, bool]:
        """The same request with the same key: its text, and whether the answer was kept."""
        raw = self._ask(self.key)
        chunks, text = iter(raw.parse()), ""
        while piece := _next_text(chunks):
            text += piece
        return text, raw.headers.get("idempotent-replayed") == "true"

    def _ask(self, key: str) -> Any:
        headers = {"Idempotency-Key": key, **({"x-session-id": self.session} if self.session else {})}
        asked: Any = {"messages": self.messages, "temperature": 0, "max_tokens": LONG_TOKENS}
        return self.samovar.openai().chat.completions.with_raw_response.create(
            model=MODEL, stream=True, extra_headers=headers, extra_body=LONG, **asked
        )


def _head_ingresses(samovar: SamovarLab) -> set[str]:
    """The ingresses on the head's machine. Ray spreads them as it can: there may be none, or two."""
    count = len(samovar.head.processes(INGRESS))
    samovar.enter_at(samovar.head)
    found: set[str] = set()
    with ThreadPoolExecutor(4 * count or 1) as pool:
        for _ in range(ASKED_MAX if count else 0):  # together: of two that are idle, one gets all
            found |= set(pool.map(lambda _: _ingress_of(samovar), range(4 * count)))  # stays on the node
            if len(found) >= count:
                break
    print("ingresses on the head's machine:", count, found)
    assert len(found) == count, "not all have answered"
    return found


def _spread_ingresses(samovar: SamovarLab) -> None:
    """Where workers came and went, Ray may have put all ingresses on the head's machine: kills move one."""
    workers = list(samovar.workers.values())
    count = len(samovar.head.processes(INGRESS))

    def is_elsewhere() -> bool:
        return any(worker.processes(INGRESS) for worker in workers)

    for _ in range(ASKED_MAX):
        if is_elsewhere():
            return
        samovar.head.processes(INGRESS)[0].kill()
        until("all run", lambda: is_elsewhere() or len(samovar.head.processes(INGRESS)) == count, 120)
    raise AssertionError(f"killed {ASKED_MAX} times, and each time Ray put the ingress on the head's machine")


def _sessions(samovar: SamovarLab, head_ingresses: set[str]) -> list[str]:
    """A session whose requests pass no ingress of these, and one whose do, if there are any."""
    found: dict[bool, str] = {}
    for _ in range(ASKED_MAX):
        session = f"session-{uuid.uuid4()}"
        ingress = _ingress_of(samovar, session)
        print(session, "comes to the ingress", ingress)
        found.setdefault(ingress in head_ingresses, session)
        if len(found) == 1 + bool(head_ingresses):
            return list(found.values())
    raise AssertionError(f"all {ASKED_MAX} sessions come to the head's ingresses, or none does: {found}")


def _ingress_of(samovar: SamovarLab, session: str = "") -> str:
    """The ingress that a session comes to; by default one on the machine where requests come in."""
    raw = samovar.openai().chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=1,
        extra_headers={"x-session-id": session} if session else {},
    )
    return str(raw.headers["x-ingress"])


def test_the_heads_machine_is_lost(story: Story) -> None:
    """Streams by other nodes' ingresses go on; with another machine in its place, so does all else.

    A stream by the head's own ingress cannot: it is told so, and the answer is there for who asks again.
    """
    samovar = story.samovar
    samovar.wait_for_replicas(2)
    # Others than before, whose conversations nearly fill the window.
    story.guests = [Guest(Conversation(2 * GUESTS + 20 + number, turn_words=180)) for number in range(GUESTS)]
    story.next_turns(FIRST)
    samovar.settle()
    _spread_ingresses(samovar)
    head_ingresses = _head_ingresses(samovar)
    samovar.enter_at(next(iter(samovar.workers.values())))
    sessions = ["", *_sessions(samovar, head_ingresses)]
    talks = [Conversation(GUESTS + 10 + number, turn_words=30) for number in range(len(sessions))]
    streams = [
        Stream(samovar, talk.next_messages(), session) for talk, session in zip(talks, sessions, strict=True)
    ]
    with ThreadPoolExecutor(len(streams)) as pool:
        list(pool.map(Stream.begin, streams))
        by_head = [stream for stream in streams if stream.ingress in head_ingresses]
        elsewhere = [stream for stream in streams if stream.ingress not in head_ingresses]
        print(*(f"{stream.session or 'no session'} by {stream.ingress}" for stream in streams), sep="\n")
        assert elsewhere
        assert bool(by_head) == bool(head_ingresses)
        began_s = time.monotonic()
        samovar.head.kill()
        ends = dict(zip([stream.key for stream in streams], pool.map(Stream.read, streams), strict=True))
    streamed_s = time.monotonic() - began_s
    assert [ends[stream.key] for stream in elsewhere] == ["" for _ in elsewhere]
    died = [ends[stream.key] for stream in by_head]
    count = str(len(elsewhere))
    story.rows.append(("streams over the head's loss", count, "", f"{streamed_s:.1f}", "0", "", ""))
    print("by the head's own ingress:", died)
    assert all(died), "a stream of the lost machine ended as if it were whole"
    tries: list[str] = []
    for stream in by_head:
        text, is_kept = _insist(stream.again, tries)
        print("asked again with its key:", "kept" if is_kept else "computed anew", len(text))
        assert text.startswith(stream.text), "another answer than the one that had begun"
        stream.text = text
    again_s = time.monotonic() - began_s
    count = str(len(by_head))
    story.rows.append(("those by the head's, again", count, "", f"{again_s:.1f}", str(len(tries)), "", ""))
    assert story.next_turns("head lost", began_s) >= WHOLE
    story.next_turns("head lost, a new session", of=[Guest(Conversation(GUESTS + 2))])
    begun_s = time.monotonic()
    samovar.replace_head()
    story.next_turns("head replaced, a new session", begun_s, [Guest(Conversation(GUESTS + 3))])
    samovar.enter_at(samovar.head)
    assert story.next_turns("by the new head's ingress", begun_s) >= WHOLE
    samovar.wait_for_replicas(2)
    story.check_answers()
    for stream in (*elsewhere, *by_head):
        assert stream.text == samovar.uncached(stream.messages, max_tokens=LONG_TOKENS, **LONG).text


def _next_text(chunks: Iterator[ChatCompletionChunk]) -> str:
    """The next words of a stream; empty at its end."""
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            return chunk.choices[0].delta.content
    return ""
