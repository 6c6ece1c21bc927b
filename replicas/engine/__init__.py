"""The step loop of one replica, the audit of restored blocks and the probe at start."""

from replicas.engine.audit import TOLERANCES, Auditor, Probe, ProbeResult, same_slots
from replicas.engine.engine import Engine
from replicas.engine.limits import EngineLimits
from replicas.engine.output import TokenText
from replicas.engine.thread import EngineThread, EventStream
from replicas.scheduling import bare_sequence

__all__ = [
    "TOLERANCES",
    "Auditor",
    "Engine",
    "EngineLimits",
    "EngineThread",
    "EventStream",
    "Probe",
    "ProbeResult",
    "TokenText",
    "bare_sequence",
    "same_slots",
]
