"""The ingress over scripted replicas, in process or on a socket of 127.0.0.1."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from fastapi import FastAPI

from samovar.configs.cluster import ClusterSettings
from samovar.configs.optional_sections import CompactionSettings, KnowledgeSettings
from samovar.configs.sections import TierSettings
from samovar.configs.settings import AuthSettings, LimitsSettings, RouterSettings, ServerSettings, Settings
from samovar.configs.telemetry import Tracer
from samovar.replicas.messages import FinishReason, GenerateRequest
from samovar.router.generation import IngressServices, PromptStage
from samovar.router.ingress.app import build_api, build_service
from samovar.router.ingress.places import add_places
from samovar.router.ingresses import Ingresses
from samovar.router.prompt.prompt import PromptBuilder
from samovar.router.routing.load_tracker import ReplicaLoadTracker
from samovar.router.routing.session_directory import DirectoryLink, SessionDirectory
from tests.support.engines.tiny_models import EOS_ID, make_tiny_tokenizer
from tests.support.router.fake_replica import INFO, FakeReplicas, Script, say

if TYPE_CHECKING:
    from samovar.router.context.compaction import Compactor

MODEL = "tiny"
NODE = "node-1"
CONTEXT = 2048
KEY = "sk-0123456789abcdef"
OTHER_KEY = "sk-fedcba9876543210"
ADMIN_KEY = "sk-admin-0123456789"
TOKENIZER = make_tiny_tokenizer()
SENT: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {"x-session-id": "id/é ?"}),
    ({}, {"x-session-affinity": "id/é ?"}),
    ({"session_id": "id/é ?"}, {}),
    ({"prompt_cache_key": "id/é ?"}, {}),
    ({}, {"x-openwebui-chat-id": "id/é ?"}),
    ({}, {"x-claude-code-session-id": "id/é ?"}),
    ({}, {"session-id": "id/é ?"}),
    ({}, {"thread-id": "id/é ?"}),
    ({"metadata": {"user_id": '{"device_id": "d", "session_id": "id/é ?"}'}}, {}),
    ({}, {"x-affinity": "id/é ?"}),
    ({"user": "id/é ?"}, {}),
    ({}, {"x-user-id": "id/é ?"}),
]
"""All places of a session's id: (fields of the body, headers)."""


def make_settings(
    *,
    limits: dict[str, Any] | None = None,
    keys: dict[str, str] | None = None,
    admin_key: str | None = None,
    tiers: TierSettings | None = None,
    replicas: int = 1,
    router: dict[str, Any] | None = None,
    knowledge: dict[str, Any] | None = None,
    compaction: dict[str, Any] | None = None,
    **server: Any,
) -> Settings:
    return Settings(
        router=RouterSettings.model_validate(router or {}),
        limits=LimitsSettings(**(limits or {})),
        auth=AuthSettings.model_validate({"api_keys": keys or {}, "admin_key": admin_key}),
        cluster=ClusterSettings(replicas=replicas),
        tiers=tiers or TierSettings(),
        server=ServerSettings(**server),
        knowledge=KnowledgeSettings.model_validate(knowledge or {}),
        compaction=CompactionSettings.model_validate(compaction or {}),
    )


class House:
    """An ingress with its fake replicas. `script` may be changed between requests."""

    def __init__(
        self,
        script: Callable[[GenerateRequest], Script] | None = None,
        *,
        settings: Settings | None = None,
        link: DirectoryLink | None = None,
        generation: Mapping[str, float] | None = None,
        commit: str | None = None,
        tokenizer: Any = TOKENIZER,
        tracer: Tracer | None = None,
        ingresses: Ingresses | None = None,
        stages: tuple[PromptStage, ...] = (),
    ) -> None:
        self.replicas = FakeReplicas(script or (lambda request: say(["Hel", "lo"])))
        self.settings = settings or make_settings()
        self.prompts = PromptBuilder(
            tokenizer,
            vocab_tokens=512,
            context_tokens_max=CONTEXT,
            eos_token_ids=[EOS_ID],
            settings=self.settings,
        )
        self.tracker = ReplicaLoadTracker()
        self.tracker.update_replicas({INFO.replica_id: NODE}, {})
        self.directory = SessionDirectory(link, self.tracker, self.settings.router)
        self.service: IngressServices = build_service(
            settings=self.settings,
            client=self.replicas,
            prompts=self.prompts,
            model_name=MODEL,
            context_tokens_max=CONTEXT,
            secret=b"secret",
            directory=self.directory,
            generation=generation,
            commit=commit,
            tracer=tracer,
            ingresses=ingresses,
        )
        if stages:
            self.service = replace(self.service, stages=(*self.service.stages, *stages))
            add_places(self.service)
        self.app: FastAPI = build_api(self.service)

    @asynccontextmanager
    async def client(self, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        """An HTTP client straight into the app, after a first poll of the replicas."""
        await self.service.readiness.poll()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as client:
            yield client
        self.check()

    @asynccontextmanager
    async def server(self, **options: Any) -> AsyncIterator[str]:
        """The app on a real socket, with uvicorn's `options`; gives its base URL."""
        await self.service.readiness.poll()
        async with serving(self.app, **options) as url:
            yield url
        self.check()

    def check(self) -> None:
        """Nothing is left open."""
        self.service.concurrency.check_integrity()
        self.prompts.check_integrity()
        self.directory.table.check_integrity()
        assert self.service.concurrency.open_total == 0
        assert self.replicas.open == 0


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """`app` under uvicorn on a free port of 127.0.0.1; gives its base URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, **options))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started or task.done())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 15)
        listener.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Give way to others until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions of many kinds, not one event
            await asyncio.sleep(0.005)


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A chat body of one user message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def spoken(
    text: str, *, cached: int = 0, finish: FinishReason = "stop", tokenizer: Any = TOKENIZER
) -> Script:
    """The text in the tokens of a tiny tokenizer, each in a delta of its own, and the end of the turn."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts = [tokenizer.decode(ids[:end]) for end in range(len(ids) + 1)]
    whole = [text.rstrip("\ufffd") for text in texts]
    words = [after.removeprefix(before) for before, after in pairwise(whole)]
    if finish == "length":
        return say(words, ids=ids, cached=cached, finish=finish)
    return say([*words, ""], ids=[*ids, EOS_ID], cached=cached)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after a check that it has OpenAI's shape."""
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    assert body["error"]["message"]
    assert response.headers["x-request-id"]
    assert "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error


def bearer(key: str) -> dict[str, str]:
    """Return the headers of a caller with this key."""
    return {"authorization": f"Bearer {key}"}


def keeper(of: House) -> Compactor:
    """Return what compacts the conversations of a front door."""
    from samovar.router.context.compaction import (
        Compactor,  # an extra: other users of this file have it blocked
    )

    found = of.service.stage("compaction")
    assert isinstance(found, Compactor)
    return found
