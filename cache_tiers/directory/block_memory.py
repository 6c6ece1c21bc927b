"""What is remembered of blocks that are not there any more, within a bound. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Value = TypeVar("Value")

_NAME_BYTES = 8
"""Of a block's key: enough to tell blocks apart where a mistake costs a wrong word, not a wrong block."""


class BlockMemory(Generic[Value]):
    """A true value for each of the latest blocks: at most `blocks_max`, at least the last half of that.

    Two halves, of which the older one goes as a whole: no order is kept, so a block costs one entry.
    """

    def __init__(self, blocks_max: int) -> None:
        self._half = max(1, blocks_max // 2)
        self._new: dict[bytes, Value] = {}
        self._old: dict[bytes, Value] = {}

    def __len__(self) -> int:
        """Return the number of entries; a block that was put twice may have two."""
        return len(self._new) + len(self._old)

    def put(self, keys: Iterable[bytes], value: Value) -> None:
        """Remember `value` of these blocks, instead of what was remembered before."""
        for key in keys:
            self._new[key[:_NAME_BYTES]] = value
            if len(self._new) >= self._half:
                self._old, self._new = self._new, {}

    def of(self, keys: Iterable[bytes]) -> list[Value | None]:
        """Return what is remembered of each of these blocks."""
        new, old = self._new, self._old
        names = [key[:_NAME_BYTES] for key in keys]
        if not old:
            return list(map(new.get, names))
        return [new.get(name) or old.get(name) for name in names]

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget these blocks."""
        for key in keys:
            self._new.pop(key[:_NAME_BYTES], None)
            self._old.pop(key[:_NAME_BYTES], None)

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert len(self._new) < self._half, "more blocks are remembered than may be"
        assert len(self._old) <= self._half, "more old blocks are remembered than may be"
