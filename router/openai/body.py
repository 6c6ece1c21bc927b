"""Reads a request's body: its type, its size, and how much structure it may have. Parses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Receive

from samovar.configs.settings import LimitsSettings
from samovar.router.openai.errors import (
    ApiError,
    BodyTooLarge,
    ClientClosedRequest,
    InvalidJson,
    InvalidValue,
    RequestTimeout,
    UnsupportedMediaType,
    shown,
)

# Generous allowance for one message (keys, words and a dozen parts), and for the rest of the body.
STRINGS_PER_MESSAGE = 64
CONTAINERS_PER_MESSAGE = 16
STRINGS_BESIDE = 4096
CONTAINERS_BESIDE = 1024


def declared_bytes(headers: Headers) -> int | None:
    """Return the `Content-Length`, None if absent. Raises `InvalidValue` if it is not a number."""
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidValue("content-length", "The content-length header is not a whole number of bytes.")
    return int(text)


async def read_body(receive: Receive, headers: Headers, limits: LimitsSettings) -> bytes:
    """Return the whole body, which its sender must call JSON, or nothing at all.

    Raises `UnsupportedMediaType` before anything is read; `BodyTooLarge` as soon as it is known to be over
    `body_bytes_max`, without reading on; `RequestTimeout` after `body_read_s`; `ClientClosedRequest` if the
    client leaves.
    """
    declared = declared_bytes(headers)
    if declared is not None and declared > limits.body_bytes_max:
        raise BodyTooLarge(limits.body_bytes_max)
    if declared != 0 and not is_json_type(headers.get("content-type", ""), is_of_page="origin" in headers):
        raise UnsupportedMediaType(headers.get("content-type", ""))
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if declared != 0 and encoding not in ("", "identity"):
        what = f"A body in Content-Encoding {shown(encoding)} is not read. Send it as it is."
        raise ApiError(415, what, param="content-encoding", code="unsupported_encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_read_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientClosedRequest
                body += message.get("body", b"")
                if len(body) > limits.body_bytes_max:
                    raise BodyTooLarge(limits.body_bytes_max)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise RequestTimeout("Sending the request body", limits.body_read_s) from None


def is_json_type(content_type: str, *, is_of_page: bool = False) -> bool:
    """Return whether a Content-Type header names JSON; no header is taken for it.

    `is_of_page`: it must say so. A browser asks us first whether a foreign page may send JSON, but not what
    has no type.
    """
    kind = content_type.partition(";")[0].strip().lower()
    return (
        (not kind and not is_of_page) or kind in {"application/json", "text/json"} or kind.endswith("+json")
    )


def check_structure(body: bytes, limits: LimitsSettings, prompt_ids_max: int = 0) -> None:
    """Refuse a body with more strings, objects, arrays or items than any valid request can need.

    A JSON parser holds the GIL while it works, so a body made only of structure would stall all streams.
    This check counts at memchr speed before parsing. Brackets, quotes and commas inside of text do not
    count. `prompt_ids_max`: number of token ids allowed in addition to the messages. Raises `InvalidJson`.
    """
    quotes_max = 2 * (STRINGS_PER_MESSAGE * limits.messages_max + STRINGS_BESIDE)
    containers_max = CONTAINERS_PER_MESSAGE * limits.messages_max + CONTAINERS_BESIDE
    commas_max = quotes_max // 2 + prompt_ids_max

    def fits(structure: bytes, quotes: int) -> bool:
        containers = structure.count(b"{") + structure.count(b"[")
        return quotes <= quotes_max and containers <= containers_max and structure.count(b",") <= commas_max

    if fits(body, body.count(b'"')):
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = bare.count(b'"')
    # Split only once the quotes are known to be few: each piece is an object of its own.
    if quotes <= quotes_max and fits(b" ".join(bare.split(b'"')[::2]), quotes):
        return
    raise InvalidJson(
        f"it holds more strings, objects or list items than a request within limits.messages_max="
        f"{limits.messages_max} and limits.prompts_max={limits.prompts_max} can need. Send fewer."
    )


DIGITS_MAX = 10


def whole_number(params: Mapping[str, str], name: str, default: int, most: int) -> int:
    """Return a number from 1 to `most`; `default` where it is not given. Raises `InvalidValue`."""
    given = params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdigit() and len(given) <= DIGITS_MAX
    if not is_number or not 1 <= int(given) <= most:
        raise InvalidValue(name, f"{name}={shown(given)} is no number from 1 to {most}.")
    return int(given)


def cursor(params: Mapping[str, str]) -> str:
    """Return the id that a page begins behind. Raises `InvalidValue` for what no id has."""
    given = params.get("after", "")
    if not given.isprintable():
        raise InvalidValue("after", f"after={shown(given)} has characters that no id has.")
    return given


def no_such_cursor(after: str) -> InvalidValue:
    """Return the error for the id of no item: an empty page would look like the end of the list."""
    message = f"after={shown(after)} is the id of no item here: it may have been deleted. Begin without it."
    return InvalidValue("after", message)
