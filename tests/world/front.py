"""Front doors that choose a replica for each turn, and take up elsewhere what a replica did not finish.

The product's load book, roster, score, session directory and failover, on an event loop of the world's; the
replicas and the directory's process are the world's.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from samovar.cache_tiers.pricing import PrefillPrice
from samovar.cache_tiers.sessions import SessionTable, Sync, Synced
from samovar.cache_tiers.transport import PeerError
from samovar.cluster.serve.rollout import MODEL_APP_PREFIX
from samovar.configs.settings import RouterSettings
from samovar.replicas.messages import Admitted, Delta, Event, GenerateRequest, Refused, SamplingParams
from samovar.router.generation.failover import resuming
from samovar.router.routing import DirectoryLost, ReplicaLost, SessionDirectory, TurnEnd
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.roster import ListedReplica, RankOptions, Roster
from tests.world.clients import Clients
from tests.world.door import Loop
from tests.world.faults import Faults
from tests.world.machine import Machine
from tests.world.model import Conversation
from tests.world.scheduler import Process, Scheduler
from tests.world.threads import WALL_S, Promise

OPEN_MAX = 3
TOKEN_S = 0.05
STALLS_S = 6.0
LISTED_S = 1.0
"""How old what a front knows of the replicas is at most."""
WATCH_S = 1.0
PREFILL = PrefillPrice(0.01, 1e-3, 0.0)
SETTINGS = RouterSettings(stall_s=3.0, heartbeat_s=1.0, resume_s_max=8.0, resumes_max=3, sync_s=1.0)
ANSWER_S_MAX = 60.0
"""A replica's own time for one: that of a turn at its node, and of its tokens."""
REQUEST_S_MAX = SETTINGS.resume_s_max + (SETTINGS.resumes_max + 1) * (
    SETTINGS.resume_s_max + SETTINGS.stall_s + ANSWER_S_MAX
)
REBUILT_MAX = 1000


def token(request_id: str, at: int) -> int:
    """What is answered: whichever replica says it, as with one seed."""
    return int.from_bytes(hashlib.blake2b(f"{request_id} {at}".encode(), digest_size=2).digest(), "big")


class Directory:
    """The directory's process: the product's table, as its actor serves it; after a crash without a row."""

    def __init__(self, here: Scheduler, machines: Sequence[Machine]) -> None:
        self._here = here
        self._machines = machines
        self.draining: set[str] = set()
        self.back_s = 0.0
        self._lives = 0
        self.start()

    def start(self) -> None:
        self._lives += 1
        self.table = SessionTable(1000, 32)
        self._asked: set[str] = set()

    def crash(self, away_s: float) -> None:
        self.back_s = self._here.now_s + away_s
        self.start()

    def watch(self) -> None:
        """Learn what nodes hold, all of them again when one is gone: others may have taken its blocks."""
        up = {machine.name: machine.node for machine in self._machines if machine.is_up}
        if self._asked - up.keys():
            self._asked = set()
        for name, node in up.items():
            if name not in self._asked and node is not None:
                held = node.sessions.sessions(REBUILT_MAX)
                self.table.held(name, held, WALL_S + self._here.now_s, up)
                self._asked.add(name)

    def sync(self, sync: Sync) -> Synced:
        for cleared in sync.clears:
            self.table.clear(cleared)
        self.table.merge(sync.rows)
        incarnation = f"{self._lives}"
        rows, clears, seq = self.table.changes(sync.since if sync.incarnation == incarnation else 0, 50)
        is_all = seq == self.table.seq
        return Synced(incarnation, seq, is_all, tuple(rows), tuple(clears), tuple(sorted(self.draining)))


class Link:
    """A front's calls to the directory: only those that routing needs."""

    def __init__(self, here: Scheduler, faults: Faults, directory: Directory) -> None:
        self._here = here
        self._faults = faults
        self._directory = directory

    async def sync(self, sync: Sync) -> Synced:
        await asyncio.sleep(self._faults.uniform(0.0, 0.1))
        if self._here.now_s < self._directory.back_s or self._faults.strikes("directory silent"):
            raise DirectoryLost("it is away")
        reply = self._directory.sync(sync)
        await asyncio.sleep(self._faults.uniform(0.0, 0.1))
        return reply


@dataclass
class _Open:
    """A call that a replica serves: `tell` gets what it says, from another thread; None: it is lost."""

    request: GenerateRequest
    conversation: Conversation
    tell: Callable[[list[Event] | None], object]
    is_given_up: bool = False
    is_stalled: bool = False


class Replica:
    """One replica's lives, beside `machine`. It computes a turn with its node's tiers, and answers."""

    app = model = ""
    """Which application of Serve it is of, and whose K and V it computes."""

    def __init__(
        self,
        here: Scheduler,
        faults: Faults,
        clients: Clients,
        machine: Machine,
        app: str = "",
        model: str = "",
    ) -> None:
        self._here = here
        self._faults = faults
        self._clients = clients
        self.machine = machine
        self.app, self.model = app, model
        self.lives = 0
        self.is_leaving = False
        """It ends what it has; fronts that ask who is there are not told of it."""
        self.start()

    def start(self) -> None:
        """Begin a life, unless it lives."""
        if self.lives and not self.process.is_dead:
            return
        self.lives += 1
        of = self.app.removeprefix(MODEL_APP_PREFIX) if self.app else ""
        self.name = f"replica-{self.machine.number}.{self.lives}{of and '.' + of}"
        self.process: Process = self._here.process(self.name)
        self.open: list[_Open] = []

    def crash(self) -> None:
        if self.process.is_dead:
            return
        lost, self.open = self.open, []
        self._here.kill(self.process)
        for call in lost:
            call.tell(None)

    def begin(self, call: _Open) -> None:
        self.open.append(call)
        life, name = self.open, self.name

        def serve() -> None:
            try:
                self._serve(call, name)
            finally:
                if call in life:
                    life.remove(call)

        def beat() -> None:
            while call in life and not call.is_given_up:
                if not call.is_stalled:
                    call.tell([])
                self._here.sleep(SETTINGS.heartbeat_s)

        self._here.spawn(self.process, "serve", serve)
        self._here.spawn(self.process, "heart", beat)

    def _serve(self, call: _Open, name: str) -> None:
        ask = call.request
        try:
            told = call.conversation.of(self.model)
            loaded = self._clients.turn(told, self.machine, peers=ask.route.peers)
        except PeerError:  # its node is not there: it computes
            loaded = 0
        call.tell([Admitted(name, loaded, 0.0)])
        said = len(ask.resume.token_ids) if ask.resume is not None else 0
        for at in range(said, ask.sampling.max_tokens):
            self._here.sleep(TOKEN_S)
            if self._faults.strikes("replica stalls", self.machine.number):
                call.is_stalled = True
                self._here.sleep(STALLS_S)
                call.is_stalled = False
            if call.is_given_up:
                return
            is_last = at + 1 == ask.sampling.max_tokens
            said_now = token(ask.request_id + self.model, at)
            call.tell([Delta(0, "", (said_now,), finish_reason="stop" if is_last else None)])


@dataclass(frozen=True)
class Answer:
    """Which replica ended it, and how many blocks that loaded; "": it ended with an error that has a type."""

    replica: str = ""
    loaded: int = 0


class Front:
    """Front `number`: its event loop, load book, roster and directory."""

    def __init__(
        self,
        here: Scheduler,
        faults: Faults,
        replicas: Sequence[Replica],
        directory: Directory,
        seen: Counter[str],
        number: int,
        seed: int,
        app: str = "",
        model: str = "",
    ) -> None:
        self._here = here
        self.app, self._model = app, model
        self.asked = 0
        """Requests that have no end yet."""
        self._replicas = replicas
        self._seen = seen
        self._number = number
        self._rng = random.Random(f"front {number} {seed}")
        self.tracker = ReplicaLoadTracker(lambda: here.now_s, self._rng)
        self.tracker.ingress = f"front-{number}"
        self.roster = Roster(self._rng)
        link = Link(here, faults, directory)
        self.directory = SessionDirectory(
            link,  # type: ignore[arg-type]  # only what routing needs
            self.tracker,
            SETTINGS,
            lambda: WALL_S + here.now_s,
        )
        self._requests = 0
        self._of: dict[str, Conversation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.process = here.process(f"front-{number}")
        self._loop: Loop | None = None
        here.spawn(self.process, "front", self._live)

    @property
    def is_ready(self) -> bool:
        return self._loop is not None

    def ask(self, conversation: Conversation) -> Answer:
        """Have a turn answered; return who ended it, no replica after a typed error."""
        self.asked += 1
        try:
            return self._ask(conversation)
        finally:
            self.asked -= 1

    def _ask(self, conversation: Conversation) -> Answer:
        while self._loop is None:
            self._here.sleep(0.1)
        promise = Promise()

        def begin() -> None:
            assert self._loop is not None
            task = self._loop.create_task(self._answer(conversation, promise))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)
        try:
            answer: Answer = promise.result(REQUEST_S_MAX)
        except ReplicaLost:
            self._seen["request: lost"] += 1
            return Answer()
        except TimeoutError:
            self._here.violate("late", f"a request has no end after {REQUEST_S_MAX:.0f} s")
            return Answer()
        return answer

    # -- on the loop ------------------------------------------------------------------------

    def _live(self) -> None:
        loop = Loop(self._here)

        async def live() -> None:
            self._list()
            self.directory.start()
            self._loop = loop
            while True:
                await asyncio.sleep(LISTED_S)
                self._list()

        loop.run_until_complete(live())

    def _list(self) -> None:
        """Learn of the replicas that are there, as Serve's controller tells."""
        there = [one for one in self._replicas if not one.process.is_dead and not one.is_leaving]
        there = [one for one in there if one.app == self.app]
        nodes = {one.name: one.machine.name for one in there}
        self.tracker.update_replicas(nodes, dict.fromkeys(nodes, PREFILL))
        self.roster.update([ListedReplica(name, "", OPEN_MAX, None) for name in nodes], RankOptions())

    async def _answer(self, conversation: Conversation, promise: Promise) -> None:
        try:
            promise.set_result(await self._turn(conversation))
        except Exception as error:  # noqa: BLE001 - who asked judges it
            promise.set_exception(error)

    async def _turn(self, conversation: Conversation) -> Answer:
        tenant, session = conversation.tenant, conversation.session
        self._requests += 1
        request_id = f"{self._number}.{self._requests}"
        self.directory.turn_began(tenant, session)
        ask = GenerateRequest(
            request_id,
            [0] * (4 * (conversation.turns + 1)),
            SamplingParams(max_tokens=self._rng.randint(1, 12)),
            tenant=tenant,
            session=session,
            route=self.directory.route(tenant, session),
        )
        self._of[request_id] = conversation
        said: list[int] = []
        answer = Answer()
        try:
            stream = resuming(self, ask, session.hex(), SETTINGS, self._counted)  # type: ignore[arg-type]
            async with aclosing(stream):
                async for events in stream:
                    for event in events:
                        if isinstance(event, Refused):
                            self._seen[f"request: {event.reason}"] += 1
                            return Answer()
                        if isinstance(event, Admitted):
                            answer = Answer(event.replica_id, event.cached_tokens)
                        elif isinstance(event, Delta):
                            said += event.token_ids
        finally:
            del self._of[request_id]
        if said != [token(request_id + self._model, at) for at in range(ask.sampling.max_tokens)]:
            self._here.violate("another answer", f"request {request_id} of {conversation.name}: {said}")
        self._seen["request: answered"] += 1
        if not conversation.is_closed:
            self.directory.turn_ended(TurnEnd(tenant, session, answer.replica, len(ask.prompt_token_ids)))
        return answer

    def _counted(self, outcome: str) -> None:
        self._seen[f"failover: {outcome}"] += 1

    async def generate(self, request: GenerateRequest, session_key: str) -> AsyncGenerator[list[Event], None]:
        """`ReplicaClient.generate`, as `ray_clients` has it, over the world's replicas."""
        self._requests += 1
        ticket = f"{self._number}.{self._requests}"
        route = replace(request.route, ticket=ticket, ingress=self.tracker.ingress)
        ranked, ranking = self.roster.ranked(request, session_key, self.tracker)
        came: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(events: list[Event] | None) -> None:
            loop.call_soon_threadsafe(came.put_nowait, events)

        call = _Open(replace(request, route=route), self._of[request.request_id], tell)
        try:
            for listed in ranked:
                name = listed.name
                work_s = ranking.work_s.get(name, 0.0) if ranking is not None else 0.0
                outcome = ranking.outcomes.get(name) if ranking is not None else None
                replica = next((one for one in self._replicas if one.name == name), None)
                if replica is None or replica.process.is_dead:
                    self.tracker.routed(ticket, name, work_s, outcome)
                    self.tracker.failed(ticket)
                    raise ReplicaLost(f"{name} is not there")
                if len(replica.open) < OPEN_MAX:
                    self.tracker.routed(ticket, name, work_s, outcome)
                    self._seen[f"routed: {outcome}"] += 1
                    replica.begin(call)
                    break
            else:
                yield [Refused("queue_full", "All replicas' queues are full.", 0.5)]
                return
            while True:
                events = await came.get()
                if events is None:
                    self.tracker.failed(ticket)
                    raise ReplicaLost("its process ended")
                for event in events:
                    if isinstance(event, Admitted):
                        self.tracker.admitted(ticket, event.receipt)
                yield events
                if any(isinstance(event, Delta) and event.finish_reason for event in events):
                    return
        finally:
            call.is_given_up = True
            self.tracker.ended(ticket)
