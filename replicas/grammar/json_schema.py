"""JSON Schemas as llguidance takes them, with what a schema leaves open decided as it is elsewhere.

A keyword that llguidance does not know is said in others where that means the same. Where that cannot be,
but each answer is still of use without it, it is left out, and told (`loosened`); others are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from configs.json_text import parse_json

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Schema = dict[str, Any]

WHITESPACE = " "
"""What may stand between the tokens of JSON, once in a place. Not line ends: a model can lose itself in
blanks, and they take tokens of those that an answer may have."""

FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Of texts, those that are followed. JSON Schema calls a format an annotation: others are left out."""
DRAFTS = ("json-schema.org/draft", "json-schema.org/schema")
"""Of `$schema`; it may name others, which say nothing that is known here."""

_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_COMPOSED = ("allOf", "if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_BESIDE = ("anyOf", "oneOf", "$ref", "patternProperties")
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Keywords of bounds, and to which side a stricter one is."""
INT64_MAX = 2**63 - 1
BOUND_MAX = 2**63 - 1024
"""The last whole number of 64 bits that is a float, too."""
REFERENCES_MAX = 32
"""Of references that name one another."""


class SchemaRefused(ValueError):
    """What a schema says cannot be followed."""


def json_defaults(schema: object) -> JsonCompileOptions:
    """Return llguidance's options for what a schema's own `x-guidance` does not say."""
    own = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    if isinstance(own, dict) and "whitespace_flexible" in own:  # a pattern would go before it
        return {}
    return {"whitespace_pattern": WHITESPACE}


def embedded_json(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema as a term of Lark, with the defaults that it has alone.

    Raises `SchemaRefused` for numbers that JSON does not have, or that would be rounded.
    """
    if defaults := json_defaults(schema):
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {**defaults, **(own if isinstance(own, dict) else {})}}
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError:
        raise SchemaRefused("it holds a number that JSON does not have") from None
    return f"%json {followed_text(text)}"


def followed_text(text: str) -> str:
    """Return the text of a schema as llguidance follows it.

    Its objects have no other properties than those it lists, unless it says otherwise. Every answer is still
    valid under the schema as it was given. vLLM does the same (xgrammar's strict mode): a model that may
    invent properties seldom ends. A schema that is put together of parts, each of which describes some
    properties of one object, stays open. Raises `SchemaRefused`, and `ValueError` for what is no JSON.
    """
    schema = parse_json(text)
    if not isinstance(schema, dict):
        return text
    _follow(schema)
    objects = list(_objects(schema))
    if not any(_is_composed(one) for one in objects):
        for one in objects:
            _close(one)
    return json.dumps(schema, allow_nan=False)


def loosened(text: str) -> list[str]:
    """Return the keywords of a schema that are not followed, with their formats' names."""
    try:
        schema = parse_json(text)
        return _follow(schema) if isinstance(schema, dict) else []
    except (ValueError, RecursionError):
        return []  # refused elsewhere


def _follow(schema: Schema) -> list[str]:
    """Say all that a schema says in keywords that are known; return those that were left out.

    Raises `SchemaRefused` for a number that would be rounded.
    """
    out: list[str] = []
    for one in _objects(schema):
        for keyword, follow in _FOLLOWED.items():
            if keyword in one and (left := follow(one, schema)):
                out.append(left)
    return list(dict.fromkeys(out))


def _dialect(one: Schema, root: Schema) -> str:
    named = one["$schema"]
    if isinstance(named, str) and any(draft in named for draft in DRAFTS):
        return ""
    del one["$schema"]
    return "$schema"


def _format(one: Schema, root: Schema) -> str:
    named, kinds = one["format"], one.get("type", "string")
    is_of_text = "string" in (kinds if isinstance(kinds, list) else [kinds])
    if not is_of_text or not isinstance(named, str) or named in FORMATS:
        return ""
    del one["format"]
    return f"format.{named}"


def _unique(one: Schema, root: Schema) -> str:
    return "uniqueItems" if one.pop("uniqueItems") else ""


def _dependent(one: Schema, root: Schema) -> str:
    return "dependentRequired" if one.pop("dependentRequired") else ""


def _dependencies(one: Schema, root: Schema) -> str:
    """Leave out what an old draft says of properties that need others; of their schemas it is refused."""
    given = one["dependencies"]
    if not isinstance(given, dict) or not all(isinstance(needed, list) for needed in given.values()):
        return ""
    del one["dependencies"]
    return "dependencies" if given else ""


def _names(one: Schema, root: Schema) -> str:
    """Say which names an object's properties have in the keywords for some properties, if those are free."""
    names, values = _resolved(one.pop("propertyNames"), root), one.get("additionalProperties", {})
    if names in ({}, True) or not isinstance(names, dict):
        return "" if names in ({}, True) else "propertyNames"
    listed = _listed(names)
    is_free = "patternProperties" not in one
    if is_free and listed and all(isinstance(name, str) for name in listed):
        given = one.get("properties")
        given = given if isinstance(given, dict) else {}
        one["properties"] = {
            **{name: value for name, value in given.items() if name in listed},
            **{name: values for name in listed if name not in given and values is not False},
        }
        one["additionalProperties"] = False
    elif is_free and "properties" not in one and set(names) <= {"pattern", "type"} and "pattern" in names:
        one["patternProperties"], one["additionalProperties"] = {names["pattern"]: values}, False
    elif set(names) - {"type", "title", "description"}:
        return "propertyNames"
    return ""


def _one_of(one: Schema, root: Schema) -> str:
    """Take any of some schemas that a property's value tells apart: then it is only one of them."""
    mark = one["discriminator"]
    name = mark.get("propertyName") if isinstance(mark, dict) else None
    choices = one.get("oneOf")
    if not isinstance(choices, list) or not isinstance(name, str) or "anyOf" in one:
        return ""
    one["anyOf"] = one.pop("oneOf")
    seen: list[Any] = []
    for choice in choices:
        known = _resolved(choice, root)
        given = known.get("properties") if isinstance(known, dict) else None
        values, needed = _resolved(given.get(name), root) if isinstance(given, dict) else None, []
        if isinstance(known, dict) and isinstance(known.get("required"), list):
            needed = known["required"]
        listed = _listed(values)
        if not listed or name not in needed:
            return "oneOf"
        seen += listed
    texts = [json.dumps(value, sort_keys=True) for value in seen]
    return "oneOf" if len(set(texts)) < len(texts) else ""


def _listed(schema: Any) -> list[Any]:
    """Return the values that a schema lists; empty: it lists none."""
    if not isinstance(schema, dict):
        return []
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else []


def _literals(one: Schema, root: Schema) -> str:
    """Refuse values that llguidance would round: it reads numbers as floats of 64 bits."""
    found = [one["const"]] if "const" in one else []
    found += one["enum"] if isinstance(one.get("enum"), list) else []
    while found:
        value = found.pop()
        if isinstance(value, dict | list):
            found += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not isinstance(value, bool) and not _is_exact(value):
            message = f"the number {value} has more digits than are followed exactly; give it as a text"
            raise SchemaRefused(message)
    return ""


def _is_exact(value: int) -> bool:
    """Return whether llguidance 1.9.1 writes a whole number as it was given; -2**63 ends the process."""
    return abs(value) <= BOUND_MAX and int(float(value)) == value


def _bounds(one: Schema, root: Schema) -> str:
    """Move bounds that would be rounded to the next number that is not, to where all answers are valid.

    As llguidance 1.9.1 has them: floats of 64 bits, and beyond those of whole numbers an error, or the end of
    the process.
    """
    for keyword, side in _BOUNDS.items():
        value = one.get(keyword)
        if not _is_number(value) or not 2**53 < abs(value) < math.inf:
            continue
        inside = int(value)
        if keyword.startswith("exclusive"):
            del one[keyword]
            keyword, inside = keyword.removeprefix("exclusive").lower(), inside + side
            other = one.get(keyword)
            if _is_number(other) and other * side >= inside * side:
                continue
        if inside * side > BOUND_MAX:
            raise SchemaRefused(f"no number that is followed lies within {keyword} {value}")
        is_open = side < 0 and inside >= INT64_MAX and one.get("type") == "integer"
        one[keyword] = INT64_MAX if is_open else _rounded(max(-BOUND_MAX, min(inside, BOUND_MAX)), side)
    return ""


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: int, side: int) -> int:
    """Return the next whole number that a float of 64 bits holds, at or beyond `value` on a side."""
    near = float(value)
    while (int(near) - value) * side < 0:
        near = math.nextafter(near, math.inf * side)
    return int(near)


def _close(one: Schema) -> None:
    """Say that an object has the properties that it lists, where it leaves that open."""
    given, needed = one.get("properties"), one.get("required")
    if not isinstance(given, dict) or "additionalProperties" in one:
        return
    names = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
    one["properties"] = {**given, **{name: {} for name in names if name not in given}}
    one["additionalProperties"] = False


def _resolved(schema: Any, root: Schema) -> Any:
    """Return what a reference within the schema names, or the schema itself if it is none."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            return schema
        found: Any = root
        for part in schema["$ref"][2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return None


def _objects(schema: object) -> Iterator[Schema]:
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


_FOLLOWED = {
    "$schema": _dialect,
    "format": _format,
    "uniqueItems": _unique,
    "dependentRequired": _dependent,
    "dependencies": _dependencies,
    "propertyNames": _names,
    "discriminator": _one_of,
    "const": _literals,
    "enum": _literals,
    **dict.fromkeys(_BOUNDS, _bounds),
}
"""By keyword: what says it in others, or takes it out of a schema, and returns what was left out of it."""
