"""The items that a stored response answered, as GET /v1/responses/{id}/input_items lists them. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.router.responses.store import StoredResponse

Json = dict[str, Any]


def input_items(response_id: str, stored: StoredResponse) -> list[Json]:
    """Return the items before a response's own output, oldest first; those of earlier responses, too."""
    items: list[Json] = []

    def add(prefix: str, **item: Any) -> None:
        digest = hashlib.sha256(f"{response_id}/input/{len(items)}".encode()).hexdigest()[:32]
        items.append({"id": f"{prefix}_{digest}", **item, "status": "completed"})

    for message in parse_json(stored.messages)["messages"][:-1]:  # the last is the answer
        role, content = message["role"], message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        if role == "tool":
            call_id = message.get("tool_call_id", "")
            add("fco", type="function_call_output", call_id=call_id, output="".join(texts))
            continue
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text} for text in texts if text or role != "assistant"]
        if parts:
            add("msg", type="message", role=role, content=parts)
        for call in message.get("tool_calls", ()):
            function = call["function"]
            add(
                "fc",
                type="function_call",
                call_id=call.get("id", ""),
                name=function["name"],
                arguments=function["arguments"],
            )
    return items
