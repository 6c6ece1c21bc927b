"""Which ingresses are dead, as the cluster knows: asked before a tenant is refused on their account."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

WAIT_S = 0.1
"""How long a question of an ingress waits for the cluster's answer."""
PAUSE_S = 0.1
"""After a look there is none for so long: a tenant that asks in vain must not keep the cluster busy."""


class IngressDeaths:
    """Looks for dead ingresses, in a thread, because GCS may hang. Thread-safe.

    `is_dead`: of an actor, may raise and hang. `bury`: called in the thread for each one that is dead.
    """

    def __init__(
        self,
        is_dead: Callable[[str], bool],
        bury: Callable[[str], None],
        *,
        wait_s: float = WAIT_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._is_dead = is_dead
        self._bury = bury
        self._wait_s = wait_s
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._looked: threading.Event | None = None
        self._began_s = 0.0
        self._looks_again_s = 0.0
        self._found = False

    def look(self, actors: Mapping[str, str]) -> bool:
        """Return whether one of the ingresses was found dead just now. `actors`: name -> its actor."""
        now_s = time.monotonic()
        with self._lock:
            looked = self._looked
            if looked is None:
                if not actors or now_s < self._looks_again_s:
                    return False
                looked = self._looked = threading.Event()
                self._began_s = now_s
                threading.Thread(
                    target=self._look, args=(dict(actors), looked), name="ingress-deaths", daemon=True
                ).start()
            left_s = self._wait_s - (now_s - self._began_s)
        return looked.wait(max(0.0, left_s)) and self._found

    def _look(self, actors: dict[str, str], looked: threading.Event) -> None:
        found = False
        for ingress, actor in actors.items():
            try:
                if self._is_dead(actor):
                    self._bury(ingress)
                    found = True
            except Exception:  # GCS unavailable: it is forgotten when it was silent for long
                logger.exception("it is not known whether ingress %s lives", ingress[:8])
        with self._lock:
            self._found = found
            self._looked = None
            self._looks_again_s = time.monotonic() + self._pause_s
        looked.set()
