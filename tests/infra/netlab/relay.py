"""From a socket that listens anywhere to an address that only a host of a lab can reach.

One thread, which lives in the host's network; what it listens on stays where it was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable

from tests.infra.netlab.enter import enter_network

PART_BYTES = 65536
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing resets the connection."""


def tcp_listener(ip: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Listens in the network of the calling thread."""
    return socket.create_server((ip, port))


class Relay:
    """Forwards `listener`'s connections to what `where` says, asked for each, as the process `pid` sees it.

    `where` may raise OSError: the connection is reset then. `close` ends it all.
    """

    def __init__(
        self, pid: int, where: Callable[[], Awaitable[tuple[str, int]]], listener: socket.socket
    ) -> None:
        self._where = where
        self._listener = listener
        self.port = int(listener.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._failure: OSError | None = None
        self._entered = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pid,), name=f"relay-{self.port}", daemon=True)
        self._thread.start()
        self._entered.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends all connections and the thread. Again: nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, pid: int) -> None:
        try:
            enter_network(pid)
        except OSError as error:
            self._failure = error
            self._listener.close()
            self._loop.close()
            return
        finally:
            self._entered.set()
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listener))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
            self._loop.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: both ways until both have ended. What is refused or reset there is reset here."""
        there: asyncio.StreamWriter | None = None
        try:
            there_reader, there = await asyncio.open_connection(*await self._where())
            await asyncio.gather(_copy(reader, there), _copy(there_reader, writer))
        except OSError:
            _reset(writer)
            if there is not None:
                _reset(there)
        finally:
            writer.close()
            if there is not None:
                there.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(PART_BYTES):
        writer.write(part)
        await writer.drain()
    writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
