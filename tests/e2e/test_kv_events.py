"""A service that tells routers of its blocks: a subscriber follows conversations and a deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.kv_subscriber import Subscriber, free_ports, until
from tests.support.services.guests import Conversation
from tests.support.services.tier_service import tier_service

# The gate has the same with an engine and a node in one process: tests/unit/replicas/start/test_kv_events.py.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.guarantee("G12")
def test_a_router_hears_of_conversations_and_of_their_deletion(tmp_path: Path) -> None:
    port = free_ports(8)[0]
    erased, kept = Conversation(1), Conversation(2)
    with tier_service(tmp_path, {"telemetry.kv-events": f"tcp://127.0.0.1:{port}"}) as service:
        with Subscriber(port) as tiers, Subscriber(port + 1) as replica:
            for one in (erased, kept, erased, kept):
                service.turn(one)
            service.settle()
            until(lambda: bool(tiers.heard.at("STORAGE")), tiers.replay)
            until(lambda: replica.heard.at("GPU", None) >= tiers.heard.at("STORAGE"), replica.replay)
            before = replica.heard.at("GPU", None)
            assert {topic.rpartition(b"@")[2] for topic in replica.topics} == {b"SmolLM2-135M-Instruct"}
            with service.http() as http:
                assert http.delete(f"/v1/sessions/{erased.session}").status_code == 200
            until(
                lambda: (
                    replica.heard.at("GPU", None) < before
                    and tiers.heard.at("STORAGE") <= replica.heard.at("GPU", None)
                ),
                tiers.replay,
                replica.replay,
            )
            left = replica.heard.at("GPU", None)
            assert left, "the other conversation is there"
        with Subscriber(port + 1, is_late=True) as late:
            until(lambda: late.heard.at("GPU", None) == left, late.replay)
