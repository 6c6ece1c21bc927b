"""Seeds one after the other: what they reach, which of them fail, and with how few faults they still do."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator

from tests.world.faults import KINDS, Fault
from tests.world.life import Outcome, live

TRIES_MAX = 60

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
    *(f"erasure: {outcome}" for outcome in ("done", "goes on", "the door died", "unreachable tier", "clear")),
    *(f"erasure: {error}" for error in ("PeerLost", "PeerLate", "replies fails", "documents fails")),
    *(f"client: {error}" for error in ("PeerLost",)),
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--seeds", type=int, default=None, help="how many; default: one, or as --minutes says"
    )
    parser.add_argument("--minutes", type=float, default=None, help="new seeds for so long")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that fails")
    parser.add_argument(
        "--no-shrink", action="store_true", help="leave the faults of a failing seed as drawn"
    )
    parser.add_argument("--coverage", action="store_true", help="print how often each state was reached")
    parser.add_argument("--events", type=int, default=40, help="how many of the last events to print")
    asked = parser.parse_args()
    began_s, failed, done, seen = time.monotonic(), list[int](), 0, Counter[str]()
    digests: list[str] = []
    while True:
        outcome = live(asked.seed + done)
        done += 1
        seen += outcome.seen
        digests.append(f"{outcome.seed}:{outcome.digest}")
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
        if asked.minutes is not None and time.monotonic() - began_s < 60 * asked.minutes:
            continue
        if asked.minutes is not None or done >= (asked.seeds or 1):
            break
    took_s = time.monotonic() - began_s
    if asked.coverage:
        coverage(seen)
    if done <= 3:
        print(*(f"digest {one}" for one in digests), sep="\n")
    print(f"{done} seeds in {took_s:.1f} s ({done / took_s:.1f} a second), failing: {failed or 'none'}")
    return 1 if failed else 0
