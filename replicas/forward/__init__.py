"""A forward pass of a model on paged KV: attention, the ways to compute a step, the runner."""

from samovar.replicas.forward.attention import EXACT_ROWS, AttentionBackend, GatherSdpa
from samovar.replicas.forward.attention_choice import ATTENTION_TOLERANCES, ChosenAttention, choose_attention
from samovar.replicas.forward.forward import Forward, MakeForward, TransformersForward
from samovar.replicas.forward.fused import FusedForward
from samovar.replicas.forward.graphs import Capture, GraphLimits, StepGraphs, open_capture
from samovar.replicas.forward.inputs import StepInputs, StepPacker, StepShape, step_words_max
from samovar.replicas.forward.lean import LeanForward, LeanModel
from samovar.replicas.forward.loading import load_model
from samovar.replicas.forward.plain import PLAIN_TYPES, NotPlain, PlainLayer, PlainModel, plain_model
from samovar.replicas.forward.runner import DeviceTime, Runner, Same, Score, groups_experts, why_by_rows

__all__ = [
    "ATTENTION_TOLERANCES",
    "EXACT_ROWS",
    "PLAIN_TYPES",
    "AttentionBackend",
    "Capture",
    "ChosenAttention",
    "DeviceTime",
    "Forward",
    "FusedForward",
    "GatherSdpa",
    "GraphLimits",
    "LeanForward",
    "LeanModel",
    "MakeForward",
    "NotPlain",
    "PlainLayer",
    "PlainModel",
    "Runner",
    "Same",
    "Score",
    "StepGraphs",
    "StepInputs",
    "StepPacker",
    "StepShape",
    "TransformersForward",
    "choose_attention",
    "groups_experts",
    "load_model",
    "open_capture",
    "plain_model",
    "step_words_max",
    "why_by_rows",
]
