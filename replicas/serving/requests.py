"""A request to a replica as bytes of a link, and back: plain data, validated where it arrives. Pure."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from samovar.replicas.links import LinkLost, pack_event, said_events
from samovar.replicas.messages import GenerateRequest

TOKEN_CODE = "I"
"""Token ids go as four bytes each, the lowest first: a list of them takes 20 times as long to validate."""
OTHER_ORDER = sys.byteorder != "little"


class BadRequestBytes(ValueError):
    """What came is no request."""


@lru_cache(1)
def request_form() -> TypeAdapter[GenerateRequest]:
    """Return the form of requests. Making it takes some ms: call this before the first one comes."""
    return TypeAdapter(GenerateRequest)


def pack_request(request: GenerateRequest) -> bytes:
    """Return a request as bytes. Raises `ValueError` at what cannot be said so: then Serve carries it."""
    keep = request.keep
    bare = replace(request, prompt_token_ids=[], keep=None if keep is None else replace(keep, before=()))
    try:
        ids = array(TOKEN_CODE, request.prompt_token_ids)
        if OTHER_ORDER:
            ids.byteswap()
        fields = request_form().dump_python(bare, exclude_defaults=True, warnings="error")
        said = [] if keep is None else [pack_event(event) for event in keep.before]
        data: bytes = msgpack.packb([fields, ids.tobytes(), said], unicode_errors="surrogatepass")
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a request that is no plain data: {error}") from error
    return data


def unpack_request(data: Any) -> GenerateRequest:
    """Return the request of these bytes. Raises `BadRequestBytes`."""
    if not isinstance(data, bytes):
        raise BadRequestBytes("not bytes")
    try:
        fields, ids, said = msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=True)
        tokens = array(TOKEN_CODE, ids)
        if OTHER_ORDER:
            tokens.byteswap()
        request = request_form().validate_python(fields)
        before = tuple(said_events(said))
    except (ValueError, TypeError, msgpack.UnpackException, LinkLost, RecursionError) as error:
        # Not its text: it may quote the prompt.
        raise BadRequestBytes(_where(error)) from None
    request = replace(request, prompt_token_ids=tokens.tolist())
    if before:
        if request.keep is None:
            raise BadRequestBytes("events of an answer that is not kept")
        request = replace(request, keep=replace(request.keep, before=before))
    return request


def _where(error: Exception) -> str:
    if isinstance(error, ValidationError):
        places = [".".join(map(str, one["loc"])) for one in error.errors(include_input=False)]
        return f"not valid: {', '.join(places[:8])}"
    return type(error).__name__
