"""The Serve deployment class of the front door: one process that parses, tokenises and streams.

A thin shell: it loads the tokenizer, makes the API over the replicas' handle and can be told to
drain. How many of it run, and where, is decided by whoever deploys it (`cluster/app.py`).
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from ray import serve
from transformers import AutoTokenizer

from cache_tiers.session_actor import session_actor
from configs.settings import Settings
from replicas.model_spec import inspect_model
from replicas.model_store import ensure_model
from router import load_book
from router.api import build_api, build_service
from router.auth import server_secret
from router.prompt import PromptBuilder
from router.ray_directory_link import RayDirectoryLink
from router.ray_replica_client import RayReplicaClient
from router.session_directory import SessionDirectory

__all__ = ["Ingress", "build_api", "build_service"]


REPLICA_DEPLOYMENT = "Replica"


@serve.ingress()
class Ingress:
    """`model_dir`: the model that the replicas of `model_app` serve; None: `settings.model`'s.

    `waits`: it is not up before it has seen one of them.

    With more than one ingress `settings.auth.server_secret` must be set, the same for all. The
    served name is `settings.model.served_name` or the model's own; the context is the model's, or
    `settings.model.context_tokens_max` when that is smaller. Raises `ModelRefused`.
    """

    def __init__(
        self, settings: Settings, model_dir: str | None, model_app: str, waits: bool = False
    ) -> None:
        handle = serve.get_deployment_handle(REPLICA_DEPLOYMENT, model_app, _check_exists=False)
        spec = inspect_model(Path(model_dir) if model_dir else ensure_model(settings.model))
        tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True)
        wanted = settings.model.context_tokens_max or spec.context_tokens_max
        context_tokens_max = min(wanted, spec.context_tokens_max)
        prompts = PromptBuilder(
            tokenizer,
            vocab_tokens=spec.vocab,
            context_tokens_max=context_tokens_max,
            eos_token_ids=spec.eos_token_ids,
            limits=settings.limits,
            tenant_share=settings.share_of_tenant(settings.limits.tenant_share),
        )
        self._service = build_service(
            settings=settings,
            client=RayReplicaClient(
                handle,
                retry_after_s=settings.limits.retry_after_s,
                clear_timeout_s=settings.tiers.store_s_max,
                stall_s=settings.router.stall_s,
            ),
            prompts=prompts,
            model_name=settings.model.served_name or spec.name,
            context_tokens_max=context_tokens_max,
            model=spec.fingerprint.hex(),
            waits=waits,
            secret=server_secret(settings.auth),
            directory=SessionDirectory(
                RayDirectoryLink(
                    session_actor(settings.router.sessions_max), clear_timeout_s=settings.tiers.store_s_max
                ),
                load_book.BOOK,
                settings.router,
            ),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._service)

    def reconfigure(self, config: dict[str, int]) -> None:
        """Ray Serve's hook: what may change without a restart. `replicas`: how many there should be."""
        self._service.readiness.wanted = config["replicas"]

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
        self._service.directory.table.check_integrity()
        load_book.BOOK.check_integrity()
