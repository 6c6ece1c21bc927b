"""What the OpenAPI document says of each route: a new route gets a line here (a test compares).

`GET /openapi.json` needs a key where there are keys, as every route but `/health` does.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.routing import BaseRoute, Route

from samovar.configs.settings import LimitsSettings
from samovar.router.anthropic import bounded_messages_body
from samovar.router.auth import GREETING_PATH
from samovar.router.ingress.middleware import (
    HINT_ROUTE,
    KNOWLEDGE_ROUTE,
    PAGE_ROUTE,
    RESPONSE_ROUTE,
    SESSIONS_ROUTE,
)
from samovar.router.ingress.operator_routes import ClearBody, HintBody
from samovar.router.ingress.routes import ITEMS_DEFAULT, ITEMS_MAX
from samovar.router.metrics import CONTENT_TYPE
from samovar.router.openai import (
    PAGE_DEFAULT,
    PAGE_MAX,
    DetokenizeBody,
    bounded_chat,
    bounded_completion,
    bounded_tokenize,
)
from samovar.router.paths import DOCUMENT_ROUTE, DOCUMENTS, KEY_ROUTE, KEYS, PREFILL_ROUTE, ROTATE_ROUTE
from samovar.router.reference import Operation, QueryParameter, answers, build_document
from samovar.router.responses import bounded_responses_body

OPENAPI_ROUTE = "/openapi.json"

_answer = partial(Operation, group="Answers")
_tokens = partial(Operation, group="Tokens")
_session = partial(Operation, group="Sessions")
_cache = partial(Operation, group="Cache")
_service = partial(Operation, group="Service")
_clear = partial(
    _cache, answer=answers.ClearedJson, access="admin", body=lambda _: ClearBody, is_body_optional=True
)

_keys = partial(Operation, group="Keys", answer=dict, access="admin")
_page = partial(Operation, group="Page", access="open", statuses={304: None})
_knowledge = partial(Operation, group="Knowledge", answer=dict)
_KB, _ENTRY = "/v1/knowledge", KNOWLEDGE_ROUTE
_FEEDBACK, _CANDIDATES = "/v1/feedback", f"{_KB}/candidates"
_CANDIDATE = f"{_CANDIDATES}/{{candidate}}"
_document = partial(Operation, group="Documents", answer=dict)
_MADE, _TAKEN = {201: dict}, {202: dict}
_KIND = QueryParameter("kind", "entries of this kind only", {"type": "string"})
_VERDICT = QueryParameter("verdict", "success or failure only", {"type": "string"})
_STATE = QueryParameter("state", "open, confirmed, captured or rejected only", {"type": "string"})


def _number(name: str, description: str) -> QueryParameter:
    return QueryParameter(name, description, {"type": "integer", "minimum": 1})


_LIMIT = QueryParameter(
    "limit",
    "items of a page",
    {"type": "integer", "minimum": 1, "maximum": PAGE_MAX, "default": PAGE_DEFAULT},
)
_ITEMS = QueryParameter(
    "limit",
    f"items of a page, {ITEMS_DEFAULT} by default",
    {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX},
)
_AFTER = QueryParameter("after", "the id of the last item of the page before", {"type": "string"})


def _kb_body(room: str, name: str, limits: LimitsSettings) -> type[BaseModel]:
    """Return a body of the knowledge base or of documents, which are imported only where enabled."""
    model: type[BaseModel] = getattr(importlib.import_module(room), name)
    return model


def _body(name: str, room: str = "samovar.router.context.knowledge") -> Any:
    return partial(_kb_body, room, name)


def _loop_body(name: str) -> Any:
    return _body(name, "samovar.router.context.learning")


def _key_body(_: LimitsSettings) -> type[BaseModel]:
    from samovar.router.identities import KeyBody  # only where there are keys in a file

    return KeyBody


def _rotate_body(_: LimitsSettings) -> type[BaseModel]:
    from samovar.router.identities import RotateBody

    return RotateBody


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): _answer(
        summary="Answer a conversation",
        body=bounded_chat,
        answer=answers.ChatCompletionJson,
        event=answers.ChatChunkJson,
        events="`data: ` events of `ChatChunk`, and `data: [DONE]`; of an error `Error`, and `[DONE]`",
    ),
    ("POST", "/v1/completions"): _answer(
        summary="Continue texts",
        body=bounded_completion,
        answer=answers.CompletionJson,
        event=answers.CompletionJson,
        events="`data: ` events of `Completion`, and `data: [DONE]`; of an error `Error`, and `[DONE]`",
    ),
    ("POST", "/v1/messages"): _answer(
        summary="Answer a conversation, in Anthropic's shapes",
        body=bounded_messages_body,
        answer=answers.MessagesAnswerJson,
        events="Anthropic's events, from `message_start` to `message_stop`; `message_delta` has the receipt",
    ),
    ("POST", "/v1/responses"): _answer(
        summary="Answer a conversation, in the shapes of OpenAI's Responses",
        body=bounded_responses_body,
        answer=answers.ResponseJson,
        events="OpenAI's events, to `response.completed`, `response.incomplete` or `response.failed`",
    ),
    ("GET", RESPONSE_ROUTE): _answer(summary="Return a stored response", answer=answers.ResponseJson),
    ("GET", f"{RESPONSE_ROUTE}/input_items"): _answer(
        summary="List the items that a stored response answered",
        description="Newest first; `order=asc`: oldest first.",
        answer=dict,
        query=(_ITEMS, _AFTER),
    ),
    ("DELETE", RESPONSE_ROUTE): _answer(
        summary="Delete a stored response",
        description="Its blocks stay until the session is deleted.",
        answer=answers.DeletedResponseJson,
    ),
    ("POST", "/v1/embeddings"): _answer(
        summary="Refuse: there are no embeddings", description="Always 400.", answer=None
    ),
    ("POST", "/v1/messages/count_tokens"): _tokens(
        summary="Count the tokens of a conversation's prompt",
        body=bounded_messages_body,
        answer=answers.TokenCountJson,
    ),
    ("POST", "/tokenize"): _tokens(
        summary="Return the tokens of a text or a conversation",
        description="Exactly one of `prompt` and `messages`.",
        body=bounded_tokenize,
        answer=answers.TokensJson,
    ),
    ("POST", "/detokenize"): _tokens(
        summary="Return the text of tokens", body=lambda _: DetokenizeBody, answer=answers.TextJson
    ),
    ("GET", "/tokenizer_info"): _tokens(
        summary="Return the tokenizer's configuration, chat template included", answer=dict
    ),
    ("GET", "/v1/sessions"): _session(
        summary="List the caller's conversations",
        description="With `auth.admin_key`: those of all tenants.",
        query=(_LIMIT, _AFTER),
        answer=answers.SessionsJson,
    ),
    ("GET", SESSIONS_ROUTE): _session(
        summary="Return a conversation, its bytes by tier and its lineages", answer=answers.SessionDetailJson
    ),
    ("DELETE", SESSIONS_ROUTE): _session(
        summary="Delete a conversation from the pool and every tier",
        description="The id is the client's, in whatever field it is sent, or the `sess_` name of the list.",
        answer=answers.ClearedJson,
    ),
    ("POST", HINT_ROUTE): _session(
        summary="Say what a client is about to do",
        description="`event`, `expected_return_s`, or both.",
        body=lambda _: HintBody,
        answer=answers.HintedJson,
    ),
    ("DELETE", "/v1/cache"): _cache(summary="Delete all of the caller's tenant", answer=answers.ClearedJson),
    ("POST", "/cache/clear"): _clear(summary="Delete all of one tenant, or of all"),
    ("POST", "/reset_prefix_cache"): _clear(summary="Do the same as /cache/clear, under vLLM's name"),
    ("GET", "/cache/stats"): _cache(
        summary="Return the counters of replicas and nodes", answer=answers.CacheStatsJson, access="admin"
    ),
    ("GET", KEYS): _keys(
        summary="List the keys of the file, without the keys themselves",
        description="Routes of keys are there where `auth.keys_file` is set.",
        query=(_LIMIT, _AFTER),
    ),
    ("POST", KEYS): _keys(
        summary="Make a key, which is shown this once",
        body=_key_body,
        statuses=_MADE,
    ),
    ("POST", ROTATE_ROUTE): _keys(
        summary="Make a key in place of another; both are good for a while",
        body=_rotate_body,
        is_body_optional=True,
        statuses=_MADE,
    ),
    ("DELETE", KEY_ROUTE): _keys(summary="Revoke a key: within seconds no ingress takes it"),
    ("GET", "/v1/models"): _service(
        summary="List the names under which the model is served", answer=answers.ModelsJson
    ),
    ("GET", "/v1/models/{model_id:path}"): _service(
        summary="Return one of these names", answer=answers.ModelJson
    ),
    ("GET", "/health"): _service(
        summary="Say whether requests are served",
        answer=answers.HealthJson,
        statuses={503: answers.HealthJson},
        access="open",
    ),
    ("GET", "/metrics"): _service(
        summary="Return the metrics, for Prometheus", answer=CONTENT_TYPE, access="admin"
    ),
    ("GET", GREETING_PATH): _service(
        summary="Say that there is a server", answer="text/plain", access="open"
    ),
    ("GET", "/version"): _service(summary="Return Samovar's version", answer=answers.VersionJson),
    ("GET", OPENAPI_ROUTE): _service(summary="Return this document", answer=dict),
    ("GET", "/v1/usage"): _service(
        summary="Return what the caller's tenant has used", answer=answers.UsageReportJson
    ),
    ("GET", "/v1/live"): _service(
        summary="Stream what the live page shows, as server-sent events", answer="text/event-stream"
    ),
    ("GET", "/"): _page(summary="Return the live page", answer="text/html"),
    ("GET", PAGE_ROUTE): _page(summary="Return a file of the live page", answer="*/*"),
    ("GET", _KB): _knowledge(summary="List the entries of the knowledge base", query=(_KIND, _LIMIT, _AFTER)),
    ("POST", _KB): _knowledge(summary="Write an entry", body=_body("EntryBody"), answer=None, statuses=_MADE),
    ("DELETE", _KB): _knowledge(summary="Delete the tenant's knowledge base"),
    ("POST", f"{_KB}/search"): _knowledge(summary="Find entries", body=_body("SearchBody")),
    ("POST", f"{_KB}/import"): _knowledge(
        summary="Write entries of one text", body=_body("ImportBody"), answer=None, statuses=_MADE
    ),
    ("POST", f"{_KB}/test"): _knowledge(summary="Check questions", body=_body("TestBody")),
    ("POST", f"{_KB}/revert"): _knowledge(
        summary="Give all entries the state of a tag again", body=_body("RevertAllBody")
    ),
    ("GET", f"{_KB}/tags"): _knowledge(summary="List the tags"),
    ("POST", f"{_KB}/tags"): _knowledge(
        summary="Name the present state", body=_body("TagBody"), answer=None, statuses=_MADE
    ),
    ("GET", _ENTRY): _knowledge(
        summary="Return an entry", query=(_number("version", "that one, not the newest"),)
    ),
    ("POST", _ENTRY): _knowledge(summary="Write an entry's next version", body=_body("EntryBody")),
    ("DELETE", _ENTRY): _knowledge(summary="Delete an entry"),
    ("GET", f"{_ENTRY}/history"): _knowledge(
        summary="List an entry's versions",
        query=(_LIMIT, _number("after", "the version of the last item of the page before")),
    ),
    ("GET", f"{_ENTRY}/diff"): _knowledge(
        summary="Compare two versions of an entry",
        query=(_number("from", "by default the one before `to`"), _number("to", "by default the newest")),
    ),
    ("POST", f"{_ENTRY}/revert"): _knowledge(
        summary="Make an older version the newest again", body=_body("RevertBody")
    ),
    ("POST", _FEEDBACK): _knowledge(
        summary="Say what became of an answer",
        description="`turn_id`: of the answer's receipt. What it teaches becomes a candidate.",
        body=_loop_body("FeedbackBody"),
        answer=None,
        statuses=_MADE,
    ),
    ("GET", _FEEDBACK): _knowledge(summary="List what was said", query=(_VERDICT, _LIMIT, _AFTER)),
    ("GET", _CANDIDATES): _knowledge(
        summary="List the candidates for the knowledge base", query=(_STATE, _LIMIT, _AFTER)
    ),
    ("GET", _CANDIDATE): _knowledge(summary="Return a candidate"),
    ("DELETE", _CANDIDATE): _knowledge(summary="Delete a candidate"),
    ("POST", f"{_CANDIDATE}/confirm"): _knowledge(
        summary="Make a candidate an entry", body=_loop_body("ConfirmBody")
    ),
    ("POST", f"{_CANDIDATE}/reject"): _knowledge(summary="Refuse a candidate", body=_loop_body("RejectBody")),
    ("GET", f"{_KB}/questions"): _knowledge(summary="Return the questions that new entries must not break"),
    ("POST", f"{_KB}/questions"): _knowledge(
        summary="Keep such questions, in place of those before", body=_loop_body("QuestionsBody")
    ),
    ("DELETE", f"{_KB}/questions"): _knowledge(summary="Delete these questions"),
    ("GET", DOCUMENTS): _document(summary="List the documents", query=(_LIMIT, _AFTER)),
    ("POST", DOCUMENTS): _document(
        summary="Take in a document",
        description="It is read, chunked and prefilled behind the answer: GET it to see how far it is.",
        body=_body("DocumentBody", "samovar.router.context.documents"),
        answer=None,
        statuses=_TAKEN,
    ),
    ("GET", DOCUMENT_ROUTE): _document(summary="Return a document's state, and how far it is"),
    ("DELETE", DOCUMENT_ROUTE): _document(
        summary="Delete a document, its chunks and the blocks that hold it",
        description="The blocks of all conversations that named it go with it.",
    ),
    ("POST", PREFILL_ROUTE): _document(
        summary="Compute and store a document's KV again",
        body=_body("PrefillBody", "samovar.router.context.documents"),
        answer=None,
        statuses=_TAKEN,
    ),
}


def openapi_document(
    limits: LimitsSettings, version: str, served: Collection[tuple[str, str]] | None = None
) -> dict[str, Any]:
    """Return the OpenAPI document of a service with these limits.

    `served`: methods and paths of the app's routes, as some depend on the settings; None: all that may be.
    """
    told = {key: one for key, one in OPERATIONS.items() if served is None or key in served}
    return build_document(told, limits, version)


def methods_of(routes: Collection[BaseRoute]) -> set[tuple[str, str]]:
    """Return method and path of each route."""
    return {
        (method, route.path)
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
