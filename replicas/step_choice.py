"""Chooses what computes a replica's steps: a forward pass of our own where it serves, else transformers'.

Each kind is probed with the weights as it holds them. Where trials show that the first one is not exact and
another one is, that one serves: exact mode promises more than speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter

from configs.settings import EngineSettings
from replicas.engine import TOLERANCES, Probe, ProbeResult
from replicas.forward import (
    AttentionBackend,
    Forward,
    GatherSdpa,
    LeanForward,
    LeanModel,
    MakeForward,
    NotPlain,
    plain_model,
)
from replicas.kept_measurements import KeptMeasurements
from replicas.kv import KvGeometry, KvPool
from replicas.messages import ModelRefused

logger = logging.getLogger(__name__)

LEAN, TRANSFORMERS = "lean", "transformers"
PROBE = TypeAdapter(ProbeResult)
"""The form in which verdicts are kept."""


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """What computes the steps. `kind`: of `engine.step`; `sentence`: which kind and why.

    `model`: transformers' module, without weights if another form holds them.
    """

    kind: str
    sentence: str
    model: torch.nn.Module
    lean: LeanModel | None
    exactness: ProbeResult

    def numerics(self, device: torch.device) -> str:
        """Return what the bits of exact mode depend on: machine, torch version, thread count, kind of step.

        Empty outside exact mode: KV of all machines and of all kinds is then interchangeable.
        """
        if not self.exactness.exact:
            return ""
        cpu, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        machine = f"exact {device.type} {cpu} torch {torch.__version__} threads {threads}"
        return machine if self.lean is None else f"{machine} lean{' packed' * self.lean.is_packed}"

    def forward(self, backend: AttentionBackend) -> MakeForward | None:
        """Return what makes the forward pass of a pool, attending by `backend`; None: the runner's own."""
        return None if self.lean is None else _lean_forward(self.lean, backend, exact=self.exactness.exact)


def _lean_forward(lean: LeanModel, backend: AttentionBackend, *, exact: bool) -> MakeForward:
    def make(pool: KvPool) -> Forward:
        return LeanForward(lean, pool, backend, exact=exact)

    return make


class StepChoice:
    """Settles which kind of step serves a model, and whether it is exact here.

    `load`: loads the model; called once, and again if a kind that has taken its weights over does not serve.
    `kept`: verdicts of earlier starts.
    """

    def __init__(
        self,
        settings: EngineSettings,
        geometry: KvGeometry,
        device: torch.device,
        load: Callable[[], torch.nn.Module],
        kept: KeptMeasurements,
    ) -> None:
        self._settings = settings
        self._geometry = geometry
        self._device = device
        self._load = load
        self._kept = kept
        self._model = load()
        self._lean: LeanModel | None = None

    @property
    def model(self) -> torch.nn.Module:
        """transformers' module, without weights if another form holds them."""
        return self._model

    def settle(self, vocab: int, step_tokens_max: int) -> ChosenStep:
        """Return the step that serves. Raises `ModelRefused` if `engine.step` names one that cannot."""
        asked = self._settings.step

        def chosen(kind: str, why: str = "") -> ChosenStep:
            return self._chosen(kind, why, vocab, step_tokens_max)

        why_not = "engine.step" if asked == TRANSFORMERS else self._why_not_lean()
        if why_not is not None:
            if asked == LEAN:
                raise ModelRefused(
                    f"engine.step is lean, which does not serve here: {why_not}", "set engine.step to auto"
                )
            return chosen(TRANSFORMERS, why_not)
        lean = chosen(LEAN)
        if lean.exactness.exact or asked == LEAN or not lean.exactness.is_tried:
            return lean
        del lean  # one form of the weights at a time
        other = chosen(TRANSFORMERS, "the lean step is not exact here")
        return other if other.exactness.exact else chosen(LEAN)

    def _why_not_lean(self) -> str | None:
        if self._settings.tensor_parallel > 1:
            return "engine.tensor_parallel"
        if self._device.type != "cpu":
            return f"on {self._device.type}"
        try:
            self._hold(LEAN)
        except NotPlain as why:
            return str(why)
        return None

    def _hold(self, kind: str) -> LeanModel | None:
        """Hold the weights, once, in the form of a kind of step. Raises `NotPlain`."""
        if kind == LEAN and self._lean is None:
            self._lean = LeanModel(plain_model(self._model))
            self._model.to("meta")  # who computes with it now gets an error
        elif kind == TRANSFORMERS and self._lean is not None:
            self._lean = None
            self._model = self._load()
        return self._lean

    def _chosen(self, kind: str, why: str, vocab: int, step_tokens_max: int) -> ChosenStep:
        lean = self._hold(kind)
        exactness = self._exactness(lean, vocab, step_tokens_max)
        if lean is None:
            sentence = f"the modules of transformers ({why})"
        else:
            sentence = "lean, weights packed" if lean.is_packed else "lean, weights as they are"
        return ChosenStep(kind, sentence, self._model, lean, exactness)

    def _exactness(self, lean: LeanModel | None, vocab: int, step_tokens_max: int) -> ProbeResult:
        """Decide on exact mode: `engine.exact` requests it (default: on CPU), the probe grants it.

        It is never assumed: a start that does not probe and finds no kept verdict is not exact.
        """
        geometry, wanted = self._geometry, self._settings.exact
        ranks, tolerance = self._settings.tensor_parallel, f"tolerance: {TOLERANCES[geometry.stored_dtype]}"
        if ranks > 1:  # a sum's order depends on where a row lies in the batch
            return ProbeResult(False, f"not bitwise with engine.tensor_parallel={ranks}; {tolerance}")
        if wanted is False or (wanted is None and self._device.type != "cpu"):
            why = "switched off" if wanted is False else f"off by default on {self._device.type}"
            return ProbeResult(False, f"{why}; {tolerance}")
        if geometry.dtype == torch.float16:  # overflows to Inf; sums in different orders then disagree
            return ProbeResult(False, f"not in float16; {tolerance}")
        make = None if lean is None else _lean_forward(lean, GatherSdpa(True, geometry.dtype), exact=True)
        probe = Probe(self._model, geometry, vocab, self._device, make)
        unprobed = ProbeResult(False, f"not probed (engine.fast_start); {tolerance}")
        name = "probe" if lean is None else f"probe {LEAN}"
        return self._kept.get(name, PROBE, lambda: probe.run(step_tokens_max), unprobed)
