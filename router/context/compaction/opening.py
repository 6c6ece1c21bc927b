"""Builds the compaction of an ingress from its settings and parts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from samovar.configs.settings import Settings
from samovar.router.context.compaction.compactor import Compactor
from samovar.router.context.compaction.errands import Errands, Served
from samovar.router.context.compaction.fitter import Fitter
from samovar.router.context.compaction.memory import CutMemory
from samovar.router.context.compaction.summaries import FILE_NAME, SummaryStore
from samovar.router.context.compaction.tokens import MessageTokens
from samovar.router.context.knowledge import open_embedder
from samovar.router.metrics import Metrics
from samovar.router.prompt import PromptBuilder
from samovar.router.routing import ReplicaClient, SessionDirectory


def open_compaction(
    settings: Settings,
    *,
    prompts: PromptBuilder,
    client: ReplicaClient,
    directory: SessionDirectory,
    served: Served,
    metrics: Metrics,
    window_tokens: Callable[[], int],
    has_entries: Callable[[str, Collection[str]], bool] = lambda tenant, entries: True,
) -> Compactor:
    """Open compaction. Raises `ExtraMissing`.

    A file of summaries that cannot be opened does not keep the ingress from starting: conversations are then
    cut without them. `window_tokens`: tells the longest prompt and answer that is served now.
    `has_entries`: whether none of a tenant's entries of knowledge was erased.
    """
    own = settings.compaction
    folder = (own.dir or settings.model.cache_dir / "compaction").expanduser()
    summaries = SummaryStore(
        folder / FILE_NAME,
        of_session_max=own.summaries_per_session,
        rows_max=own.summaries_max,
        busy_s=own.busy_s,
    )

    def count(prompt_tokens: int, written_tokens: int) -> None:
        metrics.compaction_tokens.labels("prompt").inc(prompt_tokens)
        metrics.compaction_tokens.labels("answer").inc(written_tokens)

    fitter = Fitter(
        own,
        MessageTokens(prompts),
        CutMemory(own.sessions_max, own.notes_max, own.memory_bytes_max),
        summaries,
        open_embedder(own.embedder),
        window_tokens,
        has_entries,
    )
    return Compactor(
        own,
        fitter,
        Errands(own, prompts, client, directory, served, count),
        prompts,
        lambda mode: metrics.compactions.labels(mode).inc(),
        lambda outcome: metrics.compaction_jobs.labels(outcome).inc(),
    )
