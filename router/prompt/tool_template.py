"""Tools in prompts and answers: how a chat template writes them, and what an answer that must call looks
like.

What a template can do is found by rendering a conversation with a call. For a template that knows no tools,
or that writes calls in a form that cannot be read, they are written as Hermes does: a section of the system
prompt, `<tool_call>` and `<tool_response>`. The section comes before the client's own system prompt, which
changes more often.

Where calls are promised, the whole answer has a grammar: a thought, then calls or what else is allowed. It is
Lark, as llguidance has it: the frame of the model's calls around the schemas of their arguments. A mark that
is one token of the model's is demanded as that token where the answer must have it; where it is only watched
for, its spelling in other tokens counts too, as the reader takes either. Pure except for the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from samovar.configs.json_text import parse_json
from samovar.configs.settings import ModelSettings
from samovar.replicas.grammar import (
    WRITTEN_CHARS_MAX,
    GrammarCompiler,
    GrammarRefused,
    SchemaRefused,
    embedded_json,
)
from samovar.replicas.messages import Grammar
from samovar.replicas.reply import CallFrame, ReplyFormat, declared_format, format_named, sniffed_format
from samovar.replicas.templates import TEMPLATE_FAULTS, Template, TemplateLimit, refused_model, rendered
from samovar.router.openai import (
    ChatMessage,
    InvalidValue,
    ParsedChat,
    Tool,
    ToolCall,
    ToolOffer,
    UnsupportedParameter,
    led,
)

logger = logging.getLogger(__name__)


Json = dict[str, Any]

THOUGHT_VARIABLES = ("enable_thinking", "thinking", "reasoning_effort")
"""What templates call the switch of their reasoning."""

SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""A call's id as Mistral's templates want it."""

SECTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

PROBE = "probe_tool"
PROBE_TOOL: Json = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
HELLO: Json = {"role": "user", "content": "Hello"}
FILLED: Mapping[str, Any] = {"description": "", "parameters": {"type": "object", "properties": {}}}
"""What a function may go without, and some templates fail without."""


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """What a model's chat template does with tools, and how its answers are read.

    `is_native`: the template writes tools itself. `wants_text`: it takes a call's arguments as text, not as
    an object. `wants_short_ids`: it refuses ids that are not `SHORT_ID`. `variables`: those of
    `THOUGHT_VARIABLES` that it uses. `reads_tools`: False: requests with tools are refused. `has_system`: it
    has a place for a system prompt. `is_single`: it writes one call of a message, or refuses several.
    `filled`: what it wants of each function, with a value for one without.
    """

    form: ReplyFormat
    is_native: bool = False
    wants_text: bool = False
    wants_short_ids: bool = False
    variables: frozenset[str] = frozenset()
    reads_tools: bool = True
    has_system: bool = True
    is_single: bool = False
    filled: Mapping[str, Any] = field(default_factory=dict)

    def conversation(self, request: ParsedChat) -> tuple[list[Json], Json]:
        """Return the messages as the template wants them, and its `tools` argument if it takes one."""
        offer = request.offer
        if self.is_native or not (offer or any(one.calls or one.call_id for one in request.messages)):
            messages = _one_by_one(request.messages) if self.is_single else request.messages
            made = [self._message(message) for message in messages]
            functions = [tool.spec["function"] for tool in offer.tools] if offer else []
            tools = [{"type": "function", "function": {**self.filled, **one}} for one in functions]
            return made, {"tools": tools} if offer else {}
        return list(_generic(request.messages, offer, self.has_system)), {}

    def _message(self, message: ChatMessage) -> Json:
        made: Json = {"role": message.role, "content": message.content}
        if message.reasoning:
            made["reasoning_content"] = message.reasoning
            if self.form.head and not (message.calls and message.content):  # as harmony's template calls it
                made["thinking"] = message.reasoning
        if message.calls:
            made["tool_calls"] = [self._call(call) for call in message.calls]
        if message.role == "tool":
            made |= {"tool_call_id": self._id(message.call_id), "name": message.tool}
        return made

    def _call(self, call: ToolCall) -> Json:
        arguments = call.arguments if self.wants_text else parse_json(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.call_id), "type": "function", "function": function}

    def _id(self, call_id: str) -> str:
        if not self.wants_short_ids or SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def kwargs(self, given: Mapping[str, bool | str]) -> Json:
        """Return the template's variables for what a request asks of its reasoning.

        An effort is no promise: a template without that variable goes without. No reasoning is one, of a
        model that reasons. Raises `UnsupportedParameter` for what the template cannot do.
        """
        made: Json = {}
        switches = self.variables - {"reasoning_effort"}
        for name, value in given.items():
            if name in self.variables:
                made[name] = value
            elif name == "reasoning_effort":
                continue
            elif switches:
                made |= dict.fromkeys(switches - given.keys(), value)
            elif not self.variables if value else self.form.reasoning:
                raise UnsupportedParameter(name, _no_switch(name))
        return made


def _no_switch(name: str) -> str:
    return f"{name} is not supported: this model's chat template has no such variable. Leave it out."


def inspect_template(tokenizer: Template, settings: ModelSettings) -> ToolTemplate:
    """Return what the template of `tokenizer` does, found by rendering; `settings` may name the formats."""
    source = tokenizer.chat_template
    text = "\n".join(map(str, source.values())) if isinstance(source, dict) else str(source or "")
    variables = frozenset(THOUGHT_VARIABLES) & set(_names(text))
    wants_text = False
    offered, called = _render(tokenizer, [HELLO]), ""
    if offered is not None and PROBE in offered:
        for wants_text in (False, True):
            called = _render(tokenizer, _probe(wants_text, "probe0001")) or ""
            if PROBE in called and "probe_value0" in called and "probe_result" in called:
                break
        else:
            called = ""
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(called, offered or "", strict=False))
    )
    answer = called[same:]
    declared = getattr(tokenizer, "response_template", None)
    form = sniffed_format(text, answer, PROBE)
    if isinstance(declared, Mapping):
        try:
            form = declared_format(declared)
        except (ValueError, KeyError, TypeError):
            logger.warning("the tokenizer's response template is not valid: it is not used", exc_info=True)
    is_native = bool(answer) and (bool(form.calls) or settings.tool_parser not in ("auto", "none"))
    calls = settings.tool_parser
    if calls == "auto" and is_native:
        chosen = form
    else:
        chosen = format_named("hermes" if calls in ("auto", "none") or not is_native else calls, None)
    words = form
    if settings.reasoning_parser != "auto":
        words = format_named(None, None if settings.reasoning_parser == "none" else settings.reasoning_parser)
    return ToolTemplate(
        form=replace(chosen, reasoning=words.reasoning, head=words.head, joint=words.joint),
        is_native=is_native,
        wants_text=wants_text and is_native,
        wants_short_ids=is_native and _render(tokenizer, _probe(wants_text, "call_0123456789")) is None,
        variables=variables,
        reads_tools=calls != "none",
        has_system=PROBE in (_render(tokenizer, [{"role": "system", "content": PROBE}, HELLO], ()) or ""),
        is_single=is_native
        and "probe_value1" not in (_render(tokenizer, _probe(wants_text, "probe0001", "probe0002")) or ""),
        filled={name: value for name, value in FILLED.items() if not _spares(tokenizer, name)},
    )


def _spares(tokenizer: Template, name: str) -> bool:
    """Return whether the template takes a function without a field."""
    function = {key: value for key, value in PROBE_TOOL["function"].items() if key != name}
    return _render(tokenizer, [HELLO], [{**PROBE_TOOL, "function": function}]) is not None


def _names(template: str) -> Iterator[str]:
    """Yield the names in a template's code: not those of attributes, nor words in its texts."""
    before = ""
    try:
        for _, kind, word in Environment().lex(template):
            if kind == "name" and before != ".":
                yield word
            before = before if kind == "whitespace" else word
    except TemplateSyntaxError:
        return  # it renders nothing either


def _probe(wants_text: bool, *call_ids: str) -> list[Json]:
    calls: list[Json] = []
    for number, call_id in enumerate(call_ids):
        arguments: Json = {"probe_key": f"probe_value{number}"}
        function = {"name": PROBE, "arguments": json.dumps(arguments) if wants_text else arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    result: Json = {"role": "tool", "content": "probe_result", "name": PROBE}
    return [
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({**result, "tool_call_id": call_id} for call_id in call_ids),
    ]


def _render(
    tokenizer: Template, conversation: list[Json], tools: Sequence[Json] = (PROBE_TOOL,)
) -> str | None:
    """Return what the template makes of a conversation with tools; None if it refuses it."""
    if not tokenizer.chat_template:
        return None
    try:
        return rendered(tokenizer, conversation, add_generation_prompt=False, tools=list(tools) or None)
    except TemplateLimit as limit:
        raise refused_model(limit) from None
    except TEMPLATE_FAULTS:
        return None


def _one_by_one(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages with each call in one of its own, and its results behind it.

    Results of other messages' calls come last of those that they stand among.
    """
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda one: one.role == "tool", messages[at:]))
        at += len(results)
        for number, call in enumerate(message.calls):
            yield replace(message if number == 0 else ChatMessage("assistant", ""), calls=(call,))
            yield from (one for one in results if one.call_id == call.call_id)
        called = {call.call_id for call in message.calls}
        yield from (one for one in results if one.call_id not in called)


def _generic(messages: Sequence[ChatMessage], offer: ToolOffer | None, has_system: bool) -> Iterator[Json]:
    """Yield the messages for a template that knows no tools.

    Results are the user's, and one message with what the user says beside them: some templates refuse two.
    """
    section = ""
    if offer is not None:
        section = SECTION.replace("{tools}", "\n".join(tool.text for tool in offer.tools))
    if section and messages[0].role != "system":
        if has_system:
            yield {"role": "system", "content": section}
        else:
            messages = led(messages, f"{section}\n")
        section = ""
    for _, group in groupby(messages, lambda message: message.role in ("tool", "user")):
        run = list(group)
        if any(message.role == "tool" for message in run):
            yield {"role": "user", "content": "\n".join(map(_heard, run))}
            continue
        for message in run:
            texts = [section, "\n\n", message.content] if section else [message.content]
            section = ""
            calls = [call_text(call.name, call.arguments) for call in message.calls]
            texts += [] if not calls else ["\n" if message.content else "", "\n".join(calls)]
            yield {"role": message.role, "content": "".join(texts)}


def _heard(message: ChatMessage) -> str:
    """Return what the user or a tool says, for a template that knows no tools."""
    is_result = message.role == "tool"
    return f"<tool_response>\n{message.content}\n</tool_response>" if is_result else message.content


def call_text(name: str, arguments: str) -> str:
    """Return a call as Hermes writes it; `arguments`: the text of a JSON object."""
    value = {"name": name, "arguments": parse_json(arguments)}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


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
        field = "tools" if content is None or self._promise else content.field
        try:
            rules = self._rules(content, compiler)
            if not rules:
                return None
            made = Grammar("lark", "\n".join([*rules, TEXT, BLANK]), field)
            compiler.check(made)
        except GrammarRefused as refused:
            self._blame(compiler)
            raise _invalid(refused) from None
        return made

    @property
    def _promise(self) -> str | None:
        return None if self.offer is None else self.offer.promise

    def _rules(self, content: Grammar | None, compiler: GrammarCompiler) -> list[str]:
        """Return the rules of an answer, none if it needs no more than its content's grammar."""
        offer, schema = self.offer, _schema_of(content)
        if self.form.head and self.form.head in self.opening:
            return []  # it is being said
        head = self._text(self.form.head) if self.form.head else ""
        frame = self._frame(offer, schema is not None and _is_of_content(content))
        if offer is not None and frame is not None:
            if offer.must_call or schema is not None or head:
                words = "TEXT" if schema is None else embedded_json(schema)
                said = [] if offer.must_call else [f"{head} {words}"]
                rules = [
                    f"start: {self._thought(' BLANK?')} answer",
                    f"answer: {' | '.join(['calls', *said])}",
                ]
                if not said or not self.form.is_bare:
                    rules += self._calls(offer, frame, "")
                else:  # its frame is one lexeme, and would hide the JSON that begins like it
                    rules.append(f"calls: {embedded_json(_bare_call(offer))}")
            else:  # text, and calls where there are any
                rules = [f"start: {self._thought()} answer", "answer: TEXT | until_call calls"]
                rules += [
                    *_until("until_call", frame.mark, self.marks),
                    *self._calls(offer, frame, frame.mark),
                ]
        elif content is not None and (self._is_in_thought or head):
            words = f"%lark {{\n{compiler.lark(content)}\n}}" if schema is None else embedded_json(schema)
            rules = [f"start: {self._thought(' BLANK?')} {head} {words}"]
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
        parser = f"model.tool_parser {self.form.name!r}"
        if promise is None:
            if not (says_json and offer is not None and offer.may_call and self.form.calls):
                return None
            if frame is not None and not self._hides_calls:
                return frame
            promise, reason = (
                "response_format",
                f"beside tools, no mark tells this model's calls ({parser}) from it",
            )
        elif frame is None or frame.ends:
            reason = f"calls in this model's format ({parser}) are not written as JSON"
        elif self._hides_calls or not (frame.mark or promise == "tool_choice"):
            reason = f"in this model's format ({parser}) nothing tells a call from text"
        else:
            return frame
        raise UnsupportedParameter(promise, f"{promise} is not supported: {reason}. Leave it out.")

    @property
    def _is_in_thought(self) -> bool:
        marks = self.form.thought_marks
        return marks is not None and self.opening.rfind(marks[0]) > self.opening.rfind(marks[1])

    @property
    def _hides_calls(self) -> bool:
        """Whether a call would stand behind a thought that is begun, where one without a mark is text."""
        return self._is_in_thought and self.form.is_bare

    def _thought(self, blank: str = "") -> str:
        """Return the terms of reasoning in front of an answer; `blank`: what may follow it."""
        marks, frame, joint = self.form.thought_marks, self.form.frame, self._text(self.form.joint)
        if joint and marks:
            return f"{f'thought_rest {joint}' if self._is_in_thought else ''} (thought {joint})*"
        if self._is_in_thought:
            return f"thought_rest{blank}"
        if marks is None or (frame is not None and not frame.mark):
            return ""  # a call without a mark comes first
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
                f"{self._text(frame.before.replace('{name}', tool.name).removeprefix(cut))} "
                f"{'args' if frame.ends else f'args_{at}'} {self._text(frame.behind)}"
                for at, tool in enumerate(tools)
            ]
            yield f"{name}: {' | '.join(dict.fromkeys(each))}"
        if frame.ends:
            calls, outer = replace(self.form, reasoning=""), (frame.mark, frame.ends)
            own = {mark: one for mark, one in self.marks.items() if calls.marks(mark, calls=True)}
            # A special token is no text: the format's own within a call are allowed beside it.
            inner = [f"TEXT <[{one}]>" for mark, one in own.items() if mark not in outer]
            yield f"args: ({' | '.join(inner)})* args_end" if inner else "args: args_end"
            yield from _until("args_end", frame.ends, self.marks)
            return
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


def _bare_call(offer: ToolOffer) -> Json:
    """Return the schema of a call that has no mark: the whole answer is it."""
    names = [tool.name for tool in offer.tools if offer.only in (None, tool.name)]
    properties = {"name": {"enum": names}, "parameters": ANY_OBJECT}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


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
