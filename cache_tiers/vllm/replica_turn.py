"""What a replica says of a turn that its vLLM computes, and what the connector tells it of that turn.

A replica knows the tenant, the session and the placement of a turn, and its clients hear with the first token
where the prompt came from: vLLM has no way for either. So a request carries the one in its
`kv_transfer_params`, and the other comes by a datagram, sent before the step that computes the first token.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from samovar.cache_tiers.blocks import TAG_BYTES, ChainMarks, LoadSource, Placement

logger = logging.getLogger(__name__)

PARAM = "samovar"
"""The name in `kv_transfer_params` of what a replica says, and in its receipt of what the tiers did."""
HEARD_BYTES = 8192
"""Of a datagram; one is about 300."""
SOCKET_BYTES = 1 << 20
NO_ROOM = (errno.EAGAIN, errno.ENOBUFS)
LEFT_MAX = 1024
"""Datagrams that are kept until the replica has room; its queue holds about ten. The oldest go first."""


@dataclass(frozen=True, slots=True)
class ReplicaTurn:
    """A turn. `key`: the replica's name for it. `salt`: what its blocks' names depend on besides the tokens.

    The engine's own salt may be another: it changes when a replica forgets what its pages hold. `placement`:
    of its blocks; None: the tiers are not used. `peers`: nodes whose tiers may hold them.
    """

    key: int
    tenant: bytes
    session: bytes
    salt: bytes = b""
    placement: Placement | None = None
    peers: tuple[str, ...] = ()

    def params(self) -> dict[str, Any]:
        """Return the request's `kv_transfer_params`, plain data."""
        said = asdict(self)
        tags = {name: said[name].hex() for name in ("tenant", "session", "salt")}
        return {PARAM: said | tags}

    @staticmethod
    def of(request: Any) -> ReplicaTurn | None:
        """Return what a request of vLLM's says; None: it is not a replica's. Raises `ValueError`."""
        said = (getattr(request, "kv_transfer_params", None) or {}).get(PARAM)
        if not isinstance(said, Mapping):
            return None
        try:
            tags = {name: bytes.fromhex(said[name]) for name in ("tenant", "session", "salt")}
        except (KeyError, TypeError) as error:  # a receipt that came back, or nonsense
            raise ValueError(f"no turn of a replica: {error!r}") from None
        try:
            turn = _TURN.validate_python({**said, **tags})
        except ValidationError as error:
            raise ValueError(f"no turn of a replica: {error.errors(include_input=False)}") from None
        if len(turn.tenant) != TAG_BYTES or len(turn.session) != TAG_BYTES:
            raise ValueError(f"tags have {TAG_BYTES} bytes")
        return turn

    def salted(self, request: Any) -> Any:
        """Return the turn's request as the tiers name it: with the turn's salt."""
        return _Salted(request, self.salt.hex() or None)


class _Salted:
    """A request with another salt."""

    def __init__(self, request: Any, cache_salt: str | None) -> None:
        self._request = request
        self.cache_salt = cache_salt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


_TURN = TypeAdapter(ReplicaTurn)


@dataclass(frozen=True, slots=True)
class PromptTold:
    """Where a prompt's blocks came from, once nothing more is loaded. `why`: not all; in a word or two.

    `asked_tokens`: those that vLLM counts as computed before because they were to be loaded.
    """

    key: int
    asked_tokens: int = 0
    tokens_by_tier: dict[LoadSource, int] = field(default_factory=dict)
    load_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class TurnTold:
    """A turn that has ended, by the marks of its chain."""

    key: int
    marks: ChainMarks


@dataclass(frozen=True, slots=True)
class StoresTold:
    """How many turns are being stored now."""

    saving: int


Told = PromptTold | TurnTold | StoresTold
_KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind) for kind in (PromptTold, TurnTold, StoresTold)
}


class ToReplica:
    """Tells a replica, at the socket `path`. Never waits: what finds no room is kept. Thread-safe.

    It is found once, here: its replica may take the path away then.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._left: deque[Told] = deque(maxlen=LEFT_MAX)
        self._stores: StoresTold | None = None  # the newest alone counts, and must not be lost
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            logger.warning("%s: no replica is there, and none is told: %s", path, error)

    def tell(self, told: Told) -> None:
        """Tell it, behind what found no room before."""
        with self._lock:
            if isinstance(told, StoresTold):
                self._stores = told
            else:
                self._left.append(told)
            self._send()

    def resend(self) -> bool:
        """Send what found no room before; return whether something of it is left."""
        with self._lock:
            return not self._send()

    def _send(self) -> bool:
        """Send what there is, as far as there is room; return whether nothing is left."""
        if self._stores is not None:
            if not self._is_sent(self._stores):
                return False
            self._stores = None
        while self._left:
            if not self._is_sent(self._left[0]):
                return False
            self._left.popleft()
        return True

    def _is_sent(self, told: Told) -> bool:
        """Send a datagram; return whether it needs no other try."""
        try:
            self._socket.send(msgpack.packb([type(told).__name__, asdict(told)]))
        except OSError as error:
            if error.errno in NO_ROOM:
                return False
            logger.info("the replica was not told: %s", error)  # it has ended
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class FromConnector:
    """Hears the connector at the socket `path`, which it makes: for this user alone. For one thread.

    Once the connector is there, `hide` takes the path away: of a replica that is killed then nothing is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.unlink()
        self._socket.bind(str(path))
        path.chmod(0o600)

    def fileno(self) -> int:
        """Return the descriptor, to wait at."""
        return self._socket.fileno()

    def heard(self) -> Iterator[Told]:
        """Yield what has come since the last call. What is nothing that the connector says is left out."""
        while True:
            try:
                data = self._socket.recv(HEARD_BYTES)
            except (BlockingIOError, OSError):
                return
            try:
                kind, said = msgpack.unpackb(data)
                yield _KINDS[kind].validate_python(said)
            except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
                logger.warning("a datagram of the connector cannot be read: %s", type(error).__name__)

    def hide(self) -> None:
        """Remove the path, and its folder, if there is nothing else in it. Who has found it is heard on."""
        with suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self.hide()
