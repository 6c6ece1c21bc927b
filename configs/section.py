"""What all sections of the settings are made of: the base class, and units of size."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB


class Section(BaseModel):
    """Frozen, and a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
