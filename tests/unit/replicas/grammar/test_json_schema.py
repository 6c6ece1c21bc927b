"""Schemas as they are followed: exact numbers, keywords in others' words, and what is left out and told."""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.replicas.grammar import WRITTEN_CHARS_MAX, GrammarRefused, SchemaRefused, embedded_json
from samovar.replicas.grammar.json_schema import FORMATS, _names, followed_text, lark_of, loosened
from tests.unit.replicas.grammar.test_grammar import COMPILER, follows, grammar, random_answer, text_of

FORMATS_SEEN = """
uri-reference iri url int32 int64 uint64 float double google-datetime google-duration google-fieldmask json
json-string path file-path directory-path binary byte password date-time date time duration email idn-email
hostname ipv4 ipv6 ipvanyaddress uuid uuid4 regex markdown color textarea decimal phone cuid base64
timestamp-millis uri iri-reference
"""
"""What clients, MCP servers and pydantic write."""
COLOURS = {"E": {"enum": ["red", "blue"], "type": "string"}}
CAT = {"type": "object", "properties": {"k": {"const": "cat"}, "a": {"type": "integer"}}, "required": ["k"]}
DOG = {"type": "object", "properties": {"k": {"enum": ["dog"]}, "b": {"type": "boolean"}}, "required": ["k"]}
KIND = {"propertyName": "k"}


def allows(schema: Any, text: str) -> bool:
    return follows(COMPILER.open(grammar("json_schema", json.dumps(schema))), text)


def drawn(schema: Any, seed: int) -> Any:
    """An answer of any tokens that are allowed; None if it has not ended."""
    state = COMPILER.open(grammar("json_schema", json.dumps(schema)))
    answer, is_over = random_answer(state, random.Random(seed))
    return json.loads(text_of(answer)) if is_over else None


@pytest.mark.parametrize("name", FORMATS_SEEN.split())
def test_a_format_is_followed_or_told(name: str) -> None:
    kind = {
        "int32": "integer",
        "int64": "integer",
        "uint64": "integer",
        "float": "number",
        "double": "number",
    }
    schema = {"type": "array", "items": {"type": kind.get(name, "string"), "format": name}, "minItems": 1}
    COMPILER.check(grammar("json_schema", json.dumps(schema)))
    assert loosened(json.dumps(schema)) == ([] if name in FORMATS or name in kind else [f"format.{name}"])
    if name in FORMATS:
        assert not allows(schema, '["?"]'), "it is followed"


@pytest.mark.parametrize(
    ("schema", "good", "bad", "left"),
    [
        ({"$schema": "urn:x", "type": "integer"}, "1", "x", ["$schema"]),
        ({"$schema": "https://example.com/tool.json", "type": "integer"}, "1", "x", ["$schema"]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "integer"}, "1", "x", []),
        ({"type": "array", "items": {"const": 1}, "uniqueItems": True}, "[1]", "[2]", ["uniqueItems"]),
        ({"type": "array", "uniqueItems": False}, "[1]", "1", []),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            '{"b": 1}',
            '{"c": 1}',
            ["dependentRequired"],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
            '{"b": 1}',
            '{"c": 1}',
            ["dependencies"],
        ),
        # pydantic's `dict[Enum, int]`.
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/E"},
                "additionalProperties": {"type": "integer"},
                "$defs": COLOURS,
            },
            '{"blue": 1}',
            '{"green": 1}',
            [],
        ),
        (
            {"type": "object", "propertyNames": {"const": "a"}, "additionalProperties": {"type": "null"}},
            '{"a": null}',
            '{"b": null}',
            [],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"pattern": "^[a-c]+$"},
                "additionalProperties": {"const": 1},
            },
            '{"abc": 1}',
            '{"x": 1}',
            [],
        ),
        (
            {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"const": 1}},
            '{"x": 1}',
            '{"x": 2}',
            ["propertyNames"],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["a", "B"], "pattern": "^[a-z]$"},
                "additionalProperties": {"const": 1},
            },
            '{"a": 1}',
            '{"c": 1}',
            ["propertyNames"],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/E", "maxLength": 3},
                "additionalProperties": {"const": 1},
                "$defs": COLOURS,
            },
            '{"red": 1}',
            '{"green": 1}',
            ["propertyNames"],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"title": "Colour", "description": "one of two", **COLOURS["E"]},
                "additionalProperties": {"const": 1},
            },
            '{"red": 1}',
            '{"green": 1}',
            [],
        ),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"x": 1}', "1", []),
        ({"oneOf": [CAT, DOG], "discriminator": KIND}, '{"k": "dog"}', '{"k": "cow"}', []),
        (
            {
                "oneOf": [{"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}],
                "discriminator": {**KIND, "mapping": {"cat": "#/$defs/C"}},
                "$defs": {"C": CAT, "D": DOG},
            },
            '{"k": "cat", "a": 1}',
            '{"k": "cow"}',
            [],
        ),
        (
            {"oneOf": [CAT, {**DOG, "required": []}], "discriminator": KIND},
            '{"k": "dog"}',
            '{"k": "cow"}',
            ["oneOf"],
        ),
        ({"oneOf": [CAT, CAT], "discriminator": KIND}, '{"k": "cat"}', '{"k": "cow"}', ["oneOf"]),
        # What an object needs and does not describe may be anything.
        ({"type": "object", "properties": {}, "required": ["z"]}, '{"z": [1]}', "{}", []),
    ],
)
def test_keywords_are_followed_in_others_words_or_left_out_and_told(
    schema: dict[str, Any], good: str, bad: str, left: list[str]
) -> None:
    assert allows(schema, good)
    assert not allows(schema, bad)
    assert loosened(json.dumps(schema)) == left
    strict = {key: value for key, value in schema.items() if key != "$schema"}
    for seed in range(6):
        answer = drawn(schema, seed)
        if answer is not None and not left:
            jsonschema.validate(answer, strict)


BIG = [9007199254740993, -9007199254740993, 7000000000000000001, 2**63, -(2**63), 2**64 + 1, 10**400]


def shapes(one: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Schemas around a value's, and the text around a value."""
    other, inner = {"type": "string", "maxLength": 3}, {"type": "object", "properties": {"a": {}, "id": one}}
    return [
        (one, "%s"),
        ({"anyOf": [{"type": "null"}, one]}, "%s"),
        ({"type": "array", "items": one}, "[%s]"),
        ({"type": "object", "properties": {"id": one}, "required": ["id"]}, '{"id": %s}'),
        (
            {"type": "object", "properties": {"id": one, "b": other}, "required": ["b", "id"]},
            '{"id":%s,"b":""}',
        ),
        ({**inner, "properties": {"a": other, "id": one}}, '{"id": %s}'),
        ({**inner, "required": ["a"]}, '{"a": [1], "id": %s}'),
        (
            {
                "type": "object",
                "properties": {"i": {"$ref": "#/$defs/I"}},
                "$defs": {"I": one},
                "required": ["i"],
            },
            '{"i": %s}',
        ),
    ]


@pytest.mark.parametrize("number", BIG)
@pytest.mark.parametrize("shape", range(8))
def test_a_value_that_llguidance_would_round_is_exact(shape: int, number: int) -> None:
    """-2**63 ended the process."""
    for value in ({"const": number}, {"enum": [number, 9007199254740995], "type": "integer"}):
        schema, text = shapes(value)[shape]
        assert allows(schema, text % number)
        assert not allows(schema, text % (number + 1))
        assert not allows(schema, text % (number - 1))
        for seed in range(4):
            answer = drawn(schema, seed)
            if answer is not None:
                jsonschema.validate(answer, schema)
        assert embedded_json(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"const": 9007199254740993}]},
        {"type": "array", "prefixItems": [{"const": 9007199254740993}]},
        {"type": "array", "items": {"enum": [9007199254740993]}, "minItems": 2},
        {"type": "object", "additionalProperties": {"const": 9007199254740993}},
        {"enum": [9007199254740993], "minimum": 3},
        {"oneOf": [{"const": 9007199254740993}, {"type": "integer"}]},
        {"oneOf": [{"enum": [9007199254740993, 1]}, {"enum": [2, 1.0]}]},
        {"oneOf": [{"enum": [9007199254740993, [1]]}, {"const": [1]}]},
        {"$defs": {"A": {"items": {"$ref": "#/$defs/A"}, "const": 9007199254740993}}, "$ref": "#/$defs/A"},
    ],
)
def test_where_it_cannot_be_exact_it_is_refused_with_its_digits(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused) as caught:
        COMPILER.check(grammar("json_schema", json.dumps(schema)))
    assert "9007199254740993" in caught.value.reason
    with pytest.raises(ValueError, match="9007199254740993"):
        embedded_json(schema)


def test_one_of_values_that_no_two_parts_list_is_exact() -> None:
    """Numbers that two parts list are valid under none, and were written."""
    parts = [{"const": 9007199254740993}, {"$ref": "#/$defs/E"}, {"type": "null"}, {"enum": [1]}]
    schema = {"oneOf": parts, "$defs": COLOURS}
    for text in ("9007199254740993", '"red"', "null", "1"):
        assert allows(schema, text)
    assert not allows(schema, "9007199254740992")


@pytest.mark.parametrize("number", [2**53, 2**53 + 2, -(2**53) - 2, 2**62, 10**18, 0, True])
def test_a_value_that_is_exact_is_followed(number: int) -> None:
    for schema in ({"const": number}, {"enum": [number]}):
        assert allows(schema, json.dumps(number))
        assert not allows(schema, json.dumps(number + 1))


@pytest.mark.parametrize("number", [*BIG, 2**53 + 1, 2**63 - 1, 10**18 + 1, -1e300, 1e300, -(10.0**19)])
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_no_answer_is_beyond_a_bound_of_many_digits(kind: str, keyword: str, number: float) -> None:
    """Where the bound itself is no float, it is the next within; what has no such is refused."""
    schema = {"type": kind, keyword: number}
    side = 1 if keyword in ("minimum", "exclusiveMinimum") else -1
    try:
        COMPILER.check(grammar("json_schema", json.dumps(schema)))
    except GrammarRefused:
        assert number * side > 0, "a bound that leaves all everyday numbers is served"
        return
    near = int(max(-(2**63), min(2**63, number)))
    for value in range(near - 3, near + 4):
        if allows(schema, str(value)):
            jsonschema.validate(value, schema)
    if number * side < 0:
        assert allows(schema, "0")
    for seed in range(3):
        answer = drawn(schema, seed)
        if answer is not None:
            jsonschema.validate(answer, schema)


def test_both_bounds_of_a_64_bit_number_are_exact_or_within() -> None:
    schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert allows(schema, str(2**63 - 1))
    assert not allows(schema, str(2**63))
    assert allows(schema, str(-(2**63) + 1024))
    assert not allows(schema, str(-(2**63) - 1))


ID = {"const": 9007199254740993}


def of_optionals(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = ID
    for _ in range(levels):
        plain = {f"p{at}": {"type": "boolean"} for at in range(15)}
        inner = {"type": "object", "properties": {**plain, "p15": inner}, "additionalProperties": False}
    return inner


def of_references(levels: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 8} for at in range(levels)}
    return {"$defs": {**defs, f"d{levels}": ID}, "$ref": "#/$defs/d0"}


def of_definitions() -> dict[str, Any]:
    parts: dict[str, Any] = {f"p{at}": {"$ref": "#/$defs/long"} for at in range(300)}
    needed = {"properties": {"id": ID, **parts}, "required": ["id"], "additionalProperties": False}
    return {"$defs": {"long": {"enum": ["x" * 20_000]}}, "type": "object", **needed}


def of_names(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        names = {"enum": [f"n{at}" for at in range(16)]}
        inner = {"type": "object", "propertyNames": names, "additionalProperties": inner}
    return inner


def of_shared_names() -> dict[str, Any]:
    names = {"$ref": "#/$defs/names"}
    objects = [{"type": "object", "propertyNames": names}] * 500
    return {"$defs": {"names": {"enum": [f"n{at}" for at in range(3000)]}}, "anyOf": objects}


@pytest.mark.parametrize(
    "schema",
    [
        of_optionals(5),
        of_optionals(20),
        of_references(9),
        of_references(14),
        of_definitions(),
        of_names(12),
        of_shared_names(),
    ],
)
def test_a_schema_is_refused_before_it_is_written_if_it_stands_for_too_much(schema: dict[str, Any]) -> None:
    """Texts that a few kilobytes stand for were gigabytes, and ended an ingress by its memory."""
    text = json.dumps(schema, separators=(",", ":"))
    assert len(text) < 64 * 1024
    assert isinstance(loosened(text), list)
    tracemalloc.start()
    try:
        with pytest.raises(GrammarRefused) as refused:
            COMPILER.check(grammar("json_schema", text))
        with pytest.raises(SchemaRefused):
            assert len(embedded_json(schema)) < 16 * WRITTEN_CHARS_MAX
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "more than" in refused.value.reason
    assert peak < 64 * WRITTEN_CHARS_MAX


def test_definitions_in_many_places_are_counted_in_each() -> None:
    with pytest.raises(SchemaRefused, match="more than"):
        embedded_json(of_definitions())  # 6 MB: little enough for a planted bug to write


def test_definitions_are_where_they_are_needed() -> None:
    """Each part of a schema had all of them."""
    schema = of_definitions()
    plain: dict[str, Any] = {f"p{at}": {"type": "null"} for at in range(300)}
    schema["properties"] = {"id": ID, **plain, "long": {"items": {"$ref": "#/$defs/long"}}}
    written = embedded_json(schema)
    assert written.count("x" * 20_000) == 1
    schema["$defs"] = {"long": {"$ref": "#/$defs/short"}, "short": {"enum": ["x"]}}
    assert allows(schema, '{"id": 9007199254740993, "long": ["x"]}')
    assert not allows(schema, '{"id": 9007199254740993, "long": ["y"]}')


@pytest.mark.parametrize(
    "schema",
    [
        {**ID, "type": {}},
        {**ID, "type": [["x"]]},
        {**ID, "type": 5},
        {"type": "object", "properties": {"id": ID}, "required": [[]], "additionalProperties": False},
        {"type": "object", "properties": {"id": ID}, "required": 5, "additionalProperties": False},
        {"type": [{}], "properties": {"id": ID}, "additionalProperties": False},
        {"type": "array", "items": [ID]},
        {"anyOf": [[ID], 5]},
        {"anyOf": ID},
        {"$ref": [], "a": ID},
        {"$ref": "#/a", "a": [ID]},
        {"items": {**ID, "$ref": 5}},
    ],
)
def test_a_schema_of_wrong_types_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused):
        COMPILER.check(grammar("json_schema", json.dumps(schema)))
    with pytest.raises(SchemaRefused):
        embedded_json(schema)


def test_names_are_looked_up_once() -> None:
    """A list was searched for each of 34,000 properties, on the event loop."""
    asked = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal asked
            asked += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    words = [Name(f"a{at}") for at in range(500)]
    one = {"properties": {f"b{at}": {} for at in range(500)}, "propertyNames": {"enum": words}}
    _names(one, one)
    assert asked < 5000
    assert loosened(json.dumps({"uniqueItems": True, "$comment": "x" * WRITTEN_CHARS_MAX})) == [], "refused"


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(9007199254740993),
    st.floats(),
    st.sampled_from(["a", "#/a", "#/$defs/a"]),
)
KEYWORDS = """
type format const enum minimum exclusiveMaximum properties required items anyOf oneOf allOf not $defs $ref
propertyNames uniqueItems dependentRequired dependencies discriminator propertyName additionalProperties
patternProperties $schema a
"""
WORDS = st.sampled_from(KEYWORDS.split())
ANY = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=4)),
)


@given(st.dictionaries(WORDS, ANY, max_size=5))
def test_any_value_in_place_of_a_schema_is_taken_or_refused(schema: dict[str, Any]) -> None:
    text = json.dumps(schema)
    assert isinstance(loosened(text), list)
    try:
        lark_of(text, always=True)
        again = followed_text(text)
    except ValueError:
        return
    assert followed_text(again) == again, "followed once, it is followed"
    assert loosened(again) == []
