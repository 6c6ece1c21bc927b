"""A forward pass of a transformers model on paged KV: attention, the runner, sampling."""

from replicas.forward.attention import EXACT_ROWS, GatherSdpa
from replicas.forward.attention_choice import choose_attention
from replicas.forward.draws import Sampled, greedy_of
from replicas.forward.graphs import CudaCapture
from replicas.forward.runner import Runner, load_model
from replicas.forward.sampler import NotNumbers, Sampler

__all__ = [
    "EXACT_ROWS",
    "CudaCapture",
    "GatherSdpa",
    "NotNumbers",
    "Runner",
    "Sampled",
    "Sampler",
    "choose_attention",
    "greedy_of",
    "load_model",
]
