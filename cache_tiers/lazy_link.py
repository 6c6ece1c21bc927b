"""The node's link, opened when it is first wanted, and given up for good when it is down.

Most nodes never need one, and NIXL takes a second to start. Thread-safe; knows nothing of peers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cache_tiers.link import LinkDown
from cache_tiers.peers import PeerLink

logger = logging.getLogger("samovar.tiers")


class LazyLink:
    """`open_link`: raises `LinkDown`; None: there is none to be had, for `reason`."""

    def __init__(self, open_link: Callable[[], PeerLink] | None, reason: str = "") -> None:
        self._open_link = open_link
        self._lock = threading.Lock()
        self._link: PeerLink | None = None
        self._reason = reason

    @property
    def state(self) -> str:
        """nixl | ray: REASON."""
        return f"ray: {self._reason}" if self._reason else "nixl"

    def get(self) -> PeerLink:
        """Blocks while it is opened. Raises `LinkDown`."""
        with self._lock:
            if self._link is None:
                if self._reason or self._open_link is None:
                    raise LinkDown(self._reason or "no link is configured")
                try:
                    self._link = self._open_link()
                except LinkDown as error:
                    self._gone(error)
                    raise
            return self._link

    def down(self, error: LinkDown) -> None:
        """The link has said that it cannot work any more."""
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                self._gone(error)
        if link is not None:
            link.close()

    def close(self) -> None:
        """No link any more."""
        with self._lock:
            link, self._link = self._link, None
            self._reason = self._reason or "closed"
        if link is not None:
            link.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        with self._lock:
            assert self._link is None or not self._reason, "a link that is down is still there"
            link = self._link
        if link is not None:
            link.check_integrity()

    def _gone(self, error: LinkDown) -> None:
        self._reason = str(error) or type(error).__name__
        logger.warning("no NIXL on this node, other nodes' blocks come by Ray: %s", self._reason)
