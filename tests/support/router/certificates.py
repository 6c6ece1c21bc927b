"""Certificates for tests, by authorities that are made on the spot."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from samovar.configs.tls import NodeTls, TlsFiles

DAY = timedelta(days=1)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class Authority:
    """Signs certificates, and says which of them are revoked. Its own is `folder/NAME.ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._serials: dict[str, int] = {}
        self.file = folder / f"{name}.ca"
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder(_named(name), _named(name), self._key.public_key(), 1)
            .not_valid_before(now - DAY)
            .not_valid_after(now + 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file.write_bytes(made.public_bytes(Encoding.PEM))

    def issue(self, name: str, *, days: int = 1, host: str = "127.0.0.1", passphrase: str = "") -> TlsFiles:
        """A certificate of `host` and its key; with negative `days` one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        address = x509.IPAddress(ipaddress.ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
        self._serials[name] = x509.random_serial_number()
        made = (
            x509.CertificateBuilder(_named(self.name), _named(name), key.public_key(), self._serials[name])
            .not_valid_before(now - 10 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        kept = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
        files.certificate.write_bytes(made.public_bytes(Encoding.PEM))
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, kept))
        return files

    def revoke(self, name: str) -> bytes:
        """The authority's list of revoked certificates, with this one on it."""
        now = datetime.now(UTC)
        one = x509.RevokedCertificateBuilder(self._serials[name], now - DAY).build()
        listed = x509.CertificateRevocationListBuilder(_named(self.name), now - DAY, now + DAY)
        listed = listed.add_revoked_certificate(one)
        return listed.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def node(authority: Authority, name: str, *, days: int = 1, host: str = "127.0.0.1") -> NodeTls:
    """A node with a certificate by `authority`, whom it trusts."""
    files = authority.issue(name, days=days, host=host)
    return NodeTls(authority.file, files.certificate, files.key)


class Anonymous(NodeTls):
    """Trusts the authority, and has no certificate that it shows."""

    def calling(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)


def _none(tea: Authority, other: Authority) -> NodeTls:
    files = node(tea, "none")
    return Anonymous(tea.file, files.certificate, files.key)


def _expired(tea: Authority, other: Authority) -> NodeTls:
    return node(tea, "late", days=-1)


def _of_another(tea: Authority, other: Authority) -> NodeTls:
    files = other.issue("stranger")
    return NodeTls(tea.file, files.certificate, files.key)


def _revoked(tea: Authority, other: Authority) -> NodeTls:
    files = node(tea, "bad")
    listed = tea.folder / "one.ca"
    listed.write_bytes(tea.file.read_bytes() + tea.revoke("bad"))
    return files


WRONG = (_none, _expired, _of_another, _revoked)
"""Nodes whom one with an authority `tea` must not believe. The first only as callers."""
