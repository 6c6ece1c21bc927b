"""Routes of /v1/knowledge, and the knowledge base over the served model's tokenizer.

Imported only where `knowledge.enabled` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from samovar.configs.settings import Settings
from samovar.replicas.turns import TenantThreads
from samovar.router.auth import read_model, tenant_of
from samovar.router.context.knowledge import (
    KINDS,
    Candidate,
    Change,
    EntryBody,
    EntryNotFound,
    EntryRef,
    EntryVersion,
    ImportBody,
    KnowledgeBase,
    KnowledgeError,
    KnowledgeStore,
    RevertAllBody,
    RevertBody,
    SearchBody,
    TagBody,
    TestBody,
    content_of,
    diff,
    imported,
    open_embedder,
    open_store,
    origin_of,
    questions_of,
)
from samovar.router.context.learning import Gate, LoopMemory, asked, feedback_routes
from samovar.router.erasure import Cleared, Erasure
from samovar.router.generation import IngressServices
from samovar.router.ingress.middleware import KNOWLEDGE_ROUTE
from samovar.router.openai import (
    ApiError,
    InvalidValue,
    ParsedChat,
    cursor,
    no_such_cursor,
    page_limit,
    shown,
    whole_number,
)
from samovar.router.prompt import PromptBuilder

if TYPE_CHECKING:
    from samovar.cache_tiers.encryption import Sealing

KNOWLEDGE = "/v1/knowledge"
VERSION_MAX = 2**31 - 1

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)


def refuse_sealed(store: KnowledgeStore) -> None:
    """Raise `KnowledgeError` if texts of a store are sealed, which would be taken for what they say."""
    try:
        sealed = store.records.of_all("key")
    except KnowledgeError:
        return  # it is away, and each call tries again
    if sealed:
        raise KnowledgeError(
            f"the knowledge of {len(sealed)} tenants is encrypted, and tiers.encryption_key_file is not set"
        )


class ServedText:
    """The served model's tokenizer, as the knowledge base needs it."""

    def __init__(self, prompts: PromptBuilder, context_tokens_max: int) -> None:
        self._prompts = prompts
        self.context_tokens_max = context_tokens_max
        self.marks: Collection[str] = prompts.vocabulary.marks()

    def tokens(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self._prompts.tokens_of_text(text, add_special_tokens=False)) if text else 0

    def chat_tokens(self, request: ParsedChat) -> int:
        """Return how many tokens a conversation's prompt has. Raises `ApiError`."""
        return len(self._prompts.tokens_of_chat(request, add_special_tokens=False))


def open_knowledge(
    settings: Settings,
    prompts: PromptBuilder,
    context_tokens_max: int,
    sealing: Sealing | None,
    tag_of: Callable[[str], bytes],
) -> KnowledgeBase:
    """Open the knowledge base of the settings. Raises `ExtraMissing`, and `KnowledgeError` without its key.

    A store that cannot be opened does not keep the ingress from starting: chats that want it get 503.
    `sealing`: what its texts are sealed with; None: they are not. `tag_of`: a tenant's tag.
    """
    own = settings.knowledge
    embedder = open_embedder(own.embedder)
    name = "" if embedder is None else embedder.name
    store: KnowledgeStore = open_store(own, settings.model.cache_dir, name, must_open=False)
    if sealing is None:
        refuse_sealed(store)
    else:
        from samovar.router.context.sealed import open_sealed  # who has no key does not load it

        store = open_sealed(store, own, name, sealing=sealing, tag_of=tag_of)
    text = ServedText(prompts, context_tokens_max)
    memory = LoopMemory(store, own.loop) if own.loop.enabled else None

    def makes_room(request: ParsedChat, tenant: str) -> bool:
        if not settings.compaction.enabled or request.truncate_tokens is not None:
            return False
        wish = request.compaction
        mode = settings.compaction.mode_for(tenant, wish is not None, None if wish is None else wish.mode)
        return mode is not None

    turns = TenantThreads(
        "knowledge",
        own.threads,
        places=own.waiting_max,
        tenant_share=settings.share_of_tenant(settings.limits.tenant_share),
        weights=settings.limits.tenant_weights,
    )
    return KnowledgeBase(store, embedder, text, own, settings.limits.retry_after_s, memory, makes_room, turns)


def knowledge_routes(service: IngressServices) -> list[Route]:
    """Return the routes of an ingress whose knowledge base is open."""
    base = service.stage(KnowledgeBase.name)
    assert isinstance(base, KnowledgeBase)

    async def erase(what: Erasure) -> Cleared:
        before_s = what.at_s if what.is_late else None
        return Cleared(entries=await base.erase(what.tenant, what.names, before_s))

    places = service.clears.places
    places["entries"] |= {"the knowledge base": erase, **places["made"]}
    own = KnowledgeRoutes(service, base).routes()
    # First: /v1/knowledge/candidates would be taken for an entry.
    return [*feedback_routes(service, base), *own] if base.settings.loop.enabled else own


class KnowledgeRoutes:
    """Handlers of /v1/knowledge. They raise `ApiError`. A tenant sees and changes its own entries only."""

    def __init__(self, service: IngressServices, base: KnowledgeBase) -> None:
        self._service = service
        self._base = base
        self._settings = base.settings

    def routes(self) -> list[Route]:
        """Return the routes, fixed paths before those with an id."""
        one = KNOWLEDGE_ROUTE
        return [
            Route(KNOWLEDGE, self.all),
            Route(KNOWLEDGE, self.create, methods=["POST"]),
            Route(KNOWLEDGE, self.delete_all, methods=["DELETE"]),
            Route(f"{KNOWLEDGE}/search", self.search, methods=["POST"]),
            Route(f"{KNOWLEDGE}/import", self.load, methods=["POST"]),
            Route(f"{KNOWLEDGE}/test", self.test, methods=["POST"]),
            Route(f"{KNOWLEDGE}/revert", self.revert_all, methods=["POST"]),
            Route(f"{KNOWLEDGE}/tags", self.tags),
            Route(f"{KNOWLEDGE}/tags", self.tag, methods=["POST"]),
            Route(one, self.get),
            Route(one, self.update, methods=["POST"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/history", self.history),
            Route(f"{one}/diff", self.diff),
            Route(f"{one}/revert", self.revert, methods=["POST"]),
        ]

    async def all(self, request: Request) -> Response:
        """Handle GET /v1/knowledge?kind=&limit=&after=: entries by id, with their newest version."""
        tenant, params = tenant_of(request.scope), request.query_params
        limit = page_limit(params)
        kinds = [kind for kind in KINDS if kind == params.get("kind", kind)]
        if not kinds:
            raise InvalidValue("kind", f"kind={shown(params['kind'])} is none of {', '.join(KINDS)}.")
        after = cursor(params)

        def work() -> list[EntryVersion]:
            if after:
                try:
                    self._base.store.head(tenant, after)
                except EntryNotFound:
                    raise no_such_cursor(after) from None
            return self._base.store.heads(tenant, kinds=kinds, limit=limit + 1, after=after)

        page = await self._run(tenant, work)
        data = [_card(version) for version in page[:limit]]
        return JSONResponse({"object": "list", "data": data, "has_more": len(page) > limit})

    async def create(self, request: Request) -> Response:
        """Handle POST /v1/knowledge: a new entry."""
        tenant, body = await self._body(request, EntryBody)
        if body.base is not None:
            raise InvalidValue("base", "base is of an entry's next version: send it to /v1/knowledge/{id}.")

        def work() -> list[EntryVersion]:  # not on the event loop: it looks at each character
            change = Change(content_of(body, self._settings), origin_of(tenant, body.why, body.turn))
            return self._base.write(tenant, [change])

        (made,) = await self._run(tenant, work)
        return JSONResponse(_card(made), status_code=201)

    async def update(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/{id}: the next version of an entry."""
        tenant, body = await self._body(request, EntryBody)

        def work() -> list[EntryVersion]:
            content, origin = content_of(body, self._settings), origin_of(tenant, body.why, body.turn)
            change = Change(content, origin, request.path_params["entry"], "update", body.base)
            return self._base.write(tenant, [change])

        (made,) = await self._run(tenant, work)
        return JSONResponse(_card(made))

    async def get(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/{id}?version=: its newest version, or that one."""
        tenant, entry = tenant_of(request.scope), request.path_params["entry"]
        number = whole_number(request.query_params, "version", 0, VERSION_MAX)
        store = self._base.store
        work = partial(store.version, tenant, EntryRef(entry, number)) if number else None
        return JSONResponse(_card(await self._run(tenant, work or partial(store.head, tenant, entry))))

    async def history(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/{id}/history?limit=&after=: its versions, the newest first."""
        tenant, params = tenant_of(request.scope), request.query_params
        limit = page_limit(params)
        after = whole_number(params, "after", VERSION_MAX, VERSION_MAX)
        entry = request.path_params["entry"]
        work = partial(self._base.store.history, tenant, entry, limit=limit + 1, before=after)
        found = await self._run(tenant, work)
        page = [_card(one) for one in reversed(found)]
        return JSONResponse({"object": "list", "data": page[:limit], "has_more": len(page) > limit})

    async def diff(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/{id}/diff?from=&to=: by default the newest version and the one before."""
        tenant, entry = tenant_of(request.scope), request.path_params["entry"]
        params = request.query_params
        head = await self._run(tenant, partial(self._base.store.head, tenant, entry))
        to = whole_number(params, "to", head.ref.number, VERSION_MAX)
        before = whole_number(params, "from", max(1, to - 1), VERSION_MAX)

        def work() -> str:
            one, other = (self._base.store.version(tenant, EntryRef(entry, each)) for each in (before, to))
            return diff(one.content, other.content)

        text = await self._run(tenant, work)
        return JSONResponse({"object": "knowledge.diff", "id": entry, "from": before, "to": to, "diff": text})

    async def revert(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/{id}/revert: a version becomes the newest again."""
        tenant, body = await self._body(request, RevertBody)
        questions = questions_of(body.questions, self._settings)
        origin, entry = origin_of(tenant, body.why), request.path_params["entry"]

        def work() -> dict[str, Any]:
            gate = Gate(self._base, tenant, questions)
            made = self._base.revert(tenant, entry, body.version, origin, gate.approval)
            return {**_card(made), **gate.report}

        return JSONResponse(await self._run(tenant, work, is_long=True))

    async def revert_all(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/revert: all entries are again as a tag names them."""
        tenant, body = await self._body(request, RevertAllBody)
        questions = questions_of(body.questions, self._settings)

        def work() -> dict[str, Any]:
            gate = Gate(self._base, tenant, questions)
            made = self._base.revert_to(tenant, body.tag, origin_of(tenant, body.why), gate.approval)
            return {"object": "list", "data": [_card(one) for one in made], **gate.report}

        return JSONResponse(await self._run(tenant, work, is_long=True))

    async def load(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/import: many entries, all or none."""
        tenant, body = await self._body(request, ImportBody)
        questions = questions_of(body.questions, self._settings)

        def work() -> dict[str, Any]:
            gate = Gate(self._base, tenant, questions)
            made = self._base.write(tenant, imported(body, self._settings, tenant), gate.approval)
            return {"object": "list", "data": [_card(one) for one in made], **gate.report}

        return JSONResponse(await self._run(tenant, work, is_long=True), status_code=201)

    async def search(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/search: entries with their scores, the best first."""
        tenant, body = await self._body(request, SearchBody)
        limit = min(body.limit, self._settings.results_max)

        def work() -> list[Candidate]:
            if body.budget_tokens is not None:
                return self._base.excerpt(tenant, body.query, body.kinds, body.budget_tokens)[:limit]
            return self._base.search(tenant, body.query, kinds=body.kinds, limit=limit)

        found = await self._run(tenant, work)
        data = [{**_card(one.version), "score": one.score, "ranks": dict(one.ranks)} for one in found]
        return JSONResponse({"object": "list", "data": data, "meaning": self._base.has_meaning})

    async def test(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/test: run questions; checks of answers are left to the client."""
        tenant, body = await self._body(request, TestBody)
        questions = questions_of(body.questions, self._settings)
        found = await self._run(tenant, partial(asked, self._base, tenant, questions), is_long=True)
        passed = sum(not one.failures for one in found)
        return JSONResponse(
            {
                "object": "knowledge.test",
                "passed": passed,
                "failed": len(found) - passed,
                "questions": [one.json() for one in found],
            }
        )

    async def tags(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/tags: the named states."""
        tenant = tenant_of(request.scope)
        found = await self._run(tenant, partial(self._base.store.tags, tenant))
        return JSONResponse({"object": "list", "data": [{"name": name} for name in found]})

    async def tag(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/tags: name the present state; a name that is there moves."""
        tenant, body = await self._body(request, TagBody)
        await self._run(tenant, partial(self._base.store.tag, tenant, body.name, self._base.limits))
        return JSONResponse({"object": "knowledge.tag", "name": body.name}, status_code=201)

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/knowledge/{id}: erase an entry with its history."""
        tenant, entry = tenant_of(request.scope), request.path_params["entry"]
        if not await self._erased(tenant, (entry,)):  # what was made of it goes, also if it was erased before
            raise ApiError(404, f"there is no entry {shown(entry)}.", param="id", code="entry_not_found")
        return JSONResponse({"id": entry, "object": "knowledge.entry", "deleted": True})

    async def delete_all(self, request: Request) -> Response:
        """Handle DELETE /v1/knowledge: erase everything of the caller."""
        tenant = tenant_of(request.scope)
        count = await self._erased(tenant, None)
        return JSONResponse({"object": "knowledge", "deleted": True, "entries": count})

    async def _erased(self, tenant: str, entries: tuple[str, ...] | None) -> int:
        with self._service.reads.lease(tenant):
            (cleared,) = await self._service.clears.erase(Erasure("entries", tenant, entries))
        return cleared["entries"]

    async def _run(self, tenant: str, work: Callable[[], Result], *, is_long: bool = False) -> Result:
        with self._service.reads.lease(tenant):
            return await self._base.run(tenant, work, is_long=is_long)

    async def _body(self, request: Request, model: type[Body]) -> tuple[str, Body]:
        tenant = tenant_of(request.scope)
        return tenant, await read_model(request, model, self._service.bodies)


def _card(version: EntryVersion) -> dict[str, Any]:
    content, origin = version.content, version.provenance
    return {
        "id": version.ref.entry,
        "object": "knowledge.entry",
        "version": version.ref.number,
        "operation": version.operation,
        "of_version": version.of_number,
        "kind": content.kind,
        "title": content.title,
        "text": content.text,
        "topics": list(content.topics),
        "who": origin.who,
        "why": origin.why,
        "turn": origin.turn,
        "created": int(version.at_s),
    }
