"""Finds the volatile lines at the front of a system prompt: headers that some clients write into it.

They change from conversation to conversation, or with each request. In front of everything, such a line
leaves nothing in common with any other prompt. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from router.openai.messages import ChatMessage

# A value made of fields (`cc_version=2.1; cc_entrypoint=cli;`) ends with them: where a client joined its
# blocks without a line end, the prompt itself begins right behind.
FIELDS = re.compile(r"(?:[ \t]*[\w.-]+=[^;\s]*;)+(?:[ \t]*[\w.-]+=[^;\s]*(?=[ \t\r]*$))?")
LINE_END = re.compile(r"[ \t]*\r?\n?")


@dataclass(frozen=True, slots=True)
class SystemFront:
    """The volatile `lines` at the front of a system prompt with their `names`, and the `rest`."""

    names: tuple[str, ...]
    lines: tuple[str, ...]
    rest: str


def split_front(message: ChatMessage, names: tuple[str, ...]) -> SystemFront:
    """Split a system message behind the lines `NAME: ...` that it begins with. `names`: in lower case.

    A line ends with the text part in which it begins.
    """
    text, at = message.content, 0
    found: list[str] = []
    lines: list[str] = []
    while names and (named := _named(names).match(text, at)):
        part_end = next((cut for cut in message.cuts if cut >= named.end()), len(text))
        newline = text.find("\n", named.end(), part_end)
        line_end = part_end if newline < 0 else newline
        fields = FIELDS.match(text, named.end(), line_end)
        end = fields.end() if fields else line_end
        found.append(named[1].lower())
        lines.append(text[named.start(1) : end].rstrip())
        behind = LINE_END.match(text, end)
        at = behind.end() if behind else end
    return SystemFront(tuple(found), tuple(lines), text[at:])


@lru_cache(maxsize=8)
def _named(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\s*({'|'.join(map(re.escape, names))})[ \t]*:", re.IGNORECASE)
