"""The step loop of one replica, the audit of restored blocks and the probe at start."""

from replicas.engine.audit import TOLERANCES, Auditor, Probe, ProbeResult, same_slots
from replicas.engine.engine import Engine
from replicas.engine.output import OutputProcessor, TokenText
from replicas.engine.requests import EngineLimits, Intake, OpenRequests
from replicas.engine.thread import EngineThread, EventStream
from replicas.scheduling import bare_sequence

__all__ = [
    "TOLERANCES",
    "Auditor",
    "Engine",
    "EngineLimits",
    "EngineThread",
    "EventStream",
    "Intake",
    "OpenRequests",
    "OutputProcessor",
    "Probe",
    "ProbeResult",
    "TokenText",
    "bare_sequence",
    "same_slots",
]
