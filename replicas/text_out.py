"""Token ids to text, one token at a time, and the watch for stop strings.

Text that may be the beginning of a stop string is held back until that is decided, so a client
never sees a part of one. Bytes of an unfinished UTF-8 character are held back too. Pure but for
the tokenizer that is handed in.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextOut:
    """The text of one answer. `push` tokens as they come, `flush` once at the end."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, bool]:
        """(text that may go out, whether a stop string was completed).

        The stop string itself and what follows it never goes out. `may_stop=False` lets stop
        strings pass (below `min_tokens`).
        """
        self._held += self._decode(token_id)
        if may_stop:
            found = [place for place in (self._held.find(stop) for stop in self._stop) if place >= 0]
            if found:
                text, self._held = self._held[: min(found)], ""
                return text, True
        keep = self._undecided_chars() if may_stop else 0
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return text, False

    def _decode(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:
            # A byte that no character can have after a finished one (byte-fallback vocabularies):
            # tokenizers raises a bare Exception and its stream is of no use any more.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id) or ""

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string."""
        text, self._held = self._held, ""
        return text

    def _undecided_chars(self) -> int:
        """Length of the longest tail that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest
