"""What an answer must look like, of all the spellings in which bodies ask for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from samovar.configs.json_text import parse_json
from samovar.replicas.grammar import loosened
from samovar.replicas.messages import Grammar, GrammarKind
from samovar.router.openai.errors import InvalidValue, MissingField, UnsupportedParameter, shown
from samovar.router.openai.messages import ToolOffer
from samovar.router.openai.schema import ChatBody, CompletionBody, StructuredOutputs

Schema = dict[str, Any] | str

ANY_OBJECT: Schema = {"type": "object"}


def grammar_of(asked: ChatBody | CompletionBody) -> Grammar | None:
    """Return the grammar that a body asks for, if any; what it says is checked by the compiler.

    Raises `InvalidValue` if it asks for several, `UnsupportedParameter` for a form that is not served.
    """
    wanted = [*_of_response_format(asked), *_of_structured_outputs(asked), *_of_other_spellings(asked)]
    if len(wanted) > 1:
        first, second = (grammar.field for grammar in wanted[:2])
        raise InvalidValue(second, f"{second} and {first} both say what the answer must look like. Give one.")
    return wanted[0] if wanted else None


def _of_response_format(asked: ChatBody | CompletionBody) -> Iterator[Grammar]:
    given = asked.response_format
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        yield _json("response_format", ANY_OBJECT if given.schema_ is None else given.schema_)
    elif given.type == "json_schema":
        field = "response_format.json_schema"
        if given.json_schema is None:
            raise MissingField(field)
        if given.json_schema.schema_ is None:
            raise MissingField(f"{field}.schema")
        yield _json(f"{field}.schema", given.json_schema.schema_)
    else:
        message = (
            f"response_format.type={shown(given.type)} is not supported; 'text', 'json_object' and "
            "'json_schema' are."
        )
        raise UnsupportedParameter("response_format", message)


def _of_structured_outputs(asked: ChatBody | CompletionBody) -> Iterator[Grammar]:
    given, field = asked.structured_outputs, "structured_outputs"
    if given is None:
        return
    options = _json_options(given)
    asked_for = (given.json_, given.json_object or None, given.regex, given.grammar, given.choice)
    if all(one is None for one in asked_for):
        raise InvalidValue(field, f"{field} must have one of json, regex, choice, grammar and json_object.")
    if given.json_ is not None:
        yield _json(f"{field}.json", given.json_, options)
    if given.json_object:
        yield _json(f"{field}.json_object", ANY_OBJECT, options)
    yield from _texts({f"{field}.regex": given.regex}, "regex")
    yield from _texts({f"{field}.grammar": given.grammar}, "grammar")
    yield from _choice(f"{field}.choice", given.choice)


def _of_other_spellings(asked: ChatBody | CompletionBody) -> Iterator[Grammar]:
    """Yield what the names say that vLLM had before, and those of SGLang and llama.cpp."""
    pattern = asked.guided_whitespace_pattern
    options = {} if pattern is None else {"whitespace_pattern": pattern}
    for field, schema in {"guided_json": asked.guided_json, "json_schema": asked.json_schema}.items():
        if schema is not None:
            yield _json(field, schema, options)
    if asked.guided_json_object:
        yield _json("guided_json_object", ANY_OBJECT, options)
    yield from _texts({"guided_regex": asked.guided_regex, "regex": asked.regex}, "regex")
    grammars = {"guided_grammar": asked.guided_grammar, "grammar": asked.grammar, "ebnf": asked.ebnf}
    yield from _texts(grammars, "grammar")
    yield from _choice("guided_choice", asked.guided_choice)


def _json_options(given: StructuredOutputs) -> dict[str, Any]:
    """Return the compiler's options, in the words of llguidance."""
    options: dict[str, Any] = {}
    if given.whitespace_pattern is not None:
        options["whitespace_pattern"] = given.whitespace_pattern
    elif given.disable_any_whitespace:
        options["whitespace_flexible"] = False
    return options


def _json(field: str, schema: Schema, options: dict[str, Any] | None = None) -> Grammar:
    """Return a JSON Schema as it was given, as an object or as text, with options if there are any."""
    if isinstance(schema, str):
        if not options:
            return Grammar("json_schema", schema, field)
        schema = _parsed(field, schema)
    if options:
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": options | own if isinstance(own, dict) else options}
    try:
        return Grammar("json_schema", json.dumps(schema, allow_nan=False), field)
    except ValueError:
        raise InvalidValue(field, f"{field} holds a number that JSON does not have.") from None


def _parsed(field: str, text: str) -> dict[str, Any]:
    try:
        schema = parse_json(text)
    except ValueError as error:
        raise InvalidValue(field, f"{field} is not JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise InvalidValue(field, f"{field} must be a JSON Schema, an object.")
    return schema


def _texts(fields: dict[str, str | None], kind: GrammarKind) -> Iterator[Grammar]:
    for field, text in fields.items():
        if text is not None:
            if not text:
                raise InvalidValue(field, f"{field} is empty: it describes no answer. Leave it out.")
            yield Grammar(kind, text, field)


def _choice(field: str, choices: list[str] | None) -> Iterator[Grammar]:
    if choices is not None:
        if not choices:
            raise InvalidValue(field, f"{field} is empty: there is nothing to choose from. Leave it out.")
        yield Grammar("choice", json.dumps(choices), field)


def not_followed(grammar: Grammar | None, offer: ToolOffer | None) -> list[str]:
    """Return what an answer's schemas say and is not followed, as fields that are ignored."""
    found: list[str] = []
    if grammar is not None and grammar.kind == "json_schema":
        found += (f"{grammar.field}.{keyword}" for keyword in loosened(grammar.text))
    for tool in offer.promised if offer is not None else ():
        schema = json.dumps(tool.spec["function"].get("parameters"))
        found += (f"tools.{tool.name}.{keyword}" for keyword in loosened(schema))
    return found
