"""What is wrong with a running service, and which setting would help: a pure function over what it counts."""

from router.diagnosis.conditions import BY_NAME, CONDITIONS, Condition
from router.diagnosis.diagnose import diagnose
from router.diagnosis.record import Diagnosis, Finding, SettingChange, in_bytes, in_seconds
from router.diagnosis.snapshot import (
    FrontDoor,
    NoSnapshot,
    Snapshot,
    Window,
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
    "NoSnapshot",
    "SettingChange",
    "Snapshot",
    "Window",
    "diagnose",
    "in_bytes",
    "in_seconds",
    "settings_told",
    "snapshot_of",
]
