"""Tools whose input is text (`custom`, as Codex's apply_patch): functions of a string to the model. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from configs.json_text import parse_json

INPUT = "input"
"""The parameter of the function that a model is offered for such a tool."""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_BEGIN = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# A string's text up to where it ends or is cut: whole characters, whole escapes, no half of a pair.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r'|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\["\\/bfnrt])*'
)


def input_so_far(arguments: str) -> str:
    """Return the input in a call's arguments, as far as they were written."""
    begin = _BEGIN.match(arguments)
    if begin is None:
        return ""
    whole = _WHOLE.match(arguments, begin.end())
    assert whole is not None
    text: str = json.loads(f'"{whole[0]}"', strict=False)
    return text


def input_of(arguments: str) -> str:
    """Return the input in a call's arguments; of those that have none, the arguments."""
    try:
        value = parse_json(arguments)
    except (ValueError, RecursionError):
        return input_so_far(arguments) or arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
