"""One life of a small cluster, from a seed: built, lived through, healed, and judged."""

from __future__ import annotations

import itertools
import logging
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from samovar.cache_tiers.forecast import learner
from samovar.cache_tiers.media import files, s3_client
from samovar.cache_tiers.node import state as node_state
from samovar.configs.sections import S3TierSettings, TierSettings
from tests.support.constants import tuned
from tests.support.inside import records_in, state_of
from tests.world.bucket import Bucket
from tests.world.clients import Clients
from tests.world.desk import Desk
from tests.world.door import STORES, Door
from tests.world.faults import AT_ONCE, Fault, Faults, drawn
from tests.world.front import LISTED_S, SETTINGS, WATCH_S, Directory, Front, Replica
from tests.world.machine import Machine, Shape
from tests.world.model import Conversation
from tests.world.network import Network
from tests.world.recovery import Recovery
from tests.world.returns import YOUNG_TURNS, Returns, learning
from tests.world.rollout import Fleet, Rollout
from tests.world.scaling import Scaler
from tests.world.scheduler import Process, Scheduler, Violation
from tests.world.threads import inhabited

LASTS_S = 60.0
LEARNS, LEARNS_SHARE = "memory known", 0.25
"""Lives whose nodes learn who comes back. With these words, seeds listed before them are what they were."""
SCALES, SCALES_SHARE = "tide demand", 0.3
"""Of the lives with fronts: those whose replicas and nodes come and go by what is asked of them."""
ROLLS_SHARE = 0.3
"""Of the lives with fronts: those that end with other versions of everything."""
SETTLES_MAX = 60
SETTLE_S = 20.0
RECORD_BYTES = 4096
SAMPLE_BYTES = 48


@dataclass
class Outcome:
    """What came of a seed. `told`: the last events, for whoever looks into it."""

    seed: int
    plan: list[Fault]
    setting: str
    violations: list[Violation]
    digest: str
    steps: int
    lasted_s: float
    seen: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> set[str]:
        return {one.kind for one in self.violations}


class Life:
    """A seed's cluster. `plan`: its faults; None: those of the seed. `lasts_s`: before all is well again."""

    pause_s = 1.0
    """Of each user between two requests, on average."""

    def __init__(
        self, seed: int, root: Path, plan: Sequence[Fault] | None = None, lasts_s: float = LASTS_S
    ) -> None:
        rng = random.Random(f"settings {seed}")
        self.seed = seed
        self._root = root
        self._lasts_s = self._well_s = lasts_s
        nodes, has_bucket = rng.choice((1, 2, 2, 3, 4)), rng.random() < 0.6
        tenants, self._clients_count = rng.choice((2, 3)), rng.choice((2, 4, 8))
        preempt_rate = rng.choice((0.0, 0.02, 0.2))
        self.plan = drawn(seed, nodes, has_bucket, lasts_s) if plan is None else list(plan)
        self.here = Scheduler(seed, preempt_rate)
        self.seen: Counter[str] = Counter()
        self.faults = Faults(self.here, self.plan, seed)
        self.bucket = Bucket(self.here, self.faults)
        self.network = Network(self.here, self.faults)
        shape = _shape(rng, has_bucket)
        learns = random.Random(f"{LEARNS} {seed}").random() < LEARNS_SHARE
        if learns:
            shape = Shape(learning(shape.settings), shape.bytes_max, learns=True)
        self.machines = [self._machine(shape, number) for number in range(nodes)]
        self.returns: Returns | None = None
        if learns:
            join = partial(self._join, shape)
            self.returns = Returns(self.here, self.faults, self.machines, self.seen, seed, join)
        self.setting = (
            f"{nodes} nodes, {tenants} tenants, {self._clients_count} clients, preempted {preempt_rate:g}, "
            f"{shape.settings.policy.name}, {', '.join(f'{k} {v}' for k, v in shape.bytes_max.items())}"
        )
        self.desk = Desk(here=self.here, seen=self.seen, seed=seed) if rng.random() < 0.3 else None
        self._fronts_count = rng.choice((0, 1, 2))
        self._rng = random.Random(f"chaos {seed}")
        self._tenants = tenants
        self._scales = random.Random(f"{SCALES} {seed}").random() < SCALES_SHARE
        self._rolls = random.Random(f"rolls {seed}").random() < ROLLS_SHARE
        self.scaler: Scaler | None = None
        self.replicas: list[Replica] = []
        self.fronts: list[Front] = []

    def _machine(self, shape: Shape, number: int) -> Machine:
        return Machine(
            self.here, self.faults, self.network, shape, number, self._root / str(number), self.seen
        )

    def _join(self, shape: Shape) -> Machine:
        """Put a new node beside the others, which it has nothing to do with so far."""
        machine = self._machine(shape, len(self.machines))
        self.machines.append(machine)
        machine.start()
        return machine

    def run(self) -> Outcome:
        here = self.here
        with inhabited(here, self.seed), self._calls():
            for machine in self.machines:
                machine.start()
            self.door = Door(here, self.faults, self.network, self._root / "door", self.seen)
            self.clients = Clients(
                here, self.faults, self.network, self.machines, self.door, self.seen, self.seed, self._tenants
            )
            self.clients.tells_turns = self.returns is not None
            self.clients.pause_s = self.pause_s
            if self.desk is not None:
                self.desk.start()
            users = here.process("clients")
            tasks = [
                here.spawn(users, f"client-{number}", lambda: self.clients.live(self._lasts_s))
                for number in range(self._clients_count)
            ]
            self.directory = Directory(here, self.machines)
            if self._fronts_count:
                self._open_fronts()
            tasks += [here.spawn(users, "chats", partial(self._chat, front)) for front in self.fronts]
            self._chaos()
            while not all(task.is_done for task in tasks) and not here.violations:
                here.sleep(1.0)
                if here.now_s > self._lasts_s + 2000.0:
                    here.violate("for ever", "a client waits for an answer that does not come")
            if not here.violations:
                self._settle()
            if self.scaler is not None and not here.violations:
                self._judge_scaling(self.scaler)
            if not here.violations:
                self._judge()
            if not here.violations:
                self._judge_afterwards()
            outcome = self._outcome()
            self._end(users)
        return outcome

    def _outcome(self) -> Outcome:
        here, struck = self.here, self.faults.struck
        return Outcome(
            self.seed,
            self.plan,
            self.setting,
            list(here.violations),
            here.digest,
            here.steps,
            here.now_s,
            self.seen + Counter({f"fault: {kind}": n for kind, n in struck.items()}),
            list(here.told),
        )

    def _open_fronts(self) -> None:
        """Put a replica beside each node, and fronts before them; the directory's process watches."""

        def watch() -> None:
            while True:
                self.directory.watch()
                self.here.sleep(WATCH_S)

        self.replicas += [Replica(self.here, self.faults, self.clients, one) for one in self.machines]
        self.fronts += [
            Front(self.here, self.faults, self.replicas, self.directory, self.seen, number, self.seed)
            for number in range(self._fronts_count)
        ]
        self.here.spawn(self.here.process("directory"), "watch", watch)
        if self._scales:
            self.scaler = Scaler(
                self.here, self.machines, self.replicas, self.directory, self.seen, self.seed
            )

    def _chat(self, front: Front) -> None:
        """A user's life before a front."""
        while self.here.now_s < self._lasts_s and not self.here.violations:
            self.here.sleep(self._rng.expovariate(1.0 / self.clients.pause_s))
            front.ask(self._rng.choice(list(self.clients.now.values())))

    # -- the life ---------------------------------------------------------------------------

    def _chaos(self) -> None:
        """Let happen what happens at a moment, and look in between."""
        for fault in self.plan:
            if fault.kind not in AT_ONCE:
                continue
            self._until(fault.at_s)
            if self.here.violations:
                return
            self.seen[f"fault: {fault.kind}"] += 1
            self.here.tell(f"{fault}")
            self._strike(fault)
        self._until(self._lasts_s)

    def _strike(self, fault: Fault) -> None:
        machine = self.machines[fault.target]
        if fault.kind == "door crash":
            self.door.crash()
        elif fault.kind == "clock jump":
            machine.jump(self._rng.choice((-1e6, -5.0, 5.0, 1e6)))
        elif fault.kind == "bit rot":
            self.here.tell(f"rots: {machine.disk.rot(self._rng)}")
        elif fault.kind == "directory crash":
            self.directory.crash(self._rng.choice((0.1, 5.0)))
        elif fault.kind == "replica crash":
            for replica in self._beside(machine):
                self.here.spawn(self.here.world, "fall", partial(self._restart, replica))
        else:
            self.here.spawn(self.here.world, "fall", lambda: self._fall(machine, fault))

    def _beside(self, machine: Machine) -> list[Replica]:
        return [one for one in self.replicas if one.machine is machine]

    def _restart(self, replica: Replica) -> None:
        replica.crash()
        if self.scaler is not None:
            return  # which has another one started, if one is wanted
        self.here.sleep(self._rng.choice((0.1, 3.0, 20.0)) * self._rng.random())
        replica.start()

    def _leave(self, machine: Machine) -> None:
        """Stop a node as it is asked to, and what runs beside it; fronts are told before."""
        self.directory.draining.add(machine.name)
        machine.stop([one.name for one in self.machines])
        for replica in self._beside(machine):
            replica.crash()

    def _fall(self, machine: Machine, fault: Fault) -> None:
        if not machine.is_up:
            return
        life = machine.lives
        if fault.kind == "graceful stop":
            self._leave(machine)
        else:
            machine.crash(power=fault.kind == "power cut")
        for replica in self._beside(machine) if fault.kind == "power cut" else ():
            replica.crash()
        self.here.sleep(self._rng.choice((0.1, 3.0, 20.0)) * self._rng.random())
        if machine.lives == life:  # else it crashed while it stopped, and was started after that
            machine.start()
        self.directory.draining.discard(machine.name)
        for replica in self._beside(machine) if self.scaler is None else ():
            replica.start()

    def _until(self, at_s: float) -> None:
        while self.here.now_s < at_s and not self.here.violations:
            self.here.sleep(min(2.0, at_s - self.here.now_s))
            self._look_into_memory()

    def _look_into_memory(self) -> None:
        """What a node has in main memory is verified: every byte of it is what was sealed."""
        truth = {extent.header.address: extent for one in self.clients.all for extent in one.made.values()}
        for machine in self.machines:
            if not machine.is_up:
                continue
            for address, data in list(records_in(machine.tiers["cpu"]).items()):
                extent = truth.get(address)
                if extent is None or data.tobytes() != extent.record.tobytes():
                    self.here.violate("unverified in memory", f"of {machine.name}")

    # -- afterwards -------------------------------------------------------------------------

    def _settle(self) -> None:
        """All is well again: everything that waits has to end."""
        if not self.faults.is_over:
            self.faults.is_over, self._well_s = True, self.here.now_s
        problems: list[str] = []
        for _ in range(SETTLES_MAX):
            self.here.sleep(SETTLE_S)
            problems = list(self._unsettled())
            if not problems or self.here.violations:
                return
        self.here.violate("for ever", "; ".join(problems))

    def _unsettled(self) -> Iterator[str]:
        erasures = self.door.erasures
        if erasures is None or erasures.unfinished:
            left = [] if erasures is None else sorted(itertools.chain(*erasures.unfinished.values()))
            yield f"the door has erasures left: {left}"
        if self.desk is not None and not self.desk.is_over:
            yield "the desk has work left"
        for front in self.fronts:
            held = {name: front.tracker.open_requests(name) for name in front.tracker.nodes}
            there = len(self.replicas if self.scaler is None else self.scaler.live)
            if len(held) < there or any(held.values()):
                yield f"a front has {held} open at its replicas"
        for machine in self.machines:
            node = machine.node
            if self.scaler is not None and self.scaler.is_away(machine):
                continue
            if node is None or not machine.is_up:
                yield f"{machine.name} is not up"
                continue
            state = state_of(node)
            stats = node.stats()
            if len(state.catalog.transfers):
                yield f"{machine.name}: {len(state.catalog.transfers)} moves"
            if len(state.pending):
                yield f"{machine.name}: {state.pending.text() or len(state.pending)} pending"
            for row in stats.tiers:
                if not row.state.startswith("off") and row.state != "up":
                    yield f"{machine.name}: {row.name} is {row.state}"
                if row.name == "s3" and row.state == "up" and (row.listed_ago_s is None or self._is_old(row)):
                    yield f"{machine.name}: the bucket is not listed"

    def _is_old(self, row: Any) -> bool:
        """The last listing began while listings may have lagged."""
        return bool(row.listed_ago_s > self.here.now_s - self._well_s)

    def _judge(self) -> None:
        """All is quiet: are the books right, is what was erased gone, and is the rest served?"""
        for machine in self.machines:
            self._judge_books(machine)
        self._judge_erased()
        for one in list(self.clients.now.values()):
            for machine in self.machines:
                self.clients.turn(one, machine, adds=False)
        self._look_into_memory()
        one = next(iter(self.clients.now.values()))
        machine = self.machines[0]
        # Asked alone: what a peer says that it has is not stored here, and it may not know that it is gone.
        for _ in range(2):
            self.clients.turn(one, machine, peers=())
            self.here.sleep(SETTLE_S)
        if not self.clients.turn(one, machine, adds=False, peers=()):
            self.here.violate("not found again", f"{one.name} at {machine.name}, where it was just stored")
        for machine in self.machines:
            assert machine.node is not None
            machine.node.check_integrity()
        if self.fronts and not self.here.violations:
            self._judge_routes()
        if self.returns is not None and not self.here.violations:
            self.returns.judge()

    def _judge_scaling(self, scaler: Scaler) -> None:
        """Nodes leave and come back: sessions go on where a copy is, and all that is judged later holds."""
        live = [one for one in self.clients.now.values() if one.turns][:4]

        def chat(until_s: float) -> None:
            while self.here.now_s < until_s and not self.here.violations:
                self.here.sleep(0.1)  # where all are full, the refusal takes no time
                self._rng.choice(self.fronts).ask(self._rng.choice(list(self.clients.now.values())))

        scaler.judge(chat)
        if not self.here.violations:
            self._judge_resumed(live)
        scaler.end()
        self._settle()

    def _judge_routes(self) -> None:
        """All is well: a session stays where it was, whichever front it comes to, until its node leaves."""
        live = [one for one in self.clients.now.values() if one.turns][:4]
        for one in live:
            served: list[str] = []
            for front in (self.fronts[0], *self.fronts):
                served.append(front.ask(one).replica)
                self.here.sleep(3 * SETTINGS.sync_s)
            if len({*served}) != 1 or not served[0]:
                self.here.violate("affinity", f"{one.name} is served by {served}, and nothing else goes on")
        for front in self.fronts:
            front.tracker.check_integrity()
            front.directory.table.check_integrity()
        if len(self.machines) > 1 and "s3" not in self.machines[0].tiers and not self.here.violations:
            self._judge_drain(live)

    def _judge_drain(self, live: Sequence[Conversation]) -> None:
        """A node leaves: what others have of its sessions, from the beginning on, a next turn finds."""
        self._leave(self.machines[0])
        self.here.sleep(WATCH_S + LISTED_S + 4 * SETTINGS.sync_s)
        self._judge_resumed(live)

    def _judge_resumed(self, live: Sequence[Conversation]) -> None:
        for one in live:
            begins = [made.header.address for made in one.made.values() if made.header.first_block == 0]
            held = {
                machine.name: [state_of(machine.node).catalog.copies(address) for address in begins]
                for machine in self.machines
                if machine.node is not None
            }
            answer = self.fronts[0].ask(one)
            is_held = any(any(copies) for copies in held.values())
            if not answer.replica or (is_held and not answer.loaded):
                what = f"{one.name}: {answer}, and these have its beginning: {held}"
                self.here.violate("not resumed", what)
            elif is_held:
                self.seen["resumed where a copy was"] += 1

    def _judge_afterwards(self) -> None:
        """What belongs to no fault: sessions that come and return, and another version of everything."""
        self.directory.draining.clear()
        Recovery(self.here, self.clients, self.machines, self._tenants, self.seen, self.seed).run()
        if not self.fronts or not self._rolls or self.here.violations:
            return
        here, clients = self.here, self.clients
        for replica in self.replicas:
            replica.start()

        def make_replica(machine: Machine, app: str, model: str) -> Replica:
            return Replica(here, self.faults, clients, machine, app, model)

        def make_front(app: str, model: str) -> Front:
            self._fronts_count += 1
            names = self._fronts_count, self.seed, app, model
            return Front(here, self.faults, self.replicas, self.directory, self.seen, *names)

        rng = random.Random(f"fleet {self.seed}")
        homes = [replica.machine for replica in self.replicas]
        fleet = Fleet(here, homes, self.replicas, self.fronts, make_replica, make_front, rng)
        live = [one for one in clients.now.values() if one.turns][-4:]
        Rollout(here, clients, fleet, live, self.seen, self.seed).judge()

    def _judge_books(self, machine: Machine) -> None:
        assert machine.node is not None
        catalog = state_of(machine.node).catalog
        cpu, nvme = machine.tiers["cpu"], machine.tiers["nvme"]
        found = [path for path in Path(machine.disk.base, "kv", "v1").rglob("*") if path.is_file()]
        there = sum(path.stat().st_size for path in found if path.suffix == ".kv")
        files_bytes = sum(path.stat().st_blocks * 512 for path in found)
        # A removal that could not be flushed counts until the next write has tried it again.
        unflushed = sum(size for path, size in nvme.ledger.litter.items() if not Path(path).exists())
        for what, said, held in (
            ("main memory", catalog.usage("cpu").bytes_accounted, cpu.bytes_held()),
            ("files", catalog.usage("nvme").bytes_accounted, there),
            ("room on the disk", nvme.bytes_held() - unflushed, files_bytes),
        ):
            if said != held:
                self.here.violate("books", f"{machine.name}: {what}: {said} bytes said, {held} held")
        if "s3" in machine.tiers:
            held = sum(
                len(stored.data)
                for key, stored in self.bucket.objects.items()
                if "/v1/" in key or "/bad/" in key
            )
            if machine.tiers["s3"].bytes_held() < held and len(self.machines) == 1:
                said = machine.tiers["s3"].bytes_held()
                self.here.violate("books", f"{machine.name}: the bucket: {said} bytes said, {held} held")

    def _judge_erased(self) -> None:
        gone = [one for one in self.clients.past if one.erased_s is not None or one.goes_on]
        held = {f"{name}": data for name, data in self._all_bytes()}
        for one in gone:
            for machine in self.machines:
                if one.turns:
                    self.clients.ghost(one, machine)
            for extent in one.made.values():
                for block in range(extent.header.blocks):
                    sample = extent.kv_of(block, 1)[:SAMPLE_BYTES]
                    places = [name for name, data in held.items() if sample in data]
                    if places:
                        self.here.violate("erased and there", f"{one.name} block {block} in {places}")
            name = one.tenant + one.session + one.number.to_bytes(4, "big")
            if any(name in self.door.kept[store] for store in STORES):
                self.here.violate("erased and there", f"{one.name} in a small store")

    def _all_bytes(self) -> Iterator[tuple[str, bytes]]:
        for machine in self.machines:
            for path in sorted(Path(machine.disk.base).rglob("*")):
                if path.is_file():
                    yield (
                        f"{machine.name}: {path.parent.name}/{path.name[:8]}{path.suffix}",
                        path.read_bytes(),
                    )
        for key, stored in self.bucket.objects.items():
            yield f"bucket: {key[:40]}", stored.data

    # -- seams ------------------------------------------------------------------------------

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Give each node its own disk and bucket where the product reaches for the system's."""
        seams: list[tuple[Any, str, Any]] = [
            (node_state, "Syscalls", self._disk),
            (files, "take_lock", lambda path: self._disk().take_lock(path)),
            (s3_client, "_connect", lambda _settings: self.bucket),
            (learner, "Syscalls", self._disk),
            (learner, "JUDGED_MIN", YOUNG_TURNS),
        ]
        before = [getattr(of, name) for of, name, _ in seams]
        for of, name, ours in seams:
            setattr(of, name, ours)
        try:
            yield
        finally:
            for (of, name, _), theirs in zip(seams, before, strict=True):
                setattr(of, name, theirs)

    def _disk(self) -> Any:
        process = self.here.current.process
        return next(machine.disk for machine in self.machines if machine.process is process)

    def _end(self, users: Process) -> None:
        """Everybody goes, so that no thread stays behind."""
        living = [process for process in self.here.processes if process is not self.here.world]
        for process in living:
            if not process.is_dead:
                self.here.kill(process)
        for machine in self.machines:
            machine.disk.died()
        while any(process.tasks for process in living):
            self.here.sleep(0.001)


def _shape(rng: random.Random, has_bucket: bool) -> Shape:
    bytes_max = {
        "cpu": rng.choice((4, 8, 30)) * RECORD_BYTES,
        "nvme": rng.choice((6, 12, 60)) * 2 * RECORD_BYTES,
    }
    s3 = S3TierSettings(warm_connections=1)
    if has_bucket:
        bytes_max["s3"] = rng.choice((30, 300)) * RECORD_BYTES
        s3 = S3TierSettings(
            bucket="kv",
            bytes_max=bytes_max["s3"],
            connections=4,
            warm_connections=1,
            rescan_s=30.0,
            read_s_max=4.0,
        )
    settings = TierSettings(
        s3=s3,
        load_s_max=5.0,
        store_s_max=10.0,
        io_threads=rng.choice((1, 2, 4)),
        store_queue_max=rng.choice((2, 16)),
        fetch_max=rng.choice((2, 16)),
        tenant_share=rng.choice((None, 0.5)),
    )
    policy = settings.policy.model_copy(update={"name": rng.choice(("lru", "type-km", "ttl"))})
    return Shape(
        tuned(settings.model_copy(update={"policy": policy}), transfer_queue_max=rng.choice((4, 64))),
        bytes_max,
    )


def live(seed: int, plan: Sequence[Fault] | None = None) -> Outcome:
    """Live one seed's life; with `plan`, under these faults instead of its own."""
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="world-", dir=memory if memory.is_dir() else None))
    try:
        return Life(seed, root, plan).run()
    finally:
        shutil.rmtree(root)
