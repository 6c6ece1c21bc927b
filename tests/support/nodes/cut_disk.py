"""A disk whose power goes: a file, served over FUSE below a loop device, that remembers each write and flush.

On the device is a real file system. What a cut leaves is every write before the last flush that was over, and
of those behind it any, by sectors: a drive's cache is written back in any order. As a program it serves
`FOLDER/disk`, of SIZE bytes, and writes `LOG`: `python -m tests.support.nodes.cut_disk FOLDER SIZE LOG`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SECTOR_BYTES = 512
ENTRY = struct.Struct("<QI")
"""Of the log: offset, bytes. Without bytes: a flush."""
STARTS_S_MAX = 30.0

# -- the server: the part of FUSE that a loop device asks for ------------------------------------------

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET = 17, 18, 20, 25, 26, 36, 38, 42
HEADER, ANSWER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
FOLDER_NODE, DISK_NODE = 1, 2
WRITE_BYTES_MAX = 1 << 17
BIG_WRITES = 1 << 5
FOR_EVER_S = 3600


class _Server:
    def __init__(self, fd: int, size: int, log: Path) -> None:
        self._fd = fd
        self._disk = bytearray(size)
        self._log = log.open("ab", buffering=0)

    def serve(self) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                asked = os.read(self._fd, WRITE_BYTES_MAX + 8192)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN):
                    continue
                return
            _, code, unique, node, *_ = HEADER.unpack_from(asked)
            if code in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            told = self._answer(code, node, memoryview(asked)[HEADER.size :])
            failed, body = (told, b"") if isinstance(told, int) else (0, told)
            os.write(self._fd, ANSWER.pack(ANSWER.size + len(body), -failed, unique) + body)

    def _answer(self, code: int, node: int, body: memoryview) -> bytes | int:
        if code == INIT:
            _, _, ahead, _ = struct.unpack_from("<IIII", body)
            head = struct.pack(
                "<IIIIHHIIHHII", 7, 31, ahead, BIG_WRITES, 0, 0, WRITE_BYTES_MAX, 1, 0, 0, 0, 0
            )
            return head.ljust(64, b"\0")
        if code in (GETATTR, SETATTR):
            return struct.pack("<QII", FOR_EVER_S, 0, 0) + self._attributes(node)
        if code == LOOKUP:
            if bytes(body).rstrip(b"\0") != b"disk":
                return errno.ENOENT
            head = struct.pack("<QQQQII", DISK_NODE, 0, FOR_EVER_S, FOR_EVER_S, 0, 0)
            return head + self._attributes(DISK_NODE)
        if code == OPEN:
            return struct.pack("<QII", 1, 0, 0)
        if code == READ:
            _, at, nbytes = struct.unpack_from("<QQI", body)
            return bytes(self._disk[at : at + nbytes])
        if code == WRITE:
            _, at, nbytes = struct.unpack_from("<QQI", body)
            data = body[40 : 40 + nbytes]
            self._disk[at : at + nbytes] = data
            self._log.write(ENTRY.pack(at, nbytes) + data)
            return struct.pack("<II", nbytes, 0)
        if code == FSYNC:
            self._log.write(ENTRY.pack(0, 0))
            return b""
        if code == STATFS:
            return struct.pack("<QQQQQIIII", len(self._disk) // 4096, 0, 0, 1, 0, 4096, 255, 4096, 0).ljust(
                80, b"\0"
            )
        return b"" if code in (RELEASE, FLUSH, DESTROY) else errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        is_disk = node == DISK_NODE
        size, mode = (len(self._disk), 0o100600) if is_disk else (0, 0o040700)
        return ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _serve(folder: str, size: str, log: str) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"cut_disk", folder.encode(), b"fuse", 0, options.encode()):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    _Server(fd, int(size), Path(log)).serve()


# -- the disk, for tests -------------------------------------------------------------------------------


class CutDisk:
    """What was written to the disk so far."""

    def __init__(self, log: Path, size: int) -> None:
        self._log = log
        self._size = size

    def now(self) -> int:
        """Return the moment, for `images`: what was answered before it is before it."""
        return self._log.stat().st_size

    def images(self, moments: list[int], into: Path, rng: random.Random) -> Iterator[int]:
        """Yield each moment, in order, when `into` is what the disk has if the power goes then."""
        image, volatile = bytearray(self._size), list[tuple[int, bytes]]()
        with self._log.open("rb") as log:
            for moment in sorted(moments):
                while log.tell() < moment:
                    at, nbytes = ENTRY.unpack(log.read(ENTRY.size))
                    data = log.read(nbytes)
                    if nbytes:
                        volatile.append((at, data))
                        continue
                    for place, written in volatile:
                        image[place : place + len(written)] = written
                    volatile.clear()
                left, share = bytearray(image), rng.choice((0.0, 0.5, 0.9, 1.0))
                for place, written in volatile:
                    for sector in range(0, len(written), SECTOR_BYTES):
                        if rng.random() < share:
                            part = written[sector : sector + SECTOR_BYTES]
                            left[place + sector : place + sector + len(part)] = part
                into.write_bytes(left)
                yield moment


def _run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


@contextmanager
def cut_disk(folder: Path, log: Path, size: int) -> Iterator[tuple[CutDisk, Path]]:
    """An ext4 on such a disk, mounted at the path that comes with it. Skips where that cannot be."""
    devices = all(map(os.path.exists, ("/dev/fuse", "/dev/loop-control")))
    if os.geteuid() != 0 or not devices or not all(map(shutil.which, ("mkfs.ext4", "losetup"))):
        pytest.skip("a disk whose power goes needs root, /dev/fuse, loop devices and mkfs.ext4")
    served, mounted = folder / "served", folder / "mounted"
    served.mkdir()
    mounted.mkdir()
    command = [sys.executable, "-m", "tests.support.nodes.cut_disk", str(served), str(size), str(log)]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        ends_s = time.monotonic() + STARTS_S_MAX
        while not (served / "disk").exists():
            if server.poll() is not None:
                pytest.skip(f"no FUSE: {server.stderr.read() if server.stderr else ''}")
            assert time.monotonic() < ends_s, "FUSE does not answer"
            time.sleep(0.01)
        with ExitStack() as stack:
            try:
                _run("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", served / "disk")
                stack.enter_context(looped(served / "disk", mounted))
            except AssertionError as why:  # a container's root may hold a device and may not use it
                pytest.skip(f"no ext4 on a loop device: {why}")
            yield CutDisk(log, size), mounted
    finally:
        subprocess.run(["umount", "--lazy", str(served)], check=False)
        server.terminate()
        server.wait()


@contextmanager
def looped(image: Path, mounted: Path) -> Iterator[None]:
    """Mount the file system in a file."""
    device = _run("losetup", "--find", "--show", image)
    try:
        _run("mount", "-o", "nodiscard", device, mounted)
        try:
            yield
        finally:
            _run("umount", mounted)
    finally:
        _run("losetup", "--detach", device)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
