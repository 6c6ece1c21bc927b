"""Settings from everywhere: defaults < preset or file < environment < flags.

`load` merges the layers, lets pydantic validate the tree once, and turns every complaint into
a problem that names the key, the value, its origin and the fix. Secrets are never shown. This
module does not know what a setting means, and reads no environment or file but what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs.knobs import Knob, knobs
from configs.layers import Entry, Layer, Source, read_env, read_file, read_flags
from configs.problem import ConfigError, Problem
from configs.settings import Settings


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings that hold, and for every dotted key the layer and the exact place it came from."""

    settings: Settings
    source: dict[str, Source]
    origin: dict[str, str]


def load(
    config: Path | str | None,
    env: Mapping[str, str],
    flags: Sequence[str],
    secrets: Path | None = None,
) -> Loaded:
    """Merge and validate.

    `config` is a path or a preset's name; `env` the whole environment, of which the names with
    our prefix count; `flags` are words such as `--engine.block-tokens 32` or `--port=9000`; `secrets`
    is a second file, which wins over the first.

    Raises ConfigError with all problems that could be found.
    """
    problems: list[Problem] = []
    merged: Layer = {}
    if config is not None:
        merged |= read_file(config, problems)
    if secrets is not None:
        merged |= read_file(secrets, problems)
    merged |= read_env(env, problems)
    merged |= read_flags(flags, problems)
    known = knobs()
    good = {key: entry for key, entry in merged.items() if _plausible(known[key], entry, problems)}
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(_nested(good))
    except ValidationError as error:
        # An entry that was refused above is missing here, so a rule over several values may be
        # broken only by that. Such a rule speaks when nothing else does.
        found = [_explain(detail, good) for detail in error.errors(include_url=False)]
        problems += [problem for problem in found if problem.key in known or not problems]
    if problems or settings is None:
        raise ConfigError(problems) from None  # pydantic's own text would quote secrets
    return Loaded(
        settings=settings,
        source={key: good[key].source if key in good else "default" for key in known},
        origin={key: good[key].origin if key in good else "default" for key in known},
    )


def _plausible(knob: Knob, entry: Entry, problems: list[Problem]) -> bool:
    """Refuse what pydantic would quietly turn into something nobody meant."""
    message = None
    if isinstance(entry.value, bool) and knob.kind is not bool:
        message = "true/false (or yes/no, on/off) does not fit here"
    elif entry.value == "" and not knob.nullable:
        message = "the value is empty"
    if message is None:
        return True
    problems.append(
        Problem(knob.key, entry.origin, message, _fix(knob), None if knob.secret else _shown(entry.value))
    )
    return False


def _nested(layer: Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, entry in layer.items():
        *path, leaf = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        # In a file, "" is how one overrides a value with nothing; flags and variables do it in their layer.
        section[leaf] = None if entry.value == "" else entry.value
    return tree


def _explain(detail: ErrorDetails, layer: Layer) -> Problem:
    known = knobs()
    loc = [str(part) for part in detail["loc"]]
    key = next((k for n in range(len(loc), 0, -1) if (k := ".".join(loc[:n])) in known), None)
    message = detail["msg"].removeprefix("Value error, ")
    if key is None:  # a rule over several values: its message names them and the fix
        body, _, fix = message.rpartition(". ")
        where = _origins(layer, loc, message)
        return Problem(".".join(loc) or "settings", where, body or message, fix or "Change one of them")
    knob = known[key]
    origin = layer[key].origin if key in layer else "default"
    value = layer[key].value if key in layer else None
    if not knob.secret:
        return Problem(key, origin, _lower(message), _fix(knob), _shown(value))
    if knob.structured and isinstance(value, Mapping) and len(loc) > key.count(".") + 1:
        # The entry's number, not its name: somebody may have written the key where the name belongs.
        number = list(map(str, value)).index(loc[key.count(".") + 1]) + 1
        side = "name" if loc[-1] == "[key]" else "value"
        message = f"the {side} of entry {number} is refused: {_lower(message)}"
    return Problem(key, origin, _lower(message), _fix(knob))


def _origins(layer: Layer, loc: list[str], message: str) -> str:
    """Where the values came from that a rule over several of them speaks of."""
    section = ".".join(loc) + "." if loc else None
    entries = [e for key, e in layer.items() if key in message or (section and key.startswith(section))]
    return " and ".join(sorted({entry.origin for entry in entries})) or "the defaults"


def _fix(knob: Knob) -> str:
    if knob.key == "auth.api_keys":
        return (
            'Write {"my-team": "<a key of 16 to 256 characters>"}: visible ASCII without blanks in the key, '
            "small letters, digits, - and _ in the name"
        )
    return f"Allowed: {knob.allowed}"


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, dict, list)) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
