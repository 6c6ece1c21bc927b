"""Lineages of a client's session: which are sent beside a conversation and never extended, which follow one.

A client sends more than the conversation under one id: titles, tags and follow-up questions (one-shots),
sub-agents, and after a compaction the conversation's successor. Which is which is learned from what a server
sees of it without the text. After a lineage's first turn: how it began (beside a running turn of another
lineage, right after one, later), how long its prompt is, which blocks it begins with, and what became of
others like it. For a lineage that is idle while another one of its session, begun after its last turn, is
extended: whether such ones resumed. Nothing here demotes a lineage before the like has been seen.

Pure; clock values come in. Not thread-safe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np

from samovar.cache_tiers.forecast.features import ALONE, TOKENS_MAX, LineageNumbers, bounded
from samovar.cache_tiers.forecast.ratios import Cells, ReturnRatios
from samovar.cache_tiers.forecast.survival import Curves, Floats
from samovar.cache_tiers.forecast.turns import TURN_S_MAX, Opening, SessionKey, Turn
from samovar.configs.sections import PredictorSettings

LEFT_SHARE: Final = 0.02
"""Worth of a branch behind a fork relative to the chain that its lineage uses: the prior."""
LEFT_PRIOR: Final = 20.0
"""Branches that the prior counts for."""
LEFT_WINDOW: Final = 1000.0
"""Branches after which those counts are halved, so that old ones fade."""

RIGHT_AFTER_S: Final = 10.0
_FIRST, _BESIDE, _RIGHT_AFTER, _LATER = range(4)
"""How a lineage began."""
_SIZES: Final = 8
_ALIKE: Final = 5  # 0 .. number of root depths
_DEEP: Final = 2  # of the roots, those from this one on tell kinds of prompts apart by themselves
_CLASSES: Final = 4 * _SIZES
_AFTER: Final = 1024  # cells of lineages that others have followed
_ROOTS: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Standing:
    """A lineage at the end of a turn, within its session.

    `is_aside`: it was not extended so far, and the session has other lineages. `cells`: of `ReturnRatios`,
    general ones first; `ratio`: what follows from them for its hazards. `numbers`: for the learned model.
    """

    is_aside: bool = False
    cells: tuple[int, ...] = ()
    ratio: float = 1.0
    numbers: LineageNumbers = ALONE


_ALONE: Final = Standing()


@dataclass(slots=True)
class _Lineage:
    """`returns`: how often it was extended. `begun`: lineages begun in its session since its last turn ended.

    `is_aside`: it began beside others. `has_followed`: see `Lineages.followed`.
    """

    whole: SessionKey
    began_s: float
    roots: tuple[int, ...]
    how: int
    alike: int
    started_s: float
    ended_s: float = -math.inf
    returns: int = 0
    running: int = 0
    begun: int = 0
    is_tool: bool = False
    is_aside: bool = False
    has_followed: bool = False

    def is_running(self, now_s: float) -> bool:
        return self.running > 0 and now_s - self.started_s < TURN_S_MAX


class Lineages:
    """At most `sessions_max` lineages, `lineages_max` of them of one session; see the module."""

    def __init__(self, settings: PredictorSettings) -> None:
        self._lineages_max = settings.lineages_max
        self._sessions_max = settings.sessions_max
        self._of: OrderedDict[SessionKey, _Lineage] = OrderedDict()  # longest untouched first
        self._whole: dict[SessionKey, dict[SessionKey, None]] = {}  # session -> its lineages
        self.ratios = ReturnRatios(settings.roots_max, settings.followed_max)
        self.left = np.zeros(2)
        """Branches that lay behind forks when their lineage went on, and how much of them it went back to."""

    def __len__(self) -> int:
        return len(self._of)

    @property
    def left_share(self) -> float:
        """Return what a branch behind a fork is worth, relative to the chain that its lineage uses."""
        branches, regained = self.left.tolist()
        return float(min(1.0, (regained + LEFT_PRIOR * LEFT_SHARE) / (branches + LEFT_PRIOR)))

    def arrived(self, lineage: SessionKey, at_s: float, opening: Opening) -> list[SessionKey]:
        """Record that a turn begins; return the lineages of its session that there is no room for."""
        self.ratios.advance(at_s)
        of = self._of.get(lineage)
        dropped: list[SessionKey] = []
        if of is None:
            of, dropped = self._begin(lineage, at_s, opening)
        else:
            self._of.move_to_end(lineage)
            self.ratios.came_back((lineage, _FIRST), at_s)
            self.ratios.came_back((lineage, _AFTER), at_s)
            if not of.is_running(at_s):  # else it is the same prompt again, or another attempt
                of.running = 0
                of.returns += of.ended_s > -math.inf
        of.running += 1
        of.started_s = at_s
        if opening.branches > 0:
            self.left += (opening.branches, min(max(opening.regained, 0.0), opening.branches))
            if self.left[0] >= LEFT_WINDOW:
                self.left *= 0.5
        return dropped

    def ended(self, turn: Turn, now_s: float) -> Standing:
        """Record that a turn is over; return where its lineage stands now."""
        self.ratios.advance(now_s)
        of = self._of.get(turn.session)
        if of is None:
            return _ALONE
        of.running = max(0, of.running - 1)
        of.ended_s = now_s
        of.is_tool = turn.stop == "tool_calls"
        begun, of.begun = of.begun, 0
        session = self._whole[of.whole]
        is_aside = not of.returns and len(session) > 1
        of.is_aside |= is_aside
        if not of.is_aside and len(session) == 1 and not begun:
            return _ALONE
        running = sum(self._of[other].is_running(now_s) for other in session if other != turn.session)
        cells: tuple[int, ...] = ()
        ratio = 1.0
        if is_aside:
            cells = self._cells(of, turn.input_tokens)
            ratio = self._ratio(cells)
        numbers = (float(of.is_aside), math.log1p(running), math.log1p(begun), math.log(ratio))
        return Standing(is_aside, cells, ratio, numbers)

    def expects(self, lineage: SessionKey, standing: Standing, curve: Curves, now_s: float) -> None:
        """Judge `curve`, the forecast without `standing.ratio`, by what becomes of the lineage."""
        if standing.is_aside and not self.ratios.is_open((lineage, _FIRST)):
            self.ratios.opened((lineage, _FIRST), standing.cells, curve, now_s)

    def followed(self, lineage: SessionKey) -> list[tuple[SessionKey, int]]:
        """Return the lineages that this one follows: silent since it began, while it was extended.

        Each with the cell for what became of others in its place. Once, after its second turn.
        """
        of = self._of.get(lineage)
        if of is None or not of.returns or of.has_followed:
            return []
        of.has_followed = True
        found = []
        for other in self._whole[of.whole]:
            before = self._of[other]
            is_one_shot = before.is_aside and not before.returns
            if is_one_shot or before.running or not -math.inf < before.ended_s <= of.began_s:
                continue
            cell = _AFTER + before.is_tool * _ALIKE + _alike(before.roots, of.roots)
            found.append((other, cell))
        return found

    def follows(self, lineage: SessionKey, cell: int, rest: Floats, now_s: float) -> float:
        """Return the factor for a lineage that another one has followed; `rest`: what its curve has left.

        Its return, or its absence, is counted. 1 if this was asked since its last turn.
        """
        if self.ratios.is_open((lineage, _AFTER)):
            return 1.0
        ratio = self.ratios.ratio((cell,))
        self.ratios.opened((lineage, _AFTER), (cell,), rest, now_s)
        return ratio

    def forget(self, lineage: SessionKey) -> None:
        """Forget a lineage but not what was learned from it. No-op if it is unknown."""
        of = self._of.pop(lineage, None)
        if of is None:
            return
        for what in (_FIRST, _AFTER):
            self.ratios.dropped((lineage, what))
        session = self._whole[of.whole]
        del session[lineage]
        if not session:
            del self._whole[of.whole]

    def restore(self, cells: Cells, counts: Floats, left: Floats) -> None:
        """Continue with what was learned: `ratios.cells`, `ratios.counts`, `left`."""
        self.ratios.restore(cells, counts)
        self.left = left

    def _begin(self, lineage: SessionKey, at_s: float, opening: Opening) -> tuple[_Lineage, list[SessionKey]]:
        others = [self._of[other] for other in self._whole.get(opening.whole, ())]
        how = _FIRST
        if others:
            last_s = max(other.ended_s for other in others)
            how = _RIGHT_AFTER if at_s - last_s <= RIGHT_AFTER_S else _LATER
            if any(other.is_running(at_s) for other in others):
                how = _BESIDE
        for other in others:
            other.begun += 1
        alike = max((_alike(opening.roots, other.roots) for other in others), default=0)
        of = self._of[lineage] = _Lineage(opening.whole, at_s, opening.roots, how, alike, at_s)
        self._whole.setdefault(opening.whole, {})[lineage] = None
        dropped = []
        if len(self._whole[opening.whole]) > self._lineages_max:
            dropped.append(self._least(opening.whole, lineage, at_s))
        elif len(self._of) > self._sessions_max:
            dropped.append(next(iter(self._of)))
        for gone in dropped:
            self.forget(gone)
        return of, dropped

    def _least(self, whole: SessionKey, latest: SessionKey, now_s: float) -> SessionKey:
        """Return the lineage that is missed least: idle, never extended, longest unused."""

        def worth(lineage: SessionKey) -> tuple[bool, bool, float]:
            of = self._of[lineage]
            return of.is_running(now_s), of.returns > 0 or not of.is_aside, of.started_s

        return min((other for other in self._whole[whole] if other != latest), key=worth, default=latest)

    def _cells(self, of: _Lineage, input_tokens: int) -> tuple[int, ...]:
        """Return classes, then roots from the shallowest on; a shallow root is one with each size."""
        size = min(int(bounded(input_tokens, TOKENS_MAX)).bit_length() // 2, _SIZES - 1)
        coarse = of.how * _SIZES + size
        fine = _CLASSES + coarse * _ALIKE + of.alike
        roots = [(root ^ (0 if depth >= _DEEP else size + 1)) | _ROOTS for depth, root in enumerate(of.roots)]
        return (coarse, fine, *roots)

    def _ratio(self, cells: tuple[int, ...]) -> float:
        """Return the factor of the deepest root that is known, shrunk to those of the classes."""
        classes, roots = cells[:2], cells[2:]
        known = next((root for root in reversed(roots) if self.ratios.is_known(root)), None)
        return self.ratios.ratio(classes if known is None else (*classes, known))

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._of) <= self._sessions_max, "too many lineages are remembered"
        told = {(of.whole, lineage) for lineage, of in self._of.items()}
        filed = {(whole, lineage) for whole, lineages in self._whole.items() for lineage in lineages}
        assert told == filed, "a lineage is filed under another session than its own"
        assert all(0 < len(of) <= self._lineages_max for of in self._whole.values()), "too many of a session"
        assert all(of.running >= 0 for of in self._of.values()), "more turns have ended than begun"
        assert 0.0 <= self.left[1] <= self.left[0] < math.inf, "more branches were regained than left"
        self.ratios.check_integrity()


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many roots two prompts share; each root commits to those before it."""
    shared = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared
