"""Reads an answer's text, piece by piece or at once, into reasoning, content and tool calls.

Text that looks like a call and is none becomes content as it stands: nothing of an answer is lost. A call is
told when its name is known, and its arguments as they come: at a cut there are as many as had come. However
the text is cut into pieces, the same message comes out. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from samovar.configs.json_text import parse_json
from samovar.replicas.reply.calls import CallText, NoCall, Piece, Steps, call_of
from samovar.replicas.reply.formats import CALLS, THOUGHTS, ReplyFormat
from samovar.replicas.reply.patterns import without_tags

BLANK_CHARS_MAX = 256
"""White space in one run that is held back; more of it is text."""


@dataclass(slots=True)
class Call:
    """A tool that the model calls. `arguments`: the text of a JSON object, or what there is of it.

    `is_whole`: False: the answer was cut within the arguments.
    """

    name: str
    arguments: str
    is_whole: bool = True

    @property
    def value(self) -> dict[str, Any] | None:
        """The arguments as an object; None: they are none."""
        try:
            value = parse_json(self.arguments)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None


@dataclass(slots=True)
class Reply:
    """An answer as a message. `is_cut`: calls beyond the only one that was allowed are left out."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = False

    @property
    def ends_in_calls(self) -> bool:
        """Whether it calls tools, and none of the calls is cut."""
        return bool(self.calls) and self.calls[-1].is_whole


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """How one request's answers are read.

    `opening`: what the prompt already holds of the answer. `tools`: the names of the tools that may be
    called; empty: text that looks like a call is content. `parameters`: JSON of the tools, by which values in
    formats without types are read. `is_parallel`: an answer may hold several calls. `is_promised`: an answer
    is calls and, before them, reasoning: nothing of it is content.
    """

    form: ReplyFormat
    opening: str = ""
    tools: tuple[str, ...] = ()
    parameters: str = ""
    is_parallel: bool = True
    is_promised: bool = False


class ReplyReader:
    """Reads one answer: `feed` its text, then `finish`."""

    def __init__(self, reading: ReplyReading) -> None:
        self.reply = Reply()
        self._reading = reading
        self._reads_calls = bool(reading.tools)
        self._said = _Words("content")
        self._thought = _Words("reasoning")
        self._calls: CallText | None = None  # of a region of calls that is read
        self._steps: Steps[None] | None = None
        self._mark = ""  # in front of it
        self._before = 0  # of the mark and the region: what the prompt has
        self._is_muted = False  # a call is read that is not told
        self._region_start = 0
        self._begin("")
        pieces = list(self._read(reading.opening))
        # The client has what the prompt holds; of a call that goes on it is told all.
        self.reply, self._said.blank, self._thought.blank, self._is_muted = Reply(), "", "", False
        begins = [number for number, piece in enumerate(pieces) if piece.kind == "call"]
        self._due: list[Piece] = pieces[begins[-1] :] if begins and self._calls is not None else []
        self._before = len(self._mark) + len(self._calls.text) if self._calls is not None else 0
        self._region_start = max(self._region_start, len(reading.opening))

    def feed(self, text: str) -> list[Piece]:
        """Read more of the answer; return what is decided."""
        due, self._due = self._due, []
        return [*(one for piece in due for one in self._counted(piece)), *self._read(text)]

    def finish(self) -> list[Piece]:
        """Read the end of the answer; return the rest."""
        pieces = list(self._read("", is_end=True))
        if self._reading.is_promised and len(self._reading.tools) == 1 and not self.reply.calls:
            pieces += self._counted(Piece("call", self._reading.tools[0]))
        if self._said.blank and not (self.reply.calls or self._said.trims):
            pieces += self._told("content", self._said.blank)
        return pieces

    def _begin(self, text: str) -> list[dict[str, Any]]:
        """Begin to read text that is in no region; return its events."""
        from transformers.utils.chat_parsing import ResponseParser  # see formats.py

        self._template = self._reading.form.template(reads_calls=self._reads_calls)
        self._parser = ResponseParser(self._template, prefix="")
        self._text = text  # all that the parser has got
        self._at = self._region_start = 0  # as far as it has told
        events: list[dict[str, Any]] = self._parser.feed(text)
        return events

    def _read(self, text: str, *, is_end: bool = False) -> Iterator[Piece]:
        """Read more; `is_end`: no more comes."""
        if self._calls is not None:
            self._calls.text += text
        else:
            self._text += text
            events = self._parser.feed(text)
            yield from self._pieces([*events, *(self._parser.finalize()[1] if is_end else [])])
        while self._calls is not None:
            self._calls.is_ended = is_end
            rest = yield from self._called_on(self._calls)
            if rest is None:
                return
            events = self._begin(rest)
            yield from self._pieces([*events, *(self._parser.finalize()[1] if is_end else [])])

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
                found = self._place(region.open_re)
                self._region_start, self._at = found.start(), found.end()
                if name == CALLS and self._reading.form.style != "declared":
                    self._open_calls(found)
                    return
                self._thought = _Words("reasoning", trims=True)
            elif kind == "region_close":
                if region.close_re is not None:
                    self._at = self._place(region.close_re).end()
                if name == CALLS:
                    yield from self._declared(self._text[self._region_start : self._at])
                else:
                    self._said.trims = not self.reply.content

    def _place(self, delimiter: Any) -> Any:
        """Return the match of the delimiter that was just read."""
        found = delimiter.match(self._text, self._at) or delimiter.search(self._text, self._at)
        return re.compile("").match(self._text, self._at) if found is None else found

    def _open_calls(self, mark: Any) -> None:
        """Take over from the parser behind a mark of calls: only who reads them finds their end."""
        reading, self._mark, self._before = self._reading, mark[0], 0
        self._calls = CallText(reading.form, reading.tools, reading.parameters, mark.groupdict())
        self._calls.text = self._text[mark.end() :]
        self._steps = self._calls.steps()
        if reading.form.is_bare:
            self._reads_calls = False  # they are all of an answer, or none

    def _called_on(self, calls: CallText) -> Generator[Piece, None, str | None]:
        """Read calls on; return the text behind them, None if they are not over."""
        assert self._steps is not None
        try:
            for piece in self._steps:
                if piece is None:
                    return None
                yield from self._counted(piece)
            rest = calls.rest
        except NoCall:
            yield from self._worded(self._said, self._mark[self._before :])
            rest = calls.text[max(0, self._before - len(self._mark)) :]
        self._calls = None
        return rest

    def _counted(self, piece: Piece) -> Iterator[Piece]:
        """Pass on a piece of a call, unless it is one too many."""
        calls = self.reply.calls
        if piece.kind == "call":
            self._said.trims = not self.reply.content
            self._is_muted = bool(calls) and not self._reading.is_parallel
            self.reply.is_cut |= self._is_muted
        if self._is_muted:
            return
        if piece.kind == "call":
            calls.append(Call(piece.text, "", is_whole=False))
        elif piece.kind == "arguments":
            calls[-1].arguments += piece.text
        else:
            calls[-1].is_whole = True
        yield piece

    def _worded(self, words: _Words, text: str) -> Iterator[Piece]:
        if come := words.add(text):
            yield from self._told(words.kind, come)

    def _told(self, kind: Literal["content", "reasoning"], text: str) -> Iterator[Piece]:
        if kind == "reasoning":
            self.reply.reasoning += text
        elif self._reading.is_promised:
            return  # the beginning of a call that was cut
        else:
            self.reply.content += text
        yield Piece(kind, text)

    def _declared(self, raw: str) -> Iterator[Piece]:
        """Pass on the calls in a region's text, or the text where it holds none."""
        calls = _declared_calls(raw, self._reading)
        if not calls:
            yield from self._worded(self._said, raw)
        for name, arguments in calls:
            for piece in (Piece("call", name), Piece("arguments", arguments), Piece("called")):
                yield from self._counted(piece)


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


def called_tools(reading: ReplyReading, text: str) -> list[str]:
    """Return the names of the tools that an answer calls; none if it calls none, or none to its end."""
    reply = read_reply(reading, text)
    return [call.name for call in reply.calls] if reply.ends_in_calls else []


def _declared_calls(raw: str, reading: ReplyReading) -> list[tuple[str, str]]:
    """Return name and arguments of the calls in a region's text; none if any part of it is not a call."""
    from transformers.utils.chat_parsing import parse_response

    fields = reading.form.call_fields()
    region = fields.fields[CALLS]
    try:
        opened = region.open_re.match(raw)
        closes = [] if region.close_re is None else list(region.close_re.finditer(raw, opened.end()))
        body = raw[opened.end() : closes[-1].start() if closes and closes[-1].end() == len(raw) else None]
        if region.content == "xml-inline" and without_tags(region.content_args["tag_pattern"], body).strip():
            return []  # text between the parameters
        tools = parse_json(reading.parameters) if reading.parameters else None
        return [call_of(value) for value in _flat(parse_response(raw, fields, prefix="", tools=tools))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, NoCall):
        return []  # not logged: it is a user's text


def _flat(message: dict[str, Any]) -> Iterator[Any]:
    """Yield the calls of a message, each one or a list of them."""
    values = message.get(CALLS, [])
    for value in values if isinstance(values, list) else [values]:
        yield from value if isinstance(value, list) else [value]
