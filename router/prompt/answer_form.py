"""What a whole answer must look like where calls are promised: a thought, then calls or what else is allowed.

The grammar is Lark, as llguidance has it: the frame of the model's calls around the schemas of their
arguments. A mark that is one token of the model's is demanded as that token where the answer must have it;
where it is only watched for, its spelling in other tokens counts too, as the reader takes either. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.replicas.grammar import (
    WRITTEN_CHARS_MAX,
    GrammarCompiler,
    GrammarRefused,
    SchemaRefused,
    embedded_json,
)
from samovar.replicas.messages import Grammar
from samovar.replicas.reply import CallFrame, ReplyFormat
from samovar.router.openai import InvalidValue, Tool, ToolOffer, UnsupportedParameter

BRACKETED = re.compile(r"[<\[].+[>\]]", re.DOTALL)
"""What tokens look like that mark parts of an answer; others are text."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function without `parameters`."""

TEXT = r"TEXT: /(.|\n)*/"
BLANK = r"BLANK: /[ \t\r\n]{1,8}/"


@dataclass(frozen=True)
class AnswerForm:
    """The form of one request's answers.

    `opening`: what the prompt already holds of the answer. `marks`: ids of the model's own tokens, by text.
    """

    offer: ToolOffer | None
    form: ReplyFormat
    opening: str = ""
    marks: Mapping[str, int] = field(default_factory=dict)

    def grammar(self, content: Grammar | None, compiler: GrammarCompiler) -> Grammar | None:
        """Return the grammar of a whole answer; None: that of its content, if any, is all there is.

        `content`: what the request asks of what is said. Raises `InvalidValue` naming the field that cannot
        be served, `UnsupportedParameter` if the model's format has no form for it.
        """
        rules = self._rules(content)
        if not rules:
            return None
        field = "tools" if content is None or self._promise else content.field
        made = Grammar("lark", "\n".join([*rules, TEXT, BLANK]), field)
        try:
            compiler.check(made)
        except GrammarRefused as refused:
            self._blame(compiler)
            raise _invalid(refused) from None
        return made

    @property
    def _promise(self) -> str | None:
        return None if self.offer is None else self.offer.promise

    def _rules(self, content: Grammar | None) -> list[str]:
        """Return the rules of an answer, none if it needs no more than its content's grammar."""
        offer, schema = self.offer, _schema_of(content)
        frame = self._frame(offer, schema is not None and _is_of_content(content))
        if offer is not None and frame is not None:
            if offer.must_call or schema is not None:
                said = [] if offer.must_call or schema is None else [embedded_json(schema)]
                rules = [
                    f"start: {self._thought(' BLANK?')} answer",
                    f"answer: {' | '.join(['calls', *said])}",
                ]
                rules += self._calls(offer, frame, "")
            else:  # text, and calls where there are any
                rules = [f"start: {self._thought()} answer", "answer: TEXT | until_call calls"]
                rules += [
                    *_until("until_call", frame.mark, self.marks),
                    *self._calls(offer, frame, frame.mark),
                ]
        elif schema is not None and self._is_in_thought:
            rules = [f"start: {self._thought(' BLANK?')} {embedded_json(schema)}"]
        else:
            return []
        if thought := self.form.thought_marks:
            opens, closes = thought
            rules += [
                f"thought: {self._text(opens)} thought_rest",
                *_until("thought_rest", closes, self.marks),
            ]
        return rules

    def _frame(self, offer: ToolOffer | None, says_json: bool) -> CallFrame | None:
        """Return the frame of calls whose form matters; None: they are not watched for."""
        frame, promise = self.form.frame, self._promise
        if promise is None:
            can_call = says_json and offer is not None and offer.may_call
            return frame if can_call and frame is not None and frame.mark else None
        parser = f"model.tool_parser {self.form.name!r}"
        if frame is None:
            reason = f"calls in this model's format ({parser}) are not written as JSON"
        elif not frame.mark and promise != "tool_choice":
            reason = f"in this model's format ({parser}) nothing tells a call from text"
        else:
            return frame
        raise UnsupportedParameter(promise, f"{promise} is not supported: {reason}. Leave it out.")

    @property
    def _is_in_thought(self) -> bool:
        marks = self.form.thought_marks
        return marks is not None and self.opening.rfind(marks[0]) > self.opening.rfind(marks[1])

    def _thought(self, blank: str = "") -> str:
        """Return the terms of reasoning in front of an answer; `blank`: what may follow it."""
        marks, frame = self.form.thought_marks, self.form.frame
        if marks is None or (frame is not None and not frame.mark):
            return ""  # a call without a mark comes first
        if self._is_in_thought:
            return f"thought_rest{blank}"
        return "" if marks[1] in self.opening else f"(thought{blank})?"

    def _calls(self, offer: ToolOffer, frame: CallFrame, read: str) -> Iterator[str]:
        """Yield the rules of one or more calls; `read`: the mark in front of them, if it is read already."""
        tools = [tool for tool in offer.tools if offer.only in (None, tool.name)]
        more = (
            f"({self._text(frame.between)} call)*" if offer.is_parallel and frame.between is not None else ""
        )
        first = "first" if read and not frame.begin else "call"
        yield f"calls: {self._text(frame.begin.removeprefix(read))} {first} {more} {self._text(frame.end)}"
        cuts = ({"first": read} if first == "first" else {}) | (
            {"call": ""} if first == "call" or more else {}
        )
        for name, cut in cuts.items():
            each = [
                f"{self._text(frame.before.replace('{name}', tool.name).removeprefix(cut))} args_{at} "
                f"{self._text(frame.behind)}"
                for at, tool in enumerate(tools)
            ]
            yield f"{name}: {' | '.join(each)}"
        chars = 0
        for at, tool in enumerate(tools):
            if chars > WRITTEN_CHARS_MAX:
                return  # more than `grammar.spec_bytes_max` may be: the compiler refuses it by its size
            try:
                rule = f"args_{at}: {embedded_json(self._arguments(tool))}"
                chars += len(rule)
                yield rule
            except SchemaRefused as refused:
                param = f"{tool.field}.function.parameters"
                raise _invalid(GrammarRefused(param, str(refused))) from None

    def _arguments(self, tool: Tool) -> dict[str, Any]:
        """Return the schema of a tool's arguments: of an object, whatever else it says."""
        if not (tool.is_strict or (self.offer is not None and self.offer.must_call)):
            return dict(ANY_OBJECT)
        given = tool.spec["function"].get("parameters", NO_ARGUMENTS)
        kind = given.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            param = f"{tool.field}.function.parameters"
            raise InvalidValue(param, f"{param}.type must be 'object': a call's arguments are one.")
        return {**given, "type": "object"}

    def _blame(self, compiler: GrammarCompiler) -> None:
        """Raise `InvalidValue` for the first tool whose schema cannot be served alone, if there is one."""
        for tool in self.offer.tools if self.offer is not None and self._promise else ():
            schema = json.dumps(self._arguments(tool))
            try:
                compiler.check(Grammar("json_schema", schema, f"{tool.field}.function.parameters"))
            except GrammarRefused as refused:
                raise _invalid(refused) from None

    def _text(self, text: str) -> str:
        """Return the terms of a text: its marks as tokens, the rest as it is spelled."""
        marks = [re.escape(mark) for mark in sorted(self.marks, key=len, reverse=True) if mark in text]
        parts = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        return " ".join(
            f"<[{self.marks[part]}]>" if part in self.marks else _literal(part) for part in parts if part
        )


def _until(name: str, mark: str, marks: Mapping[str, int]) -> list[str]:
    """Return the rules of any text up to a mark, which ends it wherever it comes."""
    token = f" | TEXT <[{marks[mark]}]>" if mark in marks else ""
    return [f"{name}_spelled[lazy]: TEXT {_literal(mark)}", f"{name}: {name}_spelled{token}"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_of_content(content: Grammar | None) -> bool:
    """Return whether a form is that of what is said, not of a whole answer: as OpenAI defines its own."""
    return content is not None and content.field.startswith("response_format")


def _schema_of(content: Grammar | None) -> dict[str, Any] | None:
    """Return the JSON Schema that content follows; None: another grammar, or none."""
    if content is None or content.kind != "json_schema":
        return None
    schema = parse_json(content.text)
    return schema if isinstance(schema, dict) else None


def _invalid(refused: GrammarRefused) -> InvalidValue:
    return InvalidValue(refused.field, f"{refused}.", code="invalid_grammar")
