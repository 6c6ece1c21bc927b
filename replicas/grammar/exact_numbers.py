"""Schemas with whole numbers that llguidance would round, as terms of Lark in which they are literals.

It reads numbers as floats of 64 bits: of an id with 19 digits it writes another one. Only the way from the
whole schema to such a number is written out here, the rest of it stays JSON Schema. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

INT64_FLOAT_MAX = 2**63 - 1024
"""The last whole number of 64 bits that is a float, too."""
DEPTH_MAX = 32
"""Of schemas in one another on the way to a number."""
OPTIONAL_MAX = 16
"""Of properties of an object of which none is required."""
SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "discriminator", "x-guidance"}
SAYS_NOTHING |= {"$comment", "$schema", "$id", "$defs", "definitions"}
TYPES: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
    "number": (int, float),
    "integer": int,
}


class SchemaRefused(ValueError):
    """What a schema says cannot be followed."""


def exact_term(schema: Schema, blank: str) -> str | None:
    """Return a schema as a term of Lark; None: it has no number that would be rounded.

    `blank`: the term of what may stand between the tokens of JSON. Raises `SchemaRefused` naming the number
    where the way to it is not known.
    """
    return None if rounded_in(schema, schema) is None else _term(schema, schema, blank, DEPTH_MAX)


def rounded_in(schema: Any, root: Schema) -> int | None:
    """Return a number that a schema demands and that would be rounded; None: there is none."""
    found, seen = [schema], set[int]()
    while found:
        one = found.pop()
        if isinstance(one, list):
            found += one
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        for value in _numbers([*listed(one), *([one["const"]] if "const" in one else [])]):
            if not is_exact(value):
                return value
        names = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"} & one.keys()
        found += [inner for name in names if isinstance(one[name], dict) for inner in one[name].values()]
        beside = one.keys() - names - {"const", "enum", "default", "examples"}
        found += [one[name] for name in beside if isinstance(one[name], dict | list)]
        if "$ref" in one:
            found.append(resolved(one, root))
    return None


def is_exact(value: int) -> bool:
    """Return whether llguidance 1.9.1 writes a whole number as it was given; -2**63 ends the process."""
    return abs(value) <= INT64_FLOAT_MAX and int(float(value)) == value


def listed(schema: Any) -> list[Any]:
    """Return the values that a schema lists; empty: it lists none."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def resolved(schema: Any, root: Schema) -> Any:
    """Return what a reference within the schema names, or the schema itself if it is none."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
            return schema
        found: Any = root
        for part in schema["$ref"][2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return None


def _numbers(values: list[Any]) -> Iterator[int]:
    found = list(values)
    while found:
        value = found.pop()
        if isinstance(value, dict | list):
            found += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value


def _term(schema: Any, root: Schema, blank: str, depth: int) -> str:
    number = rounded_in(schema, root) if depth else None
    if number is None and depth:
        whole = dict(schema) if isinstance(schema, dict) else {"allOf": [schema]}
        for name in ("$defs", "definitions", "x-guidance"):
            if name in root:
                whole.setdefault(name, root[name])
        return f"%json {json.dumps(whole, allow_nan=False)}"
    says = schema.keys() - SAYS_NOTHING

    def inner(one: Any) -> str:
        return _term(one, root, blank, depth - 1)

    if not depth:
        raise SchemaRefused("a number of many digits is too deep in it")
    if says <= {"const", "type"} or says <= {"enum", "type"}:
        kinds = schema.get("type", list(TYPES))
        fits = [
            value for value in listed(schema) if _is_of(value, kinds if isinstance(kinds, list) else [kinds])
        ]
        if fits:
            return f"({' | '.join(_literal(json.dumps(value, allow_nan=False)) for value in fits)})"
    elif says == {"$ref"} and isinstance(target := resolved(schema, root), dict):
        return inner(target)
    elif says in ({"anyOf"}, {"oneOf"}) and isinstance(parts := schema[next(iter(says))], list) and parts:
        return f"({' | '.join(map(inner, parts))})"
    elif says <= {"type", "properties", "required", "additionalProperties"} and _is_closed(schema):
        if made := _object(schema, inner, blank):
            return made
    elif says == {"type", "items"} and schema["type"] == "array":
        item = inner(schema["items"])
        return f'("[" {blank} ({item} ({blank} "," {blank} {item})*)? {blank} "]")'
    message = f"the number {number} has more digits than are followed exactly here; give it as a text"
    raise SchemaRefused(message)


def _is_closed(schema: Schema) -> bool:
    """Return whether a schema is of an object that has the properties it lists, and no others."""
    given, needed = schema.get("properties"), schema.get("required", [])
    is_known = isinstance(given, dict) and isinstance(needed, list) and set(needed) <= given.keys()
    return (
        is_known and schema.get("additionalProperties") is False and schema.get("type", "object") == "object"
    )


def _object(schema: Schema, inner: Callable[[Any], str], blank: str) -> str:
    """Return an object with its properties in their order; empty: it has too many, and none is required."""
    needed, given = schema.get("required", []), schema["properties"]
    if not needed and len(given) > OPTIONAL_MAX:
        return ""
    pairs = {
        name: f'{_literal(json.dumps(name))} {blank} ":" {blank} {inner(one)}' for name, one in given.items()
    }
    if needed:
        ways = [_members(pairs, needed, blank)]
    else:  # any of them may be the first
        names = list(pairs)
        rests = [{one: pairs[one] for one in names[at:]} for at in range(len(names))]
        ways = [*(_members(rest, [next(iter(rest))], blank) for rest in rests), '""']
    return f'("{{" {blank} ({" | ".join(ways)}) {blank} "}}")'


def _members(pairs: dict[str, str], needed: list[str], blank: str) -> str:
    """Return properties in their order, of which some are needed, with a comma between each two."""
    comma, terms, is_behind = f'{blank} "," {blank}', list[str](), False
    first = next(name for name in pairs if name in needed)
    for name, pair in pairs.items():
        if name == first:
            terms.append(pair)
            is_behind = True
        elif is_behind:
            terms.append(f"{comma} {pair}" if name in needed else f"({comma} {pair})?")
        else:
            terms.append(f"({pair} {comma})?")
    return " ".join(terms)


def _is_of(value: Any, kinds: list[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, TYPES[kind]) for kind in kinds if kind in TYPES and kind != "boolean")


def _literal(text: str) -> str:
    return json.dumps(text)
