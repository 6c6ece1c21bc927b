"""How a chat template writes tools, calls and results, and what is written for one that knows none.

What a template can do is found by rendering a conversation with a call. For a template that knows no tools,
or that writes calls in a form that cannot be read, they are written as Hermes does: a section of the system
prompt, `<tool_call>` and `<tool_response>`. The section comes before the client's own system prompt, which
changes more often. Pure except for the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.configs.settings import ModelSettings
from samovar.replicas.reply import ReplyFormat, declared_format, format_named, sniffed_format
from samovar.replicas.templates import TEMPLATE_FAULTS, Template, TemplateLimit, refused_model, rendered
from samovar.router.openai import ChatMessage, ParsedChat, ToolCall, ToolOffer, UnsupportedParameter

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


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """What a model's chat template does with tools, and how its answers are read.

    `is_native`: the template writes tools itself. `wants_text`: it takes a call's arguments as text, not as
    an object. `wants_short_ids`: it refuses ids that are not `SHORT_ID`. `variables`: those of
    `THOUGHT_VARIABLES` that it uses. `reads_tools`: False: requests with tools are refused.
    """

    form: ReplyFormat
    is_native: bool = False
    wants_text: bool = False
    wants_short_ids: bool = False
    variables: frozenset[str] = frozenset()
    reads_tools: bool = True

    def conversation(self, request: ParsedChat) -> tuple[list[Json], Json]:
        """Return the messages as the template wants them, and its `tools` argument if it takes one."""
        offer = request.offer
        if self.is_native or not (offer or any(one.calls or one.call_id for one in request.messages)):
            made = [self._message(message) for message in request.messages]
            return made, {"tools": [tool.spec for tool in offer.tools]} if offer else {}
        return list(_generic(request.messages, offer)), {}

    def _message(self, message: ChatMessage) -> Json:
        made: Json = {"role": message.role, "content": message.content}
        if message.reasoning:
            made["reasoning_content"] = message.reasoning
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
    variables = frozenset(name for name in THOUGHT_VARIABLES if re.search(rf"\b{name}\b", text))
    wants_text = False
    offered, called = _render(tokenizer, [HELLO]), ""
    if offered is not None and PROBE in offered:
        for wants_text in (False, True):
            called = _render(tokenizer, _probe(wants_text, "probe0001")) or ""
            if PROBE in called and "probe_value" in called and "probe_result" in called:
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
    thought = {"auto": form.reasoning, "none": ""}.get(settings.reasoning_parser)
    if thought is None:
        thought = format_named(None, settings.reasoning_parser).reasoning
    return ToolTemplate(
        form=replace(chosen, reasoning=thought),
        is_native=is_native,
        wants_text=wants_text and is_native,
        wants_short_ids=is_native and _render(tokenizer, _probe(wants_text, "call_0123456789")) is None,
        variables=variables,
        reads_tools=calls != "none",
    )


def _probe(wants_text: bool, call_id: str) -> list[Json]:
    arguments: Json = {"probe_key": "probe_value"}
    function = {"name": PROBE, "arguments": json.dumps(arguments) if wants_text else arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "probe_result", "tool_call_id": call_id, "name": PROBE},
    ]


def _render(tokenizer: Template, conversation: list[Json]) -> str | None:
    """Return what the template makes of a conversation with tools; None if it refuses it."""
    if not tokenizer.chat_template:
        return None
    try:
        return rendered(tokenizer, conversation, add_generation_prompt=False, tools=[PROBE_TOOL])
    except TemplateLimit as limit:
        raise refused_model(limit) from None
    except TEMPLATE_FAULTS:
        return None


def _generic(messages: Sequence[ChatMessage], offer: ToolOffer | None) -> Iterator[Json]:
    """Yield the messages for a template that knows no tools."""
    section = ""
    if offer is not None:
        section = SECTION.replace("{tools}", "\n".join(tool.text for tool in offer.tools))
    if section and messages[0].role != "system":
        yield {"role": "system", "content": section}
        section = ""
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            results = (f"<tool_response>\n{message.content}\n</tool_response>" for message in group)
            yield {"role": "user", "content": "\n".join(results)}
            continue
        for message in group:
            texts = [section, "\n\n", message.content] if section else [message.content]
            section = ""
            calls = [call_text(call.name, call.arguments) for call in message.calls]
            texts += [] if not calls else ["\n" if message.content else "", "\n".join(calls)]
            yield {"role": message.role, "content": "".join(texts)}


def call_text(name: str, arguments: str) -> str:
    """Return a call as Hermes writes it; `arguments`: the text of a JSON object."""
    value = {"name": name, "arguments": parse_json(arguments)}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"
