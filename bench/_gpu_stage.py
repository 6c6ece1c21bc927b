"""What the sections of `bench.gpu` share: the model, one engine at a time, and the tiers behind it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from bench._gpu_device import Ceilings, Device, dtype_name
from bench._gpu_engine import Sizes
from bench._gpu_model import Caller, Shape, random_model, write_hollow_model
from bench._gpu_tiers import MappedRam, open_mapped_tiers
from samovar.cache_tiers.node import TierNode
from samovar.configs.loader import load
from samovar.configs.sections import GIB, MIB
from samovar.configs.settings import Settings
from samovar.replicas.model import ModelSpec
from samovar.replicas.offload import WorkerPools
from samovar.replicas.start.build import Start

SEQUENCES_MIN = 8
"""So many answers may be running, however small the batches are: `limits.n_max` asks for it."""

SPARE = 64 * MIB
"""Headers, and the turns beside the conversation."""
SAMPLES_MAX = GIB
"""What the start's samples may take of the tier, whose room is handed out once."""
PRESET = "local-gpu"


@dataclass(slots=True)
class _Open:
    kind: str
    caller: Caller
    node: TierNode
    lanes: WorkerPools


class Stage:
    """Makes the model once, and an engine when a section asks for one of another kind.

    Two pools do not fit beside the weights: the engine that was there is dropped. So is one that a failed
    section left with requests. `folder`: for files.
    """

    def __init__(self, device: Device, shape: Shape, sizes: Sizes, folder: Path) -> None:
        self.ceilings = Ceilings()
        self._device = device
        self._shape = shape
        self._sizes = sizes
        self._folder = folder
        self._model_dir: Path | None = None
        self._model: torch.nn.Module | None = None
        self._open: _Open | None = None

    def caller(self, kind: str) -> Caller:
        """Return the engine whose KV is of `kind`: `auto` or `int8`, as `engine.kv_dtype` has it."""
        return self._opened(kind).caller

    def node(self, kind: str) -> TierNode:
        """Return the tiers of that engine."""
        return self._opened(kind).node

    def _opened(self, kind: str) -> _Open:
        if self._open is None or self._open.kind != kind or not self._open.caller.is_idle:
            self.close()
            self._open = self._make(kind)
        return self._open

    def _make(self, kind: str) -> _Open:
        if self._model_dir is None:
            self._model_dir = write_hollow_model(self._folder / "model", self._shape)
        pages = self._sizes.pages(self._shape.block_tokens)
        turn = min(self._sizes.returns) * self._shape.token_bytes
        samples = min(SAMPLES_MAX, 8 * pages * self._shape.block_bytes)
        settings = self._settings(kind, self._model_dir)
        tier = MappedRam(max(self._sizes.returns) * self._shape.token_bytes + turn + samples + SPARE)
        access, node = open_mapped_tiers(tier, settings.tiers)
        built = Start(
            settings,
            self._model_dir,
            f"bench-{kind}",
            pages=pages,
            tiers=access,
            load=self._load,
        ).run()
        return _Open(kind, Caller(built, self._device, self._shape), node, access.lanes)

    def _settings(self, kind: str, model_dir: Path) -> Settings:
        """Return what is served: the preset, but for the model and for what a tiny shape cannot have."""
        flags: dict[str, object] = {
            "model.path": model_dir,
            "model.dtype": dtype_name(self._shape.dtype),
            "engine.device": self._device.torch.type,
            "engine.kv-dtype": kind,
            "engine.block-tokens": self._shape.block_tokens,
            "cluster.replicas": 1,
            "tiers.audit-share": 0.0,  # an audit computes again what was loaded
        }
        if not self._device.is_cuda:
            flags |= {
                "engine.step": "transformers",
                "tiers.hedge-slack-s": 60,  # no load is overtaken because the machine has others to serve
                "engine.sequences-max": max(SEQUENCES_MIN, self._sizes.batch),
            }
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        return load(PRESET, {}, words).settings

    def _load(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        # A step of our own has taken the weights of a model over that is on no device.
        if self._model is None or next(self._model.parameters()).is_meta:
            self._model = random_model(spec, dtype, device)
        return self._model

    def close(self) -> None:
        """Drop the engine and its tiers; the model stays."""
        if self._open is not None:
            self._open.lanes.close()
            self._open.node.close()
            offload = self._open.caller.engine.offload
            if offload is not None:
                offload.moves.io.close()
            self._open = None
            gc.collect()
            self._device.settle()
