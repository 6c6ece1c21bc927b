"""Certificates: what is refused before anything starts, and what the next handshake has."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from samovar.cluster.errors import StartFailed
from samovar.cluster.serve.preflight import check_certificate
from samovar.configs.settings import ServerSettings
from samovar.configs.tls import CertificateRefused, RenewedContext, TlsFiles
from tests.support.router.certificates import Authority


@pytest.fixture
def tea(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "tea")


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends after a whole handshake and a word of the client's; raises what one of them raises."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    ends[0].write(b"hello")
    assert ends[1].read() == b"hello"
    return ends


def trusting(authority: Authority, own: TlsFiles | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.file)
    context.check_hostname = False
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def serial(connection: ssl.SSLObject) -> str:
    told = connection.getpeercert()
    assert told is not None
    return str(told["serialNumber"])


def test_a_good_pair_passes_and_the_pinned_certificate_is_trusted_alone(tea: Authority) -> None:
    files, other = tea.issue("server", host="chat.example"), tea.issue("other", host="chat.example")
    files.check()
    shake(files.open(), files.pin())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(other.open(), files.pin())


def test_the_pinned_certificate_is_trusted_beside_no_authority_of_the_system(
    tea: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = tea.issue("server"), Authority(tea.folder, "coffee")
    monkeypatch.setenv("SSL_CERT_FILE", str(other.file))
    shake(other.issue("public").open(), ssl.create_default_context())  # the system does trust it
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(other.issue("public").open(), files.pin())
    shake(files.open(), files.pin())


def test_a_chain_in_the_file_is_shown_and_certifies_no_other(tea: Authority) -> None:
    files, sibling = tea.issue("server"), tea.issue("sibling")
    whole = files.key.read_bytes() + files.certificate.read_bytes() + tea.file.read_bytes()
    files.certificate.write_bytes("Grüße\n".encode() + whole)
    files.check()
    shake(files.open(), files.pin())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(sibling.open(), files.pin())


def test_a_file_without_a_certificate_pins_none(tea: Authority) -> None:
    files = tea.issue("server")
    files.certificate.write_bytes(files.key.read_bytes())
    with pytest.raises(CertificateRefused, match=r"server\.pem: it has no certificate"):
        files.pin()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_are_refused(tea: Authority, version: ssl.TLSVersion) -> None:
    files = tea.issue("server")
    client = trusting(tea)
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="deprecated"):
        client.minimum_version = client.maximum_version = version
    with pytest.raises(ssl.SSLError):
        shake(files.open(), client)


def _expired(tea: Authority) -> TlsFiles:
    return tea.issue("server", days=-1)


def _of_two(tea: Authority) -> TlsFiles:
    return TlsFiles(tea.issue("one").certificate, tea.issue("two").key)


def _locked(tea: Authority) -> TlsFiles:
    return tea.issue("server", passphrase="samovar")


def _away(tea: Authority) -> TlsFiles:
    return TlsFiles(tea.issue("server").certificate, tea.folder / "nowhere.key")


@pytest.mark.parametrize("make", [_expired, _of_two, _locked, _away])
def test_what_nobody_could_connect_to_is_refused_before_the_start(tea: Authority, make: object) -> None:
    assert callable(make)
    files = make(tea)
    with pytest.raises(CertificateRefused, match=str(files.certificate)):
        files.check()


def test_the_next_handshake_has_the_files_as_they_are(tea: Authority) -> None:
    files, client = tea.issue("server"), trusting(tea)
    renewed = RenewedContext(files)
    first = serial(shake(renewed.context, client)[0])
    new = tea.issue("new")
    shutil.copy(new.certificate, files.certificate)  # its key is still the former one's
    assert serial(shake(renewed.context, client)[0]) == first
    files.key.unlink()
    assert serial(shake(renewed.context, client)[0]) == first
    shutil.copy(new.key, files.key)
    assert serial(shake(renewed.context, client)[0]) != first


@pytest.fixture
def asking(tea: Authority) -> TlsFiles:
    """A server's files, whose clients need certificates of `tea`."""
    server = tea.issue("server")
    ca = tea.folder / "clients.ca"
    ca.write_bytes(tea.file.read_bytes())
    return TlsFiles(server.certificate, server.key, ca)


def test_a_client_is_known_by_its_certificate_or_is_nobody(tea: Authority, asking: TlsFiles) -> None:
    known = shake(asking.open(), trusting(tea, tea.issue("client")))[1]
    assert known.getpeercert()
    nobody = shake(asking.open(), trusting(tea))[1]
    assert not nobody.getpeercert()


def test_wrong_clients_end_with_the_handshake(tea: Authority, asking: TlsFiles, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "coffee").issue("stranger")
    for wrong in (stranger, tea.issue("late", days=-1)):
        with pytest.raises(ssl.SSLError):
            shake(asking.open(), trusting(tea, wrong))


def test_a_revoked_client_is_refused_from_the_next_handshake_on(tea: Authority, asking: TlsFiles) -> None:
    good, bad = tea.issue("good"), tea.issue("bad")
    renewed = RenewedContext(asking)
    shake(renewed.context, trusting(tea, bad))
    assert asking.client_ca is not None
    with asking.client_ca.open("ab") as file:
        file.write(tea.revoke("bad"))
    with pytest.raises(ssl.SSLError, match="callback failed"):  # it began before there was a list
        shake(renewed.context, trusting(tea, bad))
    with pytest.raises(ssl.SSLError, match="certificate revoked"):
        shake(renewed.context, trusting(tea, bad))
    shake(renewed.context, trusting(tea, good))


def test_a_key_may_be_in_the_certificate_s_file(tea: Authority) -> None:
    files = tea.issue("server")
    files.certificate.write_bytes(files.certificate.read_bytes() + files.key.read_bytes())
    server = ServerSettings(tls_certificate=files.certificate)
    assert server.tls is not None
    server.tls.check()


@pytest.mark.parametrize("given", ["tls_key", "tls_client_ca"])
def test_who_counts_on_https_is_not_served_without(given: str) -> None:
    with pytest.raises(StartFailed, match="tls_certificate is empty"):
        check_certificate(ServerSettings.model_validate({given: "/a"}))


def test_urls_say_how_they_are_served() -> None:
    tls = {"tls_certificate": "/a", "tls_key": "/b"}
    assert ServerSettings.model_validate(tls).url_at("::1") == "https://[::1]:8000"
    assert ServerSettings().url_at("127.0.0.1") == "http://127.0.0.1:8000"
