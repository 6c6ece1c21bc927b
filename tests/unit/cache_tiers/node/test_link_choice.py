"""Which way blocks come from other nodes: as is configured, and never without TLS where nodes speak it."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.cache_tiers.node.build import build_link
from samovar.cache_tiers.transport import LinkDown, TlsLink
from samovar.cluster.launch.authority import certify, new_authority
from samovar.configs.sections import PeerSettings
from samovar.configs.tls import tls_in


def test_nixl_is_the_way_where_nodes_speak_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert build_link(PeerSettings(), "node:1", "127.0.0.1").state == "nixl"
    assert build_link(PeerSettings(transport="ray"), "node:1", "127.0.0.1").state == "ray: as configured"


@pytest.fixture
def speaks_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certify(new_authority("tea"), ("127.0.0.1",), tmp_path)
    for name, value in tls_in(tmp_path).environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("speaks_tls")
def test_where_they_do_it_is_tls_of_our_own() -> None:
    link = build_link(PeerSettings(transport="nixl"), "node:1", "127.0.0.1")
    assert link.state == "tls"
    assert isinstance(link.get(), TlsLink)
    link.close()
    assert build_link(PeerSettings(transport="ray"), "node:1", "127.0.0.1").state == "ray: as configured"


@pytest.mark.usefixtures("speaks_tls")
def test_without_a_port_ray_carries_them_which_speaks_tls_too() -> None:
    link = build_link(PeerSettings(), "node:1", "192.0.2.1")  # no address of this machine
    with pytest.raises(LinkDown, match="no TLS between nodes"):
        link.get()
    assert link.state.startswith("ray: no TLS between nodes: ")
