"""Seeds one after the other: what they reach, which of them fail, and with how few faults they still do."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator

from tests.world.faults import KINDS, Fault
from tests.world.life import Outcome, live
from tests.world.recovery import FOUND, POSSIBLE
from tests.world.rollout import INTERRUPTIONS

TRIES_MAX = 60
TOLD_EVERY = 20
RECOVERED_MIN = 0.97
"""Of what returning sessions find in the same worlds without faults, all seeds together. One world alone may
be off by more, either way: what was there before takes other room."""

STATES = (
    *(f"move: {state}" for state in ("planned", "reserved", "copying", "verified", "committed", "dropping")),
    *(f"found in {tier}" for tier in ("cpu", "nvme", "s3", "peer")),
    "found nowhere",
    *(f"fetched from {tier}" for tier in ("cpu", "nvme", "s3", "peer")),
    *(f"not fetched: {reason}" for reason in ("gone", "error", "timeout", "down", "refused")),
    *(
        f"offer: {outcome}"
        for outcome in ("taken", "held", "refused:queue", "refused:tombstone", "refused:busy")
    ),
    *(f"offer: refused:{reason}" for reason in ("incarnation", "down", "room")),
    "bad record: checksum",
    "demoted",
    *(
        f"erasure: {outcome}"
        for outcome in ("done", "goes on", "the door died", "unreachable tier", "not noted", "clear")
    ),
    *(f"erasure: {error}" for error in ("PeerLost", "PeerLate", "replies fails", "documents fails")),
    *(f"client: {error}" for error in ("PeerLost",)),
    *(f"request: {outcome}" for outcome in ("answered", "lost", "queue_full")),
    *(f"failover: {outcome}" for outcome in ("resumed", "gave_up")),
    *(f"routed: {outcome}" for outcome in ("home", "moved", "spilled", "new")),
    "resumed where a copy was",
    "resumed behind a rollout",
    *(f"rollout: {what}" for what in INTERRUPTIONS),
    *("scaled up", "scaled down", "a node left"),
    *(f"learned: {what}" for what in ("there again", "from a peer")),
    *(f"desk: {what}" for what in ("in turn", "passed on", "no place")),
    *(f"fault: {kind}" for kind in KINDS),
)


def shrunk(outcome: Outcome) -> Iterator[list[Fault]]:
    """Yield ever smaller plans under which the seed still breaks one of the same laws: drop by halves."""
    plan, size, tries = outcome.plan, max(1, len(outcome.plan) // 2), 0
    while plan:
        for at in range(0, len(plan), size):
            less = plan[:at] + plan[at + size :]
            tries += 1
            if tries > TRIES_MAX:
                return
            if outcome.kinds & live(outcome.seed, less).kinds:
                plan = less
                yield plan
                break
        else:
            if size == 1:
                return
            size = max(1, size // 2)


def report(outcome: Outcome, events: int) -> None:
    print(f"seed {outcome.seed} FAILS ({outcome.setting})")
    for violation in outcome.violations[:5]:
        print(f"  {violation}")
    print(*outcome.told[-events:], sep="\n")


def coverage(seen: Counter[str]) -> None:
    width = max(map(len, STATES))
    for name in STATES:
        print(f"  {name:{width}} {seen[name]}" + ("" if seen[name] else "   UNCOVERED"))
    for name in sorted(seen.keys() - set(STATES)):
        print(f"  {name:{width}} {seen[name]}")
    print("uncovered:", ", ".join(name for name in STATES if not seen[name]) or "nothing")


def recovery(seen: Counter[str], without: Counter[str] | None) -> bool:
    """Print what returning sessions found after the faults; False: too little beside worlds `without` any."""
    found, possible = seen[FOUND], max(1, seen[POSSIBLE])
    line = f"after the faults {found:,} of {possible:,} tokens were found again ({found / possible:.1%})"
    if without is None:
        print(line)
        return True
    like = without[FOUND] / max(1, without[POSSIBLE])
    is_enough = found / possible >= RECOVERED_MIN * like
    print(f"{line}, without any {without[FOUND]:,} of {without[POSSIBLE]:,} ({like:.1%})")
    if not is_enough:
        print(f"TOO FEW: at least {RECOVERED_MIN:.0%} of what worlds without faults find")
    return is_enough


def stay_on_one_core(seed: int) -> None:
    """One thread runs at a time: a baton handed to another core costs several times the life itself."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[seed % len(cores)]})


def _is_enough(asked: argparse.Namespace, done: int, took_s: float) -> bool:
    """Whether a bound is reached that was asked for: of CPU, too, for a machine that others use as well."""
    reached = [
        most is not None and now >= most
        for most, now in (
            (asked.minutes, took_s / 60),
            (asked.cpu_s, time.process_time()),
            (asked.seeds, done),
        )
    ]
    is_bounded = any(most is not None for most in (asked.minutes, asked.cpu_s, asked.seeds))
    return any(reached) if is_bounded else done >= len(asked.seed)


def _seeds(asked: list[int]) -> Iterator[int]:
    yield from asked
    yield from itertools.count(asked[-1] + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="these, and from the last one on")
    parser.add_argument("--seeds", type=int, default=None, help="how many; without any bound: those named")
    parser.add_argument("--minutes", type=float, default=None, help="new seeds for so long")
    parser.add_argument("--cpu-s", type=float, default=None, help="new seeds for so many seconds of CPU")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that fails")
    parser.add_argument(
        "--no-shrink", action="store_true", help="leave the faults of a failing seed as drawn"
    )
    parser.add_argument(
        "--twins",
        action="store_true",
        help="live each seed without faults, too: is as much found afterwards?",
    )
    parser.add_argument("--coverage", action="store_true", help="print how often each state was reached")
    parser.add_argument("--events", type=int, default=40, help="how many of the last events to print")
    asked = parser.parse_args()
    stay_on_one_core(asked.seed[0])
    began_s, failed, done, seen = time.monotonic(), list[int](), 0, Counter[str]()
    without: Counter[str] | None = Counter() if asked.twins else None
    digests: list[str] = []
    for seed in _seeds(asked.seed):
        outcome = live(seed)
        done += 1
        seen += outcome.seen
        digests.append(f"{outcome.seed}:{outcome.digest}")
        if without is not None:
            without += live(seed, []).seen
        if outcome.violations:
            failed.append(outcome.seed)
            report(outcome, asked.events)
            if not asked.no_shrink:
                plan = outcome.plan
                for plan in shrunk(outcome):
                    print(f"  still with {len(plan)} faults")
                print(f"the fewest faults ({len(plan)} of {len(outcome.plan)}):", *plan, sep="\n  ")
            print(f"again: python -m tests.world --seed {outcome.seed}")
            if not asked.keep_going:
                break
        if asked.keep_going and done % TOLD_EVERY == 0:
            print(f"{done} seeds, {time.process_time():.0f} s of CPU", flush=True)
        if _is_enough(asked, done, time.monotonic() - began_s):
            break
    took_s = time.monotonic() - began_s
    if asked.coverage:
        coverage(seen)
    has_recovered = recovery(seen, without)
    if done <= 3:
        print(*(f"digest {one}" for one in digests), sep="\n")
    print(f"{done} seeds in {took_s:.1f} s ({done / took_s:.1f} a second), failing: {failed or 'none'}")
    return 0 if has_recovered and not failed else 1
