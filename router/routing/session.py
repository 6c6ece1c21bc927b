"""Session identity, block placement and turn context of a request.

The session is named by the first of several headers and body fields that clients use
(`router.session_ids`); without any, by the beginning of the conversation, so that a first and a fifth turn
get the same key. The key is an HMAC under the server's secret and the tenant: raw ids are never passed on.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import get_args

from samovar.cache_tiers.blocks import TAG_BYTES, TIERS, TOP_TIER, Placement, TierName, session_of
from samovar.cache_tiers.forecast import Role
from samovar.configs.json_text import parse_json
from samovar.configs.sections import (
    BODY_IDS,
    METADATA,
    SESSION_IDS,
    VOLATILE_LINES,
    ProfileName,
    ProfileSettings,
    TierSettings,
)
from samovar.replicas.messages import TurnContext
from samovar.router.openai import (
    CacheWish,
    ChatMessage,
    InvalidValue,
    ParsedChat,
    ParsedCompletion,
    shown,
    split_front,
)

BEGIN_CHARS = 256  # of a plain prompt: tells documents apart, and is in every turn
BEGIN_TOKENS = 64

Request = ParsedChat | ParsedCompletion


def session_key(
    secret: bytes,
    tenant: str,
    headers: Mapping[str, str],
    request: Request,
    id_chars_max: int,
    places: Sequence[str] = SESSION_IDS,
    volatile_lines: tuple[str, ...] = VOLATILE_LINES,
) -> str:
    """Return 64 hex characters that name the conversation of `request`.

    `headers`: lower-case names. `places`: see `router.session_ids`. `volatile_lines`: not part of the
    beginning that names a conversation without id. Raises `InvalidValue` for any id that is longer than
    `id_chars_max` or contains control characters, even if it is not used.
    """
    chosen: tuple[str, str] | None = None
    for name in places:
        value = _id_at(name, headers, request)
        if not value:
            continue
        check_id(name, value, id_chars_max)
        chosen = chosen or (name, value)
    if request.ids.cache_salt:
        check_id("cache_salt", request.ids.cache_salt, id_chars_max)
    kind, value = chosen or ("beginning", _beginning(request, volatile_lines))
    return _digest(secret, tenant, kind, value).hex()


def _id_at(name: str, headers: Mapping[str, str], request: Request) -> str | None:
    """Return the id at a place of `router.session_ids`, if there is one."""
    if name in BODY_IDS:
        value: str | None = getattr(request.ids, name)
        return value
    if name.startswith(METADATA):
        return _id_in_metadata(name, request.metadata.get(name.removeprefix(METADATA)))
    if name == ANY_SESSION_HEADER:
        named = sorted(header for header in headers if SESSION_HEADER.fullmatch(header))
        return next((headers[header] for header in named if headers[header]), None)
    return headers.get(name)


ANY_SESSION_HEADER = "any-session-header"
SESSION_HEADER = re.compile(
    r"(?:.*[-_])?(?:session|conversation|thread|chat|affinity)(?:[-_]?(?:id|key|affinity))?"
)
"""Names of headers that differ between conversations and stay within one, by what clients call them."""
USER_ID = "metadata.user_id"


def _id_in_metadata(name: str, text: object) -> str | None:
    """Return the `session_id` of JSON text (Claude Code's `user_id`), or the text itself.

    A `user_id` that is no JSON names a user of many conversations.
    """
    if not isinstance(text, str):
        return None
    if text.startswith("{"):
        try:
            inner = parse_json(text).get("session_id")
        except ValueError:
            inner = None
        return inner if isinstance(inner, str) else None
    return None if name == USER_ID else text


def session_tag(key: str) -> bytes:
    """Return the 16-byte tag of the whole session of `key`."""
    return session_of(bytes.fromhex(key)[:TAG_BYTES])


SESSION_PREFIX = "sess_"
"""How the name of a session begins, by which lists and streams call it."""


def session_name(session: bytes) -> str:
    """Return the name of a session, given the tag of the whole session."""
    return SESSION_PREFIX + session.hex()


def tags_of_id(secret: bytes, tenant: str, raw_id: str, places: Sequence[str] = ()) -> tuple[bytes, ...]:
    """Return the tags of all sessions that `raw_id` may name, for every header and field.

    `places`: those of `router.session_ids`. The default ones count always: a session that began before the
    setting changed must still be found. A header's bytes are read as latin-1, whatever the client's
    encoding; here the id came as UTF-8.
    """

    def tags() -> Iterator[bytes]:
        seen_in_header = raw_id.encode().decode("latin-1")
        for kind in dict.fromkeys((*SESSION_IDS, *places)):
            for value in (raw_id, seen_in_header):
                yield session_of(_digest(secret, tenant, kind, value)[:TAG_BYTES])

    return tuple(dict.fromkeys(tags()))


def _digest(secret: bytes, tenant: str, kind: str, value: str) -> bytes:
    message = b"\0".join((b"samovar session", tenant.encode(), kind.encode(), value.encode()))
    return hmac.digest(secret, message, "sha256")


def check_id(name: str, value: str, id_chars_max: int) -> None:
    """Raise `InvalidValue` for a bad id; the message names the field, never the value."""
    if len(value) > id_chars_max:
        message = f"{name} has {len(value)} characters, more than {id_chars_max}."
        raise InvalidValue(name, message)
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in value):
        raise InvalidValue(name, f"{name} holds control characters.")
    if any("\ud800" <= char <= "\udfff" for char in value):  # half a character, escaped in metadata's JSON
        raise InvalidValue(name, f"{name} holds characters that are no text.")


def _beginning(request: Request, volatile_lines: tuple[str, ...]) -> str:
    """Return everything up to the first user message, or the first characters or tokens of a prompt.

    Volatile lines in front of the system prompt are left out.
    """
    if isinstance(request, ParsedCompletion):
        prompt = request.prompts[0]
        return prompt[:BEGIN_CHARS] if isinstance(prompt, str) else repr(prompt[:BEGIN_TOKENS])
    before = list(takewhile(lambda message: message.role != "user", request.messages))
    first = [*before, *request.messages[len(before) : len(before) + 1]]
    if before and before[0].role == "system":
        first[0] = ChatMessage("system", split_front(before[0], volatile_lines).rest)
    return "\0".join(f"{message.role}\0{message.content}" for message in first)


PROFILE_HEADER = "x-cache-profile"
FINAL_HEADER = "x-dynamo-session-final"
"""`true`: this is the session's last request. NVIDIA's name of it, which agents send."""
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

ROLES_TOLD: dict[str, Role] = {"user": "user", "tool": "tool"}
"""Of a prompt's last message: what the forecast tells apart."""

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
TTL_S_MAX = 30 * DAY_S
"""The longest time to live a client may ask for; an operator's own profile may exceed it."""


def placement(
    settings: TierSettings, tenant: str, headers: Mapping[str, str], wish: CacheWish
) -> Placement | None:
    """Return the placement of one request's blocks; None without tiers.

    The profile is the request's own, else its tenant's, else the default one. OpenAI's retention and time
    to live then narrow or lengthen it. Without a time to live, marked parts (`cache_control`) lengthen it,
    for the whole turn, which has one placement. `headers`: lower-case names. Raises `InvalidValue` for a
    profile that does not exist, even if it is not used.
    """
    name = profile_name(settings, tenant, headers, wish)
    if not settings.enabled:
        return None
    profile: ProfileSettings = getattr(settings.profiles, name)
    lowest: TierName = profile.lowest
    ttl_s = profile.ttl_s
    if wish.retention == "in_memory":
        lowest, ttl_s = TOP_TIER, HOUR_S
    elif wish.retention == "24h":
        lowest, ttl_s = TIERS[-1], DAY_S
    min_ttl_s = profile.min_ttl_s
    if wish.ttl_s is not None:
        ttl_s = max(ttl_s, min(wish.ttl_s, TTL_S_MAX))
        min_ttl_s = wish.ttl_s
    elif wish.marked_ttl_s is not None:  # a mark only lengthens: many clients mark every prompt
        ttl_s = max(ttl_s, min(wish.marked_ttl_s, TTL_S_MAX))
        min_ttl_s = max(min_ttl_s, wish.marked_ttl_s)
    return _within(lowest, profile, min(max(0.0, min_ttl_s), ttl_s), ttl_s)


def profile_name(
    settings: TierSettings, tenant: str, headers: Mapping[str, str], wish: CacheWish
) -> ProfileName:
    """Return the use-case profile of one request. Arguments and errors: see `placement`."""
    named, profiles = _profile_of(headers), settings.profiles
    return wish.profile or named or profiles.of_tenant.get(tenant) or profiles.default


def _within(lowest: TierName, profile: ProfileSettings, min_ttl_s: float, ttl_s: float) -> Placement:
    """Return `profile` without tiers below `lowest` and without duplicates."""
    whole = Placement(profile.first, profile.write_behind, lowest, min_ttl_s, ttl_s)
    first = profile.first if whole.allows(profile.first) else lowest
    write_behind = tuple(
        tier for tier in dict.fromkeys(profile.write_behind) if whole.allows(tier) and tier != first
    )
    return Placement(first, write_behind, lowest, min_ttl_s, ttl_s)


def _profile_of(headers: Mapping[str, str]) -> ProfileName | None:
    name = headers.get(PROFILE_HEADER)
    if not name:
        return None
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise InvalidValue(PROFILE_HEADER, f"{PROFILE_HEADER}={shown(name)} is none of {known}.")
    return name


def turn_context(
    settings: TierSettings, tenant: str, headers: Mapping[str, str], request: ParsedChat | ParsedCompletion
) -> TurnContext:
    """Return what a request says to the resumption forecast: its last message's role, its use case, when
    its client says that it comes back, and whether it says that it does not.

    A completion's prompt has the role `user`. `headers`: lower-case names. Raises `InvalidValue` for a
    profile that does not exist.
    """
    last = request.messages[-1].role if isinstance(request, ParsedChat) else "user"
    return TurnContext(
        ROLES_TOLD.get(last, "other"),
        profile=profile_name(settings, tenant, headers, request.cache),
        returns_s=request.cache.returns_s,
        is_final=headers.get(FINAL_HEADER, "").lower() == "true",
    )
