"""Reads an answer's text, piece by piece or at once, into reasoning, content and tool calls.

Text that looks like a call and is none becomes content as it stands: nothing of an answer is lost. A call is
told when it is complete, so that its arguments are always valid JSON. However the text is cut into pieces,
the same message comes out. Pure.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from json import JSONDecoder
from typing import Any, Literal

from configs.json_text import parse_json
from replicas.reply.formats import CALLS, DEEPSEEK, THOUGHTS, ReplyFormat
from replicas.reply.patterns import without_tags

BLANK_CHARS_MAX = 256
"""White space in one run that is held back; more of it is text."""
# Mistral's `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`; older models write a JSON list of calls.
_MISTRAL_CALL = re.compile(
    r"\s*(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?(?P<arguments>\s*\{.*)", re.DOTALL
)
_DEEPSEEK_CALL = re.compile(
    rf"\s*{DEEPSEEK['call▁begin']}(?:function{DEEPSEEK['sep']})?(?P<name>[^\n<]+)(?:\n```json\n|{DEEPSEEK['sep']})"
    rf"(?P<arguments>(?:(?!{DEEPSEEK['call▁begin']}).)*?)(?:\n```)?{DEEPSEEK['call▁end']}\s*",
    re.DOTALL,
)
TOOL_NAME = r"[A-Za-z0-9_.:/-]{1,128}"
"""What a tool may be called: in a request, and so that a call can come back."""
_BETWEEN = re.compile(r"[\s;,]*")
"""What may stand between two calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model calls. `arguments`: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a message: text, or a whole call."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


@dataclass(slots=True)
class Reply:
    """An answer as a message. `is_cut`: calls beyond the only one that was allowed are left out."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """How one request's answers are read.

    `opening`: what the prompt already holds of the answer. `tools`: the names of the tools that may be
    called; empty: text that looks like a call is content. `parameters`: JSON of the tools, by which values in
    formats without types are read. `is_parallel`: an answer may hold several calls.
    """

    form: ReplyFormat
    opening: str = ""
    tools: tuple[str, ...] = ()
    parameters: str = ""
    is_parallel: bool = True


class ReplyReader:
    """Reads one answer: `feed` its text, then `finish`."""

    def __init__(self, reading: ReplyReading) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # see formats.py

        self.reply = Reply()
        self._reading = reading
        self._template = reading.form.template(reads_calls=bool(reading.tools))
        self._parser = ResponseParser(self._template, prefix=reading.opening)
        self._text = reading.opening  # all that the parser has got
        self._at = 0  # as far as it has told
        self._region_start = 0
        self._said = _Words("content")
        self._thought = _Words("reasoning")
        for _ in self._pieces(self._parser.initial_events):
            pass  # the client has it already
        self._region_start = max(self._region_start, len(reading.opening))
        self.reply = Reply()
        self._said.blank = self._thought.blank = ""

    def feed(self, text: str) -> list[Piece]:
        """Read more of the answer; return what is decided."""
        self._text += text
        return list(self._pieces(self._parser.feed(text)))

    def finish(self) -> list[Piece]:
        """Read the end of the answer; return the rest."""
        _, events = self._parser.finalize()
        pieces = list(self._pieces(events))
        if self._said.blank and not (self.reply.calls or self._said.trims):
            pieces += self._told("content", self._said.blank)
        return pieces

    def _pieces(self, events: list[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            name, kind = event["field"], event["type"]
            region = self._template.fields[name]
            if kind == "region_chunk":
                self._at = self._text.find(event["text"], self._at) + len(event["text"])
                if name in THOUGHTS:
                    yield from self._worded(self._thought, event["text"])
                elif name != CALLS:
                    yield from self._worded(self._said, event["text"])
            elif region.open_re is None:
                continue  # the rest: it has no delimiters
            elif kind == "region_open":
                self._region_start, self._at = self._place(region.open_re)
                self._thought = _Words("reasoning", trims=True)
            elif kind == "region_close":
                if region.close_re is not None:
                    _, self._at = self._place(region.close_re)
                if name == CALLS:
                    yield from self._called(self._text[self._region_start : self._at])
                else:
                    self._said.trims = not self.reply.content

    def _place(self, delimiter: Any) -> tuple[int, int]:
        """Return where the delimiter that was just read begins and ends."""
        found = delimiter.match(self._text, self._at) or delimiter.search(self._text, self._at)
        return (self._at, self._at) if found is None else (found.start(), found.end())

    def _worded(self, words: _Words, text: str) -> Iterator[Piece]:
        if come := words.add(text):
            yield from self._told(words.kind, come)

    def _told(self, kind: Literal["content", "reasoning"], text: str) -> Iterator[Piece]:
        if kind == "content":
            self.reply.content += text
        else:
            self.reply.reasoning += text
        yield Piece(kind, text)

    def _called(self, raw: str) -> Iterator[Piece]:
        """Pass on the calls in a region's text, or the text where it holds none."""
        calls = _calls_in(raw, self._reading)
        if not calls:
            yield from self._worded(self._said, raw)
            return
        self._said.trims = not self.reply.content
        for call in calls:
            if self.reply.calls and not self._reading.is_parallel:
                self.reply.is_cut = True
                return
            self.reply.calls.append(call)
            yield Piece("call", call=call)


@dataclass(slots=True)
class _Words:
    """Text of one kind, without white space at its end as long as that may be the message's end.

    `trims`: white space in front of the next text is left out. `is_long`: more than `BLANK_CHARS_MAX` of
    white space, which is passed on as text.
    """

    kind: Literal["content", "reasoning"]
    blank: str = ""
    trims: bool = False
    is_long: bool = False

    def add(self, text: str) -> str:
        """Return what may be passed on."""
        if self.trims:
            text = text.lstrip()
            self.trims = not text
        words = text.rstrip()
        if self.is_long and not words:
            return text
        if words:
            words, self.is_long = self.blank + words, False
            self.blank = text[len(text.rstrip()) :]
        else:
            self.blank += text
        if len(self.blank) > BLANK_CHARS_MAX:
            words, self.blank, self.is_long = words + self.blank, "", True
        return words


def read_reply(reading: ReplyReading, text: str) -> Reply:
    """Return a whole answer as a message."""
    reader = ReplyReader(reading)
    reader.feed(text)
    reader.finish()
    return reader.reply


def called_tool(reading: ReplyReading, text: str) -> str | None:
    """Return the name of the first tool that an answer calls; None if it calls none."""
    calls = read_reply(reading, text).calls
    return calls[0].name if calls else None


def _calls_in(raw: str, reading: ReplyReading) -> list[Call]:
    """Return the calls that a region's text holds; none if any part of it is not a call."""
    try:
        calls = [_call(value) for value in _values(raw, reading)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []  # not logged: it is a user's text
    is_known = all(call.name in reading.tools for call in calls)
    return calls if is_known or not reading.form.is_bare else []


def _values(raw: str, reading: ReplyReading) -> list[Any]:
    form = reading.form
    region = form.call_fields().fields[CALLS]
    opened = region.open_re.match(raw)
    if opened is None:
        raise ValueError("the region's text does not begin with its mark")
    closes = [] if region.close_re is None else list(region.close_re.finditer(raw, opened.end()))
    body = raw[opened.end() : closes[-1].start() if closes and closes[-1].end() == len(raw) else None]
    if form.style == "json":
        return list(_json_values(body))
    if form.style == "mistral":
        named = _MISTRAL_CALL.fullmatch(body)
        if named is None:
            return list(_json_values(body))
        return [{"name": named["name"], "arguments": parse_json(named["arguments"])}]
    if form.style == "deepseek":
        found = list(_DEEPSEEK_CALL.finditer(body))
        if "".join(call[0] for call in found) != body:
            raise ValueError("text between the calls")
        return [{"name": call["name"], "arguments": parse_json(call["arguments"])} for call in found]
    from transformers.utils.chat_parsing import parse_response

    if region.content == "xml-inline" and without_tags(region.content_args["tag_pattern"], body).strip():
        raise ValueError("text between the parameters")
    tools = parse_json(reading.parameters) if reading.parameters else None
    return list(_flat(parse_response(raw, form.call_fields(), prefix="", tools=tools).get(CALLS, [])))


def _flat(values: Any) -> Iterator[Any]:
    """Yield the calls of a field that repeats, each one or a list of them."""
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, list):
            yield from value
        else:
            yield value


def _json_values(text: str) -> Iterator[Any]:
    """Yield the objects of a JSON text: one, a list of them, or several behind one another."""
    decoder, at = JSONDecoder(parse_constant=_refuse), len(text) - len(text.lstrip())
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]
        behind = _BETWEEN.match(text, at)
        at = behind.end() if behind else at


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _call(value: Any) -> Call:
    """Return the call that a value is; raise `ValueError`, `KeyError` or `TypeError` if it is none."""
    given: Mapping[str, Any] = value.get("function", value) if isinstance(value, dict) else {}
    if not isinstance(given, dict):
        raise ValueError("no object")
    name = given["name"]
    arguments = given["arguments"] if "arguments" in given else given.get("parameters", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name) or not isinstance(arguments, dict):
        raise ValueError("a call has a name and an object of arguments")
    return Call(name, _json_text(arguments))


def _finite(value: Any) -> Any:
    """Return a value with the nearest number where JSON has a larger one than Python (`1e999`)."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return math.copysign(sys.float_info.max, value) if value in (math.inf, -math.inf) else value


def _json_text(value: Any) -> str:
    """Return JSON text that can be sent: half a character stays escaped, a number is one of 64 bits."""
    value = _finite(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
