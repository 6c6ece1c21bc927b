"""Forecasts of when an idle session resumes: turns, features, predictors and the learner thread."""

from cache_tiers.forecast.kaplan_meier import TypeKm
from cache_tiers.forecast.learner import Forecaster, PredictorFile, TurnLearner
from cache_tiers.forecast.predictor import Predictor
from cache_tiers.forecast.survival import COLD, EDGES, Curves, Floats, hinted, resume_probability
from cache_tiers.forecast.turns import Hint, HintEvent, Role, SessionKey, Stop, Turn, fast_clock

__all__ = [
    "COLD",
    "EDGES",
    "Curves",
    "Floats",
    "Forecaster",
    "Hint",
    "HintEvent",
    "Predictor",
    "PredictorFile",
    "Role",
    "SessionKey",
    "Stop",
    "Turn",
    "TurnLearner",
    "TypeKm",
    "fast_clock",
    "hinted",
    "resume_probability",
]
