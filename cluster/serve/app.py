"""Runs `samovar serve`: start, readiness, updates under traffic, shutdown.

`serve_forever` starts a Ray cluster if configured, deploys `graph.py`, prints a line when it is ready, and
on a signal lets running answers finish before it shuts everything down. SIGHUP rereads the configuration
and exchanges what is served under traffic (`rollout.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import ray
from ray import cloudpickle, serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.util import list_named_actors
from rich.console import Console

from samovar import HOME
from samovar.cache_tiers.actors import rpc, tier_actors
from samovar.cache_tiers.messages import TierStats
from samovar.cluster.engines import has_vllm
from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.environment import PRIVATE_ENVIRONMENT, PROCESS_ENVIRONMENT, required_environment
from samovar.cluster.serve.preflight import (
    check_encryption,
    check_gpus,
    check_keys_file,
    check_memory,
    check_port,
    enter_tls,
    free_memory,
    memory_needs,
    named,
    refuse_two_buckets,
    shm_free_bytes,
    with_object_store,
    with_server_secret,
)
from samovar.cluster.serve.ray_cluster import RayFolder, address_of, base_folder, join_ray
from samovar.cluster.serve.rollout import (
    EVERY_INTERFACE,
    FIXED,
    FRONT_APP,
    INGRESS_DEPLOYMENT,
    POLL_S,
    LocalServe,
    Missing,
    Patience,
    cluster_of,
    exchange,
    flush_line,
    flush_tiers,
    http_options,
    refuse_what_needs_a_restart,
    s3_demo_of,
    unhealthy_here,
)
from samovar.cluster.serve.stages import StartStages, console_of
from samovar.cluster.serve.startup_table import next_steps, startup_table
from samovar.configs.extras import ExtraMissing
from samovar.configs.loader import ConfigError
from samovar.configs.model_reference import DEFAULT_NAME
from samovar.configs.settings import Settings
from samovar.replicas.messages import REPLICA_DEPLOYMENT, ModelRefused, ReplicaInfo
from samovar.replicas.model import ModelCard, describe_model, ensure_model
from samovar.replicas.start.start_notes import forget_notes, stage_noted

if TYPE_CHECKING:
    from samovar.cluster.serve.graph import FurtherModel
    from samovar.replicas.serving.deployment import Replica

logger = logging.getLogger(__name__)


class Signals:
    """Catches the signals `numbers` inside a `with` block, in whichever thread the kernel delivers them.

    Python runs signal handlers only in the main thread, between two bytecodes. A signal delivered to another
    thread (Ray has dozens, in C++) does not wake a main thread that waits for a lock: `queue.get()` has
    blocked for minutes after a SIGINT. Here the C part of the handler writes the signal's number to a pipe,
    in any thread, and the main thread reads the pipe.

    Main thread only, like all of `signal`. The previous handlers are not restored at the end: the caller
    decides what a signal means from then on.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = frozenset(int(number) for number in numbers)
        self._reader = self._writer = self._before = -1

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # a full pipe (65,536 unread signals) drops further ones
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, _nothing)
        return self

    def wait(self) -> int:
        """Return the next signal in order of arrival; blocks until there is one."""
        while (number := os.read(self._reader, 1)[0]) not in self._numbers:
            pass  # another handler shares the pipe
        return number

    def sleep(self, command: Sequence[str], children: Collection[int]) -> NoReturn:
        """Become a process of a few MB that waits for the next signal, or for the end of one of `children`.

        Then it becomes `command`, with the signal's number behind it, still held back from it: the process
        is the same one all the time, and its children remain its own. What the wakeup pipe holds by now, or
        gets until the last thread is gone, is read from there.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        os.set_inheritable(self._reader, True)
        watched = ",".join(map(str, (self._reader, *children)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, *SLEEPER, watched, *command])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        os.close(self._reader)


HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
"""What a process that sleeps is woken by. They wait for the one that it becomes."""
SLEEPER = (
    *("-I", "-S", "-c"),
    """# samovar serve, while nothing is asked of it
import os, signal, sys
reader, *children = map(int, sys.argv[1].split(","))
asked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
def has_died():
    ended = set()
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    except ChildProcessError:
        pass
    return ended & set(children)
number = 0
while number not in asked and (came := os.read(reader, 1)):
    number = came[0]
while number not in asked:
    if has_died():
        number = signal.SIGCHLD
        break
    number = signal.sigwait(asked | {signal.SIGCHLD})
os.close(reader)
os.execv(sys.argv[2], [*sys.argv[2:], str(int(number))])
""",
)
"""Options of a Python that imports nothing but this: 3 MB of its own, and no work until a signal comes."""
WAKE = (
    *("-P", "-c"),
    "import gc, sys; sys.path.insert(0, sys.argv[1]); gc.disable();"
    "from samovar.cluster.serve.app import go_on; sys.exit(go_on(int(sys.argv[2]), int(sys.argv[3])))",
)


def interrupt_on_signals() -> None:
    """Make SIGINT and SIGTERM raise `KeyboardInterrupt` from now on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


_hung_up: list[int] = []


def note_hangups() -> None:
    """Note SIGHUPs from now on: one that comes before there is anything to reload would end the process."""
    signal.signal(signal.SIGHUP, lambda number, frame: _hung_up.append(number))


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: without a Python handler, the C part would not write to the pipe."""


EXIT_START_FAILED = 1
EXIT_INTERRUPTED = 130

STATES_S = 5.0
"""How long the tiers may take to say whether they work."""
DELETE_S = 60.0
"""As long as Serve itself waits for a deployment that is deleted."""
SETTLED_S = 1.0
"""For the answers of replicas whose time to settle is over."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model that is to be served: its settings, where it lies, and what is known of it."""

    settings: Settings
    path: Path
    card: ModelCard

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.settings.model.served_name or self.card.name


def described(
    settings: Settings, begin: Callable[[str], object] = lambda stage: None
) -> dict[str, Described]:
    """Return all models by their keys in `models`, the first as "". Raises `ModelRefused`, `StartFailed`."""
    found: dict[str, Described] = {}
    names: dict[str, str] = {}
    for key, own in settings.of_models().items():
        try:
            path = ensure_model(own.model).resolve()
            found[key] = one = Described(own, path, describe_model(own, path, begin))
        except ModelRefused as refused:
            raise named(refused, key) from refused
        adapters = own.engine.vllm.adapters if own.engine.kind == "vllm" else ()
        for name in (one.name, *own.model.aliases, *adapters) if settings.models else ():
            if names.setdefault(name, key) != key:
                raise StartFailed(f"models.{key}: {name!r} is another model's name, too. Give it its own key")
    return found


def weights_of_each(models: Mapping[str, Described], settings: Settings) -> int:
    """Return the bytes of weights of a replica: of several models, the mean over all that share a node."""
    if not settings.models:
        return models[""].card.weights_bytes
    shares = [(one.settings.cluster.replicas_on_node, one.card.weights_bytes) for one in models.values()]
    return sum(count * nbytes for count, nbytes in shares) // sum(count for count, _ in shares)


def further_of(
    models: Mapping[str, Described], settings: Settings, now: Mapping[str, FurtherModel] | None = None
) -> dict[str, FurtherModel]:
    """Return the models beside the first as they are to be served.

    `settings`: of the service, whose sections hold for all. `now`: as they are served; what goes on keeps its
    part of the machine, and with autoscaling its replicas.
    """
    from samovar.cluster.serve.graph import FurtherModel, model_app_name  # a stop needs none of it

    found: dict[str, FurtherModel] = {}
    for key, one in models.items():
        if not key:
            continue
        common = {name: getattr(settings, name) for name in FIXED}
        own = one.settings.model_copy(update=common)
        app, replicas = model_app_name(own, one.card.fingerprint), own.cluster.replicas_first
        before = (now or {}).get(key)
        if before is not None and before.app == app:
            if own.cluster.autoscaling.enabled:
                replicas = max(running_replicas(app), replicas)
            elif now is not None:
                replicas = own.cluster.replicas
            cluster = cluster_of(before.settings, own, is_scaling=True)
            own = own.model_copy(update={"cluster": cluster})
        found[key] = FurtherModel(own, str(one.path), app, replicas)
    return found


def running_replicas(app: str) -> int:
    """Return how many replicas of an application run now."""
    states = serve.status().applications[app].deployments[REPLICA_DEPLOYMENT].replica_states
    return int(states.get("RUNNING", 0))


class Service:
    """A running Samovar. `start` blocks until it is ready, `stop` until everything has ended."""

    def __init__(
        self, settings: Settings, stages: StartStages | None = None, kind: type[Replica] | None = None
    ) -> None:
        """`stages`: shows how far the start is; None: on stderr, from now on. `kind`: of the replicas."""
        self.settings = settings
        self._kind = kind
        self.stages = stages or StartStages(console_of(stderr=True))
        self._given = settings  # as configured, before the start completes them
        self.infos: list[ReplicaInfo] = []
        self.model_app = ""
        self.model_dir = ""
        self.replicas = settings.cluster.replicas_first
        self.further: dict[str, FurtherModel] = {}
        """The models beside the first, by their keys in `models`."""
        self.infos_of_further: dict[str, list[ReplicaInfo]] = {}
        self.folder: RayFolder | None = None
        self._has_environments = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what is kept of a service while its process sleeps: all but a terminal."""
        return self.__dict__ | {"stages": None}

    @property
    def has_own_ray(self) -> bool:
        """Whether Ray runs below this process, for this service."""
        return self.folder is not None

    @property
    def url(self) -> str:
        return self.settings.server.url_at(self.settings.server.host)

    @property
    def url_here(self) -> str:
        """The URL for clients on this machine."""
        server = self.settings.server
        return server.url_at(EVERY_INTERFACE.get(server.host, server.host))

    def start(self) -> None:
        """Start Ray and the applications, and block until requests are served.

        Raises `ModelRefused` or `StartFailed`; the caller then shuts down what was started.
        """
        with self.stages:
            self._start()
            self.stages.end()

    def _start(self) -> None:
        from samovar.cluster.serve.graph import model_app_name

        self.stages.begin("model", has_own_progress=True)  # a conversion's, the first time
        settings = with_server_secret(self.settings)
        check_keys_file(settings)
        check_encryption(settings)
        # Refuse what cannot be served before anything starts.
        models = described(settings, self.stages.begin)
        card, model_dir = models[""].card, models[""].path
        settings = settings.model_copy(update={"cluster": models[""].settings.cluster})
        is_here = address_of(settings.cluster) is None  # else the tiers are on other machines as well
        memory = free_memory(settings, weights_of_each(models, settings)) if is_here else None
        if memory is not None and settings.models:
            needs = {one.name: memory_needs(one.settings, one.card.weights_bytes) for one in models.values()}
            check_memory(needs, memory.free_bytes)
        settings, warning = with_object_store(settings, shm_free_bytes(), memory)
        settings = settings.model_copy(
            update={"tiers": settings.tiers.model_copy(update={"socket": models[""].settings.tiers.socket})}
        )
        self.settings = settings
        if warning:
            _warn(warning)
        self.model_dir, self.model_app = str(model_dir), model_app_name(settings, card.fingerprint)
        self.further = further_of(models, settings)
        check_gpus(settings)
        check_port(settings.server.host, settings.server.port)
        os.environ.update(required_environment(settings))  # Ray's processes inherit it
        enter_tls(settings.cluster)
        private = PRIVATE_ENVIRONMENT if settings.cluster.ray_address == "local" else {}
        for name, value in (PROCESS_ENVIRONMENT | private).items():
            os.environ.setdefault(name, value)
        forget_notes(settings.starting_dir, str(settings.server.port))
        self.stages.end()
        of = card.name if card.commit is None else f"{card.name}, commit {card.commit[:12]}"
        self.stages.say(f"starting {self.replicas} replica{'s' * (self.replicas > 1)} of {of}")
        for name, one in self.further.items():
            self.stages.say(f"starting {one.replicas} replica{'s' * (one.replicas > 1)} of {name}")
        self.stages.begin("ray")
        try:
            self._start_ray()
            names = self._deploy(str(model_dir))
        except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
            raise StartFailed(f"Ray did not start: {error}") from error
        self.stages.begin("process")
        self._wait(lambda: self._followed(LocalServe().missing(names)))
        self.stages.begin("ingress")
        self.infos = self._wait_for_replicas()
        server = self.settings.server
        self._wait(lambda: unhealthy_here(server))  # the ready line is a promise

    def tiers_here(self) -> tuple[TierStats, ...]:
        """Return this node's tiers; empty without tiers, or if they do not answer."""
        try:
            answers = rpc.ask_all(tier_actors(), "stats", timeout_s=STATES_S)
        except (ray.exceptions.RayError, RuntimeError) as error:
            logger.warning("the tiers' states are not known: %s", error)
            return ()
        here = answers.get(ray.get_runtime_context().get_node_id())
        return () if here is None else here.tiers

    def _followed(self, missing: str | None) -> str | None:
        """Show the stage that the replica furthest behind has noted, and return `missing`."""
        stage = stage_noted(self.settings.starting_dir, str(self.settings.server.port))
        if stage is not None and missing is not None:
            self.stages.begin(stage)
        return missing

    def _start_ray(self) -> None:
        cluster = self.settings.cluster
        address = address_of(cluster)
        if address is None:
            self.folder = RayFolder(base_folder(os.environ))
        self._has_environments = address is not None or any(map(has_vllm, self._settings_of_all()))
        warning = join_ray(cluster, address, self.folder, environments=self._has_environments)
        interrupt_on_signals()  # Ray has installed its own handler
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if warning:
            _warn(warning)

    def _deploy(self, model_dir: str) -> Collection[str]:
        from samovar.cluster.serve.graph import run_targets, serve_logs

        settings = self.settings
        serve.start(
            http_options=HTTPOptions(**http_options(settings.server)),
            logging_config=serve_logs(settings),
        )
        # Both at once: the ingress is up by the time the first replica has loaded its model.
        apps = run_targets(
            settings, model_dir, self.model_app, self.replicas, kind=self._kind, further=self.further
        )
        LocalServe().put(apps, apps.keys(), ())
        return apps.keys()

    def update(self, settings: Settings) -> str | None:
        """Switch to these settings under traffic, without a failed request; return who has not answered yet.

        They are in service all the same. Another model (or the same one with other serving settings) starts
        beside the old one, which is removed when its last answer has finished: their blocks have different
        namespaces, and the old ones age out. Raises `ModelRefused` or `StartFailed`; nothing has changed.
        """
        from samovar.cluster.serve.graph import model_app_name, run_targets

        refuse_what_needs_a_restart(self._given, settings)
        kinds = {one.engine.kind for one in settings.of_models().values()}
        if "vllm" in kinds and not self._has_environments:
            raise StartFailed(
                "engine.kind cannot become vllm: there was no environment with vLLM when this service was "
                "started. Start it again"
            )
        given, kept = settings, {name: getattr(self.settings, name) for name in FIXED}
        settings = settings.model_copy(update=kept)  # completed at the start: a secret, sizes that fit
        models = described(settings)
        model_dir = str(models[""].path)
        new_app = model_app_name(settings, models[""].card.fingerprint)
        check_gpus(settings)
        settings = settings.model_copy(update={"cluster": models[""].settings.cluster})
        replicas = self._replicas_to_go_on_with(settings)
        # Running replicas share this machine as configured at their start.
        cluster = cluster_of(self.settings, settings, is_scaling=new_app == self.model_app)
        settings = settings.model_copy(update={"cluster": cluster})
        further = further_of(models, settings, self.further)
        targets = partial(run_targets, is_update=True, kind=self._kind)
        now = targets(self.settings, self.model_dir, self.model_app, self.replicas, further=self.further)
        wanted = targets(settings, model_dir, new_app, replicas, further=further)
        exchange(now, wanted, LocalServe(), self._wait)
        self.settings, self.model_app, self.model_dir, self.replicas = settings, new_app, model_dir, replicas
        self._given, self.further = given, further
        try:
            self.infos = self._wait_for_replicas()
        except (StartFailed, RayServeException, ray.exceptions.RayError) as unseen:
            return str(unseen)
        return None

    def _replicas_to_go_on_with(self, settings: Settings) -> int:
        """Return the configured number of replicas; with autoscaling, as many as run now, if more."""
        if not self.settings.cluster.autoscaling.enabled:
            return settings.cluster.replicas
        return max(running_replicas(self.model_app), settings.cluster.replicas_first)

    def _settings_of_all(self) -> list[Settings]:
        return [self.settings, *(one.settings for one in self.further.values())]

    def _wait_for_replicas(self) -> list[ReplicaInfo]:
        infos = self._wait_for_those_of(self.model_app, self.settings, self.replicas)
        self.infos_of_further = {
            name: self._wait_for_those_of(one.app, one.settings, one.replicas)
            for name, one in self.further.items()
        }
        return infos

    def _wait_for_those_of(self, app: str, settings: Settings, replicas: int) -> list[ReplicaInfo]:
        handle = serve.get_deployment_handle(REPLICA_DEPLOYMENT, app)

        infos: list[ReplicaInfo] = []

        def missing() -> str | None:
            try:
                infos[:] = handle.broadcast("describe").results(timeout_s=10)
            except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
                return f"a replica does not answer yet: {error}"
            if settings.cluster.autoscaling.enabled:  # their number may change at any time
                is_complete = len(infos) >= settings.cluster.replicas_ready
            else:
                is_complete = len(infos) == replicas
            return None if is_complete else f"{len(infos)} replicas answered, not all"

        self._wait(missing)
        # Its router would report metrics ten times a second: a quarter of a percent of a core. It has read
        # how often when it was imported, before `PRIVATE_ENVIRONMENT` was set.
        handle.shutdown()
        return infos

    def _wait(self, missing: Missing) -> None:
        Patience(self.settings.server.start_timeout_s, "server.start_timeout_s").wait(missing)

    def stop(self) -> None:
        """Refuse new requests, let running answers finish, flush main memory, delete the applications."""
        in_flight = self._drain()
        if self.settings.tiers.enabled and self.settings.tiers.flush_s > 0:
            self._flush()
        # Requests still in flight have used up their grace period; Serve would extend it.
        self._delete(is_awaited=not in_flight)

    def _delete(self, *, is_awaited: bool) -> None:
        """Delete all applications at once: each takes three rounds of Serve's controller, a second apart."""
        going, replicas = set[str](), set[str]()
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # then what Serve says is waited for
            replicas = self._replicas()
        for app in (FRONT_APP, *self._model_apps()):
            try:
                serve.delete(app, _blocking=False)
                going.add(app)
            except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("could not delete the application %s: %s", app, error)
        if not is_awaited:
            return
        deadline_s, pause = time.monotonic() + DELETE_S, threading.Event()
        try:
            while left := going & serve.status().applications.keys():
                if replicas and not replicas & self._replicas():
                    return  # only their names are left, for a round or two
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"after {DELETE_S:g} s there are still {sorted(left)}")
                pause.wait(POLL_S)
        except (RayServeException, ray.exceptions.RayError, RuntimeError, TimeoutError) as error:
            logger.warning("could not see the applications go: %s", error)

    def _replicas(self) -> set[str]:
        """Return the names of the actors that serve, of ingresses and models; Ray forgets those that end."""
        of_apps = tuple(f"{app}#" for app in (FRONT_APP, *self._model_apps()))
        named = (str(row["name"]).rpartition("::")[2] for row in list_named_actors(all_namespaces=True))
        return {name for name in named if name.startswith(of_apps)}

    def _model_apps(self) -> list[str]:
        return [self.model_app, *(one.app for one in self.further.values())]

    def _drain(self) -> int:
        """Drain the ingress and return how many generations were still in flight at the deadline."""
        in_flight = 0
        deadline_s = time.monotonic() + self.settings.server.graceful_shutdown_s
        handle = serve.get_deployment_handle(INGRESS_DEPLOYMENT, FRONT_APP)
        try:
            in_flight = _in_flight(handle, "drain")
            pause = threading.Event()
            while in_flight and time.monotonic() < deadline_s:
                pause.wait(POLL_S)  # polled: the streams end in other processes
                in_flight = _in_flight(handle, "in_flight")
        except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("could not drain the ingress: %s", error)
        return in_flight

    def _flush(self) -> None:
        """Write down what only main memory holds: the replicas hand it over, then the tiers write it."""
        flush_s = self.settings.tiers.flush_s
        deadline_s = time.monotonic() + flush_s
        with _progress(f"writing conversations to disk (at most {flush_s:g} s, tiers.flush_s)"):
            try:
                handles = [serve.get_deployment_handle(REPLICA_DEPLOYMENT, app) for app in self._model_apps()]
                asyncio.run(_settle(handles, flush_s / 2))
            except (RayServeException, ray.exceptions.RayError) as error:
                logger.warning("the replicas did not hand over all of their blocks: %s", error)
            try:
                done = flush_tiers(max(0.0, deadline_s - time.monotonic()))
            except (ray.exceptions.RayError, RuntimeError) as error:
                logger.warning("could not write the cpu tier to disk: %s", error)
                return
        said = flush_line(done)
        if said:
            console_of(stderr=True).print(said, highlight=False)


def _in_flight(handle: Any, method: str) -> int:
    """Return what all ingresses have in flight; what one has that fails, or hangs, is not waited for."""
    answers = handle.broadcast(method).results(timeout_s=5, return_exceptions=True)
    for error in answers:
        if isinstance(error, Exception):
            logger.warning("an ingress does not say what it has in flight (%s): %s", method, error)
    return sum(count for count in answers if isinstance(count, int))


async def _settle(handles: Sequence[Any], within_s: float) -> None:
    """Have all replicas hand their blocks over, at the same time: a broadcast begins when it is awaited.

    One that hangs, or died, takes the time of no other, nor of the tiers that write afterwards.
    """
    asked = [
        handle.broadcast("settle", within_s).results_async(
            timeout_s=within_s + SETTLED_S, return_exceptions=True
        )
        for handle in handles
    ]
    for answers in await asyncio.gather(*asked, return_exceptions=True):
        for answer in [answers] if isinstance(answers, BaseException) else answers:
            if isinstance(answer, BaseException):
                logger.warning("a replica did not hand over all of its blocks: %r", answer)


def _warn(text: str) -> None:
    console_of(stderr=True).print(f"samovar: {text}", style="yellow", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show a spinner on a terminal, one plain line elsewhere; on stderr, as stdout has the results only."""
    console = console_of(stderr=True)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"{text} ...", highlight=False)
        yield


@contextlib.contextmanager
def s3_demo(settings: Settings) -> Iterator[Settings]:
    """Run our own S3 server and yield the settings that use it. It ends last: the tiers write to it."""
    from samovar.cluster.serve.s3_demo import S3Demo

    refuse_two_buckets(settings, with_s3_demo=True)
    demo = S3Demo(settings.model.cache_dir.expanduser() / "s3-demo")
    try:
        demo.start()
    except (RuntimeError, OSError, ExtraMissing) as error:
        raise StartFailed(f"the S3 server of --with-s3-demo did not start: {error}") from error
    try:
        yield demo.settings(settings)
    finally:
        demo.stop()


def serve_forever(
    settings: Settings,
    *,
    with_s3_demo: bool = False,
    reload: Callable[[], Settings] | None = None,
    stages: StartStages | None = None,
    on_ready: Callable[[str], object] = lambda url: None,
    on_end: Callable[[], object] = int,
    kind: type[Replica] | None = None,
) -> int:
    """Run `samovar serve` until SIGINT or SIGTERM, and return the exit code.

    `stages`: shows how far the start is. `on_ready`: is told the address for clients on this machine.
    `on_end`: called when it has ended. `kind`: of the replicas.

    A signal before it is ready, or a second one during shutdown, ends it at once. `reload` returns the
    settings to use after a SIGHUP, or raises `ConfigError`. Raises `ModelRefused`. With a Ray cluster of its
    own the process sleeps once it is ready (`Signals.sleep`), and this does not return: the same process goes
    on in `go_on`. `reload` and `on_end` must be such that they can be pickled.
    """
    errors = console_of(stderr=True)
    interrupt_on_signals()
    if reload is not None:
        note_hangups()
    try:
        with s3_demo(settings) if with_s3_demo else contextlib.nullcontext(settings) as complete:
            service = Service(complete, stages, kind)
            # The server of the demo writes its log to this process.
            return Run(service, reload, on_end, may_sleep=not with_s3_demo).begin(on_ready)
    except (StartFailed, KeyboardInterrupt) as error:  # from the demo
        return _say_ended(errors, error)
    finally:
        on_end()


@dataclass(slots=True)
class Run:
    """One `samovar serve` from its start to its end.

    Where it `may_sleep`, what is between is spent asleep, if Ray runs below this process: a driver of Ray and
    all that starts a service are 130 MB and 30 threads that would do nothing. Ray and the service go on
    without it, as their actors are detached; Ray's processes still end with this one, by the kernel's hand.
    """

    service: Service
    reload: Callable[[], Settings] | None
    on_end: Callable[[], object]
    may_sleep: bool
    address: str = ""
    """Of Ray, once it was left for a sleep."""

    def begin(self, on_ready: Callable[[str], object]) -> int:
        """Start the service, and run it until it is stopped. Returns the exit code."""

        def start(signals: Signals) -> int:
            _say_ready(console_of(), self.service)
            on_ready(self.service.url_here)
            return signal.SIGHUP if self.reload is not None and _hung_up else self._next(signals)

        return self._run(self.service.start, start)

    def go_on(self, number: int) -> int:
        """Do what a signal asks for that ended a sleep. Returns the exit code."""

        def join() -> None:
            if number == signal.SIGCHLD:
                raise StartFailed("a process of Ray has ended, and with it the service. Start it again")
            if number != signal.SIGHUP:  # a second one may end it at once
                interrupt_on_signals()
                note_hangups()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
            try:
                join_ray(self.service.settings.cluster, self.address, None)
            except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
                raise StartFailed(f"Ray does not answer any more: {error}") from error
            interrupt_on_signals()  # Ray has installed its own handler
            logging.getLogger("ray.serve").setLevel(logging.WARNING)

        def woken(_signals: Signals) -> int:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
            return number

        try:
            return self._run(join, woken)
        finally:
            self.on_end()

    def _run(self, begin: Callable[[], object], first: Callable[[Signals], int]) -> int:
        """Begin, reload as often as it is asked for, and stop. `first`: returns the first signal."""
        service, errors, has_failed = self.service, console_of(stderr=True), True
        try:
            begin()
            reloads = () if self.reload is None else (signal.SIGHUP,)
            with Signals((signal.SIGINT, signal.SIGTERM, *reloads)) as signals:
                number = first(signals)
                while number == signal.SIGHUP and self.reload is not None:
                    _update(service, self.reload, errors)
                    number = self._next(signals)
                interrupt_on_signals()
            errors.print(
                "stopping: running answers may finish; press Ctrl-C again to stop at once", highlight=False
            )
            service.stop()
            has_failed = False
        except (StartFailed, KeyboardInterrupt) as error:
            has_failed = isinstance(error, StartFailed)
            return _say_ended(errors, error)
        except SystemExit:  # while Ray starts, it handles SIGTERM itself
            has_failed = False
            return _say_ended(errors, KeyboardInterrupt())
        finally:
            ray.shutdown()  # the private cluster and everything on it
            if self.address:
                end_children()
            if service.folder is not None:
                service.folder.close(keep=has_failed)
                if has_failed:
                    errors.print(f"Ray's logs are in {service.folder.path}", highlight=False, soft_wrap=True)
        return 0

    def _next(self, signals: Signals) -> int:
        """Wait for the next signal; asleep, if that can be."""
        service = self.service
        if not (self.may_sleep and service.has_own_ray and sys.platform == "linux"):
            return signals.wait()
        self.address = str(ray.get_runtime_context().gcs_address)
        kept = os.memfd_create("samovar", 0)  # it has secrets, and no name that another could open
        with open(kept, "wb", closefd=False) as file:
            file.write(cloudpickle.dumps(self))
        if service.folder is not None:
            service.folder.keep_lock()
        signals.sleep((sys.executable, *WAKE, str(HOME), str(kept)), [child.pid for child in rays_children()])


def go_on(kept: int, number: int) -> int:
    """Go on as the `Run` in the open file `kept`, woken by a signal; returns the exit code."""
    gc.freeze()  # of all that was imported, nothing goes
    gc.enable()
    with open(kept, "rb") as file:
        file.seek(0)
        run: Run = cloudpickle.loads(file.read())
    return run.go_on(number)


RAYS = ("raylet", "gcs_server")
"""The processes of Ray that this one starts, in the order in which they end."""
GRACE_S, KILLED_S = 1.0, 5.0
"""How long one of them may take to end, as Ray itself grants it; and how long when it is killed."""


def rays_children() -> list[psutil.Process]:
    """Return the processes of Ray that this one has started, in this program or in one before."""
    found = [child for child in psutil.Process().children() if child.name() in RAYS]
    return sorted(found, key=lambda child: RAYS.index(child.name()))


def end_children() -> None:
    """End Ray's processes as `ray.shutdown` does, which knows them no longer after a sleep."""
    for child in rays_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
            _, alive = psutil.wait_procs([child], GRACE_S)
            for one in alive:
                one.kill()
            psutil.wait_procs(alive, KILLED_S)


def _update(service: Service, reload: Callable[[], Settings], errors: Console) -> None:
    """Apply the reloaded settings after a SIGHUP. On any failure the old ones stay in service."""
    try:
        with _progress("reloading the configuration"):
            unseen = service.update(s3_demo_of(service.settings, reload()))
    except (ConfigError, ModelRefused, StartFailed, RayServeException, ray.exceptions.RayError) as error:
        errors.print(
            f"samovar: the configuration is unchanged: {error}", style="red", highlight=False, soft_wrap=True
        )
        return
    if unseen is not None:
        said = f"samovar: the new configuration is in service, and not all replicas have answered: {unseen}"
        errors.print(said, style="yellow", highlight=False, soft_wrap=True)
        return
    _print_tables(console_of(), service)
    console_of().print(f"\nSamovar is updated: {service.url}", highlight=False, soft_wrap=True)


def _say_ended(errors: Console, error: StartFailed | KeyboardInterrupt) -> int:
    """Print why the service ended early, and return the exit code for it."""
    if isinstance(error, KeyboardInterrupt):
        errors.print("stopped at once", highlight=False)
        return EXIT_INTERRUPTED
    errors.print(f"samovar: {error}", style="red", highlight=False, soft_wrap=True)
    return EXIT_START_FAILED


def _say_ready(console: Console, service: Service) -> None:
    _print_tables(console, service)
    console.print(f"\nSamovar is ready: {service.url}", highlight=False, soft_wrap=True)
    steps = next_steps(
        service.infos[0],
        service.url_here,
        has_keys=service.settings.auth.has_keys,
        toy=DEFAULT_NAME,
    )
    console.print(f"\n{steps}\n", markup=False, highlight=False, soft_wrap=True)


def _print_tables(console: Console, service: Service) -> None:
    """Print what each model is served with, the first one's table first."""
    tiers = service.tiers_here()
    states = {str(tier.name): tier.state for tier in tiers}
    prices = {str(tier.name): tier.price for tier in tiers if tier.price is not None}
    console.print(startup_table(service.infos[0], len(service.infos), service.settings, states, prices))
    for name, infos in service.infos_of_further.items():
        console.print(startup_table(infos[0], len(infos), service.further[name].settings, states, prices))
