"""When a candidate may enter the knowledge base without a person. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.configs.optional_sections import LoopSettings
from samovar.router.context.learning.candidates import CandidateEntry

AUTHOR = "auto-capture"
"""`who` of versions that no person has confirmed."""


@dataclass(frozen=True, slots=True)
class CaptureCounts:
    """What a tenant's base has at a moment. `of_auto`: entries whose newest version is auto-capture's.

    `of_window`: auto-captures in the last `auto_window_s`; `of_session`: of this conversation.
    """

    entries: int
    of_auto: int
    of_window: int
    of_session: int


def capture_refusals(
    candidate: CandidateEntry, tenant: str, counts: CaptureCounts, settings: LoopSettings
) -> list[str]:
    """Return why a candidate has to wait for a person; nothing: it may enter."""
    if tenant not in settings.auto_of:
        return ["auto-capture is off (knowledge.loop.auto_of)"]
    reasons = []
    if candidate.is_correction:
        reasons.append("a correction is the client's text: it needs a person")
    if settings.auto_evidence == "tool" and not candidate.evidence.tool:
        reasons.append("no tool's result confirms it (knowledge.loop.auto_evidence)")
    if candidate.similar:
        reasons.append("there is something about the same")
    if counts.of_session >= settings.auto_per_session:
        reasons.append(
            f"{counts.of_session} of this conversation have entered (knowledge.loop.auto_per_session)"
        )
    if counts.of_window >= settings.auto_per_window:
        reasons.append(
            f"{counts.of_window} have entered in {settings.auto_window_s:g} s "
            "(knowledge.loop.auto_per_window)"
        )
    if counts.of_auto + 1 > settings.auto_share_max * (counts.entries + 1):
        reasons.append(
            f"{counts.of_auto} of {counts.entries} entries are auto-captures (knowledge.loop.auto_share_max)"
        )
    return reasons
