"""Server-sent events: the bytes of OpenAI's streams. Knows nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from router.errors import ApiError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in ASCII. NaN and infinities, which JSON has not, raise ValueError.

    ASCII, because many clients take U+2028, U+2029 and U+0085 for the end of a line, as `str.splitlines`
    does, and would cut an event in two.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def data(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    """One `data:` event for each chunk."""
    return b"".join(b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks)


def error(failure: ApiError) -> bytes:
    """The end of a stream that failed: an error that clients raise, then `[DONE]`.

    Never just a cut: a stream that ends without a word looks like a short answer to clients.
    """
    return b"data: " + failure.body_bytes() + b"\n\n" + DONE
