"""The learned model: how a session's hazards differ from those of its kind, from a feature vector.

32 hidden units and a linear skip; of each number also how far it is through each of four ranges, so that
the network need not be linear in it (piecewise linear encoding: Gorishniy et al., 2022). In numpy (torch
would cost each tier actor some 190 MB), with Adam (Kingma and Ba, 2015); forecasts use the weights' running
average, which is less noisy (Polyak and Juditsky, 1992). The network's output is added to an offset, the
log odds known without it, so an untrained network predicts the offset. It predicts at `KNOTS_S`, linear in
log time between them, instead of each bin on its own: in most bins few sessions ever resume, too few to
learn from in an hour. The loss is the likelihood of discrete-time survival (Tutz and Schmid, 2016): each
bin that a session has passed counts as survived, the bin it is in by its share so far, the bin it resumed
in as an event. Does not know what the features mean.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from samovar.cache_tiers.forecast.turns import BINS, EDGES, EDGES_S, Curves, Floats

Weights = npt.NDArray[np.float32]

HIDDEN: Final = 32
KNOTS_S: Final = (2.0, 8.0, 30.0, 120.0, 600.0, 3600.0, 86400.0)
_KNOTS: Final = len(KNOTS_S)
_OUT: Final = HIDDEN + _KNOTS  # the hidden layer and the skip are one product
_ZEROS: Final = np.zeros(HIDDEN, dtype=np.float32)
_LOGIT_MAX: Final = np.full(BINS, 14.0, dtype=np.float32)
_LOGIT_MIN: Final = -_LOGIT_MAX
_ONE: Final = np.float32(1.0)
_ALL: Final = np.ones(BINS, dtype=np.float32)
_GRADIENT_MAX: Final = 5.0
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_DECAY: Final = 0.1  # of the weights, times the learning rate (Loshchilov and Hutter, 2019)
_PRIOR_STEPS: Final = 8000  # in earlier steps the decay is stronger: the prior weighs 1 / turns
_PRIOR_MAX: Final = 10.0
_EARLY_STEPS: Final = 2000  # step size starts at twice the learning rate; the excess is halved by then
_AVERAGED_STEPS: Final = 200


class HazardModel:
    """Starts as the offset it is given, and restarts from there if its weights ever become non-finite.

    `late`: of the `features`, the last so many begin without weight: where they are always 0, the model is
    the very same as without them.
    """

    def __init__(self, features: int, *, learning_rate: float, seed: int, late: int = 0) -> None:
        self.features = features
        self._late = late
        self._learning_rate = learning_rate
        self._rng = np.random.default_rng(seed)
        self._count = weights_of(self.features)
        self.resets = 0
        self._start()

    def _start(self) -> None:
        self.weights: Weights = np.zeros(self._count, dtype=np.float32)
        self.moments: Weights = np.zeros((2, self._count), dtype=np.float32)
        self.steps = 0
        first, _, _ = self._parts(self.weights)  # the second layer starts at 0: no session differs
        early = self.features - self._late
        first[:early, :HIDDEN] = self._rng.normal(0.0, math.sqrt(2.0 / early), (early, HIDDEN))
        self.average = self.weights.copy()
        self._used = self.average, *self._parts(self.average)
        gradient = np.empty(self._count, dtype=np.float32)
        self._gradient = gradient, *self._parts(gradient)
        self._scratch = np.empty(self._count, dtype=np.float32)

    def _parts(self, flat: Weights) -> tuple[Weights, Weights, Weights]:
        """Return views: `[features, HIDDEN + knots]`, `[HIDDEN + knots]`, `[HIDDEN, knots]`."""
        first = self.features * _OUT
        return (
            flat[:first].reshape(self.features, _OUT),
            flat[first : first + _OUT],
            flat[first + _OUT :].reshape(HIDDEN, _KNOTS),
        )

    def curve(self, row: Weights, offset: Weights, reach: Weights = _ALL) -> Curves:
        """Return the survival curve `[EDGES]` for standardised features `[features]`, log odds `[BINS]`.

        `reach`: `[BINS]`, 0 where too little was seen to tell features apart: there the offset holds.
        """
        # Once per turn, of few numbers: calls are what it costs, so the quicker one of each is taken.
        if self._used[0] is not self.average:
            self._used = self.average, *self._parts(self.average)
        _, first, bias, second = self._used
        sums = row.dot(first)
        sums += bias
        knots = np.maximum(sums[:HIDDEN], _ZEROS).dot(second)
        knots += sums[HIDDEN:]
        logits = knots.dot(_BASIS)
        logits *= reach
        logits += offset
        # A bin is survived with 1 - sigmoid(logit); minus the log of that is log(1 + exp(logit)).
        np.exp(_limited(logits), out=logits)
        np.log1p(logits, out=logits)
        curve = np.zeros(EDGES, dtype=np.float32)
        np.add.accumulate(logits, out=curve[1:])
        return np.negative(curve, out=curve)

    def learn(
        self, rows: Weights, offsets: Weights, came_back: Floats, survived: Floats, reach: Weights = _ALL
    ) -> None:
        """Take one step on features `[n, features]` and log odds `[n, BINS]`.

        `came_back`, `survived`: `[n, BINS]`, each in [0, 1]. `reach`: as of `curve`, of each row or of all.
        """
        first, bias, second = self._parts(self.weights)
        sums = rows.dot(first)
        sums += bias
        hidden = np.maximum(sums[:, :HIDDEN], _ZEROS)
        knots = hidden.dot(second)
        knots += sums[:, HIDDEN:]
        logits = knots.dot(_BASIS)
        logits *= reach
        logits += offsets
        excess = came_back + survived
        excess *= _sigmoid(logits)
        excess -= came_back
        at_logits = excess.astype(np.float32)
        at_logits *= reach
        at_logits *= _ONE / np.float32(len(rows))
        at_knots = at_logits.dot(_BASIS.T)
        gradient, to_first, to_bias, to_second = self._gradient
        at_sums = np.empty_like(sums)
        at_sums[:, HIDDEN:] = at_knots
        np.multiply(at_knots.dot(second.T), hidden > _ZEROS, out=at_sums[:, :HIDDEN])
        np.matmul(rows.T, at_sums, out=to_first)
        np.add.reduce(at_sums, axis=0, out=to_bias)
        np.matmul(hidden.T, at_knots, out=to_second)
        self._adam(gradient)

    def _adam(self, gradient: Weights) -> None:
        norm = math.sqrt(float(gradient.dot(gradient)))
        if not math.isfinite(norm):
            self.resets += 1
            self._start()
            return
        if norm > _GRADIENT_MAX:
            gradient *= _GRADIENT_MAX / norm
        self.steps += 1
        first, second = self.moments
        step = self._scratch
        first *= _BETA1
        first += np.multiply(gradient, 1.0 - _BETA1, out=step)
        second *= _BETA2
        gradient *= gradient
        gradient *= 1.0 - _BETA2
        second += gradient
        rate = self._learning_rate * (1.0 + _EARLY_STEPS / (_EARLY_STEPS + self.steps))
        rate *= math.sqrt(1.0 - _BETA2**self.steps) / (1.0 - _BETA1**self.steps)
        np.sqrt(second, out=step)
        step += _EPSILON
        np.divide(first, step, out=step)
        step *= rate
        prior = min(max(_PRIOR_STEPS / self.steps, 1.0), _PRIOR_MAX)
        self.weights *= max(1.0 - _DECAY * prior * self._learning_rate, 0.0)
        self.weights -= step
        np.subtract(self.weights, self.average, out=step)
        step *= max(1.0 / _AVERAGED_STEPS, 3.0 / (self.steps + 3.0))
        self.average += step

    def check_integrity(self) -> None:
        """Raise `AssertionError` naming what is wrong."""
        assert np.isfinite(self.weights).all(), "a weight is not finite"
        assert np.isfinite(self.average).all(), "an averaged weight is not finite"
        assert np.isfinite(self.moments).all(), "a moment is not finite"
        assert (self.moments[1] >= 0.0).all(), "a second moment is negative"


def weights_of(features: int) -> int:
    """Return how many weights a model of so many features has, ranges included."""
    return (features + 1) * _OUT + HIDDEN * _KNOTS


def with_late(weights: Weights, features: int, late: int) -> Weights:
    """Return weights `[..., count]` of a model of `features` for one with `late` more, which mean nothing."""
    first, rest = weights[..., : features * _OUT], weights[..., features * _OUT :]
    return np.concatenate([first, np.zeros((*weights.shape[:-1], late * _OUT), weights.dtype), rest], axis=-1)


def log_odds(hazards: npt.ArrayLike) -> Weights:
    """Return the finite log odds of hazards `[..., BINS]` in [0, 1]."""
    chances = np.clip(np.asarray(hazards, dtype=np.float64), 1e-6, 1.0 - 1e-6)
    odds: Weights = np.log(chances / (1.0 - chances)).astype(np.float32)
    return odds


def _basis() -> Weights:
    """Return `[knots, BINS]`: what each knot adds to each bin, at the bin's middle in log time."""
    middles = np.log(np.maximum(EDGES_S[:-1], 1.0) * EDGES_S[1:]) / 2.0
    hats = [np.interp(middles, np.log(KNOTS_S), row) for row in np.eye(_KNOTS)]
    return np.stack(hats).astype(np.float32)


_BASIS: Final = _basis()


def _sigmoid(logits: Weights) -> Weights:
    """Return the chances of log odds `[n, BINS]`, in their place."""
    np.negative(_limited(logits), out=logits)
    np.exp(logits, out=logits)
    logits += _ONE
    return np.reciprocal(logits, out=logits)


def _limited(logits: Weights) -> Weights:
    """Clamp to +-14, in place."""
    np.maximum(logits, _LOGIT_MIN, out=logits)
    return np.minimum(logits, _LOGIT_MAX, out=logits)
