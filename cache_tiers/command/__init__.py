"""The command `samovar-tiers`, for environments that vLLM lives in: serves tiers, shows and checks them."""

from samovar.cache_tiers.command.doctor import vllm_checks

__all__ = ["vllm_checks"]
