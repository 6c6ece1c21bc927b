"""The result of a diagnosis: a plain record that can be JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import ByteSize

State = Literal["holds", "clear", "unknown"]
"""holds: something is wrong; clear: the numbers say it is not; unknown: the numbers are not there."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting to change, or a deed if `setting` is empty. `brings`: what that would bring, in numbers."""

    setting: str
    now: Any
    to: Any
    brings: str
    deed: str = ""

    def __str__(self) -> str:
        what = self.deed or f"{self.setting}: {self.to_in_words} (now {self.now_in_words})"
        return f"{what}. {self.brings}" if self.brings else what

    @property
    def to_in_words(self) -> str:
        """The value to set, as it is written in a file; a size also in words."""
        return f"{self.to} = {in_bytes(self.to)}" if self._is_size(self.to) else shown(self.to)

    @property
    def now_in_words(self) -> str:
        """The value that is set."""
        return in_bytes(self.now) if self._is_size(self.now) else shown(self.now)

    def _is_size(self, value: Any) -> bool:
        return "bytes" in self.setting and bool(value)


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether one condition holds. `condition`: its name in `CONDITIONS`.

    `cause`: which variant of it, where it has some. `numbers`: what `evidence` says, for programs.
    """

    condition: str
    state: State
    evidence: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    changes: tuple[SettingChange, ...] = ()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, in the order of `CONDITIONS`.

    `period_s`: the time that the numbers cover; None: since the processes' start. `turns`: answers in it.
    """

    findings: tuple[Finding, ...]
    turns: int
    period_s: float | None = None

    @property
    def holding(self) -> tuple[Finding, ...]:
        """The findings that hold."""
        return tuple(one for one in self.findings if one.state == "holds")

    def json(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return asdict(self) | {"findings": [asdict(one) for one in self.findings]}


def shown(value: Any) -> str:
    """Return a setting's value as it is written in a file; `not set` for none."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def in_bytes(nbytes: float) -> str:
    """Return a size in words: `1.5 GiB`."""
    return ByteSize(nbytes).human_readable(separator=" ")


def in_seconds(seconds: float) -> str:
    """Return a time in words: `1.2 s`, `35 ms`."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:,.1f} ms"
