"""Says what is wrong with a service, from what it counts. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from samovar.configs.fields import SettingField, setting_fields
from samovar.router.observe.diagnosis.conditions import CONDITIONS
from samovar.router.observe.diagnosis.memory import idle_sessions, kv_memory, no_offload
from samovar.router.observe.diagnosis.recompute import (
    evicted,
    never_stored,
    other_namespace,
    prompt_changes,
    storage_slow,
    timeouts,
)
from samovar.router.observe.diagnosis.record import Diagnosis, Finding, SettingChange, shown
from samovar.router.observe.diagnosis.service import (
    breaker_open,
    disk_full,
    predictor_off,
    prefill_bound,
    router_spills,
)
from samovar.router.observe.diagnosis.snapshot import Snapshot, Window

JUDGES: dict[str, Callable[[Window], Finding]] = {
    judge.__name__: judge
    for judge in [
        *[kv_memory, no_offload, idle_sessions, prompt_changes, other_namespace, never_stored, evicted],
        *[timeouts, storage_slow, prefill_bound, router_spills, predictor_off, breaker_open, disk_full],
    ]
}


def diagnose(now: Snapshot, before: Snapshot | None = None) -> Diagnosis:
    """Return one finding for each of `CONDITIONS`, in their order.

    `before`: an earlier snapshot of the same service: counters count since then, else since each process's
    start.
    """
    window = Window(now, before)
    findings = [JUDGES[condition.name](window) for condition in CONDITIONS]
    return Diagnosis(tuple(_agreed(findings)), window.turns, window.period_s)


def _agreed(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings with changes that can be made: within bounds, and none against another.

    Where one finding wants less of a setting, and another more, less is right: a tier that is larger than its
    disk, or not worth loading from, does not get better by more of it.
    """
    less = {
        change.setting: finding.condition
        for finding in findings
        for change in finding.changes
        if _direction(change) < 0
    }
    return [
        replace(one, changes=tuple(dict.fromkeys(_possible(change, less) for change in one.changes)))
        for one in findings
    ]


def _direction(change: SettingChange) -> int:
    """Return whether a change raises (1) or lowers (-1) a number; 0: neither."""
    if not all(isinstance(value, int | float) for value in (change.now, change.to)):
        return 0
    return int(change.to > change.now) - int(change.to < change.now)


def _possible(change: SettingChange, less: Mapping[str, str]) -> SettingChange:
    if change.setting in less and _direction(change) > 0:
        deed = f"{change.setting} would have to be higher, but first see {less[change.setting]}"
        return SettingChange("", None, None, change.brings, deed=deed)
    field = _fields().get(change.setting)
    if field is None or isinstance(change.to, bool) or not isinstance(change.to, int | float):
        return change
    to = change.to if field.high is None else min(change.to, field.high)
    to = to if field.low is None else max(to, field.low)
    if to == change.now:
        deed = f"{change.setting} ({shown(to)}) is at its limit"
        return SettingChange("", None, None, change.brings, deed=deed)
    return replace(change, to=to)


@functools.cache
def _fields() -> dict[str, SettingField]:
    return setting_fields()
