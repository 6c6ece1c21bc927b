"""The load balancer of the one-machine EC2: connections go to the first target that says it is healthy.

It has a target group of moto's, which knows targets and forwards nothing. Runs in the cloud's network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from tests.infra.netlab import Host
from tests.infra.netlab.enter import on_network
from tests.infra.netlab.relay import Relay, tcp_listener

HEALTH_S = 3.0
Address = tuple[str, int]


@contextlib.contextmanager
def balancing(host: Host, port: int, targets: Callable[[], list[Address]]) -> Iterator[None]:
    """Serves `host`'s address and `port`. `targets`: of its group; may block."""

    async def healthy() -> Address:
        for target in await asyncio.to_thread(targets):
            if await _is_healthy(target):
                return target
        raise ConnectionRefusedError("no target is healthy")

    listener = on_network(host.init_pid, lambda: tcp_listener(host.ip, port))
    relay = Relay(host.init_pid, healthy, listener)
    try:
        yield
    finally:
        relay.close()


async def _is_healthy(target: Address) -> bool:
    """As the target group asks: GET /health, 200."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(HEALTH_S):
            reader, writer = await asyncio.open_connection(*target)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: balancer\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False
