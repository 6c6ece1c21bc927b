"""What a running service consists of: torch is where a model is, and Ray's processes are those that serve."""

from __future__ import annotations

import psutil

from bench.footprint import look
from tests.support.services.service import Service

NOT_STARTED = {"dashboard", "log_monitor", "monitor"}
STARTED = {"gcs_server", "raylet", "samovar", "ray::ProxyActor", "ray::ServeController", "ray::TierActor"}


def test_only_replicas_have_torch_and_ray_starts_what_serves(service: Service) -> None:
    found = look(psutil.Process(service.process.pid)).values()
    roles = {one.role.partition(".")[0] for one in found}
    assert roles >= STARTED
    assert not roles & NOT_STARTED
    (command,) = (one for one in found if one.role == "samovar")
    assert (command.threads, command.pss < 10e6) == (1, True), "`samovar serve` sleeps once it is ready"
    with_torch = [one.role for one in found if "torch" in one.libraries]
    assert len(with_torch) == 2, with_torch
    assert all(role.startswith("ray::ServeReplica:samovar-model-") for role in with_torch)
