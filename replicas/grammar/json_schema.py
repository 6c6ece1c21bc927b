"""JSON Schemas as llguidance takes them, with what a schema leaves open decided as it is elsewhere.

A keyword that llguidance does not know is said in others where that means the same. Where that cannot be,
but each answer is still of use without it, it is left out, and told (`loosened`); others are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from samovar.configs.json_text import parse_json
from samovar.replicas.grammar.exact_numbers import (
    INT64_FLOAT_MAX,
    SAYS_NOTHING,
    WRITTEN_CHARS_MAX,
    SchemaRefused,
    exact_term,
    listed,
    refuse_large,
    resolved,
)

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
NAMES_MAX = 32 * 1024
"""Of properties that `propertyNames` names, in all objects of a schema: they may share a list."""
MARKS_MAX = 256
"""Of values of a discriminator that are compared: objects may share their choices, too."""


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
    try:
        text = json.dumps(schema, allow_nan=False)
    except ValueError:
        raise SchemaRefused("it holds a number that JSON does not have") from None
    return lark_of(text, always=True) or ""


def lark_of(text: str, chars_max: int = WRITTEN_CHARS_MAX, *, always: bool = False) -> str | None:
    """Return the text of a schema as a term of Lark where only that is exact, or `always`; else None.

    Raises `SchemaRefused`, and `ValueError` for what is no JSON.
    """
    schema = _followed(text, chars_max)
    if not isinstance(schema, dict):
        return None
    defaults, own = json_defaults(schema), schema.get("x-guidance")
    if defaults:
        schema["x-guidance"] = {**defaults, **(own if isinstance(own, dict) else {})}
    blank = f"(/{WHITESPACE}/)?" if not isinstance(own, dict) else ""
    term = exact_term(schema, blank, chars_max)
    return f"%json {json.dumps(schema, allow_nan=False)}" if term is None and always else term


def followed_text(text: str, chars_max: int = WRITTEN_CHARS_MAX) -> str:
    """Return the text of a schema as llguidance follows it. Raises `ValueError` for what is no JSON."""
    return json.dumps(_followed(text, chars_max), allow_nan=False)


def _followed(text: str, chars_max: int) -> Any:
    """Return a schema as llguidance follows it.

    Its objects have no other properties than those it lists, unless it says otherwise. Every answer is still
    valid under the schema as it was given. vLLM does the same (xgrammar's strict mode): a model that may
    invent properties seldom ends. A schema that is put together of parts, each of which describes some
    properties of one object, stays open. Raises `SchemaRefused`, and `ValueError` for what is no JSON.
    """
    schema = parse_json(text)
    if not isinstance(schema, dict):
        return schema
    _follow(schema)
    objects = list(_objects(schema))
    if not any(_is_composed(one) for one in objects):
        for one in objects:
            _close(one)
    refuse_large(schema, chars_max)
    return schema


def loosened(text: str) -> list[str]:
    """Return the keywords of a schema that are not followed, with their formats' names."""
    if len(text) > WRITTEN_CHARS_MAX:
        return []  # refused elsewhere, and this runs on the event loop
    try:
        schema = parse_json(text)
        return _follow(schema) if isinstance(schema, dict) else []
    except (ValueError, RecursionError):
        return []  # refused elsewhere


def _follow(schema: Schema) -> list[str]:
    """Say all that a schema says in keywords that are known; return those that were left out.

    Raises `SchemaRefused` for a number that would be rounded, and for too many names.
    """
    out: list[str] = []
    named = 0
    for one in _objects(schema):
        names = one.get("propertyNames")
        for keyword, follow in _FOLLOWED.items():
            if keyword in one and (left := follow(one, schema)):
                out.append(left)
        if names is not None and isinstance(given := one.get("properties"), dict):
            named += len(given)
        if named > NAMES_MAX:
            raise SchemaRefused(f"propertyNames lists more than {NAMES_MAX} names")
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
    said = one.pop("propertyNames")
    names, values = resolved(said, root), one.get("additionalProperties", {})
    if names in ({}, True) or not isinstance(names, dict):
        return "" if names in ({}, True) else "propertyNames"
    words = listed(names)
    known = {name for name in words if isinstance(name, str)}
    is_free = "patternProperties" not in one
    if is_free and words and all(isinstance(name, str) for name in words):
        given = one.get("properties")
        given = given if isinstance(given, dict) else {}
        one["properties"] = {
            **{name: value for name, value in given.items() if name in known},
            **{name: values for name in words if name not in given and values is not False},
        }
        one["additionalProperties"] = False
        # Beside a reference, too, a keyword may leave fewer names.
        left = (names.keys() | (said.keys() - {"$ref"})) - SAYS_NOTHING - {"enum", "const", "type"}
        return "propertyNames" if left else ""
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
        known = resolved(choice, root)
        given = known.get("properties") if isinstance(known, dict) else None
        values, needed = resolved(given.get(name), root) if isinstance(given, dict) else None, []
        if isinstance(known, dict) and isinstance(known.get("required"), list):
            needed = known["required"]
        told = listed(values)
        if not told or name not in needed:
            return "oneOf"
        seen += told
        if len(seen) > MARKS_MAX:
            return "oneOf"
    texts = [json.dumps(value, sort_keys=True) for value in seen]
    return "oneOf" if len(set(texts)) < len(texts) else ""


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
        if inside * side > INT64_FLOAT_MAX:
            raise SchemaRefused(f"no number that is followed lies within {keyword} {value}")
        is_open = side < 0 and inside >= INT64_MAX and one.get("type") == "integer"
        one[keyword] = (
            INT64_MAX if is_open else _rounded(max(-INT64_FLOAT_MAX, min(inside, INT64_FLOAT_MAX)), side)
        )
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


def _objects(schema: object) -> Iterator[Schema]:
    """Yield every schema in a schema that is an object, itself included; one in several places once."""
    found, seen = [schema], set[int]()
    while found:
        one = found.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
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
    **dict.fromkeys(_BOUNDS, _bounds),
}
"""By keyword: what says it in others, or takes it out of a schema, and returns what was left out of it."""
