"""How the ranks of a replica meet: a socket in a private folder, through which rank 0 passes shared memory.

The memory has no name: of a replica that was killed only the folder may be left, which the next replica of
this machine removes: Ray kills the ranks of a killed replica, often before they have done so.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samovar.replicas.ranks.channel import Obeyed, Orders, RankLost
from samovar.replicas.ranks.ring import Memory, RingReader, RingShape, RingWriter

RING_SLOTS = 4
"""Steps wait for each other at every layer, so a rank is never further behind than a step or two."""

_HELLO = struct.Struct("<ii")  # rank, channel
_LOOK_S = 0.2


def shared_memory(nbytes: int, name: str) -> int:
    """Create shared memory of zeros without a name in the file system; return its file descriptor."""
    descriptor = os.memfd_create(f"samovar-{name}")
    os.ftruncate(descriptor, max(nbytes, mmap.PAGESIZE))
    return descriptor


def mapped(descriptor: int) -> Memory:
    """Map all of a descriptor's memory, and close the descriptor."""
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """Sizes of what the ranks share: the rings of steps and of moves, and the staging memory of moves."""

    step_words: int
    move_words: int
    staging_bytes: int

    @property
    def steps(self) -> RingShape:
        return RingShape(RING_SLOTS, self.step_words)

    @property
    def moves(self) -> RingShape:
        return RingShape(RING_SLOTS, self.move_words)


@dataclass(frozen=True, slots=True)
class LeaderChannels:
    """Rank 0's ends of the channels."""

    steps: Orders
    moves: Orders
    staging: Memory

    def close(self) -> None:
        """Close the channels: the ranks then end."""
        self.steps.close()
        self.moves.close()


@dataclass(frozen=True, slots=True)
class RankChannels:
    """A rank's ends of the channels."""

    steps: Obeyed
    moves: Obeyed
    staging: Memory

    def close(self) -> None:
        """Wake both threads, which then end."""
        self.steps.close()
        self.moves.close()


FOLDERS = "samovar-ranks-"


class MeetingFolder:
    """A private folder that its process holds by a lock as long as it lives. Removes those of the dead."""

    def __init__(self) -> None:
        _sweep()
        made = tempfile.mkdtemp(prefix="samovar-making-")
        self._held = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_EX)
        # It gets the name by which it is swept once it is held.
        self.path = Path(made).rename(made.replace("samovar-making-", FOLDERS))

    def remove(self) -> None:
        """Remove it with all that is in it. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its replica lives
            continue
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(held)


class Listener:
    """Waits for the ranks at a socket in a folder that only this user may enter."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()

    def meet(
        self,
        plan: ChannelPlan,
        ranks: int,
        *,
        order_wait_s: float,
        start_wait_s: float,
        failure: Callable[[], str | None],
    ) -> LeaderChannels:
        """Wait until ranks 1 to `ranks - 1` have connected, and give them the shared memory.

        `failure`: why the ranks will not come, if that is known. Raises `RankLost`.
        """
        memory = [
            shared_memory(plan.steps.nbytes, "steps"),
            shared_memory(plan.moves.nbytes, "moves"),
            shared_memory(plan.staging_bytes, "staging"),
        ]
        bells: dict[tuple[int, int], socket.socket] = {}
        ends_s = time.monotonic() + start_wait_s
        self._socket.settimeout(_LOOK_S)
        while len(bells) < 2 * (ranks - 1):
            try:
                bell, _ = self._socket.accept()
            except TimeoutError:
                why = failure()
                if why is None and time.monotonic() >= ends_s:
                    why = f"{2 * (ranks - 1) - len(bells)} connections are missing after {start_wait_s:g} s"
                if why is not None:
                    raise RankLost(f"the ranks did not start: {why}") from None
                continue
            bell.settimeout(start_wait_s)
            hello = _hello_of(bell)
            if hello is None:
                continue  # `failure` says why, or it is missed at the end
            rank, channel = hello
            if not (1 <= rank < ranks and channel in (0, 1)) or (channel, rank) in bells:
                raise RankLost(f"something else than a rank has connected: it says {rank}, {channel}")
            socket.send_fds(bell, [b"\0"], memory)
            bell.settimeout(None)
            bells[channel, rank] = bell
        self._socket.close()
        ends = [
            Orders(
                RingWriter(ring, shape),
                shape,
                [bells[channel, rank] for rank in range(1, ranks)],
                order_wait_s,
            )
            for channel, (shape, ring) in enumerate(
                ((plan.steps, mapped(memory[0])), (plan.moves, mapped(memory[1])))
            )
        ]
        return LeaderChannels(ends[0], ends[1], mapped(memory[2]))


def _hello_of(bell: socket.socket) -> tuple[int, int] | None:
    """Return the rank and the channel that the other side names; None: it has gone, or says nothing."""
    try:
        said = bell.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        said = b""
    if len(said) < _HELLO.size:
        bell.close()
        return None
    rank, channel = _HELLO.unpack(said)
    return rank, channel


def connect(path: Path, plan: ChannelPlan, rank: int, wait_s: float) -> RankChannels:
    """Connect a rank to its rank 0. Raises `OSError` if that does not answer within `wait_s`."""
    steps, memory = _connect(path, rank, 0, wait_s)
    moves, again = _connect(path, rank, 1, wait_s)
    for descriptor in again:
        os.close(descriptor)
    return RankChannels(
        Obeyed(RingReader(mapped(memory[0]), plan.steps), steps),
        Obeyed(RingReader(mapped(memory[1]), plan.moves), moves),
        mapped(memory[2]),
    )


def _connect(path: Path, rank: int, channel: int, wait_s: float) -> tuple[socket.socket, list[int]]:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bell.settimeout(wait_s)
    bell.connect(str(path))
    bell.sendall(_HELLO.pack(rank, channel))
    _, memory, _, _ = socket.recv_fds(bell, 1, 3)
    if len(memory) != 3:
        raise ConnectionError("rank 0 has not sent its memory")
    bell.settimeout(None)
    return bell, memory
