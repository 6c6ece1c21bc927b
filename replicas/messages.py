"""Messages between the ingress and a replica.

Plain frozen data that crosses a process boundary; no torch, no Ray, no HTTP. The replica's `generate` yields
lists of events for one request: first one `Admitted` or `Refused`, then `Delta`s of its `n` choices in the
order they were generated. A choice ends with the `Delta` that has a `finish_reason`; a request ends when all
its choices have, or with `Failed`. An empty list is a heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from samovar.cache_tiers.blocks import TAG_BYTES, Placement
from samovar.cache_tiers.forecast import Role
from samovar.cache_tiers.pricing import PrefillPrice
from samovar.replicas.reply import ReplyReading

REPLICA_DEPLOYMENT = "Replica"
"""Name of the Serve deployment of replicas."""

Source: TypeAlias = str
"""Where the KV of a prompt's tokens came from: one of `sources()`."""
Decision = Literal["none", "load", "recompute", "hedge", "meet"]
FinishReason = Literal["stop", "length"]
TAIL_TOKENS = 16
"""Of a text that goes on, as many as hold a character behind all that is not text."""


GrammarKind = Literal["json_schema", "regex", "choice", "lark", "grammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like, from its first token to its end.

    `text`: a JSON Schema, a regex, a JSON list of texts, Lark in llguidance's form (with `%json {...}` and
    `<special tokens>`), or `grammar`: Lark or GBNF, whichever it is. `field`: of the request, for refusals.
    """

    kind: GrammarKind
    text: str
    field: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. Validated by the ingress; `temperature=0` is greedy.

    `prompt_logprobs`: k = the log-probabilities of the prompt's tokens and of the k best in their places;
    they are computed, so the cache serves only tokens before `prompt_logprobs_from`.
    """

    max_tokens: int = 0  # 0 = the rest of the context: the ingress puts the number in
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn by the replica
    logprobs: int | None = None  # None = off; k = the chosen token's and the k best
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    grammar: Grammar | None = None  # None: any text
    prompt_logprobs: int | None = None  # None = off
    prompt_logprobs_from: int = 0  # a token's place in the prompt; the first one has no log-probability
    shown_token_ids: tuple[int, ...] = ()  # special tokens whose text is part of the answer
    continues_text: bool = False  # the prompt's last text goes on in the answer; else a turn begins


@dataclass(frozen=True, slots=True)
class Resume:
    """Resumption of choice `choice`, of which `token_ids` are sampled already (`n` is then 1).

    The text of these tokens is not sent again, except text that was held back. With the same seed the next
    tokens are the ones that would have followed: see `sampling/sampler.py`.
    """

    choice: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Placement hints of a request, for the router and for the tiers.

    `home`: id of the replica that served the session last, `node`: that replica's node. `cached_tokens`:
    prompt tokens that the last turn left there. `avoid`: replicas on which this request has failed. `peers`:
    nodes whose tiers may hold the session's blocks, the likeliest first. `ticket`: identifies this call to
    the ingress (a request id is chosen by the client, and one request may be several calls). `ingress`: that
    ingress. `only`: the id of the only replica that can serve it, as long as that is there.
    """

    home: str = ""
    node: str = ""
    cached_tokens: int = 0
    avoid: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    ticket: str = ""
    ingress: str = ""
    only: str = ""


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Where a process listens for streams that are meant for it (`links/inlet.py`).

    `secret`: both ends of a connection prove that they know it (`links/handshake.py`). Only Ray carries it,
    and requests to who has proved itself.
    """

    host: str
    port: int
    secret: str = field(repr=False)

    @staticmethod
    def of(told: object) -> ReplyTo | None:
        """Return the address that a process has told Serve of itself; None: it listens nowhere."""
        match told:
            case [str(host), int(port), str(secret)]:
                return ReplyTo(host, port, secret)
        return None


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What forecasts know of a turn besides its tokens: role of its last message, use case.

    `returns_s`: when its client has said that the next one follows its end; `is_final`: that none does.
    """

    role: Role = "user"
    profile: str = "chat"
    returns_s: float | None = None
    is_final: bool = False


KEPT_REF_BYTES = 16


@dataclass(frozen=True, slots=True)
class Keep:
    """The name by which a client may ask for an answer again (`answers/answer_log.py`).

    `ref`: `KEPT_REF_BYTES`, from the tenant and the client's key. `body`: digest of what was asked under it.
    `created`: Unix time of the first asking. `is_attaching`: the answer is there; nothing is to be computed.
    `before`: the answer's events on a replica that was lost.
    """

    ref: bytes
    body: bytes
    created: int
    is_attaching: bool = False
    before: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """An answer that a replica keeps. `prompt`: its token ids, four bytes each, in this machine's order.

    `body`, `created`: see `Keep`.
    """

    replica_id: str
    body: bytes
    created: int
    prompt: bytes
    is_over: bool


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and its `n` answers.

    `salt` is mixed into the namespace of the prompt's block keys: requests with different salts can never
    share a block (G2 in docs/guarantees.md). `tenant` and `session` are tags (`TAG_BYTES` each) by which
    their blocks can be forgotten; the session's is that of the lineage (`blocks/extent.py`). `placement`:
    where the turn's blocks are stored at its end; None: nowhere. `model`: fingerprint of the model whose
    tokenizer produced the ids; a replica of another model refuses (`Failed`, `replica_lost`); empty: any.
    `resume`: continue an answer that another replica began. `trace`: context of the request's span; empty: it
    is not traced. `reply_to`: where the events of a call over a link are awaited; None: Serve carries the
    call, and its events. `keep`: the answer is kept for a while, and may be read again; None: it ends with
    its reader. `stores_all`: its blocks are stored even where computing them again is cheaper.
    `priority`: smaller = sooner, among the tenant's own. `adapter`: its name, of an engine that has any.
    `is_cleared`: its session was forgotten since the turn began, so that none of its blocks are kept.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    salt: bytes = b""
    tenant: bytes = bytes(TAG_BYTES)
    session: bytes = bytes(TAG_BYTES)
    placement: Placement | None = None
    model: str = ""
    resume: Resume | None = None
    route: Route = Route()
    turn: TurnContext = TurnContext()
    reading: ReplyReading | None = None
    trace: str = ""
    reply_to: ReplyTo | None = None
    keep: Keep | None = None
    stores_all: bool = False
    priority: int = 0
    adapter: str = ""
    is_cleared: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability under the model, before temperature and penalties.

    `rank`: its place among all tokens, 1 for the best; 0: not computed.
    """

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled token. `top`: (token id, log-probability) pairs, best first; empty if not requested.

    `rank`: of a token that was given: its place among all, 1 for the best; 0: not computed.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where the KV of one prompt came from; sent when the prompt is computed.

    `tokens`: all prompt tokens by the source of their KV. `decision`: `none` (no tier had more than the
    pool), `load`, `recompute` (a tier had more, but computing was cheaper), `hedge` (the load was late,
    computing started alongside it), `meet` (computed from the front while loading from the back). `load_s`:
    from the first fetch until its last block was in a page. `load_price_s` and `recompute_price_s`: the
    prices behind the decision; `saved_s`: the price of computing what was loaded. `missed`: tokens that an
    earlier turn had computed and that were computed again, by reason (`replicas/engine/requests.py`). `miss`:
    why less was loaded than there might have been, in words; never empty where something was missed.
    """

    tokens: dict[Source, int] = field(default_factory=dict)
    decision: Decision = "none"
    load_s: float = 0.0
    load_bytes: int = 0
    load_price_s: float = 0.0
    recompute_price_s: float = 0.0
    saved_s: float = 0.0
    miss: str = ""
    missed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt is computed; `cached_tokens` of it were reused. `queue_s`: until it had its pages.

    `prompt_logprobs`: all tokens of the prompt, if asked for; a token of rank 0 has no log-probability.
    """

    replica_id: str
    cached_tokens: int
    queue_s: float
    receipt: Receipt = Receipt()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not accepted, or its grammar turned out to be too complex. No event follows.

    `param`: the request's field at fault, where it is one that the replica knows.
    """

    reason: Literal["queue_full", "too_long", "invalid"]
    message: str
    retry_after_s: float | None = None
    param: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`.

    `text` may be empty (a token inside a UTF-8 character, or held back for a stop string); `token_ids` are
    all tokens sampled since the last `Delta` of this choice, the end-of-turn token included.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The replica could not continue this request. No event follows.

    `replica_lost`: the replica is shutting down or lost, so the same request may succeed elsewhere;
    `replica_id` names it where known.
    """

    message: str
    replica_lost: bool = False
    replica_id: str = ""


Event = Admitted | Refused | Delta | Failed


SCRATCH_PAGES = 1
"""Page 0 takes the writes of padding and belongs to no session."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What `samovar serve` prints about a ready replica."""

    replica_id: str
    model_name: str
    context_tokens_max: int
    device: str
    dtype: str
    threads: int
    exact: bool
    exactness: str  # one sentence: what the start-up probe found
    attention: str
    step: str  # what computes the steps, and why not another
    dtype_sentence: str  # which dtype, and why
    block_tokens: int
    kv_dtype: str  # what K and V are stored as
    bytes_per_token: int
    pages: int
    pool_bytes: int
    load_s: float
    model: str = ""  # fingerprint of config, tokenizer and weights, in hex
    graphs: str = ""  # which steps are CUDA graphs, and why others are not; empty on a CPU
    stages: tuple[tuple[str, float], ...] = ()  # of its start, with seconds
    drops_pages: bool = True  # of what is forgotten; else nothing finds them until they are overwritten
    prefill: PrefillPrice | None = None  # as its start measured it; `EngineStats` has what was learned since

    @property
    def pool_tokens(self) -> int:
        """Return the tokens for which its pages have room."""
        return (self.pages - SCRATCH_PAGES) * self.block_tokens

    def sessions_that_fit(self, tokens: int) -> int | None:
        """Return how many sessions of `tokens` its pages hold at once; None beyond its context."""
        if tokens > self.context_tokens_max:
            return None
        return (self.pages - SCRATCH_PAGES) // -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A replica's counters (monotonic since its start) and gauges (now)."""

    replica_id: str
    kv_dtype: str = ""  # what K and V are stored as
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_active: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0  # guesses that steps checked, and those of them that were right
    accepted_tokens: int = 0
    preemptions: int = 0
    cow_copies: int = 0
    evictions: int = 0
    refused: int = 0
    aborted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    tokens_by_source: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    slow_lookups: dict[str, int] = field(default_factory=dict)  # by the tier that was slow, or "node"
    verify_failures: dict[str, int] = field(default_factory=dict)  # "tier:kind"
    stores: dict[str, int] = field(default_factory=dict)  # taken, held, skipped:, dropped:, refused:REASON
    store_tokens: dict[str, int] = field(default_factory=dict)  # of these, by the same outcomes
    missed_tokens: dict[str, int] = field(default_factory=dict)  # see `Receipt.missed`
    swaps: int = 0
    audits: dict[str, int] = field(default_factory=dict)  # equal, mismatch, skipped
    memory_shortages: dict[str, int] = field(default_factory=dict)  # halved, preempted, resampled, failed
    loading: int = 0
    staged_bytes: int = 0
    prefill_price: tuple[float, float, float] = (0.0, 0.0, 0.0)  # c0, a, b: see `PrefillPrice`
    integrity_failures: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaGlance:
    """A replica's counters, and how many blocks of lineages (tags of tenant and lineage) its pool holds.

    None: its engine does not say whose its pages are.
    """

    stats: EngineStats
    blocks: dict[bytes, int] | None = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierSign:
    """Whether the tier actor of a replica's node answers it."""

    node_id: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a replica's `clear` removed: its own pages, and extents of its node's tiers.

    `unreachable`: tiers that did not answer; their records are deleted as soon as they do. `leaves_pages`:
    its engine cannot drop single pages: nothing finds them any more, until they are overwritten.
    """

    pages: int
    extents: int
    nbytes: int
    unreachable: tuple[str, ...] = ()
    leaves_pages: bool = False


class ModelRefused(Exception):
    """A model that cannot be served. `reason` names what is wrong and where, `fix` how to correct it."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason, fix)  # both as args: the exception survives pickling between processes
        self.reason = reason
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.reason.rstrip('.')}. Fix: {self.fix.rstrip('.')}."
