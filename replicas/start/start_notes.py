"""Notes which stage of its start a replica is in, where the command that waits for it can read it.

A replica starts in a process of its own, and Serve says nothing about it until it runs. The note is a small
file, for display only: without it a start is as good, and says less.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

REPLICA_STAGES = ("tiers", "digest", "weights", "probe", "kernels", "graphs", "memory", "measure", "engine")
"""The stages of a replica's start, in their order: `probe` a CPU's, `kernels`, `graphs`, `memory` a GPU's."""
NOTE_CHARS_MAX = 64


class StartNotes:
    """The stages of one replica's start: a note while each lasts, and its seconds.

    `folder`: None writes nothing. `service`: what tells this start's notes from those of other services.
    """

    def __init__(
        self,
        folder: Path | None,
        service: str,
        replica_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = None if folder is None else folder / f"{service}-{replica_id}.txt"
        self._clock = clock
        self._stage = ""
        self._began_s = 0.0
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """The stages that are over, with the seconds that each took."""
        return tuple(self._seconds.items())

    def begin(self, stage: str) -> None:
        """End the stage before and begin this one; never raises for a file."""
        self._close()
        self._stage, self._began_s = stage, self._clock()
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(stage)
        except OSError as error:
            logger.info("the start's stages are not shown: %s", error)
            self._path = None

    def end(self) -> None:
        """End the last stage and remove the note."""
        self._close()
        self._stage = ""
        if self._path is not None:
            with suppress(OSError):  # left over, it is for display only
                self._path.unlink()

    def _close(self) -> None:
        if self._stage:
            taken_s = self._clock() - self._began_s
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + taken_s


def forget_notes(folder: Path, service: str) -> None:
    """Remove what replicas of an earlier start of `service` have left, if they were killed."""
    for path in folder.glob(f"{service}-*.txt"):
        with suppress(OSError):
            path.unlink()


def stage_noted(folder: Path, service: str) -> str | None:
    """Return the stage of the replica that is furthest behind; None: there is no note, or none is known."""
    stages = set()
    for path in folder.glob(f"{service}-*.txt"):
        with suppress(OSError, UnicodeDecodeError):  # it is written or removed just now
            stages.add(path.read_text()[:NOTE_CHARS_MAX])
    return next((stage for stage in REPLICA_STAGES if stage in stages), None)
