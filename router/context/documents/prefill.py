"""Computes a document's KV in advance, by the road of any request, and has it stored for all nodes.

The prompt is the one that every chat with this document begins with, up to the document's end and to the last
full block. It is computed in steps, each of which extends the one before: between two of them open requests
go first, and a document of any length holds others up for no longer than a step. What is computed is stored
in the lowest tier that the `documents` profile may use, so that every node finds it there, by the same price
law as everything: not where loading it takes longer than computing it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from samovar.cache_tiers.blocks import PLACED, TAG_BYTES, Placement, lineage_tag, session_of, tenant_tag
from samovar.configs.optional_sections import DocumentsSettings
from samovar.configs.sections import TierSettings
from samovar.configs.settings import Settings
from samovar.replicas.messages import (
    Admitted,
    Failed,
    GenerateRequest,
    Refused,
    ReplicaInfo,
    Route,
    SamplingParams,
    TurnContext,
)
from samovar.router.auth import tenant_salt
from samovar.router.context.documents.document import DocumentFailed, Prefilled, Wanted
from samovar.router.context.documents.placement import Whole, end_of_documents, place_documents
from samovar.router.openai import ApiError, ChatMessage, ParsedChat
from samovar.router.prompt import PromptBuilder
from samovar.router.routing import DirectoryLost, ReplicaClient, SessionDirectory

logger = logging.getLogger(__name__)

POLL_S = 0.1
QUESTION = ChatMessage("user", "-")
"""What stands behind a document while its prefix is found."""


class Replicas(Protocol):
    """The ingress's view of its replicas."""

    @property
    def replicas(self) -> list[ReplicaInfo]:
        """Those that answer."""
        ...


@dataclass(frozen=True, slots=True)
class Front:
    """What a prefill asks of its ingress. `busy`: how many requests are open there.

    `context_tokens_max`: the longest prompt and answer, as configured.
    """

    readiness: Replicas
    context_tokens_max: int
    busy: Callable[[], int]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How far a prefill is: `tokens` of its prefix, `computed` of these, the last of them on `node`."""

    tokens: int
    computed: int
    state: Prefilled
    reason: str = ""
    node: str = ""


def pinned(settings: TierSettings) -> Placement | None:
    """Return where a prefilled document's blocks go: at once to the lowest tier that its profile may use.

    None without tiers. Main memory gets them when they are used.
    """
    if not settings.enabled:
        return None
    profile = settings.profiles.documents
    allowed = [tier for tier in PLACED[: PLACED.index(profile.lowest) + 1] if settings.sizes.get(tier)]
    first = allowed[-1] if allowed else profile.first
    return Placement(first, (), profile.lowest, min(profile.min_ttl_s, profile.ttl_s), profile.ttl_s)


def document_session(secret: bytes, tenant: str, document: str) -> bytes:
    """Return the tag of the session that a document's own blocks are filed under."""
    message = b"\0".join((b"samovar document", tenant.encode(), document.encode()))
    return session_of(hmac.digest(secret, message, "sha256")[:TAG_BYTES])


class Prefill:
    """Prefills documents of one ingress, one step at a time. Use it from the event loop.

    `clock`: monotonic seconds.
    """

    def __init__(
        self,
        client: ReplicaClient,
        prompts: PromptBuilder,
        directory: SessionDirectory,
        front: Front,
        settings: Settings,
        *,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._directory = directory
        self._readiness = front.readiness
        self._tiers = settings.tiers
        self._own: DocumentsSettings = settings.documents
        self._volatile = settings.router.prefix.volatile_lines
        self._secret = secret
        self._context_tokens_max = front.context_tokens_max
        self._busy = front.busy
        self._clock = clock
        self._has_system: bool | None = None

    async def has_system(self) -> bool:
        """Return whether the served model's template has a place for a system prompt."""
        if self._has_system is None:
            word = "Samovar-probe"
            try:
                made = await self._prompts.chat("", _asked((ChatMessage("system", word), QUESTION)))
                self._has_system = word in (made.rendered or "")
            except ApiError as refused:
                if refused.status != 400:
                    raise
                self._has_system = False
        return self._has_system

    async def prefix(self, tenant: str, whole: Whole) -> list[int]:
        """Return the tokens that every chat of the tenant with this document alone begins with.

        Up to the last full block. Raises `DocumentFailed`, and `ApiError` if the tokenizer is busy.
        """
        messages = place_documents((QUESTION,), [whole], has_system=await self.has_system())
        try:
            prompt = await self._prompts.chat("", _asked(messages), tenant)
        except ApiError as refused:
            if refused.status != 400:
                raise
            raise DocumentFailed(refused.message.rstrip(".")) from None
        rendered = prompt.rendered or ""
        place = end_of_documents(rendered, [whole])
        if place is None:
            raise DocumentFailed("the model's chat template changes it")
        head = rendered[: place[1]]

        def tokens() -> list[int]:
            # Its last token may be another one where more text follows.
            ids = self._prompts.tokens_of_text(head, add_special_tokens=False)
            return [
                a
                for a, _ in takewhile(
                    lambda pair: pair[0] == pair[1], zip(prompt.token_ids, ids, strict=False)
                )
            ]

        most = min([self._context_tokens_max, *(one.context_tokens_max for one in self._readiness.replicas)])
        if len(prompt.token_ids) >= most:
            raise DocumentFailed(
                f"it has {len(prompt.token_ids)} tokens, and the model's context {most}: no chat can name it"
            )
        same = await self._prompts.work(tokens, len(head), tenant)
        return same[: len(same) // self._block_tokens * self._block_tokens]

    @property
    def _block_tokens(self) -> int:
        replicas = self._readiness.replicas
        return replicas[0].block_tokens if replicas else 1

    async def run(
        self, tenant: str, document: str, ids: list[int], wanted: Wanted
    ) -> AsyncGenerator[PrefillProgress, None]:
        """Compute a prefix in steps and have it stored; yield after each step, and the outcome at the end.

        Raises `DocumentFailed`, `ReplicaLost` and `ReplicaFailed`.
        """
        placement, session = pinned(self._tiers), document_session(self._secret, tenant, document)
        step = max(1, self._own.prefill_step_tokens // self._block_tokens) * self._block_tokens
        tag, salt = tenant_tag(self._secret, tenant), tenant_salt(self._secret, tenant, None)
        lineage, home, known, node = b"", "", 0, ""
        for end in [*range(step, len(ids), step), len(ids)]:
            lineage = lineage_tag(session, ids[:end], [lineage] if lineage else [], key=salt)
            await self._until_idle()
            home = await self._step(
                GenerateRequest(
                    request_id=f"{document}-{end}",
                    prompt_token_ids=ids[:end],
                    sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
                    salt=salt,
                    tenant=tag,
                    session=lineage,
                    placement=placement,
                    model=self.model,
                    route=Route(home, self._directory.nodes.get(home, ""), known) if home else Route(),
                    turn=TurnContext(profile="documents"),
                    stores_all=wanted == "always",
                ),
                session.hex(),
            )
            known = end
            node = self._directory.nodes.get(home, "")
            yield PrefillProgress(len(ids), end, "running", node=node)
        state, reason = await self._outcome(tag, session, len(ids), placement)
        yield PrefillProgress(len(ids), len(ids), state, reason, node)

    @property
    def model(self) -> str:
        """The fingerprint of the model that the replicas serve; empty while none answers."""
        replicas = self._readiness.replicas
        return replicas[0].model if replicas else ""

    async def _until_idle(self) -> None:
        """Wait until no request is open here, but not for longer than `prefill_idle_s`."""
        until_s = self._clock() + self._own.prefill_idle_s
        while self._busy() and self._clock() < until_s:  # noqa: ASYNC110 - requests of many kinds, no event
            await asyncio.sleep(POLL_S)

    async def _step(self, request: GenerateRequest, session_key: str) -> str:
        """Compute one step; return the replica that has."""
        home = ""
        async with aclosing(self._client.generate(request, session_key)) as stream:
            async for events in stream:
                for event in events:
                    if isinstance(event, Refused):
                        if event.reason == "queue_full":
                            raise PrefillBusy(event.message)
                        raise DocumentFailed(event.message.rstrip("."))
                    if isinstance(event, Failed):
                        raise PrefillBusy(event.message)
                    if isinstance(event, Admitted):
                        home = event.replica_id
        return home

    async def _outcome(
        self, tenant: bytes, session: bytes, tokens: int, placement: Placement | None
    ) -> tuple[Prefilled, str]:
        """Return what the tiers hold of it, once they do or `prefill_stored_s` have passed."""
        link, replicas = self._directory.link, self._readiness.replicas
        if placement is None or link is None:
            return "computed", "there are no tiers: the pool has it until others need the room"
        wanted_bytes = tokens * (replicas[0].bytes_per_token if replicas else 0)
        until_s, held = self._clock() + self._own.prefill_stored_s, 0
        while True:
            try:
                answer = await link.held(tenant, (session,))
            except DirectoryLost:
                answer = {}
            held = max((size for tier, size in answer.get(session, {}).items() if tier != "gpu"), default=0)
            if held >= wanted_bytes:
                return "stored", ""
            if self._clock() >= until_s:
                break
            await asyncio.sleep(POLL_S)
        law = "the rest is computed as quickly as it is loaded, by the price law, or no tier had room for it"
        if held:
            return "partly", f"{held} of {wanted_bytes} bytes are stored: {law}"
        return "computed", law.replace("the rest", "nothing is stored: it")


class PrefillBusy(Exception):
    """The replicas cannot take a step now; it is tried again."""


def _asked(messages: tuple[ChatMessage, ...]) -> ParsedChat:
    return ParsedChat(model="", sampling=SamplingParams(max_tokens=1), messages=messages)
