"""Two processes for `test_link_squatters.py`: one that is killed, and another user's that takes its port.

`python -m tests.faults.dead_listener listen`: an ingress that answers every request, until it is killed.
`python tests/faults/dead_listener.py squat PORT HOW`: prints its user's id, and at the end of its input all
that it was told, in hex. Of this module it uses the standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import socket
import sys

NOBODY = 65534
WELCOME = b"\x90"
"""An empty batch: once any byte at all was a welcome."""


async def listen() -> None:
    """Take requests over links; print where, with the secret."""
    from starlette.responses import PlainTextResponse

    from samovar.replicas.links import Inlet
    from samovar.router.ingress.taker import RequestTaker
    from samovar.router.proxy import ADDRESS
    from tests.support.router.linked_replicas import LINKS, LOOPBACK

    taker = RequestTaker(Inlet(LOOPBACK, LINKS, 0.0), 60.0)
    taker.app = PlainTextResponse("from the ingress that will die")
    print(json.dumps((await taker.listen())[ADDRESS]), flush=True)
    await asyncio.Event().wait()


def squat(port: int, how: str) -> None:
    """Listen on another's port, as another user where we may change it, and play one who knows no secret."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        server.bind(("127.0.0.1", port))
        server.listen()
        print(os.geteuid(), flush=True)
        told = _play(server, how)
    print(bytes(told).hex(), flush=True)


def _play(server: socket.socket, how: str) -> bytearray:
    """Return all that was told until our input ends. `how`: what is said to who connects, and speaks."""
    first = {"welcome": WELCOME, "number": os.urandom(32), "proof": os.urandom(64)}[how]
    told = bytearray()
    with selectors.DefaultSelector() as events:
        events.register(server, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is sys.stdin:
                    return told
                if key.fileobj is server:
                    made, _ = server.accept()
                    events.register(made, selectors.EVENT_READ)
                    _say(made, first)
                    continue
                assert isinstance(key.fileobj, socket.socket)
                if data := _heard(key.fileobj):
                    told += data
                    _say(key.fileobj, data[-32:] + WELCOME)  # its own proof back, and that all is well
                else:
                    events.unregister(key.fileobj)
                    key.fileobj.close()


def _heard(made: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return made.recv(1 << 16)
    return b""


def _say(made: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        made.sendall(data)


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        asyncio.run(listen())
    else:
        squat(int(sys.argv[2]), sys.argv[3])
