"""Requests in the shapes of real clients, as recorded on the wire; made here, not copied.

Each function takes a conversation's id and what was said so far (user and assistant in turn) and gives
headers and body for /v1/chat/completions. Claude Code and Codex speak other routes: what those carry of ids
and of the prompt is put here as chat completions hold it. opencode and Open WebUI send tools each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.router.router_harness import MODEL

SYSTEM = (
    "You are an assistant in a terminal. Read the files before you change them, say what you do, keep to "
    "the style of the project, and never invent the result of a command."
)

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": PATH}}
WITH_TOOLS: dict[str, Any] = {"tools": [READ], "tool_choice": "auto"}


@dataclass(frozen=True)
class SentRequest:
    headers: dict[str, str]
    body: dict[str, Any]


Shape = Callable[..., SentRequest]


def turns(said: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


def text_part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def claude_code(session: str, *said: str) -> SentRequest:
    """A billing line that varies comes first; the first user message is parts once, then a string."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.{len(session)}.{session}; cc_entrypoint=cli;"
    system = [
        text_part(f"{billing} cch={len(said)};"),
        text_part(SYSTEM, cache_control={"type": "ephemeral"}),
    ]
    first, *later = turns(said)
    if not later:
        first["content"] = [text_part(first["content"], cache_control={"type": "ephemeral"})]
    environment = {"role": "system", "content": "The working directory is /work. The platform is linux."}
    user_id = {"device_id": "d" * 16, "account_uuid": "", "session_id": session}
    return SentRequest(
        {"x-claude-code-session-id": session, "anthropic-beta": "any"},
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": system}, first, environment, *later],
            "metadata": {"user_id": json.dumps(user_id)},
            "stream": False,
        },
    )


def codex(session: str, *said: str) -> SentRequest:
    """The prompt comes in developer messages; one id in three headers and in `prompt_cache_key`."""
    developer = [{"role": "developer", "content": [text_part(text)]} for text in (SYSTEM, "Sandbox: none.")]
    about = {"role": "user", "content": [text_part("<environment>/work</environment>")]}
    ids = ("session-id", "thread-id", "x-client-request-id")
    return SentRequest(
        {**dict.fromkeys(ids, session), "x-codex-window-id": f"{session}:0"},
        {
            "model": MODEL,
            "messages": [*developer, about, *turns(said)],
            "prompt_cache_key": session,
            "store": False,
        },
    )


def opencode(session: str, *said: str) -> SentRequest:
    return SentRequest(
        {"x-session-id": session, "x-session-affinity": session},
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": SYSTEM}, *turns(said)],
            "max_tokens": 32,
            **WITH_TOOLS,
        },
    )


def opencode_title(session: str, first: str) -> SentRequest:
    """Runs beside the first turn."""
    messages = [
        {"role": "system", "content": "You write titles. Answer with a title only, of at most 50 letters."},
        *turns(("Generate a title for this conversation:",)),
        *turns((first,)),
    ]
    return SentRequest(opencode(session, first).headers, {"model": MODEL, "messages": messages})


def open_webui(chat: str, *said: str) -> SentRequest:
    return SentRequest(
        {"x-openwebui-chat-id": chat, "x-openwebui-user-id": "u1", "x-openwebui-user-name": "Ada"},
        {"model": MODEL, "messages": [{"role": "system", "content": SYSTEM}, *turns(said)], **WITH_TOOLS},
    )


def open_webui_tasks(chat: str, *said: str) -> list[SentRequest]:
    """The unstreamed requests after each answer: one user message that quotes the conversation."""
    quoted = "\n".join(f"{turn['role'].upper()}: {turn['content']}" for turn in turns(said))
    return [
        SentRequest(
            open_webui(chat, *said).headers,
            {"model": MODEL, "messages": turns((f"### Task:\n{task}\n### Chat History:\n{quoted}",))},
        )
        for task in (
            "Suggest 3-5 follow-up questions.",
            "Generate a title of 3-5 words.",
            "Generate 1-3 tags.",
        )
    ]


def plain_sdk(session: str, *said: str) -> SentRequest:
    """No id at all; conversations differ in their first question."""
    messages = [{"role": "system", "content": SYSTEM}, *turns((f"({session}) {said[0]}", *said[1:]))]
    return SentRequest({}, {"model": MODEL, "messages": messages})


SHAPES: tuple[Shape, ...] = (claude_code, codex, opencode, open_webui, plain_sdk)
