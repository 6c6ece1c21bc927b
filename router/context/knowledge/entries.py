"""What a knowledge base holds: entries in versions that never change, and what a store of them can do."""

from __future__ import annotations

import difflib
import math
import re
import secrets
import unicodedata
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from samovar.cache_tiers.blocks import SEALED_TEXT

Kind = Literal[
    "schema",
    "metric_definition",
    "usage_pattern",
    "gotcha",
    "error_correction",
    "query_template",
    "document_chunk",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
STABLE_KINDS: frozenset[Kind] = frozenset(
    {"schema", "metric_definition", "usage_pattern", "gotcha", "error_correction"}
)
"""Kinds that hold for a whole conversation; the others belong to one question."""

Operation = Literal["create", "update", "revert", "retire"]
Vector = NDArray[np.float32]

ID_PREFIX = "kb_"
NAMES_MAX = 64
"""Names of one text that are looked up and indexed."""
NAME_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class Content:
    """What one version of an entry says. `topics`: words that it is to be found by besides its text."""

    kind: Kind
    title: str
    text: str
    topics: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in UTF-8 that are accounted for it."""
        return sum(len(part.encode()) for part in (self.title, self.text, *self.topics))

    @property
    def words(self) -> str:
        """All its text, for an embedding."""
        return "\n".join(part for part in (self.title, " ".join(self.topics), self.text) if part)

    @property
    def indexed(self) -> tuple[str, str, str]:
        """Title, text and topics as a store's indexes have them: of what is sealed nothing."""
        is_sealed = self.text.startswith(SEALED_TEXT)
        return ("", "", "") if is_sealed else (self.title, self.text, " ".join(self.topics))

    @property
    def names(self) -> tuple[str, ...]:
        """What it names, of what is indexed."""
        return names_in(self.words) if any(self.indexed) else ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who made a version and why; `turn`: the answer that it was learned from, if any."""

    who: str
    why: str = ""
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class EntryRef:
    """One version of an entry."""

    entry: str
    number: int


@dataclass(frozen=True, slots=True)
class EntryVersion:
    """A version as it is stored: never changed, only followed. `retire` ends an entry, its history stays.

    `of_number`: the version that a `revert` repeats. `at_s`: Unix time. `seq`: the store's own counter.
    """

    ref: EntryRef
    operation: Operation
    content: Content
    provenance: Provenance
    at_s: float
    seq: int
    of_number: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One version that is to be written: of a new entry (`entry` None), or following the ones before.

    `base`: the number that the writer has seen; None: whatever is there. `vector`: of `content.words`.
    """

    content: Content
    provenance: Provenance
    entry: str | None = None
    operation: Operation = "create"
    base: int | None = None
    of_number: int | None = None
    vector: Vector | None = None

    def at(self, ref: EntryRef) -> Change:
        """Return it as a store is to write it, now that it is known as which version."""
        return self


@dataclass(frozen=True, slots=True)
class PlacedTurn:
    """What one turn of a session got as context: behind the system prompt, and beside the question."""

    front: tuple[EntryRef, ...] = ()
    beside: tuple[EntryRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """A tenant's quota: entries, bytes of all versions, and named states."""

    entries_max: int
    bytes_max: int
    tags_max: int


RecordKind = Literal["turn", "candidate", "log", "questions", "key"]


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """What is kept of a tenant beside its entries: turns, candidates, rows of the loop's log, its questions.

    And the wrapped keys that its rows are sealed with (`router/context/sealed`).

    `body`: JSON. `turn`: the answer that it is about; `session`: the conversation that the answer is of.
    `state`: of a candidate. `key`: a digest by which equal ones are found. `at_s`, `expires_s`: Unix times;
    from the second on it is not there. `vector`: of the store's embedder.
    """

    kind: RecordKind
    id: str
    body: str
    turn: str = ""
    session: bytes = b""
    state: str = ""
    key: bytes = b""
    at_s: float = 0.0
    expires_s: float = float("inf")
    vector: Vector | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are accounted for it."""
        return len(self.body.encode()) + RECORD_BYTES + (0 if self.vector is None else self.vector.nbytes)


RECORD_BYTES = 256
"""What a record takes beside its body."""


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """How much a tenant may have of a kind. `leaving`: the states whose oldest records make room."""

    count_max: int
    bytes_max: int
    leaving: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class Authorship:
    """How much of a base one author wrote: entries whose newest version is theirs, and versions lately."""

    entries: int
    entries_of: int
    versions_since: int


class KnowledgeError(Exception):
    """The store refuses: the message says why, without any entry's text. `param`: the field at fault."""

    param = "id"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param or type(self).param


class EntryNotFound(KnowledgeError):
    """The tenant has no such entry, version or tag."""


class VersionConflict(KnowledgeError):
    """The entry has a newer version than the writer has seen."""

    param = "base"


class StateChanged(KnowledgeError):
    """Others have written since the state that a change was tried on."""


class QuotaExceeded(KnowledgeError):
    """The tenant has no room for it."""

    param = "text"


class StoreBusy(KnowledgeError):
    """Another writer did not finish in time; nothing was written."""


class Rows(Protocol):
    """What statements are given to; their values are `?`. What comes back has `fetchall` and `rowcount`."""

    def execute(self, statement: str, values: Sequence[Any] = ..., /) -> Any:
        """Run a statement."""
        ...


class RowSealer(Protocol):
    """Seals what rows say with a key of their tenant. Raises `KnowledgeError` where that cannot be had."""

    def seal(self, tenant: str, name: Sequence[str], said: bytes) -> bytes:
        """Return what a row says, sealed for the row of that name."""
        ...

    def open(self, tenant: str, name: Sequence[str], sealed: bytes) -> bytes | None:
        """Return what a row says; what is not sealed as it is, and None if its key is gone."""
        ...

    def destroy(self, tenant: str) -> None:
        """Destroy the keys of a tenant: what they have sealed is as good as erased."""
        ...


class Tables(Protocol):
    """Tables of one schema in SQLite or PostgreSQL, for statements that both understand. Thread-safe.

    A row with a tenant is seen and changed by statements for that tenant only. Raises `KnowledgeError`.
    `skip_locked`: ends a subquery whose rows are to be changed, and passes over those that another changes.
    `sealer`: of the texts in them; None: they are as they are.
    """

    skip_locked: str
    sealer: RowSealer | None

    def by(self, index: str) -> str:
        """Return what follows a table's name so that rows are looked up by an index, where that needs it."""
        ...

    def writing(self, tenant: str, of: str = "") -> AbstractContextManager[Rows]:
        """Begin what is kept as a whole or not at all. `of`: what of the tenant's other writers wait for."""
        ...

    def reading(self, tenant: str, of: str = "") -> AbstractContextManager[Rows]:
        """Begin what only reads. `of`: as in `writing`, within which what is read here is written again."""
        ...

    def everyone(self, rows: Rows) -> AbstractContextManager[None]:
        """Show the rows of all tenants, for a while."""
        ...

    def erased(self) -> None:
        """Empty what still holds bytes of deleted rows; within a write nothing."""
        ...

    def close(self) -> None:
        """Close what is not shared with others."""
        ...


class Records(Protocol):
    """Records of many tenants, in the store of the entries and in its transactions. See `KnowledgeStore`."""

    def put(self, tenant: str, record: LoopRecord, bounds: RecordBounds) -> None:
        """Write a record, in place of that with its kind and id.

        The oldest of the kind that may leave make room for it. Raises `QuotaExceeded` if there is none.
        """
        ...

    def find(
        self,
        tenant: str,
        kind: RecordKind,
        *,
        ids: Collection[str] | None = None,
        session: bytes | None = None,
        state: str | None = None,
        key: bytes | None = None,
        limit: int | None = None,
        after: str = "",
    ) -> list[LoopRecord]:
        """Return records that fit all that is given, the newest first; `after`: from behind that id on."""
        ...

    def of_all(self, kind: RecordKind) -> list[tuple[str, LoopRecord]]:
        """Return the records of a kind, of all tenants, each with its tenant."""
        ...

    def rewrite(self, tenant: str, record: LoopRecord, body: str) -> bool:
        """Give a record that was found another body; False if it has changed or gone since."""
        ...

    def count(
        self,
        tenant: str,
        kind: RecordKind,
        *,
        session: bytes | None = None,
        state: str | None = None,
        since_s: float = 0.0,
    ) -> int:
        """Return how many records fit."""
        ...

    def similar(
        self, tenant: str, kind: RecordKind, vector: Vector, cosine_min: float, limit: int
    ) -> list[tuple[str, float]]:
        """Return ids of the records nearest in meaning, with the cosine."""
        ...

    def erase(
        self,
        tenant: str,
        *,
        kind: RecordKind | None = None,
        ids: Collection[str] | None = None,
        sessions: Collection[bytes] | None = None,
    ) -> int:
        """Erase records that fit all that is given, so that no file holds a byte of them."""
        ...


class KnowledgeStore(Protocol):
    """Entries of many tenants. Thread-safe; every call blocks. A tenant sees and changes its own only.

    A write is whole or not at all, and durable when the call returns. Scores of one tenant do not depend on
    what others have. All methods raise `KnowledgeError`.
    """

    @property
    def records(self) -> Records:
        """What is kept beside the entries."""
        ...

    def transaction(self) -> AbstractContextManager[object]:
        """Make one write of all that this thread writes inside: whole or not at all.

        One inside of another is a part of it, that is undone alone if it fails and the outer one goes on.
        """
        ...

    def write(
        self, tenant: str, changes: Sequence[Change], limits: Limits, since: int | None = None
    ) -> list[EntryVersion]:
        """Append versions, all or none. `since`: the tenant's state; `StateChanged` if it is another one."""
        ...

    def state(self, tenant: str) -> int:
        """Return a number that is another one after each change of what the tenant's searches find."""
        ...

    def trial(self, tenant: str, changes: Sequence[Change]) -> AbstractContextManager[KnowledgeStore]:
        """Give the tenant's newest versions as they would be with these changes, for searches of this thread.

        Nothing of it is kept, and quotas are not looked at. Others need not wait.
        """
        ...

    def authorship(self, tenant: str, who: str, since_s: float) -> Authorship:
        """Return how much of the base `who` wrote, and how many versions since that Unix time."""
        ...

    def head(self, tenant: str, entry: str) -> EntryVersion:
        """Return the newest version, a retired one too."""
        ...

    def version(self, tenant: str, ref: EntryRef) -> EntryVersion:
        """Return one version."""
        ...

    def versions(self, tenant: str, refs: Collection[EntryRef]) -> dict[EntryRef, EntryVersion]:
        """Return those versions that are there."""
        ...

    def history(
        self, tenant: str, entry: str, *, limit: int | None = None, before: int | None = None
    ) -> list[EntryVersion]:
        """Return the newest versions of an entry, of those before number `before`; the first one first."""
        ...

    def heads(
        self, tenant: str, *, kinds: Collection[Kind] = (), limit: int | None = None, after: str = ""
    ) -> list[EntryVersion]:
        """Return the newest versions of entries that are not retired, by id; of `kinds`, if any are given."""
        ...

    def by_words(
        self, tenant: str, words: Sequence[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        """Return entries that hold any of the words, the best (BM25) first."""
        ...

    def by_meaning(
        self, tenant: str, vector: Vector, kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        """Return the entries nearest in meaning, with the cosine."""
        ...

    def by_names(
        self, tenant: str, names: Collection[str], kinds: Collection[Kind], limit: int
    ) -> list[tuple[EntryRef, float]]:
        """Return entries that hold any of the names, those with the rarest first."""
        ...

    def without_vector(self, tenant: str, limit: int) -> list[EntryVersion]:
        """Return newest versions that have no vector of this store's embedder."""
        ...

    def put_vectors(self, tenant: str, vectors: Sequence[tuple[EntryRef, Vector]]) -> None:
        """Store vectors of newest versions; of others nothing."""
        ...

    def erase(self, tenant: str, entry: str | None) -> int:
        """Erase an entry with its history, or all of a tenant, so that no file holds a byte of it.

        With an entry go the records of the turns that its versions were learned from.
        """
        ...

    def erase_all(self, tenant: str, entries: Collection[str]) -> int:
        """Erase these entries, as `erase` does each."""
        ...

    def erase_before(self, tenant: str, at_s: float = math.inf) -> int:
        """Erase in one write all that a tenant had at that Unix time, as `erase` does; return the entries.

        Retired ones, records, tags and turns, too. Entries that were written to since then stay.
        """
        ...

    def tag(self, tenant: str, name: str, limits: Limits) -> int:
        """Name the present state of a tenant's entries; return its `seq`."""
        ...

    def tags(self, tenant: str) -> dict[str, int]:
        """Return the named states."""
        ...

    def state_at(self, tenant: str, seq: int) -> dict[str, EntryVersion]:
        """Return the version that each entry had then; entries that did not exist yet are left out."""
        ...

    def turns(self, tenant: str, session: bytes, keys: Sequence[bytes]) -> dict[bytes, PlacedTurn]:
        """Return what these turns of a session got."""
        ...

    def note_turn(self, tenant: str, session: bytes, key: bytes, placed: PlacedTurn) -> None:
        """Record what a turn got, in place of what was recorded for it."""
        ...

    def recent_fronts(self, tenant: str, limit: int) -> list[tuple[EntryRef, ...]]:
        """Return the sets that were last placed behind system prompts, the newest first, each once."""
        ...

    def forget_sessions(self, tenant: str, sessions: Collection[bytes] | None) -> None:
        """Forget what the turns of these sessions got, and erase their records; None: of all."""
        ...

    def beside(self, name: str, schemas: Sequence[str]) -> Tables:
        """Return tables that are kept beside the entries: in a file of that name, or in their database.

        `schemas`: of the file, see `SqliteFile`.
        """
        ...

    def backup(self, target: Path) -> None:
        """Copy the store into a new file while it is in use; stores of any kind can restore it."""
        ...

    def restore(self, source: Path) -> None:
        """Replace all but its keys by a backup, whole or not at all, while it is in use: see `keep_keys`."""
        ...

    def compact(self) -> None:
        """Rewrite what still has bytes of what was erased."""
        ...

    def close(self) -> None:
        """Close the store's files."""
        ...


def new_entry_id() -> str:
    """Return a random id of an entry."""
    return ID_PREFIX + secrets.token_hex(10)


LINE_BREAKS = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


# Marks and letters without a shape; a text can be hidden in runs of them.
NO_SHAPE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def clean(text: str) -> str:
    """Return `text` without characters that are not seen.

    Controls, direction marks, tags, zero widths, variation selectors. Line breaks of all
    kinds become "\\n", halves of characters become "?".
    """
    text = NO_SHAPE.sub("", LINE_BREAKS.sub("\n", text)).encode("utf-8", "replace").decode()
    return "".join(
        char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Co", "Cn")
    )


# Begins at the edge of a word, so that a long word costs no more than its length.
_NAME = re.compile(
    r"\b(?:[A-Za-z]\w*(?:[./-]\w+)+"  # dotted.names, codes such as ERR-42
    r"|[A-Za-z]+_\w+"
    r"|[A-Z]+[a-z0-9]+[A-Z][A-Za-z0-9]*"  # CamelCase
    r"|[A-Z]{2,}\d*"  # acronyms
    r"|[A-Za-z]+\d\w*|\d{3,}"  # numbered things, long numbers
    r"|(?<=[^.!?\n]\s)[A-Z][a-z]{2,})"  # proper names inside a sentence
)


def names_in(text: str) -> tuple[str, ...]:
    """Return what a text names (identifiers, codes, acronyms, proper names), in lower case, each once."""
    found = (match[0].lower()[:NAME_CHARS_MAX] for match in _NAME.finditer(text))
    return tuple(dict.fromkeys(found))[:NAMES_MAX]


def diff(before: Content, after: Content) -> str:
    """Return a unified diff of two versions' lines."""

    def lines(content: Content) -> list[str]:
        head = [
            f"kind: {content.kind}",
            f"title: {content.title}",
            f"topics: {', '.join(content.topics)}",
            "",
        ]
        return [*head, *content.text.split("\n")]

    return "\n".join(difflib.unified_diff(lines(before), lines(after), "before", "after", lineterm=""))
