"""What every ASGI application of ours answers with: errors as a whole response, and a request's id."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import Send

from samovar.router.openai import ApiError

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
POLICY_VIOLATION = 1008  # WebSocket close code
TRACED = ("POST", "DELETE")  # what is only asked for again and again (/health, /metrics) is not traced


async def send_error(send: Send, error: ApiError, body: bytes | None = None) -> None:
    """Send the whole response of `error`; `body`: by default in OpenAI's shape."""
    body = error.body_bytes() if body is None else body
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def request_id_of(headers: Headers) -> str:
    """Return the client's `x-request-id` if it is valid, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
