"""Deletes in every place that may hold what is deleted, and goes on with what is left.

A deletion is a list of places that ends, not a chain that breaks: a place that fails (a full disk, a busy
file, an ingress that does not answer) keeps no other from being asked. What is left is named in one error,
written down, and tried again in the background, also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from samovar.router.erasure.unfinished import UnfinishedFile
from samovar.router.openai import ApiError, Unavailable

logger = logging.getLogger(__name__)

ErasureKind = Literal["sessions", "entries", "made", "response", "document"]

UNFINISHED_MAX = 4096
"""Deletions that are gone on with: more are refused with the wish to repeat them."""
FIRST_PAUSE_S = 2.0
PAUSE_S_MAX = 300.0
TAKE_OVER_S = 60.0
"""How often processes that ended since are looked for: a rollout starts the next before it ends the last."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """What is to be deleted of a tenant.

    `names`: tags of sessions in hexadecimal digits, ids of entries, of a response or a document; None: all.
    "made": what was made of entries, not they themselves. `at_s`: Unix time of the wish. `is_late`: it is
    gone on with, so that what came since may be there, too.
    """

    kind: ErasureKind
    tenant: str
    names: tuple[str, ...] | None
    at_s: float = field(default_factory=time.time, compare=False)
    is_late: bool = field(default=False, compare=False)

    @property
    def tags(self) -> tuple[bytes, ...] | None:
        """The names of sessions as tags."""
        return None if self.names is None else tuple(bytes.fromhex(one) for one in self.names)


Cleared = Counter[str]
"""What was deleted, by its kind."""
Erase = Callable[[Erasure], Awaitable[Cleared]]
"""Deletes in one place. Whatever it raises means that something is left there: `Left` says what, and how much
was deleted; an `ApiError` with status 404 means that there was nothing."""


class Left(Exception):
    """A place is not clear. `is_known_there`: it goes on by itself, and need not be asked again."""

    def __init__(self, reason: str, cleared: Cleared | None = None, *, is_known_there: bool = False) -> None:
        super().__init__(reason)
        self.cleared = Cleared() if cleared is None else cleared
        self.is_known_there = is_known_there


class NotNoted(Unavailable):
    """Something is left, and could not be written down: who asked has to repeat it."""


@dataclass(slots=True)
class _Unfinished:
    what: Erasure
    places: tuple[str, ...]
    pause_s: float = FIRST_PAUSE_S
    due_s: float = 0.0  # of the loop's clock; infinite while it is asked for the first time


@dataclass(slots=True)
class _Round:
    asked: tuple[str, ...]
    cleared: Cleared = field(default_factory=Cleared)
    left: dict[str, str] = field(default_factory=dict)  # place -> reason
    unfinished: list[str] = field(default_factory=list)  # of them, those that are to be asked again
    nothing: ApiError | None = None


class Erasures:
    """Deletes, at one ingress. Use it from one event loop.

    `places`: for each kind, the places by name, in the order in which they are asked.
    """

    def __init__(self, file: UnfinishedFile | None, retry_after_s: float) -> None:
        self.places: dict[ErasureKind, dict[str, Erase]] = {kind: {} for kind in get_args(ErasureKind)}
        self._file = file
        self._retry_after_s = retry_after_s
        self._unfinished: dict[Erasure, _Unfinished] = {}
        self._saved: list[dict[str, Any]] | None = []  # what the file has; None: not known
        self._called = asyncio.Event()
        self._saving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def unfinished(self) -> Mapping[Erasure, tuple[str, ...]]:
        """What is still to be deleted, and where."""
        return {what: one.places for what, one in self._unfinished.items()}

    async def erase(self, *wanted: Erasure) -> list[Cleared]:
        """Delete everywhere; return what was deleted of each.

        Raises `Unavailable` (`clear_incomplete`) that names all that is left, after everything was tried; a
        404 only if nothing is.
        """
        task = asyncio.ensure_future(self._erase(wanted))
        return await asyncio.shield(task)  # a client that goes ends no deletion

    async def erase_here(self, what: Erasure, places: Iterable[str]) -> Cleared:
        """Delete in these places only, as another ingress was asked. Raises as `erase` does.

        Only what is left is noted: who asks has noted the rest, and this ingress, which is asked by itself as
        well, would take its own wish for one that was repeated, and never end it.
        """
        done = await self._round(what, [one for one in places if one in self.places[what.kind]])
        await self._told([(what, None, done)])
        return done.cleared

    async def _erase(self, wanted: Sequence[Erasure]) -> list[Cleared]:
        # Before the first of them: this process may be killed.
        begun = [(what, self._begin(what, self.places[what.kind])) for what in wanted]
        await self._save()
        rounds = [(what, one, await self._round(what, self.places[what.kind])) for what, one in begun]
        await self._told(rounds)
        return [done.cleared for _, _, done in rounds]

    def _begin(self, what: Erasure, places: Iterable[str]) -> _Unfinished | None:
        """Note a wish before its places are asked; None: no room."""
        has_room = what in self._unfinished or len(self._unfinished) < UNFINISHED_MAX
        return self._note(_Unfinished(what, tuple(places), due_s=math.inf)) if has_room else None

    def _note(self, one: _Unfinished) -> _Unfinished:
        """Note what is left, with what is left of an equal wish, whose place it takes."""
        before = self._unfinished.pop(one.what, None)
        if before is not None:
            what = max(one.what, before.what, key=lambda wish: wish.at_s)
            one = replace(one, what=what, places=tuple(dict.fromkeys((*one.places, *before.places))))
        self._unfinished[one.what] = one
        return one

    async def _round(self, what: Erasure, places: Iterable[str]) -> _Round:
        """Ask each place, whatever the others answer."""
        done = _Round(tuple(places))
        for name in done.asked:
            try:
                done.cleared += await self.places[what.kind][name](what)
            except Left as left:
                done.cleared += left.cleared
                done.left[name] = str(left)
                if not left.is_known_there:
                    done.unfinished.append(name)
            except ApiError as refused:
                if refused.status == 404:
                    done.nothing = refused
                    continue
                done.left[name] = f"{name}: {refused.message.rstrip('.')}"
                done.unfinished.append(name)
            except Exception as error:  # no fault of one place may keep the others
                logger.exception("a deletion failed in one place: %s", name)
                done.left[name] = f"{name}: an internal error ({type(error).__name__})"
                done.unfinished.append(name)
        return done

    async def _told(self, rounds: Sequence[tuple[Erasure, _Unfinished | None, _Round]]) -> None:
        """Write down what is left, and raise it. With each round what was noted when it began."""
        is_noted = True
        for what, one, done in rounds:
            if one is None and done.unfinished:
                one = self._begin(what, done.unfinished)
                is_noted &= one is not None
            if one is None or self._unfinished.get(what) is not one:
                continue  # it was wished again meanwhile: that call asks all that this one did
            places = (*done.unfinished, *(name for name in one.places if name not in done.asked))
            del self._unfinished[what]
            if places:
                due_s = asyncio.get_running_loop().time() + FIRST_PAUSE_S
                self._unfinished[one.what] = replace(one, places=places, due_s=due_s)
        is_noted &= await self._save()
        self._called.set()
        reasons = dict.fromkeys(reason for _, _, done in rounds for reason in done.left.values())
        if reasons:
            ending = "It goes on by itself, also after a restart; repeat the request to see if it is done."
            if not is_noted:
                ending = "What is left could not be written down. Repeat the request until it succeeds."
            message = f"Not everything is cleared: {'; '.join(reasons)}. {ending}"
            kind = Unavailable if is_noted else NotNoted
            raise kind(message, self._retry_after_s, code="clear_incomplete")
        for _, _, done in rounds:
            if done.nothing is not None:
                raise done.nothing

    # -- in the background -----------------------------------------------------------------

    async def start(self) -> None:
        """Go on with what an earlier process has left to do, and with what will be left."""
        if self._task is not None:
            return
        if self._file is not None:
            try:
                found = await asyncio.to_thread(self._file.open)
            except OSError as error:
                logger.error("deletions that are left will be forgotten at a restart: %s", error)
                found = []
            self._take_up(found)
            self._tell_of_those_off()
        self._task = asyncio.create_task(self._go_on())

    def _tell_of_those_off(self) -> None:
        names = {
            name for what, one in self._unfinished.items() for name in one.places if self._is_off(what, name)
        }
        if names:
            logger.warning("deletions wait for what is switched off: %s", ", ".join(sorted(names)))

    def _is_off(self, what: Erasure, place: str) -> bool:
        return place not in self.places[what.kind]

    async def stop(self) -> None:
        """Stop; what is left is the next process's."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._file is not None:
            self._file.close()

    async def _go_on(self) -> None:
        clock = asyncio.get_running_loop().time
        look_s = clock() + TAKE_OVER_S
        while True:
            self._called.clear()
            due_s = min((one.due_s for one in self._unfinished.values()), default=math.inf)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(due_s, look_s)):
                    await self._called.wait()
            if clock() >= look_s:
                await self._take_over()
                look_s = clock() + TAKE_OVER_S
            for what in [what for what, one in self._unfinished.items() if one.due_s <= clock()]:
                await self.go_on_with(what)

    async def _take_over(self) -> None:
        """Go on with what processes that ended since have left."""
        if self._file is None:
            return
        async with self._saving:
            try:
                found = await asyncio.to_thread(self._file.take_over, self._items())
            except OSError as error:
                logger.warning("what an ingress that ended has left to delete cannot be read: %s", error)
                return
            if found:
                self._take_up(found)
        await self._save()

    def _take_up(self, found: Iterable[Any]) -> None:
        for one in filter(None, map(_unfinished_of, found)):
            self._note(one)  # two processes may have left parts of the same
        self._saved = None

    async def go_on_with(self, what: Erasure) -> None:
        """Ask the places again that are left of a deletion."""
        one = self._unfinished.get(what)
        if one is None:
            return
        late = replace(one.what, is_late=True)
        done = await self._round(late, [name for name in one.places if not self._is_off(what, name)])
        # A place that is switched off still has what it had, and is asked when it is back.
        places = (*done.unfinished, *(name for name in one.places if self._is_off(what, name)))
        if self._unfinished.get(what) is not one:  # it was repeated meanwhile
            return
        if not places:
            del self._unfinished[what]
            logger.info("a deletion that was left is done: %s", ", ".join(one.places))
        else:
            now_s = asyncio.get_running_loop().time()
            self._unfinished[one.what] = replace(
                one,
                places=places,
                pause_s=min(2 * one.pause_s, PAUSE_S_MAX),
                due_s=now_s + one.pause_s,
            )
        await self._save()

    async def _save(self) -> bool:
        async with self._saving:
            items = self._items()
            if items == self._saved:
                return True
            is_saved = self._file is not None and await asyncio.to_thread(self._file.save, items)
            self._saved = items if is_saved else None
            return is_saved

    def _items(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": what.kind,
                "tenant": what.tenant,
                "names": what.names,
                "at_s": what.at_s,
                "places": one.places,
            }
            for what, one in self._unfinished.items()
        ]


def _unfinished_of(item: Any) -> _Unfinished | None:
    """Return what a file says; None if this version cannot read it."""
    try:
        names = item["names"]
        what = Erasure(
            item["kind"], item["tenant"], None if names is None else tuple(names), float(item["at_s"])
        )
        return _Unfinished(what, tuple(item["places"])) if what.kind in get_args(ErasureKind) else None
    except (KeyError, TypeError, ValueError):
        logger.error("a deletion that was left cannot be read: repeat it")
        return None
