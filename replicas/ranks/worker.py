"""A rank above 0: a process that holds its part of the model and of every block, and obeys.

It knows no request, no prefix and no tier. Steps run on the thread that calls `serve`, moves of blocks on a
second one: a copy does not stop a step, and a step does not stop a copy.
"""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from samovar.configs.settings import EngineSettings
from samovar.replicas.engine import same_slots
from samovar.replicas.forward import (
    AttentionBackend,
    ChosenAttention,
    GatherSdpa,
    GraphLimits,
    Runner,
    StepInputs,
    choose_attention,
    open_capture,
)
from samovar.replicas.kv import KvGeometry, KvPool, PageIo, free_memory_bytes, page_io
from samovar.replicas.model import choose_device, inspect_model, is_device_lost
from samovar.replicas.ranks.accord import Accord, SharedCapture, Unable
from samovar.replicas.ranks.channel import RankLost, ReplicaGone
from samovar.replicas.ranks.meeting import ChannelPlan, connect
from samovar.replicas.ranks.orders import Order
from samovar.replicas.ranks.page_io import copy_runs
from samovar.replicas.ranks.peers import Peers
from samovar.replicas.ranks.ring import RingMessage, Words
from samovar.replicas.ranks.weights import load_part

logger = logging.getLogger(__name__)

SOCKET, STORE = "ranks.sock", "ranks.store"
"""In the ranks' folder: where they meet rank 0, and each other."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is told at its start, as JSON. `start_wait_s`: how long rank 0 may take to answer."""

    rank: int
    ranks: int
    folder: str
    model_dir: str
    dtype: str
    threads: int
    channels: ChannelPlan
    engine: EngineSettings
    start_wait_s: float
    inspected_dir: Path | None = None

    def as_json(self) -> str:
        return _START.dump_json(self).decode()


_START = TypeAdapter(RankStart)


def start_of(text: str) -> RankStart:
    """Return the start that `RankStart.as_json` wrote. Raises `ValueError`."""
    return _START.validate_json(text)


def part_of(geometry: KvGeometry, ranks: int) -> KvGeometry:
    """Return the layout of one rank's part of a block: consecutive groups, a contiguous run of its bytes."""
    return replace(geometry, kv_heads=geometry.kv_heads // ranks, groups=geometry.groups // ranks)


def agreed_attention(
    model: torch.nn.Module,
    geometry: KvGeometry,
    device: torch.device,
    peers: Peers,
) -> ChosenAttention:
    """Choose one rank's backend: the kernel if all ranks take it, as rank 0 cuts the query tiles for all.

    `geometry`: of this rank's part.
    """
    chosen = choose_attention(model, geometry, device, exact=False)
    tiling = chosen.backend.tiling
    cut = 0 if tiling is None else (tiling.rows << 40) + (tiling.decodes << 20) + tiling.others
    if peers.least(cut) == -peers.least(-cut):
        return chosen
    sdpa = GatherSdpa(False, geometry.dtype)
    return ChosenAttention(sdpa, f"{sdpa.name}, as the GPUs of the replica do not agree on a kernel")


class FollowingRunner(Runner):
    """The runner of a rank above 0: computes what rank 0 has packed, up to the last hidden state."""

    @torch.inference_mode()
    def obey(self, message: Words) -> None:
        """Compute a step, by the graph of its shape if rank 0 does so."""
        inputs = self._packer.adopt(message)
        if inputs.shape.is_recorded:
            assert self._graphs is not None, "a recorded step before any was recorded"
            self._graphs.replay(inputs)
        else:
            self.forward.hidden(inputs)

    def _recorded(self, inputs: StepInputs) -> None:
        self.forward.hidden(inputs)


class Rank:
    """One rank above 0. Its constructor meets the others and loads the model's part.

    Raises `ModelRefused`, `ReplicaGone`, `OSError`.
    """

    def __init__(self, start: RankStart) -> None:
        self._start = start
        folder = Path(start.folder)
        self._channels = connect(folder / SOCKET, start.channels, start.rank, start.start_wait_s)
        try:
            self._device = choose_device(start.engine)
            torch.set_num_threads(start.threads)
            self._peers = Peers(
                folder / STORE, start.rank, start.ranks, self._device, start.engine.stuck_step_s
            )
            spec, dtype = (
                inspect_model(Path(start.model_dir), start.inspected_dir),
                getattr(torch, start.dtype),
            )
            self._model = load_part(spec, dtype, self._device, self._peers)
        except BaseException:
            self._channels.close()
            raise
        model: Any = self._model
        if not model.config.tie_word_embeddings:
            model.set_output_embeddings(None)  # rank 0 alone makes logits
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what loading the weights took besides them
        whole = KvGeometry(
            spec.layers,
            start.engine.block_tokens,
            spec.kv_heads,
            spec.head_dim,
            dtype,
            start.engine.kv_groups,
            start.engine.kv_dtype == "int8",
        )
        self._geometry = part_of(whole, start.ranks)
        self._backend: AttentionBackend | None = None
        self._runner: FollowingRunner | None = None
        self._is_able: bool | None = None  # to compute the steps of a trial; None: there is none
        self._io: PageIo | None = None
        self._steps = StepsDone()

    def serve(self) -> None:
        """Obey until rank 0 has gone. Raises what a step or a move has raised: then all ranks must end."""
        moves = threading.Thread(target=self._serve_moves, name="samovar-moves", daemon=True)
        moves.start()
        try:
            while True:
                self._obey_step(self._channels.steps.next())
        except ReplicaGone as gone:
            logger.info("rank %d ends: %s", self._start.rank, gone)
        finally:
            self._steps.end()
            self._channels.close()
            if self._runner is not None:
                self._runner.close()
            self._peers.close()
            moves.join(self._start.engine.rank_wait_s)

    def _obey_step(self, order: RingMessage) -> None:
        try:
            if order.kind in _BEFORE_STEPS:
                self._prepare(order)
            else:
                assert self._runner is not None, "a step before there is a pool"
                self._compute(order, self._runner)
        except Exception as error:
            if self._is_able is None or is_device_lost(error):
                raise
            logger.warning("rank %d cannot compute such a step", self._start.rank, exc_info=True)
            self._is_able = False
        self._steps.passed(order.number)
        self._channels.steps.done()

    def _prepare(self, order: RingMessage) -> None:
        if order.kind == Order.POOL:
            self._make_pool(int(order.words[0]))
        elif order.kind == Order.ATTENTION:
            chosen = agreed_attention(self._model, self._geometry, self._device, self._peers)
            self._backend = chosen.backend
        elif order.kind == Order.LEAST_MEMORY:
            self._peers.least(free_memory_bytes(self._device))

    def _compute(self, order: RingMessage, runner: FollowingRunner) -> None:
        if order.kind == Order.STEP:
            runner.obey(order.words)
        elif order.kind == Order.COPY:
            pages = order.words.tolist()
            for source, target in zip(pages[::2], pages[1::2], strict=True):
                runner.pool.copy_page(source, target)
        elif order.kind == Order.SAME:
            start, end, *tables = order.words.tolist()
            half = len(tables) // 2
            self._peers.least(int(same_slots(runner, tables[:half], tables[half:], start, end)))
        elif order.kind == Order.RECORD:
            self._record(GraphLimits(*order.words.tolist()), runner)
        elif order.kind == Order.FORGET:
            runner.forget_graphs()
        elif order.kind == Order.TRY:
            self._is_able = self._peers.is_apart = True
        elif order.kind == Order.TRIED:
            self._end_trial()
        else:
            raise ValueError(f"order {order.number} is of the unknown kind {order.kind}")

    def _record(self, limits: GraphLimits, runner: FollowingRunner) -> None:
        """Record what all ranks record, if all of them can."""
        accord = Accord(self._peers)
        try:
            with accord.reached():
                capture = open_capture(self._device)
                assert capture is not None, f"nothing can be recorded on {self._device}"
                runner.record_steps(SharedCapture(capture, accord), limits)
        except Exception as error:
            if isinstance(error, RankLost) or is_device_lost(error):
                raise
            logger.warning("rank %d records no steps", self._start.rank, exc_info=True)
            runner.forget_graphs()

    def _end_trial(self) -> None:
        """Say whether the steps of a trial could be computed; what follows is rank 0's to decide."""
        is_able, self._is_able, self._peers.is_apart = bool(self._is_able), None, False
        with suppress(Unable):
            Accord(self._peers).agree(is_able=is_able)

    def _make_pool(self, pages: int) -> None:
        assert self._backend is not None, "a pool before there is a backend"
        if self._io is not None:
            self._io.close()
        self._runner = self._io = None  # an earlier pool goes first
        pool = KvPool(self._geometry, pages, self._device)
        self._runner = FollowingRunner(self._model, pool, self._backend, exact=False)
        self._io = page_io(pool)
        self._io.adopt(np.frombuffer(self._channels.staging, dtype=np.uint8))

    def _serve_moves(self) -> None:
        moves = self._channels.moves
        try:
            while True:
                self._move(moves.next())
                moves.done()
        except ReplicaGone as gone:
            logger.debug("no further moves: %s", gone)
        except Exception:  # whatever it was: rank 0 must not take this rank's bytes for good
            logger.exception("rank %d could not copy blocks, and ends", self._start.rank)
        finally:
            self._channels.close()  # the steps' thread ends as well

    def _move(self, order: RingMessage) -> None:
        """Copy this rank's run of some blocks, after the step that `order` names."""
        assert self._io is not None, "a move before there is a pool"
        self._steps.wait_for(int(order.words[0]), self._start.engine.rank_wait_s)
        pages = order.words[1:].tolist()
        staging = np.frombuffer(self._channels.staging, dtype=np.uint8)
        # Behind all that was launched: the step that the move follows, and perhaps later ones.
        mark = self._io.mark()
        copy_runs(self._io, pages, staging, self._start.rank, mark, is_out=order.kind == Order.OUT)


_BEFORE_STEPS = (Order.READY, Order.ATTENTION, Order.LEAST_MEMORY, Order.POOL)


class StepsDone:
    """Counts the steps that a rank has done, so that a move can wait for those before it."""

    def __init__(self) -> None:
        self._number = 0
        self._changed = threading.Condition()
        self._is_over = False

    def passed(self, number: int) -> None:
        """Say that order `number` is done."""
        with self._changed:
            self._number = number
            self._changed.notify_all()

    def end(self) -> None:
        """Say that no further order will be done."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for(self, number: int, wait_s: float) -> None:
        """Wait until order `number` is done. Raises `ReplicaGone` if that takes longer than `wait_s`."""
        with self._changed:
            is_told = self._changed.wait_for(lambda: self._number >= number or self._is_over, wait_s)
        if not is_told or self._number < number:
            raise ReplicaGone(f"step {number} was not done within {wait_s:g} s (engine.rank_wait_s)")


def serve_rank(start: RankStart) -> None:
    """Be a rank until rank 0 has gone. Where that was killed, its folder is removed here."""
    try:
        Rank(start).serve()
    finally:
        shutil.rmtree(start.folder, ignore_errors=True)
