"""A session moves to another node: how long its extents take over NIXL, by Ray's own way, and computed.

Two raylets on this machine with a real tier actor each. Records are stored on the one and fetched on the
other, as a replica there does it: lookup apart, the time is from asking the tier actor until the bytes can be
read, and the CPU what all processes of both nodes spend meanwhile. One extent of each size, and a session of
several at once. First over NIXL; then its link is broken, and the same goes by Ray. Each round moves extents
that nobody had before. `pull_ms` is the tier actor's own share: the peer's export, the transfer and the check
of every byte, without keeping it here.

With Ray's variables for TLS in the environment all of it is encrypted, and TLS of our own takes NIXL's place.

Both ways end in the same raylets: between real hosts the network decides, and the ratio is another one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from bench import _report as report
from samovar.cache_tiers.messages import Fetch, FetchFailed, PeerStats
from samovar.cache_tiers.pricing.meters import UNKNOWN_PREFILL
from samovar.configs.sections import MIB, CpuTierSettings, NvmeTierSettings, PeerSettings, TierSettings
from samovar.configs.tls import node_tls
from tests.support.nodes.node_harness import Sample
from tests.support.services.service import until
from tests.support.services.two_nodes import GET_S, Node, break_link, digest, start_node, two_raylets

SIZES_MIB = (1, 4, 16)
SESSION_EXTENTS, SESSION_MIB = 6, 4
BYTES_PER_TOKEN = 23040  # SmolLM2-135M in bfloat16
_numbers = itertools.count(1)


def store(giver: Node, taker: Node, nbytes: int, count: int) -> list[tuple[Sample, Fetch]]:
    """`count` new extents on `giver`, and how to ask for each on `taker`."""
    asks = []
    for _ in range(count):
        wanted = giver.store(next(_numbers), nbytes)
        header = wanted.header

        def stored(wanted: Sample = wanted) -> Any:
            return taker.look(wanted, giver.node_id).spans

        (span,) = until("it is stored", stored)
        names = (header.namespace, header.tenant, span.extent_id, span.offset, span.blocks, span.tier)
        asks.append((wanted, Fetch(*names, deadline_s=60.0, node=span.node)))
    return asks


def measure(giver: Node, taker: Node, way: str, nbytes: int, count: int, rounds: int) -> dict[str, Any]:
    """One row: medians of `rounds`, after one that warms up."""
    seconds: list[float] = []
    burnt: list[float] = []
    pulls: list[float] = []
    for warm in range(rounds + 1):
        asks = store(giver, taker, nbytes, count)
        before, before_s = of(taker, giver), cpu_s()
        took_s, came = ray.get(
            taker.stand.timed.remote(taker.actor, [fetch for _, fetch in asks]), timeout=GET_S
        )
        after, burnt_s = of(taker, giver), cpu_s() - before_s
        failed = [one for one in came if isinstance(one, FetchFailed)]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(asks)} fetches failed: {failed[0]}")
        if came != [digest(wanted.record) for wanted, _ in asks]:
            raise RuntimeError("other bytes arrived than were stored")
        if after.pulls.get(way, 0) - before.pulls.get(way, 0) != count:
            raise RuntimeError(f"not all came by {way}: {after}")
        if warm:
            seconds.append(took_s)
            burnt.append(burnt_s)
            pulls.append((after.seconds[way] - before.seconds.get(way, 0.0)) / count)
    total = nbytes * count
    tokens = total // BYTES_PER_TOKEN
    return {
        "what": f"{count} x {nbytes // MIB} MiB",
        "way": way,
        "ms": 1000 * statistics.median(seconds),
        "cpu_ms": 1000 * statistics.median(burnt),
        "GB_s": total / statistics.median(seconds) / 1e9,
        "pull_ms": 1000 * statistics.median(pulls),
        "pull_GB_s": nbytes / statistics.median(pulls) / 1e9,
        "tokens": tokens,
        "recompute_ms": 1000 * UNKNOWN_PREFILL.seconds(tokens, 0),
        "raw_ms": [1000 * s for s in seconds],
        "raw_cpu_ms": [1000 * s for s in burnt],
    }


def cpu_s() -> float:
    """CPU seconds of all processes of both nodes so far."""
    found = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent = process.cpu_times()
            found += spent.user + spent.system
    return found


def of(taker: Node, giver: Node) -> PeerStats:
    return taker.stats().peers.get(giver.node_id, PeerStats("up"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=list(SIZES_MIB))
    link = "nixl" if node_tls() is None else "tls"
    ways = (link, "ray")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--session-extents", type=int, default=SESSION_EXTENTS)
    arguments = parser.parse_args()
    cases = [(size * MIB, 1) for size in arguments.sizes_mib]
    cases.append((SESSION_MIB * MIB, arguments.session_extents))
    settings = TierSettings(
        cpu=CpuTierSettings(bytes_max=512 * MIB),
        nvme=NvmeTierSettings(bytes_max=0),
        peer=PeerSettings(lookup_s_max=30.0, pull_s_max=60.0, arena_bytes=128 * MIB),
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, two_raylets(1024 * MIB) as cluster:
        giver, taker = (
            start_node(raylet, settings, Path(folder) / str(number))
            for number, raylet in enumerate(cluster.list_all_nodes())
        )
        for way in arguments.ways:
            if way == "ray":
                ray.get(taker.actor.__ray_call__.remote(break_link), timeout=GET_S)
            rows += [measure(giver, taker, way, nbytes, count, arguments.rounds) for nbytes, count in cases]
        for node in (giver, taker):
            node.check()
    shown = [{name: value for name, value in row.items() if not name.startswith("raw_")} for row in rows]
    report.show("Extents between two nodes (medians)", shown)
    path = report.write("migrate", rows, recompute="SmolLM2-135M on one CPU core: cost.UNKNOWN_PREFILL")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
