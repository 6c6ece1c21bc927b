"""What a pod that is stopped still waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samovar.cache_tiers.messages import NodeStats
from samovar.cluster.manifests import prestop

NODE = "0" * 56
HERE = NodeStats(NODE, "one", 0, ())


@pytest.mark.guarantee("F27")
@pytest.mark.parametrize(
    ("stats", "waits_for"),
    [
        (HERE, "the tiers"),  # they have not heard of it
        (replace(HERE, draining=True, unsaved=1, drained={"left": 0, "peer": 3}), "the tiers"),
        (replace(HERE, draining=True, drained={"left": 0, "peer": 4}), ""),
        # of a drain that was called off
        (replace(HERE, drained={"left": 0, "peer": 4}), "the tiers"),
        (None, "the tiers"),
    ],
)
def test_f27_a_pod_waits_until_nothing_is_left_to_save(
    stats: NodeStats | None, waits_for: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors: dict[str, Any] = {
        name: {"ActorClassName": name, "State": state, "Address": {"NodeID": NODE}}
        for name, state in {"Replica": "DEAD", "TierActor": "ALIVE"}.items()
    }
    monkeypatch.setattr(prestop.gcs_state, "actor_table", lambda _: actors)
    monkeypatch.setattr(prestop, "tier_actors", dict)
    answers = {} if stats is None else {NODE: stats}
    monkeypatch.setattr(prestop.rpc, "ask_all", lambda *_, **__: answers)
    assert prestop.still_here(NODE) == waits_for
    actors["Replica"]["State"] = "ALIVE"
    assert prestop.still_here(NODE) == "Replica"
