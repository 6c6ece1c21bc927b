"""Handlers of /v1/feedback, of candidates for the knowledge base, and of questions that gate them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from samovar.router.auth import read_model, tenant_of
from samovar.router.context.knowledge import KnowledgeBase
from samovar.router.context.learning.bodies import (
    ConfirmBody,
    FeedbackBody,
    LoopVerdict,
    QuestionsBody,
    RejectBody,
)
from samovar.router.context.learning.candidates import State
from samovar.router.context.learning.learning import LearningLoop
from samovar.router.generation import IngressServices
from samovar.router.openai import (
    InvalidValue,
    cursor,
    page_limit,
    shown,
)

FEEDBACK = "/v1/feedback"
CANDIDATES = "/v1/knowledge/candidates"
QUESTIONS = "/v1/knowledge/questions"

Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)


def feedback_routes(service: IngressServices, base: KnowledgeBase) -> list[Route]:
    """Return the routes; they stand before those of entries, whose paths would match theirs."""
    return FeedbackRoutes(service, base).routes()


class FeedbackRoutes:
    """The handlers. They raise `ApiError`. A tenant sees and changes its own only."""

    def __init__(self, service: IngressServices, base: KnowledgeBase) -> None:
        self._service = service
        self._base = base
        self._loop = LearningLoop(base, base.settings)

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = f"{CANDIDATES}/{{candidate}}"
        return [
            Route(FEEDBACK, self.feedback, methods=["POST"]),
            Route(FEEDBACK, self.log),
            Route(CANDIDATES, self.candidates),
            Route(one, self.candidate),
            Route(one, self.erase, methods=["DELETE"]),
            Route(f"{one}/confirm", self.confirm, methods=["POST"]),
            Route(f"{one}/reject", self.reject, methods=["POST"]),
            Route(QUESTIONS, self.questions),
            Route(QUESTIONS, self.keep_questions, methods=["POST"]),
            Route(QUESTIONS, self.forget_questions, methods=["DELETE"]),
        ]

    async def feedback(self, request: Request) -> Response:
        """Handle POST /v1/feedback: what became of an answer."""
        tenant, body = await self._body(request, FeedbackBody)
        work = partial(self._loop.feedback, tenant, body)
        return JSONResponse(await self._run(tenant, work, is_long=True), 201)  # it may ask questions

    async def log(self, request: Request) -> Response:
        """Handle GET /v1/feedback?verdict=&limit=&after=: what was said, the newest first."""
        verdict = _one_of(request, "verdict", get_args(LoopVerdict))
        return await self._page(request, partial(self._loop.log, tenant_of(request.scope), verdict))

    async def candidates(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/candidates?state=&limit=&after=: candidates, the newest first."""
        state = _one_of(request, "state", get_args(State))
        return await self._page(request, partial(self._loop.candidates, tenant_of(request.scope), state))

    async def candidate(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/candidates/{id}."""
        tenant = tenant_of(request.scope)
        work = partial(self._loop.candidate, tenant, request.path_params["candidate"])
        return JSONResponse(await self._run(tenant, work))

    async def confirm(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/candidates/{id}/confirm: make it an entry."""
        tenant, body = await self._body(request, ConfirmBody)
        work = partial(self._loop.confirm, tenant, request.path_params["candidate"], body)
        return JSONResponse(await self._run(tenant, work, is_long=True))

    async def reject(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/candidates/{id}/reject."""
        tenant, body = await self._body(request, RejectBody)
        work = partial(self._loop.reject, tenant, request.path_params["candidate"], body.why)
        return JSONResponse(await self._run(tenant, work))

    async def erase(self, request: Request) -> Response:
        """Handle DELETE /v1/knowledge/candidates/{id}."""
        tenant, name = tenant_of(request.scope), request.path_params["candidate"]
        await self._run(tenant, partial(self._loop.erase, tenant, name))
        return JSONResponse({"id": name, "object": "knowledge.candidate", "deleted": True})

    async def questions(self, request: Request) -> Response:
        """Handle GET /v1/knowledge/questions: the kept questions, as they were given."""
        tenant = tenant_of(request.scope)
        found = await self._run(tenant, partial(self._loop.questions, tenant))
        return JSONResponse({"object": "list", "data": found})

    async def keep_questions(self, request: Request) -> Response:
        """Handle POST /v1/knowledge/questions: keep these in place of those before."""
        tenant, body = await self._body(request, QuestionsBody)
        count = await self._run(tenant, partial(self._loop.keep_questions, tenant, body))
        return JSONResponse({"object": "knowledge.questions", "questions": count})

    async def forget_questions(self, request: Request) -> Response:
        """Handle DELETE /v1/knowledge/questions."""
        tenant = tenant_of(request.scope)
        await self._run(tenant, partial(self._loop.forget_questions, tenant))
        return JSONResponse({"object": "knowledge.questions", "deleted": True})

    async def _page(self, request: Request, read: Callable[[int, str], list[dict[str, Any]]]) -> Response:
        tenant, params = tenant_of(request.scope), request.query_params
        limit = page_limit(params)
        found = await self._run(tenant, partial(read, limit + 1, cursor(params)))
        return JSONResponse({"object": "list", "data": found[:limit], "has_more": len(found) > limit})

    async def _run(self, tenant: str, work: Callable[[], Result], *, is_long: bool = False) -> Result:
        with self._service.reads.lease(tenant):
            return await self._base.run(tenant, work, is_long=is_long)

    async def _body(self, request: Request, model: type[Body]) -> tuple[str, Body]:
        tenant = tenant_of(request.scope)
        return tenant, await read_model(request, model, self._service.bodies)


def _one_of(request: Request, name: str, words: tuple[str, ...]) -> str | None:
    given = request.query_params.get(name)
    if given is not None and given not in words:
        raise InvalidValue(name, f"{name}={shown(given)} is none of {', '.join(words)}.")
    return given
