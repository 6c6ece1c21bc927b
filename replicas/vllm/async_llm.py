"""vLLM's `AsyncLLM` as a `TokenSource`. A thin shell; needs vLLM, of the minors that the connector knows."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from samovar.replicas.messages import Sampled
from samovar.replicas.vllm.source import Ask, AskRefused, PoolLayout, SourceLost, TokenPiece

logger = logging.getLogger(__name__)

VERSION: str = vllm.__version__
SHUTDOWN_S = 10.0


class _PoolGauge(StatLoggerBase):  # type: ignore[misc]
    """Keeps the share of the pool's pages that are in use."""

    def __init__(self) -> None:
        self.share = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Take in what a step has counted."""
        if scheduler_stats is not None:
            self.share = float(scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """Nothing: the replica says what there is to say."""


class AsyncVllm:
    """`TokenSource`, in this process and those that it starts.

    `arguments`: of vLLM's `AsyncEngineArgs`; `adapters`: directories by name. Raises what vLLM raises where
    it cannot serve the model.
    """

    def __init__(self, arguments: Mapping[str, Any], adapters: Mapping[str, Path]) -> None:
        numbered = enumerate(sorted(adapters.items()), 1)
        self._adapters = {
            name: LoRARequest(name, number, str(path.expanduser())) for number, (name, path) in numbered
        }
        self._gauge = _PoolGauge()
        made = AsyncEngineArgs(**arguments, disable_log_stats=True)
        # A logger of one's own has vLLM gather what it logs, and only that.
        self._llm = AsyncLLM.from_engine_args(made, stat_loggers=[lambda config, index: self._gauge])

    @property
    def layout(self) -> PoolLayout:
        """Return what the pool is made of, as vLLM has chosen it."""
        config = self._llm.vllm_config
        model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
        heads = 1 if model.use_mla else model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
        values = heads * model.get_head_size() * (1 if model.use_mla else 2)
        dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
        width = 1 if "fp8" in str(dtype) or "int8" in str(dtype) else getattr(dtype, "itemsize", 2)
        return PoolLayout(
            dtype=str(model.dtype).removeprefix("torch."),
            kv_dtype=str(dtype).removeprefix("torch."),
            block_tokens=cache.block_size,
            bytes_per_token=values * width * model.get_num_layers(parallel) * parallel.pipeline_parallel_size,
            pages=cache.num_gpu_blocks,
            context_tokens_max=model.max_model_len,
            device=str(config.device_config.device_type),
        )

    async def generate(self, ask: Ask) -> AsyncGenerator[list[TokenPiece], None]:
        """Yield what is computed. Raises `AskRefused`, `SourceLost`."""
        ids = list(ask.token_ids)
        try:
            grammar = StructuredOutputsParams(grammar=ask.grammar) if ask.grammar else None
            params = SamplingParams(
                **ask.sampling,
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=grammar,
                extra_args={"kv_transfer_params": ask.params} if ask.params else None,
            )
            prompt = tokens_input(ids, cache_salt=ask.salt or None)
            lora = self._adapters[ask.adapter] if ask.adapter else None
            async for output in self._llm.generate(prompt, params, ask.name, lora_request=lora):
                scores = _prompt_scores(ids, output.prompt_logprobs, params.prompt_logprobs)
                yield [
                    TokenPiece(
                        one.index,
                        _sampled(one.token_ids, one.logprobs, params.logprobs),
                        output.num_cached_tokens or 0,
                        one.finish_reason or "",
                        scores,
                    )
                    for one in output.outputs
                ]
        except EngineDeadError as error:
            raise SourceLost(str(error)) from error
        except (VLLMClientError, ValueError) as error:
            raise AskRefused(str(error)) from error

    @property
    def pool_share(self) -> float:
        """Return the share of the pool's pages in use, as of the last step."""
        return self._gauge.share

    def check(self) -> None:
        """Raise `SourceLost` if vLLM's engine has ended."""
        if self._llm.errored:
            raise SourceLost("vLLM's engine core has ended")

    def close(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown(timeout=SHUTDOWN_S)


def _sampled(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None, best: int | None
) -> tuple[Sampled, ...]:
    if logprobs is None or best is None:
        return tuple(Sampled(token_id) for token_id in token_ids)
    pairs = zip(token_ids, logprobs, strict=True)
    return tuple(_scored(token_id, given, best) for token_id, given in pairs)


def _scored(token_id: int, given: Mapping[int, Any], best: int) -> Sampled:
    """Return a token with the `best` of its place; vLLM lists the token itself behind them, too."""
    by_rank = sorted((one.rank or 0, rival, one.logprob) for rival, one in given.items())
    top = tuple((rival, logprob) for rank, rival, logprob in by_rank if 1 <= rank <= best)
    return Sampled(token_id, given[token_id].logprob, top, given[token_id].rank or 0)


def _prompt_scores(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any] | None] | None, best: int | None
) -> tuple[Sampled, ...]:
    pairs = zip(token_ids, logprobs or (), strict=False)
    return tuple(_scored(token_id, given, best or 0) for token_id, given in pairs if given is not None)
