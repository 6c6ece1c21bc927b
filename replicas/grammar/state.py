"""Where one answer stands in its grammar: which tokens may come next, and whether it is complete."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from samovar.replicas.messages import Grammar, Refused

if TYPE_CHECKING:
    from llguidance import LLMatcher

REASON_CHARS_MAX = 300
"""Of llguidance's reason in a message: it quotes the grammar, which may be long."""


class GrammarRefused(Exception):
    """A grammar that cannot be served, or no longer. `field`: the request's field that asks for it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)  # both as args: the exception survives pickling between processes
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field} cannot be served: {self.reason}"

    @property
    def event(self) -> Refused:
        """Return the refusal of the request."""
        return Refused("invalid", str(self), param=self.field)


SPECIAL_TEXT = re.compile(r'token "[^"]*\[(\d+)\]" doesn\'t satisfy the grammar; forced bytes')
"""What llguidance says where a grammar leaves nothing but the spelling of a special token."""


def reason_of(error: str) -> str:
    """Return llguidance's error as one line."""
    told = " ".join(error.replace("<non-verbose/>", "").split())
    if special := SPECIAL_TEXT.search(told):
        told = f"it demands the text of a special token (id {special[1]}), which no answer can have as text"
    if told.startswith("NoExtensionBias"):
        told = "no answer can satisfy it"
    return told if len(told) <= REASON_CHARS_MAX else told[: REASON_CHARS_MAX - 3] + "..."


class GrammarState:
    """The tokens of one answer under its grammar. One thread uses it; masks are computed in another.

    It depends on the grammar and the tokens accepted alone: an answer that was preempted, forked, or begun by
    another replica goes on the same.

    `build`: returns a matcher at the beginning of the grammar; True: a new compilation. `vocab`: tokens of a
    mask. `mask_s_max`: how long a mask is waited for.
    """

    def __init__(
        self,
        grammar: Grammar,
        build: Callable[[bool], LLMatcher],
        masks: Executor,
        *,
        vocab: int,
        mask_s_max: float,
    ) -> None:
        self.grammar = grammar
        self._build = build
        self._masks = masks
        self._vocab = vocab
        self._mask_s_max = mask_s_max
        self._matcher = build(False)
        self._accepted = array("I")
        self._coming: Future[bytes] | None = None
        self._mask: bytes | GrammarRefused | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Take the answer's next token. Raises `GrammarRefused` if the grammar does not allow it here."""
        if self._coming is not None:
            self.mask()
        self._mask = None
        if not self._matcher.consume_token(token_id):
            self._renew()
            if not self._matcher.consume_token(token_id):
                raise GrammarRefused(self.grammar.field, reason_of(self._matcher.get_error()))
        self._accepted.append(token_id)

    def begin_mask(self) -> None:
        """Start computing the next mask in another thread; a step's forward pass takes longer."""
        if self._coming is None and self._mask is None:
            self._coming = self._masks.submit(self._bits)

    def mask(self) -> NDArray[np.bool_]:
        """Return bool `[vocab]`: the tokens that may come next, at least one.

        An id that ends a turn is among them only where the answer may end. Raises `GrammarRefused` where
        this cannot be computed within the limits. The same until the next `accept`: where it is asked for
        again, a thread may still be at the one that came too late.
        """
        if self._mask is None:
            self._mask = self._computed()
        if isinstance(self._mask, GrammarRefused):
            raise self._mask
        packed = np.frombuffer(self._mask, dtype=np.uint8)
        return np.unpackbits(packed, count=self._vocab, bitorder="little").view(np.bool_)

    def copy(self) -> GrammarState:
        """Return a state with the same tokens accepted."""
        copied = GrammarState(
            self.grammar, self._build, self._masks, vocab=self._vocab, mask_s_max=self._mask_s_max
        )
        for token_id in self._accepted:
            copied.accept(token_id)
        return copied

    def _computed(self) -> bytes | GrammarRefused:
        coming, self._coming = self._coming, None
        if coming is None or coming.cancel():  # cancelled: the threads have not come to it
            return self._bits()
        try:
            return coming.result(self._mask_s_max)
        except TimeoutError:
            reason = f"the next token took longer than {self._mask_s_max:g} s (grammar.mask_s_max)"
            return GrammarRefused(self.grammar.field, reason)

    def _bits(self) -> bytes:
        """Return one bit a token."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # its mask would end the answer
            self._renew()
            bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarRefused(self.grammar.field, reason_of(self._matcher.get_error()))
        return bits

    def _renew(self) -> None:
        """Compile the grammar again and accept the answer's tokens again.

        Answers of one grammar share an automaton, which grows with what they meet. If it has grown to its
        limit, that must not end an answer which alone stays within it: else the end would depend on others.
        """
        self._matcher = self._build(True)
        if not self._matcher.consume_tokens(self._accepted.tolist()):
            raise GrammarRefused(self.grammar.field, reason_of(self._matcher.get_error()))
