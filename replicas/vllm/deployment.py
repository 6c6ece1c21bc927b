"""The Serve deployment whose engine is vLLM: the same `Replica`, in vLLM's environment.

vLLM is imported by the constructor: the processes of Serve that need only this module's names have none.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from samovar.configs.settings import Settings
from samovar.replicas.messages import ModelRefused, ReplicaInfo
from samovar.replicas.serving.deployment import Replica
from samovar.replicas.serving.served_engine import ServedEngine

if TYPE_CHECKING:
    from samovar.replicas.start.start_notes import StartNotes

CORES = os.cpu_count() or 1
LOG_FIX = "serve another model or with other settings; the replica's log has all that vLLM said"
LOG_BYTES, CAUSE_CHARS = 1 << 16, 600
ERROR_LINE = re.compile(r"^(?:\S+ )*?(?:\w+\.)*(\w+(?:Error|Exception): .*)$")
"""The last line of a traceback."""


def last_error(log: Path) -> str:
    """Return the last error but one's own that a log ends with; empty: none is found.

    What has gone wrong in a process of vLLM's is told there, and here only that something has.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = [match[1] for line in lines if (match := ERROR_LINE.match(line))]
    return found[-1][:CAUSE_CHARS] if found else ""


class VllmReplica(Replica):
    """The Serve deployment of vLLM. See `Replica`; `engine.vllm` in the settings says where vLLM is.

    Raises `ModelRefused` with vLLM's reason if it cannot serve the model.
    """

    @staticmethod
    def _import_engine() -> None:
        """Nothing yet: variables that vLLM reads at its import depend on the model's device."""

    def build(self, settings: Settings, model_dir: Path, replica_id: str, notes: StartNotes) -> ServedEngine:
        """Build the engine: start vLLM, its connector and what stands around it."""
        from torch import device
        from torch.cuda import is_available as cuda_is_available

        from samovar.cache_tiers.forecast import fast_clock
        from samovar.cache_tiers.pricing import PrefillMeter, fit_prefill
        from samovar.cache_tiers.vllm.replica_turn import FromConnector
        from samovar.replicas.answers import EngineLimits, OutputProcessor, TokenText
        from samovar.replicas.grammar import GrammarCompiler
        from samovar.replicas.model import (
            choose_dtype,
            describe_model,
            free_host_bytes,
            load_tokenizer,
        )
        from samovar.replicas.start.tier_access import by_tag, tiers_socket
        from samovar.replicas.turns import FairQueue
        from samovar.replicas.vllm.answers import Telling
        from samovar.replicas.vllm.engine import Asks, VllmEngine
        from samovar.replicas.vllm.forgetting import PageSalts
        from samovar.replicas.vllm.source import engine_arguments, process_environment
        from samovar.replicas.vllm.turns import SessionReturns, TurnReports

        notes.begin("digest")
        started_s, engine = time.monotonic(), settings.engine
        spec = describe_model(settings, model_dir, notes.begin)
        on_cpu = engine.device == "cpu" or not cuda_is_available()
        sharing = settings.cluster.sharing_node(CORES)
        threads = engine.threads or max(1, CORES // sharing)
        os.environ.update(process_environment(threads if on_cpu else None))
        name: str = settings.model.dtype
        sentence = "as vLLM chooses, and asks the GPU"
        if on_cpu:  # vLLM would take bfloat16, which most CPUs only play
            chosen = choose_dtype(settings.model, device("cpu"))
            name, sentence = str(chosen.dtype).removeprefix("torch."), chosen.sentence
        pool_bytes = engine.pool_bytes_max
        if pool_bytes is None and on_cpu:
            left_bytes = free_host_bytes() - sharing * spec.weights_bytes
            pool_bytes = int(engine.pool_memory_fraction * max(0, left_bytes) / sharing)
        connector, told = None, {}
        if self._tiers is not None and engine.prefix_reuse:
            connector = FromConnector(Path(tempfile.mkdtemp(prefix="samovar-")) / "told.sock")
            told = {"socket": str(tiers_socket(settings)), "replica": str(connector.path)}
        notes.begin("weights")
        from samovar.replicas.vllm.async_llm import VERSION, AsyncVllm

        try:
            context = spec.context_tokens(settings.model.context_tokens_max)
            arguments = engine_arguments(settings, model_dir, context, name, pool_bytes, told, on_cpu=on_cpu)
            source = AsyncVllm(arguments, engine.vllm.adapters)
        except Exception as error:
            if connector is not None:
                connector.close()
            if isinstance(error, ModelRefused):
                raise
            cause = last_error(Path("/proc/self/fd/2")) or str(error)
            raise ModelRefused(f"vLLM {VERSION} does not serve it: {cause}", LOG_FIX) from error
        if connector is not None:
            connector.hide()  # vLLM's connector has found it
        notes.begin("engine")
        layout = source.layout
        tokenizer = load_tokenizer(model_dir)
        vocabulary = tokenizer.backend_tokenizer
        info = ReplicaInfo(
            replica_id=replica_id,
            model_name=settings.model.served_name or spec.name,
            context_tokens_max=layout.context_tokens_max,
            device=layout.device,
            dtype=layout.dtype,
            dtype_sentence=sentence,
            threads=threads,
            step=f"vLLM {VERSION}",
            exact=False,
            exactness="as vLLM computes: the bits depend on what is computed together",
            attention="vLLM's",
            block_tokens=layout.block_tokens,
            kv_dtype=layout.kv_dtype,
            bytes_per_token=layout.bytes_per_token,
            pages=layout.pages,
            pool_bytes=layout.pages * layout.block_tokens * layout.bytes_per_token,
            load_s=time.monotonic() - started_s,
            model=spec.fingerprint.hex(),
            drops_pages=False,
        )
        share = settings.share_of_tenant(settings.limits.tenant_share)
        predictor = settings.tiers.predictor
        ends = spec.eos_token_ids
        returns = SessionReturns(predictor.sessions_max, fast_clock(time.monotonic, predictor.clock_rate))
        text = TokenText(vocabulary, frozenset(tokenizer.all_special_ids))
        output = OutputProcessor(vocabulary, ends, text, info.context_tokens_max)
        grammars = GrammarCompiler(vocabulary.to_str, spec.vocab, ends, settings.grammar)
        salts = PageSalts(secrets.token_bytes(16))
        reports = None if self._tiers is None else self._tiers.link
        limits = EngineLimits(
            vocab=spec.vocab,
            context_tokens_max=info.context_tokens_max,
            queue_max=engine.queue_max,
            retry_after_s=settings.limits.retry_after_s,
            tenant_queue_max=math.ceil(engine.queue_max * share),
        )
        return VllmEngine(
            source,
            Telling(
                info, output, PrefillMeter(fit_prefill([], engine.step_tokens_max)), engine.step_tokens_max
            ),
            Asks(ends, grammars, salts, has_tiers=connector is not None),
            TurnReports(reports, returns, info.block_tokens),
            FairQueue(engine.quantum_tokens, by_tag(settings.auth, settings.limits.tenant_weights)),
            limits,
            engine.sequences_max,
            connector,
        )
