"""Reads the calls of an answer while they are written, as each format writes them.

A reader is a generator over text that comes in pieces: it yields what is decided, None where it needs more
text, and returns where the calls are over. A call is opened when its name is known and its arguments begin;
they are passed on as they come. A mark in a text of the arguments is text: they end where their value ends
(`JsonScan`), whatever a text in them quotes. Pure.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from samovar.configs.json_text import parse_json
from samovar.replicas.reply.formats import DEEPSEEK, ReplyFormat

TOOL_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
"""What a tool may be called: in a request, and so that a call can come back."""
HEAD_CHARS_MAX = 400
"""Of what a format writes between its mark and a call's arguments."""

_BLANK = re.compile(r"\s*")
_BETWEEN = re.compile(r"[\s;,]*")
"""What may stand between two calls."""
_BEHIND = re.compile(r"[\s}\]]*")
"""What may stand between a call and its close mark: models write a bracket too many, or one too few."""
# Mistral's `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`; older models write a JSON list of calls.
_MISTRAL_HEAD = re.compile(r"\s*+(?P<name>[\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\])?+\s*+")
_DEEPSEEK_HEAD = re.compile(
    rf"\s*{DEEPSEEK['call▁begin']}(?:function{DEEPSEEK['sep']})?(?P<name>[^\n<]+)(?:\n```json\n|{DEEPSEEK['sep']})\s*"
)
_MARKS = ("<parameter=", "</function>")
"""What may stand behind a parameter."""
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_TYPE_NAMES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
"""JSON Schema's names of the types that values read from JSON have."""

Kind = Literal["content", "reasoning", "call", "arguments", "called"]
Got = TypeVar("Got")


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a message: text; or of a call its name (`call`), text of its arguments, its end."""

    kind: Kind
    text: str = ""


Steps = Generator[Piece | None, None, Got]


class NoCall(Exception):
    """What stands behind a mark is no call."""


class CallText:
    """The text behind a mark of calls, as far as it has come, and how far it is read.

    `is_ended`: no more comes. `captured`: what the mark itself says.
    """

    def __init__(
        self, form: ReplyFormat, tools: tuple[str, ...], parameters: str, captured: Mapping[str, str]
    ) -> None:
        self.text = ""
        self.is_ended = False
        self._at = 0
        self._form, self._close = form, form.close
        self._tools, self._parameters, self._captured = tools, parameters, captured

    @property
    def rest(self) -> str:
        """The text that is not read."""
        return self.text[self._at :]

    def steps(self) -> Steps[None]:
        """Return the generator that reads the calls. It raises `NoCall` before its first call only."""
        return {
            "json": self._json_calls,
            "mistral": self._mistral_calls,
            "deepseek": self._deepseek_calls,
            "named": self._named_call,
            "gemma": self._named_call,
            "xml": self._xml_call,
        }[self._form.style]()

    # What all formats are read with.

    def _skip(self, pattern: re.Pattern[str] = _BLANK) -> Steps[str]:
        """Skip what a pattern allows; return the next character, "" at the end."""
        while True:
            found = pattern.match(self.text, self._at)
            self._at = self._at if found is None else found.end()
            if self._at < len(self.text) or self.is_ended:
                return self.text[self._at : self._at + 1]
            yield None

    def _literal(self, mark: str) -> Steps[bool]:
        """Read a mark, if it comes next; return whether it does."""
        while True:
            there = self.text[self._at : self._at + len(mark)]
            if there == mark:
                self._at += len(mark)
                return True
            if not mark.startswith(there) or self.is_ended:
                return False
            yield None

    def _behind(self, mark: str, pattern: re.Pattern[str] = _BLANK, *, is_last: bool = True) -> Steps[bool]:
        """Read a mark and what may stand in front of it, if they come next.

        `is_last`: where the text ends, a part of the mark is one.
        """
        begin = self._at
        if mark:
            yield from self._skip(pattern)
            if (yield from self._literal(mark)):
                return True
            if is_last and self.is_ended and self.rest and mark.startswith(self.rest):
                self._at = len(self.text)
                return True
            self._at = begin
        return False

    def _head(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read what stands in front of a call's arguments; return its name. Raises `NoCall`."""
        while (end := self.text.find("{", self._at)) < 0:
            if self.is_ended or len(self.text) - self._at > HEAD_CHARS_MAX:
                raise NoCall
            yield None
        is_short = end - self._at <= HEAD_CHARS_MAX  # as it is where the text comes in small pieces
        found = pattern.fullmatch(self.text, self._at, end) if is_short else None
        if found is None:
            raise NoCall
        self._at = end
        return found["name"].strip()

    def _value(self) -> Steps[str]:
        """Read a JSON value; return its text. Raises `NoCall` if it is none, or has no end."""
        begin, scan = self._at, JsonScan()
        while True:
            self._at = scan.feed(self.text, self._at)
            if scan.is_over:
                return self.text[begin : self._at]
            if scan.is_broken or self.is_ended:
                raise NoCall
            yield None

    def _opened(self, name: str) -> Piece:
        """Return the begin of a call. Raises `NoCall` for what is no tool's name."""
        if not re.fullmatch(TOOL_NAME, name) or (self._form.is_bare and name not in self._tools):
            raise NoCall
        return Piece("call", name)

    def _arguments(self, close: str) -> Steps[bool]:
        """Pass on an object of arguments as it comes; return whether it is whole.

        What is no JSON is passed on as well, up to `close`: the call is known, and its client may be told
        what the model made of it.
        """
        scan = GemmaScan() if self._form.style == "gemma" else JsonScan()
        while not scan.is_over:
            if isinstance(scan, GemmaScan):
                end, told = scan.translate(self.text, self._at)
            else:
                end = scan.feed(self.text, self._at)
                told = self.text[self._at : end]
            if told:
                yield Piece("arguments", told)
            # Calls are long: what was passed on is dropped, so that a token costs no more than its own text.
            self.text, self._at = self.text[end:], 0
            if scan.is_broken:
                yield from self._as_it_stands(close)
                break
            if not scan.is_over:
                if self.is_ended:
                    self._at = len(self.text)
                    return False
                yield None
        yield Piece("called")
        return scan.is_over

    def _as_it_stands(self, close: str) -> Steps[None]:
        """Pass on what is no JSON, up to the close mark or the end."""
        while True:
            found = self.text.find(close, self._at) if close else -1
            end = len(self.text) - (0 if self.is_ended else begun(self.text, close)) if found < 0 else found
            if end > self._at:
                yield Piece("arguments", self.text[self._at : end])
            self.text, self._at = self.text[end:], 0
            if found >= 0 or self.is_ended:
                return
            yield None

    # The formats.

    def _json_calls(self) -> Steps[None]:
        """Read objects with a name and arguments: one, several one behind the other, or a list of them."""
        if is_list := (yield from self._skip()) == "[":
            self._at += 1
        found, begin = False, self._at
        while (yield from self._skip(_BETWEEN if found else _BLANK)) == "{":
            try:
                yield from self._json_call()
            except NoCall:
                if not found:
                    raise
                break
            found, begin = True, self._at
        if not found:
            raise NoCall
        self._at = begin
        if is_list:
            yield from self._behind("]")
        yield from self._behind(self._close, _BEHIND)

    def _json_call(self) -> Steps[None]:
        """Read an object: its arguments are passed on if its name came before them."""
        begin, behind, name = self._at, -1, ""  # behind: the arguments that were passed on
        self._at += 1
        char = yield from self._skip()
        while char != "}":
            try:
                key = parse_json((yield from self._value())) if char == '"' else None
                if key is None or (yield from self._skip()) != ":":
                    raise NoCall
                self._at += 1
                char = yield from self._skip()
                if name and behind < 0 and char == "{" and key in ("arguments", "parameters"):
                    yield self._opened(name)
                    if not (yield from self._arguments(self._close)):
                        return
                    behind = self._at
                else:
                    value = yield from self._value()
                    if key == "name" and behind < 0:
                        name = parse_json(value) if char == '"' else ""
                char = yield from self._skip()
                if char not in (",", "}"):
                    raise NoCall
                if char == ",":
                    self._at += 1
                    if (char := (yield from self._skip())) == "}":
                        raise NoCall
            except NoCall:
                if behind < 0:
                    raise
                while (place := _behind_call(self, behind, self._at, self._close)) < 0:
                    yield None
                self._at = place
                return
        self._at += 1
        if behind < 0:
            try:
                value = parse_json(self.text[begin : self._at])
            except ValueError:  # a number of more digits than Python reads
                raise NoCall from None
            name, arguments = call_of(value)
            yield self._opened(name)
            yield Piece("arguments", arguments)
            yield Piece("called")

    def _mistral_calls(self) -> Steps[None]:
        if (yield from self._skip()) in ("[", "{"):
            yield from self._json_calls()
            return
        yield self._opened((yield from self._head(_MISTRAL_HEAD)))
        yield from self._arguments("[TOOL_CALLS]")

    def _deepseek_calls(self) -> Steps[None]:
        end, found = DEEPSEEK["call▁end"], False
        while not (yield from self._behind(DEEPSEEK["calls▁end"], is_last=found)):
            begin = self._at
            try:
                yield self._opened((yield from self._head(_DEEPSEEK_HEAD)))
            except NoCall:
                if not found:
                    raise
                self._at = begin
                return
            found = True
            yield from self._arguments(end)
            yield from self._behind("```")
            if not (yield from self._behind(end)):
                return
        if not found:
            raise NoCall

    def _named_call(self) -> Steps[None]:
        """Read the arguments of a call whose name is part of its mark."""
        if (yield from self._skip()) != "{":
            raise NoCall
        yield self._opened(self._captured["name"].strip())
        yield from self._arguments(self._close)
        yield from self._behind(self._close)

    def _xml_call(self) -> Steps[None]:
        """Read `<parameter=key>value</parameter>`, each value of the type that its tool says."""
        name, types, is_open = self._captured["name"].strip(), {}, False
        if self._parameters:
            types = _types_of(self._parameters, name)
        while not (yield from self._behind("</function>", is_last=False)):
            key = yield from self._parameter()
            if not key:
                if not is_open:
                    raise NoCall
                if self.is_ended and (self.rest.startswith(_MARKS[0]) or _begins(self.rest)):
                    self._at = len(self.text)
                    return  # cut
                yield from self._as_it_stands("</function>")
                continue
            if not is_open:
                yield self._opened(name)
            yield Piece("arguments", f"{', ' if is_open else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            is_open = True
            if not (yield from self._parameter_value(types.get(key, ()))):
                return
        if not is_open:
            yield self._opened(name)
            yield Piece("arguments", "{")
        yield Piece("arguments", "}")
        yield Piece("called")
        yield from self._behind("</tool_call>")

    def _parameter(self) -> Steps[str]:
        """Read what opens a parameter; return its key, "" if there is none."""
        yield from self._skip()
        while True:
            there = self.text[self._at : self._at + HEAD_CHARS_MAX]
            found = _PARAMETER.match(there)
            if found is not None and (found.end() < len(there) or self.is_ended):
                self._at += found.end()
                return found[1]
            is_begun = "<parameter=".startswith(there[:11]) and (
                found or (">" not in there and "\n" not in there)
            )
            if self.is_ended or not is_begun or len(there) == HEAD_CHARS_MAX:
                return ""
            yield None

    def _parameter_value(self, types: tuple[str, ...]) -> Steps[bool]:
        """Pass on a parameter's value, a text as it comes, others when whole; return whether it ends."""
        is_text, mark, held = all(one == "string" for one in types), "</parameter>", ""
        if is_text:
            yield Piece("arguments", '"')
        while True:
            found, is_end = self.text.find(mark, self._at), False
            if found < 0:
                end = len(self.text) - max(begun(self.text, mark), begun(self.text, f"\n{mark}"))
            else:
                # A mark that nothing of the format follows is part of the text.
                behind = self.text[found + len(mark) :].lstrip()
                is_end = behind.startswith(_MARKS)
                is_open = not is_end and _begins(behind)
                end = found if is_end or is_open else found + len(mark)
                if (is_end or is_open) and self.text.endswith("\n", self._at, found):
                    end -= 1
            part, self._at = self.text[self._at : max(end, self._at)], max(end, self._at)
            if is_text and part:
                yield Piece("arguments", json.dumps(part, ensure_ascii=False)[1:-1])
            held += "" if is_text else part
            is_more = found >= 0 and end > found
            self.text, self._at = self.text[found + len(mark) if is_end else self._at :], 0
            if is_end:
                yield Piece("arguments", '"' if is_text else typed(held, types))
                return True
            if is_more:
                continue
            if self.is_ended:
                self._at = len(self.text)
                return False
            yield None


def _behind_call(calls: CallText, behind: int, broken: int, close: str) -> int:
    """Return where to read on in an object that breaks behind its call's arguments; -1: more text decides.

    That is the close mark, as what stands before it is of the call; without one it is right behind the
    arguments, so that nothing is lost.
    """
    text = calls.text
    if text.startswith("{", broken) and _BETWEEN.fullmatch(text, behind, broken):
        return behind  # a bracket too few, and the next call
    if close:
        found = text.find(close, broken)
        if found < 0 and not calls.is_ended:
            return -1
        if found < 0:
            found = text.find(close, behind)  # within a text that has no end
        if found < 0 and (part := begun(text, close)):
            found = len(text) - part
        if found >= 0:
            return found
    return broken if broken == len(text) else behind  # cut, it is no text but the rest of a call


def _begins(text: str) -> bool:
    """Return whether a text may be the beginning of a mark behind a parameter."""
    return any(mark.startswith(text) for mark in _MARKS)


def call_of(value: Any) -> tuple[str, str]:
    """Return name and arguments of a call, an object with them in any order. Raises `NoCall`."""
    try:
        given = value.get("function", value)
        name = given["name"]
        arguments = given["arguments"] if "arguments" in given else given.get("parameters", {})
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if not re.fullmatch(TOOL_NAME, name) or not isinstance(arguments, dict):
            raise NoCall
        return name, sendable(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise NoCall from None  # not logged: it is a user's text


def sendable(value: Any) -> str:
    """Return JSON text that can be sent: half a character stays escaped, a number is one of 64 bits."""
    value = finite(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def finite(value: Any) -> Any:
    """Return a value with the nearest number where JSON has a larger one than Python (`1e999`).

    Raises `ValueError` for what is no number.
    """
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("JSON has no NaN")
    return math.copysign(sys.float_info.max, value) if value in (math.inf, -math.inf) else value


def typed(text: str, types: tuple[str, ...]) -> str:
    """Return a value of a format without types as JSON: of one of `types` if it can be, else a text."""
    plain = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    scan = JsonScan()
    scan.feed(word)
    try:
        value = None if scan.is_broken else parse_json(word)
    except ValueError:
        scan.is_broken = True
    if scan.is_broken:  # also what Python's parser takes for JSON, as NaN, and what is too deep for clients'
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        value = int(value)
    if value in (0, 1) and not isinstance(value, bool) and not {"integer", "number"} & set(types):
        value = bool(value)
    is_one = any(name in types for name in _TYPE_NAMES[type(value)])
    # Of a text between quotes they are part, as it is a text with or without them.
    is_text = isinstance(value, str) or not is_one
    return json.dumps(text, ensure_ascii=False) if is_text else sendable(value)


def _types_of(parameters: str, name: str) -> dict[str, tuple[str, ...]]:
    """Return the types that a tool says of its parameters."""
    for tool in parse_json(parameters):
        function = tool.get("function", {})
        schema = function.get("parameters")
        if function.get("name") == name and isinstance(schema, dict):
            given = schema.get("properties")
            return {key: _types(one, schema) for key, one in given.items()} if isinstance(given, dict) else {}
    return {}


def _types(schema: Any, root: Any) -> tuple[str, ...]:
    """Return the types that a schema within `root` says, itself or in what it is put together of."""
    types, due, seen = list[str](), [schema], set[int]()
    while due:
        one = due.pop(0)
        if not isinstance(one, dict) or id(one) in seen:  # a reference may come back to where it stands
            continue
        seen.add(id(one))
        said = one.get("type")
        own = [kind for kind in (said if isinstance(said, list) else [said]) if isinstance(kind, str)]
        if not own:
            values = [one["const"]] if "const" in one else one.get("enum")
            own = [_TYPE_NAMES[type(value)][0] for value in values] if isinstance(values, list) else []
        types += [*own, *(["null"] if one.get("nullable") else [])]
        due += [_referred(one.get("$ref"), root)]
        for choices in (one.get("anyOf"), one.get("oneOf"), one.get("allOf")):
            due += choices if isinstance(choices, list) else []
    return tuple(dict.fromkeys(types))


def _referred(reference: Any, root: Any) -> Any:
    """Return what a reference names within a schema; None: nothing there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference.split("/")[1:]:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


DEPTH_MAX = 200
"""Of arrays and objects in one another: clients' parsers have limits, too."""

_JSON_BLANK = re.compile(r"[ \t\r\n]*")
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
            return _end(_JSON_BLANK, text, at)
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
