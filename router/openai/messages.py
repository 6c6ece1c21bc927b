"""Messages and tools of a chat request, checked and as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from configs.json_text import parse_json
from router.openai.errors import InvalidValue, MissingField, UnsupportedParameter, shown
from router.openai.schema import Message, NamedTool, OfferedTool

Role = Literal["system", "user", "assistant", "tool"]

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
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
        text, is_strict = json.dumps(spec, ensure_ascii=False), bool(tool.function.strict)
        offered[name] = Tool(name, spec, text, param, is_strict)
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


def messages_of(messages: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Return the messages. `UnsupportedParameter`, `InvalidValue` and `MissingField` name what is wrong."""
    made: list[ChatMessage] = []
    called: dict[str, str] = {}  # call id -> the tool's name
    for index, message in enumerate(messages):
        one = _message(message, f"messages[{index}]", called)
        called.update((call.call_id, call.name) for call in one.calls)
        made.append(one)
    return tuple(made)


def _message(message: Message, place: str, called: Mapping[str, str]) -> ChatMessage:
    if message.role == "function":
        raise UnsupportedParameter(
            f"{place}.role",
            f"{place}.role='function' is not supported. Send role 'tool' with a tool_call_id.",
        )
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidValue(f"{place}.role", f"{place}.role={shown(message.role)} is none of {known}.")
    role = ROLES[message.role]
    texts = _texts(message, place, role)
    if role == "tool":
        call_id = message.tool_call_id
        if not call_id:
            raise MissingField(f"{place}.tool_call_id")
        if call_id not in called:
            raise InvalidValue(
                f"{place}.tool_call_id",
                f"{place}.tool_call_id={shown(call_id)} names no call in the tool_calls before it.",
            )
        return ChatMessage(role, "".join(texts), call_id=call_id, tool=called[call_id])
    if role == "assistant":
        thought = message.reasoning_content or message.reasoning or ""
        return ChatMessage(role, "".join(texts), reasoning=thought, calls=_calls(message, place))
    if message.tool_calls:
        raise InvalidValue(f"{place}.tool_calls", f"{place}.tool_calls is for the role 'assistant' only.")
    cuts = accumulate(map(len, texts[:-1])) if role == "system" else ()
    return ChatMessage(role, "".join(texts), tuple(cuts))


def _texts(message: Message, place: str, role: Role) -> list[str]:
    """Return the texts of a message's parts; only the assistant may say nothing."""
    if message.content is None:
        if role != "assistant":
            raise MissingField(f"{place}.content")
        return []
    if isinstance(message.content, str):
        return [message.content]
    texts = []
    for number, part in enumerate(message.content):
        param = f"{place}.content[{number}]"
        if part.type != "text":
            raise UnsupportedParameter(
                f"{param}.type", f"{param}.type={shown(part.type)} is not supported; only 'text' parts are."
            )
        if part.text is None:
            raise MissingField(f"{param}.text")
        texts.append(part.text)
    return texts


def _calls(message: Message, place: str) -> tuple[ToolCall, ...]:
    calls: dict[str, ToolCall] = {}
    for number, call in enumerate(message.tool_calls or ()):
        param = f"{place}.tool_calls[{number}]"
        if call.type not in (None, "function"):
            raise UnsupportedParameter(
                f"{param}.type", f"{param}.type={shown(call.type)} is not supported; only 'function' is."
            )
        if call.function is None:
            raise MissingField(f"{param}.function")
        if call.id in calls:
            raise InvalidValue(f"{param}.id", f"{param}.id={shown(call.id)} is there twice.")
        calls[call.id] = ToolCall(call.id, call.function.name, _arguments(call.function.arguments, param))
    return tuple(calls.values())


def _arguments(text: str, param: str) -> str:
    """Return the arguments of a call; "" means none, as some clients write it."""
    text = text if text.strip() else "{}"
    field_name = f"{param}.function.arguments"
    try:
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False).encode()  # half a character, escaped, is no text
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidValue(field_name, f"{field_name} must be the text of a JSON object.")
    return text
