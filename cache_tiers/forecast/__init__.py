"""Forecasts of when an idle session resumes: turns, lineages, features, predictors and the learner thread."""

from samovar.cache_tiers.forecast.hints import HintRecord
from samovar.cache_tiers.forecast.kaplan_meier import TypeKm
from samovar.cache_tiers.forecast.learner import NO_FILE, Forecaster, PredictorFile, TurnLearner, forecast
from samovar.cache_tiers.forecast.lineages import LEFT_SHARE, LineageChains
from samovar.cache_tiers.forecast.predictor import Predictor
from samovar.cache_tiers.forecast.replay_turns import CALIBRATION_S
from samovar.cache_tiers.forecast.turns import (
    BINS,
    COLD,
    EDGES,
    EDGES_S,
    LAST_S,
    TURN_S_MAX,
    WIDTHS_S,
    Curves,
    Floats,
    Forecast,
    Hint,
    HintEvent,
    Opening,
    Role,
    SessionKey,
    Stop,
    Turn,
    bins_of,
    fast_clock,
    hinted,
    log_survival,
    resume_probability,
)

__all__ = [
    "BINS",
    "CALIBRATION_S",
    "COLD",
    "EDGES",
    "EDGES_S",
    "LAST_S",
    "LEFT_SHARE",
    "NO_FILE",
    "TURN_S_MAX",
    "WIDTHS_S",
    "Curves",
    "Floats",
    "Forecast",
    "Forecaster",
    "Hint",
    "HintEvent",
    "HintRecord",
    "LineageChains",
    "Opening",
    "Predictor",
    "PredictorFile",
    "Role",
    "SessionKey",
    "Stop",
    "Turn",
    "TurnLearner",
    "TypeKm",
    "bins_of",
    "fast_clock",
    "forecast",
    "hinted",
    "log_survival",
    "resume_probability",
]
