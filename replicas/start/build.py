"""Builds an engine that is ready to step from settings and a model directory."""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter

from cache_tiers.blocks import TIERS, SumsSetup, TierName, compile_sums, namespace_digest
from cache_tiers.forecast import fast_clock
from cache_tiers.policy import make_policy
from cache_tiers.pricing import PrefillMeter, PrefillPrice, Sample, TierMeter, TierPrice, fit_prefill
from configs.settings import EngineSettings, Settings
from replicas.checkpoint import load_vocabulary
from replicas.drafting import Drafter, DraftLimits
from replicas.engine import Auditor, Engine, EngineLimits, TokenText
from replicas.forward import CudaCapture, Runner, choose_attention, load_model, step_words_max
from replicas.grammar import GrammarCompiler
from replicas.kv import (
    KvGeometry,
    KvPool,
    PageIo,
    PagePlan,
    PagePool,
    free_memory_bytes,
    page_io,
    plan_pages,
    register_object_store,
)
from replicas.measurement_cache import MeasurementCache
from replicas.messages import ModelRefused, ReplicaInfo
from replicas.model import (
    GemmSeconds,
    ModelSpec,
    check_heads,
    choose_device,
    choose_dtype,
    inspect_model,
    is_device_lost,
    measure_gemm,
)
from replicas.offload import (
    CompletionQueue,
    Handover,
    Offload,
    PageMoves,
    SwapSpace,
    TierAccess,
    TurnReporter,
    TurnStore,
)
from replicas.ranks import ChannelPlan, Launch, LeadingRunner, RankGroup, RankStart, RankSubprocess
from replicas.sampling import Sampler
from replicas.scheduling import DropNewest, PreemptionPolicy, Scheduler, StepBudget, preemption_policy
from replicas.start.measure import (
    SAMPLE_BYTES,
    Roads,
    hold_step_memory,
    measure_copy,
    measure_prefill,
    sample_tokens_max,
)
from replicas.start.step_choice import StepChoice, expects_native, return_freed_memory
from replicas.start.tier_access import by_tag

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
    turns = TurnStore(access, arrivals, io=io, pool=pool, shape=shape, settings=tiers, meter=meter)
    return Offload(
        link=access.link,
        moves=PageMoves(io, pool, access.lanes.moves, arrivals),
        pool=pool,
        shape=shape,
        settings=tiers,
        meter=meter,
        swap=swap,
        turns=turns,
        handover=Handover(
            link=access.link,
            pool=pool,
            turns=turns,
            meter=meter,
            lane=access.lanes.lookup,
            arrivals=arrivals,
            horizon_s=tiers.policy.horizon_s_max,
        ),
        lanes=access.lanes,
        arrivals=arrivals,
        clock=access.clock,
        reporter=TurnReporter(
            access.link,
            pool,
            access.lanes.returns,
            arrivals,
            block_tokens=shape.block_tokens,
            clock=fast_clock(access.clock, tiers.predictor.clock_rate),
            rate=tiers.predictor.clock_rate,
        ),
    )


CORES = os.cpu_count() or 1
REGISTER_S_MAX = 30.0
"""What is not registered with the GPU by then is while the replica serves; loads are slower meanwhile."""
GEMM, SAMPLES = TypeAdapter(GemmSeconds), TypeAdapter(list[Sample])
COPY, ROADS = TypeAdapter(TierPrice | None), TypeAdapter(Mapping[TierName, TierPrice])
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


def build_engine(
    settings: Settings,
    model_dir: Path,
    replica_id: str,
    *,
    pages: int | None = None,
    tiers: TierAccess | None = None,
    prefill: PrefillPrice | None = None,
    keep: Path | None = None,
    begin: Callable[[str], object] = lambda stage: None,
    load: Callable[[ModelSpec, torch.dtype, torch.device], torch.nn.Module] = load_model,
    launch: Launch = RankSubprocess,
) -> BuiltEngine:
    """Build the engine of one replica.

    `tiers`: None = blocks live in this pool only. `keep`: folder of what earlier starts have measured; None:
    everything is measured now. `begin`: is told each stage of `REPLICA_STAGES`. `launch`: starts the other
    ranks of `engine.tensor_parallel`.

    For tests and benchmarks: `pages` sets the pool size instead of the free memory, `load` makes the model;
    `prefill` replaces the measured price of prefill, and no load is measured either.

    Raises `ModelRefused` or `PoolTooSmall` if the model cannot be served.
    """
    started_s = time.monotonic()
    inspected_dir = None if keep is None else settings.inspected_dir
    spec = inspect_model(model_dir, inspected_dir, begin)
    device = choose_device(settings.engine)
    sharing = settings.cluster.sharing_node(CORES) * settings.engine.tensor_parallel
    threads = settings.engine.threads or max(1, CORES // sharing)
    torch.set_num_threads(threads)
    compile_sums(SumsSetup.of(settings))
    TIERS.take_up(settings.tiers.more)
    chosen_dtype = choose_dtype(
        settings.model,
        device,
        lambda: _gemm_seconds(keep, threads),
        widens_weights=settings.model.dtype == "auto"
        and expects_native(settings.engine, spec, device, settings.native_dir),
    )
    dtype = chosen_dtype.dtype
    geometry = kv_geometry(settings.engine, spec, dtype)
    begin("weights")
    ranks = _start_ranks(settings, spec, geometry, device, threads, launch, inspected_dir)
    is_reached = device.type == "cuda" and ranks is None and tiers is not None
    registered = register_object_store(device) if is_reached else None
    kept = MeasurementCache(
        keep,
        settings.engine.measurements_ttl_s,
        spec.fingerprint.hex(),
        *map(str, (geometry, device, threads, settings.engine.step_tokens_max)),
        *(() if ranks is None else (f"{ranks.ranks} ranks",)),
        measures=not settings.engine.fast_start,
    )
    choice = StepChoice(
        settings.engine,
        geometry,
        device,
        partial(load if ranks is None else ranks.load, spec, dtype, device),
        kept,
        settings.native_dir,
        settings.model.weights,
        spec.path if ranks is None and load is load_model else None,
    )
    begin("probe")
    step = choice.settle(spec.vocab, min(settings.engine.step_tokens_max, spec.context_tokens_max))
    model, exactness = step.model, step.exactness
    context_tokens_max = _context_tokens_max(settings, spec)
    if ranks is None:
        attention = choose_attention(
            model, geometry, device, exact=exactness.exact, context_tokens_max=context_tokens_max
        )
    else:
        assert model is not None, "ranks compute by the model's modules"
        attention = ranks.choose_attention(model, geometry, device, context_tokens_max)

    def make_runner(pages: int) -> Runner:
        """Make a pool, of which every rank holds its part, and what computes on it."""
        logit_rows_max = settings.engine.logit_rows_max
        if ranks is not None and model is not None:
            pool = ranks.make_pool(geometry, pages, device)
            return LeadingRunner(model, pool, attention.backend, ranks, logit_rows_max=logit_rows_max)
        pool = KvPool(geometry, pages, device)
        return Runner(
            model,
            pool,
            attention.backend,
            exact=exactness.exact,
            logit_rows_max=logit_rows_max,
            forward=step.forward(attention.backend),
        )

    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading the weights took besides them
        # No sequence will be longer than what a pool of all that is left would hold.
        most = _plan_pool(settings, geometry, spec, device, pages, ranks)
        hold_step_memory(settings.engine, make_runner(2), spec.vocab, most.context_tokens_max)
    plan = _plan_pool(settings, geometry, spec, device, pages, ranks)
    runner = make_runner(plan.pages)
    graphs = _record_decodes(settings.engine, runner, spec, plan)

    def open_io(arena_bytes: int) -> PageIo:
        if ranks is not None:  # its moves go through memory that the ranks share
            return ranks.page_io(geometry, page_io(runner.pool))
        return page_io(runner.pool, arena_bytes, registered)

    if registered is not None:  # before: a load that waits for the driver says nothing of those to come
        begin("memory")
        registered.settle(REGISTER_S_MAX)
    begin("measure")
    meter = _prefill_meter(settings, runner, spec, plan, prefill, kept)
    page_pool = _page_pool(settings, plan, meter, time.monotonic if tiers is None else tiers.clock)
    offload, preemption = _offload(
        tiers, settings, geometry, open_io, page_pool, meter, kept, measures_loads=prefill is None
    )
    vocabulary = load_vocabulary(model_dir, kept)
    tokenizer = vocabulary.tokenizer
    kept.save()
    begin("engine")
    if step.form is not None and not step.form.is_torch and device.type == "cpu":
        torch.set_num_threads(1)  # only draws are left to it: a second thread spins 10 ms for each of them
    grammars = GrammarCompiler(tokenizer.to_str, spec.vocab, spec.eos_token_ids, settings.grammar)
    engine = Engine(
        runner=runner,
        scheduler=_scheduler(settings, page_pool, preemption, offload, meter, runner),
        sampler=Sampler(spec.eos_token_ids, grammars, rows_max=settings.engine.logit_rows_max),
        tokenizer=tokenizer,
        token_text=TokenText(tokenizer, vocabulary.special_ids),
        limits=_limits(settings, spec, plan),
        namespace=model_namespace(spec, geometry, step.numerics(device)),
        replica_id=replica_id,
        clock=time.monotonic,
        draw_seed=lambda: secrets.randbits(63),
        meter=meter,
        auditor=_auditor(settings, runner, page_pool, lambda owner: engine.distrust_tenant(owner)),
        offload=offload,
        audits=lambda: random.random() < settings.tiers.audit_share,
    )
    info = ReplicaInfo(
        replica_id=replica_id,
        model_name=settings.model.served_name or spec.name,
        context_tokens_max=plan.context_tokens_max,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        dtype_sentence=chosen_dtype.sentence,
        threads=threads,
        step=step.sentence,
        exact=exactness.exact,
        exactness=exactness.sentence,
        attention=step.attention or f"{attention.sentence}{graphs}",
        block_tokens=geometry.block_tokens,
        kv_dtype=geometry.stored_name,
        bytes_per_token=geometry.bytes_per_token,
        pages=plan.pages,
        pool_bytes=plan.pool_bytes,
        load_s=time.monotonic() - started_s,
        model=spec.fingerprint.hex(),
        prefill=meter.price,
    )
    return_freed_memory()  # of the imports and the measuring, too
    return BuiltEngine(engine, info)


def _gemm_seconds(keep: Path | None, threads: int) -> GemmSeconds:
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


def _record_decodes(engine: EngineSettings, runner: Runner, spec: ModelSpec, plan: PagePlan) -> str:
    """Record decode steps as CUDA graphs where that is possible; return what is said of it, if anything.

    The pool's pages must hold no blocks yet.
    """
    rows_max = min(engine.graph_rows_max, engine.sequences_max)
    if runner.device.type != "cuda" or rows_max == 0:
        return ""
    if not runner.backend.tile_rows or runner.exact or spec.has_experts:  # they look at numbers on the way
        return "; decodes without graphs"
    if engine.tensor_parallel > 1:  # the other ranks would have to record and replay the same
        return "; decodes without graphs"
    try:
        runner.record_decodes(
            CudaCapture(runner.device), rows_max=rows_max, context_tokens_max=plan.context_tokens_max
        )
        # Again: recording gives back what torch held.
        hold_step_memory(engine, runner, spec.vocab, plan.context_tokens_max)
    except Exception as error:  # memory that does not suffice, whatever a compiler may raise
        if is_device_lost(error):
            raise
        runner.forget_decodes()
        logger.warning("decode steps are computed without CUDA graphs: %s", error)
        return "; decodes without graphs"
    return f"; decodes of up to {rows_max} as graphs"


def _context_tokens_max(settings: Settings, spec: ModelSpec) -> int:
    limit = settings.model.context_tokens_max
    return spec.context_tokens_max if limit is None else min(spec.context_tokens_max, limit)


def _prefill_meter(
    settings: Settings,
    runner: Runner,
    spec: ModelSpec,
    plan: PagePlan,
    given: PrefillPrice | None,
    kept: MeasurementCache,
) -> PrefillMeter:
    step_tokens_max = settings.engine.step_tokens_max
    if given is not None:
        return PrefillMeter(replace(given, step_tokens=step_tokens_max))
    tokens_max = sample_tokens_max(runner.pool, step_tokens_max, plan.context_tokens_max)
    measure = partial(measure_prefill, runner, spec.vocab, step_tokens_max, tokens_max=tokens_max)
    by = (runner.forward.name, runner.backend.name, settings.model.weights)
    samples = kept.get(", ".join((f"prefill up to {tokens_max}", *by)), SAMPLES, measure, [])
    return PrefillMeter(fit_prefill(samples, step_tokens_max), samples)


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
        copy = kept.get(f"swap of {sample_bytes} bytes", COPY, measure, None)
        if copy is not None:
            swap.meter.measured(copy)
    if measures_loads:
        roads = Roads(tiers, io, shape, pages=pages, extents=of.io_threads)
        sizes = of.io_threads, pages, of.cpu.bytes_max, of.nvme.bytes_max, settings.nvme_dir
        tiers.link.measured(kept.get(f"loads {sizes}", ROADS, roads.measure, {}), ())
    return (
        build_offload(tiers, settings, geometry, page_pool, io, meter, swap),
        preemption_policy(
            settings.engine.preemption, lambda: meter.price, swap, geometry.block_bytes, geometry.block_tokens
        ),
    )


def _page_pool(
    settings: Settings, plan: PagePlan, meter: PrefillMeter, clock: Callable[[], float]
) -> PagePool:
    policy, block_tokens = settings.tiers.policy, settings.engine.block_tokens

    def saved_s(end_tokens: int) -> float:
        return meter.price.added_seconds(block_tokens, end_tokens - block_tokens)

    return PagePool(
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
    runner: Runner,
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
        step_tokens_max=engine.step_tokens_max,
        sequences_max=engine.sequences_max,
        policy=policy,
        prefix_reuse=engine.prefix_reuse,
        restorer=offload,
        budget=budget,
        quantum_tokens=engine.quantum_tokens,
        weights=by_tag(settings.auth, settings.limits.tenant_weights),
    )
    if runner.exact and engine.draft_tokens_max:
        rows_max = min(engine.draft_rows_max, engine.step_tokens_max // 2)  # prompts need room, too
        limits = DraftLimits(engine.draft_tokens_max, rows_max, engine.step_stretch or math.inf)
        scheduler.drafter = Drafter(limits, lambda: meter.price)
    return scheduler


def _limits(settings: Settings, spec: ModelSpec, plan: PagePlan) -> EngineLimits:
    return EngineLimits(
        vocab=spec.vocab,
        context_tokens_max=plan.context_tokens_max,
        queue_max=settings.engine.queue_max,
        retry_after_s=settings.limits.retry_after_s,
        tenant_queue_max=math.ceil(settings.engine.queue_max * _share(settings)),
    )


def _share(settings: Settings) -> float:
    return settings.share_of_tenant(settings.limits.tenant_share)


def _auditor(
    settings: Settings,
    runner: Runner,
    pool: PagePool,
    distrust: Callable[[bytes], None],
) -> Auditor:
    return Auditor(
        runner,
        pool,
        tokens_max=settings.tiers.audit_tokens_max,
        step_tokens=settings.tiers.audit_step_tokens,
        distrust=distrust,
    )


def _plan_pool(
    settings: Settings,
    geometry: KvGeometry,
    spec: ModelSpec,
    device: torch.device,
    pages: int | None,
    ranks: RankGroup | None,
) -> PagePlan:
    given_bytes = None if pages is None else pages * geometry.block_bytes
    free_bytes = free_memory_bytes(device) if given_bytes is None else given_bytes
    if given_bytes is None and ranks is not None and device.type == "cuda":  # on CPU they share the node's
        free_bytes = ranks.least_memory(free_bytes) * ranks.ranks
    return plan_pages(
        free_bytes=free_bytes,
        fraction=settings.engine.pool_memory_fraction if given_bytes is None else 1.0,
        # Replicas on CPU share a node's memory; on CUDA each has a device of its own.
        replicas=settings.cluster.sharing_node(CORES) if given_bytes is None and device.type == "cpu" else 1,
        bytes_max=settings.engine.pool_bytes_max,
        block_bytes=geometry.block_bytes,
        block_tokens=geometry.block_tokens,
        context_tokens_max=_context_tokens_max(settings, spec),
    )
