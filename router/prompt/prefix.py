"""A prompt's prefix: its parts, how it is kept as it was the turn before, and where a new prompt leaves it.

Parts (the system prompt, and each message behind it, with their places in tokens) name a place in a prompt
for people (`messages[3]`); their digests tell whether the same message is in another prompt.

Kept as they were: volatile lines, tools' order, JSON's spelling. Clients build their JSON for each request
again: the same tool comes with its keys in another order, `required` and `enum` as sets, 1 as 1.0, other
escapes. It is then written as the session's first request wrote it.

A client that changes what it sent before (a clock in the system prompt, a history cut at its front) loses
all that is cached behind the change, and sees no more than a miss. `PrefixMemory` names the token and the
part. Several prompts alternate under one id (titles, tags, sub-agents), so the last few are kept, and a new
prompt is compared with the one that it continues; a prompt that continues none is nothing to report. Of a
prompt it keeps keyed digests of the prefixes that end at every 16th token and where parts begin and end: no
text and no ids. Bounded in bytes, the least recently used session goes first. Pure; not thread-safe.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from samovar.configs.json_text import parse_json
from samovar.configs.sections import PrefixSettings
from samovar.router.openai import ChatMessage, ParsedChat, Tool, ToolCall, split_front
from samovar.router.prompt.reply_memory import Owner

TokenIds = npt.NDArray[np.uint32]

SYSTEM = "system"
TOOLS = "tools"
DIGEST_BYTES = 8
SPACE = "\u2581"
"""How a sentencepiece vocabulary writes a space."""
BYTE_LEVEL_SPACE = "\u0120"
"""How a byte-level vocabulary writes a space; there every character stands for one byte."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt: the tokens `[start, end)` hold its text, `digest` is keyed.

    `name`: `system` (the leading system messages, or what the template puts there), or `messages[n]` as in
    the request.
    """

    name: str
    digest: bytes
    start: int
    end: int


class TokenSizes:
    """How many bytes of text each token of a vocabulary stands for.

    Exact for byte-level vocabularies. Others may add a space in front of a text, so that places are found a
    few tokens late; but they are the same in all prompts with the same beginning.
    """

    def __init__(self, vocab: Mapping[str, int], vocab_tokens: int) -> None:
        is_byte_level = BYTE_LEVEL_SPACE in vocab
        self._sizes = np.zeros(max([vocab_tokens, *(token_id + 1 for token_id in vocab.values())]), np.int64)
        for token, token_id in vocab.items():
            self._sizes[token_id] = len(token) if is_byte_level else _bytes_of_piece(token)

    def places(self, token_ids: TokenIds, offsets: Sequence[int]) -> list[int]:
        """Return, for each offset in bytes of the text, how many tokens lie wholly before it."""
        ends = np.cumsum(np.take(self._sizes, token_ids, mode="clip"))
        found: list[int] = np.searchsorted(ends, np.asarray(offsets, np.int64), side="right").tolist()
        return found


def _bytes_of_piece(token: str) -> int:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace(SPACE, " ").encode())


def parts_of(
    messages: Sequence[ChatMessage], rendered: str, token_ids: TokenIds, sizes: TokenSizes, key: bytes
) -> list[PromptPart]:
    """Return the parts of a conversation that was rendered as `rendered`, the system part first.

    A message that the template changed, and those behind it, have the place where the one before it ended.
    """
    leading = sum(1 for _ in takewhile(lambda message: message.role == "system", messages))
    spans = list(_spans(rendered, [message.content for message in messages]))
    # Without a system message: what the template says by itself.
    head = (spans[0][0], spans[leading - 1][1]) if leading else (0, spans[0][0])
    spans = [head, *spans[leading:]]
    names = [SYSTEM, *(f"messages[{index}]" for index in range(leading, len(messages)))]
    digests = [_digest(key, messages[:leading]), *(_digest(key, [one]) for one in messages[leading:])]
    offsets = list(_byte_offsets(rendered, [place for span in spans for place in span]))
    places = sizes.places(token_ids, offsets)
    return [
        PromptPart(name, digest, places[2 * number], places[2 * number + 1])
        for number, (name, digest) in enumerate(zip(names, digests, strict=True))
    ]


def _spans(rendered: str, contents: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield where each content lies in `rendered`: first character and the one behind."""
    at, is_lost = 0, False
    for content in contents:
        start = -1 if is_lost else rendered.find(content, at)
        if start < 0 and not is_lost:
            content = content.strip()  # as many templates do
            start = rendered.find(content, at)
        if start < 0:  # the template rewrote it; searching on for each message would read the text each time
            is_lost = True
            yield at, at
            continue
        at = start + len(content)
        yield start, at


def _byte_offsets(text: str, places: Iterable[int]) -> Iterator[int]:
    """Yield the byte offset in UTF-8 of each place in characters; places ascend."""
    if text.isascii():
        yield from places
        return
    at, offset = 0, 0
    for place in places:
        offset += len(text[at:place].encode())
        at = place
        yield offset


def _digest(key: bytes, messages: Iterable[ChatMessage]) -> bytes:
    digest = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    for message in messages:
        text = message.content.encode()
        digest.update(f"{message.role}\0{len(text)}\0".encode())
        digest.update(text)
        for call in message.calls:
            digest.update(f"\0{call.name}\0{call.arguments}".encode())
    return digest.digest()


def digest_of_texts(texts: Iterable[str], key: bytes) -> bytes:
    """Return the keyed digest of texts in their order."""
    digest = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    for text in texts:
        digest.update(f"{len(text)}\0{text}".encode("utf-8", "surrogatepass"))
    return digest.digest()


SETS = frozenset({"required", "enum", "type"})
"""Keys of a JSON Schema whose lists are sets."""
DATA = frozenset({"const", "default", "enum", "example", "examples"})
"""Keys of a JSON Schema whose values are no schemas."""
NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys of a JSON Schema whose values are objects of schemas: the names in them are no keys of a schema."""
SPELLING_OVERHEAD_BYTES = 600
TEXT_OVERHEAD_BYTES = 150
ARGUMENTS_CHARS_MIN = 8
"""Shorter arguments of calls have at most one key: they are as they came."""

_Row = tuple[str, bytes]
"""(salt, session's tag)"""


def canonical_json(value: Any) -> str:
    """Return one text for all spellings of a JSON value."""
    if isinstance(value, dict):
        texts = [f"{json.dumps(key)}:{canonical_json(value[key])}" for key in sorted(value)]
        return f"{{{','.join(texts)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical_json, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
        value = int(value)
    return json.dumps(value)


EXACT_MAX = float(2**53)
"""Up to here a float is the whole number that it spells."""


def canonical_schema(schema: Any, *, in_order: bool = False) -> str:
    """Return one text for all spellings of a JSON Schema, in which some lists are sets.

    `in_order`: properties in another order are another schema, as an answer that follows it has that order.
    """
    if isinstance(schema, list):
        return f"[{','.join(canonical_schema(one, in_order=in_order) for one in schema)}]"
    if not isinstance(schema, dict):
        return canonical_json(schema)
    texts = []
    for key in sorted(schema):
        value = schema[key]
        if key in NAMES and isinstance(value, dict):
            names = list(value) if in_order and key == "properties" else sorted(value)
            inner = (f"{json.dumps(one)}:{canonical_schema(value[one], in_order=in_order)}" for one in names)
            text = f"{{{','.join(inner)}}}"
        elif key in SETS and isinstance(value, list):
            text = f"[{','.join(sorted(map(canonical_json, value)))}]"
        else:
            text = canonical_json(value) if key in DATA else canonical_schema(value, in_order=in_order)
        texts.append(f"{json.dumps(key)}:{text}")
    return f"{{{','.join(texts)}}}"


def tool_digest(tool: Tool, key: bytes, *, is_promised: bool = False) -> bytes:
    """Return a tool's keyed digest, the same for every spelling of its JSON that means the same.

    `is_promised`: its calls follow its schema.
    """
    parameters = tool.spec["function"].get("parameters")
    told = {name: value for name, value in tool.spec["function"].items() if name != "parameters"}
    is_promised = is_promised or tool.is_strict
    text = f"{canonical_json(told)}{canonical_schema(parameters, in_order=is_promised)}{is_promised:d}"
    return blake2b(text.encode(), key=key, digest_size=DIGEST_BYTES).digest()


class JsonSpellings:
    """LRU memory of how sessions' requests first wrote their tools and calls, compressed; in `bytes_max`.

    Salt and owner as in `ReplyMemory`. Not thread-safe.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_used = 0
        self._rows: OrderedDict[_Row, tuple[Owner, dict[bytes, bytes]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def spell(self, salt: str, owner: Owner, texts: Sequence[tuple[bytes, str]]) -> list[str]:
        """Return each text as the session wrote it first, given its digest; remember those that are new."""
        row = salt, owner.session
        _, held = self._rows.setdefault(row, (owner, {}))
        self._rows.move_to_end(row)
        self._bytes_used += SPELLING_OVERHEAD_BYTES if not held else 0
        spelled = []
        for digest, text in texts:
            before = held.get(digest)
            if before is None:
                held[digest] = before = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
                self._bytes_used += len(before) + TEXT_OVERHEAD_BYTES
                spelled.append(text)
            else:
                spelled.append(zlib.decompress(before).decode("utf-8", "surrogatepass"))
        if not held:
            self._drop(row)
        while self._bytes_used > self._bytes_max:
            self._drop(next(iter(self._rows)))
        return spelled

    def forget(self, tenant: str | None = None, sessions: Collection[bytes] | None = None) -> None:
        """Drop the sessions of `tenant`, only these of it, or (None) all."""
        for row in [row for row, (owner, _) in self._rows.items() if owner.is_of(tenant, sessions)]:
            self._drop(row)

    def _drop(self, row: _Row) -> None:
        _, held = self._rows.pop(row)
        self._bytes_used -= _cost(held)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the state is inconsistent."""
        assert self._bytes_used == sum(_cost(held) for _, held in self._rows.values())
        assert self._bytes_used <= self._bytes_max or not self._rows
        assert all(owner.session == row[1] for row, (owner, _) in self._rows.items())


def _cost(held: dict[bytes, bytes]) -> int:
    return SPELLING_OVERHEAD_BYTES + sum(len(text) + TEXT_OVERHEAD_BYTES for text in held.values())


Spell = Callable[[Sequence[tuple[bytes, str]]], list[str]]
"""`JsonSpellings.spell` of a session."""


def as_before(
    request: ParsedChat, digests: Sequence[bytes], spell: Spell, key: bytes
) -> tuple[ParsedChat, bool]:
    """Return the request with its tools and calls written as the session wrote them; whether any differs.

    `digests`: of its tools, which stay the same.
    """
    tools = request.tools
    calls = [
        call
        for message in request.messages
        for call in message.calls
        if len(call.arguments) >= ARGUMENTS_CHARS_MIN
    ]
    if not tools and not calls:
        return request, False
    if request.offer is not None and request.offer.must_call:  # the order of properties is the answer's, too
        digests = [tool_digest(tool, key, is_promised=True) for tool in tools]
    given = [(digest, tool.text) for digest, tool in zip(digests, tools, strict=True)]
    given += [(_call_digest(call, key), call.arguments) for call in calls]
    spelled = spell(given)
    if all(text == now for (_, text), now in zip(given, spelled, strict=True)):
        return request, False
    offer = request.offer
    if offer is not None:
        pairs = zip(tools, spelled, strict=False)
        offer = replace(offer, tools=tuple(_spelled(tool, text) for tool, text in pairs))
    of = dict(zip((call.arguments for call in calls), spelled[len(tools) :], strict=True))
    messages = tuple(
        replace(
            one,
            calls=tuple(
                replace(call, arguments=of.get(call.arguments, call.arguments)) for call in one.calls
            ),
        )
        for one in request.messages
    )
    return replace(request, offer=offer, messages=messages), True


def _call_digest(call: ToolCall, key: bytes) -> bytes:
    try:
        text = canonical_json(parse_json(call.arguments))
    except RecursionError:  # deeper than Python follows: it counts as it came
        text = call.arguments
    return blake2b(text.encode(), key=key, digest_size=DIGEST_BYTES).digest()


def _spelled(tool: Tool, text: str) -> Tool:
    return tool if text == tool.text else replace(tool, text=text, spec=parse_json(text))


def in_order(request: ParsedChat, tools: Sequence[bytes], before: Sequence[bytes]) -> ParsedChat:
    """Return the request with its tools, of these digests, in the order that they had before."""
    assert request.offer is not None
    of = dict(zip(tools, request.offer.tools, strict=True))
    return replace(request, offer=replace(request.offer, tools=tuple(of[digest] for digest in before)))


def without_volatile(request: ParsedChat, settings: PrefixSettings) -> tuple[ParsedChat, tuple[str, ...]]:
    """Return the request with known volatile lines out of its prefix, and what was done, in words."""
    first = request.messages[0]
    if settings.volatile == "keep" or first.role != "system":
        return request, ()
    front = split_front(first, settings.volatile_lines)
    if not front.names:
        return request, ()
    messages = [ChatMessage("system", front.rest), *request.messages[1:]]
    if settings.volatile == "behind":
        last = sum(1 for _ in takewhile(lambda message: message.role == "system", messages)) - 1
        messages[last] = ChatMessage("system", "\n".join([messages[last].content, *front.lines]))
    done = "dropped" if settings.volatile == "drop" else "moved"
    return replace(request, messages=tuple(messages)), tuple(f"{done} {name}" for name in front.names)


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
