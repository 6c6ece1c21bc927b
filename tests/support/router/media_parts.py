"""Images, sound and documents as each API says them, by data and by address: what no engine is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

DATA = "iVBORw0KGgo="
ADDRESS = "http://169.254.169.254/latest/meta-data"
"""Of what must never be asked."""


def media_requests(model: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield path and body of requests that have one such part, and the field to be named."""
    told = {"type": "text", "text": "What is this?"}
    for url in (f"data:image/png;base64,{DATA}", ADDRESS):
        chat = {"type": "image_url", "image_url": {"url": url}}
        yield _chat(model, chat, told)
        yield _responses(model, {"type": "input_image", "image_url": url})
    for source in (
        {"type": "base64", "media_type": "image/png", "data": DATA},
        {"type": "url", "url": ADDRESS},
    ):
        yield _messages(model, {"type": "image", "source": source}, told)
    for source in (
        {"type": "base64", "media_type": "application/pdf", "data": DATA},
        {"type": "url", "url": ADDRESS},
    ):
        yield _messages(model, {"type": "document", "source": source}, told)
    yield _chat(model, {"type": "file", "file": {"filename": "a.pdf", "file_data": DATA}}, told)
    yield _chat(model, {"type": "input_audio", "input_audio": {"format": "wav", "data": DATA}}, told)
    yield _responses(model, {"type": "input_file", "filename": "a.pdf", "file_data": DATA})
    yield _responses(model, {"type": "input_file", "file_url": ADDRESS})


def _chat(model: str, *parts: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    body = {"model": model, "messages": [{"role": "user", "content": list(parts)}]}
    return "/v1/chat/completions", body, "messages[0].content[0].type"


def _responses(model: str, part: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    told = {"type": "input_text", "text": "What is this?"}
    body = {"model": model, "input": [{"role": "user", "content": [part, told]}]}
    return "/v1/responses", body, "input[0].content[0].type"


def _messages(model: str, *parts: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
    said = [{"role": "user", "content": list(parts)}]
    return (
        "/v1/messages",
        {"model": model, "messages": said, "max_tokens": 8},
        "messages[0].content[0].type",
    )
