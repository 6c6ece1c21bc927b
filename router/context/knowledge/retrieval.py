"""Which entries a question gets: rankings are fused, and the best are taken within a budget. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from samovar.router.context.knowledge.entries import KINDS, STABLE_KINDS, EntryRef, EntryVersion

RRF_RANKS = 60
"""The constant of reciprocal rank fusion (Cormack et al., 2009)."""
WORDS_MAX = 32
WORD = re.compile(r"\w+")
STEM_CHARS = 5
"""Letters of a word that count where endings do not."""
SHARE_WEIGHT = 0.25
# Words that say nothing about what is asked; BM25 alone would let them find any entry.
_COMMON = """
a about all also am an and any are as at be been but by can could did do does for from get
give had has have he her his how i if in into is it its just let like may me more most my
no not of on one or our out over please shall she should show so some such tell than that
the their them then there these they this those to too up us use want was we were what
when where which who whose why will with would you your
"""
COMMON = frozenset(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that a search found. `ranks`: its place, from 1, in each ranking that has it."""

    version: EntryVersion
    score: float
    ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def ref(self) -> EntryRef:
        """The version found."""
        return self.version.ref

    @property
    def is_stable(self) -> bool:
        """Whether it holds for a whole conversation."""
        return self.version.content.kind in STABLE_KINDS


def words_of(question: str) -> list[str]:
    """Return the words of a question that are worth looking up, each once."""
    found = dict.fromkeys(word.lower() for word in WORD.findall(question))
    telling = [word for word in found if word not in COMMON and len(word) > 1]
    return (telling or list(found))[:WORDS_MAX]


def fuse(rankings: Mapping[str, Sequence[EntryRef]]) -> list[tuple[EntryRef, float, dict[str, int]]]:
    """Fuse rankings by reciprocal ranks: the best first; equals by id, so that the order is always the same.

    The score is 1 for an entry that is first in every ranking that found anything.
    """
    used = [name for name, ranking in rankings.items() if ranking]
    ranks: dict[EntryRef, dict[str, int]] = {}
    for name in used:
        for rank, ref in enumerate(rankings[name], 1):
            ranks.setdefault(ref, {})[name] = rank
    best = len(used) / (RRF_RANKS + 1)
    scored = [
        (ref, sum(1 / (RRF_RANKS + rank) for rank in of.values()) / best, of) for ref, of in ranks.items()
    ]
    return sorted(scored, key=lambda one: (-one[1], one[0].entry))


def shared(words: Collection[str], version: EntryVersion) -> int:
    """Return how many of these words an entry has, whatever their endings."""
    own = {word.lower()[:STEM_CHARS] for word in WORD.findall(version.content.words)}
    return sum(word[:STEM_CHARS] in own for word in words)


def tells(words: Sequence[str], version: EntryVersion) -> bool:
    """Whether an entry has enough of a question's words for that to be no accident.

    A third of them, three, or one with a digit.
    """
    numbered = [word for word in words if any(char.isdigit() for char in word)]
    own = {word.lower() for word in WORD.findall(version.content.words)} if numbered else set()
    return shared(words, version) >= min(math.ceil(len(words) / 3), 3) or not own.isdisjoint(numbered)


def rerank(question: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates by their score, raised by the share of the question's words that they have.

    Fused ranks say who is ahead, not by how much.
    """
    words = words_of(question)

    def raised(one: Candidate) -> Candidate:
        share = shared(words, one.version) / len(words) if words else 0.0
        score = one.score * (1 + SHARE_WEIGHT * share) / (1 + SHARE_WEIGHT)
        return Candidate(one.version, round(score, 6), one.ranks)

    return sorted(map(raised, candidates), key=lambda one: (-one.score, one.ref.entry))


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be placed: tokens and entries of a turn; what is over the first entry's is left out."""

    tokens: int
    entries: int


def select(
    candidates: Sequence[Candidate],
    tokens_of: Mapping[EntryRef, int],
    budget: Budget,
    *,
    placed: Collection[EntryRef] = (),
    in_use: Sequence[Collection[EntryRef]] = (),
    tie_share: float = 0.0,
) -> list[Candidate]:
    """Return the candidates to place now, the best first.

    `placed`: what the conversation holds already, which is not placed twice. `in_use`: sets that other
    conversations have in front, the latest first: the set of stable entries among these that scores best is
    taken in place of the best one, if its score is at most `tie_share` less.
    """
    open_ = [one for one in candidates if one.ref not in placed]
    best = _within(open_, tokens_of, budget)
    if not in_use or tie_share <= 0:
        return best
    by_ref = {one.ref: one for one in open_}
    own = [one for one in best if one.is_stable]
    sets = [[by_ref[ref] for ref in refs] for refs in in_use if all(ref in by_ref for ref in refs)]
    fitting = [
        taken
        for taken in sets
        if len(taken) <= budget.entries and sum(tokens_of[one.ref] for one in taken) <= budget.tokens
    ]
    used = max(fitting, key=_total, default=None)
    if used is None or {one.ref for one in used} == {one.ref for one in own}:
        return best
    refs = {one.ref for one in used}
    rest = Budget(budget.tokens - sum(tokens_of[one.ref] for one in used), budget.entries - len(used))
    others = _within([one for one in open_ if not one.is_stable and one.ref not in refs], tokens_of, rest)
    instead = sorted([*used, *others], key=lambda one: (-one.score, one.ref.entry))
    return instead if _total(instead) >= (1 - tie_share) * _total(best) else best


def _within(
    candidates: Sequence[Candidate], tokens_of: Mapping[EntryRef, int], budget: Budget
) -> list[Candidate]:
    taken: list[Candidate] = []
    tokens = 0
    for one in candidates:
        if len(taken) >= budget.entries:
            break
        if tokens + tokens_of[one.ref] <= budget.tokens:
            taken.append(one)
            tokens += tokens_of[one.ref]
    return taken


def _total(taken: Sequence[Candidate]) -> float:
    return sum(one.score for one in taken)


def canonical(versions: Sequence[EntryVersion]) -> list[EntryVersion]:
    """Return entries in the order in which they stand in every prompt: by kind, then by id."""
    return sorted(versions, key=lambda one: (KINDS.index(one.content.kind), one.ref.entry, one.ref.number))
