"""The learned part: hazards of 17 bins of idle time from a vector of features, one small network.

32 hidden units and a linear skip (PREDICTOR.md, "Model"), numpy, Adam (Kingma and Ba, 2015); forecasts are
made with the weights' running average, which is calmer (Polyak and Juditsky, 1992). The loss is
the likelihood of discrete-time survival (Tutz and Schmid, 2016): each bin that a session has been through
counts as survived, a bin that it is in by its share so far, the bin it came back in as an event. Nothing
here knows what the features mean, or of clocks.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_tiers.survival import BINS, COLD, EDGES, Curves, Floats

Weights = npt.NDArray[np.float32]

HIDDEN: Final = 32
_OUT: Final = HIDDEN + BINS  # the hidden layer and the skip are one product
_LOGIT_MAX: Final = np.float32(14.0)
_ZERO: Final = np.float32(0.0)
_GRADIENT_MAX: Final = 5.0
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_DECAY: Final = 0.1  # of the weights, times the learning rate (Loshchilov and Hutter, 2019)
_AVERAGED_STEPS: Final = 200


class HazardModel:
    """Starts as `survival.COLD` for everyone, and goes back there should its weights ever be lost."""

    def __init__(self, features: int, *, learning_rate: float, seed: int) -> None:
        self.features = features
        self._learning_rate = learning_rate
        self._rng = np.random.default_rng(seed)
        self._count = (features + 1) * _OUT + HIDDEN * BINS
        self.resets = 0
        self._start()

    def _start(self) -> None:
        self.weights: Weights = np.zeros(self._count, dtype=np.float32)
        self.moments: Weights = np.zeros((2, self._count), dtype=np.float32)
        self.steps = 0
        first, bias, _ = self._parts(self.weights)  # the second layer starts at 0: nobody differs
        scale = math.sqrt(2.0 / self.features)
        first[:, :HIDDEN] = self._rng.normal(0.0, scale, (self.features, HIDDEN))
        hazards = -np.expm1(np.diff(COLD.astype(np.float64)))
        bias[HIDDEN:] = np.log(hazards / (1.0 - hazards))
        self.average = self.weights.copy()

    def _parts(self, flat: Weights) -> tuple[Weights, Weights, Weights]:
        """Views: `[features, HIDDEN + BINS]`, `[HIDDEN + BINS]`, `[HIDDEN, BINS]`."""
        first = self.features * _OUT
        return (
            flat[:first].reshape(self.features, _OUT),
            flat[first : first + _OUT],
            flat[first + _OUT :].reshape(HIDDEN, BINS),
        )

    def curve(self, row: Weights) -> Curves:
        """The survival curve `[EDGES]` of standardised features `[features]`."""
        first, bias, second = self._parts(self.average)
        sums = row @ first
        sums += bias
        logits = np.maximum(sums[:HIDDEN], _ZERO) @ second
        logits += sums[HIDDEN:]
        curve = np.zeros(EDGES, dtype=np.float32)
        # A bin is survived with 1 - sigmoid(logit): minus the log of that is log(1 + exp(logit)).
        np.cumsum(np.log1p(np.exp(_limited(logits))), out=curve[1:])
        return np.negative(curve, out=curve)

    def learn(self, rows: Weights, came_back: Floats, survived: Floats) -> None:
        """One step on `[n, features]`; `came_back`, `survived`: `[n, BINS]`, each in [0, 1]."""
        first, bias, second = self._parts(self.weights)
        sums = rows @ first + bias
        hidden = np.maximum(sums[:, :HIDDEN], 0.0)
        hazards = _sigmoid(hidden @ second + sums[:, HIDDEN:])
        at_logits = (((came_back + survived) * hazards - came_back) / len(rows)).astype(np.float32)
        gradient = np.empty(self._count, dtype=np.float32)
        to_first, to_bias, to_second = self._parts(gradient)
        at_sums = np.empty_like(sums)
        at_sums[:, HIDDEN:] = at_logits
        np.multiply(at_logits @ second.T, hidden > 0.0, out=at_sums[:, :HIDDEN])
        np.matmul(rows.T, at_sums, out=to_first)
        np.sum(at_sums, axis=0, out=to_bias)
        np.matmul(hidden.T, at_logits, out=to_second)
        self._adam(gradient)

    def _adam(self, gradient: Weights) -> None:
        norm = math.sqrt(float(gradient @ gradient))
        if not math.isfinite(norm):
            self.resets += 1
            self._start()
            return
        if norm > _GRADIENT_MAX:
            gradient *= _GRADIENT_MAX / norm
        self.steps += 1
        first, second = self.moments
        first += (1.0 - _BETA1) * (gradient - first)
        second += (1.0 - _BETA2) * (gradient * gradient - second)
        rate = self._learning_rate * math.sqrt(1.0 - _BETA2**self.steps) / (1.0 - _BETA1**self.steps)
        step: Weights = first / (np.sqrt(second) + _EPSILON)
        step *= rate
        self.weights *= 1.0 - _DECAY * self._learning_rate
        self.weights -= step
        self.average += (self.weights - self.average) * max(1.0 / _AVERAGED_STEPS, 3.0 / (self.steps + 3.0))

    def check_integrity(self) -> None:
        """Raises `AssertionError` naming what is wrong."""
        assert np.isfinite(self.weights).all(), "a weight is not finite"
        assert np.isfinite(self.average).all(), "an averaged weight is not finite"
        assert np.isfinite(self.moments).all(), "a moment is not finite"
        assert (self.moments[1] >= 0.0).all(), "a second moment is negative"


def _sigmoid(logits: Weights) -> Weights:
    chances: Weights = np.reciprocal(np.exp(-_limited(logits)) + np.float32(1.0), dtype=np.float32)
    return chances


def _limited(logits: Weights) -> Weights:
    """In place."""
    np.maximum(logits, -_LOGIT_MAX, out=logits)
    return np.minimum(logits, _LOGIT_MAX, out=logits)
