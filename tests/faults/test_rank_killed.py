"""A service whose replicas have two ranks each, as Ray places them: one rank is killed in mid-answer.

The quick twin, without Ray: `tests/unit/replicas/ranks/test_engine.py`.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.engines.tiny_models import make_tiny_model
from tests.support.services.service import Service, serving, until

RANK = r"ray::RankServer"
TOKENS = 1500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("ranks")
    model = make_tiny_model(folder / "model", "llama", q_heads=8, kv_heads=4)
    flags = {
        "model": str(model),
        "replicas": "2",
        "model.dtype": "float32",
        "engine.device": "cpu",
        "engine.threads": "1",
        "engine.tensor-parallel": "2",
        "engine.kv-groups": "2",
        "engine.stuck-step-s": "20",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    with serving(folder / "out.txt", *words) as service:
        yield service


def answer(service: Service, kill_at: int | None = None) -> str:
    """One greedy answer; after `kill_at` pieces of it the busiest rank is killed."""
    pids, text = service.pids_of(RANK), ""
    before = {pid: psutil.Process(pid).cpu_times().user for pid in pids}
    stream = service.openai().completions.create(
        model="model",
        prompt="Once upon a time",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for pieces, chunk in enumerate(stream, 1):
        text += chunk.choices[0].text if chunk.choices else ""
        if pieces == kill_at:
            busiest = max(pids, key=lambda pid: psutil.Process(pid).cpu_times().user - before[pid])
            os.kill(busiest, signal.SIGKILL)
    return text


def test_a_killed_rank_costs_a_failover_and_no_wrong_token(service: Service) -> None:
    until("two ranks run", lambda: len(service.pids_of(RANK)) == 2, 60)
    whole, old = answer(service), set(service.pids_of(RANK))
    assert answer(service) == whole
    assert answer(service, kill_at=5) == whole
    assert service.total("samovar_failovers_total", outcome="resumed") == 1
    until("the replica is replaced, with both of its ranks", lambda: len(service.pids_of(RANK)) == 2, 120)
    assert set(service.pids_of(RANK)) != old
    assert answer(service) == whole


def test_of_a_killed_replica_no_folder_is_left(service: Service) -> None:
    until("two ranks run", lambda: len(service.pids_of(RANK)) == 2, 120)
    made, killed = folders(), service.replica_pids()[0]
    os.kill(killed, signal.SIGKILL)
    until("its folder is gone", lambda: made - folders(), 60)
    until("another replica is there", lambda: len(service.pids_of(RANK)) == 2 and folders() - made, 120)


def folders() -> set[Path]:
    """Where the ranks of replicas meet."""
    return set(Path(tempfile.gettempdir()).glob("samovar-ranks-*"))
