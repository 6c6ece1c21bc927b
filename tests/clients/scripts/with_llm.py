"""llm (by simonw), the command: its model is a server that stands in extra-openai-models.yaml."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from calls import (
    ANSWER_TOKENS,
    FIRST,
    KEY,
    MODEL,
    NO_MODEL,
    OBJECT_TOKENS,
    ORDER,
    REQUEST_S,
    SECOND,
    URL,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    Order,
    call,
    check_cached,
    expect_error,
    run,
    system,
)

TOOL = f'''
def get_weather(city: str) -> str:
    """Look up the weather of a city."""
    return "{WEATHER_ANSWER}"
'''


class CommandError(Exception):
    """`llm` ended with an error; the message is its own."""


def llm(*arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEST_S, check=False)
    if done.returncode:
        raise CommandError(done.stderr.strip())
    return done.stdout.strip()


def prompt(text: str, *arguments: str, model: str = "samovar", tokens: int = ANSWER_TOKENS) -> str:
    return llm("prompt", "-m", model, "--key", KEY, "-o", "max_tokens", str(tokens), *arguments, text)


def last_log() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(llm("logs", "--json", "-n", "1"))[0]
    return found


def set_up() -> None:
    """Write the file as its documentation says (JSON is YAML)."""
    common = {"api_base": URL, "supports_tools": True, "supports_schema": True}
    models = [
        {**common, "model_id": "samovar", "model_name": MODEL},
        {**common, "model_id": "samovar-responses", "model_name": MODEL, "responses": True},
        {**common, "model_id": "samovar-completion", "model_name": MODEL, "completion": True},
        {**common, "model_id": NO_MODEL, "model_name": NO_MODEL},
    ]
    place = Path(llm("logs", "path")).parent
    (place / "extra-openai-models.yaml").write_text(json.dumps(models))


@call("models")
def models() -> None:
    assert "samovar" in llm("models")


@call("prompt (stream)")
def streamed() -> None:
    assert prompt(FIRST, "-s", system())


@call("prompt --no-stream")
def not_streamed() -> None:
    assert prompt(FIRST, "-s", system(), "--no-stream")


def second_turn(model: str) -> dict[str, Any]:
    prompt(FIRST, "-s", system(), "--no-stream", model=model)
    prompt(SECOND, "-c", "--no-stream", model=model)
    usage = json.dumps(last_log())
    details = json.loads(usage).get("token_details") or {}
    details = json.loads(details) if isinstance(details, str) else details
    cached = next(
        (each["cached_tokens"] for each in details.values() if "cached_tokens" in (each or {})), None
    )
    return check_cached(cached or details.get("cached_tokens"))


@call("-c: second turn")
def second_turn_chat() -> dict[str, Any]:
    return second_turn("samovar")


@call("completion model")
def completion() -> None:
    assert prompt("Tea is", model="samovar-completion")


@call("--functions: auto", "tools")
def functions() -> dict[str, Any]:
    """The command cannot ask for a call: whether there is one is the model's choice."""
    prompt(WEATHER_QUESTION, "--functions", TOOL, tokens=OBJECT_TOKENS)
    return {"detail": f"{len(last_log().get('tool_calls') or [])} calls"}


@call("--schema", "schema")
def schema() -> None:
    said = prompt(ORDER, "--schema", json.dumps(Order.model_json_schema()), tokens=OBJECT_TOKENS)
    Order.model_validate_json(said)


@call("error: model")
def wrong_model() -> dict[str, Any]:
    return expect_error(CommandError, lambda: prompt(FIRST, model=NO_MODEL), says=NO_MODEL)


@call("responses: prompt", "responses")
def responses() -> None:
    assert llm("prompt", "-m", "samovar-responses", "--key", KEY, "-o", "max_tokens", "64", FIRST)


if __name__ == "__main__":
    set_up()
    run()
