"""The authority that certifies the nodes of a rack for each other (`cluster.tls_dir`).

`samovar up` draws it once. Its key goes to every node, as Ray's token does: a node makes its own certificate
whenever Ray is started there, for the addresses that it has then. Who may read the one may read the other,
and with Ray's token any node does as it is told; so one that others have seen means two new files, and a
new authority ends all certificates at once.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from samovar.cluster.serve.secrets import write_private
from samovar.configs.tls import tls_in

AUTHORITY_DAYS = 3650
NODE_DAYS = 365
"""Ray reads a certificate when it starts, and never again: this bounds how long a node runs without that."""
CLOCKS_DIFFER = timedelta(hours=1)


def new_authority(cluster: str) -> str:
    """Return an authority's key and certificate, as PEM."""
    key, named = ec.generate_private_key(ec.SECP256R1()), _named(f"samovar {cluster}")
    made = (
        _begun(named, named, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(key) + made.public_bytes(Encoding.PEM).decode()


def certify(authority: str, addresses: Iterable[str], folder: Path) -> None:
    """Write a key, a certificate of these addresses and names, and the authority's, as `NodeTls` has them.

    Raises `OSError`; `ValueError` if `authority` is none.
    """
    data = authority.encode()
    by, by_key = x509.load_pem_x509_certificate(data), load_pem_private_key(data, None)
    if not isinstance(by_key, ec.EllipticCurvePrivateKey):
        raise ValueError("the authority's key is not of an elliptic curve")
    key, names = ec.generate_private_key(ec.SECP256R1()), list(dict.fromkeys(addresses))
    for_both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    made = (
        _begun(_named(names[0]), by.subject, key, NODE_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(for_both, critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .sign(by_key, hashes.SHA256())
    )
    files = tls_in(folder)
    # The key first: what is read between two of these does not fit together, and the former stays in use.
    write_private(files.key, _pem(key))
    write_private(files.certificate, made.public_bytes(Encoding.PEM).decode())
    write_private(files.ca, by.public_bytes(Encoding.PEM).decode())


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    serial = x509.random_serial_number()
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), serial)
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
