"""Remembers the token ids of our own replies, so that a reply sent back hits its original blocks.

Text that is tokenised again may give other tokens than the model sampled, and then the cache misses from
the first difference on. This memory maps a text that we rendered and answered to its ids: as long as the
client's next turn begins with exactly that text, those ids are used; if anything was edited, the digest
differs and nothing is found. Bounded in bytes, with LRU eviction. Pure; not thread-safe.

Entries go to other ingresses and come from them (`SharedReplies`). Packed, an entry carries a digest under
its tenant's salt. What was changed on its way, or was not packed for this salt, is refused: token ids of
another text would be a wrong prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from samovar.cache_tiers.blocks import TenantRows
from samovar.configs.json_text import parse_json
from samovar.router.openai import ChatMessage, ParsedChat

# Python's cost of an entry besides its ids: key, digests, owner, dict slots. Measured with tracemalloc.
ENTRY_OVERHEAD_BYTES = 1250

KEYED = "reply\0"
"""Sets keys apart from replies that are found by their text."""

_Key = tuple[str, bytes, int, bytes]
"""(salt, digest of the reply, characters of prompt + reply, digest of prompt + reply)"""


@dataclass(frozen=True, slots=True)
class KnownText:
    """The ids of the first `chars` characters of a rendered conversation.

    `lost`: they end with a prompt, whose reply, found by this key, came back changed.
    """

    token_ids: list[int]
    chars: int
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a reply, by which it can be forgotten: a tenant's name and a session's tag."""

    tenant: str
    session: bytes

    def is_of(self, tenant: str | None, sessions: Collection[bytes] | None) -> bool:
        """Whether this is `tenant` (None: any), and its session one of `sessions` (None: any)."""
        return (tenant is None or self.tenant == tenant) and (sessions is None or self.session in sessions)


@dataclass(frozen=True, slots=True)
class RememberedReply:
    """An entry of the memory, as another ingress may take it: see `ReplyMemory` for its digests.

    `is_lost`: see `KnownText.lost`. `turns`: replies in the conversation up to this one, itself included.
    """

    reply: bytes
    chars: int
    whole: bytes
    is_lost: bool
    token_ids: array[int]
    turns: int = 0


FORGOTTEN_MAX = 16_384
"""Sessions that are remembered one by one."""


class ForgetCount:
    """Counts what is forgotten on purpose. Thread-safe.

    A turn reads `count` when its request comes. What it would keep at its end is not kept if something of its
    session was forgotten `since`. An ingress may hear of one deletion several times, seconds apart: that
    costs turns of that session what they would keep, and no others.

    At most `sessions_max` are remembered. Of those that are dropped, the tenant with the most loses its
    oldest, and from then on all its turns count as forgotten that began before that one was.
    """

    def __init__(self, sessions_max: int = FORGOTTEN_MAX) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._sessions: TenantRows[int] = TenantRows(sessions_max)
        self._tenants: TenantRows[int] = TenantRows(sessions_max)  # by the name None: wholly forgotten then
        self._everybody = 0

    @property
    def count(self) -> int:
        """Return how much was forgotten until now."""
        with self._lock:
            return self._count

    def add(self, tenant: str | None, sessions: Collection[bytes] | None) -> None:
        """Count that these sessions of a tenant, all of it (None), or all of every tenant are forgotten."""
        with self._lock:
            self._count += 1
            if tenant is None:
                self._everybody = self._count
                return
            if sessions is None:
                self._of_tenant(tenant.encode(), self._count)
                return
            for session in sessions:
                lost = self._sessions.put(tenant.encode(), session, self._count)
                if lost is not None:
                    self._of_tenant(*lost)

    def since(self, count: int, tenant: str, session: bytes) -> bool:
        """Return whether something of a session may have been forgotten since `count` was read."""
        with self._lock:
            of_tenant = self._tenants.get(tenant.encode(), None) or 0
            of_session = self._sessions.get(tenant.encode(), session) or 0
            return count < max(self._everybody, of_tenant, of_session)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        with self._lock:
            for rows in (self._sessions, self._tenants):
                rows.check_integrity()
                latest = [value for tenant in rows.tenants() for value in rows.values(tenant)]
                assert max(latest, default=0) <= self._count, "something was forgotten in the future"
            assert self._everybody <= self._count, "something was forgotten in the future"

    def _of_tenant(self, tenant: bytes, count: int) -> None:
        lost = self._tenants.put(tenant, None, max(count, self._tenants.get(tenant, None) or 0))
        if lost is not None:
            self._everybody = max(self._everybody, lost[1])


class ReplyMemory:
    """LRU memory of replies by salt and text. `bytes_max=0` remembers nothing.

    `salt` separates those who may not see each other's replies: tenants, and within a tenant its salts.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_used = 0
        self._ids: OrderedDict[_Key, array[int]] = OrderedDict()
        self._owners: dict[_Key, Owner] = {}
        self._of_owner: dict[Owner, dict[_Key, int]] = {}  # -> turns; the latest stored last
        self._lost: set[_Key] = set()  # they end where the reply begins
        self.forgotten = ForgetCount()
        # (salt, digest of the reply) -> characters of prompt + reply -> its digests
        self._places: dict[tuple[str, bytes], dict[int, set[bytes]]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def bytes_used(self) -> int:
        """Bytes accounted to the entries held."""
        return self._bytes_used

    @property
    def forgets(self) -> int:
        """Return how often replies were forgotten on purpose: see `has_forgotten`. Safe from any thread."""
        return self.forgotten.count

    def has_forgotten(self, owner: Owner, forgets: int) -> bool:
        """Return whether replies of `owner` were forgotten on purpose since `forgets` was read.

        Safe from any thread.
        """
        return self.forgotten.since(forgets, owner.tenant, owner.session)

    def forget(self, tenant: str | None = None, sessions: Collection[bytes] | None = None) -> int:
        """Drop the replies of `tenant`, of these sessions of it only, or (None) of all; return how many."""
        self.forgotten.add(tenant, sessions)
        doomed = [key for key, owner in self._owners.items() if owner.is_of(tenant, sessions)]
        for key in doomed:
            self._drop(key)
        return len(doomed)

    def remember(
        self,
        salt: str,
        rendered_prompt: str,
        prompt_ids: Sequence[int],
        reply_text: str,
        reply_ids: Sequence[int],
        *,
        owner: Owner,
        forgets: int,
        key: str | None = None,
        turns: int = 0,
    ) -> None:
        """Store `prompt_ids + reply_ids` as the ids of `rendered_prompt + reply_text`.

        `reply_ids` decode exactly to `reply_text`, without the end-of-turn token: the caller checked. With a
        `key` the reply is found by that, and `reply_text` is what the template makes of it: "" if that is not
        what was said. Not stored: an empty reply without a key, and a reply whose session was forgotten since
        `forgets` was read, when the request came: what was cleared in between stays cleared. `turns`: see
        `RememberedReply`. May evict the least recently used entries.
        """
        if not (reply_text or key) or self.has_forgotten(owner, forgets):
            return
        reply_digest = _digest(reply_text) if key is None else _digest(KEYED, key)
        whole = _digest(rendered_prompt, reply_text)
        ids = array("I", prompt_ids)
        ids.extend(reply_ids)
        chars = len(rendered_prompt) + len(reply_text)
        self._keep(salt, RememberedReply(reply_digest, chars, whole, not reply_text, ids, turns), owner)

    def newest(self, salt: str, owner: Owner, count: int) -> list[RememberedReply]:
        """Return the `count` entries of an owner under this salt that were stored last, in their order."""
        held = [(key, turns) for key, turns in self._of_owner.get(owner, {}).items() if key[0] == salt]
        return [
            RememberedReply(reply, chars, whole, key in self._lost, self._ids[key], turns)
            for key, turns in held[-count:]
            for _, reply, chars, whole in [key]
        ]

    def take(self, salt: str, owner: Owner, replies: Iterable[RememberedReply], *, forgets: int) -> int:
        """Store what another memory has remembered, as `remember` does; return how many entries are new."""
        if self.has_forgotten(owner, forgets):
            return 0
        new = [one for one in replies if (salt, one.reply, one.chars, one.whole) not in self._ids]
        for one in new:
            self._keep(salt, one, owner)
        return len(new)

    def knows(self, salt: str, owner: Owner, text: str, key: str, turns: int) -> bool:
        """Return whether an owner's reply of that turn is remembered, by its text or by its key."""
        digests = (_digest(text), _digest(KEYED, key))
        held = self._of_owner.get(owner, {}).items()
        return any(its == turns and of == salt and reply in digests for (of, reply, _, _), its in held)

    def match(
        self, salt: str, rendered: str, replies: Iterable[str], keys: Iterable[str] = ()
    ) -> KnownText | None:
        """Find the longest known prefix of `rendered` that ends with one of `replies`.

        `replies`: the assistant's messages in it, in any order; `keys`: those of them. Reads `rendered` once,
        whatever the number of candidate entries.
        """
        places: dict[int, list[tuple[bytes, set[bytes]]]] = {}
        keyed = {_digest(KEYED, key): key for key in keys}
        for key_digest in keyed:
            for chars, digests in self._places.get((salt, key_digest), {}).items():
                if chars <= len(rendered):
                    places.setdefault(chars, []).append((key_digest, digests))
        for reply in set(replies):
            reply_digest = _digest(reply)
            for chars, digests in self._places.get((salt, reply_digest), {}).items():
                if chars <= len(rendered) and rendered.endswith(reply, 0, chars):
                    places.setdefault(chars, []).append((reply_digest, digests))
        best: _Key | None = None
        running, hashed = hashlib.sha256(), 0
        for chars in sorted(places):
            running.update(rendered[hashed:chars].encode())
            hashed = chars
            whole = running.digest()
            for reply_digest, digests in places[chars]:
                if whole in digests:
                    best = (salt, reply_digest, chars, whole)
        if best is None:
            return None
        self._ids.move_to_end(best)
        lost = keyed[best[1]] if best in self._lost else None
        return KnownText(self._ids[best].tolist(), best[2], lost)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        self.forgotten.check_integrity()
        assert self._bytes_used == sum(_cost(ids) for ids in self._ids.values())
        assert self._bytes_used <= self._bytes_max or not self._ids
        assert set(self._owners) == set(self._ids), "owners and entries differ"
        of_owners = {key: owner for owner, keys in self._of_owner.items() for key in keys}
        assert of_owners == self._owners, "the owners' lists differ from the owners"
        assert all(self._of_owner.values()), "an owner without entries is remembered"
        assert self._lost <= set(self._ids), "an entry is lost and gone"
        indexed = {
            (salt, reply, chars, whole)
            for (salt, reply), by_chars in self._places.items()
            for chars, digests in by_chars.items()
            for whole in digests
        }
        assert indexed == set(self._ids), "index and entries differ"
        assert all(self._places.values()), "an empty index row was left behind"
        assert all(digests for row in self._places.values() for digests in row.values())

    def _keep(self, salt: str, one: RememberedReply, owner: Owner) -> None:
        place = salt, one.reply, one.chars, one.whole
        if place in self._ids:
            self._drop(place)
        cost = _cost(one.token_ids)
        if cost > self._bytes_max:
            return
        self._ids[place] = one.token_ids
        self._owners[place] = owner
        self._of_owner.setdefault(owner, {})[place] = one.turns
        if one.is_lost:
            self._lost.add(place)
        self._places.setdefault((salt, one.reply), {}).setdefault(one.chars, set()).add(one.whole)
        self._bytes_used += cost
        while self._bytes_used > self._bytes_max:
            self._drop(next(iter(self._ids)))

    def _drop(self, key: _Key) -> None:
        salt, reply_digest, chars, whole = key
        self._bytes_used -= _cost(self._ids.pop(key))
        owner = self._owners.pop(key)
        del self._of_owner[owner][key]
        if not self._of_owner[owner]:
            del self._of_owner[owner]
        self._lost.discard(key)
        row = self._places[salt, reply_digest]
        row[chars].discard(whole)
        if not row[chars]:
            del row[chars]
        if not row:
            del self._places[salt, reply_digest]


def key_of(reply: ChatMessage) -> str:
    """Return what a reply is found by: all of it but its reasoning, which few clients send back."""
    return json.dumps([reply.content, [(call.name, _in_order(call.arguments)) for call in reply.calls]])


def _in_order(arguments: str) -> str:
    try:
        return json.dumps(parse_json(arguments), sort_keys=True)
    except (ValueError, RecursionError):  # cut, or a number of more digits than Python reads
        return arguments


def _digest(*texts: str) -> bytes:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.digest()


def _cost(ids: array[int]) -> int:
    return sys.getsizeof(ids) + ENTRY_OVERHEAD_BYTES


NAME_BYTES = 16
DIGEST_BYTES = hashlib.sha256().digest_size


class NotOurs(ValueError):
    """Packed bytes that were not packed under this salt, or have changed since."""


def packed(salt: bytes, reply: RememberedReply) -> tuple[bytes, bytes]:
    """Return the name of an entry, by which the same one is known, and its bytes."""
    ids = array("I", reply.token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    fields = [reply.reply, reply.chars, reply.whole, reply.is_lost, ids.tobytes(), reply.turns]
    body: bytes = msgpack.packb(fields)
    place = hmac.digest(salt, b"%b%b%d" % (reply.reply, reply.whole, reply.chars), "sha256")
    return place[:NAME_BYTES], hmac.digest(salt, body, "sha256") + body


def unpacked(salt: bytes, data: bytes, vocab_tokens: int) -> RememberedReply:
    """Return the entry in packed bytes. Raises `NotOurs`."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if not hmac.compare_digest(digest, hmac.digest(salt, body, "sha256")):
        raise NotOurs("its digest is another")
    reply, chars, whole, is_lost, raw, turns = _fields(body)
    ids = array("I")
    ids.frombytes(raw)
    if sys.byteorder == "big":
        ids.byteswap()
    if any(one >= vocab_tokens for one in ids):
        raise NotOurs("a token is not of this vocabulary")
    return RememberedReply(reply, chars, whole, is_lost, ids, turns)


def _fields(body: bytes) -> tuple[bytes, int, bytes, bool, bytes, int]:
    try:
        fields: Any = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise NotOurs(f"no MessagePack: {type(error).__name__}") from error
    kinds = (bytes, int, bytes, bool, bytes, int)
    if not isinstance(fields, list) or list(map(type, fields)) != list(kinds) or len(fields[4]) % 4:
        raise NotOurs("of another form")
    reply, chars, whole, is_lost, raw, turns = fields
    return reply, chars, whole, is_lost, raw, turns


def turns_of(asked: ParsedChat | None) -> int:
    """Return how many replies a conversation has with the answer that it asks for."""
    if asked is None:
        return 0
    return (not asked.continues) + sum([one.role == "assistant" for one in asked.messages])


class SharedReplies:
    """Entries of a reply memory, packed. Thread-safe."""

    def __init__(self, memory: ReplyMemory, lock: threading.Lock, vocab_tokens: int) -> None:
        self._memory = memory
        self._lock = lock
        self._vocab_tokens = vocab_tokens

    def knows_last(self, salt: bytes, owner: Owner, request: ParsedChat) -> bool:
        """Return whether the last reply in a conversation is remembered; also if it has none."""
        replies = [one for one in request.messages if one.role == "assistant"]
        if not replies:
            return True
        with self._lock:
            last = replies[-1]
            return self._memory.knows(salt.hex(), owner, last.content, key_of(last), len(replies))

    def newest(self, salt: bytes, owner: Owner, count: int) -> list[tuple[bytes, bytes]]:
        """Return name and bytes of the `count` entries of an owner that were stored last."""
        with self._lock:
            found = self._memory.newest(salt.hex(), owner, count)
        return [packed(salt, one) for one in found]

    def take(self, salt: bytes, owner: Owner, bodies: Sequence[bytes], *, forgets: int) -> tuple[int, int]:
        """Store packed entries; return how many were new, and how many refused: see `NotOurs`."""
        good: list[RememberedReply] = []
        for body in bodies:
            try:
                good.append(unpacked(salt, body, self._vocab_tokens))
            except NotOurs:
                continue
        with self._lock:
            return self._memory.take(salt.hex(), owner, good, forgets=forgets), len(bodies) - len(good)
