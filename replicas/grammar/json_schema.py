"""JSON Schemas as llguidance takes them, with what a schema leaves open decided as it is elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from configs.json_text import parse_json

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r" |\r?\n[ \t]{0,40}"
"""What may stand between the tokens of JSON, once in a place: a model can lose itself in blanks."""

_SCHEMA_LISTS = ("anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties")
_COMPOSED = ("allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_BESIDE = ("anyOf", "oneOf", "$ref", "patternProperties")


def json_defaults(schema: str) -> JsonCompileOptions:
    """Return llguidance's options for what a schema's own `x-guidance` does not say."""
    parsed = parse_json(schema)
    own = parsed.get("x-guidance") if isinstance(parsed, dict) else None
    if isinstance(own, dict) and "whitespace_flexible" in own:  # a pattern would go before it
        return {}
    return {"whitespace_pattern": WHITESPACE}


def embedded_json(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema as a term of Lark, with the defaults that it has alone.

    Raises `ValueError` for numbers that JSON does not have.
    """
    text = json.dumps(schema, allow_nan=False)
    if defaults := json_defaults(text):
        own = schema.get("x-guidance")
        text = json.dumps({**schema, "x-guidance": {**defaults, **(own if isinstance(own, dict) else {})}})
    return f"%json {closed_text(text)}"


def closed_text(text: str) -> str:
    """Return a schema whose objects have no other properties than those it lists, unless it says otherwise.

    Every answer is still valid under the schema as it was given. vLLM does the same (xgrammar's strict mode):
    a model that may invent properties seldom ends. A schema that is put together of parts, each of which
    describes some properties of one object, stays as it is.
    """
    schema = parse_json(text)
    objects = list(_objects(schema))
    if any(_is_composed(one) for one in objects):
        return text
    opened = [one for one in objects if "properties" in one and "additionalProperties" not in one]
    for one in opened:
        one["additionalProperties"] = False
    return json.dumps(schema, allow_nan=False) if opened else text


def _objects(schema: object) -> Iterator[dict[str, Any]]:
    """Yield every schema in a schema that is an object, itself included."""
    found = [schema]
    while found:
        one = found.pop()
        if not isinstance(one, dict):
            continue
        yield one
        for key in _SCHEMA_LISTS:
            if isinstance(inner := one.get(key), list):
                found += inner
        for key in _SCHEMA_MAPS:
            if isinstance(inner := one.get(key), dict):
                found += inner.values()
        found += [one[key] for key in _SCHEMAS if key in one]


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Return whether an object that it describes may have properties that it does not list."""
    beside = "properties" in schema and any(key in schema for key in _BESIDE)
    return beside or any(key in schema for key in _COMPOSED)
