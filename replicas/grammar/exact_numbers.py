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
WRITTEN_CHARS_MAX = 512 * 1024
"""Of a schema as it is written for llguidance: twice what `grammar.spec_bytes_max` may be."""
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


def exact_term(schema: Schema, blank: str, chars_max: int = WRITTEN_CHARS_MAX) -> str | None:
    """Return a schema as a term of Lark; None: it has no number that would be rounded.

    `blank`: the term of what may stand between the tokens of JSON. Raises `SchemaRefused` naming the number
    where the way to it is not known, or if the term would have more than `chars_max` characters.
    """
    rounded = _rounded(schema)
    return _Writer(schema, blank, rounded, chars_max).term(schema, DEPTH_MAX) if rounded else None


def refuse_large(schema: Any, chars_max: int = WRITTEN_CHARS_MAX) -> None:
    """Raise `SchemaRefused` if a schema has about more than `chars_max` characters, before it is written.

    A few hundred bytes can be gigabytes: what is said once and holds in many places is written in each.
    """
    found, left = [schema], chars_max
    while found:
        one = found.pop()
        if isinstance(one, dict):
            left -= sum(len(key) + 4 for key in one)
            found += one.values() if left >= 0 else ()
        elif isinstance(one, list):
            left -= 2 * len(one)
            found += one if left >= 0 else ()
        left -= len(one) if isinstance(one, str) else 1
        if left < 0:
            raise _too_large(chars_max)


def _too_large(chars_max: int) -> SchemaRefused:
    return SchemaRefused(
        f"with all that its references and lists stand for it has more than {chars_max} characters"
    )


def _rounded(root: Schema) -> dict[int, int]:
    """Return by their ids the schemas in which a number would be rounded, each with such a number."""
    found: list[Any] = [root]
    above, rounded = {id(root): list[int]()}, dict[int, int]()
    while found:
        one = found.pop()
        for inner in _within(one, root):
            if isinstance(inner, dict | list):
                if id(inner) not in above:
                    above[id(inner)] = []
                    found.append(inner)
                above[id(inner)].append(id(one))
        given = [*listed(one), *([one["const"]] if isinstance(one, dict) and "const" in one else [])]
        number = next((value for value in _numbers(given) if not is_exact(value)), None)
        if number is not None:
            rounded[id(one)] = number
    due = list(rounded)
    while due:
        one_id = due.pop()
        for over in above[one_id]:
            if over not in rounded:
                rounded[over] = rounded[one_id]
                due.append(over)
    return rounded


def _within(one: Any, root: Schema) -> Iterator[Any]:
    """Yield what a schema, or a list of schemas, consists of, and what it refers to."""
    if isinstance(one, list):
        yield from one
        return
    names = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"} & one.keys()
    for name in names:
        if isinstance(one[name], dict):
            yield from one[name].values()
    yield from (one[name] for name in one.keys() - names - {"const", "enum", "default", "examples"})
    if "$ref" in one:
        yield resolved(one, root)


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


class _Writer:
    """Writes one schema as a term. What it holds more than once is written once, and counted each time."""

    def __init__(self, root: Schema, blank: str, rounded: dict[int, int], chars_max: int) -> None:
        self._root = root
        self._blank = blank
        self._rounded = rounded
        self._chars_max = chars_max
        self._part_chars = 0
        self._terms: dict[tuple[int, int], str] = {}

    def term(self, schema: Any, depth: int) -> str:
        """Return the term of a schema within the root, which may have others in it up to `depth`."""
        key = (id(schema), depth)
        if key not in self._terms:
            self._terms[key] = self._term(schema, depth)
        return self._terms[key]

    def _term(self, schema: Any, depth: int) -> str:
        number, blank = self._rounded.get(id(schema)), self._blank
        if not depth:
            raise SchemaRefused("a number of many digits is too deep in it")
        if number is None:
            return self._part(schema)
        says = schema.keys() - SAYS_NOTHING if isinstance(schema, dict) else set()

        def inner(one: Any) -> str:
            return self.term(one, depth - 1)

        if says and (says <= {"const", "type"} or says <= {"enum", "type"}):
            kinds = schema.get("type", list(TYPES))
            kinds = kinds if isinstance(kinds, list) else [kinds]
            fits = [value for value in listed(schema) if _is_of(value, kinds)]
            if fits:
                return self._any([_literal(json.dumps(value, allow_nan=False)) for value in fits])
        elif says == {"$ref"} and isinstance(target := resolved(schema, self._root), dict):
            return inner(target)
        elif says in ({"anyOf"}, {"oneOf"}) and isinstance(parts := schema[next(iter(says))], list) and parts:
            if "anyOf" in says or _are_apart(parts, self._root):
                return self._any([inner(part) for part in parts])
        elif (
            says and says <= {"type", "properties", "required", "additionalProperties"} and _is_closed(schema)
        ):
            if made := self._object(schema, inner):
                return made
        elif says == {"type", "items"} and schema["type"] == "array":
            item = inner(schema["items"])
            self._count(2 * len(item))
            return f'("[" {blank} ({item} ({blank} "," {blank} {item})*)? {blank} "]")'
        message = f"the number {number} has more digits than are followed exactly here; give it as a text"
        raise SchemaRefused(message)

    def _part(self, schema: Any) -> str:
        """Return a schema that llguidance follows as it is, with the definitions that it needs."""
        whole = dict(schema) if isinstance(schema, dict) else {"allOf": [schema]}
        for name in ("$defs", "definitions", "x-guidance"):
            if name in self._root:
                whole.setdefault(name, self._root[name])
        _drop_unused(whole)
        refuse_large(whole, self._chars_max)
        part = f"%json {json.dumps(whole, allow_nan=False)}"
        self._part_chars += len(part)
        self._count(self._part_chars)  # each of them is part of the whole term
        return part

    def _count(self, chars: int) -> None:
        """Raise `SchemaRefused` before text of that length is put together, if that is too much."""
        if chars > self._chars_max:
            raise _too_large(self._chars_max)

    def _any(self, terms: list[str]) -> str:
        self._count(sum(len(term) + 3 for term in terms))
        return f"({' | '.join(terms)})"

    def _object(self, schema: Schema, inner: Callable[[Any], str]) -> str:
        """Return an object with its properties in order; empty: it has too many, and none is required."""
        needed, given, blank = schema.get("required", []), schema["properties"], self._blank
        if not needed and len(given) > OPTIONAL_MAX:
            return ""
        terms = {name: inner(one) for name, one in given.items()}
        # Where none is required, the n-th of them is written n times.
        self._count(sum(len(term) * (1 if needed else at) for at, term in enumerate(terms.values(), start=1)))
        pairs = {
            name: f'{_literal(json.dumps(name))} {blank} ":" {blank} {term}' for name, term in terms.items()
        }
        if needed:
            ways = [_members(pairs, set(needed), blank)]
        else:  # any of them may be the first
            names = list(pairs)
            rests = [{one: pairs[one] for one in names[at:]} for at in range(len(names))]
            ways = [*(_members(rest, {next(iter(rest))}, blank) for rest in rests), '""']
        self._count(sum(map(len, ways)))
        return f'("{{" {blank} ({" | ".join(ways)}) {blank} "}}")'


def _drop_unused(schema: Schema) -> None:
    """Drop the definitions that nothing in a schema refers to, as far as its references are to those."""
    groups = [name for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)]
    used: dict[str, set[str]] = {name: set() for name in groups}
    found: list[Any] = [{key: value for key, value in schema.items() if key not in groups}]
    while found:
        one = found.pop()
        if isinstance(one, list):
            found += one
        elif isinstance(one, dict):
            found += one.values()
            if "$ref" not in one and "$dynamicRef" not in one:
                continue
            place = str(one.get("$ref")).split("/", 3)
            if len(place) < 3 or place[0] != "#" or place[1] not in groups:
                return  # it may be to any of them
            name = place[2].replace("~1", "/").replace("~0", "~")
            if name not in used[place[1]] and name in schema[place[1]]:
                used[place[1]].add(name)
                found.append(schema[place[1]][name])
    for group in groups:
        schema[group] = {name: one for name, one in schema[group].items() if name in used[group]}
        if not schema[group]:
            del schema[group]


def _is_closed(schema: Schema) -> bool:
    """Return whether a schema is of an object that has the properties it lists, and no others."""
    given, needed = schema.get("properties"), schema.get("required", [])
    if not isinstance(given, dict) or not isinstance(needed, list):
        return False
    is_known = all(isinstance(name, str) and name in given for name in needed)
    is_closed = schema.get("additionalProperties") is False
    return is_known and is_closed and schema.get("type", "object") == "object"


def _members(pairs: dict[str, str], needed: set[str], blank: str) -> str:
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


def _are_apart(parts: list[Any], root: Schema) -> bool:
    """Return whether schemas list their values, and no value is of two of them."""
    found = set[Any]()
    for part in parts:
        one = resolved(part, root)
        values = [None] if isinstance(one, dict) and one.get("type") == "null" else listed(one)
        if not values or any(isinstance(value, dict | list) or value in found for value in values):
            return False
        found.update(values)
    return True


def _is_of(value: Any, kinds: list[Any]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(
        isinstance(value, TYPES[kind])
        for kind in kinds
        if isinstance(kind, str) and kind in TYPES and kind != "boolean"
    )


def _literal(text: str) -> str:
    return json.dumps(text)
