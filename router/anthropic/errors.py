"""Errors in Anthropic's shape."""

from __future__ import annotations

import json

from samovar.router.openai import ApiError, ContextLengthExceeded, Json

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def messages_error(error: ApiError, request_id: str) -> bytes:
    """Return the body of an error; `param` and `code` are Samovar's addition."""
    body = error_json(error)
    body["request_id"] = request_id
    return json.dumps(body, separators=(",", ":")).encode()


def error_json(error: ApiError) -> Json:
    """Return an error as an object, which is also a stream's event of type `error`."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthExceeded):  # clients know these words, and shorten their conversation
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens_max} maximum"
    told = {"type": kind, "message": message, "param": error.param, "code": error.code}
    return {"type": "error", "error": told}
