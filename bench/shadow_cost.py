"""What the shadow of least recently used costs a node: `python -m bench.shadow_cost`.

A node with conversations of ten turns in main memory, each turn 16 blocks. CPU of the thread, medians: of a
lookup that begins a turn, of its append to the shadow's log, of the replay of that by the node's tick, and of
what the node does for a turn besides (its learning step and forecast). Bytes of the shadow: `tracemalloc`.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from bench import _report as report
from samovar.cache_tiers.blocks import CPU, NVME, BlockShape, ChainMarks
from samovar.cache_tiers.messages import TurnEnded
from samovar.cache_tiers.policy import ShadowLru
from tests.support.nodes.node_harness import TENANT
from tests.support.nodes.turn_player import StoredRun, TurnPlayer, key_of, tag_of

SHAPE = BlockShape(layers=1, layer_bytes=64, block_tokens=16)
TURNS, TURN_BLOCKS = 10, 16


def keys_of(session: int, turns: int) -> list[bytes]:
    """The keys of a conversation's blocks after so many turns."""
    return [key_of(session << 20 | at) for at in range(turns * TURN_BLOCKS)]


def cpu_us(what: Callable[[], object]) -> float:
    """The thread's CPU of one call."""
    began_s = time.thread_time()
    what()
    return (time.thread_time() - began_s) * 1e6


def measure(sessions: int) -> dict[str, float]:
    """One node, filled, then asked again by each conversation."""
    room = sessions * TURNS * TURN_BLOCKS * 8  # headers are larger than these payloads
    player = TurnPlayer("learned", SHAPE, room)
    node, shadow = player.node.node, player.node.node.resumption.shadow
    for turn in range(1, TURNS + 1):
        for session in range(sessions):
            player.node.clock.now_s += 0.01
            keys = keys_of(session, turn)
            player.store(keys, tag_of(session), player.begin(keys, tag_of(session)))
            node.tick()
    log = shadow.log
    costs: dict[str, list[float]] = {name: [] for name in ("lookup", "append", "replay", "turn")}
    for session in range(sessions):
        player.node.clock.now_s += 0.01
        keys, tag = keys_of(session, TURNS), tag_of(session)
        costs["lookup"].append(cpu_us(partial(player.begin, keys, tag)))
        costs["append"].append(cpu_us(partial(log.append, log.pop())))
        costs["replay"].append(cpu_us(shadow.work))
        over = TurnEnded(TENANT, tag, 1.0, 160, 10, ChainMarks(), SHAPE.block_tokens)
        costs["turn"].append(cpu_us(node.resumption.work) + cpu_us(partial(node.resumption.turn_over, over)))
    middle = {name: median(each) for name, each in costs.items()}
    return {
        "extents": len(shadow),
        **{f"{name}_us": value for name, value in middle.items()},
        "on_the_road_share": middle["append"] / middle["lookup"],
        "replay_share": middle["replay"] / (middle["lookup"] + middle["turn"]),
        "bytes_an_extent": bytes_an_extent(sessions),
    }


def bytes_an_extent(sessions: int) -> float:
    """Python's memory of a shadow of two tiers that holds so many conversations."""
    runs = [
        StoredRun(b"".join(keys_of(session, turn)[(turn - 1) * TURN_BLOCKS :]))
        for turn in range(1, TURNS + 1)
        for session in range(sessions)
    ]
    shadow = ShadowLru({CPU.name: 1 << 50, NVME.name: 1 << 50}, lambda: 0.0)
    gc.collect()
    tracemalloc.start()
    for run in runs:
        shadow.log.append((run, 1 << 16))
        shadow.work()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held / len(shadow)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=500)
    args = parser.parse_args(argv)
    rows = [measure(args.sessions)]
    report.show("the shadow of least recently used", rows)
    print(f"written: {report.write('shadow_cost', rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
