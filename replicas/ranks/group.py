"""All ranks of a replica as rank 0 sees them: it starts them, leads them, and notices when one dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Protocol

import numpy as np
import torch

from samovar.replicas.forward import (
    AttentionBackend,
    Capture,
    ChosenAttention,
    GraphLimits,
    Runner,
    Same,
    Score,
    StepGraphs,
    StepInputs,
    StepShape,
)
from samovar.replicas.kv import KvGeometry, KvPool, PageIo
from samovar.replicas.model import ModelSpec
from samovar.replicas.ranks.accord import Accord, SharedCapture
from samovar.replicas.ranks.channel import RankLost
from samovar.replicas.ranks.meeting import Listener, MeetingFolder
from samovar.replicas.ranks.orders import Order, words_of
from samovar.replicas.ranks.page_io import SharedPageIo
from samovar.replicas.ranks.peers import Peers
from samovar.replicas.ranks.ring import Words
from samovar.replicas.ranks.weights import load_part
from samovar.replicas.ranks.worker import SOCKET, STORE, RankStart, agreed_attention, part_of
from samovar.replicas.scheduling import Chunk


class RankProcess(Protocol):
    """A rank above 0 that was started."""

    def failure(self) -> str | None:
        """Return why it has ended; None while it runs."""

    def stop(self) -> None:
        """End it if it has not ended by itself."""


Launch = Callable[[RankStart], RankProcess]


class RankGroup:
    """The ranks of one replica. Its constructor starts them, and returns when all can be told.

    Orders are for the engine's thread, `check` for any. After a failure inside a step the ranks no longer
    agree on which sum comes next: nothing is told any more, and the replica has to be replaced as a whole.

    `start`: rank 0's. Raises `RankLost` if one does not start.
    """

    def __init__(self, start: RankStart, device: torch.device, launch: Launch) -> None:
        self.ranks = start.ranks
        self._start = start
        self._failed: str | None = None
        self._is_on_trial = False
        self._processes: list[RankProcess] = []
        self._folder = MeetingFolder()
        folder = self._folder.path
        try:
            listener = Listener(folder / SOCKET)
            for rank in range(1, start.ranks):
                self._processes.append(launch(replace(start, rank=rank, folder=str(folder))))
            self._channels = listener.meet(
                start.channels,
                start.ranks,
                order_wait_s=start.engine.rank_wait_s,
                start_wait_s=start.start_wait_s,
                failure=self._failure,
            )
            self._peers = Peers(folder / STORE, 0, start.ranks, device, start.engine.stuck_step_s)
        except BaseException:
            self._stop_processes()
            raise

    def load(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """Load rank 0's part of the model, and wait until the others have theirs. Raises `ModelRefused`."""
        model = load_part(spec, dtype, device, self._peers)
        steps = self._channels.steps
        steps.await_done(steps.tell(Order.READY), self._start.start_wait_s)
        return model

    def choose_attention(
        self, model: torch.nn.Module, geometry: KvGeometry, device: torch.device
    ) -> ChosenAttention:
        """Choose the backend of all ranks. `geometry`: of whole blocks."""
        self.tell(Order.ATTENTION)
        return agreed_attention(model, part_of(geometry, self.ranks), device, self._peers)

    def least_memory(self, free_bytes: int) -> int:
        """Return the free memory of the rank that has the least. `free_bytes`: rank 0's."""
        self._channels.steps.tell(Order.LEAST_MEMORY)
        return self._peers.least(free_bytes)

    def make_pool(self, geometry: KvGeometry, pages: int, device: torch.device) -> KvPool:
        """Make the parts of a pool of whole blocks in all ranks; return rank 0's."""
        pool = KvPool(part_of(geometry, self.ranks), pages, device)
        steps = self._channels.steps
        steps.await_done(steps.tell(Order.POOL, words_of([pages])))
        return pool

    def page_io(self, geometry: KvGeometry, own: PageIo) -> SharedPageIo:
        """Return what moves whole blocks. `own`: of rank 0's part of the pool."""
        channels = self._channels
        staging = np.frombuffer(channels.staging, dtype=np.uint8)
        own.adopt(staging)
        return SharedPageIo(geometry, own, channels.moves, channels.steps, staging, self.ranks, self.fail)

    def tell(self, order: Order, *words: Words) -> None:
        """Tell the other ranks what rank 0 does next, inside of `together`. Raises `RankLost`."""
        self._channels.steps.tell(order, *words)

    def least(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return self._peers.least(number)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do what all ranks do at the same time. Raises `RankLost` for any failure: they no longer agree."""
        self.check()
        try:
            yield
        except Exception as error:
            if self._is_on_trial and not isinstance(error, RankLost):
                raise  # the others hear of it at the trial's end
            # Whatever it was, the others are in the midst of it.
            self.fail(f"what all ranks do failed on rank 0: {type(error).__name__}: {error}")
            self.check()

    @contextmanager
    def accord(self, order: Order, *words: Words, on_trial: bool = False) -> Iterator[Accord]:
        """Do what all ranks do or none, by an order: an error of one is no end, as the others hear of it.

        `on_trial`: the orders of this block are obeyed without sums, up to its end. Raises what the block
        raises, `Unable` if another rank could not, `RankLost`.
        """
        self.check()
        accord, self._is_on_trial = Accord(self._peers), on_trial
        try:
            with accord.reached(apart=on_trial):
                self.tell(order, *words)
                try:
                    yield accord
                finally:
                    if on_trial:
                        self.tell(Order.TRIED)
        except RankLost as lost:
            self.fail(str(lost))
            self.check()
        finally:
            self._is_on_trial = False

    def fail(self, why: str) -> None:
        """Say that the ranks no longer agree: `check` raises from now on."""
        self._failed = self._failed or why

    def check(self) -> None:
        """Raise `RankLost` if a rank has died or the ranks disagree. Returns at once; for any thread.

        It says what a rank has ended with, if that is known by now.
        """
        try:
            if self._failed is not None:
                raise RankLost(self._failed)
            self._channels.steps.check()
        except RankLost as lost:
            why = self._failure()
            if why is None:
                raise
            raise RankLost(f"{lost} ({why})") from lost

    def close(self) -> None:
        """End the other ranks."""
        self.fail("the ranks are stopped")
        self._channels.close()
        self._peers.close()
        self._stop_processes()

    def _stop_processes(self) -> None:
        for process in self._processes:
            process.stop()
        self._folder.remove()

    def _failure(self) -> str | None:
        return next((why for process in self._processes if (why := process.failure()) is not None), None)


class LeadingRunner(Runner):
    """Rank 0's runner: tells every step to the other ranks before it computes its own part."""

    def __init__(
        self,
        model: torch.nn.Module,
        pool: KvPool,
        backend: AttentionBackend,
        group: RankGroup,
        *,
        logit_rows_max: int,
    ) -> None:
        super().__init__(model, pool, backend, exact=False, logit_rows_max=logit_rows_max)
        self._group = group

    def run(
        self, chunks: Listing[Chunk], copies: Listing[tuple[int, int]] = (), score: Score | None = None
    ) -> torch.Tensor:
        """Do as `Runner.run`. Raises `RankLost` for any failure: the others are in the midst of the step."""
        with self._group.together():
            return super().run(chunks, copies, score)

    def _copy(self, copies: Listing[tuple[int, int]]) -> None:
        if copies:
            self._group.tell(Order.COPY, words_of([page for copy in copies for page in copy]))
        super()._copy(copies)

    def _pack(self, chunks: Listing[Chunk], shape: StepShape | None = None) -> StepInputs:
        inputs = super()._pack(chunks, shape)
        self._group.tell(Order.STEP, *self._packer.message(inputs))
        return inputs

    def record_steps(self, capture: Capture, limits: GraphLimits) -> StepGraphs:
        """Do as `Runner.record_steps`, on all ranks or on none. Raises `Unable` and `RankLost`, too.

        No step is computed behind another: the other ranks' words come from the host, tokens included.
        """
        with self._group.accord(Order.RECORD, words_of(astuple(limits))) as accord:
            graphs = super().record_steps(SharedCapture(capture, accord), limits)
        self.computes_behind = False
        return graphs

    def run_behind(self, chunks: Listing[Chunk], token_ids: torch.Tensor) -> torch.Tensor | None:
        """Return None: see `record_steps`."""
        return None

    def forget_graphs(self) -> None:
        with self._group.together():
            self._group.tell(Order.FORGET)
        super().forget_graphs()

    def try_out(self, steps: Callable[[], None]) -> None:
        """Run steps on each rank by itself, and if none has failed together: sums take memory, too."""
        with self._group.accord(Order.TRY, on_trial=True):
            steps()
        steps()

    def agrees(self, same: Same, ours: list[int], fresh: list[int], start: int, end: int) -> bool:
        with self._group.together():
            self._group.tell(Order.SAME, words_of([start, end, *ours, *fresh]))
            return bool(self._group.least(int(super().agrees(same, ours, fresh, start, end))))

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        super().close()
        self._group.close()


ENTRY = (
    "import sys; from samovar.replicas.ranks import serve_rank, start_of; serve_rank(start_of(sys.argv[1]))"
)
"""Not `-m`: this package imports this module, so that it would be there twice, and Python warns of that."""
_END_S = 10.0
"""A rank ends by itself when rank 0 closes the channels; after this it is killed."""


class RankSubprocess:
    """A rank in a process of its own, a `RankProcess`."""

    def __init__(self, start: RankStart) -> None:
        command = [sys.executable, "-c", ENTRY, start.as_json()]
        self._rank = start.rank
        env = os.environ | _its_gpu(start.rank, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)

    def failure(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"rank {self._rank} has ended with {code}; see its log"

    def stop(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _its_gpu(rank: int, visible: str | None) -> dict[str, str]:
    """Return what lets a rank see its own GPU only, of those `visible` to rank 0, which takes the first."""
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(rank)}
    gpus = [name for name in visible.split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": gpus[rank] if rank < len(gpus) else ""}
