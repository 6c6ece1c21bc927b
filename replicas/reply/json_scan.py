"""Follows one JSON value through text that comes in pieces: to its end, or to where it is no JSON any more.

So a call's arguments end where their value ends, whatever a text in them quotes, and can be passed on while
they are written. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Literal

DEPTH_MAX = 200
"""Of arrays and objects in one another: clients' parsers have limits, too."""

_BLANK = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")

_Due = Literal[
    "value", "value or end", "key", "key or end", "colon", "comma or end", "text", "number", "word"
]


class JsonScan:
    """One JSON value: `feed` its text. `is_over`: it is complete; `is_broken`: what came is no JSON."""

    def __init__(self) -> None:
        self.is_over = self.is_broken = False
        self._stack: list[str] = []  # the ends of what is open
        self._due: _Due = "value"
        self._is_key = False  # the text that is read
        self._escape = -1  # in a text: what an escape still needs; 4: hex digits, 0: its letter
        self._token = ""  # of a number, or the rest of a word

    def feed(self, text: str, at: int = 0) -> int:
        """Read text from `at` on; return the place behind the last character that belongs to the value."""
        while at < len(text) and not (self.is_over or self.is_broken):
            at = self._text(text, at) if self._due == "text" else self._next(text, at)
        return at

    def expects_key(self) -> bool:
        """Return whether a key of an object may come next."""
        return self._due in ("key", "key or end")

    def _text(self, text: str, at: int) -> int:
        if self._escape >= 0:
            char = text[at]
            if self._escape == 0:
                self._escape = 4 if char == "u" else -1
                self.is_broken = char not in '"\\/bfnrtu'
            else:
                self._escape = self._escape - 1 or -1
                self.is_broken = char not in _HEX
            return at if self.is_broken else at + 1
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._due = "colon" if self._is_key else "comma or end"
            self._ended()
        elif text[at] == "\\":
            self._escape = 0
        else:
            self.is_broken = True  # a control character
            return at
        return at + 1

    def _next(self, text: str, at: int) -> int:
        char = text[at]
        if self._due == "number":
            if char in "0123456789+-.eE":
                self._token += char
                return at + 1
            if not _NUMBER.fullmatch(self._token):
                self.is_broken = True
            else:
                self._due = "comma or end"
                self._ended()
            return at
        if self._due == "word":
            if not self._token.startswith(char):
                self.is_broken = True
                return at
            self._token = self._token[1:]
            if not self._token:
                self._due = "comma or end"
                self._ended()
            return at + 1
        if char in " \t\r\n":
            return _end(_BLANK, text, at)
        self.is_broken = not self._takes(char)
        return at if self.is_broken else at + 1

    def _takes(self, char: str) -> bool:
        """Take a character outside of texts, numbers and words; return whether it may stand there."""
        due = self._due
        if due in ("comma or end", "value or end", "key or end") and self._stack and char == self._stack[-1]:
            self._stack.pop()
            self._due = "comma or end"
            self._ended()
        elif due == "comma or end":
            self._due = "key" if self._stack and self._stack[-1] == "}" else "value"
            return char == ","
        elif due == "colon":
            self._due = "value"
            return char == ":"
        elif char == '"':
            self._is_key, self._due = due in ("key", "key or end"), "text"
        elif due in ("key", "key or end"):
            return False
        elif char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._due = "key or end" if char == "{" else "value or end"
            return len(self._stack) <= DEPTH_MAX
        elif char in _WORDS:
            self._due, self._token = "word", _WORDS[char][1:]
        elif char in "-0123456789":
            self._due, self._token = "number", char
        else:
            return False
        return True

    def _ended(self) -> None:
        """Note the end of a text, a number, a word, an array or an object."""
        self.is_over = not self._stack and self._due == "comma or end"


class GemmaScan(JsonScan):
    """A value as Gemma 4 writes it, told as JSON: its keys are bare, its texts stand between `<|"|>`."""

    QUOTE = '<|"|>'
    _KEY = re.compile(r"(\w{1,256})\s{0,8}:")
    _KEY_BEGUN = re.compile(r"\w{1,256}\s{0,8}")

    def __init__(self) -> None:
        super().__init__()
        self._is_quoted = False

    def translate(self, text: str, at: int) -> tuple[int, str]:
        """Read text from `at` on; return how far it is decided, and what that is as JSON."""
        told: list[str] = []
        while at < len(text) and not (self.is_over or self.is_broken):
            begin = at
            if self._is_quoted:
                found = text.find(self.QUOTE, at)
                end = len(text) - begun(text, self.QUOTE) if found < 0 else found
                part = json.dumps(text[at:end], ensure_ascii=False)[1:-1]
                self._is_quoted = found < 0
                if self._is_quoted and not part:
                    break
                part, at = (part, end) if found < 0 else (f'{part}"', end + len(self.QUOTE))
            elif self._due == "text":
                part, at = text[at], at + 1
            elif text.startswith(self.QUOTE, at):
                part, at, self._is_quoted = '"', at + len(self.QUOTE), True
            elif text[at] == "<" and self.QUOTE.startswith(text[at:]):
                break
            elif self.expects_key() and (key := self._KEY.match(text, at)):
                part, at = f'"{key[1]}":', key.end()
            elif self.expects_key() and self._KEY_BEGUN.fullmatch(text, at):
                break  # a key that is not whole
            else:
                part, at = text[at], at + 1
            end = JsonScan.feed(self, part)
            told.append(part[:end])
            if end < len(part):  # it broke, or this character only ends a number
                at = begin
        return at, "".join(told)


def begun(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the begin of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
