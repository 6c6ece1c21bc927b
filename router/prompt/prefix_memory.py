"""Remembers digests of each session's last prompts, to say where a new prompt leaves their prefix.

A client that changes what it sent before (a clock in the system prompt, a history cut at its front) loses
all that is cached behind the change, and sees no more than a miss. This memory names the token and the
part. Several prompts alternate under one id (titles, tags, sub-agents), so the last few are kept, and a new
prompt is compared with the one that it continues; a prompt that continues none is nothing to report.

Of a prompt it keeps keyed digests of the prefixes that end at every 16th token and where parts begin and
end: no text and no ids. Bounded in bytes, the least recently used session goes first. Pure; not thread-safe.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from samovar.router.openai import ChatMessage
from samovar.router.prompt.prompt_parts import DIGEST_BYTES, TOOLS, PromptPart, TokenIds
from samovar.router.prompt.reply_memory import Owner

STEP_TOKENS = 16
"""Distance of the prefixes that are compared: the smallest block, so no smaller difference loses a block."""
KEY_BYTES = 16
# Python's cost besides the arrays: of a prompt (objects of two arrays and a tuple), of a session's row.
PROMPT_OVERHEAD_BYTES = 600
ROW_OVERHEAD_BYTES = 1150
PART_BYTES = 33 + DIGEST_BYTES + 8  # a bytes object and its place in a tuple

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_Row = tuple[str, bytes]
"""(salt, session's tag)"""


@dataclass(frozen=True, slots=True)
class PrefixLeft:
    """Where a prompt left the prefix of the one it continues.

    `token`: this many tokens are the same, counted to the last 16th token or beginning or end of a part.
    `until`: the first such place that differs. `part`: the part that changed. `why`: the reason, if known.
    """

    token: int
    until: int
    part: str
    why: str = ""

    @property
    def kind(self) -> str:
        """The kind of part: `system`, `tools` or `messages`."""
        return self.part.partition("[")[0]

    def __str__(self) -> str:
        reason = f": {self.why}" if self.why else ""
        return f"prompt changed at token {self.token} in {self.part}{reason}"


@dataclass(frozen=True, slots=True, eq=False)
class PromptDigest:
    """Digests of a prompt: of its prefixes at `marks` (in tokens, ascending) and of its parts.

    `prefixes`: of all its prefixes, from none to all tokens; dropped when the prompt is kept. `tools`: of its
    tools, in their order, however they are spelled; `tools_text`: as they are written.
    """

    tokens: int
    parts: tuple[PromptPart, ...]
    prefixes: npt.NDArray[np.uint64]
    marks: npt.NDArray[np.uint32]
    tools: tuple[bytes, ...] = ()
    tools_text: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class _SeenPrompt:
    """What is kept of a prompt; `digests`: of its parts, the system part first."""

    tokens: int
    marks: npt.NDArray[np.uint32]
    prefixes: npt.NDArray[np.uint64]
    digests: tuple[bytes, ...]
    tools: tuple[bytes, ...] = ()
    tools_text: bytes = b""

    @property
    def nbytes(self) -> int:
        arrays = self.marks.nbytes + self.prefixes.nbytes
        return PROMPT_OVERHEAD_BYTES + arrays + PART_BYTES * (len(self.digests) + len(self.tools))


@dataclass(slots=True)
class _SessionPrompts:
    owner: Owner
    prompts: list[_SeenPrompt] = field(default_factory=list)  # the last one used is the last

    @property
    def nbytes(self) -> int:
        return ROW_OVERHEAD_BYTES + sum(prompt.nbytes for prompt in self.prompts)


def ids_of(token_ids: Sequence[int]) -> TokenIds:
    """Return token ids as an array; faster than numpy reads a list."""
    return np.frombuffer(array("I", token_ids), np.uint32)


def digest_of(token_ids: TokenIds, parts: Sequence[PromptPart], key: bytes) -> PromptDigest:
    """Return the digests of a prompt, keyed with `key` (`KEY_BYTES`).

    A prefix's digest is the sum of its tokens' digests, each mixed with its position (splitmix64).
    """
    places = np.arange(1, len(token_ids) + 1, dtype=np.uint64)
    mixed = token_ids.astype(np.uint64) + places * _GOLDEN
    mixed ^= np.uint64(int.from_bytes(key[:8], "little"))
    mixed ^= mixed >> np.uint64(30)
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(27)
    mixed *= _MIX_2 ^ np.uint64(int.from_bytes(key[8:16], "little") & ~1)
    mixed ^= mixed >> np.uint64(31)
    prefixes = np.zeros(len(token_ids) + 1, np.uint64)
    np.cumsum(mixed, out=prefixes[1:])
    steps = np.arange(STEP_TOKENS, len(token_ids) + 1, STEP_TOKENS, dtype=np.uint32)
    ends = np.array([place for part in parts for place in (part.start, part.end)], np.uint32)
    marks = np.union1d(np.append(steps, np.uint32(len(token_ids))), ends)
    marks = marks[(marks > 0) & (marks <= len(token_ids))]
    return PromptDigest(len(token_ids), tuple(parts), prefixes, marks)


class PrefixMemory:
    """LRU memory of the digests of sessions' last `prompts_max` prompts; 0 of either limit: of none.

    All digests must be made with one key. Salt and owner as in `ReplyMemory`.
    """

    def __init__(self, prompts_max: int, bytes_max: int) -> None:
        self._prompts_max = prompts_max
        self._bytes_max = bytes_max
        self._bytes_used = 0
        self._sessions: OrderedDict[_Row, _SessionPrompts] = OrderedDict()
        self._salts: dict[bytes, str] = {}  # session -> the salt of its last prompt, while that is kept
        self.salts_changed = 0
        """Prompts that continued their session's last one under another salt. Told in no answer: whether a
        session is there under another salt is not the client's to know."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_on(self) -> bool:
        """Whether anything is remembered."""
        return self._prompts_max > 0 and self._bytes_max > 0

    @property
    def bytes_used(self) -> int:
        """Bytes accounted to the sessions held."""
        return self._bytes_used

    def follow(self, salt: str, owner: Owner, prompt: PromptDigest) -> PrefixLeft | None:
        """Remember `prompt`; return where it left the prefix of the prompt that it continues, if so.

        The prompt takes the place of the one that it continues. None if it continues none, or if no whole
        block of 16 tokens is lost.
        """
        if not self.is_on:
            return None
        row = (salt, owner.session)
        session = self._sessions.pop(row, None)
        if session is None:
            self.salts_changed += self._has_other_salt(row, prompt)
            session = _SessionPrompts(owner)
        else:
            self._bytes_used -= session.nbytes
        before, shared, until = _continued(session.prompts, prompt)
        if before is not None:
            session.prompts.remove(before)
        session.prompts.append(_kept(prompt))
        del session.prompts[: -self._prompts_max]
        self._sessions[row] = session
        self._salts[owner.session] = salt
        self._bytes_used += session.nbytes
        while self._bytes_used > self._bytes_max:
            self._drop(next(iter(self._sessions)))
        if before is None or shared // STEP_TOKENS >= min(before.tokens, prompt.tokens) // STEP_TOKENS:
            return None
        return PrefixLeft(shared, until, _part_left(before, prompt, shared, until))

    def tools_like(self, salt: str, owner: Owner, tools: Sequence[bytes]) -> list[bytes] | None:
        """Return these tools' digests in the order of the session's last prompt with the same tools."""
        session = self._sessions.get((salt, owner.session))
        wanted = set(tools)
        for prompt in reversed(session.prompts if session else ()):
            if len(prompt.tools) == len(tools) and wanted == set(prompt.tools):
                return list(prompt.tools)
        return None

    def forget(self, tenant: str | None = None, sessions: Collection[bytes] | None = None) -> None:
        """Drop the sessions of `tenant`, only these of it, or (None) all."""
        doomed = [row for row, session in self._sessions.items() if session.owner.is_of(tenant, sessions)]
        for row in doomed:
            self._drop(row)

    def _drop(self, row: _Row) -> None:
        self._bytes_used -= self._sessions.pop(row).nbytes
        if self._salts.get(row[1]) == row[0]:
            del self._salts[row[1]]

    def _has_other_salt(self, row: _Row, prompt: PromptDigest) -> bool:
        """Return whether the prompt continues its session's last one, which came under another salt."""
        kept = self._sessions.get((self._salts.get(row[1], ""), row[1]))
        before, shared, _ = (None, 0, 0) if kept is None else _continued(kept.prompts, prompt)
        return before is not None and shared >= STEP_TOKENS

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        assert self._bytes_used == sum(session.nbytes for session in self._sessions.values())
        assert self._bytes_used <= self._bytes_max or not self._sessions
        assert {(salt, tag) for tag, salt in self._salts.items()} <= self._sessions.keys()
        for (_, tag), session in self._sessions.items():
            assert session.owner.session == tag
            assert 1 <= len(session.prompts) <= self._prompts_max


def _kept(prompt: PromptDigest) -> _SeenPrompt:
    digests = tuple(part.digest for part in prompt.parts)
    prefixes = prompt.prefixes[prompt.marks]
    return _SeenPrompt(prompt.tokens, prompt.marks, prefixes, digests, prompt.tools, prompt.tools_text)


def _continued(kept: Sequence[_SeenPrompt], prompt: PromptDigest) -> tuple[_SeenPrompt | None, int, int]:
    """Return the prompt that `prompt` continues and shares most with, the tokens shared, and `until`."""
    best: _SeenPrompt | None = None
    best_shared, best_until = 0, 0
    digests = [part.digest for part in prompt.parts]
    for before in kept:
        shared, until = _shared(before, prompt)
        if (best is None or shared >= best_shared) and (
            shared == before.tokens or _continues(before.digests, digests)
        ):
            best, best_shared, best_until = before, shared, until
    return best, best_shared, best_until


def _shared(before: _SeenPrompt, prompt: PromptDigest) -> tuple[int, int]:
    """Return how many tokens are the same up to a mark, and the next mark."""
    within = int(np.searchsorted(before.marks, prompt.tokens, side="right"))
    is_same = prompt.prefixes[before.marks[:within]] == before.prefixes[:within]
    same = within if is_same.all() else int(is_same.argmin())
    shared = int(before.marks[same - 1]) if same else 0
    return shared, int(before.marks[same]) if same < len(before.marks) else before.tokens


def _continues(before: Sequence[bytes], now: Sequence[bytes]) -> bool:
    """Whether prompts of these parts' digests, the system part first, are turns of one conversation.

    They are if they have the first message behind an equal system prompt in common, or any two messages, or
    if the messages go on from all of those before. A title or a sub-agent under the same id may have the
    first message in common with the conversation, behind another system prompt, and no more.
    """
    own_before, own_now = before[1:], now[1:]
    if not own_before or not own_now:
        return False
    if before[0] == now[0] and own_before[0] == own_now[0]:
        return True
    if len(own_before) < len(own_now) and own_before == own_now[: len(own_before)]:
        return True
    return (Counter(own_before) & Counter(own_now)).total() >= 2


def _part_left(before: _SeenPrompt, prompt: PromptDigest, shared: int, until: int) -> str:
    """Return the name of the part that changed: the first that differs, or the one of the token.

    The part is that of the token if the texts of all parts until there are equal: the template then put
    something else there, or a reply was tokenised in another way.
    """
    parts = prompt.parts
    pairs = enumerate(zip(before.digests, parts, strict=False))
    differing = next((place for place, (was, part) in pairs if was != part.digest), None)
    if differing is not None and (differing == 0 or until > parts[differing - 1].end):
        return parts[differing].name
    if before.tools_text != prompt.tools_text:
        return TOOLS
    begun = (part for part in parts if part.start <= shared)
    return max(begun, key=lambda part: part.start, default=parts[0]).name  # of several, the first


def blamed(left: PrefixLeft, messages: Sequence[ChatMessage], rendered: str) -> PrefixLeft:
    """Return `left` with its reason, if it is that the template leaves out a message's reasoning."""
    if not left.part.startswith("messages["):
        return left
    at = int(left.part[len("messages[") : -1])
    for index in (at, at + 1):  # a message's place begins with its text, behind its reasoning
        thought = messages[index].reasoning.strip() if index < len(messages) else ""
        if thought and thought not in rendered:
            return replace(left, part=f"messages[{index}]", why="the template leaves out its reasoning")
    return left


def reasoning_lost(tokens: int, index: int, reply: ChatMessage) -> PrefixLeft:
    """Return where a prompt leaves the reply at `index`, of which only the words came back."""
    why = "the template leaves out" if reply.reasoning else "the client does not send"
    return PrefixLeft(tokens, tokens + STEP_TOKENS, f"messages[{index}]", f"{why} its reasoning")
