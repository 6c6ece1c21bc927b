"""Stored responses (`store` of /v1/responses) that any ingress finds, whichever made them.

Each ingress has those that it made or has used; the session directory has all, in memory. What is deleted
is deleted there first, and then at all ingresses (`peers.py`).
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgpack

from samovar.cache_tiers.sessions import Item
from samovar.configs.optional_sections import IngressSettings
from samovar.router.openai import Unavailable
from samovar.router.responses import ResponseStore, StoredResponse
from samovar.router.routing import DirectoryLost, SessionDirectory

logger = logging.getLogger(__name__)

DIGEST_BYTES = sha256().digest_size


class SharedResponses(ResponseStore):
    """A store whose responses are told to the session directory, and asked for there. Not thread-safe.

    `tag_of`: a tenant's tag; `salt_of`: what its items are packed under.
    """

    def __init__(
        self,
        count_max: int,
        bytes_max: int,
        *,
        directory: SessionDirectory,
        settings: IngressSettings,
        tag_of: Callable[[str], bytes],
        salt_of: Callable[[str], bytes],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(count_max, bytes_max)
        self._directory = directory
        self._settings = settings
        self._tag_of = tag_of
        self._salt_of = salt_of
        self._wall_clock = wall_clock
        self._untold: list[Item] = []
        self._fetches = 0
        self._discarded: set[tuple[str, str]] = set()  # while something is fetched

    def put(self, tenant: str, response_id: str, stored: StoredResponse, *, forgets: int) -> bool:
        """Keep a response as `ResponseStore` does; `tell` sends it to the directory.

        With the time when its request came: a deletion since then, of which this ingress has not heard (it
        ends, and is not asked any more), covers it there.
        """
        if not super().put(tenant, response_id, stored, forgets=forgets):
            return False
        if self._is_on:
            self._untold += self._items(tenant, response_id, stored)
        return True

    async def tell(self) -> None:
        """Tell the directory of what was put; if it does not answer, other ingresses do not find it."""
        items, self._untold = self._untold, []
        link = self._directory.link
        if not items or link is None:
            return
        try:
            await link.keep(tuple(items), ())
        except DirectoryLost as lost:
            logger.warning("a stored response is known to this ingress only: %s", lost)

    async def fetch(self, tenant: str, wanted_id: str) -> bool:
        """Take over the response of that id, or with an item of that id; return whether there is one.

        Raises `Unavailable` if the directory does not answer: there may be one.
        """
        link = self._directory.link
        if link is None or not self._is_on:
            return False
        forgets, tag, salt = self.forgets, self._tag_of(tenant), self._salt_of(tenant)
        self._fetches += 1
        try:
            found = await link.kept(tag, "response", _name(salt, wanted_id))
            fields = None if found is None else _unpacked(salt, found.body)
            if isinstance(fields, str):  # an item's: the response's id
                wanted_id = fields
                found = await link.kept(tag, "response", _name(salt, wanted_id))
                fields = None if found is None else _unpacked(salt, found.body)
            if not isinstance(fields, StoredResponse) or (tenant, wanted_id) in self._discarded:
                return False
            return super().put(tenant, wanted_id, fields, forgets=forgets)
        except DirectoryLost as lost:
            message = f"It is not known whether {wanted_id[:64]!r} is stored: the session directory is away."
            raise Unavailable(message, 1.0, code="directory_lost") from lost
        finally:
            self._fetches -= 1
            if not self._fetches:
                self._discarded.clear()

    def discard_here(self, tenant: str, response_id: str) -> bool:
        """Delete a tenant's response from this store; return whether there was one.

        What is fetched at this moment, and was found before, is not kept.
        """
        if self._fetches:
            self._discarded.add((tenant, response_id))
        return self.delete(tenant, response_id)

    async def discard(self, tenant: str, response_id: str) -> bool:
        """Delete a tenant's response here and in the directory; return whether there was one.

        Raises `Unavailable` if the directory does not answer.
        """
        was_here = self.discard_here(tenant, response_id)
        link = self._directory.link
        if link is None or not self._is_on:
            return was_here
        try:
            name = _name(self._salt_of(tenant), response_id)
            was_there = await link.discard(self._tag_of(tenant), "response", name)
        except DirectoryLost as lost:
            message = "The response is not deleted everywhere: the session directory is away. Repeat it."
            raise Unavailable(message, 1.0, code="directory_lost") from lost
        # A fetch that began meanwhile may have found it there.
        return self.discard_here(tenant, response_id) or was_there or was_here

    @property
    def _is_on(self) -> bool:
        return self._settings.kept_bytes_max > 0

    def _items(self, tenant: str, response_id: str, stored: StoredResponse) -> list[Item]:
        salt, tag = self._salt_of(tenant), self._tag_of(tenant)
        whole = [stored.response, stored.messages, stored.session, list(stored.items)]
        bodies: dict[str, object] = {response_id: whole} | dict.fromkeys(stored.items, response_id)
        return [
            Item(
                tag,
                stored.session,
                "response",
                _name(salt, one),
                _packed(salt, body),
                stored.began_unix_s,
                self._wall_clock() + self._settings.kept_s_max,
            )
            for one, body in bodies.items()
        ]


def _name(salt: bytes, given_id: str) -> bytes:
    return hmac.digest(salt, b"response\0" + given_id.encode("utf-8", "surrogatepass"), "sha256")


def _packed(salt: bytes, body: object) -> bytes:
    data: bytes = msgpack.packb(body)
    return hmac.digest(salt, data, "sha256") + data


def _unpacked(salt: bytes, data: bytes) -> StoredResponse | str | None:
    """Return a response, or the id of that which an item belongs to; None if the bytes have changed."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, hmac.digest(salt, body, "sha256")):
        logger.error("a stored response has changed on its way: it is not used")
        return None
    fields: Any = msgpack.unpackb(body)
    if isinstance(fields, str):
        return fields
    response, messages, session, items = fields
    return StoredResponse(response, messages, session, tuple(items))
