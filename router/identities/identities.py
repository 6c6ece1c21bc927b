"""Who may call beside the owners of keys in the settings: keys that come and go, and tokens of an issuer.

Background threads look at the keys and fetch the issuer's keys, so that no request waits for a disk.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from samovar.configs.settings import AuthSettings
from samovar.router.auth import Caller
from samovar.router.identities.key_file import LOCK_S, USED_STEP_S, KeyRecord, KeysRefused, KeyStore
from samovar.router.identities.tokens import IssuerKeys, TokenVerifier, is_token
from samovar.router.openai import AuthenticationFailed, Unavailable

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the keys are looked at: so long a key that was revoked is good at most."""
WRITE_S = 60.0
"""Time between two writes of last uses: they come together."""
STOP_S = 5.0
SLOW_S = 4.0
"""How long a look may take on a slow disk, beside the wait for a lock."""
HANGS = "reading them does not end"


class FollowedKeys:
    """The keys of a store as they are now. `look` reads what has changed; all else only looks into memory.

    One that cannot be read for longer than its `grace_s` has no keys: what it may have revoked is not known.
    Neither has one where a look does not end. `clock`: Unix time. `monotonic`: seconds since some moment.
    """

    def __init__(
        self,
        store: KeyStore,
        retry_after_s: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._monotonic = monotonic
        self._mark: tuple[int, ...] | None = None
        self._read_s = -math.inf  # when it could be read, by `monotonic`
        self._is_followed = False
        self._keys: Mapping[bytes, KeyRecord] | None = None  # by their digests; None: they are not known
        self._used: dict[str, float] = {}
        self._write_s = 0.0
        self._problem = ""
        self._read()

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants of all keys, also of those that are over."""
        return tuple(dict.fromkeys(key.tenant for key in (self._keys or {}).values() if key.tenant))

    def owner(self, secret: bytes) -> Caller | None:
        """Return whose key that is; None: it is none of these.

        Raises `AuthenticationFailed` if it is over, `Unavailable` if the keys are not known.
        """
        keys, now_s = self._known(), self._clock()
        if keys is None:
            raise Unavailable("The API keys (auth.keys_file) cannot be read.", self._retry_after_s)
        digest = hashlib.sha256(secret).digest()
        # A table finds it: how long that takes depends on the digest, and a wanted digest cannot be made.
        key = keys.get(digest)
        if key is None or not hmac.compare_digest(bytes.fromhex(key.sha256), digest):
            return None
        state = key.state(now_s)
        if state != "valid":
            raise AuthenticationFailed(f"The API key is {state}.")
        self._used[key.id] = now_s
        return Caller(key.tenant, is_admin=key.tenant is None, credential=key.id)

    def _known(self) -> Mapping[bytes, KeyRecord] | None:
        """Return the keys by their digests; None: they are not known, or were not read for too long."""
        # A mount or a database that hangs raises nothing. Without a look there is none to wait for.
        good_s = self._store.grace_s + LOOK_S + LOCK_S + SLOW_S
        if self._keys is None or not self._is_followed or self._monotonic() - self._read_s <= good_s:
            return self._keys
        if self._problem != HANGS:
            self._problem = HANGS
            logger.error("no key of auth.keys_file is accepted: %s", HANGS)
        return None

    def look(self) -> None:
        """Read the keys if they have changed, and write down last uses if that is due. Never raises."""
        self._is_followed = True
        if self._read():
            self._note_used()

    def _read(self) -> bool:
        """Read the keys if they have changed; return whether that was possible."""
        try:
            mark = self._store.mark()
            if mark != self._mark or self._keys is None:
                self._keys = {bytes.fromhex(key.sha256): key for key in self._store.read()}
                self._mark = mark  # from before: what was written since is read at the next look
            self._problem, self._read_s = "", self._monotonic()
        except (OSError, KeysRefused) as error:
            left_s = self._read_s + self._store.grace_s - self._monotonic()
            if left_s <= 0:
                self._keys = None
            if str(error) != self._problem:  # not once a second
                logger.error("in %.0f s no key of auth.keys_file is accepted: %s", max(left_s, 0.0), error)
            self._problem = str(error)
            return False
        return True

    def _note_used(self) -> None:
        now_s, keys = self._clock(), self._keys or {}
        if now_s < self._write_s:
            return
        known = {key.id: key.used or 0 for key in keys.values()}
        used = dict(self._used)
        due = {name: at for name, at in used.items() if at - known.get(name, at) >= USED_STEP_S}
        for name in used.keys() - due.keys():
            if self._used.get(name) == used[name]:
                del self._used[name]
        if not due:
            return
        self._write_s = now_s + WRITE_S
        try:
            self._store.note_used(due)
        except (OSError, KeysRefused) as error:  # a mount that is only read
            self._write_s = now_s + USED_STEP_S
            logger.warning("the last use of API keys is not written down: %s", error)


class Identities:
    """Those who may call beside the owners of keys in the settings, at one ingress.

    Between `start` and `stop` it follows what changes; before, it has what was there when it was made.
    """

    def __init__(
        self,
        settings: AuthSettings,
        keys: KeyStore | None,
        retry_after_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        looks: list[Callable[[], None]] = []
        self._keys: FollowedKeys | None = None
        self.tokens: TokenVerifier | None = None
        if keys is not None:
            self._keys = FollowedKeys(keys, retry_after_s, clock)
            looks.append(self._keys.look)
        if settings.oidc.issuer is not None:
            issuer = IssuerKeys(settings.oidc.issuer)
            self.tokens = TokenVerifier(settings.oidc, issuer, retry_after_s, clock)
            looks.append(issuer.refresh_if_due)
        self._ended = threading.Event()
        # A thread each: an issuer that does not answer must not keep a revoked key alive.
        self._threads = [
            threading.Thread(target=self._follow, args=(look,), name="samovar-identities", daemon=True)
            for look in looks
        ]

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that are known by name."""
        of_keys = () if self._keys is None else self._keys.tenants
        return of_keys if self.tokens is None else tuple(dict.fromkeys((*of_keys, *self.tokens.tenants)))

    def owner(self, secret: bytes) -> Caller | None:
        """See `auth.Owners`."""
        if self.tokens is not None and is_token(secret):
            return self.tokens.owner(secret)
        return None if self._keys is None else self._keys.owner(secret)

    def start(self) -> None:
        """Follow what changes from now on."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        self._ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(STOP_S)

    def _follow(self, look: Callable[[], None]) -> None:
        is_failing = False
        while True:
            try:
                look()
                is_failing = False
            except Exception:  # a thread that ends would follow nothing any more
                if not is_failing:  # not once a second
                    logger.exception("who may call could not be looked at; it is tried again")
                is_failing = True
            if self._ended.wait(LOOK_S):
                return
