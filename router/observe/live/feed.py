"""Who watches: streams by audience, what each has still to be sent, and how many there may be. Pure.

No queue grows: a stream that reads slowly gets the latest state once, and its oldest turns are left out. What
is sent are JSON merge patches (RFC 7386) between states that hold no null.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from samovar.configs.optional_sections import LiveSettings
from samovar.router.openai import TooManyRequests

Json = dict[str, Any]


def diff(old: Json, new: Json) -> Json:
    """Return the patch that makes `new` of `old`; empty if they are equal. Neither may hold null."""
    patch: Json = dict.fromkeys(old.keys() - new.keys())
    for key, value in new.items():
        was = old.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            inner = diff(was, value)
            if inner:
                patch[key] = inner
        elif was != value or type(was) is not type(value):
            patch[key] = value
    return patch


CODE = "too_many_streams"


@dataclass(frozen=True, slots=True)
class Audience:
    """Who may see what. `tenant`: the caller's; None: the administrator. `sees_all`: every tenant's."""

    tenant: str | None
    sees_all: bool

    def may_see(self, tenant: str) -> bool:
        """Return whether what belongs to `tenant` may be shown."""
        return self.sees_all or tenant == self.tenant


def encoded(data: Json) -> bytes:
    """Return JSON on one line."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(name: str, data: bytes) -> bytes:
    """Return a server-sent event; `data` has no line end."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class Outbox:
    """What one stream has still to be sent: the latest state, if it is new, and at most `turns_max` turns.

    `wake`: called when there is something.
    """

    def __init__(self, turns_max: int, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._turns: deque[Json] = deque(maxlen=turns_max)
        self._missed = 0
        self._sent: Json | None = None
        self._state: Json | None = None

    def put(self, state: Json) -> None:
        """Replace the state that is to be sent."""
        self._state = state
        self.wake()

    def add(self, turn: Json) -> None:
        """Add an ended turn, to go out with the state it has changed; the oldest goes if too many wait."""
        self._missed += len(self._turns) == self._turns.maxlen
        self._turns.append(turn)

    def take(self) -> bytes:
        """Return the events to send now; empty if there are none. The first is a whole state."""
        if self._state is None:
            return b""
        sent, self._sent = self._sent, self._state
        parts = [_told(sent, self._state)]
        for turn in self._turns:
            parts.append(event("turn", encoded({**turn, "missed": self._missed})))
            self._missed = 0
        self._turns.clear()
        return b"".join(parts)


def _told(sent: Json | None, state: Json) -> bytes:
    """Return the event that brings a reader who has `sent` to `state`, whichever is the smaller."""
    if sent is state:
        return b""
    whole = encoded(state)
    if sent is None:
        return event("state", whole)
    change = diff(sent, state)
    if not change:
        return b""
    patch = encoded(change)
    return event("change", patch) if len(patch) < len(whole) else event("state", whole)


class Feed:
    """The streams of one audience, and the state that they were sent last."""

    def __init__(self, audience: Audience) -> None:
        self.audience = audience
        self.outboxes: set[Outbox] = set()
        self.state: Json | None = None

    def publish(self, state: Json) -> bool:
        """Pass on a state, if anything but its time `t` is new; return whether it is."""
        old = self.state
        if old is not None and not diff({**old, "t": 0}, {**state, "t": 0}):
            return False
        self.state = state
        for outbox in self.outboxes:
            outbox.put(state)
        return True


class Feeds:
    """All open streams, within the limits of `settings`."""

    def __init__(self, settings: LiveSettings, retry_after_s: float) -> None:
        self._settings = settings
        self._retry_after_s = retry_after_s
        self._of: dict[Audience, Feed] = {}

    def __iter__(self) -> Iterator[Feed]:
        return iter(list(self._of.values()))

    def __len__(self) -> int:
        """Return the number of open streams."""
        return sum(len(feed.outboxes) for feed in self._of.values())

    def open(self, audience: Audience, wake: Callable[[], None]) -> Outbox:
        """Return a new stream's outbox. Raises `TooManyRequests`."""
        feed, settings = self._of.get(audience), self._settings
        own = 0 if feed is None else len(feed.outboxes)
        for taken, limit, whose in (
            (own, settings.listeners_per_key_max, "listeners_per_key_max"),
            (len(self), settings.listeners_max, "listeners_max"),
        ):
            if taken >= limit:
                message = (
                    f"{limit} streams of /v1/live are open (live.{whose}). Close one, or try again later."
                )
                raise TooManyRequests(message, self._retry_after_s, code=CODE)
        outbox = Outbox(settings.turns_max, wake)
        feed = self._of.setdefault(audience, Feed(audience))
        feed.outboxes.add(outbox)
        if feed.state is not None:
            outbox.put(feed.state)
        return outbox

    def close(self, audience: Audience, outbox: Outbox) -> None:
        """Forget a stream; an audience without streams is forgotten as well."""
        feed = self._of[audience]
        feed.outboxes.remove(outbox)
        if not feed.outboxes:
            del self._of[audience]

    def wake_all(self) -> None:
        """Wake all streams, so that they end."""
        for feed in self._of.values():
            for outbox in feed.outboxes:
                outbox.wake()

    def turn(self, tenant: str, show: Callable[[Audience], Json]) -> bool:
        """Pass an ended turn of `tenant` to those who may see it; return whether anyone does."""
        seen = [feed for feed in self._of.values() if feed.audience.may_see(tenant)]
        for feed in seen:
            turn = show(feed.audience)
            for outbox in feed.outboxes:
                outbox.add(turn)
        return bool(seen)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert all(feed.outboxes for feed in self._of.values()), "an audience without streams is remembered"
        assert len(self) <= self._settings.listeners_max, "too many streams are open"


class LookPace:
    """How long to rest between two looks: little after a change, longer and longer without one.

    A look costs `settings.busy_period_s` of a credit that grows with time, up to `burst_s`, with which it
    starts. While there is credit, a look may come `period_s` after a change. Times: seconds of one clock.
    """

    def __init__(self, settings: LiveSettings, now_s: float) -> None:
        self._settings = settings
        self._idle_period_s = max(settings.period_s, settings.idle_period_s)
        self._credit_s = settings.burst_s
        self._pause_s = settings.period_s
        self._at_s = now_s

    def after(self, changed: bool, now_s: float) -> tuple[float, float]:
        """Return the least and the most seconds until the next look, after one that is just over."""
        settings = self._settings
        self._credit_s += max(0.0, now_s - self._at_s) - settings.busy_period_s
        self._credit_s = min(max(self._credit_s, 0.0), settings.burst_s)
        self._at_s = now_s
        least_s = settings.period_s if self._credit_s else max(settings.period_s, settings.busy_period_s)
        self._pause_s = least_s if changed else min(2 * self._pause_s, self._idle_period_s)
        return least_s, max(least_s, self._pause_s)
