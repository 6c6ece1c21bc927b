"""Looks at the service while there are streams, and passes on what each audience may see.

One task for all streams: it starts with the first and ends with the last. Its advice, the cluster's diagnosis
and what it can hold, is judged as `samovar diagnose` and `samovar plan --live` do, over the same numbers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from samovar.cache_tiers.blocks import tenant_tag
from samovar.cache_tiers.messages import NodeGlance
from samovar.replicas.messages import ReplicaGlance
from samovar.router.auth import Caller
from samovar.router.generation import EndedTurn, IngressServices, summed
from samovar.router.observe.diagnosis import (
    BY_NAME,
    Diagnosis,
    Finding,
    LiveContext,
    LiveSizing,
    SettingChange,
    Snapshot,
    diagnose,
    ingress_counts,
    settings_told,
    size_live,
)
from samovar.router.observe.live.feed import Audience, Feed, Feeds, Json, LookPace, Outbox
from samovar.router.observe.live.state import FORECAST_AT_S, Seen, Shown, owner_of, rows_of, state_of, turn_of
from samovar.router.routing import DirectoryLost

logger = logging.getLogger(__name__)


ASK_AGAIN_S = 10.0
"""Replicas without a turn are asked again after this long: one may have come or gone."""


class LiveHub:
    """The streams of one ingress. For the event loop only."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service
        self._settings = service.settings.live
        self._feeds = Feeds(self._settings, service.settings.limits.retry_after_s)
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._is_stopped = False
        self._turns = 0  # that ended while someone watched
        self._asked: tuple[tuple[int, int, tuple[bytes, ...]], float] | None = None
        self._replicas: list[ReplicaGlance] = []
        self._pace: LookPace | None = None  # outlives the task: who comes and goes hurries nothing
        self._next_s = 0.0
        self._tags: dict[str, bytes] = {}
        self._advice: Json = {}
        self._advise_at_s = -math.inf
        self.looks = 0
        """How often the service was looked at."""

    @property
    def is_closing(self) -> bool:
        """Whether streams end now: the ingress drains or stops."""
        return self._is_stopped or self._service.readiness.state == "draining"

    @contextmanager
    def stream(self, caller: Caller) -> Iterator[tuple[Outbox, asyncio.Event]]:
        """Open a stream for `caller`; give its outbox, and an event that is set when it has something.

        Raises `TooManyRequests`.
        """
        audience = Audience(caller.tenant, sees_all=caller.is_admin)
        wake = asyncio.Event()
        outbox = self._feeds.open(audience, wake.set)
        self._news.set()
        if self._task is None or self._task.done():
            self._service.usage.listeners.append(self._turn)
            self._task = asyncio.create_task(self._run())
        try:
            yield outbox, wake
        finally:
            self._feeds.close(audience, outbox)
            if not len(self._feeds):
                self._rest()

    async def stop(self) -> None:
        """End all streams and the task."""
        self._is_stopped = True
        self._feeds.wake_all()
        task = self._task
        self._rest()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._feeds.check_integrity()
        assert (self._task is None) == (self._turn not in self._service.usage.listeners), "a half-open hub"

    def _rest(self) -> None:
        if self._task is not None:
            self._service.usage.listeners.remove(self._turn)
            self._task.cancel()
            self._task = self._asked = None

    def _turn(self, turn: EndedTurn) -> None:
        self._turns += 1
        if self._feeds.turn(turn.tenant, lambda audience: turn_of(turn, audience)):
            self._news.set()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        self._pace = pace = self._pace or LookPace(self._settings, clock())
        await asyncio.sleep(max(0.0, self._next_s - clock()))
        while True:
            if self.is_closing:
                self._feeds.wake_all()
            self._news.clear()
            self._next_s = clock() + self._settings.period_s
            changed = False
            try:
                changed = await self._look() or self._service.concurrency.open_total > 0
            except Exception:  # any failure of the control plane: the next look may succeed
                logger.exception("the state for the live page could not be gathered")
            least_s, most_s = pace.after(changed, clock())
            self._next_s = clock() + least_s
            await asyncio.sleep(least_s)  # whatever happens
            try:
                async with asyncio.timeout(most_s - least_s):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _look(self) -> bool:
        """Look at the service once for all audiences; return whether anything is new for one of them."""
        self.looks += 1
        service, feeds = self._service, list(self._feeds)
        shown = {feed: self._shown(feed) for feed in feeds}
        owners = {
            owner_of(row): None
            for one in shown.values()
            for view in one.views
            for row in rows_of(view, self._settings.lineages_max)
        }
        with_stats = any(feed.audience.sees_all for feed in feeds)
        replicas, nodes = await asyncio.gather(
            self._pools(tuple(owners)), self._nodes(tuple(owners), with_stats)
        )
        seen = Seen(
            unix_s=service.usage.wall_clock(),
            infos=service.readiness.replicas,
            replicas=replicas,
            nodes=nodes,
            homes=service.directory.nodes,
            routing=service.directory.outcomes,
            names=self._names() if with_stats else {},
            advice=self._advised(replicas, nodes) if with_stats else {},
        )
        changed = [
            feed.publish(state_of(one, seen, service.model_name, self._settings, feed.state))
            for feed, one in shown.items()
        ]
        return any(changed)

    def _names(self) -> dict[bytes, str]:
        """Return the tenants' names by tag. A tag stays as it is, and an HMAC each at every look adds up."""
        secret, known = self._service.secret, self._tags
        self._tags = {
            name: known[name] if name in known else tenant_tag(secret, name) for name in self._service.tenants
        }
        return {tag: name for name, tag in self._tags.items()}

    def _advised(self, replicas: list[ReplicaGlance], nodes: dict[str, NodeGlance] | None) -> Json:
        """Return the advice to who sees the cluster: the last one, if it is new enough.

        Also while the directory is silent: without the tiers' numbers it would seem that there are none.
        """
        now_s = asyncio.get_running_loop().time()
        if nodes is None or now_s < self._advise_at_s:
            return self._advice
        service, settings = self._service, self._settings
        self._advise_at_s = now_s + settings.advice_period_s
        _, states, unsynced = service.directory.counts()
        for one in service.each_model:
            told = ({}, 0) if one.is_further else (states, unsynced)  # sessions are no model's: told once
            one.metrics.set_sessions(one.directory.outcomes, *told, one.prompts.salts_changed)
        front, _ = ingress_counts(chain.from_iterable(one.metrics.ingress() for one in service.each_model))
        snapshot = Snapshot(
            now_s,
            tuple(one.stats for one in replicas),
            tuple(one.stats for one in nodes.values() if one.stats is not None),
            tuple(service.readiness.replicas),
            settings_told(service.settings),
            front,
            tuple(service.readiness.nodes_without_tiers),
        )
        self._advice = advice_of(snapshot, settings.advice_chars_max)
        if not self._advice:  # no replica reports anything yet: as soon as one does
            self._advise_at_s = now_s
        return self._advice

    def _shown(self, feed: Feed) -> Shown:
        audience, service = feed.audience, self._service
        tenant = None if audience.sees_all else tenant_tag(service.secret, str(audience.tenant))
        count = self._settings.sessions_max
        views = service.directory.table.recent(tenant, count + 1)
        usage = service.usage
        return Shown(
            audience,
            views[:count],
            has_more=len(views) > count,
            usage=summed(usage.all().values()) if tenant is None else usage.of(str(audience.tenant)),
            since_unix_s=round(usage.since_unix_s, 3),
        )

    async def _pools(self, owners: tuple[bytes, ...]) -> list[ReplicaGlance]:
        """Ask the replicas; not again where no turn has been since, for only turns change a pool."""
        service, now_s = self._service, asyncio.get_running_loop().time()
        mark = service.directory.table.seq, self._turns, owners
        if self._asked is not None and self._asked[0] == mark and now_s - self._asked[1] < ASK_AGAIN_S:
            return self._replicas
        is_quiet = service.concurrency.open_total == 0
        self._replicas = await service.client.glance(owners)
        is_quiet = is_quiet and service.concurrency.open_total == 0
        self._asked = (mark, now_s) if is_quiet else None
        return self._replicas

    async def _nodes(self, owners: tuple[bytes, ...], with_stats: bool) -> dict[str, NodeGlance] | None:
        link = self._service.directory.link
        if link is None:
            return {}
        try:
            return await link.glance(owners, FORECAST_AT_S, with_stats)
        except DirectoryLost as lost:
            logger.debug("the live page has no news of the tiers: %s", lost)
            return None


CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""The lengths at which memory is sized: as far as the model's context goes, which is sized as well."""
DIGITS = 3
"""Significant ones: a price that is learned on changes a little with each turn."""
CUT = "…"


def advice_of(now: Snapshot, chars_max: int) -> Json:
    """Return the parts `diagnosis` and `memory` of a state; neither while no replica reports anything.

    `chars_max`: of one text.
    """
    if not now.replicas or not now.serving:
        return {}
    told: Json = {"diagnosis": _diagnosis(diagnose(now), chars_max)}
    longest = min(one.context_tokens_max for one in now.of_each_model[0].serving)
    sizing = size_live(now, [*(tokens for tokens in CONTEXTS if tokens < longest), longest])
    if sizing is not None:
        told["memory"] = _memory(sizing)
    return told


def _diagnosis(found: Diagnosis, chars_max: int) -> Json:
    conditions = {one.condition: _finding(one, chars_max) for one in found.findings}
    return {"turns": found.turns, "conditions": conditions}


def _finding(finding: Finding, chars_max: int) -> Json:
    condition = BY_NAME[finding.condition]
    told: Json = {
        "state": finding.state,
        "title": condition.title,
        "evidence": _cut(finding.evidence, chars_max),
    }
    if finding.state == "holds":
        told["symptom"] = condition.symptom
        told["changes"] = [_change(change, chars_max) for change in finding.changes]
        if finding.cause in condition.causes:
            told["cause"] = condition.causes[finding.cause]
    return told


def _change(change: SettingChange, chars_max: int) -> Json:
    told = {"brings": _cut(change.brings, chars_max)}
    if change.deed:
        return {"deed": _cut(change.deed, chars_max), **told}
    return {"setting": change.setting, "to": change.to_in_words, "now": change.now_in_words, **told}


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[: chars_max - len(CUT)] + CUT


def _memory(sizing: LiveSizing) -> Json:
    longest = sizing.context_tokens_max
    tiers = {}
    for tier in sizing.tiers:
        tiers[tier.name] = _known(latency_s=tier.latency_s, bytes_per_s=tier.bytes_per_s)
        if tier.wins_from is not None and tier.wins_from <= longest:
            tiers[tier.name]["wins_from"] = tier.wins_from
    contexts = [
        _context(one, {tier.name: tier.load_s[at] for tier in sizing.tiers})
        for at, one in enumerate(sizing.contexts)
    ]
    return {
        "bytes_per_token": sizing.bytes_per_token,
        "kv_dtype": sizing.kv_dtype,
        "pool_bytes": sizing.pool_bytes,
        "replicas": sizing.replicas,
        "context_tokens": longest,
        "contexts": contexts,
        "tiers": tiers,
    }


def _context(context: LiveContext, load_s: dict[str, float]) -> Json:
    told: Json = {"tokens": context.tokens, "kv_bytes": context.kv_bytes}
    if context.sequences is None:  # longer than the model's
        return told
    return {
        **told,
        "sequences": context.sequences,
        "running": context.running,
        **_known(
            compute_s=context.compute_s,
            alone_tokens_per_s=context.alone_tokens_per_s,
            batch_tokens_per_s=context.batch_tokens_per_s,
        ),
        "load_s": _known(**load_s),
    }


def _known(**numbers: float | None) -> Json:
    """Return the numbers that are known and that JSON can hold, to a few digits."""
    known = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
    return {name: float(f"{value:.{DIGITS}g}") for name, value in known.items()}
