"""Which conversation a request belongs to, as a name that reveals nothing.

The first of several headers and body fields that clients use; without any, the beginning of the
conversation itself, so that a first and a fifth turn get the same key. The outcome is an HMAC
under the server's secret and the tenant: raw ids, whatever they hold, never go further. Knows
nothing of replicas or of routing.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from itertools import takewhile

from router.errors import InvalidValue
from router.parsed_request import ParsedChat, ParsedCompletion

BEGIN_CHARS = 256  # of a plain prompt: enough to tell documents apart, short enough to be in every turn
BEGIN_TOKENS = 64

Request = ParsedChat | ParsedCompletion

# In order of precedence: (where an error points, how to read it from headers and request).
SOURCES: tuple[tuple[str, Callable[[Mapping[str, str], Request], str | None]], ...] = (
    ("x-session-id", lambda headers, request: headers.get("x-session-id")),
    ("x-session-affinity", lambda headers, request: headers.get("x-session-affinity")),
    ("session_id", lambda headers, request: request.ids.session_id),
    ("prompt_cache_key", lambda headers, request: request.ids.prompt_cache_key),
    ("x-openwebui-chat-id", lambda headers, request: headers.get("x-openwebui-chat-id")),
    ("user", lambda headers, request: request.ids.user),
    ("x-user-id", lambda headers, request: headers.get("x-user-id")),
)


def session_key(
    secret: bytes, tenant: str, headers: Mapping[str, str], request: Request, id_chars_max: int
) -> str:
    """64 hex characters that name the conversation of `request`.

    `headers`: lower-case names. Raises `InvalidValue` for any id that is longer than
    `id_chars_max` or holds control characters, used or not.
    """
    chosen: tuple[str, str] | None = None
    for name, read in SOURCES:
        value = read(headers, request)
        if not value:
            continue
        check_id(name, value, id_chars_max)
        chosen = chosen or (name, value)
    if request.ids.cache_salt:
        check_id("cache_salt", request.ids.cache_salt, id_chars_max)
    kind, value = chosen or ("beginning", _beginning(request))
    message = b"\0".join((b"samovar session", tenant.encode(), kind.encode(), value.encode()))
    return hmac.digest(secret, message, "sha256").hex()


def check_id(name: str, value: str, id_chars_max: int) -> None:
    """Raises `InvalidValue` naming the field, never the value."""
    if len(value) > id_chars_max:
        message = f"{name} has {len(value)} characters, more than {id_chars_max} (limits.id_chars_max)."
        raise InvalidValue(name, message)
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value):
        raise InvalidValue(name, f"{name} holds control characters.")


def _beginning(request: Request) -> str:
    """Everything up to the first user message, or the first characters or tokens of a prompt."""
    if isinstance(request, ParsedCompletion):
        prompt = request.prompts[0]
        return prompt[:BEGIN_CHARS] if isinstance(prompt, str) else repr(prompt[:BEGIN_TOKENS])
    before = list(takewhile(lambda message: message.role != "user", request.messages))
    first = [*before, *request.messages[len(before) : len(before) + 1]]
    return "\0".join(f"{message.role}\0{message.content}" for message in first)
