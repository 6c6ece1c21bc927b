"""Sections of parts that a service can do without, or that are off by default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints, model_validator

from samovar.configs.sections import GIB, KIB, MIB, TIB, Section, TenantName

HttpUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s@]{1,1000}$")]


SAFE_URL = re.compile(r"https://.+|http://(127(\.\d{1,3}){3}|localhost|\[::1\])(:\d{1,5})?(/.*)?")


def is_safe_url(url: str) -> bool:
    """Return whether what is fetched cannot be changed on its way: https, or this machine's loopback."""
    return SAFE_URL.fullmatch(url) is not None


def _has_room_above(endpoint: str) -> str:
    port = int(endpoint.rpartition(":")[2])
    if not 1 <= port <= ZMQ_PORT_MAX:
        raise ValueError(
            f"its port is {port}, and ports up to 1063 above it are used: at most {ZMQ_PORT_MAX}"
        )
    return endpoint


ZMQ_PORT_MAX = 65535 - 1063
ZmqEndpoint = Annotated[
    str,
    StringConstraints(pattern=r"^tcp://(\*|[0-9A-Za-z._-]{1,253}|\[[0-9A-Fa-f:]{2,45}\]):[0-9]{1,5}$"),
    AfterValidator(_has_room_above),
]

INGRESSES_MAX = 64
Ingresses = Annotated[int, Field(ge=1, le=INGRESSES_MAX)]


def _auto_as_none(given: object) -> object:
    """Return None for `auto`."""
    return None if given == "auto" else given


class PageSettings(Section):
    """How many ingresses there are, and whether they show their work; a base of the section `server`."""

    ingress_replicas: Annotated[Ingresses | None, BeforeValidator(_auto_as_none)] = Field(
        None,
        description="processes that parse, tokenise and stream; any may die at any time; empty or `auto` = "
        "one on each node of a cluster, and one on a single machine, two where engine.device is cuda; "
        "with server.record or knowledge.enabled there is one",
    )

    page: bool = Field(
        True, description="serve the live page at / and its stream at /v1/live; false = neither exists"
    )


class IngressSettings(Section):
    """What ingresses share by the session directory, so that any of them may die."""

    kept_bytes_max: int = Field(
        64 * MIB,
        ge=0,
        le=100 * GIB,
        description="memory for what ingresses must find again: tokens of replies, stored responses; the "
        "tenant with most gives way first; 0 = each ingress knows its own only",
    )
    replies_per_session: ClassVar[int] = 4  # replies kept of one session; each holds all tokens up to its end
    kept_s_max: float = Field(
        7 * 86400.0,
        ge=1,
        le=366 * 86400,
        description="how long they are kept at most; a reply not longer than its blocks",
    )
    wait_s: float = Field(
        0.25,
        gt=0,
        le=10,
        description="how long a request waits for what another ingress knows, and the end of an answer until "
        "the others may know of it",
    )
    silent_s: float = Field(
        3.0,
        ge=0.5,
        le=600,
        description="an ingress that was not heard of for so long is dead: the others share its part of the "
        "limits of a tenant; at least two router.sync_s. Of a process that has ended they know at once",
    )
    # An ingress that starts takes requests when it has seen a replica, or after so long: then it answers 503
    # `loading` until it sees one.
    start_wait_s: ClassVar[float] = 10.0
    repeat_bytes_max: int = Field(
        64 * MIB,
        ge=0,
        le=100 * GIB,
        description="memory in each HTTP proxy for bodies of requests whose answers have not begun: those go "
        "to another ingress, once, if theirs dies; 0 = clients repeat them",
    )


class LiveSettings(Section):
    """The stream behind the live page, `GET /v1/live`. Nothing is gathered while no stream is open."""

    period_s: float = Field(
        0.5, ge=0.1, le=60, description="least time between two looks at the service, and two messages"
    )
    idle_period_s: float = Field(
        2.0, ge=0.1, le=60, description="the same while nothing changes; not less than period_s counts"
    )
    busy_period_s: float = Field(
        2.0, ge=0.1, le=60, description="the same once changes have gone on for long: on average"
    )
    burst_s: ClassVar[float] = 20.0  # credit by which looks may come sooner than busy_period_s; it refills
    listeners_max: int = Field(32, ge=1, le=4096, description="open streams of one ingress")
    listeners_per_key_max: int = Field(8, ge=1, le=4096, description="open streams of one tenant")
    sessions_max: int = Field(
        50, ge=1, le=1000, description="sessions in a stream, the most recently used ones"
    )
    lineages_max: ClassVar[int] = 8  # lineages of one session in a stream
    turns_max: ClassVar[int] = 64  # ended turns that wait for a slow reader; further ones are left out
    message_bytes_max: int = Field(
        256 * KIB, ge=4 * KIB, le=16 * MIB, description="one message; sessions used longest ago are left out"
    )
    stream_s_max: float = Field(
        300.0, ge=1, le=86400, description="a stream ends after this time, and its reader opens another"
    )
    advice_period_s: float = Field(
        10.0,
        ge=0.1,
        le=3600,
        description="least time between two diagnoses and sizings of the service, for who sees the cluster",
    )
    advice_chars_max: ClassVar[int] = 600  # one text of a diagnosis in a stream; longer ones are cut


class MonitoringSettings(Section):
    """Prometheus and Grafana on the head of a cluster that `samovar up` starts; both on loopback."""

    enabled: bool = Field(
        False,
        description="start Prometheus, with Samovar's alerts, and Grafana, with its dashboard, on the head; "
        "each must be installed there, and is left out where it is not",
    )
    prometheus_port: int = Field(9090, ge=1024, le=65535, description="port of Prometheus, on loopback")
    grafana_port: int = Field(3000, ge=1024, le=65535, description="port of Grafana, on loopback")
    retention_days: int = Field(15, ge=1, le=3650, description="how long Prometheus keeps samples")
    retention_bytes_max: ClassVar[int] = 10 * GIB  # disk that the samples take; the oldest go first


class TelemetrySettings(Section):
    """Traces, logs and KV events. Only the last tell of prompts: their tokens."""

    otlp_endpoint: HttpUrl | None = Field(
        None,
        description="where spans are sent by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; "
        'empty = no traces; needs `pip install "samovar[otel]"`',
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests that are traced, where the client's traceparent does not say",
    )
    queue_max: int = Field(
        2048, ge=1, le=1_000_000, description="spans of a process that may wait for export; more are dropped"
    )
    batch_max: ClassVar[int] = 512  # spans in one export
    export_interval_s: float = Field(5.0, gt=0, le=600, description="time between two exports")
    export_timeout_s: ClassVar[float] = 10.0  # an export that takes longer is dropped
    kv_events: ZmqEndpoint | None = Field(
        None,
        description="where caches say which blocks they have, to routers that know vLLM's KV events, such as "
        "tcp://10.0.0.5:5557 or tcp://*:5557: a node's tiers at this port, its replicas at the 63 behind it, "
        "replays at ports 1000 higher; anyone who can connect reads the tokens of prompts; empty = not at "
        'all; needs `pip install "samovar[events]"`',
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="json = one JSON object a line, with request id and trace id"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="the least severe messages that are logged; info has one line for each request"
    )


class LoopSettings(Section):
    """What answers teach: feedback, candidates for the knowledge base, and what enters without a person."""

    enabled: bool = Field(
        True,
        description="serve /v1/feedback; keep question and answer of turns that use knowledge, for feedback",
    )
    turn_bytes_max: ClassVar[int] = 64 * KIB  # question and answer of a turn; longer ones are not kept
    turns_max: ClassVar[int] = 10_000  # turns kept of a tenant; the oldest leave
    turns_bytes_max: ClassVar[int] = 32 * MIB
    turns_s: ClassVar[float] = 86_400.0  # how long a turn is kept
    candidates_max: ClassVar[int] = 1000  # candidates of a tenant; if none is decided on, no more are made
    candidates_bytes_max: ClassVar[int] = 16 * MIB
    candidates_s: ClassVar[float] = 2_592_000.0  # how long a candidate is kept
    candidates_per_session: ClassVar[int] = 20  # candidates of one conversation
    log_max: ClassVar[int] = 10_000  # feedback kept of a tenant; the oldest leaves
    log_bytes_max: ClassVar[int] = 16 * MIB
    log_s: ClassVar[float] = 2_592_000.0  # how long feedback is kept
    comment_chars_max: ClassVar[int] = 2000  # characters of a comment
    # A tenant's kept questions, which what the loop adds must not break.
    questions_bytes_max: ClassVar[int] = MIB
    # Cosine, or share of common words, from which on two texts say the same.
    similar_min: ClassVar[float] = 0.85
    auto_of: tuple[TenantName, ...] = Field(
        (), max_length=1024, description="tenants whose candidates may enter without a person (auto-capture)"
    )
    auto_evidence: Literal["tool", "verdict"] = Field(
        "tool",
        description="what auto-capture asks for: tool = a tool's result that passed, verdict = a success",
    )
    confirming_tools: dict[str, str] = Field(
        default_factory=dict,
        description="tool -> pattern of its results that confirm an answer (of auto-capture)",
    )
    auto_share_max: float = Field(
        0.1, ge=0, le=1, description="share of a tenant's entries that auto-capture may have written"
    )
    auto_per_session: int = Field(2, ge=0, le=100_000, description="auto-captures of one conversation")
    auto_per_window: int = Field(10, ge=0, le=100_000, description="auto-captures of a tenant in an hour")
    auto_window_s: ClassVar[float] = 3600.0  # the window of auto_per_window

    @model_validator(mode="after")
    def _patterns_are_patterns(self) -> LoopSettings:
        for tool, pattern in self.confirming_tools.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"knowledge.loop.confirming_tools: the pattern of {tool} is none: {error}"
                ) from None
        return self


class PostgresSettings(Section):
    """The knowledge base of several machines: a PostgreSQL with pgvector. Off without `url`."""

    url: SecretStr | None = Field(
        None,
        description="postgresql://user:password@host/database?sslmode=verify-full; empty = a file of this "
        "machine; what it leaves out comes from libpq's usual chain (PGPASSFILE, ~/.pgpass, PGHOST, ...); "
        'needs `pip install "samovar[postgres]"`',
    )
    schema_name: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]{0,39}$")] = Field(
        "samovar", description="schema of the tables, which is made if the role may"
    )
    connections_max: int = Field(4, ge=1, le=64, description="connections of one ingress")
    connect_s: float = Field(5.0, ge=2, le=60, description="time to connect to one address")
    statement_s: float = Field(15.0, gt=0, le=600, description="a statement that takes longer is cancelled")
    retry_s: float = Field(
        1.0,
        ge=0,
        le=60,
        description="after a connection failed, calls are refused for this long without another try",
    )

    # On the section, not on the field: a field's problem could show its value.
    @model_validator(mode="after")
    def _url_is_one(self) -> PostgresSettings:
        url = "" if self.url is None else self.url.get_secret_value()
        if url and (re.match(r"postgres(ql)?://", url) is None or url.partition("?")[0].count("@") > 1):
            raise ValueError(
                "knowledge.postgres.url does not begin with postgresql://, or has more than one @. "
                "Write an @ of a password as %40"
            )
        return self


class KnowledgeSettings(Section):
    """The knowledge base: entries of a tenant that a chat request can ask for as context."""

    enabled: bool = Field(
        False, description="serve /v1/knowledge, and the field `knowledge` of chat requests"
    )
    dir: Path | None = Field(
        None, description="directory of the store's file; empty = knowledge/ in model.cache_dir"
    )
    postgres: PostgresSettings = PostgresSettings()
    always_of: tuple[TenantName, ...] = Field(
        (),
        max_length=1024,
        description="tenants whose chat requests retrieve even if they do not ask for it",
    )
    embedder: Literal["auto", "wordllama", "none"] = Field(
        "auto",
        description="what finds entries by meaning: wordllama = the model that this package ships (extra "
        "`knowledge`), none = words and names only, auto = wordllama where it is installed",
    )
    entries_max: int = Field(10_000, ge=1, le=1_000_000, description="entries of a tenant")
    bytes_max: int = Field(
        64 * MIB,
        ge=KIB,
        le=100 * GIB,
        description="text of a tenant's entries, all versions together; 128 bytes are added for each",
    )
    entry_bytes_max: ClassVar[int] = 16 * KIB  # title, text and topics of one version
    import_entries_max: ClassVar[int] = 1000  # entries of one import
    topics_max: ClassVar[int] = 16  # topics of an entry
    tags_max: ClassVar[int] = 1000  # named states of a tenant's knowledge base
    questions_max: ClassVar[int] = 1000  # questions of one regression test
    questions_s: float = Field(
        30.0,
        gt=0,
        le=600,
        description="how long the questions of one request may take; of a change, before and after it",
    )
    results_max: ClassVar[int] = 50
    candidates: ClassVar[int] = 32  # entries taken from each ranking (words, meaning, names) before fusion
    meaning_min: ClassVar[float] = 0.15  # cosine below which an entry does not count as similar in meaning
    entries_per_turn: ClassVar[int] = 4
    budget_tokens: int = Field(
        512, ge=16, le=4096, description="tokens of the entries placed in one turn, by default"
    )
    budget_tokens_max: ClassVar[int] = 4096  # ... at most, if a request asks
    session_tokens_max: int = Field(
        8192,
        ge=16,
        le=10_000_000,
        description="tokens of entries placed in a whole session; further turns place nothing new",
    )
    # A set of entries in use scores at most this share less than the best set and is taken.
    tie_share: ClassVar[float] = 0.1
    turns_max: ClassVar[int] = 100_000  # turns of which it is known what was placed there
    vectors_bytes_max: ClassVar[int] = 256 * MIB  # vectors in an ingress's memory, all tenants together
    query_chars_max: ClassVar[int] = 4000
    threads: int = Field(2, ge=1, le=64, description="threads of an ingress that read and write the store")
    waiting_max: int = Field(
        64, ge=1, le=10_000, description="calls that wait for those threads; more get 429"
    )
    busy_s: float = Field(5.0, gt=0, le=600, description="how long a write waits for another process's write")
    loop: LoopSettings = LoopSettings()

    @property
    def is_one_file(self) -> bool:
        """Whether it is on and in a file, which the ingresses of one machine can share."""
        return self.enabled and self.postgres.url is None


class AnswerSettings(Section):
    """Answers kept at their replica for clients that send an `Idempotency-Key`, and may ask again."""

    kept_s: float = Field(
        120.0, ge=0, le=86400, description="how long a finished answer can be had again; 0 = not at all"
    )
    unread_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="how long an answer is computed on when its client, or its ingress, is gone",
    )
    # Such answers of one tenant on a replica; the longest unread one ends.
    unread_per_tenant_max: ClassVar[int] = 8
    answers_max: int = Field(
        1024, ge=0, le=1_000_000, description="answers kept by a replica; 0 = the header is ignored"
    )
    bytes_max: int = Field(
        32 * MIB, ge=64 * KIB, le=16 * GIB, description="memory of a replica's kept answers"
    )


class OidcSettings(Section):
    """Tokens (JWT) of an OpenID Connect issuer, as bearer tokens beside API keys. Off without `issuer`."""

    issuer: HttpUrl | None = Field(
        None,
        description="the issuer as its tokens name it (iss), such as https://login.example.com/realms/team; "
        "its keys are found by its discovery document; empty = no tokens; needs "
        '`pip install "samovar[oidc]"`',
    )
    # Never empty: a token for another service of the same issuer must not be good here.
    audience: str = Field(
        "samovar", min_length=1, max_length=512, description="whom tokens must be for (aud): this service"
    )
    tenant_claim: str = Field(
        "tenant", min_length=1, max_length=256, description="claim whose text is the caller's tenant"
    )
    admin_if: dict[str, str] = Field(
        default_factory=dict,
        max_length=16,
        description="claim -> the text that it is, or has in its list, of an administrator's token, such as "
        "{'groups': 'samovar-admins'}; empty = no token is",
    )

    @model_validator(mode="after")
    def _issuer_is_one(self) -> OidcSettings:
        if self.issuer is not None and not is_safe_url(self.issuer):
            raise ValueError(
                f"auth.oidc.issuer={self.issuer} is neither https nor on this machine's loopback: who is on "
                "the way could give it other keys. Give its https address"
            )
        return self


class DocumentsSettings(Section):
    """Documents that chat requests name, served where the knowledge base is (`knowledge.enabled`)."""

    documents_max: int = Field(1000, ge=1, le=1_000_000, description="documents of a tenant")
    bytes_max: int = Field(
        256 * MIB, ge=KIB, le=TIB, description="a tenant's documents: what was sent, and its text"
    )
    chars_max: int = Field(
        2_000_000, ge=16, le=100_000_000, description="characters of one document's text; a longer one fails"
    )
    pages_max: int = Field(2000, ge=1, le=100_000, description="pages of a PDF; one with more fails")
    pdf_s_max: float = Field(
        60.0, gt=0, le=600, description="processor time, and again as much waiting, to read one PDF"
    )
    pdf_bytes_max: int = Field(
        GIB, ge=256 * MIB, le=64 * GIB, description="address space of the process that reads one PDF"
    )
    chunk_chars: ClassVar[int] = 1200
    chunks_max: int = Field(2000, ge=1, le=100_000, description="chunks of one document; one with more fails")
    per_request_max: int = Field(8, ge=1, le=256, description="documents that one chat request names")
    prefill: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether a document's KV is computed in advance, where its upload does not say: auto = "
        "and stored where loading is cheaper than computing, always = stored in any case",
    )
    prefill_step_tokens: int = Field(
        1024, ge=16, le=1_000_000, description="tokens of a prefill that are computed before others may pass"
    )
    prefill_idle_s: float = Field(
        30.0, ge=0, le=3600, description="how long a step of a prefill waits for open requests to end"
    )
    prefill_stored_s: float = Field(
        30.0, ge=0, le=600, description="how long a prefill waits for its last blocks to be stored"
    )
    sessions_max: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="sessions remembered as users of a document, whose blocks go with it; after more, all "
        "blocks of the tenant do",
    )
    text_cache_bytes_max: ClassVar[int] = 64 * MIB  # texts of documents kept in an ingress's memory
    lease_s: float = Field(
        30.0, ge=1, le=3600, description="after this time another ingress takes over what one began and left"
    )


CompactionMode = Literal["retrieve", "summarise"]


class CompactionSettings(Section):
    """Conversations longer than the context window: which turns leave the prompt, and what comes back."""

    enabled: bool = Field(False, description="serve the field `compaction` of chat requests")
    of_tenant: dict[TenantName, CompactionMode] = Field(
        default_factory=dict,
        max_length=1024,
        description="tenants whose chats are compacted even if they do not ask for it, and how",
    )
    mode: CompactionMode = Field(
        "retrieve",
        description="how, where a request does not say: retrieve = pieces of old turns come back beside the "
        "question, summarise = the model writes a summary in an idle moment",
    )
    dir: Path | None = Field(
        None, description="directory of the summaries' file; empty = compaction/ in model.cache_dir"
    )
    start_fill: float = Field(
        0.8, ge=0.05, le=1, description="share of the context window at which old turns leave the prompt"
    )
    target_fill: float = Field(
        0.4, ge=0.01, le=0.95, description="share that is left then; less = the prefix changes less often"
    )
    answer_tokens: ClassVar[int] = 256  # kept free for the answer, at most a quarter of the window
    recent_turns: ClassVar[int] = 2  # last questions that stay, if they leave room
    embedder: Literal["auto", "wordllama", "none"] = Field(
        "auto", description="what finds old turns by meaning; see knowledge.embedder"
    )
    meaning_min: ClassVar[float] = 0.15  # cosine below which a piece does not count as similar in meaning
    candidates: ClassVar[int] = 32  # pieces taken from each ranking before fusion
    piece_chars: ClassVar[int] = 480
    pieces_max: ClassVar[int] = 4096
    pieces_per_turn: ClassVar[int] = 4
    budget_tokens: int = Field(256, ge=16, le=2048, description="their tokens, by default")
    budget_tokens_max: ClassVar[int] = 2048  # ... at most, if a request asks
    query_chars_max: ClassVar[int] = 4000
    summary_tokens_max: ClassVar[int] = 384  # tokens of a summary, at most an eighth of the window
    summaries_per_session: ClassVar[int] = 4
    summaries_max: ClassVar[int] = 100_000
    sessions_max: ClassVar[int] = 4096  # sessions whose cuts an ingress remembers; lost ones are remade
    notes_max: ClassVar[int] = 1024  # cuts, and questions, remembered of each
    memory_bytes_max: ClassVar[int] = 64 * MIB  # what an ingress takes for them
    idle_s: float = Field(
        0.5,
        ge=0,
        le=3600,
        description="how long no request was served before summaries and prefixes are computed",
    )
    job_s_max: ClassVar[float] = 120.0  # how long that may take for one session
    price_s_max: ClassVar[float] = 30.0  # a prefix whose prefill is priced higher is left to the next turn
    return_s: ClassVar[float] = 1800.0  # how far ahead the forecast of a return looks
    return_min: float = Field(
        0.05,
        ge=0,
        le=1,
        description="nothing is computed for a session that is less likely to return by then",
    )

    def mode_for(
        self, tenant: str, is_asked: bool, asked: CompactionMode | Literal["off"] | None
    ) -> CompactionMode | None:
        """Return how a chat of `tenant` is compacted; None: not at all.

        `is_asked`: whether its request has the field; `asked`: the mode that this names.
        """
        mode = asked or self.mode if is_asked else self.of_tenant.get(tenant)
        return None if mode == "off" else mode

    jobs_max: ClassVar[int] = 256  # sessions that wait for an idle moment
    tries_max: ClassVar[int] = 8  # how often work that was stopped is begun again
    busy_s: ClassVar[float] = 5.0  # how long a write waits for another process's write

    @model_validator(mode="after")
    def _steps_are_possible(self) -> CompactionSettings:
        if self.target_fill >= self.start_fill:
            raise ValueError(
                f"compaction.target_fill={self.target_fill} is not below compaction.start_fill="
                f"{self.start_fill}. Lower the first or raise the second"
            )
        return self


class OptionalSections(Section):
    """The optional sections; a base of the whole tree."""

    FORMER = {"doors": "ingress"}

    ingress: IngressSettings = IngressSettings()
    answers: AnswerSettings = AnswerSettings()
    live: LiveSettings = LiveSettings()
    knowledge: KnowledgeSettings = KnowledgeSettings()
    documents: DocumentsSettings = DocumentsSettings()
    compaction: CompactionSettings = CompactionSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
