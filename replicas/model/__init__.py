"""A model before it is loaded: its files, whether it can be served, its device and dtype.

Imports nothing that loads a model: the ingress and the commands need this, and would wait for it.
"""

from replicas.model.device import choose_device, choose_dtype, gpus_seen, torch_version, why_no_gpu
from replicas.model.spec import ModelSpec, check_heads, inspect_model, refuse_early
from replicas.model.store import describe_hub_model, ensure_model, find_early, pinned
from replicas.model.tokenizer import leave_torch_out, load_tokenizer
from replicas.model.weights import read_weights

__all__ = [
    "ModelSpec",
    "check_heads",
    "choose_device",
    "choose_dtype",
    "describe_hub_model",
    "ensure_model",
    "find_early",
    "gpus_seen",
    "inspect_model",
    "leave_torch_out",
    "load_tokenizer",
    "pinned",
    "read_weights",
    "refuse_early",
    "torch_version",
    "why_no_gpu",
]
