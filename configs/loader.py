"""Loads the settings from all sources: defaults < preset or file < environment < flags.

`load` merges the layers, has pydantic validate the tree once, and turns every error into a problem that
names the key, the value, its origin and the fix. Secrets are never shown. Reads no environment or file
except those it is given.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from samovar.configs.fields import (
    ENV_PREFIX,
    SettingField,
    env_name,
    fixed_keys,
    flag_name,
    former_keys,
    section_keys,
    setting_fields,
)
from samovar.configs.json_text import TooDeep, parse_json
from samovar.configs.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a configuration: the key, the value, its origin and the fix.

    `key` is a setting or what was mistaken for one; `value` is None if it must not be shown. Callers leave
    the value of a secret out.
    """

    key: str
    origin: str
    message: str
    fix: str
    value: str | None = None

    def __str__(self) -> str:
        shown = self.key if self.value is None else f"{self.key} = {self.value}"
        return f"{shown}  (from {self.origin})\n    {self.message}. {self.fix}."


class ConfigError(Exception):
    """The configuration cannot be used. `problems` lists every reason, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        head = (
            "the configuration has a problem:"
            if len(self.problems) == 1
            else "the configuration has problems:"
        )
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def did_you_mean(word: str, candidates: Iterable[str], separator: str = ".") -> str | None:
    """Return the candidate that `word` was probably meant to be, or None.

    The last part is also compared on its own, so that a key in the wrong section is found.
    """
    known = list(candidates)
    leaf = word.rsplit(separator, 1)[-1]
    by_leaf: dict[str, str] = {}
    for name in known:
        by_leaf.setdefault(name.rsplit(separator, 1)[-1], name)
    if leaf in by_leaf:
        return by_leaf[leaf]
    if close := difflib.get_close_matches(word, known, n=1, cutoff=0.75):
        return close[0]
    if close := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6):
        return by_leaf[close[0]]
    return None


# The readers of the three sources (YAML file, environment, flags) each return entries by dotted key with
# their exact origins, and append what they cannot read to a list of problems. `load` merges and validates.

Source = Literal["default", "file", "env", "flag"]

# Short flags of the most common settings.
FLAG_ALIASES = {
    "--host": "server.host",
    "--port": "server.port",
    "--record": "server.record",
    "--replicas": "cluster.replicas",
    "--model": "model.path",
    "--engine": "engine.kind",
}
# Below `models.NAME.` stand the settings of a further model.
MODELS = "models."

# Names with our prefix that are not settings: the client's key and address, variables between our processes.
ENV_KNOWN_NAMES = frozenset({"SAMOVAR_API_KEY", "SAMOVAR_URL"})
ENV_KNOWN_PREFIXES = ("SAMOVAR_PROXY_",)

TOO_DEEP = "it is nested too deeply"
LIST_THEM = "`samovar config --keys` lists all"


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value as given; `origin` is a file and line, a variable's name or a flag.

    `renamed`: the setting's former and present name as this source spells them, if the former was given.
    """

    value: Any
    source: Source
    origin: str
    renamed: tuple[str, str] | None = None


Layer = dict[str, GivenValue]


def _put(layer: Layer, key: str, entry: GivenValue, problems: list[Problem]) -> None:
    """Add an entry; a source may not give a setting by both its former and its present name."""
    other = layer.get(key)
    if other is not None and other.renamed != entry.renamed:
        old, new = (entry, other) if entry.renamed else (other, entry)
        former, name = old.renamed or ("", key)
        message = f"this is the former name of {name}, which is given too ({new.origin})"
        problems.append(Problem(former, old.origin, message, f"Leave {former} out"))
    layer[key] = entry


def _warn_of_former_names(layer: Layer) -> None:
    for entry in layer.values():
        if entry.renamed:
            former, name = entry.renamed
            message = f"this setting is now called {name}; the former name ends with the next release"
            logger.warning("%s", Problem(former, entry.origin, message, f"Write {name}"))


def _warn_of_fixed(name: str, origin: str, value: object) -> None:
    message = f"this is no setting any more, and always {value}; the value is not used"
    logger.warning("%s", Problem(name, origin, message, "Leave it out"))


def preset_names() -> list[str]:
    folder = resources.files("samovar.configs.presets")
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def read_file(config: Path | str, problems: list[Problem]) -> Layer:
    """Return the entries of a YAML file or a preset.

    Raises ConfigError if the file cannot be read or is not YAML, because then nothing else can be checked.
    """
    text, place = _file_text(config)
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([_yaml_problem(error, place)]) from None  # the cause may quote a secret
    except RecursionError:
        raise ConfigError([Problem("the file", place, TOO_DEEP, "Settings are two levels deep")]) from None
    if root is None or tree is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        message = f"the file holds {_kind_of(tree)}, not sections"
        raise ConfigError(
            [Problem("the file", place, message, "Write it like `server:` and below it `  port: 8000`")]
        )
    lines: dict[str, int] = {}
    _walk_nodes(root, "", place, lines, problems)
    walk = _TreeWalk("file", place, lines, problems)
    walk.take(tree, "")
    return walk.layer


def read_env(env: Mapping[str, str], problems: list[Problem]) -> Layer:
    """Return the entries of all `SAMOVAR_<SECTION>__<KEY>` variables; an unknown name is a problem."""
    known, former, fixed = setting_fields(), former_keys(), fixed_keys()
    by_name = {env_name(key): key for key in (*former, *known, *fixed)}
    layer: Layer = {}
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or name in ENV_KNOWN_NAMES or name.startswith(ENV_KNOWN_PREFIXES):
            continue
        given = by_name.get(name)
        if given is None:
            fix = _suggestion(did_you_mean(name, [field.env for field in known.values()], "__"), "Unset it")
            problems.append(Problem(name, "the environment", "there is no such setting", fix))
            continue
        key, origin = former.get(given, given), f"variable {name}"
        if key in fixed:
            _warn_of_fixed(name, "the environment", fixed[key])
            continue
        if (value := _parse(known[key], env[name], origin, problems)) is not _BAD:
            if f"{key}." == MODELS:
                layer |= _models_of(value, "env", origin, problems)
                continue
            renamed = None if key == given else (name, env_name(key))
            _put(layer, key, GivenValue(value, "env", origin, renamed), problems)
    return layer


def split_key(key: str) -> tuple[str, str]:
    """Return the model that a key is of, and the setting: `models.a.b.engine.threads` -> a.b, engine.threads.

    The model is empty, and the setting the whole key, if it is no key of a further model.
    """
    known, rest = setting_fields(), key.removeprefix(MODELS)
    if rest != key:
        for at in (at for at, char in enumerate(rest) if char == "."):
            if at and rest[at + 1 :] in known:
                return rest[:at], rest[at + 1 :]
    return "", key


def read_flags(flags: Sequence[str], problems: list[Problem]) -> Layer:
    """Return the entries of `--section.key value` and `--section.key=value`; the last of several wins."""
    known, former, fixed = setting_fields(), former_keys(), fixed_keys()
    layer: Layer = {}
    for name, text in _flag_pairs(flags, problems):
        given, at = FLAG_ALIASES.get(name) or name.removeprefix("--").replace("-", "_"), ""
        if name.startswith(f"--{MODELS}"):
            given, at = _of_model(name.removeprefix(f"--{MODELS}"), {*known, *former, *fixed})
        key = former.get(given, given)
        field = known.get(key)
        if key in fixed:
            _warn_of_fixed(name, "the command line", fixed[key])
            continue
        if field is None:
            guess = did_you_mean(key, known)
            fix = _suggestion(known[guess].flag if guess else None, "Leave it out")
            problems.append(Problem(name, "the command line", "there is no such flag", fix))
        elif text is None:
            problems.append(Problem(name, "the command line", "a value is missing", f"Give {field.allowed}"))
        elif (value := _parse(field, text, f"flag {name}", problems)) is _BAD:
            continue
        elif f"{key}." == MODELS:
            layer |= _models_of(value, "flag", f"flag {name}", problems)
        else:
            renamed = None if key == given else (name, f"--{at}{flag_name(key).removeprefix('--')}")
            _put(layer, at + key, GivenValue(value, "flag", f"flag {name}", renamed), problems)
    return layer


def _models_of(value: Any, source: Source, origin: str, problems: list[Problem]) -> Layer:
    """Return the entries of all further models, from one value."""
    walk = _TreeWalk(source, origin, {}, problems)
    walk.take({MODELS.rstrip("."): value}, "")
    return walk.layer


def _of_model(rest: str, known: set[str]) -> tuple[str, str]:
    """Return the setting of a further model's flag, and what its key begins with.

    `rest`: of the flag, behind `--models.`. The setting is empty if there is none of that name.
    """
    for at in (at for at, char in enumerate(rest) if char == "." and at):
        tail = rest[at + 1 :]
        found = FLAG_ALIASES.get(f"--{tail}") or tail.replace("-", "_")
        if found in known:
            return found, f"{MODELS}{rest[:at]}."
    return f"{MODELS}{rest}", ""


def _file_text(config: Path | str) -> tuple[str, str]:
    """Return the text of a preset or a file, and its name for messages."""
    if str(config) in preset_names():
        text = (
            resources.files("samovar.configs.presets").joinpath(f"{config}.yaml").read_text(encoding="utf-8")
        )
        return text, f"preset {config}"
    path = Path(config)
    try:
        path = path.expanduser()
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the user after `~` is unknown
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else _reason(error)
        fix = f"Give an existing YAML file, or one of the presets {', '.join(preset_names())}"
        guess = did_you_mean(str(config), preset_names())
        fix = f"Did you mean the preset {guess}? {fix}" if guess else fix
        raise ConfigError(
            [Problem("--config", str(path), f"the file cannot be read: {reason}", fix)]
        ) from error


def _reason(error: Exception) -> str:
    """Return the error's text, without the error number and the path of an OSError."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error).rstrip(".")


def _yaml_problem(error: yaml.YAMLError, place: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{place}, line {mark.line + 1}, column {mark.column + 1}" if mark else place
    # PyYAML quotes aliases and tags in its message, and a secret that starts with `*` or `!` parses as one.
    reason = re.sub(r"'[^']{4,}'", "'...'", getattr(error, "problem", None) or "the text cannot be parsed")
    return Problem(
        "the file", where, f"this is not YAML: {reason}", "Repair that line, quote what has odd characters"
    )


def _walk_nodes(
    node: yaml.MappingNode,
    prefix: str,
    place: str,
    lines: dict[str, int],
    problems: list[Problem],
    above: frozenset[int] = frozenset(),
) -> None:
    """Record the line of every key, and report duplicate keys, of which YAML silently keeps the last.

    `above` holds the ids of the enclosing nodes: an alias may lead back to one of them.
    """
    seen: dict[str, int] = {}
    known, sections = setting_fields(), _given_sections()
    above |= {id(node)}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        key = f"{prefix}{name}"
        # Below a secret field the name itself may be a secret put on the wrong side.
        shown = key if prefix.rstrip(".") not in known else prefix.rstrip(".")
        if name in seen:
            message = f"the key is given twice, first in line {seen[name]}"
            problems.append(Problem(shown, f"{place}, line {line}", message, "Leave one of them"))
        seen[name] = line
        lines[key] = line
        if id(value_node) in above:
            problems.append(
                Problem(shown, f"{place}, line {line}", "an anchor contains itself", "Write the value out")
            )
        elif isinstance(value_node, yaml.MappingNode) and (
            key in known or key in sections or prefix == MODELS or _is_section_of_model(key)
        ):
            # Only where settings can be: with aliases a small file can be an endless tree.
            _walk_nodes(value_node, f"{key}.", place, lines, problems, above)


def _is_section_of_model(key: str) -> bool:
    rest = key.removeprefix(MODELS)
    ends = (rest[at + 1 :] for at, char in enumerate(rest) if char == ".")
    return rest != key and not section_keys().isdisjoint(ends)


def _given_sections() -> set[str]:
    """Return the keys that may contain others, by their present and their former names."""
    return section_keys() | {key.rsplit(".", 1)[0] for key in former_keys()}


class _TreeWalk:
    """Takes the entries of a tree of settings into `layer`, and appends what is wrong to `problems`.

    `lines`: of keys, as far as they are known; the origin is `place` otherwise.
    """

    def __init__(self, source: Source, place: str, lines: Mapping[str, int], problems: list[Problem]) -> None:
        self.layer: Layer = {}
        self._source = source
        self._place = place
        self._lines = lines
        self._problems = problems

    def take(self, tree: Mapping[Any, Any], prefix: str, of_model: str = "") -> None:
        """Take what stands below `prefix`; `of_model`: what keys of a further model begin with."""
        known, sections, former, fixed = setting_fields(), _given_sections(), former_keys(), fixed_keys()
        for name, value in tree.items():
            given = f"{prefix}{name}"
            key = former.get(given, given)
            origin = self._origin(of_model + given)
            if key in fixed:
                _warn_of_fixed(of_model + given, origin, fixed[key])
            elif f"{key}." == MODELS and not of_model and isinstance(value, Mapping):
                self._take_models(value)
            elif key in known:
                renamed = None if key == given else (of_model + given, of_model + key)
                entry = GivenValue(value, self._source, origin, renamed)
                _put(self.layer, of_model + key, entry, self._problems)
            elif key not in sections:
                fix = _suggestion(did_you_mean(key, [*known, *sections]), "Leave it out")
                self._problems.append(Problem(of_model + key, origin, "there is no such setting", fix))
            elif isinstance(value, Mapping):
                self.take(value, f"{key}.", of_model)
            elif value is not None:  # an empty section is fine
                message = f"this is a section, but the file gives {_kind_of(value)}"
                below = next(one for one in (*known, *former) if one.startswith(key + "."))
                fix = f"Write its keys below it, such as {below}"
                self._problems.append(Problem(of_model + key, origin, message, fix))

    def _take_models(self, models: Mapping[Any, Any]) -> None:
        for name, own in models.items():
            key = f"{MODELS}{name}"
            if isinstance(own, Mapping) and own:
                self.take(own, "", f"{key}.")
                continue
            message = f"this is a model, but the file gives {_kind_of(own)}"
            fix = f"Write its settings below it, such as {key}.model.path"
            self._problems.append(Problem(key, self._origin(key), message, fix))

    def _origin(self, key: str) -> str:
        return f"{self._place}, line {self._lines[key]}" if key in self._lines else self._place


def _flag_pairs(flags: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, str | None]]:
    rest = list(flags)
    secrets = [field.flag for field in setting_fields().values() if field.secret]
    # A stray word after a secret flag is probably a part of the secret that the shell split off.
    quote = not any(flag.replace("_", "-").startswith(tuple(secrets)) for flag in flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            shown = repr(flag) if quote else f"argument {len(flags) - len(rest)}"
            fix = "Write settings as --section.key value, and quote a value with blanks"
            problems.append(Problem(shown, "the command line", "this is not a flag", fix))
            continue
        name, equals, text = flag.partition("=")
        if equals:
            yield name, text
        elif rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            yield name, None


_BAD = object()


def _parse(field: SettingField, text: str, origin: str, problems: list[Problem]) -> Any:
    """Return the value of a text, or `_BAD` after reporting a problem.

    Plain numbers and words stay text: pydantic parses them.
    """
    if field.nullable and text in ("", "null"):
        return None
    if field.structured:
        try:
            return parse_json(text, _no_key_twice)
        except ValueError as error:
            # The error has the position and never quotes the text, which may be a secret.
            reason = TOO_DEEP if isinstance(error, TooDeep) else f"this is not JSON: {error}"
            article = "an object" if get_origin(field.kind) is dict else "a list"
            example = """ such as '{"name": "value"}'""" if article == "an object" else ""
            fix = f"Write {article} in JSON{example}, in single quotes for the shell"
            problems.append(Problem(field.key, origin, reason, fix))
            return _BAD
    return next((choice for choice in field.choices if str(choice) == text), text)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _suggestion(guess: str | None, otherwise: str) -> str:
    return (
        f"Did you mean {guess}? {LIST_THEM}"
        if guess
        else f"{otherwise}, or look for the right name: {LIST_THEM}"
    )


def _kind_of(value: Any) -> str:
    names = {str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list"}
    return names.get(type(value), "something else")


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The effective settings, and for every dotted key its layer and exact origin."""

    settings: Settings
    source: dict[str, Source]
    origin: dict[str, str]


def load(
    config: Path | str | None,
    env: Mapping[str, str],
    flags: Sequence[str],
    secrets: Path | None = None,
) -> LoadedSettings:
    """Merge all layers and validate the settings.

    `config` is a path or a preset's name; `env` the whole environment, of which the names with our prefix
    count; `flags` are words such as `--engine.block-tokens 32` or `--port=9000`; `secrets` is a second
    file, which takes precedence over the first.

    Raises ConfigError with all problems that could be found.
    """
    problems: list[Problem] = []
    layers = [read_file(file, problems) for file in (config, secrets) if file is not None]
    layers += [read_env(env, problems), read_flags(flags, problems)]
    merged: Layer = {}
    for layer in layers:
        _warn_of_former_names(layer)
        merged |= layer
    known = setting_fields()
    good = {
        key: entry for key, entry in merged.items() if _plausible(known[split_key(key)[1]], entry, problems)
    }
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(_nested(good))
    except ValidationError as error:
        # An entry that was refused above is missing here, which alone may violate a rule over several values.
        # So such a violation is only reported if there is no other problem.
        found = [_explain(detail, good) for detail in error.errors(include_url=False)]
        problems += [problem for problem in found if problem.key in known or not problems]
    if problems or settings is None:
        raise ConfigError(problems) from None  # pydantic's own text may quote secrets
    given = {key if key in known else MODELS.rstrip("."): entry for key, entry in good.items()}
    return LoadedSettings(
        settings=settings,
        source={key: given[key].source if key in given else "default" for key in known},
        origin={key: given[key].origin if key in given else "default" for key in known},
    )


def _plausible(field: SettingField, entry: GivenValue, problems: list[Problem]) -> bool:
    """Refuse a value that pydantic would silently convert into something unintended."""
    message = None
    if isinstance(entry.value, bool) and field.kind is not bool:
        message = "true/false (or yes/no, on/off) does not fit here"
    elif entry.value == "" and not field.nullable:
        message = "the value is empty"
    if message is None:
        return True
    problems.append(
        Problem(field.key, entry.origin, message, _fix(field), None if field.secret else _shown(entry.value))
    )
    return False


def _nested(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, entry in layer.items():
        model, setting = split_key(key)
        *path, leaf = setting.split(".")
        section = tree.setdefault(MODELS.rstrip("."), {}).setdefault(model, {}) if model else tree
        for name in path:
            section = section.setdefault(name, {})
        # In a file, "" overrides a value with nothing; flags and variables are converted in their layer.
        section[leaf] = None if entry.value == "" else entry.value
    return tree


def _explain(detail: ErrorDetails, layer: Layer) -> Problem:
    known = setting_fields()
    loc = [str(part) for part in detail["loc"]]
    key = next((k for n in range(len(loc), 0, -1) if (k := ".".join(loc[:n])) in known), None)
    message = detail["msg"].removeprefix("Value error, ")
    if key is None:  # a rule over several values: its message names them and the fix
        body, _, fix = message.rpartition(". ")
        where = _origins(layer, loc, message)
        return Problem(".".join(loc) or "settings", where, body or message, fix or "Change one of them")
    field = known[key]
    origin = layer[key].origin if key in layer else "default"
    value = layer[key].value if key in layer else None
    if not field.secret:
        return Problem(key, origin, _lower(message), _fix(field), _shown(value))
    if field.structured and isinstance(value, Mapping) and len(loc) > key.count(".") + 1:
        # The entry's number, not its name: the key may have been written in place of the name.
        number = list(map(str, value)).index(loc[key.count(".") + 1]) + 1
        side = "name" if loc[-1] == "[key]" else "value"
        message = f"the {side} of entry {number} is refused: {_lower(message)}"
    return Problem(key, origin, _lower(message), _fix(field))


def _origins(layer: Layer, loc: list[str], message: str) -> str:
    """Return the origins of the values that a rule over several of them mentions."""
    section = ".".join(loc) + "." if loc else None
    entries = [e for key, e in layer.items() if key in message or (section and key.startswith(section))]
    return " and ".join(sorted({entry.origin for entry in entries})) or "the defaults"


def _fix(field: SettingField) -> str:
    if field.key == "auth.api_keys":
        return (
            'Write {"my-team": "<a key of 16 to 256 characters>"}: visible ASCII without blanks in the key, '
            "small letters, digits, - and _ in the name"
        )
    return f"Allowed: {field.allowed}"


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, dict, list)) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
