"""Routes of the tokenizer, in vLLM's shapes: evaluation harnesses and benchmarks count tokens with them.

`/v1/messages/count_tokens`, in Anthropic's, is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.anthropic import MessagesParser
from router.auth import ADMIN, Caller
from router.generation import IngressServices
from router.openai import ParsedTokenize, RequestParser, json_bytes, read_body
from router.prompt import chars_of


class TokenizerRoutes:
    """Handlers of /tokenize, /detokenize, /tokenizer_info and count_tokens. They raise `ApiError`.

    Texts may be longer than the model's context; they wait in the tokenizer's queue like prompts.
    """

    def __init__(self, service: IngressServices, parser: RequestParser, messages: MessagesParser) -> None:
        self._service = service
        self._parser = parser
        self._messages = messages

    async def tokenize(self, request: Request) -> Response:
        """Handle POST /tokenize: the tokens of a text, or of a conversation as it would be prompted."""
        asked = self._parser.tokenize(await self._body(request))
        self._check_model(asked.model)

        def work() -> bytes:
            return json_bytes(self._tokens(asked))

        nbytes = chars_of(asked.chat) if asked.chat is not None else len(asked.text)
        return await self._worked(request, work, nbytes)

    async def count(self, request: Request) -> Response:
        """Handle POST /v1/messages/count_tokens: the tokens of a conversation's prompt."""
        asked = self._messages.count(await self._body(request))
        self._check_model(asked.model)

        def work() -> bytes:
            ids = self._service.prompts.tokens_of_chat(asked, add_special_tokens=False)
            return json_bytes({"input_tokens": len(ids)})

        return await self._worked(request, work, chars_of(asked))

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
        asked = self._parser.detokenize(await self._body(request))
        vocabulary = self._service.prompts.vocabulary
        self._check_model(asked.model)
        vocabulary.refuse_unknown(asked.token_ids, "tokens")

        def work() -> bytes:
            return json_bytes({"prompt": vocabulary.text(asked.token_ids)})

        return await self._worked(request, work, len(asked.token_ids))

    async def info(self, request: Request) -> Response:
        """Handle GET /tokenizer_info: the tokenizer's configuration, chat template included."""
        vocabulary = self._service.prompts.vocabulary
        return await self._worked(request, lambda: json_bytes(vocabulary.config()), 0)

    async def _worked(self, request: Request, work: Callable[[], bytes], nbytes: int) -> Response:
        caller: Caller = request.scope["state"]["caller"]
        tenant = caller.tenant or ADMIN
        with self._service.concurrency.lease(tenant):
            body = await self._service.prompts.work(work, nbytes, tenant)
        return Response(body, media_type="application/json")

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.receive, request.headers, self._service.settings.limits)

    def _check_model(self, asked: str | None) -> None:
        if asked is not None:
            self._service.refuse_other_model(asked)
