"""Starts Ray for a test module: one at a time on a machine, and again if its node did not come up in time.

Ray gives its own node 30 s, which two services that start beside it may take.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import tempfile
from pathlib import Path
from typing import Any

import ray

from samovar.configs.sections import MIB
from tests.house import ROOT

TRIES = 3


def start_ray(**options: Any) -> None:
    """Raises what Ray raises if it did not start in `TRIES` times."""
    with (Path(tempfile.gettempdir()) / "samovar-tests-ray.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in reversed(range(TRIES)):
            try:
                ray.init(address="local", **options)
            except Exception:
                ray.shutdown()
                if not left:
                    raise
            else:
                return


def start_small_ray() -> None:
    """Start a Ray for actors of a test: two CPUs, and workers that find `tests`."""
    with contextlib.chdir(ROOT):
        start_ray(
            namespace="samovar-test",
            num_cpus=2,
            object_store_memory=100 * MIB,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
