"""Patterns that a model brings with it, each search within a time: they run on every answer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

logger = logging.getLogger(__name__)

PATTERN_S_MAX = 0.5
"""How long a search may take: what an honest pattern needs for the longest answer, a hundred times."""
STRIKES_MAX = 3
"""Searches that take longer, after which a pattern finds nothing any more."""


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
            return call(text, pos, timeout=PATTERN_S_MAX, **how)
        except TimeoutError:
            self._strikes += 1
            logger.warning(
                "a pattern of the model's response template takes longer than %g s: %.200s",
                PATTERN_S_MAX,
                self.pattern,
            )
            return None


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
        rest: str = regex.sub(tag_pattern, "", text, flags=regex.DOTALL, timeout=PATTERN_S_MAX)
        return rest
    except TimeoutError:
        raise ValueError(f"a pattern of the response template takes longer than {PATTERN_S_MAX} s") from None
