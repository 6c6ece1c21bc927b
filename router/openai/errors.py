"""The error tree of the ingress, in OpenAI's shape.

Every refusal is an `ApiError`: an HTTP status and OpenAI's body `{"error": {message, type, param, code}}`.
Messages name the field, the value and the fix, and never carry keys, prompts or tracebacks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from samovar.configs.json_text import parse_json
from samovar.router.openai.fields import INSTEAD, UNBUILT_ERROR

ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]

VALUE_CHARS_SHOWN = 64  # of a client's value inside a message


class ApiError(Exception):
    """An error response.

    `status` is the HTTP status, `param` the field at fault as a path (`messages[0].content`), `code` a word
    that programs can test for, `headers` are sent with the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body_bytes(self) -> bytes:
        """Return the JSON body in UTF-8. A lone surrogate quoted in a message is escaped."""
        return json.dumps(self.body(), separators=(",", ":")).encode()


def shown(value: object) -> str:
    """Return `value` as a short, single-line, printable text for a message."""
    is_huge = isinstance(value, int) and abs(value) >= 10**VALUE_CHARS_SHOWN  # Python refuses its repr
    text = "a huge number" if is_huge else repr(value)
    text = text if len(text) <= VALUE_CHARS_SHOWN else text[: VALUE_CHARS_SHOWN - 3] + "..."
    return text.encode("ascii", "backslashreplace").decode()


class InvalidValue(ApiError):
    """400: a field has a value that is not allowed."""

    def __init__(self, param: str | None, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(400, message, param=param, code=code)


class MissingField(InvalidValue):
    """400: a required field is missing."""

    def __init__(self, param: str) -> None:
        super().__init__(param, f"{param} is required.", code="missing_required_parameter")


class InvalidJson(ApiError):
    """400: the body is not the expected JSON object."""

    def __init__(self, reason: str) -> None:
        super().__init__(400, f"The body is not a valid JSON object: {reason}", code="invalid_json")


class BadHttp(ApiError):
    """400: the input is not valid HTTP."""

    def __init__(self, reason: str) -> None:
        super().__init__(400, reason, code="bad_http_request")


class UnsupportedParameter(ApiError):
    """400: a field that Samovar does not implement; refused instead of ignored."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(400, message, param=param, code="unsupported_parameter")


class ContextLengthExceeded(ApiError):
    """400: prompt and answer do not fit in the model's context."""

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        context_tokens_max: int,
        param: str,
        *,
        at_least: bool = False,
    ) -> None:
        asked = f"{'at least ' if at_least else ''}{prompt_tokens} tokens in the prompt"
        fix = "Lower max_tokens" if param == "max_tokens" else f"Shorten the {param}"
        if max_tokens is not None:
            asked += f" and {max_tokens} for the completion, {prompt_tokens + max_tokens} together"
            fix += " or shorten the prompt" if param == "max_tokens" else " or lower max_tokens"
        message = (
            f"This model's maximum context length is {context_tokens_max} tokens, "
            f"and you asked for {asked}. {fix}."
        )
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens
        self.context_tokens_max = context_tokens_max


_LIMITS = {
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be more than {}"),
    "too_short": ("min_length", "must have at least {} items"),
    "too_long": ("max_length", "may have at most {} items"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "may have at most {} characters"),
    "multiple_of": ("multiple_of", "must be a multiple of {}"),
}
"""Types of pydantic's errors: the limit's name in their context, and what it means in plain words."""
_KINDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def broken_rule(error: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors asks for, in plain words: `must be at most 2`."""
    kind, context = str(error["type"]), error.get("ctx") or {}
    if kind in _LIMITS and _LIMITS[kind][0] in context:
        name, words = _LIMITS[kind]
        limit = context[name]
        said = words.format(f"{limit:g}" if isinstance(limit, float) else limit)
        return said.removesuffix("s") if said.endswith((" 1 items", " 1 characters")) else said
    if kind == "literal_error" and "expected" in context:
        return f"must be {context['expected']}"
    return _KINDS.get(kind, str(error["msg"]))


class AuthenticationFailed(ApiError):
    """401: the API key is missing or unknown. Reveals nothing about which keys exist."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            401,
            reason,
            type="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )


class Forbidden(ApiError):
    """403: the caller is known and lacks the permission."""

    def __init__(self, message: str) -> None:
        super().__init__(403, message, type="authentication_error", code="forbidden")


class ModelNotFound(ApiError):
    """404: the requested model is not the served one."""

    def __init__(self, asked: str, served: str) -> None:
        message = f"The model {shown(asked)} does not exist here. This endpoint serves {served!r}."
        super().__init__(404, message, param="model", code="model_not_found")


class RouteNotFound(ApiError):
    """404: no such path."""

    def __init__(self, method: str, path: str) -> None:
        message = f"Unknown route {shown(method)} {shown(path)}. The API lives under /v1 (see /v1/models)."
        super().__init__(404, message, code="unknown_route")


class SessionNotFound(ApiError):
    """404: the caller has no session of that name. Reveals nothing about other tenants' names."""

    def __init__(self, param: str = "session_id") -> None:
        message = "No such session is known. It may have expired, or it belongs to another tenant."
        super().__init__(404, message, param=param, code="session_not_found")


class MethodNotAllowed(ApiError):
    """405: the path exists, the method does not."""

    def __init__(self, method: str, allow: str) -> None:
        message = f"Method {shown(method)} is not allowed here; use {allow}."
        super().__init__(405, message, code="method_not_allowed", headers={"allow": allow})


class RequestTimeout(ApiError):
    """408: the client, or the whole request, took too long. Clients should not retry at once."""

    def __init__(self, what: str, limit_s: float) -> None:
        message = f"{what} took longer than {limit_s:g} s."
        super().__init__(408, message, code="request_timeout", headers={"x-should-retry": "false"})


class BodyTooLarge(ApiError):
    """413: the body is over the limit; the rest of it is not read."""

    def __init__(self, limit_bytes: int) -> None:
        message = f"The request body is larger than {limit_bytes} bytes (limits.body_bytes_max)."
        super().__init__(413, message, code="body_too_large", headers={"connection": "close"})


class UnsupportedMediaType(ApiError):
    """415: the body is not called JSON; it is not read."""

    def __init__(self, content_type: str) -> None:
        message = (
            f"The Content-Type {shown(content_type)} is not supported. Send JSON with the header "
            "`Content-Type: application/json` (curl: -H 'Content-Type: application/json')."
        )
        super().__init__(415, message, param="content-type", code="unsupported_media_type")


class HeadersTooLarge(ApiError):
    """431: request line and headers are over the limit."""

    def __init__(self, limit_bytes: int) -> None:
        message = f"Request line and headers are larger than {limit_bytes} bytes (limits.header_bytes_max)."
        super().__init__(431, message, code="headers_too_large", headers={"connection": "close"})


class TooManyRequests(ApiError):
    """429: a queue or a quota is full. Nothing was started; the client may retry later."""

    def __init__(self, message: str, retry_after_s: float, *, code: str = "rate_limit_exceeded") -> None:
        super().__init__(
            429, message, type="rate_limit_error", code=code, headers=retry_after_header(retry_after_s)
        )


class Unavailable(ApiError):
    """503: loading, draining, or a replica was lost before the answer began."""

    def __init__(self, message: str, retry_after_s: float, *, code: str = "unavailable") -> None:
        super().__init__(
            503, message, type="server_error", code=code, headers=retry_after_header(retry_after_s)
        )


class Loading(Unavailable):
    """503: nothing that could answer is up yet. The body also has the status field of /health."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("The server is loading. Try again later.", retry_after_s, code="loading")

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        return {"status": "loading", **super().body()}


class Stopping(Unavailable):
    """503: the service ends, or has just ended. The body also has the status field of /health."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("The server is stopping. Try again later.", retry_after_s, code="stopping")

    def body(self) -> dict[str, object]:
        """Return the JSON body."""
        return {"status": "stopping", **super().body()}


class ClientClosedRequest(ApiError):
    """499: the client is gone. For logs and metrics."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.", code="client_closed_request")


class InternalError(ApiError):
    """500: an internal error. The id leads to the log line; nothing else is sent."""

    def __init__(self, request_id: str) -> None:
        message = f"Internal error. Report it with the request id {request_id}."
        super().__init__(500, message, type="server_error", code="internal_error")


def retry_after_header(retry_after_s: float) -> dict[str, str]:
    """Return `Retry-After` in whole seconds, rounded up, never negative."""
    return {"retry-after": str(max(0, math.ceil(retry_after_s)))}


Body = TypeVar("Body", bound=BaseModel)

FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Names that pydantic puts into an error's location for a branch of a union, besides those with brackets.
UNION_TAGS = frozenset(
    {"str", "int", "float", "none", "constrained-str", "constrained-int", "constrained-float", "NamedTool"}
)
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids or a list of those",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts {'type': 'text', 'text': ...}",
    "logit_bias": "an object of token ids, each with a number from -100 to 100",
    "ttl": "a text such as '30m' or a number of seconds",
}


def validated(model: type[Body], body: bytes) -> Body:
    """Return a body of JSON as `model` has it. Raises `ApiError` naming the field at fault."""
    try:
        return model.model_validate_json(body)
    except ValidationError as refused:
        error = error_of(refused)
        place = _half_character(body) if isinstance(error, InvalidJson) else ""
        if place:
            message = (
                f"{place} holds half a character (a lone surrogate, \\ud800 to \\udfff), which is no text."
            )
            raise InvalidValue(place, message) from None
        raise error from None


def _half_character(body: bytes) -> str:
    """Return where in a body a text, or a key, holds half a character; empty if none does."""
    try:
        whole = parse_json(body.decode())
    except ValueError:
        return ""
    # A place is told only of what is found: each item's own, below a long key, would be all memory.
    left: list[tuple[_Place | None, Any]] = [(None, whole)]
    while left:
        place, value = left.pop()
        if isinstance(value, str) and HALF_CHARACTER.search(value):
            return _told(place)
        if isinstance(value, Mapping):
            if any(HALF_CHARACTER.search(key) for key in value):
                return _told(place) or "the body"
            left += [(_Place(place, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(_Place(place, number), inner) for number, inner in enumerate(value)]
    return ""


class _Place(NamedTuple):
    """Where in a body something is: `part` of what is at `of`."""

    of: _Place | None
    part: str | int


def _told(place: _Place | None) -> str:
    parts: list[str | int] = []
    while place is not None:
        parts.append(place.part)
        place = place.of
    return param_of(reversed(parts))


def param_of(parts: Iterable[str | int]) -> str:
    """Return the name of a field by its keys and numbers; long keys of a client are cut."""
    named = (f"[{part}]" if isinstance(part, int) else f".{part[:VALUE_CHARS_SHOWN]}" for part in parts)
    return "".join(named).lstrip(".")


def error_of(refused: ValidationError) -> ApiError:
    """Return the most informative of pydantic's errors: a limit, else the deepest, else the first."""
    found = refused.errors(include_url=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return InvalidJson(f"{found[0]['ctx']['error']}.")
    best = max(found, key=lambda error: (error["type"].endswith("too_long"), len(_path(error["loc"]))))
    path = _path(best["loc"])
    if not path and best["type"] == "value_error":  # of fields that do not go together
        return InvalidValue(None, f"{best['ctx']['error']}.")
    if not path:
        return InvalidJson("an object is expected.")
    param = param_of(path)
    name = next(part for part in reversed(path) if isinstance(part, str))
    if best["type"] == UNBUILT_ERROR:
        instead = INSTEAD.get(name, "Leave it out.")
        return UnsupportedParameter(param, f"{param} is not supported by this server. {instead}")
    if best["type"] == "missing":
        return MissingField(param)
    if name in EXPECTED and path[-1] == name and best["type"] not in {"too_long", "string_too_long"}:
        return InvalidValue(param, f"{param} must be {EXPECTED[name]}.", code="invalid_type")
    rule = broken_rule(best)
    said = f"{param} {rule}" if rule.startswith(("must ", "may ")) else f"{param}: {rule}"
    return InvalidValue(param, f"{said}.")


def _path(place: Sequence[int | str]) -> list[int | str]:
    return [
        part
        for part in place
        if isinstance(part, int) or (FIELD_NAME.fullmatch(part) and part not in UNION_TAGS)
    ]
