"""The places of one ingress's service where something of a tenant may lie, and how each is cleared."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from samovar.cache_tiers.blocks import Clear, TierError, tenant_tag
from samovar.cache_tiers.sessions import SessionsCleared
from samovar.configs.settings import Settings
from samovar.router.erasure import Cleared, Erasure, Erasures, Left, NotNoted
from samovar.router.generation import IngressServices, PromptStage
from samovar.router.openai import ApiError
from samovar.router.routing import DirectoryLost

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Keys, Sealing

REPLIES = "replies"
ASKED_MAX = 256
"""Deletions of which it is known which replicas have answered; of others all are asked again."""


def unfinished_dir(settings: Settings, secret: bytes) -> Path:
    """Return the folder of the deletions that are left: a service's with these stores, and no other's."""
    own = settings.knowledge
    url = own.postgres.url
    stores = (
        settings.nvme_dir,
        own.dir,
        None if url is None else url.get_secret_value(),
        own.postgres.schema_name,
        settings.compaction.dir,
    )
    told = hmac.digest(secret, b"samovar deletions\0" + repr(stores).encode(), "sha256").hex()
    return settings.model.cache_dir.expanduser() / "clears" / told[:16]


def add_places(service: IngressServices) -> None:
    """Tell the service's `Erasures` of each place that the service has."""
    own, places = _Places(service), service.clears.places
    if service.sealing is not None and service.directory.link is not None:
        # First: from then on nothing of it can be read, wherever it lies.
        places["sessions"] |= {"keys": partial(own.keys, service.sealing.sessions)}
    places["sessions"] |= {REPLIES: own.replies}
    for stage in _own_stages(service):  # behind: they ask the counter of the prompts whether it is too late
        places["sessions"] |= {stage.keeps: partial(_forget, stage)}
        places["made"] |= {stage.keeps: partial(_forget_entries, stage)}
    if service.directory.link is not None:
        places["sessions"] |= {"the session directory": own.directory}
    if service.ingresses is not None:
        places["sessions"] |= {"front doors": own.ingresses}
        if _own_stages(service):
            places["made"] |= {"front doors": own.ingresses_entries}
    places["sessions"] |= {"replicas": own.replicas}
    if service.directory.link is not None and service.settings.tiers.enabled:
        places["sessions"] |= {"tiers": own.tiers}
    for stage in service.stages:
        if stage.keeps and stage.is_shared:
            places["sessions"] |= {stage.keeps: partial(_forget, stage)}
    places["response"] |= {"stored responses": own.response}
    if service.ingresses is not None:
        places["response"] |= {"front doors": own.ingresses_response}


def open_sealing(settings: Settings) -> Sealing | None:
    """Return what texts that are kept on a disk are sealed with; None: they are not."""
    tiers = settings.tiers
    if tiers.encryption_key_file is None:
        return None
    from samovar.cache_tiers.actors import cluster_sealing

    return cluster_sealing(tiers.encryption_key_file, settings.nvme_dir, tiers.node.restart_backoff_s_max)


def _own_stages(service: IngressServices) -> list[PromptStage]:
    """Return the stages that keep something at this ingress, which the others ask it to clear."""
    return [stage for stage in service.stages if stage.keeps and not stage.is_shared]


def _here(service: IngressServices) -> list[str]:
    return [REPLIES, *(stage.keeps for stage in _own_stages(service))]


async def _forget(stage: PromptStage, what: Erasure) -> Cleared:
    await stage.forget(what.tenant, what.tags)
    return Cleared()


async def _forget_entries(stage: PromptStage, what: Erasure) -> Cleared:
    await stage.forget_entries(what.tenant, what.names)
    return Cleared()


class _Places:
    """Clears each place, or raises what is left there."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service
        self._asked: dict[Erasure, set[str]] = {}  # replicas that have answered, of the latest wishes

    async def keys(self, keys: Keys, what: Erasure) -> Cleared:
        """Destroy the keys of encrypted records."""
        try:
            return Cleared(keys=await asyncio.to_thread(keys.destroy, self._clears(what)))
        except TierError as error:
            raise Left(f"keys are not all destroyed ({error})") from error

    async def replies(self, what: Erasure) -> Cleared:
        """Forget stored responses and replies here. A tenant that is no longer configured has none."""
        service = self._service
        if service.sealing is not None:  # another ingress may have destroyed them
            service.sealing.sessions.forget(self._clears(what))
        for one in self._cleared(what):
            service.directory.forget(one.tenant, one.session)
        service.responses.forget(what.tenant, what.tags)
        forgotten = [await one.prompts.forget(what.tenant, what.tags) for one in service.each_model]
        return Cleared(replies=sum(forgotten))

    async def directory(self, what: Erasure) -> Cleared:
        link = self._service.directory.link
        assert link is not None
        try:
            await link.forget(self._cleared(what))
        except DirectoryLost as lost:
            message = f"replies that ingresses keep for each other are not all forgotten ({lost})"
            raise Left(message) from lost
        return Cleared()

    async def ingresses(self, what: Erasure) -> Cleared:
        assert self._service.ingresses is not None
        told = await self._service.ingresses.forget(what.tenant, what.tags)
        cleared = Cleared(replies=told.replies)
        if told.silent:
            raise Left("an ingress did not answer: replies that it keeps are not all forgotten", cleared)
        if told.unfinished:
            message = "an ingress has not forgotten all yet, and goes on"
            raise Left(message, cleared, is_known_there=True)
        return cleared

    async def ingresses_entries(self, what: Erasure) -> Cleared:
        assert self._service.ingresses is not None
        if await self._service.ingresses.forget_entries(what.tenant, what.names):
            raise Left("summaries that other ingresses made of it are not all erased")
        return Cleared()

    async def ingresses_response(self, what: Erasure) -> Cleared:
        assert self._service.ingresses is not None
        for name in what.names or ():
            if await self._service.ingresses.discard(what.tenant, name):
                raise Left("an ingress did not answer")
        return Cleared()

    async def response(self, what: Erasure) -> Cleared:
        discard = self._service.responses.discard
        return Cleared(responses=sum([await discard(what.tenant, name) for name in what.names or ()]))

    async def replicas(self, what: Erasure) -> Cleared:
        service, readiness = self._service, self._service.readiness
        there = {one.replica_id for one in readiness.replicas}
        if what.is_late and len(there) < readiness.wanted and there <= self._asked.get(what, set()):
            raise Left("not all replicas are there")  # and those that are have been asked
        counts = await service.client.clear(self._tag(what), what.tags)
        self._note_asked(what, there if counts.replicas >= len(there) else set())
        cleared = Cleared(
            pages=counts.pages,
            extents=counts.extents,
            bytes=counts.nbytes,
            replicas=counts.replicas,
            overwriting=counts.overwriting,
        )
        wanted = max(readiness.wanted, counts.replicas + counts.silent)
        if counts.replicas < wanted:
            raise Left(f"{wanted - counts.replicas} of {wanted} replicas did not answer", cleared)
        if counts.unreachable:
            is_noted = "tiers" in service.clears.places["sessions"]  # they are asked themselves, behind
            raise _unreachable(counts.unreachable, cleared, is_noted=is_noted)
        return cleared

    def _note_asked(self, what: Erasure, replica_ids: set[str]) -> None:
        self._asked.pop(what, None)
        self._asked[what] = replica_ids
        while len(self._asked) > ASKED_MAX:
            del self._asked[next(iter(self._asked))]

    async def tiers(self, what: Erasure) -> Cleared:
        """Clear nodes without replicas, too."""
        link, tenant, tags = self._service.directory.link, self._tag(what), what.tags
        assert link is not None
        clear = Clear(tenant) if tags is None else Clear(tenant, tags[0], tags[1:])
        try:
            done = list((await link.clear(clear)).values())
        except DirectoryLost as lost:
            raise Left("the tiers of some nodes did not answer") from lost
        heard = [one for one in done if one is not None]
        cleared = Cleared(extents=sum(one.extents for one in heard), bytes=sum(one.nbytes for one in heard))
        if len(heard) < len(done):
            raise Left("the tiers of some nodes did not answer", cleared)
        tiers = tuple(dict.fromkeys(tier for one in heard for tier in one.unreachable))
        if tiers:
            raise _unreachable(tiers, cleared, is_noted=all(one.is_noted for one in heard))
        return cleared

    def _clears(self, what: Erasure) -> list[Clear]:
        tenant = self._tag(what)
        return [Clear(tenant, tag) for tag in ((None,) if what.tags is None else what.tags)]

    def _tag(self, what: Erasure) -> bytes:
        return tenant_tag(self._service.secret, what.tenant)

    def _cleared(self, what: Erasure) -> tuple[SessionsCleared, ...]:
        """Return what the session tables are told, with the time of the wish."""
        tag, tags = self._tag(what), what.tags
        return tuple(SessionsCleared(tag, one, what.at_s) for one in ((None,) if tags is None else tags))


def _unreachable(tiers: tuple[str, ...], cleared: Cleared, *, is_noted: bool) -> Left:
    """Return what tiers have left. `is_noted`: they know of it also after a restart."""
    message = f"the tiers {', '.join(tiers)} did not answer; they delete their data as soon as they do"
    return Left(message, cleared, is_known_there=is_noted)


def of_sessions(tenant: str, tags: Sequence[bytes] | None) -> Erasure:
    """Return the wish to clear these sessions of a tenant, or all (None)."""
    return Erasure("sessions", tenant, None if tags is None else tuple(one.hex() for one in tags))


async def forget_here(
    service: IngressServices, tenant: str, tags: Sequence[bytes] | None
) -> tuple[int, bool]:
    """Forget sessions in this ingress's own places; return how many replies, and whether that was all.

    What is left is gone on with. Raises `NotNoted` if that could not be written down.
    """
    try:
        cleared = await service.clears.erase_here(of_sessions(tenant, tags), _here(service))
    except NotNoted:
        raise
    except ApiError:
        return 0, False
    return cleared["replies"], True


async def forget_entries_here(service: IngressServices, tenant: str, entries: Sequence[str] | None) -> bool:
    """Erase what this ingress made of these entries, or of any; return whether that is done."""
    names = None if entries is None else tuple(entries)
    try:
        await service.clears.erase_here(Erasure("made", tenant, names), _here(service))
    except ApiError:
        return False
    return True


async def forget_sessions(clears: Erasures, tenant: str, tags: tuple[bytes, ...] | None) -> None:
    """Clear these sessions of a tenant, or all (None), everywhere. Raises `ApiError` if something is left."""
    await clears.erase(of_sessions(tenant, tags))


async def forget_made(clears: Erasures, tenant: str, entries: Sequence[str] | None) -> None:
    """Erase everywhere what was made of these entries, or of any. Raises `ApiError` if something is left."""
    await clears.erase(Erasure("made", tenant, None if entries is None else tuple(entries)))
