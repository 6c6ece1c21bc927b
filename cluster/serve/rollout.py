"""Exchanges the applications of a running service one by one under traffic, and flushes before a stop.

Serve does the work (it starts the new before it stops the old, and lets the old finish); this module sets the
order, waits, and refuses changes that need a restart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from cache_tiers.actors import tier_actors
from cluster.serve.preflight import StartFailed
from configs.sections import ClusterSettings
from configs.settings import Settings

logger = logging.getLogger(__name__)

FIXED = ("server", "auth", "tiers")
"""Sections already read by processes that outlive an update: the HTTP server, the tier actors."""
ENDED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)

Until = Callable[[str, Callable[[], bool | None]], object]
"""(message on timeout, condition to wait for). Raises `StartFailed`."""


def is_running(name: str) -> bool:
    """Whether an application runs completely, with nothing of its old version. Raises `StartFailed`."""
    application = serve.status().applications[name]
    if application.status in ENDED:
        raise StartFailed(f"the replicas did not start: {application.message}")
    return bool(application.status == ApplicationStatus.RUNNING)


def refuse_what_needs_a_restart(now: Settings, wanted: Settings) -> None:
    """Raise `StartFailed`, naming the section, if a section of `FIXED` has changed."""
    for name in FIXED:
        if name == "auth":
            same = now.auth.api_keys == wanted.auth.api_keys and now.auth.admin_key == wanted.auth.admin_key
        else:
            same = getattr(now, name) == getattr(wanted, name)
        if not same:
            raise StartFailed(
                f"the section `{name}` cannot be changed while the service runs. Leave it as it is, or stop "
                "and start again"
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


class Rollout:
    """Exchanges applications in order. `until`: waits for at most as long as a start may take."""

    def __init__(self, until: Until) -> None:
        self._until = until

    def exchange(self, now: Sequence[serve.RunTarget], wanted: Sequence[serve.RunTarget]) -> None:
        """Deploy `wanted` one by one, each when the one before is up; then delete the rest of `now`.

        Raises `StartFailed` after it has restored `now`.
        """
        old = {target.name: target for target in now}
        begun: list[str] = []
        try:
            for target in wanted:
                begun.append(target.name)
                self.bring_up(target)
        except StartFailed:
            for name in reversed(begun):
                if name in old:
                    _deploy(old[name])  # without waiting: the old one has not gone yet
                else:
                    self.take_down(name)
            raise
        for name in old.keys() - set(begun):
            self.take_down(name)

    def bring_up(self, target: serve.RunTarget) -> None:
        """Deploy it and wait until all of it is the new version. Raises `StartFailed`."""
        _deploy(target)
        self._until(f"{target.name} was not ready", lambda: is_running(target.name))

    def take_down(self, name: str) -> None:
        """Delete an application without traffic. Raises nothing: a remainder costs memory, not answers."""
        try:
            serve.delete(name)
        except (RayServeException, ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("could not delete %s: %s", name, error)


def _deploy(target: serve.RunTarget) -> None:
    serve.run_many([target], wait_for_applications_running=False)


GRACE_S = 2.0
"""A flush checks the clock between extents, so it ends a little after its deadline."""


def flush_tiers(flush_s: float) -> dict[str, int]:
    """Have the tier actors write down what only main memory holds, before a stop; return counts by outcome.

    Extents `written`, `failed` and `left`, summed over nodes; `silent`: actors without an answer. Blocks for
    `flush_s` and a little (`GRACE_S`); raises nothing.
    """
    done: Counter[str] = Counter()
    flushes = [actor.flush.remote(flush_s) for actor in tier_actors().values()]
    if not flushes:
        return {}
    ready, late = ray.wait(flushes, num_returns=len(flushes), timeout=flush_s + GRACE_S)
    done["silent"] = len(late)
    for flush in ready:
        try:
            done.update(ray.get(flush))
        except RayError as error:
            logger.warning("a tier actor could not flush: %s", error)
            done["silent"] += 1
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
