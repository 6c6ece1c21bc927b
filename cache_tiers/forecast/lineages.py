"""Lineages of a client's session: which are sent beside a conversation and never extended, which follow one.

A client sends more than the conversation under one id: titles, tags and follow-up questions (one-shots),
sub-agents, and after a compaction the conversation's successor. Which is which is learned from what a server
sees of it without the text. After a lineage's first turn: how it began (beside a running turn of another
lineage, right after one, later), how long its prompt is, which blocks it begins with, and what became of
others like it. For a lineage that is idle while another one of its session, begun after its last turn, is
extended: whether such ones resumed. Nothing here demotes a lineage before the like has been seen.

What a prompt keeps of the one before, and what edits have left behind, is read from marks of the chains
(`LineageChains`), so that it is known whatever was evicted since.

Pure; clock values come in. Not thread-safe: the caller holds the lock.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.blocks import KEY_BYTES, ChainMarks, kept_blocks
from samovar.cache_tiers.forecast.features import ALONE, TOKENS_MAX, LineageNumbers, bounded
from samovar.cache_tiers.forecast.turns import EDGES_S, TURN_S_MAX, Curves, Floats, Opening, SessionKey, Turn
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

    `is_aside`: it began beside others. `has_followed`: see `Lineages.followed`. `roots`: 8 bytes each, a
    third of the room that numbers take.
    """

    whole: SessionKey
    began_s: float
    roots: bytes
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
        self._of: dict[SessionKey, _Lineage] = {}  # longest untouched first
        self._alone: dict[SessionKey, SessionKey] = {}  # session -> its only lineage, as most have
        self._several: dict[SessionKey, tuple[SessionKey, ...]] = {}  # session -> its lineages, a few
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
            self._of[lineage] = self._of.pop(lineage)
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
        session = self._several.get(of.whole, ())
        is_aside = not of.returns and bool(session)
        of.is_aside |= is_aside
        if not of.is_aside and not session and not begun:
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
        for other in self._lineages(of.whole):
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
        self._file(of.whole, tuple(other for other in self._lineages(of.whole) if other != lineage))

    def restore(self, cells: Cells, counts: Floats, left: Floats) -> None:
        """Continue with what was learned: `ratios.cells`, `ratios.counts`, `left`."""
        self.ratios.restore(cells, counts)
        self.left = left

    def _begin(self, lineage: SessionKey, at_s: float, opening: Opening) -> tuple[_Lineage, list[SessionKey]]:
        session = self._lineages(opening.whole)
        others = [self._of[other] for other in session]
        how = _FIRST
        if others:
            last_s = max(other.ended_s for other in others)
            how = _RIGHT_AFTER if at_s - last_s <= RIGHT_AFTER_S else _LATER
            if any(other.is_running(at_s) for other in others):
                how = _BESIDE
        for other in others:
            other.begun += 1
        roots = np.array(opening.roots, dtype=np.uint64).tobytes()
        alike = max((_alike(roots, other.roots) for other in others), default=0)
        of = self._of[lineage] = _Lineage(opening.whole, at_s, roots, how, alike, at_s)
        self._file(opening.whole, (*session, lineage))
        dropped = []
        if len(session) >= self._lineages_max:
            dropped.append(self._least(session, at_s))
        elif len(self._of) > self._sessions_max:
            dropped += oldest_of(self._of)
        for gone in dropped:
            self.forget(gone)
        return of, dropped

    def _lineages(self, whole: SessionKey) -> tuple[SessionKey, ...]:
        """Return a session's lineages, in the order in which they began."""
        if whole in self._alone:
            return (self._alone[whole],)
        return self._several.get(whole, ())

    def _file(self, whole: SessionKey, lineages: tuple[SessionKey, ...]) -> None:
        """Set a session's lineages."""
        self._alone.pop(whole, None)
        self._several.pop(whole, None)
        if len(lineages) == 1:
            self._alone[whole] = lineages[0]
        elif lineages:
            self._several[whole] = lineages

    def _least(self, session: Sequence[SessionKey], now_s: float) -> SessionKey:
        """Return the lineage that is missed least: idle, never extended, longest unused."""

        def worth(lineage: SessionKey) -> tuple[bool, bool, float]:
            of = self._of[lineage]
            return of.is_running(now_s), of.returns > 0 or not of.is_aside, of.started_s

        return min(session, key=worth)

    def _cells(self, of: _Lineage, input_tokens: int) -> tuple[int, ...]:
        """Return classes, then roots from the shallowest on; a shallow root is one with each size."""
        size = min(int(bounded(input_tokens, TOKENS_MAX)).bit_length() // 2, _SIZES - 1)
        coarse = of.how * _SIZES + size
        fine = _CLASSES + coarse * _ALIKE + of.alike
        roots = [
            (root ^ (0 if depth >= _DEEP else size + 1)) | _ROOTS
            for depth, root in enumerate(np.frombuffer(of.roots, dtype=np.uint64).tolist())
        ]
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
        filed = set(self._alone.items())
        filed |= {(whole, lineage) for whole, lineages in self._several.items() for lineage in lineages}
        assert told == filed, "a lineage is filed under another session than its own"
        assert all(1 < len(of) <= self._lineages_max for of in self._several.values()), (
            "too many of a session"
        )
        assert not self._alone.keys() & self._several.keys(), "a session is filed twice"
        assert all(of.running >= 0 for of in self._of.values()), "more turns have ended than begun"
        assert 0.0 <= self.left[1] <= self.left[0] < math.inf, "more branches were regained than left"
        self.ratios.check_integrity()


def oldest_of(table: Mapping[SessionKey, object]) -> list[SessionKey]:
    """Return what a full table gives up first: its oldest, of a large one a few more at once.

    A dict passes all that was deleted before its first entry: one at a time that would take longer, in a
    table of 100,000, than all else that a turn costs. An ordered one takes twice the room.
    """
    return list(islice(table, 1 + len(table) // 1024))


def _alike(one: bytes, other: bytes) -> int:
    """Return how many roots two prompts share; each root commits to those before it."""
    shared = 0
    while (end := shared + _ROOT_BYTES) <= min(len(one), len(other)) and one[shared:end] == other[shared:end]:
        shared = end
    return shared // _ROOT_BYTES


PRIOR: Final = 1.0
"""Expected returns that the more general cell counts for."""
RATIO_MIN, RATIO_MAX = 0.01, 50.0
KNOWN: Final = 2.0
"""Trials before a cell says anything."""
WINDOW: Final = 200.0
"""Trials of a cell after which its counts are halved, so that old ones fade."""
AGES_S: Final = (20.0, 60.0, 300.0, 1200.0, 3600.0)
"""Idle times at which a trial is counted as far as it has got; at the last one it ends."""

_MOVES_MAX: Final = 256
"""Trials looked at per call, so that a clock jump blocks no caller."""

Cells = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class _Trial:
    """One idle session. `hazard`: its forecast, cumulative at `EDGES_S`. `counted`: so much of it by now."""

    session: SessionKey
    cells: tuple[int, ...]
    at_s: float
    hazard: Floats
    counted: float = 0.0
    is_over: bool = False

    def until(self, idle_s: float) -> float:
        """Return what the forecast expected up to `idle_s`, less what was counted."""
        expected = float(np.interp(idle_s, EDGES_S, self.hazard)) - self.counted
        self.counted += max(0.0, expected)
        return max(0.0, expected)


class ReturnRatios:
    """Learns how much likelier than forecast sessions resume under known circumstances.

    Per circumstance (a cell): how many resumed, over how many should have by their forecast, which is the sum
    of the forecasts' cumulative hazards over the time that was observed. The quotient is the maximum
    likelihood estimate of a factor on the hazards (proportional hazards: Cox, 1972), here with a gamma prior
    around that of a more general cell, in the end around 1. Sessions that are still idle count for the time
    that has passed: to leave them out until they resume, or until they never will, would bias the factor.

    Factors on hazards by cell, a number below 2**64.

    `cells_max`: the least recently used is forgotten. `trials_max`: idle sessions followed at a time; the
    oldest is dropped, as far as it was counted.
    """

    def __init__(self, cells_max: int, trials_max: int) -> None:
        self._cells_max = cells_max
        self._trials_max = trials_max
        self._cells: OrderedDict[int, list[float]] = OrderedDict()  # trials, returned, expected
        self._trials: OrderedDict[SessionKey, _Trial] = OrderedDict()
        self._ages: list[deque[_Trial]] = [deque() for _ in AGES_S]

    def __len__(self) -> int:
        return len(self._cells)

    def ratio(self, cells: Sequence[int]) -> float:
        """Return the factor of the last of `cells` (general ones first), shrunk to those before it."""
        ratio = 1.0
        for cell in cells:
            trials, returned, expected = self._cells.get(cell, _NOTHING)
            if trials >= KNOWN:
                ratio = (returned + PRIOR * ratio) / (expected + PRIOR)
        return min(max(ratio, RATIO_MIN), RATIO_MAX)

    def is_known(self, cell: int) -> bool:
        """Return whether the cell has had enough trials to say something."""
        return self._cells.get(cell, _NOTHING)[0] >= KNOWN

    def is_open(self, session: SessionKey) -> bool:
        """Return whether the session is followed."""
        return session in self._trials

    def opened(self, session: SessionKey, cells: Sequence[int], curve: Curves | Floats, at_s: float) -> None:
        """Follow a session that is idle from `at_s` on, with the forecast `curve` `[EDGES]` from then on."""
        self.dropped(session)
        if len(self._trials) >= self._trials_max:
            self.dropped(next(iter(self._trials)))
        trial = _Trial(session, tuple(dict.fromkeys(cells)), at_s, -np.asarray(curve, dtype=np.float64))
        self._trials[session] = trial
        self._ages[0].append(trial)
        for cell in trial.cells:
            self._add(cell, 0, 1.0)

    def came_back(self, session: SessionKey, at_s: float) -> None:
        """Count a session as resumed; no-op if it is not followed, or not idle by then."""
        trial = self._trials.get(session)
        self.dropped(session)
        if trial is not None and at_s >= trial.at_s:
            self._count(trial, at_s - trial.at_s, 1.0)

    def dropped(self, session: SessionKey) -> None:
        """Stop following a session; what was counted stays."""
        trial = self._trials.pop(session, None)
        if trial is not None:
            trial.is_over = True

    def advance(self, now_s: float) -> None:
        """Count the sessions that are idle, as far as they have got."""
        if not any(self._ages):  # as where sessions have one lineage
            return
        left = _MOVES_MAX
        for age, waiting in enumerate(self._ages):
            while waiting and left and (waiting[0].is_over or now_s - waiting[0].at_s >= AGES_S[age]):
                left -= 1
                trial = waiting.popleft()
                if trial.is_over:
                    continue
                self._count(trial, AGES_S[age], 0.0)
                if age + 1 < len(AGES_S):
                    self._ages[age + 1].append(trial)
                else:
                    self.dropped(trial.session)

    @property
    def cells(self) -> Cells:
        """`[cells]`: those known, least recently used first, to save."""
        return np.fromiter(self._cells, dtype=np.uint64, count=len(self._cells))

    @property
    def counts(self) -> Floats:
        """`[cells, 3]`: trials, returned, expected."""
        return np.array(list(self._cells.values()), dtype=np.float64).reshape(-1, 3)

    def restore(self, cells: Cells, counts: Floats) -> None:
        """Continue with saved `cells` and `counts`, as many of the latest as there is room for."""
        newest = list(zip(cells.tolist(), counts.tolist(), strict=True))[-self._cells_max :]
        self._cells = OrderedDict(newest)

    def _count(self, trial: _Trial, idle_s: float, returned: float) -> None:
        expected = trial.until(idle_s)
        for cell in trial.cells:
            self._add(cell, 1, returned)
            self._add(cell, 2, expected)

    def _add(self, cell: int, place: int, amount: float) -> None:
        counts = self._cells.get(cell)
        if counts is None:
            if len(self._cells) >= self._cells_max:
                self._cells.popitem(last=False)
            counts = self._cells[cell] = [0.0, 0.0, 0.0]
        self._cells.move_to_end(cell)
        counts[place] += amount
        if counts[0] >= WINDOW:
            counts[:] = [count * 0.5 for count in counts]

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._cells) <= self._cells_max, "too many cells are remembered"
        assert len(self._trials) <= self._trials_max, "too many idle sessions are followed"
        waiting = {trial for ages in self._ages for trial in ages if not trial.is_over}
        assert waiting == set(self._trials.values()), "a trial is lost"
        assert np.isfinite(self.counts).all(), "a count is not finite"
        assert (self.counts >= 0.0).all(), "a count is negative"


_NOTHING: Final = (0.0, 0.0, 0.0)


ROOT_DEPTHS: Final = (1, 2, 4, 8)
"""Numbers of blocks that a prompt's roots cover."""

CHAINS_MAX: Final = 6
"""Chains of one lineage: of its latest turns, and the branches that were left last."""

RUNNING_MAX: Final = 64
"""Running turns of one lineage that are remembered."""

LEFT_PARTS: Final = 8
"""A branch counts as left if it is longer than this part of its chain: marks are coarse, and the last block
of an answer is often tokenized otherwise in the next prompt."""

_ROOT_BYTES: Final = 8


@dataclass(slots=True)
class _Chain:
    """A chain after a turn. `fork`: how many of its blocks a later prompt kept, if it was left there.

    `is_used`: a later prompt contains (nearly) all of it, so that the chain of that turn stands for it.
    """

    marks: ChainMarks
    tokens: int
    fork: int | None = None
    is_used: bool = False

    @property
    def blocks(self) -> int:
        return self.marks.blocks[-1] if self.marks.blocks else 0


@dataclass(slots=True)
class _Chains:
    """Of one lineage. `chains`: oldest first. `running`: of each running turn, its prompt's blocks, how many
    were kept, since when it runs."""

    chains: list[_Chain] = field(default_factory=list)
    running: list[tuple[int, int, float]] = field(default_factory=list)


class LineageChains:
    """The latest chains of at most `lineages_max` lineages, least recently touched dropped first."""

    def __init__(self, lineages_max: int) -> None:
        self._lineages_max = lineages_max
        self._of: OrderedDict[SessionKey, _Chains] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(self._of)

    def began(self, lineage: SessionKey, whole: SessionKey, keys: bytes, now_s: float) -> Opening:
        """Record a turn's prompt by the `keys` of its full blocks, joined; return what it says."""
        of = self._touched(lineage)
        of.running = [turn for turn in of.running if now_s - turn[2] < TURN_S_MAX]
        is_alone = not of.running
        if is_alone and of.chains:
            *older, latest = of.chains
            latest.is_used = False  # by a turn that has left no chain
            of.chains = [*(chain for chain in older if not chain.is_used), latest]
        kept, branches, regained = 0, 0, 0.0
        for chain in of.chains:
            blocks = kept_blocks(chain.marks, keys)
            kept = max(kept, blocks)
            if chain.fork is not None and is_alone:
                branches += 1
                regained += max(0, blocks - chain.fork) / (chain.blocks - chain.fork)
            is_left = chain.blocks - blocks > max(1, chain.blocks // LEFT_PARTS)
            if not is_left:
                chain.is_used = True
            elif not chain.is_used:
                chain.fork = max(blocks, chain.fork or 0)
        if len(of.running) < RUNNING_MAX:
            of.running.append((len(keys) // KEY_BYTES, kept, now_s))
        return Opening(whole, roots_of(keys), branches, regained)

    def ended(
        self, lineage: SessionKey, marks: ChainMarks, *, input_tokens: int, tokens: int, block_tokens: int
    ) -> int:
        """Record the chain of a turn that is over; return how many tokens its prompt had kept.

        `tokens`: of the chain, the answer included. Of several running turns it is the one whose prompt had
        as many blocks, else the latest.
        """
        of = self._touched(lineage)
        kept = of.chains[-1].tokens if of.chains else 0
        if of.running:
            prompts = [blocks for blocks, *_ in of.running]
            blocks = input_tokens // block_tokens
            _, of_prompt, _ = of.running.pop(prompts.index(blocks) if blocks in prompts else -1)
            kept = of_prompt * block_tokens
        of.chains.append(_Chain(marks, tokens))
        del of.chains[:-CHAINS_MAX]
        return min(kept, input_tokens)

    def forget(self, lineage: SessionKey) -> None:
        """Forget a lineage. No-op if it is unknown."""
        self._of.pop(lineage, None)

    def _touched(self, lineage: SessionKey) -> _Chains:
        of = self._of.get(lineage)
        if of is None:
            of = self._of[lineage] = _Chains()
            if len(self._of) > self._lineages_max:
                self._of.popitem(last=False)
        self._of.move_to_end(lineage)
        return of

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._of) <= self._lineages_max, "too many chains are remembered"
        for of in self._of.values():
            assert len(of.chains) <= CHAINS_MAX, "too many chains of one lineage"
            assert len(of.running) <= RUNNING_MAX, "too many turns of one lineage"
            for chain in of.chains:
                assert chain.fork is None or 0 <= chain.fork < chain.blocks, "a fork is not on its chain"


def roots_of(keys: bytes) -> tuple[int, ...]:
    """Return digests of a chain's first blocks, as far as it has `ROOT_DEPTHS`; `keys`: joined."""
    begins = [(depth - 1) * KEY_BYTES for depth in ROOT_DEPTHS if depth * KEY_BYTES <= len(keys)]
    return tuple(int.from_bytes(keys[at : at + _ROOT_BYTES], "little") for at in begins)
