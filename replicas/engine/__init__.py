"""The step loop of one replica, the audit of restored blocks and the probe at start."""

from samovar.replicas.engine.audit import TOLERANCES, Auditor, Probe, ProbeResult, same_slots
from samovar.replicas.engine.engine import Engine
from samovar.replicas.engine.requests import Intake, OpenRequests
from samovar.replicas.engine.thread import EngineThread
from samovar.replicas.scheduling import bare_sequence

__all__ = [
    "TOLERANCES",
    "Auditor",
    "Engine",
    "EngineThread",
    "Intake",
    "OpenRequests",
    "Probe",
    "ProbeResult",
    "bare_sequence",
    "same_slots",
]
