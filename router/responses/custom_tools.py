"""Tools whose input is text (`custom`, as Codex's apply_patch): functions of a string to the model. Pure."""

from __future__ import annotations

import re
from typing import Any

from samovar.configs.json_text import parse_json

INPUT = "input"
"""The parameter of the function that a model is offered for such a tool."""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# A string's text up to where it ends or is cut: whole characters, whole escapes, no half of a pair.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r'|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\["\\/bfnrt])*'
)


BEGIN_CHARS_MAX = 400
"""Of a call's arguments up to the text of their input."""
ESCAPE_CHARS = 12
"""Of the longest escape, a pair."""

_CONTROL = re.compile("[\x00-\x1f]")  # models write line ends as they are


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class InputReader:
    """Reads the input in a call's arguments while they are written; each character once."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_begun = self._is_over = False

    def feed(self, arguments: str) -> str:
        """Read more of the arguments; return what they add to the input."""
        if self._is_over:
            return ""
        self._unread += arguments
        if not self._is_begun:
            begin = _BEGIN.match(self._unread[:BEGIN_CHARS_MAX])
            if begin is None:
                self._is_over = len(self._unread) >= BEGIN_CHARS_MAX
                return ""
            self._is_begun, self._unread = True, self._unread[begin.end() :]
        whole = _WHOLE.match(self._unread)
        assert whole is not None
        self._unread = self._unread[whole.end() :]
        self._is_over = self._unread.startswith('"') or len(self._unread) >= ESCAPE_CHARS
        text: str = parse_json(f'"{_CONTROL.sub(_escaped, whole[0])}"')
        return text


def input_so_far(arguments: str) -> str:
    """Return the input in a call's arguments, as far as they were written."""
    return InputReader().feed(arguments)


def input_of(arguments: str) -> str:
    """Return the input in a call's arguments; of those that have none, the arguments.

    It begins with what `InputReader` tells of them.
    """
    told = input_so_far(arguments)
    try:
        value = parse_json(arguments)
    except (ValueError, RecursionError):
        return told or arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    made = text if isinstance(text, str) else arguments
    return made if made.startswith(told) else told
