"""From a body of Anthropic's Messages API to the chat request that it is.

Everything that a chat request's fields promise or refuse holds for what they are translated from; an error
gets the name that the field has here. Server tools, which Samovar has none of, are left out and listed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

from samovar.configs.settings import LimitsSettings
from samovar.router.anthropic.body import (
    AnthropicMessage,
    AnthropicTool,
    BlockSource,
    ContentBlock,
    JsonOutput,
    MessagesBody,
    bounded_messages_body,
)
from samovar.router.openai import (
    ApiError,
    CacheMark,
    InvalidValue,
    Json,
    MissingField,
    ParsedChat,
    Part,
    RequestParser,
    UnsupportedParameter,
    check_structure,
    left_out,
    names_here,
    place_here,
    rename,
    shown,
    validated,
    with_passed,
)

FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
    "chat_template_kwargs.enable_thinking": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "tool_choice.function.name": "tool_choice.name",
}
"""Fields of a chat request, and what they are called here."""
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
OWN_TOOLS = (None, "custom")
SWITCHES = frozenset({"enable_thinking", "thinking"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessages(ParsedChat):
    """A chat request that came as a Messages request.

    `tokens_asked`: its `max_tokens`, before it was lowered to what is left of the context. `is_marked`:
    something in it has a `cache_control`. `called`: fields of the chat, and what its client calls them.
    """

    tokens_asked: int = 0
    is_marked: bool = False
    called: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Translation:
    """Messages and tools as a chat request has them; `places`: of each, where it was in the body."""

    messages: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    is_marked: bool = False

    def add(self, message: Json, place: str, *marks: CacheMark) -> str:
        """Add a message that was at `place`; return where it is now."""
        for mark in marks:
            if mark is not None:
                self.is_marked = True
                message["cache_control"] = {"type": mark.type, "ttl": mark.ttl}
        now = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.places[now] = place
        return now


class MessagesParser:
    """Reads bodies within the limits of `parser`'s settings; `variables`: of the model's chat template."""

    def __init__(self, parser: RequestParser, limits: LimitsSettings, variables: frozenset[str]) -> None:
        self._parser = parser
        self._limits = limits
        self._variables = variables
        self._body = bounded_messages_body(limits)

    def messages(self, body: bytes) -> ParsedMessages:
        """Parse the body of POST /v1/messages. Raises `ApiError` naming the field at fault."""
        check_structure(body, self._limits)
        asked = validated(self._body, body)
        if asked.max_tokens is None:
            raise MissingField("max_tokens")
        if asked.max_tokens < 0:
            raise InvalidValue("max_tokens", f"max_tokens={shown(asked.max_tokens)} must not be negative.")
        return self._parsed(asked)

    def count(self, body: bytes) -> ParsedMessages:
        """Parse the body of POST /v1/messages/count_tokens. Raises `ApiError` naming the field at fault."""
        check_structure(body, self._limits)
        return self._parsed(validated(self._body, body))

    def _parsed(self, asked: MessagesBody) -> ParsedMessages:
        if asked.mcp_servers:
            raise UnsupportedParameter("mcp_servers", "mcp_servers is not supported. Leave it out.")
        if asked.container:
            raise UnsupportedParameter("container", "container is not supported. Leave it out.")
        made = _translated(asked)
        request = with_passed(asked, self._wishes(asked, bool(made.tools)), but=("metadata",))
        request |= {"messages": made.messages, "tools": made.tools}
        if asked.metadata is not None and asked.metadata.user_id is not None:
            request["metadata"] = {"user_id": asked.metadata.user_id}
        if asked.messages[-1].role == "assistant":  # Anthropic's way to begin the answer for the model
            request["continue_final_message"] = True
        names = names_here(FIELDS, asked) | made.places
        try:
            chat = self._parser.translated(request)
        except ApiError as error:
            raise rename(error, names) from None
        held: dict[str, Any] = {one.name: getattr(chat, one.name) for one in fields(chat)}
        altered = (place_here(place, names) for place in chat.ignored_fields)
        held["ignored_fields"] = (*(asked.model_extra or {}), *made.ignored, *altered)
        held["is_length_default"] = True  # it is an upper bound, as in Anthropic's own API
        return ParsedMessages(
            **held, tokens_asked=asked.max_tokens or 0, is_marked=made.is_marked, called=names
        )

    def _wishes(self, asked: MessagesBody, has_tools: bool) -> Json:
        """Return the fields about tools, form and reasoning."""
        made: Json = {}
        if asked.stop_sequences:
            made["stop"] = asked.stop_sequences
        choice = asked.tool_choice
        if choice is not None:
            if choice.type == "tool":
                if not choice.name:
                    raise MissingField("tool_choice.name")
                made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            elif choice.type in CHOICES:
                made["tool_choice"] = CHOICES[choice.type]
            else:
                known = ", ".join((*CHOICES, "tool"))
                raise InvalidValue(
                    "tool_choice.type", f"tool_choice.type={shown(choice.type)} is none of {known}."
                )
            if has_tools and choice.disable_parallel_tool_use:
                made["parallel_tool_calls"] = False
        config = asked.output_config
        form = asked.output_format if config is None or config.format is None else config.format
        if form is not None:
            made["response_format"] = _form(form, "output_config.format")
        if asked.thinking is not None and asked.thinking.type == "disabled":
            made["reasoning_effort"] = "none"
        elif config is not None and config.effort and self._variables:
            made["reasoning_effort"] = config.effort
        if (
            asked.thinking is not None
            and asked.thinking.type in ("enabled", "adaptive")
            and self._variables & SWITCHES
        ):
            made["chat_template_kwargs"] = {"enable_thinking": True}
        return made


def _form(form: JsonOutput, place: str) -> Json:
    if form.type != "json_schema":
        raise UnsupportedParameter(
            f"{place}.type", f"{place}.type={shown(form.type)} is not supported; only 'json_schema' is."
        )
    if form.schema_ is None:
        raise MissingField(f"{place}.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_, "strict": True}}


def _translated(asked: MessagesBody) -> _Translation:
    last = max((at for at, one in enumerate(asked.messages) if one.role == "user"), default=-1)
    made = _Translation()
    if asked.system:
        now = made.add({"role": "system", "content": _parts(asked.system, made)}, "system")
        made.places[f"{now}.content"] = "system"
    for _, group in groupby(enumerate(asked.messages), _turn):
        (index, message), *more = group
        place = f"messages[{index}]"
        if message.role not in ("user", "assistant", "system"):
            raise InvalidValue(
                f"{place}.role", f"{place}.role={shown(message.role)} is none of user, assistant, system."
            )
        if isinstance(message.content, str) and not more:
            made.add({"role": message.role, "content": message.content}, place)
            continue
        blocks = _blocks(message, index, is_joined=False)
        for at, one in more:
            blocks += _blocks(one, at, is_joined=bool(blocks) and blocks[-1][1].type not in NO_TEXTS)
        if message.role == "assistant":
            _add_answer(made, blocks, place)
        else:
            _add_turn(made, message, blocks, place, last=f"messages[{last}]")
    for index, tool in enumerate(asked.tools or ()):
        _add_tool(made, tool, f"tools[{index}]")
    if asked.cache_control is not None or any(tool.cache_control for tool in asked.tools or ()):
        made.is_marked = True
        first = next((tool.cache_control for tool in asked.tools or () if tool.cache_control), None)
        mark = asked.cache_control or first
        assert mark is not None
        made.messages[0].setdefault("cache_control", {"type": mark.type, "ttl": mark.ttl})
    return made


NO_TEXTS = ("thinking", "redacted_thinking", "tool_use", "tool_result")
Block = tuple[str, ContentBlock]
"""With its place in the body."""


def _turn(one: tuple[int, AnthropicMessage]) -> str | int:
    """Return what messages of one turn share: those of a role that follow each other, as Anthropic has it."""
    return one[0] if one[1].role == "system" else one[1].role


def _blocks(message: AnthropicMessage, index: int, *, is_joined: bool) -> list[Block]:
    """Return the blocks of a message; a first text that is joined to another message's is a paragraph."""
    place, content = f"messages[{index}].content", message.content
    if isinstance(content, str):
        made = [(place, ContentBlock(type="text", text=content))]
    else:
        made = [(f"{place}[{number}]", block) for number, block in enumerate(content)]
    if is_joined and made and made[0][1].text:
        where, first = made[0]
        made[0] = where, first.model_copy(update={"text": f"\n\n{first.text}"})
    return made


def _parts(content: str | Sequence[Part], made: _Translation) -> str | list[Json]:
    if isinstance(content, str):
        return content
    made.is_marked |= any(part.cache_control for part in content)
    return [part.model_dump(exclude_none=True) for part in content]


def _result(block: ContentBlock, made: _Translation) -> str | list[Json]:
    """Return what a tool's result says; that it failed stands in front: templates have no place for it."""
    content: str | list[Json] = []
    if isinstance(block.content, dict):
        content = json.dumps(block.content, ensure_ascii=False)
    elif block.content is not None:
        content = _parts(block.content, made)
    if not block.is_error:
        return content
    return FAILED + content if isinstance(content, str) else [{"type": "text", "text": FAILED}, *content]


FAILED = "The tool failed: "


def _add_tool(made: _Translation, tool: AnthropicTool, place: str) -> None:
    if tool.type not in OWN_TOOLS:
        made.ignored.append(f"tools.{tool.type}")
        return
    now = f"tools[{len(made.tools)}]"
    function: Json = {"name": tool.name, "parameters": tool.input_schema or {}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    made.places |= {
        now: place,
        f"{now}.function": place,
        f"{now}.function.parameters": f"{place}.input_schema",
    }
    made.tools.append({"type": "function", "function": function})


def _add_turn(
    made: _Translation, message: AnthropicMessage, blocks: list[Block], place: str, *, last: str
) -> None:
    """Add what a user or the system says: a message for each run of texts, one for each tool's result.

    `last`: the place of the user's last message, in which nothing is replaced.
    """
    texts: list[Json] = []
    at = len(made.messages)
    for where, block in blocks:
        if block.type == "tool_result" and message.role == "user":
            if texts:
                made.add({"role": message.role, "content": texts}, place)
                texts = []
            content = _result(block, made)
            result: Json = {"role": "tool", "content": content}
            if block.tool_use_id:
                result["tool_call_id"] = block.tool_use_id
            now = made.add(result, where, block.cache_control)
            made.places[f"{now}.tool_call_id"] = f"{where}.tool_use_id"
        else:
            if not texts:
                at = len(made.messages)
            now = f"messages[{at}].content[{len(texts)}]"
            texts.append(_text(made, block, where, now, is_last=where.startswith(f"{last}.")))
    if texts or not blocks:
        made.add({"role": message.role, "content": texts}, place)


def _text(made: _Translation, block: ContentBlock, where: str, now: str, *, is_last: bool = False) -> Json:
    """Return a block as a text; what a history has beside texts becomes a line, and is listed."""
    said = block.text if block.type == "text" else None
    source = block.source
    if block.type == "document" and isinstance(source, BlockSource) and source.type == "text":
        said = source.data
    if said is None and is_last:
        if block.type == "text":
            raise MissingField(f"{where}.text")
        raise UnsupportedParameter(
            f"{where}.type", f"{where}.type={shown(block.type)} is not supported in a message of this role."
        )
    if said is None:
        made.ignored.append(where)
        said = left_out(" ".join(filter(None, (block.type, block.name))))
    made.places[now] = where
    text: Json = {"type": "text", "text": said}
    if block.cache_control is not None:
        made.is_marked = True
        text["cache_control"] = {"type": block.cache_control.type, "ttl": block.cache_control.ttl}
    return text


def _add_answer(made: _Translation, blocks: list[Block], place: str) -> None:
    """Add what the assistant said: its texts, thoughts and calls as one message."""
    at = f"messages[{len(made.messages)}]"
    texts: list[Json] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    marks: list[CacheMark] = []
    for where, block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue
        elif block.type == "tool_use":
            now = f"{at}.tool_calls[{len(calls)}]"
            made.places |= {
                now: where,
                f"{now}.function": where,
                f"{now}.function.arguments": f"{where}.input",
            }
            function = {"name": block.name or "", "arguments": _arguments(block, where)}
            calls.append({"id": block.id, "type": "function", "function": function})
            marks.append(block.cache_control)
        else:
            texts.append(_text(made, block, where, f"{at}.content[{len(texts)}]"))
    message: Json = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    made.add(message, place, *marks)


def _arguments(block: ContentBlock, where: str) -> str:
    if isinstance(block.input, str):  # another server's: what was cut off
        return block.input
    try:
        return json.dumps({} if block.input is None else block.input, ensure_ascii=False)
    except (ValueError, RecursionError):
        raise InvalidValue(f"{where}.input", f"{where}.input holds what JSON does not have.") from None
