"""Which tests of a run with several workers (xdist) stay together, because they share a service."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadFileScheduling

ONE_SERVICE = {"tests/api"}
"""Folders whose files share one service, that of their `conftest.py`."""


class ServiceScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a file's tests to one worker, in their order, and those of a folder in `ONE_SERVICE` as well.

    xdist's own groups (`--dist loadgroup`, the mark `xdist_group`) group nothing with pytest 9.2
    (pytest-xdist #1386): each service was started by both workers.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = PurePosixPath(nodeid.partition("::")[0])
        return str(path.parent if str(path.parent) in ONE_SERVICE else path)
