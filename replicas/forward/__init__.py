"""A forward pass of a transformers model on paged KV: attention, the runner, sampling."""

from replicas.forward.attention import EXACT_ROWS, AttentionBackend, GatherSdpa
from replicas.forward.attention_choice import ChosenAttention, choose_attention
from replicas.forward.draws import Sampled, greedy_of
from replicas.forward.forward import Forward, MakeForward, TransformersForward
from replicas.forward.graphs import CudaCapture
from replicas.forward.inputs import StepInputs, step_words_max
from replicas.forward.runner import Runner, Same, Score, load_model
from replicas.forward.sampler import NotNumbers, Sampler

__all__ = [
    "EXACT_ROWS",
    "AttentionBackend",
    "ChosenAttention",
    "CudaCapture",
    "Forward",
    "GatherSdpa",
    "MakeForward",
    "NotNumbers",
    "Runner",
    "Same",
    "Sampled",
    "Sampler",
    "Score",
    "StepInputs",
    "TransformersForward",
    "choose_attention",
    "greedy_of",
    "load_model",
    "step_words_max",
]
