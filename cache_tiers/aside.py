"""Small files of ours that cannot be read: kept for a look, and out of the way of the next start."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("samovar.tiers")

BAD = ".bad"


def put_aside(path: Path) -> Path | None:
    """Rename to `.bad`, of mode 0600, over an older one; where to. None when it cannot be. Never raises.

    What is a directory, a link or a pipe is renamed as it is: only a file of ours gets another mode.
    """
    bad = path.with_suffix(BAD)
    try:
        path.rename(bad)
    except OSError as error:
        logger.error("%s cannot be put aside: %s", path.name, error.strerror)
        return None
    with suppress(OSError):  # no file, or not ours: then its mode is not our business
        fd = os.open(bad, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
    return bad
