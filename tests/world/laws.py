"""What must never be seen in a life, by its name, and which promises and faults that is about."""

from __future__ import annotations

LAWS: dict[str, tuple[str, ...]] = {
    "a wrong byte": ("G1", "G7"),
    "another tenant's": ("G2", "F14"),
    "served unverified": ("G4", "G5", "F01"),
    "unverified in memory": ("G4", "G5", "F01"),
    "not found again": ("G8", "G9"),
    "not resumed": ("G9", "F27"),
    "affinity": (),
    "another answer": ("G14", "F20", "F21"),
    "late": ("G9", "G10", "F08"),
    "starved": ("G10", "F35"),
    "for ever": ("G9", "G12", "F18"),
    "deadlock": ("G9", "F18"),
    "livelock": ("G9", "F18"),
    "a thread died": ("G9",),
    "not learned": (),
    "not scaled": (),
    "not rolled out": ("F27",),
    "books": ("G10", "F06"),
    "erased and found": ("G12", "F36"),
    "erased and served": ("G12", "F36"),
    "erased and there": ("G12", "F36"),
    "one failure stopped others": ("G12", "F36"),
}
"""`make prove` names them. A violation of another kind cannot be told: see `Scheduler.violate`."""
