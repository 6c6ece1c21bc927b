"""Builds an engine that is ready to step from settings and a model directory."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter

from samovar.cache_tiers.blocks import TIERS, SumsSetup, compile_sums, namespace_digest
from samovar.cache_tiers.forecast import fast_clock
from samovar.cache_tiers.messages import LookupResult
from samovar.cache_tiers.policy import make_policy
from samovar.cache_tiers.pricing import PrefillMeter, PrefillPrice, Sample, TierMeter, TierPrice, fit_prefill
from samovar.configs.imports import return_freed_memory
from samovar.configs.sections import MIB
from samovar.configs.settings import EngineSettings, Settings
from samovar.replicas.answers import EngineLimits, OutputProcessor, TokenText
from samovar.replicas.engine import Auditor, Engine, Intake, OpenRequests
from samovar.replicas.forward import (
    ChosenAttention,
    GraphLimits,
    Runner,
    choose_attention,
    groups_experts,
    load_model,
    open_capture,
    step_words_max,
    why_by_rows,
)
from samovar.replicas.grammar import GrammarCompiler
from samovar.replicas.kv import (
    KvGeometry,
    KvPool,
    PageIo,
    PagePlan,
    PagePool,
    RegisteredMemory,
    free_memory_bytes,
    page_io,
    plan_pages,
    register_object_store,
)
from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.messages import ModelRefused, ReplicaInfo
from samovar.replicas.model import (
    ChosenDtype,
    GemmSeconds,
    ModelSpec,
    check_heads,
    choose_device,
    choose_dtype,
    in_a_line,
    inspect_model,
    is_device_lost,
    measure_gemm,
)
from samovar.replicas.offload import (
    CompletionQueue,
    Handover,
    Offload,
    PageMoves,
    PieceLoads,
    Restores,
    SwapSpace,
    TierAccess,
    TierLookups,
    TierReporter,
    TurnReporter,
    TurnStore,
    provenance_of,
)
from samovar.replicas.ranks import ChannelPlan, Launch, LeadingRunner, RankGroup, RankStart, RankSubprocess
from samovar.replicas.sampling import Sampler
from samovar.replicas.scheduling import (
    Drafter,
    DraftLimits,
    DropNewest,
    OffloadState,
    PreemptionPolicy,
    Scheduler,
    Sequence,
    StepBudget,
    preemption_policy,
)
from samovar.replicas.start.checkpoint import Vocabulary, load_vocabulary
from samovar.replicas.start.measure import (
    ROAD_BYTES_MAX,
    SAMPLE_BYTES,
    Roads,
    hold_step_memory,
    measure_copy,
    measure_prefill,
    sample_tokens_max,
)
from samovar.replicas.start.step_choice import ChosenStep, StepChoice, expects_native
from samovar.replicas.start.tier_access import by_tag

logger = logging.getLogger(__name__)


def build_offload(
    access: TierAccess,
    settings: Settings,
    geometry: KvGeometry,
    pool: PagePool,
    io: PageIo,
    meter: PrefillMeter,
    swap: SwapSpace,
) -> Offload:
    """Build the replica's side of the cache tiers."""
    shape, tiers, arrivals = geometry.record_shape, settings.tiers, CompletionQueue()
    link, lanes, clock = access.link, access.lanes, access.clock
    moves = PageMoves(io, pool, lanes.moves, arrivals)
    turns = TurnStore(access, arrivals, io=io, pool=pool, shape=shape, settings=tiers, meter=meter)
    handover = Handover(
        link=link,
        pool=pool,
        turns=turns,
        meter=meter,
        lane=lanes.lookup,
        arrivals=arrivals,
        horizon_s=tiers.policy.horizon_s_max,
    )
    loads = PieceLoads(link.fetch, moves, lanes.fetch, arrivals, shape, tiers.fetch_max, clock)
    restores = Restores(
        loads,
        moves,
        swap,
        TierReporter(link, lanes.report),
        shape=shape,
        settings=tiers,
        meter=meter,
        clock=clock,
    )

    def learned(sequence: Sequence, offload_state: OffloadState, found: LookupResult) -> None:
        handover.learned(provenance_of(sequence, offload_state, found))

    lookups = TierLookups(
        lambda lookup: link.lookup(lookup),
        learned,
        lambda: restores.meter.price,
        tiers,
        shape,
        lanes.lookup,
        arrivals,
        clock,
    )
    reporter = TurnReporter(
        link,
        pool,
        lanes.returns,
        arrivals,
        block_tokens=shape.block_tokens,
        clock=fast_clock(clock, tiers.predictor.clock_rate),
        rate=tiers.predictor.clock_rate,
    )
    return Offload(
        link=link,
        lookups=lookups,
        restores=restores,
        turns=turns,
        handover=handover,
        arrivals=arrivals,
        reporter=reporter,
    )


CORES = os.cpu_count() or 1
REASON_CHARS_MAX = 200
REGISTER_S_MAX = 30.0
"""What is not registered with the GPU by then is while the replica serves; loads are slower meanwhile."""
GEMM, SAMPLES = TypeAdapter(GemmSeconds), TypeAdapter(list[Sample])
PRICE = TypeAdapter(TierPrice | None)
"""The forms in which measurements are kept."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    info: ReplicaInfo


def kv_geometry(settings: EngineSettings, spec: ModelSpec, dtype: torch.dtype) -> KvGeometry:
    """Return the layout of the model's blocks. Raises `ModelRefused` if `engine.kv_groups` does not fit."""
    groups = settings.kv_groups
    if spec.kv_heads % groups:
        fitting = [str(count) for count in range(1, spec.kv_heads + 1) if spec.kv_heads % count == 0]
        raise ModelRefused(
            f"the model has {spec.kv_heads} KV heads, which {groups} groups (engine.kv_groups) do not divide",
            f"set engine.kv_groups to {' or '.join(fitting)}",
        )
    return KvGeometry(
        layers=spec.layers,
        block_tokens=settings.block_tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        groups=groups,
        is_int8=settings.kv_dtype == "int8",
    )


def model_namespace(spec: ModelSpec, geometry: KvGeometry, numerics: str = "") -> bytes:
    """Return the 32-byte namespace of everything about the model that makes KV interchangeable.

    `numerics`: what else the bits depend on, where exactness is promised, and what weights were rounded to.
    """
    parts = (str(geometry.dtype), str(geometry.block_tokens), geometry.layout, numerics)
    return namespace_digest(spec.fingerprint, *(part.encode() for part in parts))


@dataclass
class Start:
    """One start of a replica: a method for each of `REPLICA_STAGES` from `digest` on, in their order.

    `tiers`: None = blocks live in this pool only. `keep`: folder of what earlier starts have measured; None:
    everything is measured now. `begin`: is told each stage. `launch`: starts the other ranks of
    `engine.tensor_parallel`.

    For tests and benchmarks: `pages` sets the pool size instead of the free memory, `load` makes the model;
    `prefill` replaces the measured price of prefill, and no load is measured either.

    What a stage has found or made is an attribute from then on.
    """

    settings: Settings
    model_dir: Path
    replica_id: str
    _: KW_ONLY
    pages: int | None = None
    tiers: TierAccess | None = None
    prefill: PrefillPrice | None = None
    keep: Path | None = None
    begin: Callable[[str], object] = lambda stage: None
    load: Callable[[ModelSpec, torch.dtype, torch.device], torch.nn.Module] = load_model
    launch: Launch = RankSubprocess

    # digest
    spec: ModelSpec = field(init=False)
    device: torch.device = field(init=False)
    threads: int = field(init=False)
    dtype: ChosenDtype = field(init=False)
    geometry: KvGeometry = field(init=False)
    # weights
    ranks: RankGroup | None = field(init=False)
    registered: RegisteredMemory | None = field(init=False)
    kept: MeasurementCache = field(init=False)
    choice: StepChoice = field(init=False)
    # probe
    step: ChosenStep = field(init=False)
    attention: ChosenAttention = field(init=False)
    # memory
    plan: PagePlan = field(init=False)
    runner: Runner = field(init=False)
    graphs: str = field(init=False)
    # measure
    meter: PrefillMeter = field(init=False)
    page_pool: PagePool = field(init=False)
    offload: Offload | None = field(init=False)
    preemption: PreemptionPolicy = field(init=False)
    vocabulary: Vocabulary = field(init=False)

    def run(self) -> BuiltEngine:
        """Build the engine. Raises `ModelRefused` or `PoolTooSmall` if the model cannot be served."""
        started_s = time.monotonic()
        self.digest()
        self.load_weights()
        self.probe()
        self.take_memory()
        self.measure()
        engine = self.make_engine()
        info = self.info(time.monotonic() - started_s)
        return_freed_memory()  # of the imports and the measuring, too
        return BuiltEngine(engine, info)

    @property
    def inspected_dir(self) -> Path | None:
        """Where inspections of models are kept."""
        return None if self.keep is None else self.settings.inspected_dir

    def digest(self) -> None:
        """Read what the model is, and choose where and in which numbers it is computed."""
        settings = self.settings
        self.spec = inspect_model(self.model_dir, self.inspected_dir, self.begin)
        self.device = choose_device(settings.engine)
        sharing = settings.cluster.sharing_node(CORES) * settings.engine.tensor_parallel
        self.threads = settings.engine.threads or max(1, CORES // sharing)
        torch.set_num_threads(self.threads)
        compile_sums(SumsSetup.of(settings))
        TIERS.take_up(settings.tiers.more)
        self.dtype = choose_dtype(
            settings.model,
            self.device,
            lambda: gemm_seconds(self.keep, self.threads),
            widens_weights=settings.model.dtype == "auto"
            and expects_native(settings.engine, self.spec, self.device, settings.native_dir),
        )
        self.geometry = kv_geometry(settings.engine, self.spec, self.dtype.dtype)

    def load_weights(self) -> None:
        """Begin to load the weights, here or in the other ranks, which are started; find what is known."""
        self.begin("weights")
        engine, spec, device = self.settings.engine, self.spec, self.device
        self.ranks = _start_ranks(
            self.settings, spec, self.geometry, device, self.threads, self.launch, self.inspected_dir
        )
        is_reached = device.type == "cuda" and self.ranks is None and self.tiers is not None
        self.registered = register_object_store(device) if is_reached else None
        self.kept = MeasurementCache(
            self.keep,
            engine.measurements_ttl_s,
            spec.fingerprint.hex(),
            *map(str, (self.geometry, device, self.threads, engine.step_tokens_max)),
            *(() if self.ranks is None else (f"{self.ranks.ranks} ranks",)),
            measures=not engine.fast_start,
        )
        self.choice = StepChoice(
            engine,
            self.geometry,
            device,
            partial(self.load if self.ranks is None else self.ranks.load, spec, self.dtype.dtype, device),
            self.kept,
            self.settings.native_dir,
            self.settings.model.weights,
            spec.path if self.ranks is None and self.load is load_model else None,
        )

    def probe(self) -> None:
        """Choose what computes a step, after a look at whether its answers are exact."""
        self.begin("probe" if self.device.type == "cpu" else "kernels")
        with nullcontext() if self.registered is None else self.registered.held():
            self._choose()

    def _choose(self) -> None:
        spec, geometry, device = self.spec, self.geometry, self.device
        tokens_max = min(self.settings.engine.step_tokens_max, spec.context_tokens_max)
        self.step = self.choice.settle(spec.vocab, tokens_max)
        model, exact = self.step.model, self.step.exactness.exact
        if self.ranks is None:
            self.attention = choose_attention(model, geometry, device, exact=exact)
        else:
            assert model is not None, "ranks compute by the model's modules"
            self.attention = self.ranks.choose_attention(model, geometry, device)

    def take_memory(self) -> None:
        """Make the pool of the memory that the largest step leaves; show the tiers' memory to the GPU."""
        engine, spec = self.settings.engine, self.spec
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what loading the weights took besides them
            # No sequence will be longer than what a pool of all that is left would hold.
            most = self._plan_pool()
            hold_step_memory(engine, self._make_runner(2), spec.vocab, most.context_tokens_max)
        self.plan = self._plan_pool()
        self.runner = self._make_runner(self.plan.pages)
        self.graphs = record_steps(engine, self.runner, spec, self.plan, self.begin)
        if self.registered is not None:  # a load that waits for the driver says nothing of those to come
            self.begin("memory")
            self.registered.settle(REGISTER_S_MAX)

    def measure(self) -> None:
        """Measure what computing and loading take, as far as that is not known, and open the tiers."""
        self.begin("measure")
        self.meter = self._prefill_meter()
        clock = time.monotonic if self.tiers is None else self.tiers.clock
        name = self.settings.model.served_name or self.spec.name
        self.page_pool = _page_pool(self.settings, self.plan, self.meter, clock, name)
        self.offload, self.preemption = _offload(
            self.tiers,
            self.settings,
            self.geometry,
            self._open_io,
            self.page_pool,
            self.meter,
            self.kept,
            measures_loads=self.prefill is None,
        )
        self.runner.pool.return_memory()  # of pages that were measured with
        self.vocabulary = load_vocabulary(self.model_dir, self.kept)
        self.kept.save()

    def make_engine(self) -> Engine:
        """Return the engine, ready to step."""
        self.begin("engine")
        settings, spec, step, tokenizer = self.settings, self.spec, self.step, self.vocabulary.tokenizer
        if step.form is not None and not step.form.is_torch and self.device.type == "cpu":
            # Only draws are left to it: a second thread spins 10 ms for each of them.
            torch.set_num_threads(1)
        grammars = GrammarCompiler(tokenizer.to_str, spec.vocab, spec.eos_token_ids, settings.grammar)
        sampler = Sampler(spec.eos_token_ids, grammars, rows_max=settings.engine.logit_rows_max)
        scheduler = _scheduler(
            settings, self.page_pool, self.preemption, self.offload, self.meter, exact=self.runner.exact
        )
        limits = EngineLimits(
            vocab=spec.vocab,
            context_tokens_max=self.plan.context_tokens_max,
            queue_max=settings.engine.queue_max,
            retry_after_s=settings.limits.retry_after_s,
            tenant_queue_max=math.ceil(settings.engine.queue_max * _share(settings)),
        )
        text = TokenText(tokenizer, self.vocabulary.special_ids)
        requests = OpenRequests(
            Intake(
                limits,
                model_namespace(spec, self.geometry, step.numerics(self.device)),
                sampler.open_grammar,
                draw_seed=lambda: secrets.randbits(63),
            ),
            OutputProcessor(tokenizer, spec.eos_token_ids, text, self.plan.context_tokens_max),
            sampler,
            scheduler,
            offload=self.offload,
            meter=self.meter,
            clock=time.monotonic,
            replica_id=self.replica_id,
        )
        auditor = Auditor(
            self.runner,
            self.page_pool,
            tokens_max=settings.tiers.audit_tokens_max,
            step_tokens=settings.tiers.audit_step_tokens,
            distrust=requests.distrust_tenant,
            audits=lambda: random.random() < settings.tiers.audit_share,
        )
        return Engine(
            runner=self.runner,
            scheduler=scheduler,
            requests=requests,
            meter=self.meter,
            auditor=auditor,
            offload=self.offload,
        )

    def info(self, load_s: float) -> ReplicaInfo:
        """Return what is said of the replica, whose start took so long."""
        exactness, geometry = self.step.exactness, self.geometry
        return ReplicaInfo(
            replica_id=self.replica_id,
            model_name=self.settings.model.served_name or self.spec.name,
            context_tokens_max=self.plan.context_tokens_max,
            device=str(self.device),
            dtype=str(self.dtype.dtype).removeprefix("torch."),
            dtype_sentence=self.dtype.sentence,
            threads=self.threads,
            step=self.step.sentence,
            exact=exactness.exact,
            exactness=exactness.sentence,
            attention=self.step.attention or self.attention.sentence,
            graphs=self.graphs,
            block_tokens=geometry.block_tokens,
            kv_dtype=geometry.stored_name,
            bytes_per_token=geometry.bytes_per_token,
            pages=self.plan.pages,
            pool_bytes=self.plan.pool_bytes,
            load_s=load_s,
            model=self.spec.fingerprint.hex(),
            prefill=self.meter.price,
        )

    def _plan_pool(self) -> PagePlan:
        """Return how large a pool may be now."""
        settings, device, block_bytes = self.settings, self.device, self.geometry.block_bytes
        given_bytes = None if self.pages is None else self.pages * block_bytes
        free_bytes = free_memory_bytes(device) if given_bytes is None else given_bytes
        on_cpu = device.type == "cpu"
        if given_bytes is None and self.ranks is not None and device.type == "cuda":
            # On CPU they share the node's.
            free_bytes = self.ranks.least_memory(free_bytes) * self.ranks.ranks
        return plan_pages(
            free_bytes=free_bytes,
            fraction=settings.engine.pool_memory_fraction if given_bytes is None else 1.0,
            # Replicas on CPU share a node's memory; on CUDA each has a device of its own.
            replicas=settings.cluster.sharing_node(CORES) if given_bytes is None and on_cpu else 1,
            bytes_max=settings.engine.pool_bytes_max,
            block_bytes=block_bytes,
            block_tokens=self.geometry.block_tokens,
            context_tokens_max=self.spec.context_tokens(self.settings.model.context_tokens_max),
        )

    def _make_runner(self, pages: int) -> Runner:
        """Make a pool, of which every rank holds its part, and what computes on it."""
        geometry, model, backend = self.geometry, self.step.model, self.attention.backend
        logit_rows_max = self.settings.engine.logit_rows_max
        if self.ranks is not None and model is not None:
            pool = self.ranks.make_pool(geometry, pages, self.device)
            return LeadingRunner(model, pool, backend, self.ranks, logit_rows_max=logit_rows_max)
        return Runner(
            model,
            KvPool(geometry, pages, self.device),
            backend,
            exact=self.step.exactness.exact,
            logit_rows_max=logit_rows_max,
            forward=self.step.forward(backend),
        )

    def _prefill_meter(self) -> PrefillMeter:
        runner, step_tokens_max = self.runner, self.settings.engine.step_tokens_max
        if self.prefill is not None:
            return PrefillMeter(replace(self.prefill, step_tokens=step_tokens_max))
        tokens_max = sample_tokens_max(runner.pool, step_tokens_max, self.plan.context_tokens_max)
        measure = partial(measure_prefill, runner, self.spec.vocab, step_tokens_max, tokens_max=tokens_max)
        graphs = ("with graphs of chunks",) if runner.records_chunks else ()
        by = (runner.forward.name, runner.backend.name, self.settings.model.weights, *graphs)
        samples = self.kept.get(", ".join((f"prefill up to {tokens_max}", *by)), SAMPLES, measure, [])
        return PrefillMeter(fit_prefill(samples, step_tokens_max), samples)

    def _open_io(self, arena_bytes: int) -> PageIo:
        if self.ranks is not None:  # its moves go through memory that the ranks share
            return self.ranks.page_io(self.geometry, page_io(self.runner.pool))
        return page_io(self.runner.pool, arena_bytes, self.registered)


def gemm_seconds(keep: Path | None, threads: int) -> GemmSeconds:
    """Return what a matrix product takes in each dtype.

    Kept for good, whatever the settings: another dtype would not find the blocks of earlier starts.
    """
    kept = MeasurementCache(keep, math.inf, "dtype", f"{threads} threads")
    try:
        return kept.get("gemm", GEMM, measure_gemm, GemmSeconds(1.0, 1.0))
    finally:
        kept.save()


def _start_ranks(
    settings: Settings,
    spec: ModelSpec,
    geometry: KvGeometry,
    device: torch.device,
    threads: int,
    launch: Launch,
    inspected_dir: Path | None,
) -> RankGroup | None:
    """Start the other ranks of this replica, if it has any. Raises `ModelRefused`, `RankLost`."""
    engine = settings.engine
    if engine.tensor_parallel == 1:
        return None
    check_heads(spec, engine.tensor_parallel)
    tokens = max(engine.step_tokens_max, engine.sequences_max, settings.tiers.audit_step_tokens)
    # The longest sequence: one that is measured at start included.
    pages = 1 + max(spec.context_tokens_max, 2 * max(tokens, 256)) // engine.block_tokens
    step_words = step_words_max(tokens=tokens, sequences=engine.sequences_max, blocks=pages)
    blocks = max(1, engine.rank_staging_bytes // geometry.block_bytes)
    start = RankStart(
        rank=0,
        ranks=engine.tensor_parallel,
        folder="",
        model_dir=str(spec.path),
        dtype=str(geometry.dtype).removeprefix("torch."),
        threads=threads,
        channels=ChannelPlan(
            step_words=max(step_words, 2 + 2 * pages),  # or two page tables that are compared
            move_words=1 + blocks,
            staging_bytes=blocks * geometry.block_bytes,
        ),
        engine=engine,
        start_wait_s=settings.server.start_timeout_s,
        inspected_dir=inspected_dir,
    )
    return RankGroup(start, device, launch)


def record_steps(
    engine: EngineSettings,
    runner: Runner,
    spec: ModelSpec,
    plan: PagePlan,
    begin: Callable[[str], object] = lambda stage: None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Record steps as CUDA graphs where that is possible; return what is said of it, nothing of a CPU.

    The pool's pages must hold no blocks yet. `begin`: is told when it begins.
    """
    capture = open_capture(runner.device)
    if capture is None:
        return ""
    if why := _why_unrecorded(engine, runner, spec):
        return f"none: {why}"
    tokens = min(engine.graph_tokens_max, engine.step_tokens_max)
    limits = GraphLimits(engine.graph_rows, tokens, engine.sequences_max, plan.context_tokens_max)
    begin("graphs")
    runner.free_memory()
    started_s, free_bytes = clock(), free_memory_bytes(runner.device)
    try:
        graphs = runner.record_steps(capture, limits)
        took_s, taken_bytes = clock() - started_s, free_bytes - free_memory_bytes(runner.device)
        # Again: recording gives back what torch held.
        hold_step_memory(engine, runner, spec.vocab, plan.context_tokens_max)
    except Exception as error:  # memory that does not suffice, whatever a compiler may raise
        if is_device_lost(error):
            raise
        runner.check()  # that all ranks of the replica are where this one is
        runner.forget_graphs()
        logger.warning("steps are computed without CUDA graphs", exc_info=True)
        return f"none: {in_a_line(error, REASON_CHARS_MAX)}"
    said = f"{graphs.sentence}; {took_s:.1f} s, {max(0, taken_bytes) / MIB:.0f} MiB"
    if engine.tensor_parallel > 1:
        said += f" on each of {engine.tensor_parallel} GPUs"
    if graphs.most_decodes < engine.sequences_max:
        said += f"; more than {graphs.most_decodes} decodes eagerly, of {engine.sequences_max} that may run"
    return said


def _why_unrecorded(engine: EngineSettings, runner: Runner, spec: ModelSpec) -> str:
    """Return why no step on a GPU can be recorded; "" if it can."""
    if engine.graph_rows == 0:
        return "switched off (engine.graph_rows_max)"
    if runner.backend.tiling is None:
        return f"{runner.backend.name} looks at a step's numbers on the way"
    if runner.exact:
        return "exact steps have shapes of their own"
    if spec.has_experts and not (runner.model is not None and groups_experts(runner.model)):
        why = why_by_rows(runner.device, runner.pool.geometry.dtype)
        return f"the host looks which experts there are: {why}"
    return ""


def _offload(
    tiers: TierAccess | None,
    settings: Settings,
    geometry: KvGeometry,
    open_io: Callable[[int], PageIo],
    page_pool: PagePool,
    meter: PrefillMeter,
    kept: MeasurementCache,
    *,
    measures_loads: bool,
) -> tuple[Offload | None, PreemptionPolicy]:
    if tiers is None or not settings.engine.prefix_reuse:
        return None, DropNewest()
    of, shape, pages = settings.tiers, geometry.record_shape, page_pool.pages
    io = open_io(of.staged_bytes_max + of.swap_bytes_max)
    swap = SwapSpace(of.swap_bytes_max, shape, TierMeter(clock=tiers.clock))
    if settings.engine.preemption == "price" and swap.has_room:
        measure = partial(measure_copy, io, shape, pages=pages, bytes_max=of.swap_bytes_max)
        sample_bytes = min(of.swap_bytes_max, SAMPLE_BYTES, pages * geometry.block_bytes)
        copy = kept.get(f"swap of {sample_bytes} bytes", PRICE, measure, None)
        if copy is not None:
            swap.meter.measured(copy)
    if measures_loads:
        roads = Roads(tiers, io, shape, pages=pages, extents=of.io_threads)
        # What a tier holds beyond the largest samples says nothing, and differs from start to start.
        room = [min(of.sizes[tier], 2 * ROAD_BYTES_MAX) for tier in TIERS.local]
        is_encrypted = of.encryption_key_file is not None
        sizes = of.io_threads, roads.blocks_max, *room, str(settings.nvme_dir), is_encrypted
        for tier in [tier for tier in TIERS.local if of.sizes[tier]]:
            price = kept.get(f"loads from {tier}, {sizes}", PRICE, partial(roads.measure, tier), None)
            if price is not None:
                tiers.link.measured({tier: price}, ())
    return (
        build_offload(tiers, settings, geometry, page_pool, io, meter, swap),
        preemption_policy(
            settings.engine.preemption, lambda: meter.price, swap, geometry.block_bytes, geometry.block_tokens
        ),
    )


def _page_pool(
    settings: Settings, plan: PagePlan, meter: PrefillMeter, clock: Callable[[], float], name: str
) -> PagePool:
    policy, block_tokens = settings.tiers.policy, settings.engine.block_tokens

    def saved_s(end_tokens: int) -> float:
        return meter.price.added_seconds(block_tokens, end_tokens - block_tokens)

    make: Callable[..., PagePool] = PagePool
    if settings.telemetry.kv_events is not None:
        from samovar.cache_tiers.events.publisher import publisher_at
        from samovar.replicas.kv import AnnouncedPool

        publisher = publisher_at(settings.telemetry.kv_events, is_replica=True, model=name)
        make = partial(AnnouncedPool, publisher.feed, settings.has_tenants)
    return make(
        plan.pages,
        block_tokens,
        policy=make_policy(policy),
        settings=policy,
        clock=fast_clock(clock, settings.tiers.predictor.clock_rate),
        sessions_max=settings.tiers.predictor.sessions_max,
        saved_s=saved_s if policy.cost_weighting else None,
        tenant_share=_share(settings),
    )


def _scheduler(
    settings: Settings,
    pool: PagePool,
    policy: PreemptionPolicy,
    offload: Offload | None,
    meter: PrefillMeter,
    *,
    exact: bool,
) -> Scheduler:
    engine = settings.engine
    budget = StepBudget(
        engine.step_tokens_max,
        engine.step_s_target,
        lambda: meter.price,
        has_tenants=settings.has_tenants,
        stretch=engine.step_stretch,
        passed_tokens_max=engine.passed_tokens_max,
    )
    scheduler = Scheduler(
        pool,
        budget=budget,
        sequences_max=engine.sequences_max,
        policy=policy,
        prefix_reuse=engine.prefix_reuse,
        restorer=offload,
        quantum_tokens=engine.quantum_tokens,
        weights=by_tag(settings.auth, settings.limits.tenant_weights),
    )
    if exact and engine.draft_tokens_max:
        rows_max = min(engine.draft_rows_max, engine.step_tokens_max // 2)  # prompts need room, too
        limits = DraftLimits(engine.draft_tokens_max, rows_max, engine.step_stretch or math.inf)
        scheduler.drafter = Drafter(limits, lambda: meter.price)
    return scheduler


def _share(settings: Settings) -> float:
    return settings.share_of_tenant(settings.limits.tenant_share)
