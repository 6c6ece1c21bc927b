"""Opens a request: whose it is, which prompts it gives, and what the replicas are asked for them.

Three steps, in this order: `RequestOpener.identify`, `prompt`, and `answer` with `asks`. And how much of the
limits a request needs, before and after its prompts are known.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from samovar.cache_tiers.blocks import Placement, tenant_tag
from samovar.configs.telemetry import Span
from samovar.replicas.messages import GenerateRequest, TurnContext
from samovar.router.auth import Need, RequestLease, tenant_salt
from samovar.router.generation.answer import Answer
from samovar.router.generation.failover import seeded
from samovar.router.generation.resumption import AnswerName, NamedAnswer, NamedAnswers
from samovar.router.generation.services import IngressServices
from samovar.router.generation.stages import AskedTurn, Placing, asking, measure, staged
from samovar.router.ingresses import SessionTurn
from samovar.router.openai import (
    AnswerHead,
    AnswerShape,
    Dialect,
    InvalidValue,
    ParsedChat,
    ParsedCompletion,
)
from samovar.router.prompt import Owner, Prompt, answer_tokens
from samovar.router.routing import placement, session_key, session_tag, turn_context


@dataclass(frozen=True, slots=True)
class Identity:
    """A parsed request, whose it is, and where its blocks belong.

    `name`: how the client names its answer. `session`: the session's key; `known` has its tag. `placement`:
    of its blocks. `turn`: for the forecast of the next one.
    """

    request: ParsedChat | ParsedCompletion
    name: AnswerName | None
    known: SessionTurn
    session: str
    placement: Placement | None
    turn: TurnContext

    @property
    def tenant(self) -> str:
        """The tenant's name."""
        return self.known.owner.tenant

    @property
    def salt(self) -> bytes:
        """What separates blocks and remembered replies: by tenant, and `cache_salt`."""
        return self.known.salt


@dataclass(frozen=True, slots=True)
class Prompted:
    """The prompts of a request. `named`: the answer that the client can ask for again.

    `lineages`: of each prompt, the tag of the session's lineage that it belongs to. `placings`: what the
    stages did to a chat; `nodes`: see `AskedTurn`.
    """

    prompts: Sequence[Prompt]
    lineages: tuple[bytes, ...]
    named: NamedAnswer | None
    placings: tuple[Placing, ...] = ()
    nodes: tuple[str, ...] = ()

    @property
    def is_replayed(self) -> bool:
        """Whether the answer was asked for before: who asked first has counted it."""
        return self.named is not None and self.named.is_replayed


class RequestOpener:
    """Opens the requests of one route, for one ingress. Its methods raise `ApiError`."""

    def __init__(self, dialect: Dialect, service: IngressServices) -> None:
        self._dialect = dialect
        self._service = service
        self._names = NamedAnswers(dialect, service.secret, service.settings)

    async def identify(self, lease: RequestLease, headers: Headers, body: bytes) -> Identity:
        """Parse a body, refuse what cannot be served, and say whose it is; nothing is tokenised."""
        service, settings, tenant = self._service, self._service.settings, lease.tenant
        began_unix_s = time.time()  # a deletion from here on is one of a turn that runs
        request = await self._dialect.parse(body, tenant)
        service.refuse_other_model(request.model)
        name, request = self._names.name(request, headers, tenant)
        request = await self._within(lease, request)
        salt = tenant_salt(service.secret, tenant, request.ids.cache_salt)
        where = placement(settings.tiers, tenant, headers, request.cache)
        session = session_key(
            service.secret,
            tenant,
            headers,
            request,
            settings.limits.id_chars_max,
            settings.router.session_ids,
            settings.router.prefix.volatile_lines,
        )
        owner, forgets = Owner(tenant, session_tag(session)), service.prompts.forgets(tenant)
        known = SessionTurn(tenant_tag(service.secret, tenant), owner, salt, forgets, began_unix_s)
        turn = turn_context(settings.tiers, tenant, headers, request)
        return Identity(request, name, known, session, where, turn)

    async def _within(
        self, lease: RequestLease, request: ParsedChat | ParsedCompletion
    ) -> ParsedChat | ParsedCompletion:
        """Return a request within its tenant's rights and the model's window; its lease asks for its need."""
        service = self._service
        request = within_right(request, service.settings.best_priority(lease.tenant))
        vocabulary, sampling = service.prompts.vocabulary, request.sampling
        vocabulary.refuse_unknown(sampling.allowed_token_ids, "allowed_token_ids")
        vocabulary.refuse_unknown((token_id for token_id, _ in sampling.logit_bias), "logit_bias")
        request = with_cut(request, service.context_tokens_max)
        lease.ask(need_at_least(request))  # before the work of tokenising, and of compiling
        if sampling.grammar is not None:
            await service.prompts.check_grammar(sampling.grammar, lease.tenant)
        return request

    async def prompt(self, who: Identity, body: bytes, span: Span) -> Prompted:
        """Tokenise a request's prompts, with what is put into them."""
        service = self._service
        began_s = asyncio.get_running_loop().time()
        prompts, placings, nodes = await self._prompts(who)
        named: NamedAnswer | None = None
        if who.name is not None:
            named = await self._names.answer(service.client, who.name, who.tenant, who.session, body)
            prompts = named.prompts(prompts)  # a replay answers the tokens of then, not those of now
        span.part("tokenize", began_s, asyncio.get_running_loop().time())
        await measure(placings, prompts[0].rendered)  # behind that: None if these are other tokens
        lineages = tuple(
            service.directory.lineage(
                who.known.tenant,
                who.known.owner.session,
                prompt.token_ids,
                key=who.salt,
                begin_tokens=prompt.begin_tokens,
            )
            for prompt in prompts
        )
        return Prompted(prompts, lineages, named, placings, nodes)

    async def _prompts(self, who: Identity) -> tuple[list[Prompt], tuple[Placing, ...], tuple[str, ...]]:
        service, request, known = self._service, who.request, who.known
        if not isinstance(request, ParsedChat):
            return await service.prompts.completion(request, who.tenant), (), ()
        await service.known.recall(known, request)
        owner, forgets = known.owner, known.forgets
        turn = AskedTurn(
            who.tenant, owner.session, who.session, who.salt, forgets, who.placement, request, request
        )
        turn, placings = await staged(service.stages, turn)
        prompt = await service.prompts.chat(
            who.salt.hex(), turn.placed, who.tenant, owner=owner, forgets=forgets
        )
        return [prompt], placings, turn.nodes

    def answer(self, who: Identity, made: Prompted, request_id: str) -> tuple[Answer, AnswerShape]:
        """Return the empty answer to a request's prompts, and its shape."""
        request, named = who.request, made.named
        head = AnswerHead(
            answer_id=f"{self._dialect.id_prefix}{uuid.uuid4().hex}" if named is None else named.answer_id,
            model=self._service.model_name,
            created=int(time.time()) if named is None else named.keep.created,
            wants_logprobs=request.sampling.logprobs is not None,
            extras=request.extras,
            reading=made.prompts[0].reading,
            is_named_call=isinstance(request, ParsedChat) and bool(request.offer and request.offer.only),
        )
        answer = Answer(
            made.prompts,
            request.n,
            self._service.settings.limits.retry_after_s,
            generates=request.generates,
            request_id=request_id,
            contexts={one.stage.name: one.context for one in made.placings if one.context is not None},
        )
        return answer, self._dialect.shape(head, request, who.tenant, who.known.owner.session)

    def asks(self, who: Identity, made: Prompted, request_id: str, span: Span) -> list[GenerateRequest]:
        """Return the replica request of each prompt."""
        service, request, named = self._service, who.request, made.named
        self._refuse_long_prompt_logprobs(request, sum(len(prompt.token_ids) for prompt in made.prompts))
        asks = []
        for index, (prompt, lineage) in enumerate(zip(made.prompts, made.lineages, strict=True)):
            max_tokens = self._answer_tokens(request, len(prompt.token_ids))
            if not made.is_replayed:
                service.directory.turn_began(who.known.tenant, lineage)
            route = asking(service.directory.route(who.known.tenant, lineage), made.nodes)
            if named is not None and named.is_replayed:
                route = replace(route, only=named.replica_id)
            sampling = replace(
                request.sampling,
                max_tokens=max_tokens,
                shown_token_ids=prompt.shown_ids,
                grammar=prompt.grammar or request.sampling.grammar,
            )
            asks.append(
                GenerateRequest(
                    request_id=request_id if index == 0 else f"{request_id}-{index}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=seeded(sampling, None if named is None else named.seed),
                    n=request.n,
                    salt=who.salt,
                    tenant=who.known.tenant,
                    session=lineage,
                    placement=who.placement,
                    model=service.model,
                    route=route,
                    turn=who.turn,
                    reading=prompt.reading if prompt.reading and prompt.reading.tools else None,
                    trace=span.trace,
                    keep=None if named is None else named.keep,
                    priority=request.priority,
                )
            )
        return asks

    def _answer_tokens(self, request: ParsedChat | ParsedCompletion, prompt_tokens: int) -> int:
        """Return how long an answer to so many tokens may become."""
        context_tokens_max = self._service.context_tokens_max
        wanted = request.sampling.max_tokens or None
        if wanted is not None and request.is_length_default:
            wanted = min(wanted, max(1, context_tokens_max - prompt_tokens))
        param = "messages" if isinstance(request, ParsedChat) else "prompt"
        return answer_tokens(prompt_tokens, wanted, request.sampling.min_tokens, context_tokens_max, param)

    def _refuse_long_prompt_logprobs(
        self, request: ParsedChat | ParsedCompletion, prompt_tokens: int
    ) -> None:
        """Raise `InvalidValue` if the prompts have more log-probabilities than one answer may hold."""
        top, limit = request.sampling.prompt_logprobs, self._service.settings.limits.prompt_logprobs_max
        if top is not None and (1 + top) * prompt_tokens > limit:
            param = "prompt_logprobs" if request.extras.prompt_logprobs else "logprobs"
            message = (
                f"{prompt_tokens} prompt tokens with {1 + top} log-probabilities each are "
                f"more than {limit} (limits.prompt_logprobs_max). Send shorter prompts, or lower {param}."
            )
            raise InvalidValue(param, message)


def need_at_least(request: ParsedChat | ParsedCompletion) -> Need:
    """Return a lower bound of the request's need, before anything is tokenised."""
    prompts = () if isinstance(request, ParsedChat) else request.prompts
    count = max(1, len(prompts))
    sequences = count * request.n
    cut = request.truncate_tokens
    lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    prompt_tokens = sum(lengths) if cut is None else sum(min(length, cut) for length in lengths)
    return Need(
        sequences,
        max(count, prompt_tokens)
        + sequences * (1 if request.is_length_default else request.sampling.max_tokens or 1),
        "n" if request.n > 1 else "prompt",
    )


def need_of(asks: Sequence[GenerateRequest]) -> Need:
    """Return the need of the replica requests.

    An answer without `max_tokens` may take the whole context.
    """
    return Need(
        sum(ask.n for ask in asks),
        sum(len(ask.prompt_token_ids) + ask.n * ask.sampling.max_tokens for ask in asks),
        "n" if asks[0].n > 1 else "prompt",
    )


def within_right(request: ParsedChat | ParsedCompletion, best: int) -> ParsedChat | ParsedCompletion:
    """Return a request with a priority that its tenant may have, at best `best`; told if it had another."""
    if request.priority >= best:
        return request
    return replace(request, priority=best, ignored_fields=(*request.ignored_fields, "priority"))


def with_cut(
    request: ParsedChat | ParsedCompletion, context_tokens_max: int
) -> ParsedChat | ParsedCompletion:
    """Return a request whose prompt is cut to as many tokens as fit, where it asks for that."""
    if request.truncate_tokens != -1:
        return request
    # The default length of a chat's answer takes nothing from its prompt.
    is_asked = isinstance(request, ParsedCompletion) or not request.is_length_default
    left = context_tokens_max - max(1, request.sampling.max_tokens if is_asked else 1)
    return replace(request, truncate_tokens=max(1, left))
