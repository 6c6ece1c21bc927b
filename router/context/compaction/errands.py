"""Requests that the service makes for itself in idle moments: a summary, and what a turn will begin with.

They go to the replica that has the conversation's blocks, as a client's do. Closing one cancels it there: at
most one step is still computed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from samovar.cache_tiers.blocks import SESSION_BYTES, TAG_BYTES, tenant_tag
from samovar.cache_tiers.pricing import UNKNOWN_PREFILL
from samovar.configs.optional_sections import CompactionSettings
from samovar.replicas.messages import Admitted, Delta, Failed, GenerateRequest, Refused, SamplingParams
from samovar.router.generation import AskedTurn
from samovar.router.openai import Choice, ParsedChat
from samovar.router.prompt import Owner, Prompt, PromptBuilder
from samovar.router.routing import DirectoryLost, ReplicaClient, ReplicaFailed, SessionDirectory, TurnEnd

SUMMARY_LINEAGE = b"summary".ljust(TAG_BYTES - SESSION_BYTES, b"\0")
"""The lineage of all summaries of a session: erased with it, and not the one that forecasts are made of."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the service is: the secret of its tags, the fingerprint of its model."""

    secret: bytes
    model: str


@dataclass(frozen=True, slots=True)
class Told:
    """An answer to such a request. `computed_tokens`: of its prompt."""

    text: str
    is_whole: bool
    replica: str
    prompt_tokens: int
    computed_tokens: int
    tokens: int


class Errands:
    """Makes these requests. They raise `ApiError`, `ReplicaLost` and `ReplicaFailed`.

    `count`: called with what was computed: tokens of prompts, and tokens that were written.
    """

    def __init__(
        self,
        settings: CompactionSettings,
        prompts: PromptBuilder,
        client: ReplicaClient,
        directory: SessionDirectory,
        served: Served,
        count: Callable[[int, int], None],
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._client = client
        self._directory = directory
        self._served = served
        self._count = count

    async def is_idle(self) -> bool:
        """Whether no replica has anything to do."""
        return all(not one.running and not one.waiting for one in await self._client.stats())

    async def is_likely(self, asked: AskedTurn) -> bool:
        """Whether a session is expected back, as far as anything is known of that."""
        tenant, table = self._tenant(asked), self._directory.table
        view = table.view(tenant, asked.session)
        if view is None:
            return True
        if view.main.state == "closed":
            return False
        if self._directory.link is None:
            return True
        rows = tuple(row.session for row in view.rows)
        try:
            found = await self._directory.link.likely(tenant, rows, self._settings.return_s)
        except DirectoryLost:
            return True
        return not found or max(found.values()) >= self._settings.return_min

    def price_s(self, home: str, new_tokens: int, context_tokens: int = 0) -> float:
        """Return what computing these tokens takes."""
        price = self._directory.prefill_price(home) or UNKNOWN_PREFILL
        return price.seconds(new_tokens, context_tokens)

    def is_forgotten(self, asked: AskedTurn) -> bool:
        """Return whether a turn's session was deleted since the turn came. Thread-safe."""
        return self._prompts.forgotten.since(asked.forgets, asked.tenant, asked.session)

    async def prompt(self, asked: AskedTurn, request: ParsedChat) -> Prompt:
        """Return the prompt that a chat of this session gets."""
        owner = Owner(asked.tenant, asked.session)
        salt = asked.salt.hex()
        return await self._prompts.chat(salt, request, asked.tenant, owner=owner, forgets=asked.forgets)

    async def summary(self, asked: AskedTurn, request: ParsedChat, tokens_max: int) -> Told:
        """Have the model answer a request in at most `tokens_max`; nothing of it is stored in a tier."""
        prompt = await self._prompts.chat(asked.salt.hex(), request, asked.tenant)
        lineage = asked.session[:SESSION_BYTES] + SUMMARY_LINEAGE
        sampling = SamplingParams(max_tokens=tokens_max, temperature=0.0, shown_token_ids=prompt.shown_ids)
        return await self._ask(replace(asked, placement=None), prompt, sampling, lineage)

    async def prefill(self, asked: AskedTurn, prompt: Prompt) -> Told:
        """Compute and store what a session's next prompt begins with, as its lineage's last turn."""
        tenant = self._tenant(asked)
        lineage = self._directory.lineage(
            tenant, asked.session, prompt.token_ids, key=asked.salt, begin_tokens=len(prompt.token_ids)
        )
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        told = await self._ask(asked, prompt, sampling, lineage)
        self._directory.turn_ended(TurnEnd(tenant, lineage, told.replica, told.prompt_tokens))
        return told

    def _tenant(self, asked: AskedTurn) -> bytes:
        return tenant_tag(self._served.secret, asked.tenant)

    async def _ask(self, asked: AskedTurn, prompt: Prompt, sampling: SamplingParams, lineage: bytes) -> Told:
        tenant = self._tenant(asked)
        route = self._directory.route(tenant, lineage)
        request = GenerateRequest(
            request_id=f"idle-{uuid.uuid4().hex}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            salt=asked.salt,
            tenant=tenant,
            session=lineage,
            placement=asked.placement,
            model=self._served.model,
            route=route,
        )
        choice, admitted = Choice(0, prompt.reading), None
        async with aclosing(self._client.generate(request, asked.key)) as stream:
            async for events in stream:
                for event in events:
                    if isinstance(event, Refused | Failed):
                        raise ReplicaFailed(event.message)
                    if isinstance(event, Admitted):
                        admitted = event
                    elif isinstance(event, Delta):
                        choice.add(event)
                if choice.finish_reason is not None:
                    break
        if admitted is None or choice.finish_reason is None:
            raise ReplicaFailed("the stream of events ended before the answer did")
        computed = len(prompt.token_ids) - admitted.cached_tokens
        self._count(computed, len(choice.token_ids))
        return Told(
            choice.reply.content,
            choice.finish_reason == "stop",
            admitted.replica_id,
            len(prompt.token_ids),
            computed,
            len(choice.token_ids),
        )
