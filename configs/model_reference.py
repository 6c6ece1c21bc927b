"""What `model.path` names: the default model, a directory, a GGUF file, or a model of the Hugging Face hub.

Reads no model and imports nothing heavy, so that a command can look before it starts anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_NAME = "SmolLM2-135M-Instruct"
GGUF_SUFFIX = ".gguf"

# A path that does not exist is a hub id only if it looks like one: two plain words. Absolute paths and those
# that begin with a dot or `~` never do.
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./+-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub: `id` is `organisation/name`; `revision` a branch, a tag or a commit."""

    id: str
    revision: str = "main"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}"


def is_default(path: Path | None) -> bool:
    """Return whether `model.path` names the default model: nothing given, or its name."""
    return path is None or (str(path) == DEFAULT_NAME and not path.exists())


def hub_model(path: Path | None) -> HubModel | None:
    """Return the model of the hub that `model.path` names; None for all else. What exists here goes first."""
    match = None if path is None else _HUB.fullmatch(str(path))
    if path is None or match is None or path.suffix == GGUF_SUFFIX or path.exists():
        return None
    return HubModel(match[1], match[2] or "main")


def snapshot_of(directory: Path) -> HubModel | None:
    """Return the model and commit of a directory in the hub's cache; None for other directories."""
    parts = directory.parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not _COMMIT.fullmatch(parts[-1]):
        return None
    match = _HUB_FOLDER.fullmatch(parts[-3])
    return HubModel(f"{match[1]}/{match[2]}", parts[-1]) if match else None
