"""What a chat request says, checked and as plain data: messages, tools, and what its answer must look
like."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

from samovar.configs.json_text import parse_json
from samovar.replicas.grammar import loosened
from samovar.replicas.messages import Grammar, GrammarKind
from samovar.router.openai.errors import InvalidValue, MissingField, UnsupportedParameter, shown
from samovar.router.openai.schema import (
    AssistantCall,
    ChatBody,
    CompletionBody,
    Message,
    NamedTool,
    OfferedTool,
    StructuredOutputs,
)

Role = Literal["system", "user", "assistant", "tool"]

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant; `arguments`: the text of a JSON object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `developer` has become `system`, text parts have been joined.

    `cuts`: of a system message, the places in `content` where parts met. `reasoning`, `calls`: of the
    assistant. `call_id`, `tool`: of a tool's result, the call that it answers and the tool's name.
    """

    role: Role
    content: str
    cuts: tuple[int, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    tool: str = ""


def led(messages: Sequence[ChatMessage], lead: str) -> tuple[ChatMessage, ...]:
    """Return messages whose first one of the user begins with a text; without one, that is its own."""
    at = next((index for index, one in enumerate(messages) if one.role == "user"), None)
    if not lead:
        return tuple(messages)
    if at is None:
        return (ChatMessage("user", lead), *messages)
    own = replace(messages[at], content=f"{lead}\n{messages[at].content}")
    return (*messages[:at], own, *messages[at + 1 :])


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `text`: the JSON of `spec`, OpenAI's object for it.

    `field`: its place in the request. `is_strict`: a call of it follows its schema.
    """

    name: str
    spec: Mapping[str, Any]
    text: str
    field: str
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of a request. `may_call`: False for `tool_choice: none`: they are in the prompt all the same.

    `is_parallel`: an answer may call several. `must_call`: it calls at least one, and is nothing else.
    `only`: the name of the tool that it calls, once.
    """

    tools: tuple[Tool, ...]
    may_call: bool = True
    is_parallel: bool = True
    must_call: bool = False
    only: str | None = None

    @property
    def promised(self) -> list[Tool]:
        """The tools whose calls follow their schemas."""
        called = [tool for tool in self.tools if self.may_call and self.only in (None, tool.name)]
        return [tool for tool in called if self.must_call or tool.is_strict]

    @property
    def promise(self) -> str | None:
        """The request's field that promises calls of a form; None: there is no such promise."""
        if self.must_call:
            return "tool_choice"
        strict = [tool.field for tool in self.tools if tool.is_strict] if self.may_call else []
        return f"{strict[0]}.function.strict" if strict else None


def offer_of(
    tools: Sequence[OfferedTool] | None, choice: str | NamedTool | None, is_parallel: bool | None
) -> ToolOffer | None:
    """Return the tools of a request; None without any. Raises `ApiError` naming what cannot be served."""
    _check_choice(choice)
    must_call = isinstance(choice, NamedTool) or choice == "required"
    if not tools:
        if must_call:
            raise InvalidValue("tool_choice", "tool_choice asks for a call, and tools offers none.")
        return None
    offered: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type != "function":
            raise UnsupportedParameter(
                f"{param}.type", f"{param}.type={shown(tool.type)} is not supported; only 'function' is."
            )
        if tool.function is None:
            raise MissingField(f"{param}.function")
        name = tool.function.name
        if name in offered:
            raise InvalidValue(
                f"{param}.function.name", f"{param}.function.name={shown(name)} is there twice."
            )
        function: dict[str, Any] = {"name": name}
        if tool.function.description is not None:
            function["description"] = tool.function.description
        if tool.function.parameters is not None:
            function["parameters"] = tool.function.parameters
        spec = {"type": "function", "function": function}
        try:
            text = json.dumps(spec, ensure_ascii=False, allow_nan=False)
        except ValueError:
            place = f"{param}.function.parameters"
            raise InvalidValue(place, f"{place} holds a number that JSON does not have.") from None
        offered[name] = Tool(name, spec, text, param, bool(tool.function.strict))
    only = choice.function.name if isinstance(choice, NamedTool) and choice.function else None
    if only is not None and only not in offered:
        field = "tool_choice.function.name"
        raise InvalidValue(field, f"{field}={shown(only)} is none of the tools.")
    return ToolOffer(
        tuple(offered.values()), choice != "none", is_parallel is not False and only is None, must_call, only
    )


def _check_choice(choice: str | NamedTool | None) -> None:
    if isinstance(choice, NamedTool):
        if choice.type != "function":
            message = f"tool_choice.type={shown(choice.type)} is not supported; only 'function' is."
            raise UnsupportedParameter("tool_choice", message)
        if choice.function is None:
            raise MissingField("tool_choice.function")
    elif choice not in (None, "none", "auto", "required"):
        message = f"tool_choice={shown(choice)} is none of none, auto, required."
        raise InvalidValue("tool_choice", message)


def messages_of(messages: Sequence[Message]) -> tuple[tuple[ChatMessage, ...], tuple[str, ...]]:
    """Return the messages, and the places in the request of what the model is not shown as it came.

    A history cannot be changed any more, and any provider may have written it: what has no form here becomes
    a line of text. Only the user's last message is refused for it: it is new, and its sender waits for an
    answer to it.
    `UnsupportedParameter`, `InvalidValue` and `MissingField` name what is wrong.
    """
    reading = _Reading(max((at for at, one in enumerate(messages) if one.role == "user"), default=-1))
    return tuple(reading.message(at, one) for at, one in enumerate(messages)), tuple(reading.altered)


def left_out(kind: str) -> str:
    """Return the line that stands for a part which the model cannot read."""
    return f"[{kind}: not shown to this model]"


@dataclass(slots=True)
class _Reading:
    """A conversation while its messages are read. `last`: the index of the user's last one.

    `called`: call id -> the tool's name. `open_calls`: ids of calls without a result yet, in order; of all
    under "", and of each tool under its name.
    """

    last: int
    called: dict[str, str] = field(default_factory=dict)
    open_calls: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    altered: list[str] = field(default_factory=list)

    def message(self, at: int, message: Message) -> ChatMessage:
        place = f"messages[{at}]"
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            raise InvalidValue(f"{place}.role", f"{place}.role={shown(message.role)} is none of {known}.")
        role = ROLES[message.role]
        texts, thoughts = self._texts(at, message, place, role)
        if role == "tool":
            return self._result(message, place, "".join(texts))
        if role == "assistant":
            if message.refusal and not any(texts):
                texts = [message.refusal]
            thought = message.reasoning_content or message.reasoning or "".join(thoughts)
            calls = self._calls(message, place)
            self.called.update((call.call_id, call.name) for call in calls)
            for call in calls:
                self.open_calls[""][call.call_id] = self.open_calls[call.name][call.call_id] = None
            return ChatMessage(role, "".join(texts), reasoning=thought, calls=calls)
        if message.tool_calls:
            raise InvalidValue(f"{place}.tool_calls", f"{place}.tool_calls is for the role 'assistant' only.")
        cuts = accumulate(map(len, texts[:-1])) if role == "system" else ()
        return ChatMessage(role, "".join(texts), tuple(cuts))

    def _texts(self, at: int, message: Message, place: str, role: Role) -> tuple[list[str], list[str]]:
        """Return the texts of a message's parts, and what was thought in them."""
        if message.content is None:
            if at == self.last:
                raise MissingField(f"{place}.content")
            return [], []
        if isinstance(message.content, str):
            return [message.content], []
        texts: list[str] = []
        thoughts: list[str] = []
        for number, part in enumerate(message.content):
            param = f"{place}.content[{number}]"
            text = part.refusal if part.type == "refusal" else part.text
            if role == "assistant" and part.type in THOUGHTS:
                thoughts.append(part.thinking or part.text or "")
            elif part.type in TEXTS and text is not None:
                texts.append(text)
            elif at == self.last and part.type not in TEXTS:
                words = f"{param}.type={shown(part.type)} is not supported; only 'text' parts are."
                raise UnsupportedParameter(f"{param}.type", words)
            elif at == self.last:
                raise MissingField(f"{param}.text")
            else:
                self.altered.append(param)
                texts.append(left_out(part.type))
        return texts, thoughts

    def _result(self, message: Message, place: str, text: str) -> ChatMessage:
        """Return a tool's result; of one that names no call, that of the first call without a result."""
        call_id, name = message.tool_call_id or "", message.name or ""
        if call_id not in self.called:
            if message.role == "tool" or call_id:
                self.altered.append(f"{place}.tool_call_id")
            call_id = next(iter(self.open_calls[name]), call_id or f"call_{place}")
        for of_name in ("", self.called.get(call_id, "")):
            self.open_calls[of_name].pop(call_id, None)
        return ChatMessage("tool", text, call_id=call_id, tool=self.called.get(call_id, name))

    def _calls(self, message: Message, place: str) -> tuple[ToolCall, ...]:
        """Return the calls of a message; ids that are missing or there twice are made up."""
        calls: dict[str, ToolCall] = {}
        given = [(f"{place}.tool_calls[{at}]", one) for at, one in enumerate(message.tool_calls or ())]
        if message.function_call is not None and message.function_call.name:
            given.append((f"{place}.function_call", AssistantCall(function=message.function_call)))
        for param, call in given:
            call_id = "" if call.id is None else str(call.id)
            if not call_id or call_id in calls:
                call_id = f"call_{param}"
                self.altered += [f"{param}.id"] if call.id else []
            if call.function is not None:
                name, arguments = call.function.name or "", self._arguments(call.function.arguments, param)
            else:
                self.altered.append(param)
                name = (call.custom and call.custom.name) or call.type or ""
                arguments = json.dumps({"input": (call.custom and call.custom.input) or ""})
            calls[call_id] = ToolCall(call_id, name or NAMELESS, arguments)
        return tuple(calls.values())

    def _arguments(self, given: Any, param: str) -> str:
        text = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        readable = readable_arguments(text)
        if readable != text and text.strip():
            self.altered.append(f"{param}.function.arguments")
        return readable


TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "reasoning", "reasoning_text")
NAMELESS = "tool"
"""What a call in a history is shown as that has no name."""
DEPTH_MAX = 100
"""How deep arguments are that a template is given as an object: templates recurse."""
UNPARSED = "unparsed"
"""The key under which a template is given arguments that are no JSON object: what was said, as it is."""


def readable_arguments(text: str) -> str:
    """Return the arguments of a call as the text of a JSON object, which templates need.

    "" and null mean none. What is no JSON object (cut off by a limit, another provider's), or one deeper than
    templates can follow, is kept as text.
    """
    if not text.strip():
        return "{}"
    try:
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a character, escaped, is no text
    except (ValueError, RecursionError):
        return json.dumps({UNPARSED: text})
    if value is None:
        return "{}"
    is_plain = isinstance(value, dict) and not _is_deep(value)
    return text if is_plain else json.dumps({UNPARSED: text})


def _is_deep(value: Any) -> bool:
    layer = [value]
    for _ in range(DEPTH_MAX):
        layer = [inner for one in layer for inner in (one.values() if isinstance(one, dict) else one)]
        layer = [one for one in layer if isinstance(one, dict | list)]
        if not layer:
            return False
    return True


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

    Some clients write headers there that change from conversation to conversation, or with each request: in
    front of everything, such a line leaves nothing in common with any other prompt.
    A line ends with the text part in which it begins.
    """
    text, at = message.content, 0
    found: list[str] = []
    lines: list[str] = []
    while names and (named := _named(names).match(text, at)):
        part = bisect_left(message.cuts, named.end())
        part_end = message.cuts[part] if part < len(message.cuts) else len(text)
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


Schema = dict[str, Any] | str

ANY_OBJECT: Schema = {"type": "object"}


def grammar_of(asked: ChatBody | CompletionBody) -> Grammar | None:
    """Return the grammar that a body asks for, if any; what it says is checked by the compiler.

    Raises `InvalidValue` if it asks for several, `UnsupportedParameter` for a form that is not served.
    """
    wanted = [*_of_response_format(asked), *_of_structured_outputs(asked), *_of_other_spellings(asked)]
    if len(wanted) > 1:
        first, second = (grammar.field for grammar in wanted[:2])
        raise InvalidValue(second, f"{second} and {first} both say what the answer must look like. Give one.")
    return wanted[0] if wanted else None


def _of_response_format(asked: ChatBody | CompletionBody) -> Iterator[Grammar]:
    given = asked.response_format
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        yield _json("response_format", ANY_OBJECT if given.schema_ is None else given.schema_)
    elif given.type == "json_schema":
        field = "response_format.json_schema"
        if given.json_schema is None:
            raise MissingField(field)
        if given.json_schema.schema_ is None:
            raise MissingField(f"{field}.schema")
        yield _json(f"{field}.schema", given.json_schema.schema_)
    else:
        message = (
            f"response_format.type={shown(given.type)} is not supported; 'text', 'json_object' and "
            "'json_schema' are."
        )
        raise UnsupportedParameter("response_format", message)


def _of_structured_outputs(asked: ChatBody | CompletionBody) -> Iterator[Grammar]:
    given, field = asked.structured_outputs, "structured_outputs"
    if given is None:
        return
    options = _json_options(given)
    asked_for = (given.json_, given.json_object or None, given.regex, given.grammar, given.choice)
    if all(one is None for one in asked_for):
        raise InvalidValue(field, f"{field} must have one of json, regex, choice, grammar and json_object.")
    if given.json_ is not None:
        yield _json(f"{field}.json", given.json_, options)
    if given.json_object:
        yield _json(f"{field}.json_object", ANY_OBJECT, options)
    yield from _texts({f"{field}.regex": given.regex}, "regex")
    yield from _texts({f"{field}.grammar": given.grammar}, "grammar")
    yield from _choice(f"{field}.choice", given.choice)


def _of_other_spellings(asked: ChatBody | CompletionBody) -> Iterator[Grammar]:
    """Yield what the names say that vLLM had before, and those of SGLang and llama.cpp."""
    pattern = asked.guided_whitespace_pattern
    options = {} if pattern is None else {"whitespace_pattern": pattern}
    for name, schema in {"guided_json": asked.guided_json, "json_schema": asked.json_schema}.items():
        if schema is not None:
            yield _json(name, schema, options)
    if asked.guided_json_object:
        yield _json("guided_json_object", ANY_OBJECT, options)
    yield from _texts({"guided_regex": asked.guided_regex, "regex": asked.regex}, "regex")
    grammars = {"guided_grammar": asked.guided_grammar, "grammar": asked.grammar, "ebnf": asked.ebnf}
    yield from _texts(grammars, "grammar")
    yield from _choice("guided_choice", asked.guided_choice)


def _json_options(given: StructuredOutputs) -> dict[str, Any]:
    """Return the compiler's options, in the words of llguidance."""
    options: dict[str, Any] = {}
    if given.whitespace_pattern is not None:
        options["whitespace_pattern"] = given.whitespace_pattern
    elif given.disable_any_whitespace:
        options["whitespace_flexible"] = False
    return options


def _json(field: str, schema: Schema, options: dict[str, Any] | None = None) -> Grammar:
    """Return a JSON Schema as it was given, as an object or as text, with options if there are any."""
    if isinstance(schema, str):
        if not options:
            return Grammar("json_schema", schema, field)
        schema = _parsed(field, schema)
    if options:
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": options | own if isinstance(own, dict) else options}
    try:
        return Grammar("json_schema", json.dumps(schema, allow_nan=False), field)
    except ValueError:
        raise InvalidValue(field, f"{field} holds a number that JSON does not have.") from None


def _parsed(field: str, text: str) -> dict[str, Any]:
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise InvalidValue(field, f"{field} is not JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise InvalidValue(field, f"{field} must be a JSON Schema, an object.")
    return schema


def _texts(fields: dict[str, str | None], kind: GrammarKind) -> Iterator[Grammar]:
    for name, text in fields.items():
        if text is not None:
            if not text:
                raise InvalidValue(name, f"{name} is empty: it describes no answer. Leave it out.")
            yield Grammar(kind, text, name)


def _choice(field: str, choices: list[str] | None) -> Iterator[Grammar]:
    if choices is not None:
        if not choices:
            raise InvalidValue(field, f"{field} is empty: there is nothing to choose from. Leave it out.")
        yield Grammar("choice", json.dumps(choices), field)


def not_followed(grammar: Grammar | None, offer: ToolOffer | None) -> list[str]:
    """Return what an answer's schemas say and is not followed, as fields that are ignored."""
    found: list[str] = []
    if grammar is not None and grammar.kind == "json_schema":
        found += (f"{grammar.field}.{keyword}" for keyword in loosened(grammar.text))
    for tool in offer.promised if offer is not None else ():
        schema = json.dumps(tool.spec["function"].get("parameters"))
        found += (f"tools.{tool.name}.{keyword}" for keyword in loosened(schema))
    return found
