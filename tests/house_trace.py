"""Count what a reader passes: `python -m tests.house_trace` runs four roads and counts their files.

An in-process engine with its node, as the unit tests have it, on a tiny model: a turn that hits the pool, up
to its first token; the store of a turn into nvme; a restore from S3 (a stub server); and the second turn of a
streamed chat, with an ingress before them. Files and functions of our packages, all threads.
`tests/unit/repository/test_house_trace.py` holds `BOUNDS`. `--json`: the counts alone, as one line.
"""

from __future__ import annotations

import asyncio
import dis
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import httpx

from samovar.cache_tiers.blocks import Placement
from samovar.cache_tiers.media.s3 import S3Tier
from tests.house import PACKAGES, ROOT
from tests.support.engines.engines import prompt_of
from tests.support.engines.tier_engines import nvme, tiered
from tests.support.engines.tiny_models import make_tiny_model
from tests.support.nodes.s3_stub import s3_stub
from tests.support.router.router_harness import chat
from tests.support.traced_house import TracedHouse

COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")  # functions in Python 3.11, none from 3.12 on


@cache
def imports_of(code: CodeType) -> list[str]:
    """Modules of ours that a function imports when it runs; none of a module, whose imports are made once."""
    made = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
    return [name for name in made if code.co_name != "<module>" and name.startswith("samovar.")]


@contextmanager
def passed() -> Iterator[set[tuple[str, str]]]:
    """(file, function) of ours that run inside, in this thread and in those that start inside.

    An import of ours within a function that runs counts like a call, also where it has been made before.
    """
    seen: set[tuple[str, str]] = set()
    roots = tuple(f"{ROOT}/samovar/{package}/" for package in PACKAGES)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(roots) and code.co_name not in COMPREHENSIONS:
            seen.add((code.co_filename, code.co_qualname))
            seen.update((code.co_filename, f"import {name}") for name in imports_of(code))

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


def chat_turn(model: Path, folder: Path) -> set[tuple[str, str]]:
    """Pass the second turn of a chat, whose prefix is in the pool, to its store. No links, no proxy."""
    house = TracedHouse(model, folder, is_on=False)
    messages = [{"role": "user", "content": "What is a samovar? " * 8}]
    cached: list[int] = []

    async def turn(client: httpx.AsyncClient) -> None:
        body = {**chat(max_tokens=1, temperature=0, stream=True), "messages": messages}
        body["stream_options"] = {"include_usage": True}
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-session-id": "a"})
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
        cached.append(int(re.findall(r'"cached_tokens":\s*(\d+)', answer.text)[-1]))

    async def turns() -> set[tuple[str, str]]:
        async with house.client() as client:
            with passed() as seen:
                await turn(client)
                seen.clear()  # the threads that the first turn has started go on to be counted
                messages.extend(
                    [{"role": "assistant", "content": "An urn."}, {"role": "user", "content": "Why?"}]
                )
                await turn(client)
        assert cached[0] == 0 < cached[1], cached
        return seen

    try:
        return asyncio.run(turns())
    finally:
        house.close()


class Size(NamedTuple):
    """What a reader of a road passes."""

    files: int
    functions: int


ROADS: dict[str, Callable[[Path, Path], set[tuple[str, str]]]] = {
    "a pool hit, to the first token": pool_hit,
    "the store of a turn into nvme": store_to_nvme,
    "a turn restored from S3": restore_from_s3,
    "a streamed chat turn, ingress to store": chat_turn,
}
BOUNDS = {
    "a pool hit, to the first token": Size(52, 495),  # aim: 45 files, 380 functions with comprehensions
    "the store of a turn into nvme": Size(45, 253),
    "a turn restored from S3": Size(60, 843),
    "a streamed chat turn, ingress to store": Size(99, 1275),  # aim: 90 files
}
"""The most that a road may pass. These only fall: who shortens a road lowers its bound."""


def measure(name: str, model: Path, folder: Path) -> set[tuple[str, str]]:
    """Run the road `name` in an empty folder below `folder`."""
    place = folder / str(list(ROADS).index(name))
    place.mkdir()
    return ROADS[name](model, place)


def size(seen: set[tuple[str, str]]) -> Size:
    return Size(len({file for file, _ in seen}), len(seen))


def too_long(sizes: Mapping[str, Size]) -> list[str]:
    """Tell which of the roads pass more than their bound, one line each."""
    return [
        f"{name}: {sizes[name].files} files and {sizes[name].functions} functions, at most {bound.files}"
        f" and {bound.functions} may be"
        for name, bound in BOUNDS.items()
        if sizes[name].files > bound.files or sizes[name].functions > bound.functions
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        sizes = {name: size(measure(name, model, Path(folder))) for name in ROADS}
    if "--json" in sys.argv:
        print(json.dumps(sizes))
    else:
        for name, one in sizes.items():
            print(f"{name}: {one.files} files, {one.functions} functions")


if __name__ == "__main__":
    main()
