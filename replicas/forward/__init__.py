"""A forward pass of a transformers model on paged KV: attention, the runner, sampling."""

from replicas.forward.attention import EXACT_ROWS, GatherSdpa
from replicas.forward.runner import Runner, load_model
from replicas.forward.sampler import Sampled, Sampler, best_tokens

__all__ = ["EXACT_ROWS", "GatherSdpa", "Runner", "Sampled", "Sampler", "best_tokens", "load_model"]
