"""What is wrong with a running service, which setting would help, and what it can hold. Pure."""

from router.diagnosis.conditions import BY_NAME, CONDITIONS, Condition
from router.diagnosis.diagnose import diagnose
from router.diagnosis.record import Diagnosis, Finding, SettingChange, in_bytes, in_seconds
from router.diagnosis.sizing import LiveContext, LiveSizing, LiveTier, load_prices, size_live
from router.diagnosis.snapshot import (
    FrontDoor,
    NoSnapshot,
    Snapshot,
    Window,
    front_door,
    settings_told,
    snapshot_of,
)

__all__ = [
    "BY_NAME",
    "CONDITIONS",
    "Condition",
    "Diagnosis",
    "Finding",
    "FrontDoor",
    "LiveContext",
    "LiveSizing",
    "LiveTier",
    "NoSnapshot",
    "SettingChange",
    "Snapshot",
    "Window",
    "diagnose",
    "front_door",
    "in_bytes",
    "in_seconds",
    "load_prices",
    "settings_told",
    "size_live",
    "snapshot_of",
]
