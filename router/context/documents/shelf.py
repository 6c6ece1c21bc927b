"""A tenant's documents: taken in, read, chunked, prefilled, placed in chats, erased.

`DocumentShelf` belongs to one event loop. What it does to a document is written down before and after each
stage, so that another ingress, or this one after a restart, goes on where it was left. Whose document is
worked on next: tenants take turns, by the time that their documents take.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from samovar.configs.optional_sections import DocumentsSettings
from samovar.replicas.turns import FairQueue
from samovar.router.context.documents.document import (
    Document,
    DocumentFailed,
    ForgetBlocks,
    ForgetEntries,
    Format,
    Prefilled,
    Quota,
    Wanted,
    new_document_id,
)
from samovar.router.context.documents.placement import (
    PlacedDocuments,
    Whole,
    end_of_documents,
    fenced_document,
    in_order,
    place_documents,
    text_of_documents,
)
from samovar.router.context.documents.prefill import Prefill, PrefillBusy, document_session
from samovar.router.context.documents.store import UNKNOWN, DocumentStore
from samovar.router.context.documents.text import chunks_of, read_pdf, text_of
from samovar.router.context.knowledge import (
    Change,
    Content,
    EntryNotFound,
    Kind,
    KnowledgeBase,
    KnowledgeError,
    PromptText,
    Provenance,
    QuotaExceeded,
    StoreBusy,
)
from samovar.router.generation import AskedTurn, PromptStage
from samovar.router.openai import (
    ApiError,
    InvalidValue,
    TooManyRequests,
    Unavailable,
    no_such_cursor,
    shown,
)
from samovar.router.routing import ReplicaFailed, ReplicaLost

logger = logging.getLogger(__name__)


Result = TypeVar("Result")
CHUNKS: tuple[Kind, ...] = ("document_chunk",)

IDLE_S = 2.0
"""How often an ingress without work looks whether another one has left some."""
COUNTED_MAX = 4096
"""Prompt fronts whose tokens are remembered."""
NOTED_MAX = 100_000
"""Uses that are known to be written down."""
CLEARED_AT_ONCE = 64
"""Sessions of one call to the tiers."""
ERASED_AT_ONCE = 256
"""Chunks of one write."""
CHUNK_BYTES_PER_CHAR = 4
RENEWALS = 3
"""In the time of a lease: two of them may fail."""
WORKERS = 2
"""Documents that an ingress works on at once, each of another tenant: so a PDF that takes all its time holds
one of them. Each may have a reader of `documents.pdf_bytes_max` beside it, so there are no more."""
PROCESSING_MAX = 256
"""A tenant's documents that wait to be read: what is behind them would wait for hours."""


class DocumentShelf(PromptStage):
    """The documents of an ingress's tenants. Its coroutines raise `ApiError`.

    `clears`, `forgets`: None until the routes are built: nothing is deleted before. `wall_clock`: Unix time.
    """

    name = "documents"

    def __init__(
        self,
        store: DocumentStore,
        base: KnowledgeBase,
        prefill: Prefill,
        text: PromptText,
        settings: DocumentsSettings,
        *,
        secret: bytes,
        volatile_lines: tuple[str, ...] = (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.settings = settings
        self.clears: ForgetBlocks | None = None
        self.forgets: ForgetEntries | None = None
        self._base = base
        self._prefill = prefill
        self._text = text
        self._secret = secret
        self._volatile = volatile_lines
        self._wall_clock = wall_clock
        self._owner = secrets.token_hex(8)
        self._quota = Quota(settings.documents_max, settings.bytes_max)
        self._wholes: OrderedDict[tuple[str, str], Whole] = OrderedDict()
        self._whole_bytes = 0
        self._counted: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._noted: OrderedDict[tuple[str, str, bytes], None] = OrderedDict()
        self._called = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []
        self._turns = DocumentTurns()
        self._stages: dict[tuple[str, str], asyncio.Task[None]] = {}  # tenant, document -> what is done to it

    # -- what clients ask ------------------------------------------------------------------

    async def add(
        self, tenant: str, title: str, form: Format, source: Callable[[], bytes], wanted: Wanted | None
    ) -> Document:
        """Take in a document; it is worked on from now on. `source`: called in a thread."""

        def work() -> Document:
            if self.store.processing(tenant) >= PROCESSING_MAX:
                message = f"{PROCESSING_MAX} documents wait to be read. Send this one when some are ready."
                raise TooManyRequests(message, IDLE_S, code="documents_processing")
            sent = source()
            made = Document(
                id=new_document_id(),
                tenant=tenant,
                title=title,
                format=form,
                state="processing",
                prefill=wanted or self.settings.prefill,
                source_bytes=len(sent),
                created_s=self._wall_clock(),
            )
            return self.store.add(made, sent, self._quota)

        added = await self._run(tenant, work)
        self._called.set()
        return added

    async def get(self, tenant: str, document: str) -> Document:
        """Return a document, also one that is being deleted."""
        return await self._run(tenant, partial(self.store.get, tenant, document))

    async def all(self, tenant: str, limit: int, after: str) -> list[Document]:
        """Return a page of a tenant's documents, by id. Raises `InvalidValue` for an unknown `after`."""

        def work() -> list[Document]:
            if after:
                try:
                    self.store.get(tenant, after)
                except EntryNotFound:
                    raise no_such_cursor(after) from None
            return self.store.all(tenant, limit, after)

        return await self._run(tenant, work)

    async def prefill(self, tenant: str, document: str, wanted: Wanted) -> Document:
        """Have a document's KV computed and stored again: after a clear, or for another model."""
        found = await self.get(tenant, document)
        if found.state != "ready":
            raise _not_ready(found)
        state: Prefilled = "none" if wanted == "never" else "waiting"
        fields = dict[str, Any](prefill=wanted, prefilled=state, prefill_reason="", prefilled_tokens=0)
        # Without a lease: who serves the wish before, here or elsewhere, has its next write refused.
        changed = await self._run(tenant, partial(self.store.change, tenant, document, lease="", **fields))
        await self._stop_stage(tenant, document)
        self._called.set()
        return changed

    async def delete(self, tenant: str, document: str) -> int:
        """Erase a document, its chunks, and the blocks of every session that had it; return the chunks.

        Raises 503 if something could not be reached: nothing of it is served from then on, and the rest is
        erased in the background; a repeated call says when it is done.
        """

        def mark() -> Document:
            try:
                return self.store.mark_deleting(tenant, document)
            except EntryNotFound:
                self.store.erased()  # who repeats a deletion that could not do that wants just that
                raise

        found = await self._run(tenant, mark, must_run=True)
        await self._stop_stage(tenant, document)
        return await self._erase(found)

    async def _stop_stage(self, tenant: str, document: str) -> None:
        """End what is done to a document here."""
        stage = self._stages.get((tenant, document))
        if stage is not None:
            stage.cancel()
            await asyncio.gather(stage, return_exceptions=True)

    # -- chats -----------------------------------------------------------------------------

    async def place(self, turn: AskedTurn) -> tuple[AskedTurn, PlacedDocuments | None]:
        """Return a chat with its documents in front, and what they are; as it came if it names none."""
        request, tenant = turn.placed, turn.tenant
        if not request.documents:
            return turn, None
        if len(request.documents) > (most := self.settings.per_request_max):
            message = f"documents may have at most {most} items (documents.per_request_max)."
            raise InvalidValue("documents", message)
        wholes, node_of = [], dict[str, str]()
        for index, one in enumerate(request.documents):
            try:
                whole, node_of[one] = await self._whole(tenant, one)
                wholes.append(whole)
            except ApiError as refused:
                refused.param = f"documents[{index}]"
                raise
        await self._note(tenant, [one.id for one in wholes], turn.session)
        placed = in_order(wholes)
        turn = replace(turn, nodes=tuple(node for one in placed if (node := node_of[one.id])))
        if await self._prefill.has_system():
            said = place_documents(request.messages, placed, has_system=True, volatile_lines=self._volatile)
            request = replace(request, messages=said)
        else:  # in no message: knowledge is searched for what the user said, and old ones may be left out
            request = replace(request, lead=text_of_documents(placed))
        return replace(turn, placed=request), PlacedDocuments(placed, tenant)

    async def measured(self, placed: PlacedDocuments, rendered: str | None) -> None:
        """Count the tokens of the documents in a prompt, and of what is before; None: it was cut."""
        span = None if rendered is None else end_of_documents(rendered, placed.documents)
        if span is None or rendered is None:
            return
        start, end = span
        key = hashlib.sha256(rendered[:end].encode()).digest()
        if key not in self._counted:
            count = self._text.tokens

            def counted() -> tuple[int, int]:
                return count(rendered[:start]), count(rendered[start:end])

            self._counted[key] = await self._base.run(placed.tenant, counted)
            while len(self._counted) > COUNTED_MAX:
                self._counted.popitem(last=False)
        placed.places = self._counted[key]

    async def _whole(self, tenant: str, document: str) -> tuple[Whole, str]:
        """Return a document as it stands in prompts, and the node that has computed it.

        Raises 404, or 409 before it is read.
        """
        found = await self.get(tenant, document)  # each time: another ingress may have deleted it
        if found.state == "deleting":
            raise _unknown(document)
        if found.state != "ready":
            raise _not_ready(found)
        known = self._wholes.get((tenant, document))
        if known is not None:
            self._wholes.move_to_end((tenant, document))
            return known, found.node

        def read() -> Whole:
            text = self.store.text(tenant, document)
            return fenced_document(document, found.title, text or "", self._text.marks)

        whole = await self._run(tenant, read)
        if (tenant, document) not in self._wholes:
            self._wholes[tenant, document] = whole
            self._whole_bytes += whole.nbytes
        while self._whole_bytes > self.settings.text_cache_bytes_max and len(self._wholes) > 1:
            _, gone = self._wholes.popitem(last=False)
            self._whole_bytes -= gone.nbytes
        return whole, found.node

    async def _note(self, tenant: str, documents: list[str], session: bytes) -> None:
        """Write down that this session's blocks are about to hold these documents."""
        new = [one for one in dict.fromkeys(documents) if (tenant, one, session) not in self._noted]
        if not new:
            return
        try:
            await self._run(
                tenant, partial(self.store.note_uses, tenant, new, session, self.settings.sessions_max)
            )
        except ApiError:
            for one in documents:
                self._forget(tenant, one)
            raise
        for one in new:
            self._noted[tenant, one, session] = None
        while len(self._noted) > NOTED_MAX:
            self._noted.popitem(last=False)

    def _forget(self, tenant: str, document: str) -> None:
        whole = self._wholes.pop((tenant, document), None)
        self._whole_bytes -= whole.nbytes if whole else 0
        for key in [key for key in self._noted if key[:2] == (tenant, document)]:
            del self._noted[key]

    # -- work in the background ------------------------------------------------------------

    def start(self) -> None:
        """Go on with what was left to do, on the running event loop."""
        while len(self._workers) < WORKERS:
            self._workers.append(asyncio.create_task(self._work_forever()))

    async def stop(self) -> None:
        """Stop; what is under way is left to the next ingress."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()

    def close(self) -> None:
        """Give back leases and close the file."""
        with suppress(KnowledgeError):
            self.store.release(self._owner)
        self.store.close()

    async def _work_forever(self) -> None:
        while True:
            self._called.clear()
            try:
                if await self.work():
                    continue
            except ApiError as refused:  # the next look may succeed
                logger.info("the documents cannot be worked on: %s", refused.message)
            except Exception:
                logger.exception("the documents cannot be worked on")
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._called.wait()

    async def work(self) -> bool:
        """Do what is left to do of one document; False if there is none."""
        tenant = self._turns.begin(await self._base.run("", self.store.waiting, must_run=True))
        if tenant is None:
            return False
        began_s = time.monotonic()
        try:
            claim = partial(self.store.claim, self._owner, tenant)
            found = await self._base.run(tenant, claim, must_run=True)
            if found is not None:  # else another ingress has it
                await self._staged(found)
            return True
        finally:
            self._turns.over(tenant, time.monotonic() - began_s)

    async def _staged(self, document: Document) -> None:
        key = document.tenant, document.id
        stage = self._stages[key] = asyncio.create_task(self._one(document))
        keeping = asyncio.create_task(self._keep(document))
        try:
            await asyncio.wait([stage])
        except asyncio.CancelledError:
            stage.cancel()
            await asyncio.gather(stage, return_exceptions=True)
            raise
        finally:
            keeping.cancel()
            del self._stages[key]

    async def _keep(self, document: Document) -> None:
        """Keep the lease of a document; a stage that has lost it fails when it next writes."""
        is_own = document.state != "deleting"  # which two may do
        while is_own:
            await asyncio.sleep(self.store.lease_s / RENEWALS)
            with suppress(ApiError):  # the next may succeed in time
                renew = partial(self.store.renew, document.tenant, document.id, self._owner)
                is_own = await self._base.run("", renew, must_run=True)

    async def _one(self, document: Document) -> None:
        tenant, one = document.tenant, document.id
        later = False
        try:
            if document.state == "deleting":
                await self._erase(document)
                return
            if document.state == "processing":
                document = await self._read(document)
            if document.prefilled in ("waiting", "running") and document.prefill != "never":
                await self._prefilled(document)
        except (EntryNotFound, DocumentFailed) as failed:
            await self._failed(tenant, one, str(failed))
        except (PrefillBusy, ReplicaLost, ReplicaFailed, StoreBusy) as busy:
            logger.info("document %s waits: %s", one, busy)
            later = True
        except ApiError as refused:
            later = refused.status in (429, 503)
            if refused.status == 404:
                await self._clear_late(tenant, one)
            elif not later:
                await self._failed(tenant, one, refused.message.rstrip("."))
        except Exception:
            logger.exception("document %s failed", one)
            await self._failed(tenant, one, "an internal error; the server's log has it")
        finally:
            later = later or document.state == "deleting"  # what is left of it is not tried without a pause
            with suppress(KnowledgeError, ApiError):
                await asyncio.shield(
                    self._base.run(
                        tenant,
                        partial(self.store.put_back, document, self._owner, later=later),
                        must_run=True,
                    )
                )

    async def _clear_late(self, tenant: str, one: str) -> None:
        """Clear what a step may have stored after another ingress had deleted the document."""
        try:
            found = await self.get(tenant, one)
            is_gone = found.state == "deleting"
        except ApiError as refused:
            is_gone = refused.status == 404
        if is_gone and self.clears is not None:
            with suppress(ApiError):  # they are named by nothing any more, and leave with their time
                await self.clears(tenant, (document_session(self._secret, tenant, one),))

    async def _failed(self, tenant: str, one: str, reason: str) -> None:
        """Write down why; of a document that is read already only its prefill has failed."""
        with suppress(ApiError):
            found = await self.get(tenant, one)
            fields: dict[str, Any] = {"state": "failed", "reason": reason}
            if found.state == "ready":
                fields = {"prefilled": "failed", "prefill_reason": reason}
            await self._change(found, **fields)

    async def _change(self, document: Document, **fields: Any) -> None:
        """Set fields of a document that is worked on; 404 if it is gone, or another ingress has it."""
        change = partial(self.store.change, document.tenant, document.id, owner=self._owner, **fields)
        await self._run(document.tenant, change)

    async def _read(self, document: Document) -> Document:
        """Read a document's text and have its chunks found. Raises `DocumentFailed`."""
        tenant, one, settings = document.tenant, document.id, self.settings
        text = await self._run(tenant, partial(self.store.text, tenant, one))
        if text is None:
            source = await self._run(tenant, partial(self.store.source, tenant, one)) or b""
            raw, pages = await read_pdf(source, settings) if document.format == "pdf" else (source, 0)
            text = await self._long(tenant, partial(_text, raw, settings.chars_max))
            put = partial(self.store.put_text, tenant, one, text, self._quota, owner=self._owner)
            await self._long(tenant, put)
            await self._change(document, pages=pages)
        chunks = await self._long(tenant, partial(self._chunks, document, text))
        changed: Document = await self._long(tenant, partial(self._write_chunks, document, chunks))
        return changed

    def _chunks(self, document: Document, text: str) -> list[tuple[str, str]]:
        own = self._base.settings.entry_bytes_max // CHUNK_BYTES_PER_CHAR // 2
        chars = min(self.settings.chunk_chars, max(own, 16))
        chunks = chunks_of(text, document.title, document.format == "markdown", chars)
        if len(chunks) > self.settings.chunks_max:
            most = self.settings.chunks_max
            raise DocumentFailed(f"it has {len(chunks)} chunks, more than {most} (documents.chunks_max)")
        return chunks

    def _write_chunks(self, document: Document, chunks: list[tuple[str, str]]) -> Document:
        """Write the chunks into the knowledge base, in place of those that an attempt before has written.

        All on one thread, which nothing interrupts. Another ingress that deletes it waits for the write, and
        then finds the chunks.
        """
        tenant, one = document.tenant, document.id
        origin = Provenance(tenant, _why(one))
        changes = [Change(Content("document_chunk", title, text), origin) for title, text in chunks]
        fitted = self._base.fitted(changes)  # before others wait
        _renew(self.store, document, self._owner)  # before the chunks of another ingress that has it go
        self._erase_entries(tenant, self._entries_of(document))
        with self.store.writing(tenant):  # no longer than it must: all tenants may share one file
            _renew(self.store, document, self._owner)
            try:
                made = self._base.store.write(tenant, fitted, self._base.limits)
            except QuotaExceeded as refused:
                raise DocumentFailed(f"the knowledge base has no room for its chunks: {refused}") from None
            fields: dict[str, Any] = {"state": "ready", "ready_s": self._wall_clock()}
            fields["entries"] = [version.ref.entry for version in made]
            fields["prefilled"] = "none" if document.prefill == "never" else "waiting"
            return self.store.change(tenant, one, owner=self._owner, **fields)

    def _erase_entries(self, tenant: str, entries: list[str]) -> None:
        for at in range(0, len(entries), ERASED_AT_ONCE):  # others write in between
            self._base.store.erase_all(tenant, entries[at : at + ERASED_AT_ONCE])

    def _entries_of(self, document: Document) -> list[str]:
        """Return the entries of a document's chunks: those that are listed, and others that were not yet."""
        heads = self._base.store.heads(document.tenant, kinds=CHUNKS)
        found = [one.ref.entry for one in heads if one.provenance.why == _why(document.id)]
        return list(dict.fromkeys((*document.entries, *found)))

    async def _prefilled(self, document: Document) -> None:
        tenant, one = document.tenant, document.id
        began_s = time.monotonic()
        whole, _ = await self._whole(tenant, one)
        ids = await self._prefill.prefix(tenant, whole)
        if not ids:
            raise DocumentFailed("it is shorter than one block")
        async with aclosing(self._prefill.run(tenant, one, ids, document.prefill)) as steps:
            async for step in steps:
                fields = {
                    "tokens": step.tokens,
                    "prefilled_tokens": step.computed,
                    "prefilled": step.state,
                    "prefill_reason": step.reason,
                    "prefill_s": time.monotonic() - began_s,
                    "model": self._prefill.model,
                    "node": step.node,
                }
                await self._change(document, **fields)

    async def _erase(self, document: Document) -> int:
        """Erase all that was made of a document, each whatever became of the others; itself at last.

        Raises what failed first: the document stays "deleting", and is gone on with.
        """
        tenant, one = document.tenant, document.id
        self._forget(tenant, one)
        if self.clears is None or self.forgets is None:
            raise Unavailable("The server is not ready to delete. Try again.", IDLE_S)
        entries = await self._long(tenant, partial(self._entries_of, document))
        users = await self._run(tenant, partial(self.store.sessions_of, tenant, one), must_run=True)
        work: list[Callable[[], Awaitable[None]]] = [
            partial(self._long, tenant, partial(self._erase_entries, tenant, entries)),
            partial(self.forgets, tenant, entries),
        ]
        if len(users) > self.settings.sessions_max:
            work.append(partial(self.clears, tenant, None))  # not all users are known
        else:
            own = (document_session(self._secret, tenant, one), *users)
            work += [
                partial(self.clears, tenant, own[at : at + CLEARED_AT_ONCE])
                for at in range(0, len(own), CLEARED_AT_ONCE)
            ]
        faults = []
        for part in work:
            try:
                await part()
            except Exception as fault:  # noqa: BLE001 - raised when the others are done
                faults.append(fault)
        if faults:
            raise faults[0]
        await self._run(tenant, partial(self.store.erase, tenant, one), must_run=True)
        return len(entries)

    async def _long(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Do a part of what is done to a document: there are few of them at once, so none is refused."""
        return await self._base.run(tenant, work, is_long=True, must_run=True)

    async def _run(self, tenant: str, work: Callable[[], Result], *, must_run: bool = False) -> Result:
        """Run a call of the store in a thread; what it does not find is a document, not an entry."""

        def told() -> Result:
            try:
                return work()
            except EntryNotFound:
                raise ApiError(
                    404, "There is no such document.", param="id", code="document_not_found"
                ) from None

        return await self._base.run(tenant, told, must_run=must_run)


def _text(raw: str | bytes, chars_max: int) -> str:
    return text_of(raw if isinstance(raw, str) else raw.decode("utf-8", "replace"), chars_max)


def _why(document: str) -> str:
    return f"document {document}"


def _unknown(document: str) -> ApiError:
    message = f"There is no document {shown(document)}."
    return ApiError(404, message, param="documents", code="document_not_found")


def _not_ready(found: Document) -> ApiError:
    reason = f": {found.reason}" if found.reason else ""
    message = f"The document {found.id} is {found.state}{reason}. GET /v1/documents/{found.id} says more."
    code = "document_failed" if found.state == "failed" else "document_not_ready"
    return ApiError(409, message, param="id", code=code)


TURN_S = 1.0
"""What a turn of a tenant is worth."""


class DocumentTurns:
    """Of a tenant one document at a time: its slow one leaves the other workers to the other tenants."""

    def __init__(self) -> None:
        self._turns: FairQueue[str, str] = FairQueue(TURN_S)  # each tenant is an item of its own
        self._busy: set[str] = set()

    def begin(self, waiting: Sequence[str]) -> str | None:
        """Return the tenant whose turn it is among those with open work; None: all are worked on."""
        for gone in [one for one in self._turns if one not in waiting]:
            self._turns.remove(gone)
        for one in waiting:
            if one not in self._turns:
                self._turns.put(one, one, 0.0)
        tenant = self._turns.pick(lambda one: one not in self._busy)
        if tenant is not None:
            self._turns.take(tenant)
            self._busy.add(tenant)
        return tenant

    def over(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for what its document has taken, and let its next one begin."""
        self._busy.discard(tenant)
        self._turns.charge(tenant, seconds)


def _renew(store: DocumentStore, document: Document, owner: str) -> None:
    """Raise `EntryNotFound` if another ingress has the document, or it is deleted."""
    if not store.renew(document.tenant, document.id, owner):
        raise EntryNotFound(UNKNOWN)
