"""Which way blocks come from other nodes: as is configured, and never without TLS where nodes speak it."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.cache_tiers.node.build import build_link
from samovar.cache_tiers.transport import LinkDown
from samovar.configs.sections import PeerSettings
from samovar.configs.tls import tls_in


def test_nixl_is_the_way_where_nodes_speak_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert build_link(PeerSettings(), "node:1").state == "nixl"
    assert build_link(PeerSettings(transport="ray"), "node:1").state == "ray: as configured"


def test_nixl_is_left_out_where_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tls_in(Path("/x")).environment().items():
        monkeypatch.setenv(name, value)
    link = build_link(PeerSettings(transport="nixl"), "node:1")
    assert link.state == "ray: between nodes is TLS, which UCX has not"
    with pytest.raises(LinkDown, match="TLS"):
        link.get()
