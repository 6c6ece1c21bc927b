"""A forward pass of a model on paged KV: attention, the ways to compute a step, the runner."""

from replicas.forward.attention import EXACT_ROWS, AttentionBackend, GatherSdpa
from replicas.forward.attention_choice import ChosenAttention, choose_attention
from replicas.forward.forward import Forward, MakeForward, TransformersForward
from replicas.forward.graphs import CudaCapture
from replicas.forward.inputs import StepInputs, step_words_max
from replicas.forward.lean import LeanForward, LeanModel
from replicas.forward.plain import PLAIN_TYPES, NotPlain, PlainLayer, PlainModel, plain_model
from replicas.forward.runner import Runner, Same, Score, load_model

__all__ = [
    "EXACT_ROWS",
    "PLAIN_TYPES",
    "AttentionBackend",
    "ChosenAttention",
    "CudaCapture",
    "Forward",
    "GatherSdpa",
    "LeanForward",
    "LeanModel",
    "MakeForward",
    "NotPlain",
    "PlainLayer",
    "PlainModel",
    "Runner",
    "Same",
    "Score",
    "StepInputs",
    "TransformersForward",
    "choose_attention",
    "load_model",
    "plain_model",
    "step_words_max",
]
