"""What Serve's own HTTP proxy says of itself: the load balancers' contract (docs/health.md) relies on it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.proxy import PROXY_MIN_DRAINING_PERIOD_S, HTTPProxy
from ray.serve._private.proxy_request_response import ASGIProxyRequest
from ray.serve._private.proxy_router import ProxyRouter

from samovar.router.proxy.proxy_guard import CONTROL_OPEN
from tests.support.inside import handled_by


async def no_body() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


async def swallow(message: Any) -> None:
    return None


async def status_of(proxy: HTTPProxy) -> int:
    """The status of the probe that needs no key."""
    scope = {"type": "http", "method": "GET", "path": CONTROL_OPEN, "root_path": "", "headers": []}
    found = handled_by(proxy, ASGIProxyRequest(scope, no_body, swallow))
    parts = [part async for part in found.response_generator]
    status: int = parts[0]["status"]
    assert parts[-1].code == status
    return status


@pytest.fixture
def proxy() -> HTTPProxy:
    """A worker's, without the metrics of Ray that its constructor opens."""
    made: HTTPProxy = object.__new__(HTTPProxy)
    router = ProxyRouter(lambda *endpoint: None)  # type: ignore[arg-type, return-value]
    vars(made).update(_node_id="n1", _is_head=False, proxy_router=router)
    vars(made).update(_draining_start_time=None, _ongoing_requests=0)
    return made


def serves(proxy: HTTPProxy) -> None:
    vars(proxy.proxy_router).update(_route_table_populated=True)
    handle: Any = SimpleNamespace(running_replicas_populated=lambda: True)
    proxy.proxy_router.handles["samovar"] = handle  # type: ignore[index]


async def test_a_node_is_ready_with_its_routes_and_not_while_it_is_drained(proxy: HTTPProxy) -> None:
    assert await status_of(proxy) == 503, "it knows no ingress yet"
    serves(proxy)
    assert await status_of(proxy) == 200
    proxy.update_draining(True)
    assert await status_of(proxy) == 503
    proxy.update_draining(False)
    assert await status_of(proxy) == 200


async def test_a_drained_proxy_stays_for_its_connections(
    proxy: HTTPProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    serves(proxy)
    now_s = [1000.0]
    monkeypatch.setattr("ray.serve._private.proxy.time", SimpleNamespace(time=lambda: now_s[0]))
    proxy.update_draining(True)
    assert not proxy.is_drained()
    now_s[0] += PROXY_MIN_DRAINING_PERIOD_S + 1
    assert PROXY_MIN_DRAINING_PERIOD_S >= 30
    vars(proxy).update(_ongoing_requests=1)
    assert not proxy.is_drained(), "an answer is under way"
    vars(proxy).update(_ongoing_requests=0)
    assert proxy.is_drained()
