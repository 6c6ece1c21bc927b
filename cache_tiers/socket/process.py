"""A node's tiers in a process of their own, without Ray: what `samovar tiers` runs.

Also `python -m samovar.cache_tiers.socket`, in an environment that has only what the tiers need.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from samovar.cache_tiers.blocks import SumsSetup, compile_sums
from samovar.cache_tiers.media import SharedTier
from samovar.cache_tiers.messages import NodeStats
from samovar.cache_tiers.node import (
    START_SCAN_S_MAX,
    STARTS_FILE,
    TICK_S,
    KillPoint,
    NodeIdentity,
    NodePorts,
    TierNode,
    build_tiers,
    count_start,
)
from samovar.cache_tiers.node_metrics import node_metrics
from samovar.cache_tiers.socket.server import SocketLimits, TierSocket, call_brought
from samovar.configs.sections import TierSettings
from samovar.configs.settings import Settings

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Keys

logger = logging.getLogger(__name__)

HTTP_WAIT_S = 5.0
SWITCH_S = 5e-4
"""A thread gives way to another's call after so long: a lookup waits as often as there are calls at once."""


class TierProcess:
    """A node, its socket, and its HTTP port on loopback (`/health`, `/metrics`).

    `port`: 0 = any free one, None = no port. Raises `OSError` if the socket or the port is taken.
    """

    def __init__(self, settings: Settings, path: Path, *, port: int | None = None) -> None:
        tiers, nvme_dir = settings.tiers, settings.nvme_dir
        incarnation = uuid.uuid4().hex
        media = build_tiers(
            tiers, nvme_dir, make_cpu=SharedTier, wall_clock=time.time, keys=_own_keys(tiers, nvme_dir)
        )
        starts, self._bad_files = 1, 0
        if media.pending_path is not None:
            starts, self._bad_files = count_start(nvme_dir / STARTS_FILE, "tiers")
        self._flush_s = tiers.flush_s
        self._over = threading.Event()
        self.node = TierNode(
            tiers,
            media,
            NodeIdentity(socket.gethostname(), incarnation, restarts=starts - 1),
            NodePorts(
                clock=time.monotonic,
                wall_clock=time.time,
                call_for=call_brought,
                reach=KillPoint(tiers.faults, starts),
            ),
        )
        self.http: ThreadingHTTPServer | None = None
        try:
            if port is not None:
                self.http = _http(port, self._is_well, self.stats)
            self.socket = TierSocket(self.node, path.expanduser(), limits=SocketLimits.of(tiers))
        except OSError:
            self._close_http()
            self.node.close()
            raise
        self.node.start(START_SCAN_S_MAX)
        threading.Thread(target=self._tick, name="tiers-tick", daemon=True).start()

    def stats(self) -> NodeStats:
        """Return the node's counters."""
        stats = self.node.stats()
        return replace(stats, bad_files=stats.bad_files + self._bad_files)

    def close(self) -> dict[str, int]:
        """Write to disk what only main memory holds, within `tiers.flush_s`, and end. Returns the extents."""
        self._over.set()
        self.socket.close()
        done = self.node.flush(self._flush_s) if self._flush_s > 0 else {}
        self._close_http()
        self.node.close()
        return done

    def _close_http(self) -> None:
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()

    def _is_well(self) -> bool:
        return not self._over.is_set()

    def _tick(self) -> None:
        while not self._over.wait(TICK_S):
            try:
                self.node.tick()
            except Exception:  # logged; retry at the next tick
                logger.exception("a tick failed")


def _own_keys(tiers: TierSettings, nvme_dir: Path) -> Keys | None:
    """Return the keys of this machine's records; None: they are not encrypted."""
    if tiers.encryption_key_file is None:
        return None
    try:
        from samovar.cache_tiers.encryption import KEYS_FILE, SessionKeyFile, open_outer
    except ImportError as error:  # an environment that is not Samovar's own
        raise OSError(f"tiers.encryption_key_file needs the package cryptography: {error}") from error

    path = nvme_dir / KEYS_FILE
    outer = open_outer(tiers.encryption_key_file, path)
    return SessionKeyFile(path, outer, wall_clock=time.time)


def serve_tiers(settings: Settings, path: Path, *, port: int | None, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. `say`: prints a line."""
    _raise_files_max()
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=settings.telemetry.log_level.upper(), format="samovar tiers: %(message)s")
    compile_sums(SumsSetup.of(settings))
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        process = TierProcess(settings, path, port=port)
    except OSError as error:
        say(f"samovar tiers: {error}")
        return 1
    up = [tier for tier in process.stats().tiers if tier.state == "up"]
    tiers = ", ".join(f"{tier.name} {tier.bytes_max / 2**30:.1f} GiB" for tier in up)
    where = "" if process.http is None else f"; http://127.0.0.1:{process.http.server_port}/metrics"
    say(f"samovar tiers: ready at {process.socket.path} ({tiers or 'no tier'}){where}")
    over.wait()
    done = process.close()
    counts = ", ".join(f"{count} {name}" for name, count in done.items() if count)
    say(f"samovar tiers: ended; extents of main memory: {counts or 'all on disk already'}")
    return 0


def main(words: Sequence[str] | None = None, prog: str = "samovar tiers", also: str | None = None) -> int:
    """Serve tiers as command-line words say. `prog`: its name; `also`: what its help says at the end."""
    from samovar.configs.loader import ConfigError, load

    parser = argparse.ArgumentParser(
        prog,
        description="Serve cache tiers to engines on this machine. Other flags are settings: --tiers.X VALUE",
        epilog=also,
    )
    parser.add_argument("--socket", type=Path, required=True, help="path of the Unix socket")
    parser.add_argument("--config", help="settings file or preset")
    parser.add_argument("--metrics-port", type=int, help="of /health and /metrics on 127.0.0.1; 0 = any")
    given, rest = parser.parse_known_args(words)
    try:
        settings = load(given.config, os.environ, rest).settings
    except ConfigError as error:
        print(f"samovar tiers: {error}", file=sys.stderr)
        return 2
    return serve_tiers(
        settings, given.socket, port=given.metrics_port, say=lambda line: print(line, flush=True)
    )


def _raise_files_max() -> None:
    """Allow this process as many files as it may have: each record in main memory is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _NodeCollector(Collector):
    def __init__(self, stats: Callable[[], NodeStats]) -> None:
        self._stats = stats

    def collect(self):  # type: ignore[no-untyped-def]
        return node_metrics([self._stats()])


def _http(port: int, is_well: Callable[[], bool], stats: Callable[[], NodeStats]) -> ThreadingHTTPServer:
    registry = CollectorRegistry()
    registry.register(_NodeCollector(stats))

    class Handler(BaseHTTPRequestHandler):
        timeout = HTTP_WAIT_S

        def do_GET(self) -> None:
            if self.path == "/health":
                self._say(200 if is_well() else 503, "text/plain", b"ok\n" if is_well() else b"ending\n")
            elif self.path == "/metrics":
                self._say(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            else:
                self._say(404, "text/plain", b"there are /health and /metrics\n")

        def _say(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:  # above 65535, or below 0
        why = error.strerror if isinstance(error, OSError) else "no port has this number"
        raise OSError(f"--metrics-port {port}: {why}; choose another, 0 = any free one") from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="tiers-http", daemon=True).start()
    return server
