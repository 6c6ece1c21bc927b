"""How many tokens messages have in the served model's prompts; each text is counted once. Thread-safe."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from threading import Lock

from samovar.router.openai import ApiError, ChatMessage, ParsedChat
from samovar.router.prompt import PromptBuilder

COUNTED_MAX = 200_000
"""Messages whose tokens are remembered."""
PROBE = "a"
OVERHEAD_TOKENS = 8
"""Of a message, where the template cannot be asked: what it writes around it."""


class MessageTokens:
    """Counts on the calling thread, which should be one of the tokenizer's.

    What a message takes is counted by itself, as it does not depend on those around it: a prompt may have a
    few tokens fewer where words meet. `prompt` counts a whole one.
    """

    def __init__(self, prompts: PromptBuilder) -> None:
        self._prompts = prompts
        self.marks: Collection[str] = prompts.vocabulary.marks()
        self._counted: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()

    def text(self, text: str) -> int:
        """Return how many tokens a text has."""
        if not text:
            return 0
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return self._once(key, lambda: len(self._prompts.tokens_of_text(text, add_special_tokens=False)))

    def message(self, message: ChatMessage, like: ParsedChat) -> int:
        """Return how many tokens a message takes in a prompt of a request like this."""
        calls = sum(self.text(f"{call.name} {call.arguments}") + OVERHEAD_TOKENS for call in message.calls)
        return self.text(message.content) + calls + self._overhead(like)

    def front(self, front: Sequence[ChatMessage], like: ParsedChat) -> int:
        """Return what every prompt of a request like this has: the system prompt, tools, where it answers."""
        asked = replace(
            like, messages=(*front, ChatMessage("user", PROBE)), begins_turn=True, continues=False
        )
        tools = like.tools
        texts = [*(one.content for one in front), *(one.text for one in tools)]
        parts = [like.lead, *texts, repr(like.template_kwargs)]
        made = hashlib.blake2b(digest_size=16, person=b"front")
        for part in parts:
            made.update(hashlib.blake2b(part.encode("utf-8", "surrogatepass")).digest())
        whole = self._once(made.digest(), lambda: self.prompt(asked))
        return max(0, whole - self.text(PROBE) - self._overhead(like))

    def prompt(self, request: ParsedChat) -> int:
        """Return how many tokens a conversation's prompt has. Raises `ApiError`."""
        return len(self._prompts.tokens_of_chat(request, add_special_tokens=False))

    def _overhead(self, like: ParsedChat) -> int:
        """Return what the template writes around a message."""

        def measure() -> int:
            one = ChatMessage("user", PROBE)
            bare = replace(like, offer=None, lead="", begins_turn=True, continues=False)
            try:
                long, short = (
                    self.prompt(replace(bare, messages=messages))
                    for messages in ((one, ChatMessage("assistant", PROBE), one), (one,))
                )
            except ApiError:
                return OVERHEAD_TOKENS
            return max(1, -(-(long - short) // 2) - self.text(PROBE))

        return self._once(b"overhead" + repr(like.template_kwargs).encode(), measure)

    def _once(self, key: bytes, count: Callable[[], int]) -> int:
        with self._lock:
            known = self._counted.get(key)
            if known is not None:
                self._counted.move_to_end(key)
                return known
        made = count()
        with self._lock:
            self._counted[key] = made
            while len(self._counted) > COUNTED_MAX:
                self._counted.popitem(last=False)
        return made
