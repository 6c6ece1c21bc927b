"""The Serve deployment class of the front door: one process that parses, tokenises and streams.

A thin shell: it loads the tokenizer, makes the API over the replicas' handle and can be told to
drain. How many of it run, and where, is decided by whoever deploys it (`cluster/app.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from transformers import AutoTokenizer

from configs.settings import Settings
from replicas.model_spec import inspect_model
from router.api import build_api, build_service
from router.auth import server_secret
from router.prompt import PromptBuilder
from router.ray_replica_client import RayReplicaClient

__all__ = ["Ingress", "build_api", "build_service"]


@serve.ingress()
class Ingress:
    """`model_dir`: the model that the replicas behind `handle` serve.

    With more than one ingress `settings.auth.server_secret` must be set, the same for all. The
    served name is `settings.model.served_name` or the model's own; the context is the model's, or
    `settings.model.context_tokens_max` when that is smaller. Raises `ModelRefused`.
    """

    def __init__(self, settings: Settings, model_dir: str, handle: Any) -> None:
        spec = inspect_model(Path(model_dir))
        tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True)
        wanted = settings.model.context_tokens_max or spec.context_tokens_max
        context_tokens_max = min(wanted, spec.context_tokens_max)
        prompts = PromptBuilder(
            tokenizer,
            vocab_tokens=spec.vocab,
            context_tokens_max=context_tokens_max,
            eos_token_ids=spec.eos_token_ids,
            limits=settings.limits,
        )
        self._service = build_service(
            settings=settings,
            client=RayReplicaClient(
                handle,
                retry_after_s=settings.limits.retry_after_s,
                clear_timeout_s=settings.tiers.store_s_max,
            ),
            prompts=prompts,
            model_name=settings.model.served_name or spec.name,
            context_tokens_max=context_tokens_max,
            secret=server_secret(settings.auth),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._service)

    def drain(self) -> int:
        """Let no new work in, for good. Returns how many generations are still open."""
        self._service.readiness.drain()
        return self.in_flight()

    def in_flight(self) -> int:
        """Generations open now."""
        return self._service.concurrency.open_total

    def check_integrity(self) -> None:
        """Raises AssertionError when the books of this ingress are wrong."""
        self._service.concurrency.check_integrity()
        self._service.prompts.check_integrity()
