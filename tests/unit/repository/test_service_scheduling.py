"""A service is started by one of the gate's workers, not by each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.services.scheduling import ServiceScheduling

TESTS = [
    "tests/api/test_bad_input.py::test_f31[a.py::b]",
    "tests/api/test_bursts.py::test_one",
    "tests/api/test_bursts.py::test_two",
    "tests/api/test_tool_loop.py::TestLoop::test_it",
    "tests/e2e/test_sessions.py::test_home[tests/api/x]",
    "tests/e2e/test_sessions.py::test_hints",
    "tests/e2e/test_sessions.py::test_last",
    "tests/e2e/test_two_nodes.py::test_nixl",
    "tests/e2e/test_two_nodes.py::test_drain",
]


class Worker:
    """Notes what it is to run."""

    shutting_down = False

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="a worker")
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_tests_that_share_a_service_run_at_one_worker_in_their_order() -> None:
    workers = [Worker(), Worker()]
    options: dict[str, Any] = {"tx": ["popen", "popen"]}
    config: Any = SimpleNamespace(getvalue=options.get, option=SimpleNamespace(loadscopereorder=False))
    scheduling = ServiceScheduling(config)
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, TESTS)
    scheduling.schedule()
    api, others = workers
    assert (api.given, others.given) == ([0, 1, 2, 3], [4, 5, 6])
    scheduling.mark_test_complete(others, 4)  # two are left: a worker must know what comes after the next one
    assert others.given == [4, 5, 6, 7, 8]
    assert api.given == [0, 1, 2, 3]
