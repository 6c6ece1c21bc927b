"""From a body of OpenAI's Responses API to the chat request that it is.

Everything that a chat request's fields promise or refuse holds for what they are translated from; an error
gets the name that the field has here. Tools that Samovar does not have are left out and listed.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.configs.settings import LimitsSettings
from samovar.router.openai import (
    ApiError,
    InvalidValue,
    Json,
    MissingField,
    ParsedChat,
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
from samovar.router.responses.body import (
    InputItem,
    ItemPart,
    ResponsesBody,
    ResponsesTool,
    bounded_responses_body,
)
from samovar.router.responses.custom_tools import PARAMETERS
from samovar.router.responses.store import Items, ResponseStore

FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
}
"""Fields of a chat request, and what they are called here."""
TEXT_PARTS = ("input_text", "output_text", "text")
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse(ParsedChat):
    """A chat request that came as a Responses request.

    `said`: its messages as JSON, without `instructions`. `echo`: the request's fields that a response
    repeats. `names`: of each function in a namespace the (namespace, name) that the client calls it.
    `customs`: functions that stand for tools whose input is text.
    `tells_thoughts`: reasoning comes as `encrypted_content` too. `forgets`: see `ResponseStore.put`.
    `began_unix_s`: see `StoredResponse`. `called`: fields of the chat, and what its client calls them.
    """

    said: Sequence[Json] = ()
    echo: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    customs: frozenset[str] = frozenset()
    is_stored: bool = True
    tells_thoughts: bool = False
    forgets: int = 0
    began_unix_s: float = 0.0
    called: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Conversation:
    """Chat messages made from items; `places`: of each, where it was in the body.

    `asked_at`: the place of the user's last message, in which nothing is replaced. `ignored`: places of what
    the model is not shown as it came.
    """

    messages: list[Json] = field(default_factory=list)
    asked_at: str = ""
    places: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    last: str = ""  # type of the item before, while it is the assistant's

    def add(self, message: Json, place: str) -> str:
        now = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.places[now] = place
        return now

    def answer(self, kind: str, place: str) -> tuple[Json, str]:
        """Return the assistant's message that an item belongs to: one turn's items are one message."""
        begins = not self.last or (kind == "message" and self.last == "message")
        if not begins and kind == "reasoning":
            begins = bool(self.messages[-1]["content"]) or "tool_calls" in self.messages[-1]
        if begins:
            self.add({"role": "assistant", "content": ""}, place)
        self.last = kind
        return self.messages[-1], f"messages[{len(self.messages) - 1}]"


class ResponsesParser:
    """Reads bodies within the limits of `parser`'s settings."""

    def __init__(
        self,
        parser: RequestParser,
        limits: LimitsSettings,
        store: ResponseStore,
    ) -> None:
        self._parser = parser
        self._limits = limits
        self._store = store
        self._body = bounded_responses_body(limits)

    def response(self, body: bytes, tenant: str) -> ParsedResponse:
        """Parse the body of POST /v1/responses. Raises `ApiError` naming the field at fault."""
        check_structure(body, self._limits)
        asked = validated(self._body, body)
        _refuse_unbuilt(asked)
        forgets, began_unix_s = self._store.forgets, time.time()
        said = _Conversation(messages=self._before(asked, tenant))
        if isinstance(asked.input, str):
            said.add({"role": "user", "content": asked.input}, "input")
        given = asked.input if isinstance(asked.input, list) else []
        read: dict[str, Items] = {}
        items = {
            f"input[{at}]": self._named(item, tenant, f"input[{at}]", read) for at, item in enumerate(given)
        }
        said.asked_at = next((place for place in reversed(items) if items[place].role == "user"), "")
        for place, item in items.items():
            _add_item(said, item, place)
        places, front = said.places, []
        if asked.instructions is not None:
            front = [{"role": "system", "content": asked.instructions}]
            places = {_later(place): now for place, now in places.items()}
        if not said.messages:
            raise MissingField("input")
        tools, names, tool_places, ignored = _tools(asked.tools or ())
        customs = [tool.name for tool in asked.tools or () if tool.type == "custom" and tool.name]
        request = with_passed(asked, self._wishes(asked))
        request |= {"messages": [*front, *said.messages], "tools": tools}
        if not tools:
            request.pop("parallel_tool_calls", None)
        here = names_here(FIELDS, asked) | places | tool_places
        try:
            chat = self._parser.translated(request)
        except ApiError as error:
            raise rename(error, here) from None
        held: dict[str, Any] = {one.name: getattr(chat, one.name) for one in fields(chat)}
        altered = (place_here(place, here) for place in chat.ignored_fields)
        held["ignored_fields"] = (
            *(asked.model_extra or {}),
            *_unheard(asked),
            *ignored,
            *said.ignored,
            *altered,
        )
        return ParsedResponse(
            **held,
            said=said.messages,
            echo=_echo(asked, chat),
            names=names,
            customs=frozenset(customs),
            is_stored=asked.store is not False,
            tells_thoughts=ENCRYPTED in (asked.include or ()),
            forgets=forgets,
            began_unix_s=began_unix_s,
            called=here,
        )

    def _before(self, asked: ResponsesBody, tenant: str) -> list[Json]:
        """Return the messages of the response that this one continues."""
        if asked.previous_response_id is None:
            return []
        stored = self._store.get(tenant, asked.previous_response_id)
        if stored is None:
            raise PreviousResponseNotFound(asked.previous_response_id)
        messages: list[Json] = parse_json(stored.messages)["messages"]
        return messages

    def _named(self, item: InputItem, tenant: str, place: str, read: dict[str, Items]) -> InputItem:
        """Return the item that a reference names, any other as it is; a reference may leave out `type`."""
        is_bare = item.type is None and item.role is None and item.id is not None
        if item.type != "item_reference" and not is_bare:
            return item
        if item.id is None:
            raise MissingField(f"{place}.id")
        found = self._store.item(tenant, item.id, read)
        if found is None:
            raise ResponseNotFound(item.id, f"{place}.id", what="item")
        return InputItem.model_validate(found)

    def _wishes(self, asked: ResponsesBody) -> Json:
        """Return the fields about length, tools, form and reasoning."""
        made: Json = {}
        if asked.max_output_tokens is not None:
            if asked.max_output_tokens < 1:
                given = shown(asked.max_output_tokens)
                raise InvalidValue("max_output_tokens", f"max_output_tokens={given} must be at least 1.")
            made["max_tokens"] = asked.max_output_tokens
        choice = asked.tool_choice
        if isinstance(choice, str):
            made["tool_choice"] = choice
        elif choice is not None:
            made["tool_choice"] = {"type": choice.type}
            if choice.type in ("function", "custom"):
                made["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
        form = asked.text.format if asked.text else None
        if form is not None:
            made["response_format"] = {"type": form.type}
            if form.type == "json_schema":
                if form.schema_ is None:
                    raise MissingField("text.format.schema")
                schema = {"name": form.name or "output", "schema": form.schema_, "strict": bool(form.strict)}
                made["response_format"]["json_schema"] = schema
        effort = asked.reasoning.effort if asked.reasoning else None
        if effort is not None:
            made["reasoning_effort"] = effort
        return made


class ResponseNotFound(ApiError):
    """404: the caller has no stored response, or item of one, of that id. Says nothing of other tenants'."""

    def __init__(self, response_id: str, param: str | None = None, *, what: str = "response") -> None:
        message = (
            f"No {what} {shown(response_id)} is stored. It may have been dropped for newer ones "
            "(limits.responses_max, limits.responses_bytes_max), deleted, or asked for with store=false."
        )
        super().__init__(404, message, param=param, code="response_not_found")
        self.wanted_id = response_id


class PreviousResponseNotFound(ResponseNotFound):
    """400: the response that is to be continued is not stored; clients then send the whole history."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id, "previous_response_id")
        self.status, self.code = 400, "previous_response_not_found"


def _later(place: str) -> str:
    """Return the place of a message behind one more message."""
    number, _, rest = place.removeprefix("messages[").partition("]")
    return f"messages[{int(number) + 1}]{rest}"


def _refuse_unbuilt(asked: ResponsesBody) -> None:
    unbuilt = {
        "prompt": asked.prompt,
        "top_logprobs": asked.top_logprobs,
        "include": LOGPROBS in (asked.include or ()),
    }
    for name, given in unbuilt.items():
        if given:
            what = f"{name}: {LOGPROBS!r}" if name == "include" else name
            raise UnsupportedParameter(name, f"{what} is not supported by this server. Leave it out.")


def _add_item(said: _Conversation, item: InputItem, place: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        role = item.role
        if role is None:
            raise MissingField(f"{place}.role")
        if role not in ("user", "assistant", "system", "developer"):
            known = "user, assistant, system, developer"
            raise InvalidValue(f"{place}.role", f"{place}.role={shown(role)} is none of {known}.")
        if item.content is None and place == said.asked_at:
            raise MissingField(f"{place}.content")
        texts = _texts(said, item.content or "", place, "content")
        if role == "assistant":
            message, _ = said.answer(kind, place)
            message["content"] += "".join(texts)
            return
        said.last = ""
        said.add({"role": role, "content": [{"type": "text", "text": text} for text in texts]}, place)
    elif kind == "reasoning":
        message, _ = said.answer(kind, place)
        message["reasoning_content"] = message.get("reasoning_content", "") + _thought(item, place)
    elif kind.endswith("_call_output"):
        said.last = ""
        result: Json = {"role": "tool", "content": "".join(_texts(said, item.output or "", place, "output"))}
        if item.call_id:
            result["tool_call_id"] = item.call_id
        now = said.add(result, place)
        said.places[f"{now}.tool_call_id"] = f"{place}.call_id"
    elif kind == "function_call" or (kind.endswith("_call") and item.call_id):
        _add_call(said, item, place)
    else:
        said.ignored.append(place)  # a search, a summary under a key of others: nothing that a model can read


def _add_call(said: _Conversation, item: InputItem, place: str) -> None:
    """Add a call: of a function, or of what another kind of tool was called with."""
    message, at = said.answer("function_call", place)
    calls = message.setdefault("tool_calls", [])
    now = f"{at}.tool_calls[{len(calls)}]"
    said.places |= {now: place, f"{now}.function": place, f"{now}.id": f"{place}.call_id"}
    arguments = item.arguments or ""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if item.input is not None:
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    elif made_with := item.action or item.operation:
        arguments = json.dumps(made_with, ensure_ascii=False)
    name = flat_name(item.namespace, item.name or (item.type or "").removesuffix("_call"))
    call: Json = {"type": "function", "function": {"name": name, "arguments": arguments}}
    calls.append(call | ({"id": item.call_id} if item.call_id else {}))


def flat_name(namespace: str | None, name: str) -> str:
    """Return what the model calls a function of a namespace."""
    return f"{namespace}.{name}" if namespace else name


def _texts(
    said: _Conversation, content: str | Sequence[ItemPart] | Json, place: str, field: str
) -> list[str]:
    """Return the texts of an item; what has none becomes a line, except in the user's last message."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, Mapping):
        said.ignored.append(f"{place}.{field}")
        return [left_out(str(content.get("type", "output")))]
    texts = []
    for number, part in enumerate(content):
        where = f"{place}.{field}[{number}]"
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in (*TEXT_PARTS, "refusal") and text is not None:
            texts.append(text)
        elif place != said.asked_at:
            if not part.type:  # a shell's output and the like: no part of a message
                texts.append(json.dumps(part.model_extra, ensure_ascii=False))
                continue
            said.ignored.append(where)
            texts.append(left_out(part.type))
        elif part.type in (*TEXT_PARTS, "refusal"):
            raise MissingField(f"{where}.text")
        else:
            raise UnsupportedParameter(
                f"{where}.type", f"{where}.type={shown(part.type)} is not supported; only text parts are."
            )
    return texts


def _thought(item: InputItem, place: str) -> str:
    """Return the reasoning of an item: its content, or what `encrypted` made of it."""
    if isinstance(item.content, list) and item.content:
        return "".join(part.text or "" for part in item.content)
    if item.encrypted_content:
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except (binascii.Error, ValueError):
            return ""  # another server's
    return ""


def encrypted(thought: str) -> str:
    """Return reasoning as opaque text, which clients that keep no reasoning send back."""
    return base64.b64encode(thought.encode()).decode()


def _tools(
    tools: Sequence[ResponsesTool],
) -> tuple[list[Json], dict[str, tuple[str, str]], dict[str, str], list[str]]:
    """Return a chat request's tools, the names of those in namespaces, their places, and what is left out."""
    made: list[Json] = []
    names: dict[str, tuple[str, str]] = {}
    places: dict[str, str] = {}
    ignored: list[str] = []

    def add(tool: ResponsesTool, place: str, namespace: str | None) -> None:
        if tool.type == "namespace" and namespace is None and tool.name:
            for number, inner in enumerate(tool.tools or ()):
                add(inner, f"{place}.tools[{number}]", tool.name)
            return
        is_custom = tool.type == "custom" and namespace is None
        if tool.type != "function" and not is_custom:
            ignored.append(f"tools.{tool.type}")
            return
        if not tool.name:
            raise MissingField(f"{place}.name")
        name = flat_name(namespace, tool.name)
        if namespace:
            names[name] = (namespace, tool.name)
        function: Json = {"name": name}
        if tool.description is not None:
            function["description"] = tool.description
        if is_custom:
            function["parameters"] = PARAMETERS
            if (tool.format or {}).get("type") == "grammar":  # the model is not told, nor held to it
                ignored.append(f"{place}.format")
        elif tool.parameters is not None:
            function["parameters"] = tool.parameters
        if tool.strict:
            function["strict"] = True
        now = f"tools[{len(made)}]"
        places.update({now: place, f"{now}.function": place})
        made.append({"type": "function", "function": function})

    for index, tool in enumerate(tools):
        add(tool, f"tools[{index}]", None)
    return made, names, places, ignored


def _unheard(asked: ResponsesBody) -> list[str]:
    """Return the fields of those above whose wish is not followed."""
    wishes = {
        "truncation": asked.truncation not in (None, "disabled"),
        "text.verbosity": bool(asked.text and asked.text.verbosity),
        "reasoning.summary": bool(asked.reasoning and asked.reasoning.summary),
    }
    return [name for name, is_given in wishes.items() if is_given]


def _echo(asked: ResponsesBody, chat: ParsedChat) -> Json:
    """Return what a response says of its request: as it was served, with the model's defaults."""
    choice = asked.tool_choice
    functions = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in asked.tools or ()
        if tool.type == "function"
    ]
    form = None if asked.text is None or asked.text.format is None else asked.text.format
    told = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {
            "effort": asked.reasoning.effort if asked.reasoning else None,
            "summary": None,
        },
        "store": asked.store is not False,
        "temperature": chat.sampling.temperature,
        "text": {"format": told},
        "tool_choice": choice
        if isinstance(choice, str)
        else "auto"
        if choice is None
        else choice.model_dump(exclude_none=True),
        "tools": functions,
        "top_p": chat.sampling.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }
