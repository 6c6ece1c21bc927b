"""Formats in which models write tool calls and reasoning, as data for transformers' response parser.

A format is chosen by name, by what the tokenizer declares (`response_template`), or by how the chat template
writes a call. The parser itself is `transformers.utils.chat_parsing`; `reader.py` drives it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from samovar.configs.json_text import parse_json
from samovar.replicas.reply.patterns import timed

if TYPE_CHECKING:  # else imported where it is used: messages.py is read by commands that must start at once
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

CALLS, CONTENT, REASONING = "tool_calls", "content", "reasoning_content"
THOUGHTS: Final = (REASONING, "thinking", "reasoning")
"""Names under which declared templates have the reasoning."""

Field = dict[str, Any]
Style = Literal["declared", "json", "mistral", "deepseek", "named", "gemma", "xml"]
"""How calls are read: as JSON (one call, a list of calls, or several one after the other), as JSON arguments
behind a name, as the models of that name write them, or (`declared`) by the field's own parser when all of a
call is there."""


DEEPSEEK: Final = {
    name: f"<\uff5ctool▁{name}\uff5c>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
}
"""Its tokens around calls, which are written with full-width bars."""

_NAMED: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# Of declared templates, how they say that the content is a call, or several.
_ONE: Final = (
    None,
    "{content}",
    *({"name": "{content.name}", "arguments": f"{{content.{key}}}"} for key in ("arguments", "parameters")),
)
_EACH: Final = tuple({"name": "{name}", "arguments": f"{{{key}}}"} for key in ("arguments", "parameters"))
_CALLS: Final[Mapping[str, Field]] = {
    # Qwen 2 to 3, Hermes, Granite 4, and what models without tools of their own are asked for.
    "hermes": {"open": "<tool_call>", "close": "</tool_call>"},
    # Llama 3: the whole answer is the call.
    "llama3_json": {"open_pattern": r"\A\s{0,64}(?:(?:<\|python_tag\|>\s{0,8})|(?=\{))"},
    "mistral": {"open": "[TOOL_CALLS]"},
    # Qwen 3 Coder, Qwen 3.5.
    "qwen3_xml": {
        "open_pattern": r"<tool_call>\s{0,8}<function=(?P<name>[^>\n]{1,256})>",
        "close_pattern": r"</parameter>\s{0,8}</function>\s{0,8}</tool_call>",
        "transform": _NAMED,
    },
    "deepseek_v3": {"open": DEEPSEEK["calls▁begin"], "close": DEEPSEEK["calls▁end"]},
    "gemma4": {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w{1,256})",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": _NAMED,
    },
}
_STYLES: Final[Mapping[str, Style]] = {
    "hermes": "json",
    "llama3_json": "json",
    "mistral": "mistral",
    "deepseek_v3": "deepseek",
    "gemma4": "gemma",
    "qwen3_xml": "xml",
}


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The text around the JSON of calls' arguments: what a grammar that forces calls is made of.

    `before` (with `{name}`) and `behind` are of each call, `begin` and `end` of all, `between` of two; None:
    an answer holds one. `mark`: what tells a call from text, at the front of the first; empty: nothing does.
    `ends`: what ends arguments that are not written as JSON; empty: they are.
    """

    before: str
    behind: str
    between: str | None
    begin: str = ""
    end: str = ""
    mark: str = ""
    ends: str = ""


_FRAMES: Final[Mapping[str, CallFrame]] = {
    "hermes": CallFrame(
        '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n", mark="<tool_call>"
    ),
    "llama3_json": CallFrame('{"name": "{name}", "parameters": ', "}", None),
    "mistral": CallFrame(
        '{"name": "{name}", "arguments": ', "}", ", ", begin="[TOOL_CALLS][", end="]", mark="[TOOL_CALLS]"
    ),
    "deepseek_v3": CallFrame(
        f"{DEEPSEEK['call▁begin']}function{DEEPSEEK['sep']}{{name}}\n```json\n",
        f"\n```{DEEPSEEK['call▁end']}",
        "\n",
        begin=DEEPSEEK["calls▁begin"],
        end=DEEPSEEK["calls▁end"],
        mark=DEEPSEEK["calls▁begin"],
    ),
    "qwen3_xml": CallFrame(
        "<tool_call>\n<function={name}>\n", "", "\n", mark="<tool_call>", ends="</tool_call>"
    ),
    "gemma4": CallFrame("<|tool_call>call:{name}{", "", "", mark="<|tool_call>", ends="<tool_call|>"),
}
_MISTRAL_NAMED: Final = CallFrame("[TOOL_CALLS]{name}[ARGS]", "", "", mark="[TOOL_CALLS]")
"""Of Mistral's models since 2025."""
_THINK: Final[Field] = {"open": "<think>", "close": "</think>"}
_REASONING: Final[Mapping[str, Field]] = {
    "think": _THINK,
    "mistral": {"open": "[THINK]", "close": "[/THINK]"},
    "gemma4": {"open": "<|channel>thought\n", "close": "<channel|>"},
}
FORMATS: Final = tuple(_CALLS)
"""Names of the formats of tool calls."""
_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_CHANNELS: Final = r"<\|channel\|>(?:analysis|commentary)"
_HARMONY_WORDS: Final[Mapping[str, Field]] = {
    REASONING: {
        "open": [f"{before}{_CHANNEL}analysis{_MESSAGE}" for before in ("", _START)],
        "close": "<|end|>",
    },
    # What is said has a mark as well. Where one is a call's, too, that goes before it, by its name.
    "words": {
        "open_pattern": r"(?:<\|start\|>assistant[^<]{0,256})?<\|channel\|>(?:analysis|commentary|final)"
        r"[^<]{0,256}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>"
        r"|<\|(?:start|channel)\|>[^<]{0,256}(?:<\|(?:channel|constrain)\|>[^<]{0,256}){0,2}\Z",  # cut
        "close": "<|end|>",
    },
}
_HARMONY_CALLS: Final[Field] = {  # its tool stands before the channel, or behind it
    "open_pattern": rf"(?:<\|start\|>assistant)?(?:{_CHANNELS})?\s{{0,8}}to=functions\."
    rf"(?P<name>[\w.:/-]{{1,128}})\s{{0,8}}(?:{_CHANNELS})?\s{{0,8}}"
    r"(?:(?:<\|constrain\|>)?\w{1,32}\s{0,8})?<\|message\|>",
    "close": "<|call|>",
    "content": "json",
    "transform": _NAMED,
}
_HARMONY_FRAME: Final = CallFrame(
    f"{_CHANNEL}commentary to=functions.{{name}} <|constrain|>json{_MESSAGE}",
    "",
    None,
    mark=f"{_CHANNEL}commentary to=functions.",
)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How a model writes reasoning and tool calls: one format of each, or neither.

    `calls`, `reasoning`: JSON of fields of a response template; empty: the model writes none. `is_bare`: a
    call has no mark of its own, so that only a call of a known tool is one. `frame`: how a call is written
    around its arguments; None: not as JSON, or that is not known. `head`: the mark of what is said, `joint`:
    what stands between parts; empty: what is said has no mark.
    """

    name: str
    calls: str = ""
    reasoning: str = ""
    style: Style = "declared"
    is_bare: bool = False
    frame: CallFrame | None = None
    head: str = ""
    joint: str = ""

    def template(self, *, reads_calls: bool) -> ResponseTemplate:
        """Return the compiled template that splits an answer into regions, their text untouched.

        A region of calls that are read as they come has no end here: where they end is found by reading them.
        """
        return _split_template(self.calls if reads_calls else "", self.reasoning, self.style == "declared")

    @property
    def close(self) -> str:
        """The mark that closes a call, or several; empty: there is none, or it is a pattern."""
        close = parse_json(self.calls)[CALLS].get("close") if self.calls else None
        return close if isinstance(close, str) else ""

    @property
    def needs_types(self) -> bool:
        """Whether a call's values are read by what its tool says of them."""
        return self.style in ("declared", "xml")

    def call_fields(self) -> ResponseTemplate:
        """Return the compiled template whose call fields parse a region's text."""
        return _loaded(self.calls)

    def marks(self, token: str, *, calls: bool) -> bool:
        """Return whether a token's text is part of a delimiter: of reasoning, or also of `calls`."""
        text = self.reasoning + (self.calls if calls else "")
        return any(json.dumps(form)[1:-1] in text for form in (token, re.escape(token)))

    @property
    def thought_marks(self) -> tuple[str, str] | None:
        """The texts that open and close reasoning; None: there is none, or its marks are patterns."""
        fields = parse_json(self.reasoning).values() if self.reasoning else ()
        marks = [(field["open"], field["close"]) for field in fields if {"open", "close"} <= field.keys()]
        marks = [(opens if isinstance(opens, str) else opens[0], closes) for opens, closes in marks]
        return marks[0] if marks and all(isinstance(mark, str) for mark in marks[0]) else None

    def thought_at_end(self, prompt: str) -> str:
        """Return the mark of reasoning that a prompt ends with; empty: none."""
        return next((mark for mark in self.thought_marks or () if prompt.rstrip().endswith(mark)), "")

    def before_thought(self, opening: str) -> str:
        """Return the part of an answer's opening in front of reasoning, or of the end of one left out."""
        fields = _loaded(self.reasoning).fields if self.reasoning else {}
        thoughts = [field for name, field in fields.items() if name in THOUGHTS]
        marks = [mark for field in thoughts for mark in (field.open_re, field.close_re) if mark is not None]
        found = [match.start() for mark in marks if (match := mark.search(opening))]
        return opening[: min(found, default=len(opening))]


def format_named(name: str | None, reasoning: str | None) -> ReplyFormat:
    """Return a format of the tables; None: no calls, or no reasoning. Raises `KeyError`."""
    calls = "" if name is None else json.dumps({CALLS: {"repeats": True, **_CALLS[name]}})
    thoughts = "" if reasoning is None else json.dumps({REASONING: _REASONING[reasoning]})
    style = _STYLES.get(name or "", "declared")
    is_bare = name == "llama3_json"
    return ReplyFormat(name or "none", calls, thoughts, style, is_bare, _FRAMES.get(name or ""))


def declared_format(response_template: Mapping[str, Any]) -> ReplyFormat:
    """Return the format that a tokenizer declares. Raises `ValueError` if the declaration is not valid."""
    template = dict(response_template)
    _compiled(template)
    fields = template["fields"]
    nested = [field.get("content_args", {}).get("value_parser") for field in fields.values()]
    if '"tag_pattern"' in json.dumps(nested):
        raise ValueError("a pattern within a pattern: nothing bounds its time")
    thoughts = {name: field for name, field in fields.items() if name in THOUGHTS and _opens(field)}
    calls = {name: field for name, field in fields.items() if name == CALLS and _opens(field)}
    made = ReplyFormat(
        "declared",
        json.dumps(calls) if calls else "",
        json.dumps(thoughts) if thoughts else "",
        _style_of(calls[CALLS]) if calls else "declared",
        frame=_frame_of(calls[CALLS]) if calls else None,
    )
    made.template(reads_calls=True)
    return made


def _style_of(field: Field) -> Style:
    """Return how calls of a declared field are read: as they come, if they are JSON in a known shape."""
    transform, args = field.get("transform"), field.get("content_args") or {}
    if field.get("content") != "json" or "close_pattern" in field or isinstance(field.get("close"), list):
        return "declared"
    call = transform.get("function", transform) if isinstance(transform, dict) else transform
    is_each = bool(field.get("transform_each"))
    if not args and call in (_EACH if is_each else _ONE):
        return "json"
    if is_each or call != _NAMED["function"] or "(?P<name>" not in field.get("open_pattern", ""):
        return "declared"
    return "named" if not args else "gemma" if args == _CALLS["gemma4"]["content_args"] else "declared"


def _frame_of(field: Field) -> CallFrame | None:
    """Return the frame of calls of a declared field; None: its marks are patterns, or there is no end."""
    mark, ends = field.get("open"), field.get("close")
    if not (isinstance(mark, str) and isinstance(ends, str)):
        return None
    return CallFrame(mark, "", "\n", mark=mark, ends=ends)


def _opens(field: Field) -> bool:
    return "open" in field or "open_pattern" in field


def sniffed_format(template: str, rendered_call: str, tool: str) -> ReplyFormat:
    """Return the format that a chat template writes.

    `rendered_call`: what it makes of an answer that calls `tool`; empty if it knows no calls.
    """
    marks = {
        "qwen3_xml": f"<function={tool}>",
        "gemma4": f"<|tool_call>call:{tool}",
        "deepseek_v3": DEEPSEEK["calls▁begin"],
        "mistral": "[TOOL_CALLS]",
        "hermes": "<tool_call>",
        "llama3_json": f'{{"name": "{tool}", "parameters":',
    }
    name = None
    if tool in rendered_call:
        name = next((name for name, mark in marks.items() if mark in rendered_call), None)
    reasoning = None
    if f"{_CHANNEL}analysis{_MESSAGE}" in template:
        calls = json.dumps({CALLS: {"repeats": True, **_HARMONY_CALLS}})
        return ReplyFormat(
            "harmony",
            calls if f"to=functions.{tool}" in rendered_call else "",
            json.dumps(_HARMONY_WORDS),
            "named",
            frame=_HARMONY_FRAME,
            head=f"{_CHANNEL}final{_MESSAGE}",
            joint=_START,
        )
    if "</think>" in template:
        reasoning = "think"
    elif "[/THINK]" in template:
        reasoning = "mistral"
    elif "<|channel>" in template:
        reasoning = "gemma4"
    form = format_named(name, reasoning)
    if name == "mistral" and f"{tool}[ARGS]" in rendered_call:
        form = replace(form, frame=_MISTRAL_NAMED)
    return form


def _compiled(template: Mapping[str, Any]) -> ResponseTemplate:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return timed(load_response_template(dict(template)))


@lru_cache(maxsize=64)
def _loaded(fields: str) -> ResponseTemplate:
    return _compiled({"start_anchor_pattern": r"\A", "fields": parse_json(fields)})


@lru_cache(maxsize=64)
def _split_template(calls: str, reasoning: str, ends_calls: bool) -> ResponseTemplate:
    """Return a template whose regions keep their text. `\\A`: it is given what the answer begins with."""
    fields: dict[str, Field] = {CONTENT: _plain({})}
    for name, field in [*_fields(calls), *_fields(reasoning)]:
        fields[name] = _plain(field, has_end=ends_calls or name != CALLS) | {"repeats": True}
    return _compiled({"start_anchor_pattern": r"\A", "fields": fields})


def _fields(text: str) -> list[tuple[str, Field]]:
    return list(parse_json(text).items()) if text else []


def _plain(field: Field, *, has_end: bool = True) -> Field:
    """Return a field of the same delimiters, whose text is kept as it is."""
    delimiters = ("open", "open_pattern", *(("close", "close_pattern") if has_end else ()))
    made = {key: value for key, value in field.items() if key in delimiters}
    # What the delimiters capture needs a transform, or the template is refused; `reader.py` does not use it.
    return made | {"content": "text", "content_args": {"strip": False}, "transform": {"text": "{content}"}}
