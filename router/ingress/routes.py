"""Handlers of the smaller routes, and which pages in a browser may call the API.

Stored responses are read and deleted here; POST /v1/responses is a `GenerationEndpoint`. The tokenizer's
routes have vLLM's shapes, with which evaluation harnesses and benchmarks count tokens;
`/v1/messages/count_tokens`, in Anthropic's, is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.router.anthropic import MessagesParser
from samovar.router.auth import ADMIN, Caller, tenant_of
from samovar.router.erasure import Erasure
from samovar.router.generation import IngressServices, ModelTable
from samovar.router.openai import (
    InvalidValue,
    ParsedTokenize,
    RequestParser,
    cursor,
    json_bytes,
    no_such_cursor,
    read_body,
    shown,
    whole_number,
)
from samovar.router.prompt import chars_of
from samovar.router.responses import ResponseNotFound, StoredResponse, input_items

ITEMS_DEFAULT, ITEMS_MAX = 20, 100
"""Items of a page, as of OpenAI's API."""


class ResponseRoutes:
    """Handlers of /v1/responses/{id}. They raise `ApiError`. A tenant sees its own responses only."""

    def __init__(self, service: IngressServices) -> None:
        self._service = service

    async def one(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}: the response as it was sent."""
        stored = await self._stored(request)
        return Response(stored.response, media_type="application/json")

    async def items(self, request: Request) -> Response:
        """Handle GET /v1/responses/{id}/input_items: what the response answered, newest first."""
        params = request.query_params
        limit, after = whole_number(params, "limit", ITEMS_DEFAULT, ITEMS_MAX), cursor(params)
        order = params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidValue("order", f"order={shown(order)} is neither asc nor desc.")
        items = input_items(request.path_params["response_id"], await self._stored(request))
        if order == "desc":
            items.reverse()
        if after:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            if not places:
                raise no_such_cursor(after)
            items = items[places[0] + 1 :]
        page = items[:limit]
        ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return JSONResponse({"object": "list", "data": page, "has_more": len(items) > limit, **ids})

    async def _stored(self, request: Request) -> StoredResponse:
        response_id, tenant = request.path_params["response_id"], tenant_of(request.scope)
        responses = self._service.responses
        stored = responses.get(tenant, response_id)
        if stored is None and await responses.fetch(tenant, response_id):
            stored = responses.get(tenant, response_id)
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    async def delete(self, request: Request) -> Response:
        """Handle DELETE /v1/responses/{id}. Its blocks stay until the session is deleted."""
        response_id, tenant = request.path_params["response_id"], tenant_of(request.scope)
        (cleared,) = await self._service.clears.erase(Erasure("response", tenant, (response_id,)))
        if not cleared["responses"]:
            raise ResponseNotFound(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


class TokenizerRoutes:
    """Handlers of /tokenize, /detokenize, /tokenizer_info and count_tokens. They raise `ApiError`.

    Texts may be longer than the model's context; they wait in the tokenizer's queue like prompts.
    """

    def __init__(self, service: IngressServices, parser: RequestParser, messages: MessagesParser) -> None:
        self._service = service
        self._parser = parser
        self._messages = messages
        self._by_model: ModelTable[TokenizerRoutes] | None = None

    def before(self, front: IngressServices, each: Sequence[TokenizerRoutes]) -> TokenizerRoutes:
        """Return the routes before several models; `each`: those of the models, these first."""
        found = TokenizerRoutes(front, self._parser, self._messages)
        found._by_model = ModelTable(front, each)
        return found

    async def tokenize(self, request: Request) -> Response:
        """Handle POST /tokenize: the tokens of a text, or of a conversation as it would be prompted."""
        with self._lease(request) as tenant:
            body, of = await self._body(request)
            asked = of._parser.tokenize(body)
            of._check_model(asked.model)

            def work() -> bytes:
                return json_bytes(of._tokens(asked))

            nbytes = chars_of(asked.chat) if asked.chat is not None else len(asked.text)
            return await of._worked(tenant, work, nbytes)

    async def count(self, request: Request) -> Response:
        """Handle POST /v1/messages/count_tokens: the tokens of a conversation's prompt."""
        with self._lease(request) as tenant:
            body, of = await self._body(request)
            asked = of._messages.count(body)
            of._check_model(asked.model)

            def work() -> bytes:
                ids = of._service.prompts.tokens_of_chat(asked, add_special_tokens=False)
                return json_bytes({"input_tokens": len(ids)})

            return await of._worked(tenant, work, chars_of(asked))

    def _tokens(self, asked: ParsedTokenize) -> dict[str, Any]:
        prompts, specials = self._service.prompts, asked.add_special_tokens
        if asked.chat is None:
            ids = prompts.tokens_of_text(asked.text, add_special_tokens=specials)
        else:
            ids = prompts.tokens_of_chat(asked.chat, add_special_tokens=specials)
        return {
            "count": len(ids),
            "max_model_len": self._service.context_tokens_max,
            "tokens": ids,
            "token_strs": prompts.vocabulary.names(ids) if asked.wants_names else None,
        }

    async def detokenize(self, request: Request) -> Response:
        """Handle POST /detokenize: the text of tokens."""
        with self._lease(request) as tenant:
            body, of = await self._body(request)
            asked = of._parser.detokenize(body)
            vocabulary = of._service.prompts.vocabulary
            of._check_model(asked.model)
            vocabulary.refuse_unknown(asked.token_ids, "tokens")

            def work() -> bytes:
                return json_bytes({"prompt": vocabulary.text(asked.token_ids)})

            return await of._worked(tenant, work, len(asked.token_ids))

    async def info(self, request: Request) -> Response:
        """Handle GET /tokenizer_info: the tokenizer's configuration, chat template included."""
        vocabulary = self._service.prompts.vocabulary
        with self._lease(request) as tenant:
            return await self._worked(tenant, lambda: json_bytes(vocabulary.config()), 0)

    @contextmanager
    def _lease(self, request: Request) -> Iterator[str]:
        """Hold a place of the caller's from before its body is read, as for answers; gives its tenant."""
        caller: Caller = request.scope["state"]["caller"]
        tenant = caller.tenant or ADMIN
        with self._service.concurrency.lease(tenant):
            yield tenant

    async def _worked(self, tenant: str, work: Callable[[], bytes], nbytes: int) -> Response:
        body = await self._service.prompts.work(work, nbytes, tenant)
        return Response(body, media_type="application/json")

    async def _body(self, request: Request) -> tuple[bytes, TokenizerRoutes]:
        """Return a body, and the routes of the model that it is for."""
        body = await read_body(request.receive, request.headers, self._service.settings.limits)
        return body, self if self._by_model is None else self._by_model.of_body(body)

    def _check_model(self, asked: str | None) -> None:
        if asked is not None:
            self._service.refuse_other_model(asked)


ANY = "*"
SHOWN_HEADERS = ("x-request-id", "traceparent", "x-cache", "x-replica", "x-ignored-fields", "retry-after")
"""Headers of a response that scripts may read."""


class CorsOrigins:
    """ASGI middleware: Starlette's CORS for the allowed `origins`; all else passes as if it were not there.

    A key is sent in a header, so cookies and the browser's own credentials are never allowed.
    """

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._cors = CORSMiddleware(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=(ANY,),
            allow_credentials=False,
            allow_private_network=True,
            expose_headers=SHOWN_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_allowed = scope["type"] == "http" and self.allows(Headers(scope=scope).get("origin"))
        await (self._cors if is_allowed else self._app)(scope, receive, send)

    def allows(self, origin: str | None) -> bool:
        """Return whether scripts of an origin may call the API."""
        return origin is not None and (ANY in self._origins or origin in self._origins)
