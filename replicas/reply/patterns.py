"""Patterns that a model brings with it, each search within a time: they run on every answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

logger = logging.getLogger(__name__)

PATTERN_S_MAX = 0.5
"""How long a search may take: what an honest pattern needs for the longest answer, a hundred times."""
STRIKES_MAX = 3
"""Searches in a row that take longer, after which a pattern finds nothing any more."""
TRIES_MAX = 6
"""Of one search, each with twice the time: a process of 32 busy cores takes no more from it."""


class TimedPattern:
    """A compiled pattern whose searches end. One that does not end in time has found nothing."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern
        self._strikes = 0
        self.groupindex = pattern.groupindex
        self.pattern = pattern.pattern

    def search(self, text: str, pos: int = 0, **how: Any) -> Any:
        """Return the first match, or None."""
        return self._timed(self._pattern.search, text, pos, **how)

    def match(self, text: str, pos: int = 0, **how: Any) -> Any:
        """Return the match at `pos`, or None."""
        return self._timed(self._pattern.match, text, pos, **how)

    def finditer(self, text: str, pos: int = 0) -> Iterator[Any]:
        """Iterate over all matches."""

        def every(text: str, pos: int, **how: Any) -> list[Any]:
            return list(self._pattern.finditer(text, pos, **how))

        return iter(self._timed(every, text, pos) or ())

    def _timed(self, call: Any, text: str, pos: int, **how: Any) -> Any:
        if self._strikes >= STRIKES_MAX:
            return None
        try:
            found = _in_time(call, text, pos, **how)
        except TimeoutError as late:
            self._strikes += bool(late.args)
            logger.warning(
                "a pattern of the model's response template takes longer than %g s: %.200s",
                PATTERN_S_MAX,
                self.pattern,
            )
            return None
        self._strikes = 0
        return found


def _in_time(search: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Return what a search finds. Raises `TimeoutError`, with words if it was the search that took the time.

    `regex` counts the CPU seconds of all threads of the process. A search that others have robbed of
    its time is done again, with twice as much.
    """
    limit_s = PATTERN_S_MAX
    for _ in range(TRIES_MAX):
        began_s = time.thread_time()
        try:
            return search(*args, timeout=limit_s, **how)
        except TimeoutError:
            if time.thread_time() - began_s > PATTERN_S_MAX:
                raise TimeoutError("the search itself") from None
            limit_s *= 2
    raise TimeoutError


def timed(template: ResponseTemplate) -> ResponseTemplate:
    """Return a template whose declared patterns are timed; what is searched literally is so by itself."""

    def made(pattern: Any, literals: list[str] | None) -> Any:
        return pattern if pattern is None or literals is not None else TimedPattern(pattern)

    fields = {
        name: replace(
            field,
            open_re=made(field.open_re, field.open_literals),
            close_re=made(field.close_re, field.close_literals),
        )
        for name, field in template.fields.items()
    }
    return replace(template, fields=fields)


def without_tags(tag_pattern: str, text: str) -> str:
    """Return what stands between the tags of a text. Raises `ValueError` if that takes too long."""
    import regex  # transformers' own engine: what ends here ends there

    try:
        rest: str = _in_time(regex.sub, tag_pattern, "", text, flags=regex.DOTALL)
        return rest
    except TimeoutError:
        raise ValueError(f"a pattern of the response template takes longer than {PATTERN_S_MAX} s") from None
