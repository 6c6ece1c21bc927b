"""Forgets what pages hold where none can be dropped: by a salt with which no request comes again. Pure."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection

from samovar.cache_tiers.blocks import TAG_BYTES

SALTS_MAX = 65536
"""That are remembered; beyond it all are forgotten at once, and the pages with them."""


class PageSalts:
    """The salt of a request's pages: of what it is isolated by, and of how often that was forgotten.

    A page is shared by requests of one salt, so what one of its tenants wants forgotten is forgotten for all
    of the salt: pages are computed again, or come from the tiers, which erase by tenant and session.
    `secret`: nothing that one life of the replica has computed is found by another.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._forgotten = 0  # counts all
        self._epochs: OrderedDict[bytes, int] = OrderedDict()
        self._salts_of: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._known = 0

    def salt(self, tenant: bytes, salt: bytes) -> str:
        """Return the salt for a request of this tenant."""
        salts = self._salts_of.setdefault(tenant, set())
        if salt not in salts:
            if self._known >= SALTS_MAX:
                self._forget_all()
                salts = self._salts_of.setdefault(tenant, set())
            salts.add(salt)
            self._known += 1
        epoch = self._epochs.get(salt, 0)
        said = b"".join((self._secret, salt, f"{self._forgotten}.{epoch}".encode()))
        return hashlib.sha256(said).hexdigest()[:32]

    def forget(self, tags: Collection[bytes]) -> None:
        """Forget the pages of these tenants and sessions, and what running answers go on to compute."""
        for tag in tags:
            for salt in self._salts_of.pop(tag[:TAG_BYTES], ()):
                self._epochs[salt] = self._epochs.get(salt, 0) + 1
                self._known -= 1
        if len(self._epochs) > SALTS_MAX:
            self._forget_all()

    def _forget_all(self) -> None:
        self._forgotten += 1
        self._epochs.clear()
        self._salts_of.clear()
        self._known = 0
