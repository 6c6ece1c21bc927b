"""Settings in two parts: what anybody may read, and the secrets. Put together again, they are the same.

Both parts are plain trees (YAML, JSON) as a configuration file has them. Knows no files and no formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from configs.knobs import knobs
from configs.settings import Settings

Tree = dict[str, Any]


def public_tree(settings: Settings) -> Tree:
    """Every value that is no secret."""
    tree = settings.model_dump(mode="json")
    return _picked(tree, [key for key, knob in knobs().items() if not knob.secret])


def secret_tree(settings: Settings) -> Tree:
    """The secrets that are set, in clear: never to be shown, logged, or put where others can read."""
    wanted = [key for key, knob in knobs().items() if knob.secret]
    return _without_empty(_picked(_revealed(settings.model_dump()), wanted))


def merged(public: Mapping[str, Any], secrets: Mapping[str, Any]) -> Settings:
    """Raises pydantic's `ValidationError`, whose text may quote secrets: show only its `loc` and `type`."""
    return Settings.model_validate(_deep(public, secrets))


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
    if isinstance(value, tuple):  # a tenant's keys; the only one is written as it is given
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
