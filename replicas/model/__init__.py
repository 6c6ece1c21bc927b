"""A transformers model on paged KV: inspection, weights, attention, sampling."""

from replicas.model.attention import EXACT_ROWS, GatherSdpa
from replicas.model.runner import Runner, choose_device, choose_dtype, load_model
from replicas.model.sampler import Sampled, Sampler
from replicas.model.spec import ModelSpec, inspect_model
from replicas.model.store import ensure_model

__all__ = [
    "EXACT_ROWS",
    "GatherSdpa",
    "ModelSpec",
    "Runner",
    "Sampled",
    "Sampler",
    "choose_device",
    "choose_dtype",
    "ensure_model",
    "inspect_model",
    "load_model",
]
