"""What every script of this folder does: named calls against one service, a JSON line for what came of each.

Runs in the client's own virtual environment, so it needs nothing but Python and pydantic, which all of them
bring. `tests/clients/outcome.py` reads the lines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field

ROOT_URL = os.environ["CLIENT_URL"]
URL = f"{ROOT_URL}/v1"
MODEL = os.environ["CLIENT_MODEL"]
KEY = os.environ["CLIENT_KEY"]
CALL_S = int(os.environ["CLIENT_CALL_S"])
"""Limit of one call in seconds; below it is the limit of one request, with no second try."""
REQUEST_S = max(1, CALL_S // 2)
ANSWER_TOKENS = 24
OBJECT_TOKENS = 256
"""Enough for the longest `Order` with generous white space."""
NO_MODEL = "no-such-model"
FIRST, SECOND = "Which tea goes with lemon cake?", "And which one with bread and cheese?"


def system() -> str:
    """A system message of a few blocks that no conversation before has had."""
    return (
        f"Conversation {uuid.uuid4()}. You serve tea in a small house at the end of the street. You answer "
        "in one short sentence, never invent a tea that is not on the card, and say so if you do not know."
    )


class Order(BaseModel):
    """An order of tea."""

    tea: Literal["black", "green", "white"]
    cups: int = Field(ge=1, le=9)
    has_milk: bool


ORDER = "I would like two cups of green tea without milk, please. Give the order as a JSON object."
WEATHER = {
    "name": "get_weather",
    "description": "Look up the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 3},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
WEATHER_QUESTION = "What will the weather in Rome be tomorrow?"
WEATHER_ANSWER = "sunny, 24 degrees"


def check_weather(arguments: str | dict[str, Any]) -> None:
    """The arguments of a call of `get_weather` are what its schema says."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(found) == {"city", "days"}, f"arguments: {found}"
    assert found["city"] in ("Paris", "Rome"), f"city: {found['city']!r}"
    assert found["days"] in (1, 2, 3), f"days: {found['days']!r}"


def check_cached(tokens: int | None) -> dict[str, Any]:
    """The client shows that tokens came from the cache."""
    assert tokens, f"cached tokens of the second turn: {tokens}"
    return {"cached_tokens": tokens}


class CallTimeout(Exception):
    """A call took longer than `CALL_S`."""


class Calls:
    """The calls of one script, in the order in which they stand there."""

    def __init__(self) -> None:
        self._planned: list[tuple[str, tuple[str, ...], Callable[[], Any]]] = []

    def __call__(self, name: str, *needs: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Plan a call. `needs`: what a server has to have for it (`Need` in tests/clients/outcome.py)."""

        def plan(call: Callable[[], Any]) -> Callable[[], Any]:
            self._planned.append((name, needs, call))
            return call

        return plan

    def run(self) -> None:
        """Make all calls, whatever comes of them."""
        _print(plan=[{"call": name, "needs": list(needs)} for name, needs, _ in self._planned])
        signal.signal(signal.SIGALRM, _too_long)
        for name, _, call in self._planned:
            began_s = time.monotonic()
            signal.alarm(CALL_S)
            try:
                seen = call() or {}
                result = {"ok": True, "detail": "", **seen}
            except Exception as error:  # noqa: BLE001 - all that a foreign client raises is a result
                result = {"ok": False, "error": type(error).__name__, "detail": sentence(error)}
            finally:
                signal.alarm(0)
            _print(call=name, seconds=round(time.monotonic() - began_s, 3), **result)


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def _too_long(*_: object) -> None:
    raise CallTimeout(f"not within {CALL_S} s")


def sentence(error: BaseException) -> str:
    """The server's own sentence if one of the errors behind `error` has it, else what the client says."""
    seen: list[BaseException] = []
    behind: BaseException | None = error
    while behind is not None and behind not in seen:
        for where in ("body", "message", "response"):
            text = getattr(behind, where, None)
            text = getattr(text, "text", text) if where == "response" else text
            if found := _message_in(text):
                return found
        seen.append(behind)
        behind = behind.__cause__ or behind.__context__
    return _message_in(str(error)) or str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""


def _message_in(body: object) -> str | None:
    if isinstance(body, dict):
        message = body.get("error", body)
        message = message.get("message") if isinstance(message, dict) else None
        return (_message_in(message) or message) if isinstance(message, str) else None
    found = re.search(r"""["']message["']: ?(["'])(.+?)\1[,}]""", body) if isinstance(body, str) else None
    return found[2].replace("\\'", "'") if found else None


def expect_error(kind: type[BaseException], call: Callable[[], Any], *, says: str = "") -> dict[str, Any]:
    """`call` raises the client's own exception `kind`, with the server's sentence in it."""
    try:
        call()
    except kind as error:
        told = f"{type(error).__name__}: {sentence(error)}"
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert says in told, f"not about {says}: {told}"
    return {"detail": told}


call = Calls()
run = call.run
