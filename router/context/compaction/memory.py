"""What an ingress remembers of its conversations' cuts: where they were made, and what questions got back.

All of it can be lost: the same conversation is cut in the same place again, and its questions get the same
pieces. What is remembered counts more, so that a prompt repeats the one before to the letter also if settings
of the request have changed in between.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from samovar.router.context.compaction.pieces import FoundPiece, PieceIndex
from samovar.router.context.compaction.planner import Cut
from samovar.router.openai import ChatMessage
from samovar.router.prompt import ForgetCount

NOTE_BYTES = 200
"""About what the memory of one cut or question takes, besides its texts."""

Owner = tuple[str, bytes]
"""A session: its tenant, and its tag."""


def digest(message: ChatMessage) -> bytes:
    """Return what tells a message from another one."""
    calls = (part for call in message.calls for part in (call.call_id, call.name, call.arguments))
    made = hashlib.sha256()
    for part in (message.role, message.content, message.reasoning, message.call_id, *calls):
        raw = part.encode("utf-8", "surrogatepass")
        made.update(len(raw).to_bytes(8, "little") + raw)
    return made.digest()


def chain(messages: Sequence[ChatMessage]) -> list[bytes]:
    """Return for each number of messages, from 0, what tells a conversation that begins with these."""
    links = [hashlib.sha256(b"conversation").digest()]
    for message in messages:
        # A client may leave out what the model thought when it sends an answer back.
        bare = message if not message.reasoning else ChatMessage(
            message.role, message.content, calls=message.calls, call_id=message.call_id
        )  # fmt: skip
        links.append(hashlib.sha256(links[-1] + digest(bare)).digest())
    return links


@dataclass(slots=True)
class _SessionCuts:
    cuts: OrderedDict[bytes, Cut] = field(default_factory=OrderedDict)
    pieces: OrderedDict[bytes, tuple[FoundPiece, ...]] = field(default_factory=OrderedDict)
    index: tuple[bytes, PieceIndex] | None = None
    told: dict[str, Any] | None = None
    nbytes: int = 0

    def weigh(self) -> int:
        found = sum(len(one.piece.text) + NOTE_BYTES for got in self.pieces.values() for one in got)
        notes = NOTE_BYTES * (1 + len(self.cuts) + len(self.pieces))
        return notes + found + (0 if self.index is None else self.index[1].nbytes)


class CutMemory:
    """Remembers cuts by session, the latest used ones. Thread-safe.

    `notes_max`: cuts, and questions, of one session.
    """

    def __init__(self, sessions_max: int, notes_max: int, nbytes_max: int) -> None:
        self._sessions_max = sessions_max
        self._notes_max = notes_max
        self._nbytes_max = nbytes_max
        self._sessions: OrderedDict[Owner, _SessionCuts] = OrderedDict()
        self._nbytes = 0
        self._forgotten = ForgetCount()
        self._lock = Lock()

    @property
    def forgets(self) -> int:
        """Return how often something was forgotten on purpose: see `note`."""
        return self._forgotten.count

    def cuts(self, owner: Owner, mode: str, links: Sequence[bytes]) -> Mapping[int, Cut]:
        """Return the cuts of a conversation, by how many messages it had."""
        with self._lock:
            own = self._sessions.get(owner)
            if own is None:
                return {}
            keys = ((count, _key(mode, link)) for count, link in enumerate(links))
            return {count: own.cuts[key] for count, key in keys if key in own.cuts}

    def pieces(self, owner: Owner, question: bytes, cut: Cut) -> tuple[FoundPiece, ...] | None:
        """Return what a question got beside this cut; None: not known."""
        with self._lock:
            own = self._sessions.get(owner)
            return None if own is None else own.pieces.get(_asked(question, cut))

    def index(self, owner: Owner, key: bytes) -> PieceIndex | None:
        """Return the index of what a cut leaves out."""
        with self._lock:
            own = self._sessions.get(owner)
            return own.index[1] if own is not None and own.index is not None and own.index[0] == key else None

    def note(
        self,
        owner: Owner,
        forgets: int,
        *,
        cut: tuple[str, bytes, Cut] | None = None,
        pieces: tuple[bytes, Cut, tuple[FoundPiece, ...]] | None = None,
        index: tuple[bytes, PieceIndex] | None = None,
        told: dict[str, Any] | None = None,
    ) -> None:
        """Remember; nothing if something of the session was forgotten since `forgets` was read.

        `cut`: with mode and link; `pieces`: of a question, with its link and cut; `told`: for people.
        """
        with self._lock:
            if self._forgotten.since(forgets, *owner):
                return
            own = self._sessions.setdefault(owner, _SessionCuts())
            self._sessions.move_to_end(owner)
            if cut is not None:
                own.cuts[_key(cut[0], cut[1])] = cut[2]
                own.cuts.move_to_end(_key(cut[0], cut[1]))
            if pieces is not None:
                own.pieces[_asked(pieces[0], pieces[1])] = pieces[2]
            if index is not None:
                own.index = index
            if told is not None:
                own.told = {**(own.told or {}), **told}
            while len(own.cuts) > self._notes_max:
                own.cuts.popitem(last=False)
            while len(own.pieces) > self._notes_max:
                own.pieces.popitem(last=False)
            self._nbytes += own.weigh() - own.nbytes
            own.nbytes = own.weigh()
            while len(self._sessions) > self._sessions_max or self._nbytes > self._nbytes_max:
                _, gone = self._sessions.popitem(last=False)
                self._nbytes -= gone.nbytes

    def told(self, owner: Owner) -> dict[str, Any] | None:
        """Return what is shown of a session's cut; None: it has none."""
        with self._lock:
            own = self._sessions.get(owner)
            return None if own is None or own.told is None else dict(own.told)

    def forget(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget these sessions of a tenant, or all (None)."""
        with self._lock:
            self._forgotten.add(tenant, sessions)
            for owner in [one for one in self._sessions if one[0] == tenant]:
                if sessions is None or owner[1] in sessions:
                    self._nbytes -= self._sessions.pop(owner).nbytes

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        self._forgotten.check_integrity()
        with self._lock:
            assert len(self._sessions) <= self._sessions_max, "too many sessions"
            assert self._nbytes == sum(own.nbytes for own in self._sessions.values()), "bytes are miscounted"
            assert all(own.nbytes == own.weigh() for own in self._sessions.values()), (
                "a session is misweighed"
            )


def _key(mode: str, link: bytes) -> bytes:
    return mode.encode() + b"\0" + link


def _asked(question: bytes, cut: Cut) -> bytes:
    return b"%d\0%d\0" % (cut.first, cut.since) + question
