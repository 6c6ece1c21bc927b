"""Answers that a client has named (`Idempotency-Key`), so that it can ask for them again.

An event's id is the answer's ref, and the event's number in the stream. Events of a kept answer come to every
ingress as they were said (`replicas/answers`), so that all of them number alike. See docs/adr/017.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import Headers

from samovar.cache_tiers.blocks import tenant_tag
from samovar.configs.json_text import parse_json
from samovar.configs.settings import Settings
from samovar.replicas.messages import KEPT_REF_BYTES, Keep
from samovar.router.openai import (
    AnswerShape,
    ApiError,
    Dialect,
    InvalidValue,
    ParsedChat,
    ParsedCompletion,
    Unavailable,
    Usage,
)
from samovar.router.prompt import Prompt
from samovar.router.routing import ReplicaClient

KEY_HEADER, EVENT_HEADER = "idempotency-key", "last-event-id"
REPLAYED_HEADER = "idempotent-replayed"
Request = ParsedChat | ParsedCompletion
EVENT_ID = re.compile(rf"([0-9a-f]{{{2 * KEPT_REF_BYTES}}})-([0-9]{{1,9}})")


class KeyReused(ApiError):
    """422: the key, or the event's id, belongs to another request."""

    def __init__(self, header: str) -> None:
        message = f"This {header} was sent with another request. Use a new one for each request."
        super().__init__(422, message, param=header, code="idempotency_key_reused")


class AnswerNotKept(ApiError):
    """410: the answer that is to go on is not kept any more."""

    def __init__(self) -> None:
        message = (
            f"The answer of this {EVENT_HEADER} is not kept any more (answers.kept_s, answers.unread_s). "
            "Send the request again without it, for a new answer."
        )
        super().__init__(410, message, param=EVENT_HEADER, code="answer_not_kept")


@dataclass(frozen=True, slots=True)
class AnswerName:
    """How a client names an answer. `after`: the number of the last event that it has; None: it asks for all.

    `header`: the one that it sent.
    """

    ref: bytes
    after: int | None
    header: str


@dataclass(frozen=True, slots=True)
class NamedAnswer:
    """An answer with a name: one to be made, or one that a replica keeps.

    `replica_id`: of that replica. `prompt`: the token ids that it answers. `seed`: of a sampled answer.
    `is_over`: it has all its events.
    """

    name: AnswerName
    keep: Keep
    answer_id: str
    seed: int
    replica_id: str = ""
    prompt: tuple[int, ...] = ()
    is_over: bool = False

    @property
    def is_replayed(self) -> bool:
        """Whether it was asked for before: nothing is computed for this request."""
        return bool(self.replica_id)

    def prompts(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts with the tokens that the answer was made for: they are told to the client.

        What is rendered now may have become another text (context, cuts, the date): it is not that of those
        tokens then, and must not be remembered as theirs.
        """
        if not self.is_replayed or prompts[0].token_ids == list(self.prompt):
            return prompts
        return [replace(prompts[0], token_ids=list(self.prompt), rendered=None)]


def answer_name(secret: bytes, tenant: str, headers: Headers, chars_max: int) -> AnswerName | None:
    """Return how the client names its answer, None if it does not. Raises `InvalidValue`."""
    keys, events = headers.getlist(KEY_HEADER), headers.getlist(EVENT_HEADER)
    for header, values in ((KEY_HEADER, keys), (EVENT_HEADER, events)):
        if len(values) > 1:
            raise InvalidValue(header, f"More than one {header} header was sent.")
    ref: bytes | None = None
    if keys:
        if not (0 < len(keys[0]) <= chars_max and keys[0].isascii() and keys[0].isprintable()):
            message = f"{KEY_HEADER} must be 1 to {chars_max} printable ASCII characters."
            raise InvalidValue(KEY_HEADER, message)
        ref = _digest(secret, b"key", tenant.encode(), keys[0].encode())[:KEPT_REF_BYTES]
    if not any(events):  # an empty one says that there is none (WHATWG)
        return None if ref is None else AnswerName(ref, None, KEY_HEADER)
    found = EVENT_ID.fullmatch(events[0])
    if found is None:
        raise _never_sent()
    named = bytes.fromhex(found[1])
    if ref is not None and ref != named:
        raise InvalidValue(EVENT_HEADER, f"{EVENT_HEADER} is not of the answer of this {KEY_HEADER}.")
    return AnswerName(named, int(found[2]), EVENT_HEADER)


def _never_sent() -> InvalidValue:
    message = (
        f"{EVENT_HEADER} is not the id of an event that this service has sent. Send the request without it, "
        "for a whole answer."
    )
    return InvalidValue(EVENT_HEADER, message)


def body_digest(body: bytes, route: str, session: str) -> bytes:
    """Return the digest of a request: two that ask for the same have the same. The body must be JSON."""
    plain = json.dumps(parse_json(body), sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(b"\0".join((route.encode(), session.encode(), plain))).digest()


class NamedAnswers:
    """Finds the answers of one route that clients have named."""

    def __init__(self, dialect: Dialect, secret: bytes, settings: Settings) -> None:
        self._dialect = dialect
        self._secret = secret
        self._limits = settings.limits
        self._are_kept = dialect.is_kept and settings.answers.answers_max > 0

    def name(self, request: Request, headers: Headers, tenant: str) -> tuple[AnswerName | None, Request]:
        """Return how the client names its answer, and the request.

        Answers to several prompts have no name: the request then says that it ignores that. Raises
        `InvalidValue`.
        """
        if not self._are_kept:
            return None, request
        name = answer_name(self._secret, tenant, headers, self._limits.id_chars_max)
        if name is None or isinstance(request, ParsedChat) or len(request.prompts) == 1:
            return name, request
        return None, replace(request, ignored_fields=(*request.ignored_fields, name.header))

    async def answer(
        self, client: ReplicaClient, name: AnswerName, tenant: str, session: str, body: bytes
    ) -> NamedAnswer:
        """Return the answer of a name, and which replica keeps it, if one does.

        Raises `KeyReused`, `AnswerNotKept`, or `Unavailable` if a replica that may keep it does not say so.
        """
        prefix = self._dialect.id_prefix
        asked = body_digest(body, prefix, session)
        made = _digest(self._secret, b"answer", name.ref, asked)
        keep, seed = Keep(name.ref, asked, int(time.time())), int.from_bytes(made[16:24], "big") >> 1
        answer = NamedAnswer(name, keep, f"{prefix}{made[:16].hex()}", seed)
        kept, were_all_asked = await client.kept(tenant_tag(self._secret, tenant), name.ref)
        if kept is not None:
            if kept.body != asked:
                raise KeyReused(name.header)
            keep = replace(keep, created=kept.created, is_attaching=True)
            prompt = array("I")
            prompt.frombytes(kept.prompt)
            return replace(
                answer, keep=keep, replica_id=kept.replica_id, prompt=tuple(prompt), is_over=kept.is_over
            )
        if name.after is None:
            return answer
        if not were_all_asked:
            message = "Not every replica could be asked for the answer. Try again."
            raise Unavailable(message, self._limits.retry_after_s, code="answer_unknown")
        raise AnswerNotKept


class EventIds:
    """Numbers the events of one stream, and leaves out those that its client has. Pure.

    `is_over`: the answer has all its events.
    """

    def __init__(self, name: AnswerName, is_over: bool = False) -> None:
        self._is_over = is_over
        self._ref = name.ref.hex()
        self._after = name.after or 0
        self._number = 0

    def encode(self, shape: AnswerShape, chunks: Iterable[dict[str, Any]]) -> bytes:
        """Return the server-sent events of chunks, as far as the client does not have them."""
        return b"".join(self._line() + shape.encode([chunk]) for chunk in chunks if self._is_new())

    def closing(self, shape: AnswerShape, usage: Usage, receipt: dict[str, Any], tells_usage: bool) -> bytes:
        """Return the end of the stream, of which only `usage` is an event with a number."""
        tells_usage = tells_usage and self._is_new()
        end = shape.closing(usage, receipt, tells_usage=tells_usage)
        return self._line() + end if tells_usage else end

    @property
    def is_unproven(self) -> bool:
        """Whether the answer is over, and the event that the client names has not come yet."""
        return self._is_over and self._number < self._after

    def refuse_unsent(self) -> None:
        """Raise `InvalidValue` at the end of an answer that had no such event."""
        if self._number < self._after:
            raise _never_sent()

    def _is_new(self) -> bool:
        self._number += 1
        return self._number > self._after

    def _line(self) -> bytes:
        return b"id: %s-%d\n" % (self._ref.encode(), self._number)


def _digest(secret: bytes, *parts: bytes) -> bytes:
    told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, b"samovar kept answer\0" + told, "sha256")
