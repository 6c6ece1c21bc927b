"""What is wrong with a configuration, said to the person who can repair it.

A problem names the key, the value, the place the value came from and the fix. This module
does not know how problems are found, and it is handed no secrets: whoever builds a problem
leaves a secret's value out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """`key` is a setting or what was mistaken for one; `value` is None where it may not be shown."""

    key: str
    origin: str
    message: str
    fix: str
    value: str | None = None

    def __str__(self) -> str:
        shown = self.key if self.value is None else f"{self.key} = {self.value}"
        return f"{shown}  (from {self.origin})\n    {self.message}. {self.fix}."


class ConfigError(Exception):
    """The configuration cannot be used. `problems` lists every reason, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        head = (
            "the configuration has a problem:"
            if len(self.problems) == 1
            else "the configuration has problems:"
        )
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def did_you_mean(word: str, candidates: Iterable[str], separator: str = ".") -> str | None:
    """The candidate that `word` was probably meant to be, or None.

    The last part counts for itself, so that a key in the wrong section is found as well.
    """
    known = list(candidates)
    leaf = word.rsplit(separator, 1)[-1]
    by_leaf: dict[str, str] = {}
    for name in known:
        by_leaf.setdefault(name.rsplit(separator, 1)[-1], name)
    if leaf in by_leaf:
        return by_leaf[leaf]
    if close := difflib.get_close_matches(word, known, n=1, cutoff=0.75):
        return close[0]
    if close := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6):
        return by_leaf[close[0]]
    return None
