"""Into the network of a host, for one thread of this process. A socket stays in the one it was made in."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000


def enter_network(pid: int) -> None:
    """The calling thread goes where the process `pid` is, for good. Raises OSError."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
    finally:
        os.close(namespace)


def on_network(pid: int, make: Callable[[], T]) -> T:
    """What `make` makes in that network, such as a listening socket. Raises what it raises."""
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            enter_network(pid)
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - handed on to the caller
            failed.append(error)

    thread = threading.Thread(target=run, name="netlab-enter")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
