"""Resumes an answer: on another replica if its replica dies or stalls, for a client that asks for it again.

The tokens passed on so far are known for every answer of a request. If the replica is lost, the whole
request is sent again as long as no tokens were passed on; otherwise each unfinished answer is resumed on
its own from its last token (`messages.Resume`). Sampling depends only on seed and position, so the
continuation is the same as without the loss. `Progress` and `Trials` decide and are pure; `resuming` reads
the streams.

A client asks again for an answer that it has named (`Idempotency-Key`). An event's id is the answer's ref,
and the event's number in the stream. Events of a kept answer come to every ingress as they were said
(`replicas/answers`), so that all of them number alike. See docs/adr/017.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

from starlette.datastructures import Headers

from samovar.cache_tiers.blocks import tenant_tag
from samovar.configs.json_text import parse_json
from samovar.configs.settings import RouterSettings, Settings
from samovar.replicas.messages import (
    KEPT_REF_BYTES,
    Admitted,
    Delta,
    Event,
    Failed,
    GenerateRequest,
    Keep,
    Refused,
    Resume,
    SamplingParams,
)
from samovar.router.generation.response_sender import BoundedWaits
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
from samovar.router.routing import ReplicaClient, ReplicaFailed, ReplicaLost

logger = logging.getLogger(__name__)


Stream = AsyncGenerator[list[Event], None]


class EventPump:
    """Async context manager that reads several replica streams as one, with a timeout.

    Of each stream one message is read ahead: what comes behind it becomes one, while the client is slow. On
    exit all streams are closed, which cancels them on their replicas.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = list(streams)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._came: deque[tuple[int, list[Event], asyncio.Future[None]]] = deque()
        self._failures: deque[BaseException] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._waits = BoundedWaits()

    async def __aenter__(self) -> EventPump:
        for index, stream in enumerate(self._streams):
            task = self._loop.create_task(self._read(index, stream))
            task.add_done_callback(self._ended)
            self._tasks.add(task)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waits.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in self._streams), return_exceptions=True)

    async def next(self, silence_s: float | None = None) -> tuple[int, list[Event]] | None:
        """Return (index of the stream, its next events); None if all streams were silent for `silence_s`.

        No events are lost after a None. Raises StopAsyncIteration when all streams have ended, and whatever
        a stream raises.
        """
        while not self._came:
            if self._failures:
                raise self._failures.popleft()
            if not self._tasks:
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            try:
                await (self._reader if silence_s is None else self._waits.wait(self._reader, silence_s))
            except TimeoutError:
                return None
            finally:
                self._reader = None
        index, events, taken = self._came.popleft()
        if not taken.done():
            taken.set_result(None)
        return index, events

    async def _read(self, index: int, stream: Stream) -> None:
        async for events in stream:
            taken = self._loop.create_future()
            self._came.append((index, events, taken))
            self._wake()
            await taken

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.append(failure)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


Outcome = Literal["resumed", "gave_up"]
Count = Callable[[Outcome], None]

PAUSE_S, PAUSE_GROWTH, PAUSE_S_MAX = 0.05, 4.0, 1.0
"""Pause after the first loss, its growth factor per further loss, and its maximum."""


class ReplicaSilent(ReplicaLost):
    """The replica sent nothing for too long, not even a heartbeat."""


class ReplicaFull(ReplicaLost):
    """The replica has no room yet for an answer that was lost elsewhere."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.retry_after_s = refused.retry_after_s


class Progress:
    """Tokens passed on so far, for each unfinished answer to one request."""

    def __init__(self, ask: GenerateRequest) -> None:
        self._ask = ask
        if ask.resume is None:
            self._open: dict[int, list[int]] = {choice: [] for choice in range(ask.n)}
        else:
            self._open = {ask.resume.choice: list(ask.resume.token_ids)}

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended."""
        return not self._open

    def take(self, delta: Delta) -> None:
        """Record a delta as passed on. Raises `ReplicaFailed` if its choice is over or was not requested."""
        if delta.index not in self._open:
            raise ReplicaFailed(f"a delta of choice {delta.index}, which is over or was not asked for")
        self._open[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            del self._open[delta.index]

    def asks(self) -> list[GenerateRequest]:
        """Return the requests for the rest: the original request, or one for each unfinished answer.

        The log-probabilities of a prompt came before the first token, and are not computed again.
        """
        if self._ask.resume is None and len(self._open) == self._ask.n and not any(self._open.values()):
            return [self._ask]
        sampling = replace(self._ask.sampling, prompt_logprobs=None)
        return [
            replace(self._ask, n=1, resume=Resume(choice, tuple(token_ids)), sampling=sampling)
            for choice, token_ids in self._open.items()
        ]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._open) <= self._ask.n, "more answers are open than were asked for"
        for choice, token_ids in self._open.items():
            assert len(token_ids) < self._ask.sampling.max_tokens, f"choice {choice} is open and has it all"


@dataclass(slots=True)
class Trials:
    """Losses of an answer so far and the time left for it. All times are from one clock.

    `deadline_s`: time by which the current replica must have sent its first message.
    """

    settings: RouterSettings
    deadline_s: float
    losses: int = 0
    avoid: tuple[str, ...] = ()
    replica_id: str = ""  # the replica that serves it now, if known
    is_heard: bool = False  # that replica has sent something
    is_again: bool = False  # that replica is a retry
    is_recovering: bool = False  # nothing has been passed on since the last loss

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait for the next message."""
        stall_s = self.settings.stall_s
        return stall_s if self.is_heard else max(0.0, min(stall_s, self.deadline_s - now_s))

    def loss_of(self, event: Event, *, is_begun: bool) -> ReplicaLost | None:
        """Return the loss that `event` reports, or None. `is_begun`: tokens have been passed on."""
        if isinstance(event, Refused) and self.is_again:
            if event.reason == "queue_full":
                return ReplicaFull(event)
            if is_begun and not event.param:  # a field of the request is at fault on every replica
                return ReplicaLost(event.message)
        if isinstance(event, Failed) and event.replica_lost:
            self.replica_id = event.replica_id or self.replica_id
            return ReplicaLost(event.message)
        if isinstance(event, Admitted):
            self.replica_id = event.replica_id
        return None

    def lost(self, lost: ReplicaLost, now_s: float) -> float | None:
        """Return the seconds until the next attempt; None: give up.

        A replica that never sent anything may not exist yet, and a full one is not dead: only the deadline
        limits these cases.
        """
        if isinstance(lost, ReplicaFull):
            pause_s = PAUSE_S_MAX if lost.retry_after_s is None else max(PAUSE_S, lost.retry_after_s)
        elif isinstance(lost, ReplicaSilent) and not self.is_heard:
            pause_s = PAUSE_S
        else:
            if self.is_heard:
                self.deadline_s = now_s + self.settings.resume_s_max
            self.losses += 1
            self.is_recovering = True
            pause_s = min(PAUSE_S_MAX, PAUSE_S * PAUSE_GROWTH ** min(self.losses - 1, 8))
            if self.replica_id and self.replica_id not in self.avoid:
                self.avoid += (self.replica_id,)
        self.replica_id, self.is_heard, self.is_again = "", False, True
        if self.losses > self.settings.resumes_max or now_s >= self.deadline_s:
            return None
        return min(pause_s, self.deadline_s - now_s)


class _Asker:
    """Sends one request until all its answers are complete."""

    def __init__(
        self, client: ReplicaClient, session_key: str, count: Count, is_deleted: Callable[[], bool]
    ) -> None:
        self._client = client
        self._session_key = session_key
        self._count = count
        self._is_deleted = is_deleted

    async def answers(self, ask: GenerateRequest, trials: Trials) -> Stream:
        """Yield the events of `ask`.

        If its replica is lost with several answers begun, each is resumed on its own.
        """
        asks, said = [ask], list[Event]()
        while len(asks) == 1:
            ask = asks[0]
            progress = Progress(ask)
            try:
                async with aclosing(self._attempt(ask, progress, trials)) as attempt:
                    async for events in attempt:
                        if ask.keep is not None:
                            said += events
                        yield events
                return
            except ReplicaLost as lost:
                if ask.keep is not None and ask.keep.is_attaching and ask.n > 1:
                    raise  # other replicas may not say several answers' events in the order they had
                await self._pause(ask, trials, lost)
            asks = [elsewhere(one, ask, said) for one in progress.asks()]
        async with EventPump([self.answers(one, replace(trials)) for one in asks]) as pump:
            try:
                while (came := await pump.next()) is not None:
                    yield came[1]
            except StopAsyncIteration:
                return

    async def _attempt(self, ask: GenerateRequest, progress: Progress, trials: Trials) -> Stream:
        """Yield what one replica sends for `ask`. Raises `ReplicaLost` if no more can be expected from it."""
        avoid = tuple(dict.fromkeys((*ask.route.avoid, *trials.avoid)))
        routed = replace(ask, route=replace(ask.route, avoid=avoid))
        if self._is_deleted():  # since the turn began: the replicas were told, and take it for a new one
            if ask.keep is not None and ask.keep.is_attaching:
                raise AnswerNotKept  # computed again it has other events than the client has seen
            routed = replace(routed, keep=None, placement=None, is_cleared=True)
        with closing(BoundedWaits()) as waits:
            now_s = asyncio.get_running_loop().time
            async with aclosing(self._client.generate(routed, self._session_key)) as stream:
                while not progress.is_over:
                    events = await _message(stream, waits, trials.wait_s(now_s()))
                    if events is None:
                        return
                    lost: ReplicaLost | None = None
                    passed: list[Event] = []
                    for event in events:
                        lost = trials.loss_of(event, is_begun=ask.resume is not None)
                        if lost is not None:
                            break
                        if isinstance(event, Delta):
                            progress.take(event)
                        passed.append(event)
                    trials.is_heard = trials.is_heard or lost is None
                    if passed:
                        if trials.is_recovering:
                            self._count("resumed")
                            trials.is_recovering = False
                        yield passed
                    if lost is not None:
                        raise lost

    async def _pause(self, ask: GenerateRequest, trials: Trials, lost: ReplicaLost) -> None:
        """Wait until the next attempt is due. Raises `lost` if there is to be none."""
        who = trials.replica_id or "a replica"
        pause_s = trials.lost(lost, _now_s())
        if pause_s is None:
            self._count("gave_up")
            logger.warning("request %s: replica %s is lost (%s), giving up", ask.request_id, who, lost)
            raise lost
        logger.warning("request %s: replica %s is lost (%s), retrying", ask.request_id, who, lost)
        await asyncio.sleep(pause_s)


def elsewhere(rest: GenerateRequest, ask: GenerateRequest, said: Sequence[Event]) -> GenerateRequest:
    """Return the request for the rest of a kept answer, on another replica, which keeps it from then on.

    `said`: its events so far. One of several answers begun is not kept any more.
    """
    if ask.keep is None:
        return rest
    keep = replace(ask.keep, is_attaching=False, before=tuple(said)) if rest.n == ask.n else None
    return replace(rest, keep=keep, route=replace(rest.route, only=""))


def resuming(
    client: ReplicaClient,
    ask: GenerateRequest,
    session_key: str,
    settings: RouterSettings,
    count: Count,
    is_deleted: Callable[[], bool] = lambda: False,
) -> Stream:
    """Yield the events of `ask` as one replica would have sent them, from as many replicas as needed.

    Only the later `Admitted` events show that there were several. Heartbeats are not passed on. `count` is
    called with the outcome of every loss. Raises `ReplicaLost` after `resumes_max` losses of one answer, or
    if no replica sends anything about it for `resume_s_max`; `ReplicaFailed` as the client does. Start
    reading soon: time counts from the call.
    """
    trials = Trials(settings, deadline_s=_now_s() + settings.resume_s_max)
    return _Asker(client, session_key, count, is_deleted).answers(ask, trials)


async def _message(stream: Stream, waits: BoundedWaits, wait_s: float) -> list[Event] | None:
    """Return the next message, None at the end. Raises `ReplicaSilent` if there is none for `wait_s`."""
    try:
        return await waits.wait(anext(stream, None), wait_s)
    except TimeoutError:
        raise ReplicaSilent(f"silent for {wait_s:.1f} s") from None


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def seeded(params: SamplingParams, seed: int | None = None) -> SamplingParams:
    """Add a seed if tokens are sampled: an answer resumed on another replica must draw the same tokens.

    `seed`: the one to add; None: a random one.
    """
    if params.seed is not None or params.temperature == 0:
        return params
    return replace(params, seed=secrets.randbits(63) if seed is None else seed)


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
        self._are_kept = True

    def resumed_apart(self) -> None:
        """Name no event any more: replicas that go on with one choice each say them in an order of their own.

        An empty id takes back the last one (https://html.spec.whatwg.org/#event-stream-interpretation).
        """
        self._are_kept = False

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
        return b"id: %s-%d\n" % (self._ref.encode(), self._number) if self._are_kept else b"id:\n"


def _digest(secret: bytes, *parts: bytes) -> bytes:
    told = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, b"samovar kept answer\0" + told, "sha256")
