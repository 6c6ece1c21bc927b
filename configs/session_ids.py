"""Where a request's session id is read: headers and fields of the body that clients use."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

BODY_IDS = ("session_id", "prompt_cache_key", "user")
"""Fields of a request's body that may name its conversation; `METADATA` + key is a field of `metadata`."""
METADATA = "metadata."
CREDENTIALS = frozenset({"authorization", "proxy-authorization", "x-api-key", "cookie"})
SESSION_IDS = (
    "x-session-id",
    "x-session-affinity",
    "session_id",
    "prompt_cache_key",
    "x-openwebui-chat-id",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
    "metadata.user_id",
    "any-session-header",
    "user",
    "x-user-id",
)
HEADER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def _place_of_id(name: str) -> str:
    """Return a place of session ids as it is compared: headers in lower case."""
    is_in_metadata = name.startswith(METADATA)
    if name in BODY_IDS or (is_in_metadata and len(METADATA) < len(name) <= 128):
        return name
    header = name.lower()
    if header in CREDENTIALS:
        raise ValueError(
            f"{header} holds a credential: all conversations of a client would be one session. Name a "
            "header that differs between conversations"
        )
    if is_in_metadata or not HEADER_NAME.fullmatch(header):
        fields = ", ".join(BODY_IDS)
        raise ValueError(
            f"{name[:64]!r} is no place of a session id. Give the name of a header, a field of the body "
            f"({fields}) or metadata.NAME"
        )
    return header


IdPlace = Annotated[str, AfterValidator(_place_of_id)]
