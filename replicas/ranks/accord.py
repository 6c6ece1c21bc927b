"""What all ranks of a replica do, or none: each says whether it could, before another relies on it.

Between two sums there is no way back: a rank that fails leaves the others waiting in the next one. So what
may fail for want of memory or of a compiler is first tried by each rank by itself, its sums left out, and
they agree on what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from samovar.replicas.forward import Capture
from samovar.replicas.model import is_device_lost
from samovar.replicas.ranks.channel import RankLost
from samovar.replicas.ranks.peers import Peers


class Unable(RuntimeError):
    """Another rank cannot do what all have to do, so that none does it."""


class Accord:
    """One matter that all ranks agree on, in several steps; who cannot go on says so in the next one."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._is_over = False

    @contextmanager
    def reached(self, *, apart: bool = False) -> Iterator[None]:
        """Go on behind this block if no rank has failed in it. `apart`: sums are left out.

        Raises what the block raises, `Unable` if only another rank's has failed, `RankLost` if one has died.
        """
        self._peers.is_apart = apart
        try:
            yield
        except Exception as error:
            self._peers.is_apart = False
            if not isinstance(error, RankLost) and not is_device_lost(error):
                self.agree(is_able=False)
            raise
        finally:
            self._peers.is_apart = False
        self.agree(is_able=True)

    def agree(self, *, is_able: bool) -> None:
        """Say whether this rank can go on. Raises `Unable` if it can and another cannot, `RankLost`."""
        if self._is_over:
            return  # in an inner step
        peers = self._peers
        try:
            first = peers.least(peers.ranks if is_able else peers.rank)
        except Exception as error:
            raise RankLost(f"the GPUs of the replica cannot agree: {error}") from error
        self._is_over = first < peers.ranks
        if is_able and self._is_over:
            raise Unable(f"GPU {first + 1} of the replica's {peers.ranks} cannot, and its log says why")


class SharedCapture:
    """Records on all ranks at the same time what each of them can launch."""

    def __init__(self, capture: Capture, accord: Accord) -> None:
        self._capture = capture
        self._accord = accord

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        with self._accord.reached(apart=True):
            launch()
        with self._accord.reached():
            replay = self._capture(launch)
        return replay
