"""Samples the next tokens of a step from its rows of logits.

Randomness is a pure function of (seed, choice, output position): a Philox counter, no state. So a sequence
draws the same tokens alone or in a batch, after a preemption, with or without a cache hit, and on another
replica. Log-probabilities are the model's own, before temperature, penalties and grammars, as OpenAI's are.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.replicas.grammar import GrammarCompiler, GrammarRefused, GrammarState
from samovar.replicas.messages import Grammar, Refused, Sampled
from samovar.replicas.model import is_device_lost, is_memory_short
from samovar.replicas.sampling.draws import (
    TEMPERATURE_MIN,
    BegunDraws,
    Draw,
    greedy_of,
    upload,
)
from samovar.replicas.scheduling import Sequence

CPU_NUMBERS = 1 << 18
"""Logits that are drawn from at a time on a CPU, 1 MiB: larger tensors get new pages from the system each
time, which takes longer than computing with them."""


class NotNumbers(Exception):
    """A row of logits that contains a NaN."""

    def __init__(self) -> None:
        super().__init__("the model's logits are not numbers (NaN)")


class Sampler:
    """Samples tokens. `eos_token_ids` are banned while an answer is shorter than its `min_tokens`.

    `grammars`: compiles what answers must look like; None: no answer has a grammar. `rows_max`: tokens that
    are drawn at a time, besides those that are the best of their row.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarCompiler | None = None,
        *,
        rows_max: int = 64,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self.grammars = grammars
        self.rows_max = rows_max

    def open_grammar(self, grammar: Grammar | None) -> GrammarState | None:
        """Return the state of an answer without tokens; None: any text. Raises `GrammarRefused`."""
        if grammar is None:
            return None
        if self.grammars is None:
            raise GrammarRefused(grammar.field, "this replica compiles no grammars")
        return self.grammars.open(grammar)

    def refusal_of(self, grammar: Grammar | None) -> Refused | None:
        """Compile a grammar, which the engine's thread then finds ready; return why it cannot be served."""
        try:
            self.open_grammar(grammar)
        except GrammarRefused as refused:
            return refused.event
        return None

    @staticmethod
    def is_plain_greedy(sequence: Sequence) -> bool:
        """Return whether the row's maximum is the answer and nothing else is requested."""
        params = sequence.sampling
        return (
            params.temperature < TEMPERATURE_MIN
            and params.logprobs is None
            and not params.allowed_token_ids
            and not params.logit_bias
            and sequence.grammar is None
            and params.presence_penalty == 0
            and params.frequency_penalty == 0
            and params.repetition_penalty == 1
            and sequence.output_tokens >= params.min_tokens
        )

    def sample(
        self,
        logits: torch.Tensor,
        picks: Listing[tuple[int, Sequence]],
        greedy: torch.Tensor | None = None,
        relieve: Callable[[], None] = lambda: None,
    ) -> list[Sampled | Exception]:
        """Sample a token for each pick: a row of `logits` and the sequence that it continues.

        `logits`: float32 `[rows, vocab]`, on any device; several picks may share a row. `greedy`: what
        `greedy_of` says of the logits, if that is known. A pick that cannot be sampled gives its error
        (`NotNumbers`, `GrammarRefused`), and the others are what they would be without it. `relieve`: gives
        memory of the device back, before draws that did not fit are tried again. Takes one transfer from the
        device for each `rows_max` draws. Raises what says that the device is lost.
        """
        if greedy is None:
            greedy = greedy_of(logits)
        draws, outcomes = self._draws(logits, picks)
        waiting, rows_max = list(draws), self.rows_max
        if logits.device.type == "cpu":
            rows_max = max(1, min(rows_max, CPU_NUMBERS // logits.shape[1]))
        best, has_nan, sampled = self._sampled(logits, waiting[:rows_max], draws, greedy, relieve)
        outcomes |= sampled
        for start in range(rows_max, len(waiting), rows_max):
            some = waiting[start : start + rows_max]
            outcomes |= self._sampled(logits, some, draws, greedy, relieve)[2]
        return [
            NotNumbers() if has_nan[row] else outcomes.get(place) or Sampled(best[row])
            for place, (row, _) in enumerate(picks)
        ]

    def begin(
        self, logits: torch.Tensor, picks: Listing[tuple[int, Sequence]], greedy: torch.Tensor
    ) -> BegunSample | None:
        """Begin what `sample` does, so that another step can be launched before it is over.

        None: only `sample` can do it. Raises what the device reports, but for memory that is short.
        """
        if sum(not self.is_plain_greedy(sequence) for _, sequence in picks) > self.rows_max:
            return None
        draws, failed = self._draws(logits, picks)
        if failed:
            return None
        try:
            begun = BegunSample(logits, [row for row, _ in picks], draws, greedy)
            return begun if begun.is_decided else None
        except Exception as error:
            if is_device_lost(error) or not is_memory_short(error):
                raise
            return None

    def _draws(
        self, logits: torch.Tensor, picks: Listing[tuple[int, Sequence]]
    ) -> tuple[dict[int, Draw], dict[int, Sampled | Exception]]:
        """Return what picks are drawn by, by place, but for the best of their rows; and what has no draw."""
        draws: dict[int, Draw] = {}
        outcomes: dict[int, Sampled | Exception] = {}
        for place, (row, sequence) in enumerate(picks):
            if not self.is_plain_greedy(sequence):
                try:
                    draws[place] = self._draw(row, sequence, logits.shape[1])
                except Exception as error:  # noqa: BLE001 - it is this pick's outcome
                    outcomes[place] = error
        return draws, outcomes

    @staticmethod
    def _sampled(
        logits: torch.Tensor,
        places: Listing[int],
        draws: dict[int, Draw],
        greedy: torch.Tensor,
        relieve: Callable[[], None],
    ) -> tuple[list[int], list[bool], dict[int, Sampled | Exception]]:
        """Draw for some picks; one by one where that fails, so that an error is that of one pick."""
        try:
            best, has_nan, sampled = BegunDraws(logits, [draws[place] for place in places], greedy).read()
            return best, has_nan, dict(zip(places, sampled, strict=True))
        except Exception as error:
            is_short = is_memory_short(error)
            if is_device_lost(error) or not (places or is_short):
                raise
        if is_short:  # behind the exception, which holds what the draws had allocated
            relieve()
        best, has_nan, _ = BegunDraws(logits, [], greedy).read()
        outcomes: dict[int, Sampled | Exception] = {}
        for place in places:
            try:
                outcomes[place] = BegunDraws(logits, [draws[place]], greedy).read()[2][0]
            except Exception as error:
                if is_device_lost(error):
                    raise
                outcomes[place] = error
                if is_memory_short(error):  # a new one, for the same reason
                    outcomes[place] = torch.OutOfMemoryError(
                        "the device's memory is too short to draw a token"
                    )
        return best, has_nan, outcomes

    def _draw(self, row: int, sequence: Sequence, vocab: int) -> Draw:
        """Return what the sequence's next token is drawn by. Raises `GrammarRefused` if there is none."""
        params = sequence.sampling
        is_greedy = params.temperature < TEMPERATURE_MIN
        has_penalty = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        draw = Draw(
            row=row,
            params=params,
            u=0.0 if is_greedy else uniform(sequence.seed, sequence.index, sequence.output_tokens),
            # A copy: an array that lends its memory cannot grow.
            tokens=np.array(sequence.tokens if has_penalty else (), dtype=np.int64),
            prompt_tokens=sequence.prompt_tokens,
            allowed=self._allowed(vocab, sequence),
        )
        draw.check(vocab)
        return draw

    @staticmethod
    @torch.inference_mode()
    def score(rows: torch.Tensor, token_ids: Listing[int], top: int) -> list[Sampled]:
        """Return the log-probability of each given token under its row of logits `[tokens, vocab]`."""
        logprobs = rows.log_softmax(dim=-1)
        given = torch.tensor(token_ids, dtype=torch.long, device=rows.device)[:, None]
        own = logprobs.gather(1, given)
        ranks = 1 + (logprobs > own).sum(dim=-1)
        best = logprobs.topk(min(top, rows.shape[1]), dim=-1)
        return [
            Sampled(token_id, logprob, tuple(zip(ids, values, strict=True)), rank)
            for token_id, (logprob,), ids, values, rank in zip(
                token_ids,
                own.tolist(),
                best.indices.tolist(),
                best.values.tolist(),
                ranks.tolist(),
                strict=True,
            )
        ]

    def _allowed(self, vocab: int, sequence: Sequence) -> NDArray[np.bool_] | None:
        """Return bool `[vocab]`, the tokens that may be sampled; None: all.

        Raises `GrammarRefused` if a grammar and `allowed_token_ids` have none in common.
        """
        params, grammar = sequence.sampling, sequence.grammar
        banned: set[int] = set()
        if sequence.output_tokens < params.min_tokens:
            banned.update(self.eos_token_ids, params.stop_token_ids)
        elif grammar is not None and params.ignore_eos:
            banned.update(self.eos_token_ids)
        if grammar is None and not banned and not params.allowed_token_ids:
            return None
        allowed = np.ones(vocab, dtype=np.bool_) if grammar is None else grammar.mask()
        if params.allowed_token_ids:
            listed = np.zeros(vocab, dtype=np.bool_)
            listed[list(params.allowed_token_ids)] = True
            allowed = allowed & listed
            if grammar is not None and not allowed.any():
                reason = f"none of them may follow here by {grammar.grammar.field}"
                raise GrammarRefused("allowed_token_ids", reason)
        if banned:
            others = allowed.copy()
            others[[token_id for token_id in banned if token_id < vocab]] = False
            if others.any():  # where nothing else is allowed, the answer goes on with what would end it
                return others
        return allowed


class BegunSample:
    """The tokens of a step's picks, under way.

    `rows`: of the logits, one a pick; `draws`: by place among the picks; the others are the best of their
    rows. `token_ids`: int32 `[picks]`, on the device.
    """

    def __init__(
        self, logits: torch.Tensor, rows: list[int], draws: dict[int, Draw], greedy: torch.Tensor
    ) -> None:
        self._rows, self._places = rows, list(draws)
        self._begun = BegunDraws(logits, list(draws.values()), greedy)
        self.is_decided = self._begun.is_decided
        ordered = [self._places[number] for number in self._begun.order]
        if ordered == list(range(len(rows))):
            self.token_ids = self._begun.tokens
            return
        best, arrays = greedy.view(2, -1)[0], {"rows": np.array(rows, dtype=np.int64)}
        if draws:
            arrays["places"] = np.array(ordered, dtype=np.int64)
        if rows == list(range(len(rows))) and not draws:
            self.token_ids = best[: len(rows)].clone()  # what is launched next overwrites it
            return
        given = upload(arrays, logits.device)
        self.token_ids = best.index_select(0, given["rows"])
        if draws:
            self.token_ids.index_copy_(0, given["places"], self._begun.tokens)

    def read(self) -> list[Sampled | Exception]:
        """Wait for the device; return what `Sampler.sample` does. Raises what the device reports."""
        best, has_nan, sampled = self._begun.read()
        found = dict(zip(self._places, sampled, strict=True))
        return [
            NotNumbers() if has_nan[row] else found.get(place) or Sampled(best[row])
            for place, row in enumerate(self._rows)
        ]


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) of this output position of this choice of this seed."""
    generator = np.random.Philox(key=seed % 2**64, counter=[position, choice, 0, 0])
    return float(np.random.Generator(generator).random())
