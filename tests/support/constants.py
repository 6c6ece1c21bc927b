"""Constants of a section of the settings, moved for a test that would be slow with the product's."""

from __future__ import annotations

from typing import TypeVar

import pytest

from samovar.configs.sections import Section

S = TypeVar("S", bound=Section)


def tuned(section: S, **constants: object) -> S:
    """Return a copy of a section with other constants; a name that is no constant of it raises."""
    if unknown := constants.keys() - section.fixed().keys():
        raise ValueError(f"{type(section).__name__} has no constant {', '.join(sorted(unknown))}")
    return section.model_copy(update=constants)


def move(patch: pytest.MonkeyPatch, section: type[Section], **constants: object) -> None:
    """Set constants of a section for one test, in this process."""
    tuned(section(), **constants)
    for name, value in constants.items():
        patch.setattr(section, name, value)
