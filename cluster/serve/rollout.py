"""Exchanges the applications of a running service one by one under traffic, and flushes before a stop.

Serve does the work (it starts the new before it stops the old, and lets the old finish); this module sets the
order, waits, and refuses changes that need a restart. `samovar deploy` does the same over REST
(`deploy/deploy.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

import httpx
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from samovar.cache_tiers.actors import rpc, tier_actors
from samovar.cluster.errors import StartFailed
from samovar.configs.cluster import ClusterSettings
from samovar.configs.settings import ServerSettings, Settings
from samovar.configs.tls import CertificateRefused

logger = logging.getLogger(__name__)

FRONT_APP, INGRESS_DEPLOYMENT = "samovar", "Ingress"
"""Of what takes requests. Not in `graph.py`, which imports all of it: a stop needs the names alone."""
MODEL_APP_PREFIX = "samovar-model-"
FIXED = ("server", "auth", "tiers")
"""Sections already read by processes that outlive an update: the HTTP server, the tier actors."""
ENDED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)

POLL_S = 0.2
EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""An address that binds every interface -> how to reach it from the same node."""

Apps = Mapping[str, Any]
"""By name, in the order in which they start, in the form that the target takes."""
Missing = Callable[[], str | None]
"""Returns what is still missing; None: nothing. Raises `StartFailed` if it will not come."""


class Patience:
    """Waits until nothing is missing, `limit_s` from now on at most. `setting`: the limit's name.

    `say`: called with each change of what is missing.
    """

    def __init__(
        self,
        limit_s: float,
        setting: str,
        say: Callable[[str], object] = logger.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = f"{limit_s:.0f} s ({setting})"
        self._say = say
        self._clock = clock
        self._ends_s = clock() + limit_s

    def wait(self, missing: Missing) -> None:
        """Block until nothing is missing. Raises `StartFailed`."""
        pause, said = threading.Event(), ""
        while what := missing():
            if what != said:
                self._say(what)
                said = what
            if self._clock() >= self._ends_s:
                raise StartFailed(f"not ready after {self._limit}: {what}")
            pause.wait(POLL_S)  # polled: Serve has no notification of readiness


class Target(Protocol):
    """Ray Serve, called in this process or over REST."""

    def put(self, apps: Apps, begun: Collection[str], gone: Collection[str]) -> None:
        """Have Serve run `apps`, without waiting: `begun` are new or changed, `gone` no longer among them."""

    def missing(self, names: Collection[str]) -> str | None:
        """Return which of these do not run, with nothing of an old version. Raises `StartFailed`."""


def exchange(now: Apps, wanted: Apps, target: Target, wait: Callable[[Missing], None]) -> None:
    """Replace the applications `now` by `wanted`. Raises what failed after it has restored `now`.

    `wait`: `Patience.wait`.
    """
    before = reached = now
    try:
        for apps in steps(now, wanted):
            # Those that another step replaces are not waited for, nor others': one of them may be broken.
            ours = [name for name in apps if is_ours(name) and apps[name] == wanted.get(name)]
            if apps.get(FRONT_APP) != before.get(FRONT_APP) or before.keys() - apps.keys():
                # What is there already may not run yet: a deployer may have died in its exchange.
                wait(partial(target.missing, [name for name in ours if before.get(name) == apps[name]]))
            reached = apps  # perhaps: what a put that fails has done is not known
            begun = _put(target, before, apps)
            before = apps
            wait(partial(target.missing, begun or ours))
    except Exception:
        if now:
            _restore(target, reached, now)
        raise


def _restore(target: Target, reached: Apps, now: Apps) -> None:
    """Have Serve run `now` again, without waiting: the old ones have not gone yet."""
    try:
        _put(target, reached, now)
    except Exception:  # what is raised is why it had to be restored
        logger.exception("could not restore %s", ", ".join(now))


def is_ours(name: str) -> bool:
    """Whether an application of Serve is one of Samovar's."""
    return name == FRONT_APP or name.startswith(MODEL_APP_PREFIX)


def _put(target: Target, before: Apps, apps: Apps) -> list[str]:
    begun = [name for name, app in apps.items() if before.get(name) != app]
    target.put(apps, begun, before.keys() - apps.keys())
    return begun


def steps(now: Apps, wanted: Apps) -> list[Apps]:
    """Return what Serve shall run, step by step, each when all of the one before runs.

    One application after the other, so that another model is up before the ingress asks it; what is not
    wanted goes last. All at once if there is no ingress yet.
    """
    found: list[Apps] = []
    if FRONT_APP in now:
        apps = now
        for name, app in wanted.items():
            if now.get(name) != app:
                apps = {**apps, name: app}
                found.append(apps)
    return found if found and found[-1].keys() == wanted.keys() else [*found, wanted]


def not_running(names: Collection[str], status: Mapping[str, str], message: Mapping[str, str]) -> str | None:
    """Return which applications do not run, with nothing of an old version; None if all do.

    Raises `StartFailed` if one has failed.
    """
    left = {name: status.get(name, "unknown") for name in sorted(names)}
    for name, state in left.items():
        if state in ENDED:
            raise StartFailed(f"{name} did not start: {message[name]}")
    if all(state == ApplicationStatus.RUNNING for state in left.values()):
        return None
    return ", ".join(f"{name} is {state}" for name, state in left.items())


class LocalServe:
    """Ray Serve in this process, a `Target`."""

    def put(self, apps: Apps, begun: Collection[str], gone: Collection[str]) -> None:
        """See `Target`. An application that cannot be deleted costs memory, not answers: only logged."""
        if begun:
            # We wait ourselves: Serve would wait for ever for a replica that cannot be placed.
            serve.run_many([apps[name] for name in begun], wait_for_applications_running=False)
        for name in gone:
            try:
                serve.delete(name)
            except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("could not delete %s: %s", name, error)

    def missing(self, names: Collection[str]) -> str | None:
        """See `Target`. Ray or Serve that does not answer is waited for, too."""
        try:
            apps = serve.status().applications
        except (RayServeException, ray.exceptions.RayError) as error:
            return f"Serve does not answer: {error}"
        status = {name: app.status.value for name, app in apps.items()}
        return not_running(names, status, {name: app.message for name, app in apps.items()})


def http_options(server: ServerSettings) -> dict[str, Any]:
    """Return what Serve's proxies listen with; the guard in them renews the certificate (`proxy_guard`)."""
    options: dict[str, Any] = {"host": server.host, "port": server.port}
    if (files := server.tls) is not None:
        options |= {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)}
        if files.client_ca is not None:
            options["ssl_ca_certs"] = str(files.client_ca)
    return options


def unhealthy_here(server: ServerSettings) -> str | None:
    """Return why this node's proxy does not serve requests; None if it does."""
    url, files = server.url_at(EVERY_INTERFACE.get(server.host, server.host)), server.tls
    try:
        # trust_env: a proxy for external addresses cannot reach this machine.
        answer = httpx.get(
            f"{url}/health", timeout=5.0, trust_env=False, verify=True if files is None else files.pin()
        )
    except (httpx.TransportError, CertificateRefused) as error:
        return f"{url}/health does not answer ({error})"
    return None if answer.status_code == httpx.codes.OK else f"{url}/health answered {answer.text[:200]}"


def refuse_what_needs_a_restart(now: Settings, wanted: Settings) -> None:
    """Raise `StartFailed`, naming what has changed and was read once, when this service started.

    That is each section of `FIXED`, the cluster but for its number of replicas, and what proxies know.
    """
    from samovar.router.proxy import read_by_proxies  # a stop needs none of it

    for name in FIXED:
        if name == "auth":
            # The server's secret is drawn where none is given. Keys in auth.keys_file are followed anyway.
            same = wanted.auth == now.auth.model_copy(update={"server_secret": wanted.auth.server_secret})
        else:
            same = getattr(now, name) == getattr(wanted, name)
        if not same:
            raise StartFailed(
                f"the section `{name}` cannot be changed while the service runs. Leave it as it is, or stop "
                "and start again"
            )
    kept = {f"cluster.{name}": value for name, value in now.cluster if name != "replicas"}
    asked = {f"cluster.{name}": value for name, value in wanted.cluster} | read_by_proxies(wanted)
    for name, value in (kept | read_by_proxies(now)).items():
        if asked[name] != value:
            raise StartFailed(
                f"{name} cannot be changed while the service runs: it is {value!s}, and {asked[name]!s} was "
                "given. Leave it as it is, or stop and start again"
            )


def cluster_of(now: Settings, wanted: Settings, is_scaling: bool) -> ClusterSettings:
    """Return the cluster section to continue with: the cluster stays, and when scaling so do replicas."""
    replicas = now.cluster.replicas if is_scaling else wanted.cluster.replicas
    return now.cluster.model_copy(update={"replicas": replicas})


def s3_demo_of(now: Settings, wanted: Settings) -> Settings:
    """Return `wanted` with the S3 server of `--with-s3-demo`, if the service runs with one."""
    if wanted.tiers.s3.bucket is not None or now.tiers.s3.bucket is None:
        return wanted
    tiers = wanted.tiers.model_copy(update={"s3": now.tiers.s3})
    return wanted.model_copy(update={"tiers": tiers})


GRACE_S = 2.0
"""A flush checks the clock between extents, so it ends a little after its deadline."""


def flush_tiers(flush_s: float) -> dict[str, int]:
    """Have the tier actors write down what only main memory holds, before a stop; return counts by outcome.

    Extents `written`, `failed` and `left`, summed over nodes; `silent`: actors without an answer. Blocks for
    `flush_s` and a little (`GRACE_S`); raises nothing.
    """
    done: Counter[str] = Counter()
    actors = tier_actors()
    answers = rpc.ask_all(actors, "flush", flush_s, timeout_s=flush_s + GRACE_S)
    if actors:
        done["silent"] = len(actors) - len(answers)
    for counts in answers.values():
        done.update(counts)
    return dict(done)


def flush_line(done: dict[str, int]) -> str:
    """Return the outcome of a flush as text for the user; "" if there is nothing to report."""
    lost = done.get("failed", 0) + done.get("left", 0)
    said = []
    if done.get("written"):
        said.append(f"{done['written']:,} extents written")
    if lost:
        said.append(f"{lost:,} not written: their conversations will be recomputed")
    if done.get("silent"):
        said.append(f"{done['silent']} nodes did not answer")
    return "; ".join(said)
