"""The leaves of the settings tree as a flat list: one field per value.

A field has its spellings (dotted key, environment variable, flag), a description of the values allowed, and
whether it is a secret.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from samovar.configs.sections import Section
from samovar.configs.settings import Settings

ENV_PREFIX = "SAMOVAR_"

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    SecretStr: "a secret text",
}


@dataclass(frozen=True, slots=True)
class SettingField:
    """One value of the settings tree.

    `kind` is the type without its bounds; `allowed` describes both in words; `choices` are the values of a
    Literal; `nullable` fields can be left empty; a `structured` field (a dict or a list) is written as JSON
    in the environment and in flags; no part of a `secret` field's value may be shown. `low`, `high`: the
    least and the greatest number that it takes, where these are bounds.
    """

    key: str
    description: str
    kind: Any
    allowed: str
    choices: tuple[Any, ...]
    nullable: bool
    structured: bool
    secret: bool
    low: float | None = None
    high: float | None = None

    @property
    def env(self) -> str:
        return env_name(self.key)

    @property
    def flag(self) -> str:
        return flag_name(self.key)


def env_name(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper()


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def setting_fields(model: type[BaseModel] = Settings) -> dict[str, SettingField]:
    """Return every field of the tree by dotted key, in declaration order."""
    return {field.key: field for field in _walk(model, "")}


def former_keys(model: type[BaseModel] = Settings, prefix: str = "") -> dict[str, str]:
    """Return the key of every renamed setting by its former key, those of renamed sections, too.

    See `Section.FORMER`.
    """
    found: dict[str, str] = {}
    for at, section in _sections(model, prefix):
        for former, name in section.FORMER.items():
            below = section.model_fields[name].annotation if name in section.model_fields else None
            if isinstance(below, type) and issubclass(below, Section):
                inner = [field.key for field in _walk(below, "")] + list(fixed_keys(below))
                found |= {f"{at}{former}.{key}": f"{at}{name}.{key}" for key in inner}
            elif name in section.model_fields:
                found[f"{at}{former}"] = f"{at}{name}"
    return found


def fixed_keys(model: type[BaseModel] = Settings, prefix: str = "") -> dict[str, Any]:
    """Return the values of what was a setting and is a constant, by dotted key; see `Section`."""
    return {
        f"{at}{name}": value
        for at, section in _sections(model, prefix)
        for name, value in section.fixed().items()
    }


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections below a model, itself included, each with what its keys begin with."""
    if issubclass(model, Section):
        yield prefix, model
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _sections(section, f"{prefix}{name}.")


def section_keys(model: type[BaseModel] = Settings) -> set[str]:
    """Return the dotted keys that contain fields and are none themselves, such as `engine`."""
    return {key.rsplit(".", 1)[0] for key in setting_fields(model) if "." in key}


def _walk(model: type[BaseModel], prefix: str) -> Iterator[SettingField]:
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _walk(section, f"{prefix}{name}.")
        else:
            yield _setting_field(prefix + name, info)


def _setting_field(key: str, info: FieldInfo) -> SettingField:
    core, extra_bounds, nullable = _core(info.annotation)
    bounds = [*info.metadata, *extra_bounds]
    choices = get_args(core) if get_origin(core) is Literal else ()
    structured = get_origin(core) in (dict, list, tuple)
    return SettingField(
        key=key,
        description=info.description or "",
        kind=core,
        allowed=_allowed(core, choices, structured, bounds) + (", or empty" if nullable else ""),
        choices=choices,
        nullable=nullable,
        structured=structured,
        secret=_mentions(info.annotation, SecretStr),
        low=_bound(bounds, "ge"),
        high=_bound(bounds, "le"),
    )


def _core(annotation: Any) -> tuple[Any, list[Any], bool]:
    """Return the type inside `Annotated[...]` and `... | None`, the bounds found there, and nullability."""
    bounds: list[Any] = []
    nullable = False
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *notes = get_args(annotation)
            for note in notes:
                bounds += note.metadata if isinstance(note, FieldInfo) else [note]
        elif get_origin(annotation) in (Union, types.UnionType):
            members = [member for member in get_args(annotation) if member is not type(None)]
            nullable = nullable or len(members) < len(get_args(annotation))
            if len(members) != 1:
                return annotation, bounds, nullable
            annotation = members[0]
        else:
            return annotation, bounds, nullable


def _allowed(core: Any, choices: tuple[Any, ...], structured: bool, bounds: list[Any]) -> str:
    if choices:
        return "one of " + ", ".join(str(choice) for choice in choices)
    if structured:
        return "a JSON object" if get_origin(core) is dict else "a JSON list"
    length = [b for b in bounds if hasattr(b, "min_length") or hasattr(b, "max_length")]
    words = [_WORDS.get(core, "a value")]
    low, high = _bound(bounds, "ge"), _bound(bounds, "le")
    if low is not None and low == high:
        return f"only {low}"
    if (above := _bound(bounds, "gt")) is not None:
        words.append(f"above {above}")
    elif low is not None and high is None:
        words.append(f"{low} or more")
    if (below := _bound(bounds, "lt")) is not None:
        words.append(f"below {below}")
    elif high is not None:
        words.append(f"up to {high}" if low is None else f"{low} to {high}")
    if length:
        words.append(_length_in_words(_bound(length, "min_length"), _bound(length, "max_length")))
    return ", ".join(words)


def _length_in_words(least: int | None, most: int | None) -> str:
    if least and most:
        return f"{least} to {most} characters"
    return f"at least {least} characters" if least else f"at most {most} characters"


def _bound(bounds: list[Any], name: str) -> Any:
    return next((value for b in bounds if (value := getattr(b, name, None)) is not None), None)


def _mentions(annotation: Any, wanted: type) -> bool:
    return annotation is wanted or any(_mentions(inner, wanted) for inner in get_args(annotation))


# The settings as two plain trees (as in a configuration file), public and secret; merged they give the same
# settings.

Tree = dict[str, Any]


def public_tree(settings: Settings) -> Tree:
    """Return every value that is not a secret."""
    tree = settings.model_dump(mode="json")
    return _picked(tree, [key for key, field in setting_fields().items() if not field.secret])


def secret_tree(settings: Settings) -> Tree:
    """Return the secrets that are set, in clear: never show, log, or store them where others can read."""
    wanted = [key for key, field in setting_fields().items() if field.secret]
    return _without_empty(_picked(_revealed(settings.model_dump()), wanted))


def merged(public: Mapping[str, Any], secrets: Mapping[str, Any]) -> Settings:
    """Merge both trees into settings.

    Raises pydantic's `ValidationError`, whose text may quote secrets: show only its `loc` and `type`.
    """
    return Settings.model_validate(_deep(public, secrets))


def overlaid(low: Mapping[str, Any], high: Mapping[str, Any]) -> Tree:
    """Return `low` with the settings that `high` has: each as a whole, also one that is a mapping."""
    return _overlaid(low, high, section_keys(), "")


def _overlaid(low: Any, high: Mapping[str, Any], sections: set[str], at: str) -> Tree:
    found = dict(low) if isinstance(low, Mapping) else {}
    for name, value in high.items():
        is_section = at + name in sections and isinstance(value, Mapping)
        found[name] = _overlaid(found.get(name), value, sections, f"{at}{name}.") if is_section else value
    return found


def _picked(tree: Mapping[str, Any], keys: list[str]) -> Tree:
    found: Tree = {}
    for key in keys:
        *path, leaf = key.split(".")
        source: Any = tree
        target = found
        for name in path:
            source, target = source[name], target.setdefault(name, {})
        target[leaf] = source[leaf]
    return found


def _revealed(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {key: _revealed(inner) for key, inner in value.items()}
    if isinstance(value, tuple):  # a tenant's keys; a single key is written as given
        found = [_revealed(inner) for inner in value]
        return found[0] if len(found) == 1 else found
    return value


def _without_empty(tree: Tree) -> Tree:
    cut = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in cut.items() if value not in (None, {})}


def _deep(low: Mapping[str, Any], high: Mapping[str, Any]) -> Tree:
    found = dict(low)
    for key, value in high.items():
        under = found.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            found[key] = _deep(under, value)
        else:
            found[key] = value
    return found
