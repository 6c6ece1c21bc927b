"""Headers of an answer that is under way: who serves it, what the cache gave, what nobody read. Pure."""

from __future__ import annotations

from router.answer import Answer
from router.parsed_request import ParsedRequest

IGNORED_SHOWN_MAX = 32
HEADER_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def answer_headers(answer: Answer, request: ParsedRequest) -> dict[str, str]:
    """What is known now: nothing about replicas and cache before every prompt is computed."""
    headers = {}
    if answer.is_admitted:
        headers = {"x-replica": ",".join(answer.replica_ids), "x-cache": answer.receipt.header()}
    names = [_safe(name) for name in request.ignored_fields[:IGNORED_SHOWN_MAX]]
    if names:
        headers["x-ignored-fields"] = ", ".join(names)
    return headers


def _safe(name: str) -> str:
    """A field's name made safe for a header: clients chose it."""
    return "".join(char if char in HEADER_SAFE else "?" for char in name[:64])
