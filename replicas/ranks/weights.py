"""Loads one rank's part of a model: slices of its weights, read from the same files as the whole model."""

from __future__ import annotations

from functools import partial

import torch
from safetensors import safe_open

from samovar.replicas.forward import load_model
from samovar.replicas.model import ModelSpec, read_weights
from samovar.replicas.ranks.peers import Peers, sum_rowwise
from samovar.replicas.ranks.split import RankSplit, narrow


def load_part(spec: ModelSpec, dtype: torch.dtype, device: torch.device, peers: Peers) -> torch.nn.Module:
    """Load this rank's part for inference; its row-wise layers return the sum over all ranks.

    Raises `ModelRefused` if the model cannot be cut, or its weights are not whole.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(spec.path, local_files_only=True)
    split = narrow(config, spec, peers.rank, peers.ranks)
    of_type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    part = read_part(spec, split, dtype)
    model = load_model(
        spec, dtype, device, partial(of_type.from_pretrained, None, config=config, state_dict=part)
    )
    sum_rowwise(model, split, peers.add_up)
    return model


def read_part(spec: ModelSpec, split: RankSplit, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read this rank's part of every tensor into main memory, and no more than that."""
    found: dict[str, torch.Tensor] = {}
    for file in read_weights(spec.path):
        with safe_open(file.path, framework="pt") as tensors:
            for tensor in file.tensors:
                lazy, cut = tensors.get_slice(tensor.name), split.cut_of(tensor.name)
                if cut is None:
                    part = lazy[:]
                else:
                    span = split.span(tensor.shape[cut])
                    part = lazy[span] if cut == 0 else lazy[:, span]
                found[tensor.name] = torch.zeros_like(part) if split.is_zero(tensor.name) else part.to(dtype)
    return found
