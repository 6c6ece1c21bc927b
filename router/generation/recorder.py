"""Records the turns of this ingress (`samovar serve --record FILE`), without any of their text.

Done here and not in the replicas, because one process sees all turns (as long as their clients wait for
them, also those resumed on another replica) and one process writes one file. Block keys are computed in a
separate thread, some microseconds per block, after the answer is out. For the format see
`cache_tiers/recording.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from samovar.cache_tiers.blocks import ROOT, ChainMarks, chain_keys, kept_blocks, marks_of, namespace_digest
from samovar.cache_tiers.forecast import Stop
from samovar.cache_tiers.recording import LINEAGES_MAX, RecordedTurn, TurnRecorder
from samovar.configs.settings import Settings
from samovar.replicas.messages import TurnContext
from samovar.router.generation.answer import Answer

logger = logging.getLogger(__name__)

WAITING_MAX = 256
"""Turns waiting for their block keys; further turns are left out."""
FILES_MAX = 1000


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """A finished turn of `session`.

    `salt`: namespace of the blocks it may share. `started_s`: monotonic clock. `lineages`: of each prompt,
    the chain of prompts within the session that it belongs to.
    """

    session: str
    salt: bytes
    answer: Answer
    context: TurnContext
    started_s: float
    lineages: Sequence[Hashable]


class _SessionLineages:
    """Numbers a session's lineages, and keeps the marks of the last turns of `kept_max`."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._begun = 0
        self._last: OrderedDict[Hashable, tuple[int, ChainMarks]] = OrderedDict()

    def find(self, lineage: Hashable) -> tuple[int, ChainMarks | None]:
        """Return a lineage's number and its last turn's marks; a new number for an unknown one."""
        found = self._last.get(lineage)
        if found is not None:
            return found
        self._begun = min(self._begun + 1, LINEAGES_MAX)
        return self._begun - 1, None

    def keep(self, lineage: Hashable, number: int, marks: ChainMarks) -> None:
        """Keep a turn's marks. Beyond `kept_max` the lineage longest without one is forgotten."""
        self._last[lineage] = number, marks
        self._last.move_to_end(lineage)
        if len(self._last) > self._kept_max:
            self._last.popitem(last=False)


class IngressRecorder:
    """Records finished turns in a background thread. Thread-safe.

    `sessions_max`, `lineages_max`: sessions, and lineages of each, whose block chains are remembered, to find
    out how much of its own a turn kept.
    `clock`: the clock of `ServedTurn.started_s`.
    """

    def __init__(
        self,
        recorder: TurnRecorder,
        block_tokens: int,
        sessions_max: int,
        lineages_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder = recorder
        self._block_tokens = block_tokens
        self._sessions_max = sessions_max
        self._lineages_max = lineages_max
        self._clock = clock
        self._lineages: OrderedDict[str, _SessionLineages] = OrderedDict()  # longest without a turn first
        self._lane = ThreadPoolExecutor(1, "samovar-recorder")
        self._lock = threading.Lock()
        self._waiting = 0

    def over(self, turn: ServedTurn) -> bool:
        """Queue a finished turn, without blocking; False if too many wait and it is left out.

        Turns for which no replica computed anything are not recorded.
        """
        if not turn.answer.replica_ids:
            return True
        with self._lock:
            if self._waiting >= WAITING_MAX:
                return False
            self._waiting += 1
        try:
            self._lane.submit(self._record, turn, self._clock())
        except RuntimeError:  # closed
            self._done()
        return True

    def close(self) -> None:
        """Write the queued turns and close. Blocks; nothing is recorded afterwards."""
        self._lane.shutdown(wait=True)
        self._recorder.close()

    def _done(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _record(self, turn: ServedTurn, ended_s: float) -> None:
        try:
            answers = len(turn.answer.choices) // max(1, len(turn.answer.prompts))
            lineages = self._lineages.pop(turn.session, None) or _SessionLineages(self._lineages_max)
            self._lineages[turn.session] = lineages
            # All before the first: prompts of one request do not follow each other.
            found = {name: lineages.find(name) for name in turn.lineages}
            for number, name in enumerate(turn.lineages):
                lineage, before = found[name]
                marks = self._record_prompt(turn, ended_s, number, number * answers, lineage, before)
                lineages.keep(name, lineage, marks)
            if len(self._lineages) > self._sessions_max:
                self._lineages.popitem(last=False)
        except Exception:  # the turn is missing from the recording; the client has its answer
            logger.exception("a turn could not be recorded")
        finally:
            self._done()

    def _record_prompt(
        self,
        turn: ServedTurn,
        ended_s: float,
        number: int,
        first_choice: int,
        lineage: int,
        before: ChainMarks | None,
    ) -> ChainMarks:
        """Record one prompt and its first answer; return its chain's marks.

        `lineage`: its number. `before`: the marks of its last turn.
        """
        prompt, choice = turn.answer.prompts[number], turn.answer.choices[first_choice]
        namespace = namespace_digest(turn.salt)
        ids, bt = [*prompt.token_ids, *choice.token_ids], self._block_tokens
        keys = chain_keys(namespace, ROOT, ids, bt)
        in_prompt = keys[: len(prompt.token_ids) // bt]
        joined = b"".join(in_prompt)
        kept = 0 if before is None else kept_blocks(before, joined)
        stop: Stop = choice.finish_reason or "gone"
        tool = ""
        if stop == "stop" and (calls := choice.reply.calls):
            stop, tool = "tool_calls", calls[0].name
        self._recorder.turn(
            RecordedTurn(
                session=turn.session,
                started_s=turn.started_s,
                ended_s=ended_s,
                input_tokens=len(prompt.token_ids),
                output_tokens=len(choice.token_ids),
                kept_tokens=kept * bt,
                block_keys=in_prompt,
                stop=stop,
                role=turn.context.role,
                tool=tool,
                profile=turn.context.profile,
                lineage=lineage,
            )
        )
        return marks_of(keys)


def open_recorder(settings: Settings) -> IngressRecorder | None:
    """Open the recorder that `server.record` configures.

    Returns None if none is configured or the file cannot be written, which does not stop serving. An
    existing file is not overwritten: a restarted ingress writes FILE.1, FILE.2, ...
    """
    wanted, block_tokens = settings.server.record, settings.engine.block_tokens
    if wanted is None:
        return None
    for path in (wanted, *(_numbered(wanted, number) for number in range(1, FILES_MAX))):
        try:
            recorder = TurnRecorder(path, block_tokens, settings.server.record_bytes_max)
        except FileExistsError:
            continue
        except OSError as error:
            logger.error("recording failed: %s: %s", path, error)
            return None
        logger.info("recording to %s", path)
        router = settings.router
        return IngressRecorder(recorder, block_tokens, router.sessions_max, router.lineages_max)
    logger.error("recording failed: %s and its numbered successors exist", wanted)
    return None


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
