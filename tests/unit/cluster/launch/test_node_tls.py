"""TLS between the nodes of a rack: who makes which file, who refuses to, what an exchange of them does."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from samovar.cluster.errors import StartFailed
from samovar.cluster.launch import node_setup
from samovar.cluster.launch.authority import certify, new_authority
from samovar.cluster.launch.node_setup import NodeSetupFailed, set_up_tls
from samovar.cluster.launch.render import render
from samovar.cluster.launch.settings import RenderFailed, node_settings
from samovar.cluster.launch.up import ClusterHome, cleaning
from samovar.cluster.serve.preflight import check_node_tls, enter_tls
from samovar.configs.cluster import ClusterSettings
from samovar.configs.loader import ConfigError, load
from samovar.configs.tls import CertificateRefused, NodeTls, node_tls, tls_in
from tests.support.launch_examples import NODE_DIR, aws, outputs, rack

HERE = "127.0.0.1"
ON = "--cluster.tls-dir=~/samovar-tls"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(node_setup, "own_address", lambda: "10.0.0.7")
    (tmp_path / "samovar").mkdir()
    return tmp_path


def brought(home: Path, authority: str) -> Path:
    """What `samovar up` has copied; returns `cluster.tls_dir`."""
    (home / "samovar/authority.pem").write_text(authority)
    return home / "samovar-tls"


def certificate(files: NodeTls) -> x509.Certificate:
    return x509.load_pem_x509_certificate(files.certificate.read_bytes())


def test_a_node_certifies_itself_for_its_addresses(home: Path) -> None:
    folder = brought(home, new_authority("tea"))
    set_up_tls(folder, home)
    files = tls_in(folder)
    for address in ("10.0.0.7", HERE, "localhost"):
        files.check(address)
    with pytest.raises(CertificateRefused, match=r"10\.0\.0\.8"):
        files.check("10.0.0.8")
    for path in (files.key, home / "samovar/authority.pem"):
        assert path.stat().st_mode & 0o077 == 0
    assert "PRIVATE" not in files.ca.read_text()
    first = certificate(files).serial_number
    set_up_tls(folder, home)  # whenever Ray is started
    assert certificate(files).serial_number != first


def test_a_certificate_of_a_node_certifies_nobody_else(home: Path) -> None:
    folder = brought(home, new_authority("tea"))
    set_up_tls(folder, home)
    files, theirs = tls_in(folder), home / "theirs"
    certify(files.key.read_text() + files.certificate.read_text(), (HERE,), theirs)
    forged = tls_in(theirs)
    chain = forged.certificate.read_text() + files.certificate.read_text()
    forged.certificate.write_text(chain)
    with pytest.raises(CertificateRefused, match="CA cert"):
        NodeTls(files.ca, forged.certificate, forged.key).check(HERE)


def test_another_authority_ends_all_certificates_of_the_former(home: Path) -> None:
    folder = brought(home, new_authority("tea"))
    set_up_tls(folder, home)
    former = tls_in(home / "former")
    former.ca.parent.mkdir()
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (home / "former" / name).write_bytes((folder / name).read_bytes())
    set_up_tls(brought(home, new_authority("tea")), home)
    with pytest.raises(CertificateRefused):
        NodeTls(tls_in(folder).ca, former.certificate, former.key).check(HERE)


@pytest.mark.parametrize(
    ("authority", "told"), [(None, "Run `samovar up` again"), ("no PEM", "no certificate for this node")]
)
def test_without_an_authority_ray_is_not_started(home: Path, authority: str | None, told: str) -> None:
    folder = home / "samovar-tls" if authority is None else brought(home, authority)
    with pytest.raises(NodeSetupFailed, match=told):
        set_up_tls(folder, home)


def test_files_of_one_s_own_are_checked_and_kept(home: Path) -> None:
    folder = home / "pki"
    with pytest.raises(NodeSetupFailed, match="no certificate for this node"):
        set_up_tls(folder, home)
    certify(new_authority("pki"), ("10.0.0.8",), folder)
    with pytest.raises(NodeSetupFailed, match=r"at 10\.0\.0\.7"):
        set_up_tls(folder, home)
    certify(new_authority("pki"), ("10.0.0.7",), folder)
    before = certificate(tls_in(folder))
    set_up_tls(folder, home)
    assert certificate(tls_in(folder)) == before


def commands(*flags: str) -> list[str]:
    tree: dict[str, Any] = render(rack(*flags), None, NODE_DIR).tree()
    return [*tree["head_start_ray_commands"], *tree["worker_start_ray_commands"]]


def test_every_node_of_a_rack_starts_ray_with_its_files(home: Path) -> None:
    with_tls, without = commands(ON), commands()
    setups = [line for line in with_tls if "node-setup" in line]
    assert len(setups) == 2
    assert all(line.endswith(" --tls-dir ~/samovar-tls") for line in setups)
    starts = [line for line in with_tls if "ray start" in line]
    assert len(starts) == 2
    for line in starts:
        assert "RAY_USE_TLS=1" in line
        for name, file in (("CA_CERT", "ca.crt"), ("SERVER_CERT", "tls.crt"), ("SERVER_KEY", "tls.key")):
            assert f"RAY_TLS_{name}=~/samovar-tls/{file}" in line  # the shell's to expand
    assert not [line for line in without if "TLS" in line or "tls" in line]


def test_the_authority_is_drawn_once_and_brought_to_nodes_that_want_it(tmp_path: Path) -> None:
    home = ClusterHome(tmp_path / "tea")
    home.write_authority(is_wanted=True)
    brought = home.node_dir / "authority.pem"
    first = brought.read_text()
    assert brought.stat().st_mode & 0o077 == 0
    home.write_authority(is_wanted=True)
    assert brought.read_text() == first
    certify(first, (HERE,), tmp_path / "tls")
    tls_in(tmp_path / "tls").check(HERE)
    home.write_authority(is_wanted=False)
    assert not brought.exists()


def test_nodes_restart_for_another_authority(tmp_path: Path) -> None:
    file, home = render(rack(ON), None, NODE_DIR), ClusterHome(tmp_path / "tea")
    home.write_authority(is_wanted=True)
    home.note_running(file, {})
    assert home.runs(file, {})
    (home.root / "authority.pem").unlink()
    home.write_authority(is_wanted=True)
    assert not home.runs(file, {})


def test_down_leaves_no_key_on_a_machine() -> None:
    removes = cleaning(rack(ON).launch)
    assert "~/samovar/authority.pem" in removes
    assert "~/samovar-tls/tls.key" in removes


def test_where_no_node_would_have_the_files_nothing_is_rendered() -> None:
    given = aws(f"--cluster.tls-dir={Path('~/samovar-tls')}")
    with pytest.raises(RenderFailed, match=r"cluster\.tls_dir.* on a rack alone"):
        render(given, outputs(), NODE_DIR)
    text = yaml.safe_dump(render(aws("--cluster.tls-dir=/etc/node"), outputs(), NODE_DIR).tree(), width=9999)
    assert text.count("--tls-dir /etc/node") == 2
    with pytest.raises(RenderFailed, match="RAY_USE_TLS and its three files in the pods"):
        node_settings(rack(ON), None, 0)


def test_what_could_not_connect_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in tls_in(tmp_path).environment():
        monkeypatch.setenv(name, "")  # and as it was, afterwards
    cluster = ClusterSettings(tls_dir=tmp_path)
    with pytest.raises(StartFailed, match=r"cluster\.tls_dir: .*ca.crt, and tls.crt"):
        enter_tls(cluster)
    certify(new_authority("tea"), ("10.0.0.7",), tmp_path)
    with pytest.raises(StartFailed, match=r"127\.0\.0\.1"):
        check_node_tls(cluster)
    check_node_tls(ClusterSettings(tls_dir=tmp_path, ray_address="auto"))
    certify(new_authority("tea"), (HERE,), tmp_path)
    enter_tls(cluster)
    assert node_tls() == tls_in(tmp_path)


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.5:5557", "tcp://[::]:5557"])
def test_kv_events_go_to_no_network_beside_tls(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.kv_events.*cluster\.tls_dir"):
        load(None, {}, ["--telemetry.kv-events", endpoint, "--cluster.tls-dir", "/x"])


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557"])
def test_kv_events_on_this_machine_may_be_beside_tls(endpoint: str) -> None:
    assert load(None, {}, ["--telemetry.kv-events", endpoint, "--cluster.tls-dir", "/x"])


def test_a_context_takes_no_older_version(home: Path) -> None:
    folder = brought(home, new_authority("tea"))
    set_up_tls(folder, home)
    for context in (tls_in(folder).open(), tls_in(folder).calling()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
