"""Count what a reader passes: `python -m tests.house_trace` runs three roads and counts their files.

An in-process engine with its node, as the unit tests have it, on a tiny model: a turn that hits the pool, up
to its first token; the store of a turn into nvme; a restore from S3 (a stub server). Files and functions of
our packages, all threads.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cache_tiers.blocks import Placement
from cache_tiers.media.s3 import S3Tier
from tests.house import PACKAGES, ROOT
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import nvme, tiered
from tests.support.engines.tiny_models import make_tiny_model
from tests.support.nodes.s3_stub import s3_stub


@contextmanager
def passed() -> Iterator[set[tuple[str, str]]]:
    """(file, function) of ours that run inside."""
    seen: set[tuple[str, str]] = set()
    roots = tuple(f"{ROOT}/{package}/" for package in PACKAGES)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(roots):
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def pool_hit(model: Path, folder: Path) -> set[tuple[str, str]]:
    engine = tiered(model, folder)
    answer = engine.run(prompt_of(60))
    with passed() as seen:
        key = engine.submit([*prompt_of(60), *answer.ids, *prompt_of(9, seed=1)])
        while not engine.driver.answers[key].token_ids:
            engine.driver.step()
    engine.drain()
    return seen


def store_to_nvme(model: Path, folder: Path) -> set[tuple[str, str]]:
    engine = tiered(model, folder, tiers={"nvme": nvme(folder)})
    engine.placement = Placement("nvme", (), "nvme")
    engine.submit(prompt_of(60))
    while engine.built.engine.has_work:
        engine.driver.step()
    with passed() as seen:
        engine.work()
    return seen


def restore_from_s3(model: Path, folder: Path) -> set[tuple[str, str]]:
    with s3_stub() as stub:
        engine = tiered(model, folder, tiers={"s3": S3Tier(stub.settings(), time.time)})
        engine.placement = Placement("s3", (), "s3")
        answer = engine.run(prompt_of(60))
        engine.forget_pool()
        with passed() as seen:
            engine.run([*prompt_of(60), *answer.ids, *prompt_of(9, seed=1)])
        engine.node.close()
    return seen


ROADS: dict[str, Callable[[Path, Path], set[tuple[str, str]]]] = {
    "a pool hit, to the first token": pool_hit,
    "the store of a turn into nvme": store_to_nvme,
    "a turn restored from S3": restore_from_s3,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        for number, (name, road) in enumerate(ROADS.items()):
            place = Path(folder) / str(number)
            place.mkdir()
            seen = road(model, place)
            print(f"{name}: {len({file for file, _ in seen})} files, {len(seen)} functions")


if __name__ == "__main__":
    main()
