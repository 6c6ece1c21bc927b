"""A node with a `cpu` tier behind the tiers' socket, and clients of it: for tests of the socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from samovar.cache_tiers.blocks import Bytes, TierName
from samovar.cache_tiers.media import SharedTier, Tier, shared
from samovar.cache_tiers.messages import Fetch, FetchFailed, Lookup, LookupResult
from samovar.cache_tiers.node.manager import NodeIdentity, NodeMedia, NodePorts, TierNode
from samovar.cache_tiers.node.store import CallFor
from samovar.cache_tiers.socket.client import SocketLink
from samovar.cache_tiers.socket.messages import Hello, Offer
from samovar.cache_tiers.socket.server import SocketLimits, TierSocket, call_brought
from samovar.cache_tiers.socket.wire import PROTOCOL, receive, send
from samovar.configs.sections import TierSettings
from tests.support.nodes.node_harness import MIB, Sample


def open_files() -> int:
    """How many file descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def settles(holds: Any, within_s: float = 30.0) -> None:
    """Wait until it holds."""
    ends_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.002)


def steady_count(count: Callable[[], int], readings: int = 25) -> int:
    """What is counted once it stands still, in readings 2 ms apart.

    A worker still holds a second descriptor of a record that it has just stored: whoever takes a first count
    then has one too many, and waits for it in vain.
    """
    seen: list[int] = []

    def stands_still() -> bool:
        seen.append(count())
        return len(seen) >= readings and len(set(seen[-readings:])) == 1

    settles(stands_still)
    return seen[-1]


class World:
    """A node with a `cpu` tier and its workers, behind a socket. `tiers`: others instead."""

    def __init__(
        self,
        folder: Path,
        *,
        files_max: int | None = None,
        frame_s: float = 10.0,
        call_for: CallFor | None = None,
        tiers: Mapping[TierName, Tier] | None = None,
    ) -> None:
        tiers = tiers or {"cpu": SharedTier(MIB, files_max)}
        self.node = TierNode(
            TierSettings(),
            NodeMedia(tiers, dict.fromkeys(tiers, MIB)),
            NodeIdentity("node", "life-1"),
            NodePorts(clock=time.monotonic, wall_clock=time.time, call_for=call_for or call_brought),
        )
        self.node.start()
        self.socket = TierSocket(self.node, folder / "tiers" / "t.sock", limits=SocketLimits(frame_s=frame_s))
        self.link = self.client()

    def client(self, **options: Any) -> SocketLink:
        return SocketLink(self.socket.path, "test", **options)

    def raw(self, *, greets: bool = True) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(str(self.socket.path))
        if greets:
            send(sock, ["hello", Hello(PROTOCOL, "raw")])
            assert receive(sock)[0][0]
        return sock

    def store(self, one: Sample) -> None:
        found = self.look(one)
        offer = Offer(one.record.nbytes, found.incarnation, found.clear_seq, 1.0)
        assert self.link.offer([(offer, shared(one.record))]) == ("taken",)
        settles(lambda: self.look(one).spans)

    def look(self, one: Sample) -> Any:
        header = one.header
        found = self.link.lookup(Lookup(header.namespace, one.chain, header.tenant, header.session))
        assert found is not None
        return found

    def close(self) -> None:
        self.link.close()
        self.socket.close()
        self.node.close()


def fetch_of(one: Sample, **changed: Any) -> Fetch:
    header = one.header
    made = Fetch(header.namespace, header.tenant, header.extent_id, 0, header.blocks, "cpu", 5.0)
    return replace(made, **changed)


class BySocket:
    """A way to a node (`tests/laws/tier_link.py`)."""

    def __init__(self, link: SocketLink) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def offer(self, one: Sample, found: LookupResult) -> str:
        offer = Offer(one.record.nbytes, found.incarnation, found.clear_seq)
        return self._link.offer([(offer, shared(one.record))])[0]

    def fetch(self, fetch: Fetch) -> tuple[int, Bytes] | FetchFailed:
        loaded = self._link.fetch(fetch)
        return loaded if isinstance(loaded, FetchFailed) else (loaded.first, loaded.data)
