"""A model before it is loaded: its files, whether it can be served, its device and dtype.

Imports nothing that loads a model: the ingress and the commands need this, and would wait for it.
"""

from samovar.replicas.model.card import ModelCard
from samovar.replicas.model.device import (
    ChosenDtype,
    GemmSeconds,
    choose_device,
    choose_dtype,
    free_host_bytes,
    gpus_seen,
    measure_gemm,
    torch_version,
    why_no_gpu,
)
from samovar.replicas.model.device_errors import in_a_line, is_device_lost, is_memory_short
from samovar.replicas.model.served import describe_model, refuse_early
from samovar.replicas.model.spec import SERVED_ROPE_TYPES, ModelSpec, check_heads, inspect_model
from samovar.replicas.model.store import describe_hub_model, ensure_model, find_early, pinned
from samovar.replicas.model.tokenizer import leave_torch_out, load_tokenizer
from samovar.replicas.model.vllm_settings import refuse_for_vllm, unused_settings
from samovar.replicas.model.weights import read_weights

__all__ = [
    "SERVED_ROPE_TYPES",
    "ChosenDtype",
    "GemmSeconds",
    "ModelCard",
    "ModelSpec",
    "check_heads",
    "choose_device",
    "choose_dtype",
    "describe_hub_model",
    "describe_model",
    "ensure_model",
    "find_early",
    "free_host_bytes",
    "gpus_seen",
    "in_a_line",
    "inspect_model",
    "is_device_lost",
    "is_memory_short",
    "leave_torch_out",
    "load_tokenizer",
    "measure_gemm",
    "pinned",
    "read_weights",
    "refuse_early",
    "refuse_for_vllm",
    "torch_version",
    "unused_settings",
    "why_no_gpu",
]
