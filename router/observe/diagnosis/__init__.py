"""What is wrong with a running service, which setting would help, and what it can hold. Pure."""

from samovar.router.observe.diagnosis.conditions import BY_NAME, CONDITIONS, Condition
from samovar.router.observe.diagnosis.diagnose import diagnose
from samovar.router.observe.diagnosis.record import Diagnosis, Finding, SettingChange, in_bytes, in_seconds
from samovar.router.observe.diagnosis.sizing import (
    LiveContext,
    LiveSizing,
    LiveTier,
    computing_in_words,
    load_prices,
    loading_in_words,
    size_live,
    wins_in_words,
)
from samovar.router.observe.diagnosis.snapshot import (
    IngressCounts,
    NoSnapshot,
    Snapshot,
    Window,
    ingress_counts,
    settings_told,
    snapshot_of,
)

__all__ = [
    "BY_NAME",
    "CONDITIONS",
    "Condition",
    "Diagnosis",
    "Finding",
    "IngressCounts",
    "LiveContext",
    "LiveSizing",
    "LiveTier",
    "NoSnapshot",
    "SettingChange",
    "Snapshot",
    "Window",
    "computing_in_words",
    "diagnose",
    "in_bytes",
    "in_seconds",
    "ingress_counts",
    "load_prices",
    "loading_in_words",
    "settings_told",
    "size_live",
    "snapshot_of",
    "wins_in_words",
]
