"""A forward pass of a transformers model on paged KV: attention, the runner, sampling."""

from replicas.forward.attention import EXACT_ROWS, AttentionBackend, GatherSdpa
from replicas.forward.inputs import StepInputs, step_words_max
from replicas.forward.runner import Runner, Same, Score, load_model
from replicas.forward.sampler import Sampled, Sampler, best_tokens

__all__ = [
    "EXACT_ROWS",
    "AttentionBackend",
    "GatherSdpa",
    "Runner",
    "Same",
    "Sampled",
    "Sampler",
    "Score",
    "StepInputs",
    "best_tokens",
    "load_model",
    "step_words_max",
]
